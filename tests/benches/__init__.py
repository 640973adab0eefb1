"""The benches."""
