"""How vLLM chooses, as plain functions of what an engine is told.

Two of its functions are modeled branch by branch, those for unquantized and for nvfp4 layers. For other schemes there
is the order in which vLLM 0.33 asks its backends. Backends have moereg's names; `triton~` is an emulation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final

_BATCHED: Final = "_batched"
_UNQUANTIZED_NAMES: Final = ("triton", "flashinfer_trtllm", "flashinfer_cutlass", "aiter")
# The order in which those of FlashInfer are tried where it is forced on, b12x among them.
_FLASHINFER_FP4: Final = tuple(
    ["flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_cutedsl", "flashinfer_cutedsl_batched", "flashinfer_b12x"]
)
_NVFP4_ORDER: Final = tuple(
    [
        "flashinfer_trtllm",
        "flashinfer_cutedsl",
        "flashinfer_cutedsl_batched",
        "flashinfer_cutlass",
        "vllm_cutlass",
        "marlin",
        "triton~",
    ]
)
_NVFP4_NAMES: Final = (*_NVFP4_ORDER, "flashinfer_b12x")
_APPLIES_CLAMP: Final = ("flashinfer_trtllm",)
# The values of the variable that names one of FlashInfer.
_PINNED: Final = {
    "latency": "flashinfer_trtllm",
    "throughput": "flashinfer_cutlass",
    "masked_gemm": "flashinfer_cutedsl",
}


@dataclasses.dataclass(frozen=True)
class Layer:
    """What an engine is told of a layer and of its choice.

    Attributes:
        kind: Kind of platform.
        arch: Its architecture.
        scheme: Of the layer.
        supports: Backends whose predicate says yes, in the format of activations that is asked for.
        is_batched: Whether tokens are laid out by expert.
        is_swigluoai: Whether the activation is gpt-oss's.
        has_clamp: Whether the layer clamps its activation.
        num_data_parallel: Ranks that hold the same layer.
        num_expert_parallel: Ranks that share its experts.
        backend: The one asked for, or `auto`.
        variables: Variables of the environment that are set.
    """

    kind: str
    arch: str
    scheme: str
    supports: tuple[str, ...]
    is_batched: bool = False
    is_swigluoai: bool = False
    has_clamp: bool = False
    num_data_parallel: int = 1
    num_expert_parallel: int = 1
    backend: str = "auto"
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def supported(self, name: str) -> bool:
        """Whether a backend's predicate says yes."""
        return name.endswith(_BATCHED) == self.is_batched and name.removesuffix(_BATCHED) in self.supports

    def is_on(self, variable: str) -> bool | None:
        """What a variable says; None if it is not set."""
        value = self.variables.get(variable)
        return None if value is None else value == "1"


Order = tuple[str, ...]
"""All backends that an oracle would accept, best first; the first is its answer, and none means an error."""


def _among(order: Order, layer: Layer) -> Order:
    """The answer out of an order: those that support the layer."""
    return tuple(backend.removesuffix(_BATCHED) for backend in order if layer.supported(backend))


def _moved_last(order: tuple[str, ...], *names: str) -> tuple[str, ...]:
    return (*(name for name in order if name not in names), *(name for name in order if name in names))


def _unquantized_order(layer: Layer) -> Order:
    if layer.kind == "xpu":
        return ("xpu_kernels", "triton")
    if layer.kind == "rocm":
        return ("aiter", "triton", "triton_batched")
    order: Order = ("flashinfer_trtllm", "flashinfer_cutlass", "triton", "triton_batched")
    if layer.arch == "sm90":
        order = _moved_last(order, "flashinfer_trtllm", "flashinfer_cutlass")
    if layer.num_data_parallel > 1:
        order = _moved_last(order, "flashinfer_cutlass")
    if layer.is_swigluoai:
        order = _moved_last(order, "flashinfer_trtllm", "flashinfer_cutlass")
    return order


def unquantized(layer: Layer) -> Order:
    """`select_unquantized_moe_backend`."""
    if layer.kind in ("cpu", "tpu", "npu"):
        return ("npu_kernels" if layer.kind == "npu" else "torch",)
    order = _unquantized_order(layer)
    if layer.backend != "auto":
        if layer.backend not in _UNQUANTIZED_NAMES:
            return ()
        return _among((layer.backend + _BATCHED * (layer.is_batched and layer.backend == "triton"),), layer)
    forced = layer.is_on("VLLM_USE_FLASHINFER_MOE_FP16")
    if forced and (value := layer.variables.get("VLLM_FLASHINFER_MOE_BACKEND")) is not None:
        pinned = _PINNED[value]
        return _among((pinned,), layer) if pinned in ("flashinfer_trtllm", "flashinfer_cutlass") else ()
    if forced:
        return _among(("flashinfer_trtllm", "flashinfer_cutlass"), layer)
    if forced is False:
        order = tuple(name for name in order if not name.startswith("flashinfer_"))
    switches = [layer.is_on(name) for name in ("VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE")]
    if switches[0] and switches[1] is not False:  # The second one is on where it is not set.
        return _among(("aiter",), layer)
    if switches != [None, None]:
        order = tuple(name for name in order if name != "aiter")
    return _among(order, layer)


def nvfp4(layer: Layer) -> Order:
    """`select_nvfp4_moe_backend`."""

    def applied(order: Order) -> Order:
        return tuple(name for name in order if not layer.has_clamp or name in _APPLIES_CLAMP)

    order = applied(_NVFP4_ORDER)
    if layer.backend != "auto":
        if layer.backend not in _NVFP4_NAMES:
            return ()
        is_variant = layer.is_batched and layer.backend == "flashinfer_cutedsl"
        return _among(applied((layer.backend + _BATCHED * is_variant,)), layer)
    forced = layer.is_on("VLLM_USE_FLASHINFER_MOE_FP4")
    if forced and (value := layer.variables.get("VLLM_FLASHINFER_MOE_BACKEND")) is not None:
        return _among(applied((_PINNED[value],)), layer)
    if forced:
        return _among(applied(_FLASHINFER_FP4), layer)
    if forced is False:
        order = tuple(name for name in order if name not in _FLASHINFER_FP4)
    if layer.is_on("VLLM_TEST_FORCE_FP8_MARLIN"):
        return _among(("marlin",), layer)
    return _among(order, layer)


_FP8: Final = tuple(
    [
        "aiter",
        "flashinfer_trtllm",
        "flashinfer_cutlass",
        "deepgemm",
        "vllm_cutlass",
        "triton",
        "marlin",
        "humming",
        "deepgemm_batched",
        "vllm_cutlass_batched",
        "triton_batched",
        "xpu_kernels",
        "torch",
    ]
)


def _humming_before_marlin(order: tuple[str, ...], layer: Layer) -> tuple[str, ...]:
    if layer.arch != "sm90":
        return order
    place = order.index("marlin")
    rest = tuple(name for name in order[place:] if name != "humming")
    return (*order[:place], "humming", *rest)


def _fp8_order(layer: Layer) -> tuple[str, ...]:
    order = _humming_before_marlin(_FP8, layer)
    first = {"xpu": "xpu_kernels", "cpu": "torch"}.get(layer.kind)
    if layer.arch == "sm90" and layer.scheme == "fp8_block128":
        first = "flashinfer_cutlass" if layer.num_expert_parallel > 1 else "triton"
    return order if first is None else (first, *(name for name in order if name != first))


def _mxfp8_order(layer: Layer) -> tuple[str, ...]:
    order = ("flashinfer_trtllm", "deepgemm", "marlin", "xpu_kernels", "aiter", "humming", "triton", "triton~")
    return _humming_before_marlin(order, layer)


def _mxfp4_order(layer: Layer) -> tuple[str, ...]:
    order: tuple[str, ...] = tuple(
        [
            "flashinfer_trtllm",
            "aiter",
            "triton_kernels",
            "flashinfer_cutlass",
            "vllm_cutlass",
            "marlin",
            "marlin_batched",
            "humming",
            "xpu_kernels",
            "torch",
            "triton~",
        ]
    )
    if layer.arch == "sm120":
        place = order.index("marlin_batched") + 1
        order = (*order[:place], "triton_kernels", *order[place:])
        first = order.index("triton_kernels")
        order = (*order[:first], *order[first + 1 :])
    return order


def _int8_order(layer: Layer) -> tuple[str, ...]:
    return ("triton", "humming", "torch")


def _int_wna16_order(layer: Layer) -> tuple[str, ...]:
    if layer.kind == "cpu":
        return ("torch",)
    if layer.kind == "xpu":
        return ("xpu_kernels",)
    # The fourth is vLLM's Triton kernel, and the last one restores weights.
    return ("flashinfer_trtllm", "marlin", "marlin_batched", "triton", "humming", "triton~")


def _int4_w4a8_order(layer: Layer) -> tuple[str, ...]:
    # Its CUTLASS kernel of W4A8 scales each token, and this scheme has one scale for all.
    return ()


def _of_order(order_of: Callable[[Layer], Order]) -> Callable[[Layer], Order]:
    def oracle(layer: Layer) -> Order:
        if layer.backend == "auto":
            return _among(order_of(layer), layer)
        is_variant = layer.is_batched and f"{layer.backend}{_BATCHED}" in order_of(layer)
        return _among((layer.backend + _BATCHED * is_variant,), layer)

    return oracle


ORACLES: Final[dict[str, Callable[[Layer], Order]]] = {
    "unquantized": unquantized,
    **dict.fromkeys(("nvfp4", "nvfp4_w4a16"), nvfp4),
    **dict.fromkeys(
        ("fp8_block128", "fp8_channel_token", "fp8_tensor_static", "fp8_tensor_dynamic"), _of_order(_fp8_order)
    ),
    "mxfp8": _of_order(_mxfp8_order),
    **dict.fromkeys(("mxfp4_w4a16", "mxfp4_mxfp8"), _of_order(_mxfp4_order)),
    "int8_w8a8": _of_order(_int8_order),
    **dict.fromkeys(
        ("int8_w8a16", *(f"int4_w4a16_g{group}" for group in ("32", "64", "128", "128_zp", "all"))),
        _of_order(_int_wna16_order),
    ),
    "int4_w4a8_g128": _of_order(_int4_w4a8_order),
}
"""The oracle of each scheme."""
