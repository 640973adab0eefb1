"""The implementation of the `flashinfer_*` backends; `moereg/backends/flashinfer_moe.py` has their claims."""
