"""A torch copy of what moereg uses of QuACK, for CPUs: the same names, and what their documentation says they compute.

It traces nothing: a value of an epilogue is a tensor with every number that a kernel would have, one at a time.
`tests/backends/test_cutlass_compiled.py` compares the names and compiles the same epilogues with QuACK itself.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F


class Pair(NamedTuple):
    """Even and odd columns; numbers and columns of one number apply to both."""

    a: Any
    b: Any

    def __add__(self, other: Any) -> Pair:  # type: ignore[override]
        first, second = other if isinstance(other, tuple) else (other, other)
        return Pair(self.a + first, self.b + second)

    def __mul__(self, other: Any) -> Pair:  # type: ignore[override]
        first, second = other if isinstance(other, tuple) else (other, other)
        return Pair(self.a * first, self.b * second)


class RowVecLoad:
    """One number a column and expert, [E,C]."""

    def __init__(self, name: str) -> None:
        self.name = name


class ColVecLoad(RowVecLoad):
    """One number a row, [N]."""


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tiles; nothing here reads them."""

    tile_m: int
    tile_n: int
    pingpong: bool
    is_dynamic_persistent: bool
    cluster_m: int
    device_capacity: int


class EpiMod:
    """A product with an epilogue."""

    calls: ClassVar[list[GemmConfig]] = []

    def __init__(self, fn: Callable[..., Any], outputs: tuple[str, ...], ops: dict[str, Any], mode: str | None) -> None:
        self.fn, self.outputs, self.ops, self.mode = fn, outputs, ops, mode
        self.semantic_digest = str(id(self))
        assert set(ops) == set(inspect.signature(fn).parameters) - {"acc"}

    def __call__(
        self,
        A: torch.Tensor,
        B: torch.Tensor,
        *,
        out: dict[str, torch.Tensor],
        store_d: bool,
        config: GemmConfig,
        tuned: bool,
        cu_seqlens_m: torch.Tensor,
        A_idx: torch.Tensor | None,
        **operands: torch.Tensor,
    ) -> None:
        assert not tuned
        assert (store_d, set(out)) == (not self.outputs, set(self.outputs) or {"D"})
        assert set(operands) == set(self.ops)
        self.calls.append(config)
        ((name, found),) = out.items()
        rows = A if A_idx is None else A[A_idx.long()]
        # Loads and stores of 16 bytes, and of 4 numbers of an epilogue's operands.
        assert all(tensor.data_ptr() % 16 == 0 for tensor in (A, B, found, cu_seqlens_m, *operands.values()))
        assert all(stride * A.itemsize % 16 == 0 for stride in (A.stride(0), B.stride(0), B.stride(2)))
        assert found.stride(0) * found.itemsize % 16 == 0
        assert A.stride(1) == B.stride(1) == found.stride(1) == 1
        assert cu_seqlens_m.dtype == torch.int32
        assert found.shape == (len(rows), B.shape[2] // 2 if self.mode else B.shape[2])
        edges = cu_seqlens_m.tolist()
        for expert, (first, last) in enumerate(itertools.pairwise(edges)):
            if first == last:
                continue
            acc: Any = rows[first:last].float() @ B[expert].float()
            values = {}
            for operand, tensor in operands.items():
                assert tensor.dtype == torch.float32
                if isinstance(self.ops[operand], ColVecLoad):
                    assert tensor.shape == (len(rows),)
                    values[operand] = tensor[first:last, None]
                else:
                    assert tensor.shape == (B.shape[0], B.shape[2])
                    values[operand] = self._paired(tensor[expert])
            found[first:last] = self.fn(self._paired(acc), **values)[name].to(found.dtype)

    def _paired(self, value: torch.Tensor) -> Any:
        return Pair(value[..., 0::2], value[..., 1::2]) if self.mode else value


def gemm_epilogue(
    outputs: tuple[str, ...] = (), ops: dict[str, Any] | None = None, mode: str | None = None
) -> Callable[[Callable[..., Any]], EpiMod]:
    """The decorator; only gated epilogues declare an output."""
    assert (mode == "acc_pair") == bool(outputs)
    return lambda fn: EpiMod(fn, outputs, dict(ops or {}), mode)


def unpack(value: Pair) -> Pair:
    assert isinstance(value, Pair)
    return value


def _module(name: str, **names: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    return module


def modules(cache_folder: str) -> dict[str, ModuleType]:
    """What `sys.modules` holds where QuACK is installed."""
    activation = {
        "_maxnumf": lambda x, c: x.clamp(min=c),
        "_minnumf": lambda x, c: x.clamp(max=c),
        "gelu_erf": F.gelu,
        "relu_sq": lambda x: torch.relu(x).square(),
        "sigmoid": torch.sigmoid,
    }
    epilogue = {"F2": Pair, "EpiMod": EpiMod, "gemm_epilogue": gemm_epilogue, "unpack": unpack}
    return {
        "quack": _module("quack", __path__=[]),
        "quack.activation": _module("quack.activation", **activation),
        "quack.epilogue": _module("quack.epilogue", __path__=[], **epilogue),
        "quack.epilogue.ops": _module("quack.epilogue.ops", ColVecLoad=ColVecLoad, RowVecLoad=RowVecLoad),
        "quack.gemm_config": _module("quack.gemm_config", GemmConfig=GemmConfig),
        "quack.cache": _module("quack.cache", CACHE_ENABLED=True, get_cache_path=lambda: cache_folder),
    }
