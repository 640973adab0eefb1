"""Backends that only the board has: fused layers of libraries that come as source, for 8-bit floats on Hopper.

`benches.board.build_libraries` builds them. A call does all that a layer needs: it quantizes the tokens, and for
Alpha-MoE it sorts the routes and zeroes the output, since that library takes both from outside.
"""

from __future__ import annotations

import abc
import dataclasses
import pathlib
import statistics
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F

from moereg.author import (
    ExpertInputs,
    Experts,
    ExpertWeights,
    Facts,
    MoEProblem,
    PermutedWeights,
    Platform,
    QuantScheme,
    register_moe_backend,
)
from moereg.backends._flashinfer.layouts import one_for_all, one_scale

__all__ = ["HpcOpsTensorExperts", "interleaved", "register"]

_FACTS: Final = Facts(
    activations=frozenset({"silu"}),
    activation_formats=frozenset({"standard"}),
    dtypes=frozenset({"bfloat16"}),
    placements=frozenset({"contiguous"}),
    graph_capture=True,
    max_experts=512,
)


class _LibraryExperts(Experts):
    """Base of the libraries' classes, which take their temporaries from torch."""

    facts = dataclasses.replace(_FACTS, requires_multiple={"hidden_size": 128, "intermediate_size": 128})

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None."""
        return (0,), (0,)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Runs without workspaces."""
        self.run(out, inputs, weights)

    @abc.abstractmethod
    def run(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        """See `Experts.apply`."""

    def in_groups(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [T,H] as codes, and their scales [T,H/128] fp32: one launch of ours, since neither library has one."""
        from moereg.backends._triton.quantized import row_format
        from moereg.kernels.quantized.rows_moved import quantize_tokens

        assert self.computes.activation is not None
        fmt = row_format(self.computes.activation)
        codes = torch.empty(x.shape, dtype=fmt.dtype, device=x.device)
        scale = torch.empty((len(x), fmt.num_groups(x.shape[1])), dtype=torch.float32, device=x.device)
        quantize_tokens(codes, scale, x, fmt)
        return codes, scale


class _HpcOpsExperts(_LibraryExperts):
    """HPC-Ops, which takes ids of all ranks' experts and the number of its own rank."""

    def __init__(self, problem: MoEProblem, platform: Platform, computes: QuantScheme | None = None) -> None:
        super().__init__(problem, platform, computes)
        self._rank: int | None = None

    def rank_of(self, inputs: ExpertInputs) -> int:
        """The rank whose experts these are, which the map of a first call tells."""
        if self._rank is None:
            first = 0 if inputs.expert_map is None else int(inputs.expert_map.ge(0).int().argmax())
            self._rank = first // self.problem.num_local_experts
        return self._rank


class HpcOpsTensorExperts(_HpcOpsExperts):
    """HPC-Ops with one scale a matrix and one for all tokens, which its own kernel quantizes."""

    facts = dataclasses.replace(_FACTS, requires_multiple={"hidden_size": 128, "intermediate_size": 64})
    layouts = ("hpc_ops_tensor",)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """The canonical matrices, and scales of products instead of operands."""
        assert weights.w13_scale is not None
        assert weights.w2_scale is not None
        inputs, intermediate = one_for_all(weights, "a13_scale"), one_for_all(weights, "a2_scale")
        tensors = {
            "w13": weights.w13,
            "w2": weights.w2,
            "w13_scale": one_scale(weights.w13_scale, "w13_scale") * inputs,
            "w2_scale": weights.w2_scale * intermediate,
        }
        return PermutedWeights(self.layouts[0], tensors, {"inputs": inputs, "intermediate": intermediate.reciprocal()})

    def run(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        """Quantizes, and calls the layer with the library's default for the product of gate and up, bf16."""
        codes, _ = torch.ops.hpc.scaled_fp8_quant(inputs.hidden_states, weights["inputs"], None)
        matrices = [weights[name] for name in ("w13", "w2", "w13_scale", "w2_scale", "intermediate")]
        of_rank = inputs.topk_ids, inputs.topk_weights, None, self.rank_of(inputs), self.problem.num_experts
        torch.ops.hpc.fuse_moe(codes, *matrices, *of_rank, True, out)


class HpcOpsBlockExperts(_HpcOpsExperts):
    """HPC-Ops with 128 x 128 scales."""

    layouts = ("hpc_ops_block",)

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """The canonical matrices, and rows of scales padded to multiples of four."""
        tensors = weights.tensors()
        for name in ("w13_scale", "w2_scale"):
            tensors[name] = F.pad(tensors[name], (0, -tensors[name].shape[-1] % 4)).contiguous()
        return PermutedWeights(self.layouts[0], tensors)

    def run(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        """Quantizes, and calls the layer."""
        matrices = [weights[name] for name in ("w13", "w13_scale", "w2", "w2_scale")]
        of_rank = inputs.topk_ids, inputs.topk_weights, None, self.rank_of(inputs), self.problem.num_experts
        torch.ops.hpc.fuse_moe_blockwise(*self.in_groups(inputs.hidden_states), *matrices, *of_rank, out)


class Tile(NamedTuple):
    """Launch parameters of Alpha-MoE."""

    block_m: int
    block_n: int
    warp_n: int
    stages: int


# Those that the library's own search tries.
ALL_TILES: Final = tuple(
    Tile(block_m, *columns, stages)
    for block_m in range(8, 129, 8)
    for columns in ((64, 4), (32, 8))
    for stages in range(1, 6)
    if stages < 5 or block_m <= 100
)


def interleaved(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Rows [E,2R,...], gate first, with gate and up alternating in runs of so many rows: a copy."""
    found: torch.Tensor = tensor.unflatten(1, (2, -1, rows))
    return found.transpose(1, 2).reshape(tensor.shape)


class AlphaMoeExperts(_LibraryExperts):
    """Alpha-MoE: one launch from tokens to sums, with bf16 atomics.

    As its documentation asks, its tiles are searched for each number of tokens, by kernel time with cold caches. The
    first call searches, so later ones with as many tokens and another routing have its tile.
    """

    facts = dataclasses.replace(
        _FACTS,
        placements=frozenset({"contiguous", "map"}),
        requires_multiple={"hidden_size": 256, "intermediate_size": 128},
    )
    layouts = ("alpha_moe",)

    def __init__(self, problem: MoEProblem, platform: Platform, computes: QuantScheme | None = None) -> None:
        super().__init__(problem, platform, computes)
        self._tiles: dict[int, Tile] = {}

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Gate and up rows alternate in eights, and their scales one by one."""
        tensors = weights.tensors()
        tensors |= {"w13": interleaved(tensors["w13"], 8), "w13_scale": interleaved(tensors["w13_scale"], 1)}
        return PermutedWeights(self.layouts[0], tensors)

    def run(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        """Quantizes, sorts, zeroes and calls the layer."""
        from benches.board.padded_routes import padded_on_host, padded_routes

        codes = self.in_groups(inputs.hidden_states)
        matrices = [weights[name] for name in ("w13", "w13_scale", "w2", "w2_scale")]
        num_tokens, top_k = inputs.topk_ids.shape
        num_local = self.problem.num_local_experts

        def launch(tile: Tile, *routes: torch.Tensor) -> None:
            torch.ops.alpha_moe.fused_moe_w8a8_up_down(
                *codes, *matrices, *routes, inputs.topk_weights, out, top_k, *tile, 1.0
            )

        tile = self._tiles.get(num_tokens)
        if tile is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(f"alpha_moe: call the layer with {num_tokens} tokens before capturing a graph of it")
            ids = inputs.topk_ids.view(-1)
            ids = (ids if inputs.expert_map is None else inputs.expert_map[ids]).tolist()
            found: dict[int, list[torch.Tensor]] = {}
            for block_m in sorted({tile.block_m for tile in ALL_TILES if tile.block_m <= max(num_tokens, 16)}):
                routes, experts = padded_on_host(ids, num_local, block_m)
                lists = (routes or [len(ids)] * block_m, experts or [0], [len(routes)])
                found[block_m] = [inputs.topk_ids.new_tensor(values) for values in lists]
            cache = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=out.device)
            tiles = [tile for tile in ALL_TILES if tile.block_m in found]
            times = {tile: _time_of(launch, cache, tile, *found[tile.block_m]) for tile in tiles}
            tile = self._tiles[num_tokens] = min(times, key=times.__getitem__)
            print(f"alpha_moe: {num_tokens} tokens: {tile}, {times[tile]:.3f} ms", flush=True)
        ids_and_map = (inputs.topk_ids, inputs.expert_map, self.problem.num_experts, num_local)
        out.zero_()
        launch(tile, *padded_routes(*ids_and_map, tile.block_m))


# More than the L2 of any GPU that the library runs on.
_CACHE_BYTES: Final = 2**28


def _time_of(launch: Callable[..., None], cache: torch.Tensor, *arguments: Any) -> float:
    """Milliseconds of a launch on this stream whose weights are in no cache: the median of five after one."""
    launch(*arguments)
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(5)]
    for begin, end in pairs:
        cache.zero_()
        begin.record()
        launch(*arguments)
        end.record()
    torch.cuda.current_stream().synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


_BACKENDS: Final[dict[str, tuple[tuple[str, type[Experts]], ...]]] = {
    "hpc_ops": (("fp8_tensor_static", HpcOpsTensorExperts), ("fp8_block128", HpcOpsBlockExperts)),
    "alpha_moe": (("fp8_block128", AlphaMoeExperts),),
}


def register(folder: pathlib.Path | None) -> None:
    """Registers the backends of the libraries that a folder has; a request has to name them.

    Args:
        folder: Of `benches.board.build_libraries`; None registers nothing.

    Raises:
        OSError: A library cannot be loaded.
    """
    for name, classes in _BACKENDS.items():
        path = None if folder is None else folder.resolve() / f"{name}.so"
        if path is None or not path.exists():
            continue
        torch.ops.load_library(path)
        for scheme, experts in classes:
            register_moe_backend(name, 1, (scheme,), ("cuda:sm90",), opt_in=True)(experts)
