"""Faults in the source, planted one at a time: `python -m tests.mutants`."""
