"""The conformance kit: what a backend's author runs to check a backend against the reference."""
