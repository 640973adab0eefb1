"""Shared by several tests."""
