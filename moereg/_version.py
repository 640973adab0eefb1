"""The version, from which package metadata is made."""

__version__ = "0.2.0"
