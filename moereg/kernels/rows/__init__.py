"""Rows of tokens: sorted by expert, cut into tiles, copied and summed."""
