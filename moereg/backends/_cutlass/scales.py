"""Expands scales of 8-bit weights to one per row."""

from __future__ import annotations

import torch


def row_scales(scale: torch.Tensor, num_rows: int) -> torch.Tensor:
    """One scale per matrix row, from per-row, per-tensor or per-half scales.

    Args:
        scale: fp32; [E, rows, 1], [E], or [E, 2] for the halves of w13.
        num_rows: Rows of the matrix.

    Returns:
        [E, rows] fp32, contiguous and in its own storage.
    """
    flat = scale.flatten(1) if scale.dim() > 1 else scale.unsqueeze(1)
    return flat.repeat_interleave(num_rows // flat.shape[1], dim=1).contiguous()
