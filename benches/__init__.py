"""Benches: `bench_*.py` for any machine, `h200` for one GPU, stored `results`, and `report`, which shows these."""
