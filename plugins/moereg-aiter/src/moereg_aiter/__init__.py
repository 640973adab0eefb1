"""AMD's AITER for moereg: MoE kernels for Instinct GPUs."""
