"""How vLLM chooses, as plain functions of what an engine is told: the answer, and the branches that led to it.

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


@dataclasses.dataclass
class Answer:
    """What an oracle says.

    Attributes:
        order: All that it would accept, best first; the first is its answer, and none means an error.
        branches: Those that it took.
    """

    order: tuple[str, ...] = ()
    branches: set[str] = dataclasses.field(default_factory=set)

    def took(self, branch: str) -> None:
        """Notes a branch."""
        self.branches.add(branch)

    def among(self, order: tuple[str, ...], layer: Layer, name: str, nothing: str = "") -> Answer:
        """The answer out of an order: those that support the layer."""
        for backend in order:
            self.took(f"{name}_supported" if layer.supported(backend) else f"{name}_skipped")
            if layer.supported(backend):
                break
        accepted = [backend.removesuffix(_BATCHED) for backend in order if layer.supported(backend)]
        if not accepted:
            self.took(nothing or f"{name}_none")
        self.order = tuple(accepted)
        return self

    def only(self, backend: str, layer: Layer, name: str) -> Answer:
        """The answer where nothing else may be taken."""
        self.took(f"{name}_supported" if layer.supported(backend) else f"{name}_unsupported")
        self.order = (backend.removesuffix(_BATCHED),) if layer.supported(backend) else ()
        return self


def _moved_last(order: tuple[str, ...], *names: str) -> tuple[str, ...]:
    return (*(name for name in order if name not in names), *(name for name in order if name in names))


def _unquantized_order(layer: Layer, answer: Answer) -> tuple[str, ...]:
    if layer.kind == "xpu":
        answer.took("order_xpu")
        return ("xpu_kernels", "triton")
    if layer.kind == "rocm":
        answer.took("order_rocm")
        return ("aiter", "triton", "triton_batched")
    answer.took("order_cuda")
    order: tuple[str, ...] = ("flashinfer_trtllm", "flashinfer_cutlass", "triton", "triton_batched")
    if layer.arch == "sm90":
        answer.took("order_sm90")
        order = _moved_last(order, "flashinfer_trtllm", "flashinfer_cutlass")
    if layer.num_data_parallel > 1:
        answer.took("order_data_parallel")
        order = _moved_last(order, "flashinfer_cutlass")
    if layer.is_swigluoai:
        answer.took("order_swigluoai")
        order = _moved_last(order, "flashinfer_trtllm", "flashinfer_cutlass")
    return order


def unquantized(layer: Layer) -> Answer:
    """`select_unquantized_moe_backend`."""
    answer = Answer()
    if layer.kind in ("cpu", "tpu", "npu"):
        answer.took("out_of_tree" if layer.kind == "npu" else layer.kind)
        answer.order = ("npu_kernels" if layer.kind == "npu" else "torch",)
        return answer
    order = _unquantized_order(layer, answer)
    answer.took("format_batched" if layer.is_batched else "format_standard")
    if layer.backend != "auto":
        answer.took("explicit")
        if layer.backend not in _UNQUANTIZED_NAMES:
            answer.took("explicit_unknown")
            return answer
        is_variant = layer.is_batched and layer.backend == "triton"
        answer.took("explicit_triton_batched" if is_variant else "explicit_as_named")
        return answer.only(layer.backend + _BATCHED * is_variant, layer, "explicit")
    answer.took("auto")
    forced = layer.is_on("VLLM_USE_FLASHINFER_MOE_FP16")
    if forced is None:
        answer.took("flashinfer_unset")
    elif not forced:
        answer.took("flashinfer_off")
        for name in ("trtllm", "cutlass"):
            is_there = f"flashinfer_{name}" in order
            answer.took(f"flashinfer_off_{name}_{'present' if is_there else 'absent'}")
        order = tuple(name for name in order if not name.startswith("flashinfer_"))
    elif (value := layer.variables.get("VLLM_FLASHINFER_MOE_BACKEND")) is not None:
        answer.took("flashinfer_pinned")
        pinned = _PINNED[value]
        if pinned not in ("flashinfer_trtllm", "flashinfer_cutlass"):
            answer.took("flashinfer_pinned_other")
            return answer
        answer.took(f"flashinfer_pinned_{pinned.removeprefix('flashinfer_')}")
        return answer.only(pinned, layer, "flashinfer_pinned")
    else:
        answer.took("flashinfer_forced")
        return answer.among(("flashinfer_trtllm", "flashinfer_cutlass"), layer, "flashinfer_forced")
    switches = [layer.is_on(name) for name in ("VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE")]
    if switches == [None, None]:
        answer.took("aiter_unset")
    elif switches[0] and switches[1] is not False:  # The second one is on where it is not set.
        answer.took("aiter_forced")
        return answer.only("aiter", layer, "aiter_forced")
    else:
        answer.took("aiter_off")
        answer.took("aiter_off_present" if "aiter" in order else "aiter_off_absent")
        order = tuple(name for name in order if name != "aiter")
    return answer.among(order, layer, "loop", nothing="none")


def nvfp4(layer: Layer) -> Answer:
    """`select_nvfp4_moe_backend`."""
    answer = Answer()
    answer.took("order")
    order: tuple[str, ...] = _NVFP4_ORDER
    answer.took("clamp_filters" if layer.has_clamp else "no_clamp")
    if layer.has_clamp:
        order = tuple(name for name in order if name in _APPLIES_CLAMP)
    answer.took("format_batched" if layer.is_batched else "format_standard")
    if layer.backend != "auto":
        return _nvfp4_explicit(layer, answer)
    answer.took("auto")
    forced = layer.is_on("VLLM_USE_FLASHINFER_MOE_FP4")
    if forced is None:
        answer.took("flashinfer_unset")
    elif not forced:
        answer.took("flashinfer_off")
        for name in _FLASHINFER_FP4:
            answer.took(f"flashinfer_off_{'present' if name in order else 'absent'}")
        order = tuple(name for name in order if name not in _FLASHINFER_FP4)
    elif (value := layer.variables.get("VLLM_FLASHINFER_MOE_BACKEND")) is not None:
        answer.took("flashinfer_pinned")
        if layer.has_clamp and _PINNED[value] not in _APPLIES_CLAMP:
            answer.took("flashinfer_pinned_clamp_refused")
            return answer
        return answer.only(_PINNED[value], layer, "flashinfer_pinned")
    else:
        answer.took("flashinfer_forced")
        if layer.has_clamp:
            answer.took("flashinfer_forced_clamp")
        tried = tuple(name for name in _FLASHINFER_FP4 if not layer.has_clamp or name in _APPLIES_CLAMP)
        return answer.among(tried, layer, "flashinfer_forced")
    if layer.is_on("VLLM_TEST_FORCE_FP8_MARLIN"):
        answer.took("marlin_forced")
        return answer.only("marlin", layer, "marlin_forced")
    answer.took("marlin_unforced")
    return answer.among(order, layer, "loop", nothing="none")


def _nvfp4_explicit(layer: Layer, answer: Answer) -> Answer:
    answer.took("explicit")
    if layer.backend not in _NVFP4_NAMES:
        answer.took("explicit_unknown")
        return answer
    is_variant = layer.is_batched and layer.backend == "flashinfer_cutedsl"
    answer.took("explicit_cutedsl_batched" if is_variant else "explicit_as_named")
    name = layer.backend + _BATCHED * is_variant
    if layer.has_clamp:
        if name not in _APPLIES_CLAMP:
            answer.took("explicit_clamp_refused")
            return answer
        answer.took("explicit_clamp_applied")
    return answer.only(name, layer, "explicit")


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


def _of_order(order_of: Callable[[Layer], tuple[str, ...]]) -> Callable[[Layer], Answer]:
    def oracle(layer: Layer) -> Answer:
        if layer.backend != "auto":
            is_variant = layer.is_batched and f"{layer.backend}{_BATCHED}" in order_of(layer)
            return Answer().only(layer.backend + _BATCHED * is_variant, layer, "explicit")
        return Answer().among(order_of(layer), layer, "loop")

    return oracle


ORACLES: Final[dict[str, Callable[[Layer], Answer]]] = {
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
