"""FlashInfer's cuTile kernels for weights of 16, 8 and 4 bits; tileiras compiles them at first use, without nvcc.

FlashInfer's runners keep their own workspaces and tune at the first call of a size, so this calls the kernels beneath
them with the layer's scratch memory. The kernels trust every id and handle rows beyond int32 themselves. Tiles are
FlashInfer 0.7.2's untuned ones: `_fallback_tactic` of its runners.

T tokens, K experts per token, N = T * K routes, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import abc
import functools
import logging
from collections.abc import Hashable
from typing import Any, Final, NamedTuple

import torch

from moereg.backends._flashinfer.cutile_sizes import SORTED_ROUTES, Tile, Tiles, compiled_for
from moereg.backends._flashinfer.first_call import first_call
from moereg.backends._flashinfer.scales import one_scale
from moereg.backends._flashinfer.scratch import Piece, carved, carved_fields, num_bytes, pieces_of
from moereg.backends._flashinfer.shuffles import each_expert, swizzled_scales
from moereg.backends._loaded import Call, Implementation
from moereg.experts import Experts
from moereg.kernels.launch.device import num_multiprocessors
from moereg.kernels.rows.local import clear_dead_rows, copy_live_rows, own_routes
from moereg.spec.activations import Activation
from moereg.spec.quant_schemes import QuantFormat
from moereg.weights.layouts import aligned
from moereg.weights.permuted import ExpertWeights, PermutedWeights

logger: Final = logging.getLogger("moereg")

_PLANS: Final = 128
"""Call sizes whose tiles and scratch layout are cached."""


class Kernels(NamedTuple):
    """FlashInfer's functions for one weight family, and its tile class."""

    run_moe: Any
    allocate_workspace: Any
    gemm_config: Any


class _CuTile(Implementation):
    """One weight family: sanitizes routes, carves buffers out of scratch memory, calls `run_moe` once.

    Attributes:
        arch: Compute capability of the platform, such as 90.
    """

    block_rows: tuple[int, ...]
    """Tile heights that some call size selects; buffers have room for each."""

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        self.arch = int(self.platform.arch.removeprefix("sm"))
        self._plan = functools.lru_cache(maxsize=_PLANS)(self._planned)
        self._sizes = functools.lru_cache(maxsize=_PLANS)(self._sized)

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """FlashInfer's buffers and the routes."""
        words = self.problem.torch_dtype.itemsize
        buffers = num_bytes(pieces_of(self._plan(num_tokens)))
        return (buffers // words,), (num_bytes(self._route_pieces(num_tokens)) // words,)

    def run(self, call: Call) -> None:
        inputs, problem = call.inputs, self.problem
        num_tokens = len(inputs.hidden_states)
        routes = carved(call.workspace2, self._route_pieces(num_tokens))
        num_ids = problem.num_local_experts if inputs.expert_map is None else len(inputs.expert_map)
        own_routes(
            routes["topk_ids"],
            routes["topk_weights"],
            routes["is_live"],
            inputs.topk_ids,
            inputs.topk_weights,
            inputs.expert_map,
            num_ids,
            problem.num_local_experts,
        )
        hidden_states = aligned(inputs.hidden_states)
        if self.spans_tokens:
            copy_live_rows(routes["hidden_states"], hidden_states, routes["is_live"])
            hidden_states = routes["hidden_states"]
        _say_that_tiles_are_untuned()
        tiles, size = self._sizes(num_tokens)
        with first_call(
            "flashinfer_cutile", problem, _COMPILING_SECONDS, _KEPT, on=call.out, size=size, size_seconds=_SIZE_SECONDS
        ):
            self.kernels.run_moe(
                hidden_states,
                routes["topk_ids"],
                routes["topk_weights"],
                *(call.weights[name] for name in self.weight_names),
                call.out,
                carved_fields(self._plan(num_tokens), call.workspace13),
                activation=self.activation,
                block_size=tiles.rows,
                gemm1_config=self.kernels.gemm_config(*tiles.gemm1),
                gemm2_config=self.kernels.gemm_config(*tiles.gemm2),
                **self.options(num_tokens),
            )
        clear_dead_rows(call.out, routes["is_live"])

    @functools.cached_property
    def kernels(self) -> Kernels:
        """FlashInfer's functions, imported when a layer first runs."""
        return self._kernels()

    @functools.cached_property
    def activation(self) -> Any:
        """FlashInfer's name of the problem's activation."""
        return _activation(self.problem.activation)

    @abc.abstractmethod
    def _kernels(self) -> Kernels:
        """Imports FlashInfer's functions."""

    @property
    def spans_tokens(self) -> bool:
        """Whether one scale spans all tokens, so that tokens without a local expert must be left out."""
        return False

    @property
    @abc.abstractmethod
    def weight_names(self) -> tuple[str, ...]:
        """Permuted tensors in the order of `run_moe`."""

    @abc.abstractmethod
    def tiles(self, num_routes: int) -> Tiles:
        """Tiles for a call with that many routes."""

    @abc.abstractmethod
    def options(self, num_tokens: int) -> dict[str, Any]:
        """Further arguments of `run_moe`."""

    @abc.abstractmethod
    def allocation(self, num_tokens: int) -> dict[str, Any]:
        """Further arguments of `allocate_workspace`."""

    def rows_per_expert(self, num_routes: int) -> int:
        """Rows per expert under even routing, rounded up."""
        return -(-num_routes // self.problem.num_local_experts)

    def _sized(self, num_tokens: int) -> tuple[Tiles, Hashable]:
        """A call's tiles, and the sizes its kernels are specialized for."""
        tiles = self.tiles(num_tokens * self.problem.top_k)
        return tiles, compiled_for(self.problem, num_tokens, tiles)

    def _planned(self, num_tokens: int) -> Any:
        problem = self.problem
        return self.kernels.allocate_workspace(
            num_tokens=num_tokens,
            hidden_size=problem.hidden_size,
            intermediate_size=problem.intermediate_size,
            num_experts=problem.num_local_experts,
            top_k=problem.top_k,
            is_gated=problem.activation.gated,
            block_sizes=self.block_rows,
            device=torch.device("meta"),
            **self.allocation(num_tokens),
        )

    def _route_pieces(self, num_tokens: int) -> dict[str, Piece]:
        shape = (num_tokens, self.problem.top_k)
        pieces = {
            "topk_ids": Piece(shape, torch.int32),
            "topk_weights": Piece(shape, torch.float32),
            "is_live": Piece((num_tokens,), torch.int32),
        }
        if self.spans_tokens:
            pieces["hidden_states"] = Piece((num_tokens, self.problem.hidden_size), self.problem.torch_dtype)
        return pieces


class Bfloat16(_CuTile):
    """16-bit weights, transposed."""

    block_rows = (32, 64, 128)

    _SORTED_INTERMEDIATE: Final = 1024

    def _kernels(self) -> Kernels:
        from flashinfer.fused_moe.cutile.moe import GemmConfig
        from flashinfer.fused_moe.cutile.moe import allocate_workspace as allocate_bfloat16
        from flashinfer.fused_moe.cutile.moe import run_moe as run_bfloat16

        return Kernels(run_bfloat16, allocate_bfloat16, GemmConfig)

    @property
    def weight_names(self) -> tuple[str, ...]:
        return ("w13", "w2")

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """`w13` [E, H, 2 * I] and `w2` [E, I, H]: transposed."""
        tensors = weights.tensors("weight")
        return PermutedWeights(self.layouts[0], {name: each_expert(tensors[name], torch.t) for name in tensors})

    def tiles(self, num_routes: int) -> Tiles:
        tile = Tile(128, 64, 1) if self.arch == 90 else Tile(128, 32, 4)
        return Tiles(_rows_of_tile(self, num_routes), tile, tile)

    def options(self, num_tokens: int) -> dict[str, Any]:
        return {"sorted_io": self._is_sorted(num_tokens)}

    def allocation(self, num_tokens: int) -> dict[str, Any]:
        return self.options(num_tokens)

    def _is_sorted(self, num_tokens: int) -> bool:
        long = self.problem.intermediate_size >= self._SORTED_INTERMEDIATE
        return long and num_tokens * self.problem.top_k >= SORTED_ROUTES


class Float8(_CuTile):
    """8-bit float weights with per-tensor scales, or power-of-two scales per 32 columns.

    Activations have 16 bits, or 8 bits with one scale over all tokens that have a local expert.
    """

    block_rows = (16, 32, 64, 128)

    def _kernels(self) -> Kernels:
        from flashinfer.fused_moe.cutile.fp8 import allocate_workspace as allocate_float8
        from flashinfer.fused_moe.cutile.fp8 import run_moe as run_float8
        from flashinfer.fused_moe.cutile.moe import GemmConfig

        return Kernels(run_float8, allocate_float8, GemmConfig)

    @property
    def _has_codes(self) -> bool:
        return self.computes.activation is not None

    @property
    def _has_groups(self) -> bool:
        return self._weight.group[1] == 32

    @property
    def _weight(self) -> QuantFormat:
        assert self.computes.weight is not None
        return self.computes.weight

    @property
    def spans_tokens(self) -> bool:
        return self._has_codes

    @property
    def weight_names(self) -> tuple[str, ...]:
        return ("w13", "w13_scale", "w2", "w2_scale")

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """The canonical tensors; two scales of a matrix must be equal and become one.

        Raises:
            ValueError: Gate and up of an expert have different scales.
        """
        tensors = {name: aligned(tensor) for name, tensor in weights.tensors("weight", "scale").items()}
        if not self._has_groups:
            tensors["w13_scale"] = one_scale(tensors["w13_scale"], "w13_scale")
        return PermutedWeights(self.layouts[0], tensors)

    def tiles(self, num_routes: int) -> Tiles:
        rows = self._rows(num_routes)
        wide = self.arch == 90 and rows == 64
        return Tiles(rows, Tile(128, 128, 2) if wide else Tile(64, 128, 2), Tile(64, 128, 2))

    def _rows(self, num_routes: int) -> int:
        rows = self.rows_per_expert(num_routes)
        intermediate, gated = self.problem.intermediate_size, self.problem.activation.gated
        if rows <= 16 and self.arch == 90:
            return 16
        if not gated:
            return _rows_of_tile(self, num_routes)
        if self.arch == 90 and not self._has_codes:
            if rows < 64:
                return 32
            return 128 if rows >= 128 or intermediate > 1024 else 64
        if self.arch >= 120:
            if not self._has_codes:
                return 64 if self._has_groups and rows >= 256 and intermediate <= 512 else 32
            return 64 if rows >= 192 else 32
        return _rows_of_tile(self, num_routes)

    def options(self, num_tokens: int) -> dict[str, Any]:
        return {
            "activation_fp8": self._has_codes,
            "block_scaled": self._has_groups,
            "weight_fp4": False,
            # FlashInfer's sweeps found sorted input faster on all platforms of these cells.
            "sorted_input": True,
            "fuse_quantization": self._has_codes and self.problem.activation.gated and num_tokens <= 2,
        }

    def allocation(self, num_tokens: int) -> dict[str, Any]:
        return {"activation_fp8": self._has_codes, "block_scaled": self._has_groups}


class Float4(_CuTile):
    """4-bit float weights with 16-bit activations."""

    block_rows = (16, 32, 64, 128)

    _TILE: Final = Tile(128, 128, 2)

    def _kernels(self) -> Kernels:
        from flashinfer.fused_moe.cutile.fp4 import allocate_workspace as allocate_float4
        from flashinfer.fused_moe.cutile.fp4 import run_moe as run_float4
        from flashinfer.fused_moe.cutile.moe import GemmConfig

        return Kernels(run_float4, allocate_float4, GemmConfig)

    @property
    def _weight(self) -> QuantFormat:
        assert self.computes.weight is not None
        return self.computes.weight

    @property
    def weight_names(self) -> tuple[str, ...]:
        return tuple(f"{matrix}{part}" for matrix in ("w13", "w2") for part in ("", "_scale", "_scale_2"))

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """The canonical tensors; swizzles scales from sm100 on, and adds global scales of 1 if the scheme has none."""
        given = weights.tensors()
        tensors: dict[str, torch.Tensor] = {}
        for matrix in ("w13", "w2"):
            tensors[matrix] = aligned(given[matrix])
            scale = given[f"{matrix}_scale"]
            tensors[f"{matrix}_scale"] = aligned(scale) if self.arch < 100 else each_expert(scale, _five_dimensional)
            ones = scale.new_ones(len(scale), dtype=torch.float32)
            tensors[f"{matrix}_scale_2"] = aligned(given.get(f"{matrix}_scale_2", ones))
        return PermutedWeights(self.layouts[0], tensors)

    def tiles(self, num_routes: int) -> Tiles:
        rows = self.rows_per_expert(num_routes)
        if rows <= 8:
            return Tiles(16, self._TILE, self._TILE)
        long = 32 < rows <= 64 or rows > 128
        return Tiles(64 if long else 32, self._TILE, self._TILE)

    def options(self, num_tokens: int) -> dict[str, Any]:
        return {
            "activation_fp4": False,
            "scale_block_size": self._weight.group[1],
            "num_sms": num_multiprocessors(torch.device("cuda", torch.cuda.current_device())),
        }

    def allocation(self, num_tokens: int) -> dict[str, Any]:
        return {
            "activation_fp4": False,
            "scale_block_size": self._weight.group[1],
            "scale_dtype": getattr(torch, self._weight.scale_dtype),
        }


_KEPT: Final = "they are kept in ~/.cache/cutile-python"
_COMPILING_SECONDS: Final = 15.0
"""About seven kernels, 0.2 to 5 s each on one core."""

_SIZE_SECONDS: Final = 5.0
"""Kernels that a new number of tokens recompiles, mostly the sort."""


@functools.cache
def _say_that_tiles_are_untuned() -> None:
    logger.warning(
        "flashinfer_cutile runs with FlashInfer's untuned tiles, which nothing has timed for this device and layer; "
        "time other backends beside it with moereg bench"
    )


def _rows_of_tile(layer: _CuTile, num_routes: int) -> int:
    rows = layer.rows_per_expert(num_routes)
    if not layer.problem.activation.gated:
        return 32 if rows < {89: 256, 90: 32}.get(layer.arch, 128) else 64
    if rows < 64:
        return 32
    return 64 if rows < 512 else 128


def _five_dimensional(scale: torch.Tensor) -> torch.Tensor:
    return swizzled_scales(scale).flatten(-2)


def _activation(activation: Activation) -> Any:
    """FlashInfer's name of an activation."""
    from flashinfer.fused_moe.api import GeGLU, GeGLUTanh, ReLU2, SwiGLU

    if activation.name in ("silu", "swigluoai"):
        if activation.limit is None:
            return SwiGLU(alpha=activation.alpha, beta=activation.beta)
        return SwiGLU(alpha=activation.alpha, beta=activation.beta, limit=activation.limit)
    return {"gelu": GeGLU, "gelu_tanh": GeGLUTanh, "relu2": ReLU2}[activation.name]()
