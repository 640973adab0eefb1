"""Writes awq with AutoAWQ 0.2.9: its packer and its dequantizer. Scales and zero points are as its quantizer has them.

Run as `python -m tests.checkpoints.generate.awq` where that library is.
"""

from __future__ import annotations

import importlib.metadata

import torch
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm

from tests.checkpoints.generate.generating import Model, save_packed

GROUP_SIZE = 32


CONFIG = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP_SIZE,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["mlp.gate"],
}


def _packed(matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    groups = matrix.unflatten(1, (-1, GROUP_SIZE))
    low, high = groups.amin(2), groups.amax(2)
    scales = ((high - low).clamp(min=1e-5) / 15).half().float()
    zeros = (-torch.round(low / scales)).clamp(0, 15)
    spread_scales, spread_zeros = (value.repeat_interleave(GROUP_SIZE, 1) for value in (scales, zeros))
    codes = (torch.round(matrix / spread_scales) + spread_zeros).clamp(0, 15)
    linear = torch.nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
    # The packer rounds, so it wants the numbers that are in range already.
    linear.weight.data = (codes - spread_zeros) * spread_scales
    packed = WQLinear_GEMM.from_linear(linear, 4, GROUP_SIZE, scales=scales.T, zeros=zeros.T.contiguous())
    found = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    return found, dequantize_gemm(found["qweight"], found["qzeros"], found["scales"], 4, GROUP_SIZE).T


if __name__ == "__main__":
    library = f"AutoAWQ {importlib.metadata.version('autoawq')}"
    save_packed("awq", Model(dtype=torch.float16), CONFIG, _packed, library)
