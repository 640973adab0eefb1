"""Packed weights on Hopper without a GPU: which calls take these kernels and how, and what numbers are restored.

Gluon has no interpreter, so the source of the restoring runs on torch. What a thread holds is the compiler's business;
which numbers an operand consists of is this file's.
"""

from __future__ import annotations

import functools
import math
import types
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from moereg.backends._triton.packed import HopperPacked, interleave_and_pad, pack_matrices
from moereg.backends._triton.schedules import Hopper, Sorted
from moereg.kernels.hopper import packed_restore
from moereg.kernels.hopper.packed_config import (
    MIN_PACKED_HOPPER_ROWS,
    PACKED_RULES,
    STAGED_ELEMENTS,
)
from moereg.kernels.hopper.packed_gemm import packed_format
from moereg.kernels.packed.weights import PackedMatrix
from moereg.kernels.sizes import GUARD_ROWS
from moereg.quantize import dequantize_weights, quantize_weights
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import WHOLE, get_scheme
from moereg.weights.permuted import ExpertWeights
from tests.kernels.triton_cases import select_schedule


class Words:
    """Values of 32 bits in an int64 tensor, with the operators that the kernels use; others once they are floats."""

    def __init__(self, data: torch.Tensor, dtype: str = "uint32") -> None:
        self.data, self.dtype, self.shape = data, dtype, data.shape
        self.type = types.SimpleNamespace(layout=None)

    def _bits(self, other: Any, operation: str) -> Words:
        value = other.data if isinstance(other, Words) else other
        return Words(getattr(self.data, operation)(value) & 0xFFFFFFFF)

    def to(self, dtype: str, bitcast: bool = False) -> Words:
        if dtype == "bfloat16" and bitcast:
            return Words(as_bfloat16(self.data).double(), dtype)
        if dtype == "float32" and bitcast:
            return Words(signed(self.data, 32).int().view(torch.float32), dtype)
        assert dtype in ("uint32", "uint16"), dtype
        return Words(self.data, dtype)


for _name in ("__and__", "__or__", "__lshift__", "__rshift__", "__add__", "__mul__"):
    setattr(Words, _name, functools.partialmethod(Words._bits, operation=_name))


def signed(bits: torch.Tensor, width: int) -> torch.Tensor:
    return bits - (bits >> (width - 1) << width)


def as_bfloat16(bits: torch.Tensor) -> torch.Tensor:
    return signed(bits & 0xFFFF, 16).short().view(torch.bfloat16)


def bits_of(values: torch.Tensor) -> torch.Tensor:
    """Of numbers rounded to bfloat16."""
    return values.float().bfloat16().view(torch.int16).long() & 0xFFFF


def assemble(code: str, _constraints: str, arguments: list[Words], **_options: Any) -> Words:
    """What the three instructions of the module do."""
    x, y, *rest = (argument.data for argument in (*arguments, *arguments[:1]))
    if code.startswith("fma.rn.bf16x2"):
        halves = [
            bits_of(as_bfloat16(x >> at).double() * as_bfloat16(y >> at).double() + as_bfloat16(rest[0] >> at).double())
            for at in (0, 16)
        ]
        return Words(halves[0] | halves[1] << 16)
    if code.startswith("prmt.b32"):
        chosen = [(x >> (8 * (y >> (4 * place) & 3))) & 0xFF for place in range(4)]
        return Words(torch.stack([byte << (8 * place) for place, byte in enumerate(chosen)]).sum(0))
    assert code.startswith("cvt.rn.bf16x2.f32")
    return Words(bits_of(x) * 0x10001)


def fake_language() -> Any:
    def layout(*_arguments: Any) -> None:
        return None

    def shaped(function: Any) -> Any:
        return lambda x, *arguments, **_keywords: Words(function(x.data, *arguments), x.dtype)

    return types.SimpleNamespace(
        **{name: name for name in ("uint32", "uint16", "int32", "float32", "bfloat16")},
        constexpr=None,
        SliceLayout=layout,
        NVMMADistributedLayout=layout,
        DotOperandLayout=layout,
        static_assert=lambda condition: None,
        reshape=shaped(torch.reshape),
        permute=shaped(torch.permute),
        expand_dims=shaped(torch.unsqueeze),
        broadcast=lambda x, y: (Words(x.data.expand(y.shape), x.dtype), y),
        full_like=lambda x, value: Words(torch.full_like(x.data, value)),
        join=lambda x, y: Words(torch.stack([x.data, y.data], -1), x.dtype),
        split=lambda x: (Words(x.data[..., 0]), Words(x.data[..., 1])),
        convert_layout=lambda x, _layout, assert_trivial: x,
        inline_asm_elementwise=assemble,
    )


class Shared:
    """Shared memory: lines of words."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.shape, self.layout = data, data.shape, None

    def index(self, place: int) -> Shared:
        return Shared(self.data[place])

    def load(self, _layout: Any) -> Words:
        return Words(self.data.long() & 0xFFFFFFFF)


def python_restore() -> Any:
    """`restore` as Python on `fake_language`."""
    names: dict[str, Any] = dict(vars(packed_restore))
    names |= {
        "gl": fake_language(),
        "BLOCK_K": 64,
        "words_layout": lambda *_: None,
        "scales_layout": lambda *_: None,
        "reinterpret": lambda shared, _dtype, shape, _layout: Shared(shared.data.reshape(shape)),
    }
    for name in (
        "_multiply_add",
        "_permute_bytes",
        "_both_halves",
        "_factor",
        "_pair",
        "_in_halves",
        "_in_order",
        "restore",
    ):
        names[name] = types.FunctionType(getattr(packed_restore, name).fn.__code__, names, name)
    return names["restore"]


@pytest.mark.parametrize("name", ["w13", "w2"])
@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "nvfp4_w4a16", "int4_w4a16_g128", "int8_w8a16"])
def test_operands_are_the_weights(scheme: str, name: str) -> None:
    """Gates of 16 alternating rows stand in front of their ups; 32-bit scales round once, nothing else does."""
    torch.manual_seed(0)
    quant = get_scheme(scheme)
    fmt = quant.weight
    assert fmt is not None
    hidden, inter = 256, 192
    plain = ExpertWeights(w13=torch.randn(1, 2 * inter, hidden), w2=torch.randn(1, hidden, inter))
    weights = quantize_weights(plain, scheme)
    gated = name == "w13"

    def arrange(rows: torch.Tensor) -> torch.Tensor:
        return interleave_and_pad(rows, 2) if gated else rows

    parts = pack_matrices(weights, name, fmt, arrange)
    group = 0 if fmt.group[1] == WHOLE else fmt.group[1]
    fields = (parts.get(f"{name}_{part}") for part in ("group_scale", "zero_point", "row_scale"))
    matrix = PackedMatrix(parts[name], fmt.dtype, group, fmt.scale_dtype, *fields)
    form = packed_format(matrix.element, matrix.group, matrix.scale_dtype)
    assert form is not None
    exact = arrange(dequantize_weights(weights, torch.float64)[0 if gated else 1][0])  # [R, K]

    rows, steps, words = matrix.num_rows, matrix.depth // 64, matrix.words.shape[3]
    restore = python_restore()
    found = torch.zeros(rows, matrix.depth, dtype=torch.float64)
    for step in range(steps):
        ring = types.SimpleNamespace(weights=Shared(matrix.words[0, step].reshape(-1, 2 * words, 32)))
        if form.scales is not None:
            assert matrix.group_scale is not None
            word = matrix.group_scale[0, step // form.span].contiguous().view(torch.int32)
            ring.scales = Shared(word.reshape(-1, 8, 8))
        for place in range(rows // 64):
            operand = restore(ring, place, Words(torch.tensor(step & 1)), 128, gated, form).data  # [64, 64]
            if gated:
                operand = operand.view(4, 2, 8, 64).transpose(1, 2).reshape(64, 64)
            found[64 * place : 64 * place + 64, 64 * step : 64 * step + 64] = operand
    if matrix.row_scale is not None:
        found *= matrix.row_scale[0].double()[:, None]
    if form.element != "float4_e2m1fn":
        found *= 64
    found, exact = found[:, : exact.shape[1]], exact[: len(found)]
    if form.scales == "float32":
        # The scale is rounded, and its product.
        torch.testing.assert_close(found, exact, rtol=2.0**-7, atol=0)
        assert not torch.equal(found, exact)
    else:
        torch.testing.assert_close(found, exact, rtol=1e-6, atol=0)


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the launch code asks about a device."""
    monkeypatch.setattr("moereg.kernels.launch.device.max_shared_bytes", lambda _device: 227 * 1024)
    monkeypatch.setattr("moereg.kernels.launch.device.least_block_m", lambda _device: 1)


def layer(scheme: str = "mxfp4_w4a16", **facts: Any) -> MoEProblem:
    sizes = {"num_experts": 8, "top_k": 2, "hidden_size": 256, "intermediate_size": 192, "dtype": "bfloat16"}
    return MoEProblem(**{**sizes, **facts}, quant=scheme)


# Rows an expert are a quarter of the tokens.
@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "nvfp4_w4a16", "int4_w4a16_g128", "int4_w4a16_gall", "int8_w8a16"])
@pytest.mark.parametrize(
    ("num_tokens", "tile", "copies_rows"),
    [
        (96, None, None),
        (97, (64, 128, 0), False),
        (160, (64, 128, 0), False),
        (161, (64, 256, 16), False),
        (384, (64, 256, 16), False),
        (385, (128, 192, 32), True),
        (704, (128, 192, 32), True),
        (705, (256, 128, 32), True),
        (60000, (256, 128, 32), True),
    ],
)
def test_rows_an_expert_choose_the_rule(
    scheme: str, num_tokens: int, tile: tuple[int, int, int] | None, copies_rows: bool | None
) -> None:
    schedule = select_schedule(layer(scheme), num_tokens)
    if tile is None:
        assert isinstance(schedule, Sorted)
        return
    assert isinstance(schedule, HopperPacked)
    assert schedule.config.copies_rows is copies_rows
    for config in (schedule.config.gate_up, schedule.config.down):
        assert (config.block_m, config.block_n, config.slack) == tile


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(
    "problem",
    [
        layer("int4_w4a16_g128_zp"),
        layer("int4_w4a16_g32"),
        layer(dtype="float16"),
        layer(top_k=1, apply_router_weight_on_input=True),
        layer(hidden_size=128),
        layer(intermediate_size=128),
        # Rows are copied by 16 bytes.
        layer(hidden_size=260),
        layer(activation_format="batched"),
    ],
    ids=lambda problem: f"{problem.quant.name}-{problem.dtype}-{problem.hidden_size}-{problem.activation_format}",
)
def test_what_the_kernels_lack_takes_the_triton_tiles(problem: MoEProblem) -> None:
    assert isinstance(select_schedule(problem, 1600), Sorted)


@pytest.mark.usefixtures("h200")
def test_tokens_beyond_32_bit_offsets_take_the_triton_tiles() -> None:
    far = torch.empty_strided((1600, 256), (2**31 // 1600 // 8 * 8 + 8, 1), dtype=torch.bfloat16, device="meta")
    assert isinstance(select_schedule(layer(), 1600, hidden_states=far), Sorted)
    assert isinstance(select_schedule(layer(), 1600, hidden_states=far[:, :256].contiguous()), HopperPacked)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(("inter", "offset", "found"), [(360, 0, Hopper), (364, 0, Sorted), (360, 1, Sorted)])
def test_weights_that_no_tensor_map_describes_take_the_triton_tiles(inter: int, offset: int, found: type) -> None:
    shapes = {"w13": (8, 2 * inter, 256), "w2": (8, 256, inter)}
    weights = {
        name: torch.empty(math.prod(shape) + offset, dtype=torch.bfloat16)[offset:].view(shape)
        for name, shape in shapes.items()
    }
    assert type(select_schedule(layer("unquantized", intermediate_size=inter), 1600, weights=weights)) is found


@pytest.mark.parametrize(
    ("arguments", "scales"),
    [
        (("float4_e2m1fn", 32, "float8_e8m0fnu"), ("e8m0", 2)),
        (("float4_e2m1fn", 16, "float8_e4m3fn"), ("e4m3", 1)),
        (("float4_e2m1fn", 32, "float8_e4m3fn"), None),
        (("float4_e2m1fn", 32, "float32"), None),
        (("uint4", 256, "float32"), ("float32", 4)),
        (("uint4", 64, "float32"), ("float32", 1)),
        (("uint4", 32, "float32"), None),
        # No kernel folds these scales into integers.
        (("uint4", 128, "float8_e4m3fn"), None),
        (("int8", 0, "float32"), (None, 1)),
        (("uint8", 0, "float32"), None),
    ],
)
def test_formats_that_are_restored(arguments: tuple[str, int, str], scales: tuple[str | None, int] | None) -> None:
    found = packed_format(*arguments)
    assert (found and (found.scales, found.span)) == scales


@pytest.mark.parametrize("rule", PACKED_RULES, ids=lambda rule: f"{rule.gate_up.block_m}x{rule.gate_up.block_n}")
def test_rules_are_what_the_kernels_take(rule: Any) -> None:
    assert rule.max_rows_per_expert > MIN_PACKED_HOPPER_ROWS
    assert (rule.gate_up.block_m, rule.gate_up.slack) == (rule.down.block_m, rule.down.slack)
    for config in (rule.gate_up, rule.down):
        assert config.columns in (64, 128)
        assert config.num_consumers == 2 or (config.num_consumers == 3 and rule.copies_rows)
        assert config.block_m + config.slack <= GUARD_ROWS
        registers = 128 * (config.num_consumers * config.consumer_registers + config.producer_registers)
        # Four warps of each role, the first consumer's those that the program starts with.
        assert registers * config.programs <= 65536
        for word_bytes, least in ((32, 4), (64, 4)):
            slot = config.block_n * (word_bytes + 4) + 128 * (config.block_m + config.slack)
            used = config.num_stages(word_bytes) * slot + 4 * config.num_consumers * STAGED_ELEMENTS
            assert config.num_stages(word_bytes) >= least
            assert config.programs * (used + 1024) < 228 * 1024


def test_stages_are_as_measured() -> None:
    found = [[rule.down.num_stages(word_bytes) for rule in PACKED_RULES] for word_bytes in (32, 64)]
    assert found == [[4, 8, 6, 5], [4, 7, 6, 4]]
