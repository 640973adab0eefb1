"""Choosing a backend."""
