"""Scales of 8-bit weights as kernels with one scale for each row take them."""

from __future__ import annotations

import torch


def row_scales(scale: torch.Tensor, num_rows: int) -> torch.Tensor:
    """One scale for each row of a matrix, whatever the checkpoint's rows share.

    Args:
        scale: fp32; [E, rows, 1], [E], or [E, 2] for the halves of w13.
        num_rows: Of the matrix.

    Returns:
        [E, rows] fp32, contiguous and at its own address.
    """
    flat = scale.flatten(1) if scale.dim() > 1 else scale.unsqueeze(1)
    return flat.repeat_interleave(num_rows // flat.shape[1], dim=1).contiguous()
