"""Grouped products of QuACK, whose kernels are written in CuTe DSL, with epilogues of our own.

A product multiplies sorted rows by their experts' matrices. Sizes: N rows, E experts, `K` the reduced dimension, `C`
columns of the product, S rows that are gathered from. QuACK traces epilogues, which are applied to a product's sums
before they are stored, into its kernels. A value is one fp32 number on Hopper and a pair of them on Blackwell, and the
same expressions serve both: `F2` is a pair that can be added and multiplied.

QuACK is imported here, and loads nothing of CUDA until a product runs.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from quack.activation import _maxnumf, _minnumf, gelu_erf, relu_sq, sigmoid
from quack.cache import CACHE_ENABLED, get_cache_path
from quack.epilogue import F2, EpiMod, gemm_epilogue, unpack
from quack.epilogue.ops import ColVecLoad, RowVecLoad
from quack.gemm_config import GemmConfig

from moereg.kernels.gemm.epilogue import ActivationConstant

__all__ = ["GemmConfig", "cache_folder", "down_epilogue", "gate_up_epilogue", "grouped_product", "select_config"]

INTERMEDIATE: Final = "intermediate"
"""Name of the first product's output where it is gated: half as wide as the product."""

# gelu_tanh(x) = x * sigmoid(x * (LINEAR + CUBIC * x**2)), which needs no tanh: the fast one keeps 11 bits.
_LINEAR: Final = 2 * math.sqrt(2 / math.pi)
_CUBIC: Final = 0.044715 * _LINEAR


@functools.cache
def gate_up_epilogue(function: ActivationConstant, has_bias: bool, has_scales: bool) -> EpiMod:
    """The epilogue of the first product; operands `bias` [E,N], `row_scale` [rows] and `column_scale` [E,N], all fp32.

    Args:
        function: Between the products.
        has_bias: Whether there is the operand `bias`.
        has_scales: Whether there are the operands `row_scale` and `column_scale`, for 8-bit rows.
    """
    apply = _gated(function) if function.gated else _relu2
    assert function.gated or function.name == "relu2", function.name
    epilogue: Callable[..., dict[str, Any]]
    # One function per set of operands: QuACK reads them from the signature.
    if has_scales and has_bias:

        def epilogue(acc, row_scale, column_scale, bias):
            return apply(acc * row_scale * column_scale + bias)

    elif has_scales:

        def epilogue(acc, row_scale, column_scale):
            return apply(acc * row_scale * column_scale)

    elif has_bias:

        def epilogue(acc, bias):
            return apply(acc + bias)

    else:

        def epilogue(acc):
            return apply(acc)

    _name(epilogue, function)
    outputs = (INTERMEDIATE,) if function.gated else ()
    mode = "acc_pair" if function.gated else None
    return gemm_epilogue(outputs=outputs, mode=mode, ops=_operands(has_bias, has_scales))(epilogue)


@functools.cache
def down_epilogue(has_bias: bool, has_scales: bool) -> EpiMod:
    """The epilogue of the second product: as in the first one, then times `weight` [rows] fp32."""
    epilogue: Callable[..., dict[str, Any]]
    if has_scales and has_bias:

        def epilogue(acc, row_scale, column_scale, bias, weight):
            return {"D": (acc * row_scale * column_scale + bias) * weight}

    elif has_scales:

        def epilogue(acc, row_scale, column_scale, weight):
            return {"D": acc * row_scale * column_scale * weight}

    elif has_bias:

        def epilogue(acc, bias, weight):
            return {"D": (acc + bias) * weight}

    else:

        def epilogue(acc, weight):
            return {"D": acc * weight}

    _name(epilogue)
    return gemm_epilogue(ops={**_operands(has_bias, has_scales), "weight": ColVecLoad("weight")})(epilogue)


def _name(epilogue: Callable[..., Any], function: ActivationConstant | None = None) -> None:
    """Names an epilogue after what it computes: QuACK identifies functions of installed packages by name.

    It inspects the code of others, but for these, moereg's own among them, a kernel's key in memory and on disk has
    only the name and the operands. Without this, SiLU could run where GELU is asked for, or a kernel of outdated code.
    """
    epilogue.__qualname__ += f" {function} {_source_digest()}"


@functools.cache
def _source_digest() -> str:
    return hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()[:16]


def _operands(has_bias: bool, has_scales: bool) -> dict[str, Any]:
    # Named, since QuACK cannot tell rows from columns where a product is square.
    rows = ("column_scale",) * has_scales + ("bias",) * has_bias
    columns = ("row_scale",) * has_scales
    return {**{name: RowVecLoad(name) for name in rows}, **{name: ColVecLoad(name) for name in columns}}


def _gated(function: ActivationConstant) -> Callable[[Any], dict[str, Any]]:
    gate_function = _gate_function(function)
    beta, limit = function.beta, function.limit

    def apply(sums: Any) -> dict[str, Any]:
        gate, up = unpack(sums)
        if limit is not None:
            gate = _value(_minnumf(gate, limit))
            up = _value(_maxnumf(_minnumf(up, limit), -limit))
        if beta:
            up = up + beta
        return {INTERMEDIATE: gate_function(gate) * up}

    return apply


def _relu2(sums: Any) -> dict[str, Any]:
    return {"D": relu_sq(sums)}


def _gate_function(function: ActivationConstant) -> Callable[[Any], Any]:
    alpha = function.alpha
    if function.name == "gelu":
        return _gelu
    if function.name == "gelu_tanh":
        return _gelu_tanh
    assert function.name in ("silu", "swigluoai"), function.name

    def gate_function(gate: Any) -> Any:
        return gate * _value(sigmoid(gate * alpha if alpha != 1.0 else gate))

    return gate_function


def _gelu(gate: Any) -> Any:
    return _value(gelu_erf(gate))


def _gelu_tanh(gate: Any) -> Any:
    return gate * _value(sigmoid(gate * (gate * gate * _CUBIC + _LINEAR)))


def _value(result: Any) -> Any:
    """Wraps a result of QuACK's functions, which return plain pairs, as one that can be multiplied."""
    return F2(*result) if isinstance(result, tuple) else result


_ON_HOPPER: Final[dict[str, Any]] = {"is_dynamic_persistent": False, "cluster_m": 1, "device_capacity": 9}
_ON_BLACKWELL: Final[dict[str, Any]] = {"pingpong": False, "is_dynamic_persistent": True, "device_capacity": 10}

_FEW_ROWS: Final = 64
"""Up to this many rows an expert, tiles are short: a tall one would be mostly empty."""

# Tiles for few rows and for many. Hopper: the fastest of a sweep over Qwen3-30B's and Mixtral's products at 1 to 1,024
# rows an expert on an H200. Blackwell: QuACK's own choice for tiles with many rows; none has been measured.
_HOPPER: Final = (
    GemmConfig(tile_m=64, tile_n=256, pingpong=True, **_ON_HOPPER),
    GemmConfig(tile_m=128, tile_n=192, pingpong=True, **_ON_HOPPER),
)
# Hopper accumulates 8-bit products in a second set of registers. With two warpgroups per tile both fit; with one per
# tall tile, as for 16 bits, 900 bytes a thread spill.
_HOPPER_CODES: Final = (
    GemmConfig(tile_m=64, tile_n=192, pingpong=True, **_ON_HOPPER),
    GemmConfig(tile_m=128, tile_n=192, pingpong=False, **_ON_HOPPER),
)
_BLACKWELL: Final = (
    GemmConfig(tile_m=128, tile_n=128, cluster_m=1, **_ON_BLACKWELL),
    GemmConfig(tile_m=256, tile_n=256, cluster_m=2, **_ON_BLACKWELL),
)


def select_config(capability: int, rows_per_expert: float, has_codes: bool) -> GemmConfig:
    """Returns a product's tiles, the same object for equal ones: QuACK tells configurations apart by identity.

    Args:
        capability: Major compute capability: 9 or 10.
        rows_per_expert: N / E, for an even routing.
        has_codes: Whether the operands are 8-bit.
    """
    hopper = _HOPPER_CODES if has_codes else _HOPPER
    few, many = hopper if capability == 9 else _BLACKWELL
    return few if rows_per_expert <= _FEW_ROWS else many


def grouped_product(
    epilogue: EpiMod,
    config: GemmConfig,
    out: torch.Tensor,
    rows: torch.Tensor,
    matrices: torch.Tensor,
    expert_offsets: torch.Tensor,
    source: torch.Tensor | None = None,
    **operands: torch.Tensor,
) -> None:
    """Writes epilogue(rows @ matrices[e].T) for the rows of each expert e. Compiles its kernel at first use.

    Args:
        epilogue: From `gate_up_epilogue` or `down_epilogue`.
        config: From `select_config`.
        out: [N, C], or [N, C / 2] where the epilogue is gated; rows contiguous, their size a multiple of 16 bytes. Rows
            that belong to no expert are left as they are.
        rows: [N, K], or [S, K] with `source`; 16 bits or float8_e4m3fn; rows contiguous, of 16-byte multiples.
        matrices: [E, C, K], of the dtype of `rows`, contiguous.
        expert_offsets: [E + 1] int32, first row of each expert, then the number of rows in use.
        source: [N] int32, the row of `rows` that each row is gathered from; any valid row for those not in use.
        operands: Of the epilogue.
    """
    name = INTERMEDIATE if epilogue.outputs else "D"
    epilogue(
        rows,
        matrices.transpose(1, 2),
        out={name: out},
        store_d=name == "D",
        config=config,
        tuned=False,
        cu_seqlens_m=expert_offsets,
        A_idx=source,
        **operands,
    )


def cache_folder() -> str | None:
    """The folder in which QuACK keeps compiled kernels for the next process; None if it keeps none."""
    return str(get_cache_path()) if CACHE_ENABLED else None
