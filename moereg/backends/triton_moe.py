"""`triton`: Triton kernels and, on Hopper, Gluon ones, for NVIDIA and AMD GPUs."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import ClassVar, Final, TypeVar

from moereg.backends._loaded import Implementation, LoadedExperts, scaled_input_reasons
from moereg.experts import Experts, Facts
from moereg.kernels.sizes import CODE_PAD, WEIGHT_PAD
from moereg.platforms import Platform
from moereg.registry import register_moe_backend
from moereg.spec.problem import GRADIENTS, MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES, WHOLE, QuantFormat
from moereg.weights.layouts import round_up

E = TypeVar("E", bound=type[Experts])

CODE: Final = (
    *("backends/triton_moe", "backends/_triton", "backends/_loaded", "backends/_workspace"),
    *("weights/layouts", "kernels/sizes"),
    *(f"kernels/{name}/" for name in ("backward", "gemm", "hopper", "launch", "packed", "quantized", "rows")),
)

_GPUS: Final = ("cuda:sm80+", "rocm:gfx942")

_FACTS: Final = Facts(
    activations=frozenset({"silu", "gelu", "gelu_tanh", "swigluoai", "situ", "relu2"}),
    activation_scalars=True,
    swiglu_limit=True,
    activation_formats=frozenset({"standard"}),
    dtypes=frozenset({"bfloat16", "float16", "float32"}),
    bias=True,
    placements=frozenset({"contiguous", "map"}),
    router_weight_on_input=True,
    graph_capture=True,
    deterministic=True,
    # The scan over experts keeps one value per expert and thread in registers.
    max_experts=1024,
)
# 32-bit activations would need 32-bit matmuls, which no matrix unit has.
_PACKED_FACTS: Final = dataclasses.replace(_FACTS, dtypes=frozenset({"bfloat16", "float16"}))
_BATCHED: Final = frozenset({"batched"})

_INTEGERS: Final = ("uint4", "int8")
_FLOAT4: Final = "float4_e2m1fn"


def _unread_format(fmt: QuantFormat) -> list[str]:
    """Why the kernels for packed weights cannot read a format."""
    reasons = []
    rows, columns = fmt.group
    has_folded_scales = fmt.dtype == _FLOAT4 and fmt.scale_dtype in ("float8_e8m0fnu", "float8_e4m3fn")
    if not has_folded_scales and not (fmt.dtype in _INTEGERS and fmt.scale_dtype == "float32"):
        reasons.append(
            "requires integers of 4 or 8 bits with float32 scales or float4_e2m1fn with 8-bit scales, "
            f"got {fmt.dtype} with {fmt.scale_dtype}"
        )
    whole_row = columns == WHOLE and fmt.dtype in _INTEGERS
    power = columns >= 16 and columns & (columns - 1) == 0
    if not (whole_row and rows in (1, WHOLE)) and not (rows == 1 and power):
        reasons.append(f"requires groups within a row of a power of two from 16 on, got {fmt.group}")
    return reasons


_WEIGHT_ONLY: Final = tuple(
    scheme
    for scheme in QUANT_SCHEMES.values()
    if scheme.weight is not None and scheme.activation is None and not _unread_format(scheme.weight)
)
_ROW_SCALED: Final = tuple(
    scheme
    for scheme in _WEIGHT_ONLY
    if scheme.weight is not None and (scheme.weight.global_scale or scheme.weight.group[1] == WHOLE)
)
_GROUP_SCALED: Final = tuple(scheme for scheme in _WEIGHT_ONLY if scheme not in _ROW_SCALED)


def _stacked(*decorators: Callable[[E], E]) -> Callable[[E], E]:
    """Stacks decorators into one, the first outermost, so that several classes can share cells."""

    def decorate(experts: E) -> E:
        for decorator in reversed(decorators):
            decorator(experts)
        return experts

    return decorate


# The support table, one rectangle of schemes and platforms per row; the classes of both activation formats use it.
_cell: Final = functools.partial(register_moe_backend, name="triton", requires=("triton>=3.6",))

_UNQUANTIZED: Final = _cell(priority=100, quant_schemes=("unquantized",), platforms=_GPUS)
# Below backends written for one scheme, above dequantizing weights before a matmul. In sweeps of int4_w4a16_g128 at 1
# to 4096 tokens of qwen3-30b-a3b and mixtral-8x7b it took on average 0.66 of Marlin's time, each on its own H200.
_PACKED: Final = _stacked(
    _cell(priority=60, quant_schemes=_GROUP_SCALED, platforms=_GPUS),
    # Triton's tiles and Hopper's do not round a whole row's scale and the bias alike: on an H200 one row in a thousand
    # had other bits.
    _cell(priority=60, quant_schemes=_ROW_SCALED, platforms=_GPUS, batch_invariant=False),
)
_EMULATED: Final = _stacked(
    # As for mxfp8's emulation: right, but no faster than 16-bit activations, which win wherever they are allowed.
    _cell(priority=20, quant_schemes=("nvfp4",), platforms=_GPUS, tier="emulation"),
    _cell(
        priority=20,
        quant_schemes=("mxfp4_mxfp8",),
        platforms=_GPUS,
        tier="emulation",
        # Values from 63,488 round to 65,536, which float16 cannot hold.
        dtypes=("bfloat16",),
    ),
)
_CODES: Final = _stacked(
    # Above weight-only kernels on the same checkpoint, which multiply in 16 bits at half the rate: on an H200, before
    # either was tuned, 64 tokens of qwen3-30b-a3b took int8_w8a8 170 us and int8_w8a16 194.
    _cell(
        priority=110,
        quant_schemes=("fp8_block128", "fp8_channel_token", "fp8_tensor_static"),
        platforms=("cuda:sm89+",),
        # Ada's and Hopper's tensor cores accumulate 8-bit floats in about 14 bits, too few for fp32.
        dtypes=("bfloat16", "float16"),
    ),
    # All tokens of a call share a scale.
    _cell(
        priority=110,
        quant_schemes=("fp8_tensor_dynamic",),
        platforms=("cuda:sm89+",),
        dtypes=("bfloat16", "float16"),
        batch_invariant=False,
    ),
    _cell(priority=110, quant_schemes=("int8_w8a8",), platforms=_GPUS),
    # Neither measured nor run on such a machine yet. Native, except tiles under 128 rows on sm100, which Triton
    # dequantizes to bf16, exactly. Triton 3.6 fails to compile it.
    _cell(
        priority=110,
        quant_schemes=("mxfp8",),
        platforms=("cuda:sm100+",),
        requires=("triton>=3.8",),
        dtypes=("bfloat16", "float16"),
        # For tiles of either kind.
        batch_invariant=False,
    ),
    # Likewise, but sm120 keeps the emulation until a machine has run this: there Triton 3.8 dequantizes both sides of
    # mxfp4_mxfp8 to bf16 in all tiles, and spills.
    _cell(
        priority=110,
        quant_schemes=("mxfp4_mxfp8", "nvfp4"),
        platforms=("cuda:sm100",),
        requires=("triton>=3.8",),
        dtypes=("bfloat16", "float16"),
        batch_invariant=False,
    ),
    # Hopper has no group-scaled MMA: Triton dequantizes both sides to bf16, exactly, and multiplies those.
    _cell(priority=20, quant_schemes=("mxfp8",), platforms=("cuda:sm90",), tier="emulation", batch_invariant=False),
)


class _TritonExperts(LoadedExperts):
    """Runs where Triton does."""

    @classmethod
    def device_types(cls, platform: Platform) -> tuple[str, ...]:
        """The platform's, plus the CPU under Triton's interpreter."""
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return (platform.device_type, "cpu") if interpreted else (platform.device_type,)


class _PlainExperts(_TritonExperts):
    """Multiplies in 16 or 32 bits."""

    pad: ClassVar[int] = 1
    """Sizes of the weights are padded to multiples of this."""

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """Refuses sizes beyond the kernels' 32-bit offsets within one expert."""
        rows = problem.activation.num_halves * round_up(problem.intermediate_size, cls.pad)
        elements = rows * round_up(problem.hidden_size, cls.pad)
        if elements >= 2**31:
            return [f"requires fewer than 2**31 elements in one expert's w13, got {elements}"]
        return []


@_UNQUANTIZED
class TritonExperts(_PlainExperts):
    """Standard format: two grouped GEMMs over sorted routes with the activation between them, then a reduction.

    Up to 16 tokens (8 with packed weights and few rows per expert) need no sort, and the second GEMM of one token adds
    up its routes.

    Equal inputs give equal bits: a result row does not depend on its place in a tile, no kernel adds atomically, and
    the order in which a token's rows are summed depends only on its experts.

    Where the problem has gradients, a forward pass saves the rows before the activation and the plan of the routes.
    Backward, the gradient of the second product's input gives those of the pre-activation and of the routing weights in
    one pass. An expert's rows are added in the order of its routes, and a token's in the order of its experts.
    """

    facts = dataclasses.replace(_FACTS, gradients=frozenset(GRADIENTS), batch_invariant=True)
    layouts = ("canonical",)

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """Refuses sizes beyond the kernels' 32-bit offsets within one expert, and gradients of scaled inputs."""
        reasons = [*super().unsupported_reasons(problem, platform), *scaled_input_reasons(problem)]
        if problem.batch_invariant and "adapters" in problem.gradients:
            reasons.append("requires batch_invariant=False with gradients of adapters, got True")
        return reasons

    def _load(self) -> Implementation:
        if self.problem.gradients:
            from moereg.backends._triton import training

            return training.Training(self)
        from moereg.backends._triton import plain

        return plain.Standard(self)


# Works on valid rows only. torch's batched matmuls (priority 11) work on all E * max_T rows: num_experts / top_k times
# as many under even routing.
@_UNQUANTIZED
class TritonBatchedExperts(_PlainExperts):
    """Batched format: the grouped GEMMs of `TritonExperts` over each expert's rows, in place.

    Rows of `out` past an expert's count are undefined. Equal inputs give equal bits in the others.
    """

    facts = dataclasses.replace(_FACTS, activation_formats=_BATCHED)
    output_form = "per_expert"
    wide_output = True
    layouts = TritonExperts.layouts
    implemented_by = "moereg.backends._triton.plain:Batched"


class _PackedExperts(_PlainExperts):
    """Weights stay packed and are dequantized tile by tile, in registers."""

    pad = WEIGHT_PAD
    layouts = ("packed64_gate_up_interleaved",)

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """Refuses weight formats that the kernels do not read, and sizes beyond their 32-bit offsets."""
        fmt = problem.quant.weight
        reasons = [] if fmt is None else _unread_format(fmt)
        return [*reasons, *super().unsupported_reasons(problem, platform)]


@_PACKED
class TritonPackedExperts(_PackedExperts):
    """Weight-only schemes, standard format: `TritonExperts` on packed weights."""

    facts = dataclasses.replace(_PACKED_FACTS, batch_invariant=True)
    implemented_by = "moereg.backends._triton.packed:Standard"


@_PACKED
class TritonPackedBatchedExperts(_PackedExperts):
    """Weight-only schemes, batched format: `TritonBatchedExperts` on packed weights."""

    facts = dataclasses.replace(_PACKED_FACTS, activation_formats=_BATCHED)
    output_form = "per_expert"
    wide_output = True
    implemented_by = "moereg.backends._triton.packed:Batched"


@_EMULATED
class TritonEmulatedExperts(_PackedExperts):
    """4-bit float weights with quantized activations where no hardware multiplies them: emulated exactly in 16 bits.

    Standard format: `TritonPackedExperts`, with a launch that rounds rows before each GEMM; always sorted.
    """

    facts = _PACKED_FACTS
    implemented_by = "moereg.backends._triton.emulated:Standard"


@_EMULATED
class TritonEmulatedBatchedExperts(_PackedExperts):
    """Batched format: `TritonPackedBatchedExperts`, with a launch that rounds rows before each GEMM."""

    facts = dataclasses.replace(_PACKED_FACTS, activation_formats=_BATCHED)
    output_form = "per_expert"
    wide_output = True
    implemented_by = "moereg.backends._triton.emulated:Batched"


class _QuantizedExperts(_TritonExperts):
    """Quantizes activations and multiplies them with quantized weights."""

    layouts = ("canonical_pad128",)

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """Refuses sizes beyond the kernels' 32-bit offsets within one expert."""
        rows = problem.activation.num_halves * problem.intermediate_size
        hidden, intermediate = (round_up(size, CODE_PAD) for size in (problem.hidden_size, problem.intermediate_size))
        elements = max(rows * hidden, problem.hidden_size * intermediate)
        if elements >= 2**31:
            return [f"requires fewer than 2**31 elements in one expert's w13 and w2, got {elements}"]
        return []


@_CODES
class TritonQuantizedExperts(_QuantizedExperts):
    """8-bit activations and weights and, where hardware applies group scales, 4-bit ones.

    Standard format: quantizes tokens, then two grouped GEMMs with the activation between them and a reduction. The
    intermediate is rounded to the problem's dtype and then quantized: in the first GEMM if a tile holds whole groups or
    the scales are given; otherwise, as when rows have global scales, in a launch between the two. Up to 16 tokens need
    no sort.

    Tokens that arrive quantized, with their own dynamic scales, are multiplied as they are.

    Equal inputs give equal bits: a result row does not depend on its place in a tile, a maximum does not depend on
    order, no kernel adds atomically, and a token's rows are summed in the order of its experts.
    """

    facts = dataclasses.replace(_FACTS, batch_invariant=True)
    input_form = "quantized"
    implemented_by = "moereg.backends._triton.quantized:Standard"


# Not measured yet; the standard format's priorities.
@_CODES
class TritonQuantizedBatchedExperts(_QuantizedExperts):
    """Batched format: the grouped GEMMs of `TritonQuantizedExperts` over each expert's rows, in place.

    Rows past an expert's count are undefined in `out` and take no part in any scale. Equal inputs give equal bits in
    the others.
    """

    facts = dataclasses.replace(_FACTS, activation_formats=_BATCHED)
    output_form = "per_expert"
    wide_output = True
    implemented_by = "moereg.backends._triton.quantized:Batched"
