"""Quantizing."""
