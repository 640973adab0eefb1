"""Benches: pytest-benchmark files and tables measured on named hardware."""
