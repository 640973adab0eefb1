"""Backends against the libraries that they call."""
