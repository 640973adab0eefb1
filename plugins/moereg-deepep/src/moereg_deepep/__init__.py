"""DeepSeek's DeepEP for moereg: tokens move between the ranks of a group by its kernels."""
