"""Tables for `tests/test_oracle_parity.py`: what the selection functions of vLLM choose, and what moereg does."""
