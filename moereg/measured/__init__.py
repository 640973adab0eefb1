"""Packs: measured times of cells on one machine, and the cells that they choose."""
