"""Rows quantized on the device, and products of 8-bit and 4-bit rows with such weights."""
