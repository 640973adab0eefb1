"""The version; the package metadata is made from it."""

__version__ = "0.2.0"
