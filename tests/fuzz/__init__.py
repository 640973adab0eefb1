"""Contracts about bad input, and what draws the inputs: `make fuzz`."""
