"""Whole models of transformers on moereg and on transformers' own experts: `python -m benches.whole_model`."""
