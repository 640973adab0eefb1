"""Writes the gptq* directories with GPTQModel 7.6.0: its packer, its export to version 1 and its dequantizer.

Run as `python -m tests.checkpoints.generate.gptq` where that library is.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, Final

import gptqmodel
import torch
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

from tests.checkpoints.generate.generating import Model, save_packed

# Directory to settings: group size, whether symmetric, whether columns are ordered, version.
CHECKPOINTS: Final[dict[str, dict[str, Any]]] = {
    "gptq": {"group_size": 32, "sym": True, "desc_act": False, "checkpoint_format": "gptq"},
    "gptq_asymmetric": {"group_size": 32, "sym": False, "desc_act": False, "checkpoint_format": "gptq"},
    "gptq_v2": {"group_size": 32, "sym": False, "desc_act": False, "checkpoint_format": "gptq_v2"},
    "gptq_channel": {"group_size": -1, "sym": True, "desc_act": True, "checkpoint_format": "gptq"},
}


def _packed(settings: dict[str, Any], matrix: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a module and their numbers; scales from minima and maxima."""
    rows, columns = matrix.shape
    size = columns if settings["group_size"] == -1 else settings["group_size"]
    groups = matrix.unflatten(1, (-1, size))
    if settings["sym"]:
        scales = groups.abs().amax(2) / 7.5
        zeros = torch.full_like(scales, 8)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = (high - low) / 15
        zeros = torch.round(-low / scales)
    scales = scales.half().float()
    linear = torch.nn.Linear(columns, rows, bias=False)
    linear.weight.data = matrix.clone()
    keywords = {key: settings[key] for key in ("group_size", "sym", "desc_act")}
    module = TorchLinear(bits=4, in_features=columns, out_features=rows, **keywords)
    module.pack_original(linear, scales, zeros, torch.arange(columns, dtype=torch.int32) // size)
    module.post_init()
    restored = module.dequantize_weight().T
    if settings["checkpoint_format"] == "gptq":
        convert_gptq_v2_to_v1_format_module(module, SimpleNamespace(bits=4, pack_dtype=torch.int32))
    return {name: getattr(module, name) for name in ("qweight", "qzeros", "scales", "g_idx")}, restored


def main() -> None:
    for directory, settings in CHECKPOINTS.items():
        config = {"quant_method": "gptq", "bits": 4, "pack_dtype": "int32", "lm_head": False, **settings}
        library = f"GPTQModel {gptqmodel.__version__}"
        pack = functools.partial(_packed, settings)
        save_packed(directory, Model(dtype=torch.float16), config, pack, library)


if __name__ == "__main__":
    main()
