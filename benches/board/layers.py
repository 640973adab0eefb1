"""The rows of the board: layers, and for each its numbers of tokens and routings."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from moereg.bench.inputs import ROUTINGS
from moereg.bench.points import Point
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem

__all__ = ["CPU_LAYERS", "GPU_LAYERS", "BoardLayer", "Point", "layers_of"]


@dataclasses.dataclass(frozen=True)
class BoardLayer:
    """One layer in one scheme.

    Attributes:
        layer: The name in the tables.
        scheme: Of the checkpoint.
        keywords: Of `MoEProblem`, but for the scheme and the most tokens.
        points: Its rows in the order of measuring: uniform routing first, since a budget may end before the rest.
    """

    layer: str
    scheme: str
    keywords: Mapping[str, Any]
    points: tuple[Point, ...]

    @property
    def name(self) -> str:
        """Unique, and what `--layers` takes."""
        return f"{self.layer}:{self.scheme}".replace(" ", "-")

    def problem(self) -> MoEProblem:
        """The layer, for calls of up to the most tokens of its rows."""
        most = max(point.tokens for point in self.points)
        return MoEProblem(**self.keywords, quant=self.scheme, max_num_tokens=most)

    def limited(self, tokens: Collection[int] | None, routings: Collection[str] | None) -> BoardLayer:
        """The layer with the rows of these numbers of tokens and routings alone; None keeps all."""
        kept = (
            point
            for point in self.points
            if (tokens is None or point.tokens in tokens) and (routings is None or point.routing in routings)
        )
        return dataclasses.replace(self, points=tuple(kept))


def _points(uniform: Iterable[int], skewed: Iterable[int]) -> tuple[Point, ...]:
    others = [Point(routing, tokens) for routing in ROUTINGS[1:] for tokens in skewed]
    return (*(Point(ROUTINGS[0], tokens) for tokens in uniform), *others)


def _model(
    model: str,
    scheme: str = "unquantized",
    suffix: str = "",
    uniform: tuple[int, ...] = (1, 16, 64, 256, 1024, 4096),
    skewed: tuple[int, ...] = (64, 1024),
    **changes: Any,
) -> BoardLayer:
    keywords = {**get_shape(model).problem_keywords(), **changes}
    return BoardLayer(f"{model}{suffix}", scheme, MappingProxyType(keywords), _points(uniform, skewed))


def _shard(model: str, scheme: str, ranks: int) -> BoardLayer:
    columns = get_shape(model).problem_keywords()["intermediate_size"] // ranks
    return _model(model, scheme, f" TP{ranks}", uniform=(1, 16, 256, 4096), skewed=(), intermediate_size=columns)


# Users' batches are not uniform: where launch parameters go by what each expert has, every number of tokens shows it.
_SKEWED: Final = (16, 64, 256, 1024, 4096)

# The layers that decide the priorities come first, since a budget may end before the last. gpt-oss has its biases and
# its clamped activation; "plain" is SwiGLU without bias in its sizes, for kernels that compute nothing else. "EP8" is
# what one rank of eight holds, "TP8" a shard of tensor parallelism over eight: all experts, an eighth of their columns.
# deepseek-v3 is 11 GB in 8 bits, so fewer copies fit beside each other.
GPU_LAYERS: Final = (
    _model("qwen3-30b-a3b", skewed=_SKEWED),
    _model("mixtral-8x7b", skewed=_SKEWED),
    _model("gpt-oss-120b", skewed=_SKEWED),
    _model("qwen3-30b-a3b", "fp8_block128"),
    _model("sonic-120b"),
    _model("olmoe-1b-7b"),
    _model("deepseek-v3", "fp8_block128", " EP8", num_local_experts=32),
    _model("qwen3-30b-a3b", "fp8_tensor_static", skewed=(1024,)),
    _model("qwen3-30b-a3b", "fp8_channel_token", skewed=(1024,)),
    _model("gpt-oss-120b", "mxfp4_w4a16", skewed=(1024,)),
    _model("deepseek-v3", "fp8_block128", uniform=(1, 64, 1024, 4096), skewed=(1024,)),
    _model("qwen3-30b-a3b", "int4_w4a16_g128", skewed=(1024,)),
    _model("mixtral-8x7b", "int4_w4a16_g128", skewed=(1024,)),
    _model("qwen3-30b-a3b", "nvfp4_w4a16", uniform=(1, 64, 1024), skewed=()),
    _model("qwen3-30b-a3b", "int8_w8a8", uniform=(1, 64, 1024), skewed=()),
    _model("qwen3-30b-a3b", "int4_w4a8_g128", uniform=(1, 64, 1024), skewed=()),
    _model("gpt-oss-120b", suffix=" plain", skewed=(), activation="silu", has_bias=False),
    *(_shard("qwen3-235b-a22b", "fp8_tensor_static", ranks) for ranks in (2, 4, 8)),
    _shard("deepseek-v3", "fp8_block128", 8),
    _shard("mixtral-8x7b", "unquantized", 4),
    _shard("gpt-oss-120b", "mxfp4_w4a16", 2),
)

_SMALL: Final = MappingProxyType({"num_experts": 32, "hidden_size": 1024, "intermediate_size": 512, "top_k": 4})
_CPU_TOKENS: Final = (1, 16, 128)


def _small(
    layer: str = "small", scheme: str = "unquantized", skewed: tuple[int, ...] = (128,), **changes: Any
) -> BoardLayer:
    return BoardLayer(layer, scheme, MappingProxyType({**_SMALL, **changes}), _points(_CPU_TOKENS, skewed))


# 100 MB in bf16: beyond the caches of most CPUs, and measured in minutes.
CPU_LAYERS: Final = (
    _small(),
    _small("small fp32", dtype="float32"),
    _small("small swigluoai", activation="swigluoai", has_bias=True),
    _small("small batched", activation_format="batched", skewed=()),
    *(
        _small(scheme=scheme, skewed=())
        for scheme in ("fp8_block128", "int8_w8a8", "int4_w4a16_g128", "mxfp4_w4a16", "nvfp4_w4a16")
    ),
)


def layers_of(device_type: str) -> tuple[BoardLayer, ...]:
    """The layers that a kind of device is measured on."""
    return CPU_LAYERS if device_type == "cpu" else GPU_LAYERS
