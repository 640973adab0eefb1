"""Models with their published sizes and random weights, and the cases that are measured with each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from moereg.cli._whole_model import EAGER, Case

__all__ = ["CONTEXT", "EAGER", "MODELS", "Case", "Model", "cases_of", "make_model"]

CONTEXT: Final = 512
"""Tokens of each sequence before a decode step."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to measure.

    Attributes:
        config: Fields of its config.json that decide sizes and numbers.
        prefill: (sequences, tokens of each) of the prompts.
        decode: Sequences of decode steps.
        quant: Scheme whose numbers the experts' weights are rounded to, to be run quantized as well.
    """

    config: Mapping[str, Any]
    prefill: Sequence[tuple[int, int]] = ((1, 512), (1, 4096), (4, 4096))
    decode: Sequence[int] = (1, 16, 64)
    quant: str | None = None


_QWEN3: Final = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": False,
}
_TINY: Final = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
}

_FULL: Final[Mapping[str, Model]] = {
    "qwen3-30b-a3b": Model(_QWEN3),
    "gpt-oss-20b": Model(
        {
            "model_type": "gpt_oss",
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
        },
        quant="mxfp4_w4a16",
    ),
    "olmoe-1b-7b": Model(
        {
            "model_type": "olmoe",
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "pad_token_id": 1,
            "eos_token_id": 50279,
        }
    ),
    "mixtral-8x7b": Model(
        {
            "model_type": "mixtral",
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        }
    ),
}


def _tiny(model: Model) -> Model:
    """A model of the same kind, small enough for any CPU."""
    config = {**model.config, **{key: value for key, value in _TINY.items() if key in model.config}}
    return dataclasses.replace(model, config=config, prefill=((1, 16), (2, 16)), decode=(1, 2))


MODELS: Final[Mapping[str, Model]] = {
    **_FULL,
    "tiny": _tiny(_FULL["qwen3-30b-a3b"]),
    **{f"tiny-{name}": _tiny(model) for name, model in _FULL.items()},
}


def cases_of(model: Model, device: torch.device, compiles: bool) -> list[Case]:
    """Cases in the order of what a reader asks first."""
    prefill = [Case("prefill", "eager", *prompt) for prompt in model.prefill]
    decode = {
        mode: [Case("decode", mode, batch, CONTEXT) for batch in model.decode]
        for mode in ("graph", "eager", "compiled")
    }
    graphs = decode["graph"] if device.type == "cuda" else []
    return [*graphs, *prefill, *decode["eager"], *(decode["compiled"][:2] if compiles else [])]


def make_model(model: Model, device: torch.device) -> Any:
    """The model with random weights in bf16, drawn on the device; its experts run eager."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(model.config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    torch.manual_seed(0)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation=EAGER)
    return made.eval()
