"""The project's own rules."""
