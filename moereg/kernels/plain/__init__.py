"""Layers out of torch's own operators, for any device."""
