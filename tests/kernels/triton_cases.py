"""What the tests of the Triton kernels share: inputs, guarded outputs, plans, layers, bounds.

Errors are `||out - ref|| / ||ref||` against fp32 on the same 16-bit inputs. Rounding to p bits has a relative error of
at most u = 2**-p and an rms of at most u / sqrt(3), so r independent roundings add up to u * sqrt(r / 3). The layer
rounds three times: the intermediate, a route's row, the output. Sums stay in fp32; their own error, the bound for fp32,
grows with the root of the reduced size and is about 1e-7 * sqrt(2880 / 256).
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from typing import Any

import pytest
import torch

from moereg.backends._loaded import Call
from moereg.backends.triton_moe import TritonExperts, TritonPackedBatchedExperts, TritonPackedExperts
from moereg.experts import ExpertInputs
from moereg.kernels.rows.block_map import BlockMap, batch_workspace_numel, plan_batches
from moereg.kernels.rows.plan import RoutePlan, SortConfig, route_workspace_numel
from moereg.kernels.rows.sort import sort_routes
from moereg.platforms import Platform
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import PermutedWeights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SM90 = Platform.from_name("cuda:sm90")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDOFF = {BF16: 2.0**-8, FP16: 2.0**-11}

ONE_LAUNCH = SortConfig()
# Small pieces, so that small inputs span several chunks and a chunk several programs.
THREE_LAUNCHES = SortConfig(single_launch_routes=0, chunk=32, routes_per_program=16, short_scan=0, num_warps=1)
TWO_LAUNCHES = dataclasses.replace(THREE_LAUNCHES, short_scan=4096, short_routes=8, short_compares=16)

on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


def bound(dtype: torch.dtype, roundings: int) -> float:
    """The derivation above, with a quarter added."""
    return 2e-6 if dtype == FP32 else 1.25 * ROUNDOFF[dtype] * math.sqrt(roundings / 3)


class Guarded:
    """A NaN-filled tensor with NaN around it that has to stay."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        self._flat = torch.full((math.prod(shape) + 512,), math.nan, dtype=dtype, device=DEVICE)
        self.tensor = self._flat[256:-256].view(shape)

    def check(self) -> None:
        assert self._flat[:256].isnan().all(), "a kernel wrote in front of its tensor"
        assert self._flat[-256:].isnan().all(), "a kernel wrote behind its tensor"


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(hash((shape, seed)) % 2**31)
    return torch.randn(shape, generator=generator, device=DEVICE).mul_(scale).to(dtype)


def far_apart(*shape: int) -> torch.Tensor:
    """[3, ...] bf16 on a CPU, 2**30 elements apart: addresses alone, of 8 GiB only three pages are ever there."""
    # MAP_NORESERVE, which Python names from 3.13 on, so that a machine with less memory gives the addresses too.
    pages = mmap.mmap(-1, 2 * (2**32 + 64 * 64), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    # In the middle: an offset that wrapped around would be 2^32 elements less, and still in the buffer.
    last = torch.empty(shape[1:], device="meta").stride()
    return torch.frombuffer(pages, dtype=BF16)[2**31 :].as_strided(shape, (2**30, *last))


def rows_with_gaps(num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows with NaN behind each."""
    padded = torch.full((num_rows, size + 24), math.nan, dtype=dtype, device=DEVICE)
    padded[:, :size] = random(num_rows, size, dtype=dtype)
    return padded[:, :size]


def route(kind: str, num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    """topk_ids of a kind of routing."""
    generator = torch.Generator().manual_seed(num_tokens * 1000 + top_k)
    if kind == "one_expert":
        ids = torch.full((num_tokens, top_k), num_experts - 1)
    elif kind == "nothing":
        ids = torch.full((num_tokens, top_k), -1)
    else:
        ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :top_k]
    if kind == "out_of_range":
        bad = torch.tensor([-(2**31), -1, num_experts, 2**31 - 1])
        where = torch.rand(ids.shape, generator=generator) < 0.4
        ids = torch.where(where, bad[torch.randint(4, ids.shape, generator=generator)], ids)
    return ids.int().to(DEVICE)


def make_map(num_experts: int, num_local: int) -> torch.Tensor | None:
    """A shuffled placement of some experts; the identity, given as None, where all are local."""
    if num_local == num_experts:
        return None
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(num_experts))
    mapping = torch.full((num_experts,), -1)
    mapping[order[:num_local]] = torch.arange(num_local)
    return mapping.int().to(DEVICE)


def make_plan(
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    num_experts: int,
    num_local: int,
    block_m: int,
    config: SortConfig = ONE_LAUNCH,
    **keywords: Any,
) -> RoutePlan:
    """`sort_routes` in a workspace of garbage, with a guard behind it."""
    needed = route_workspace_numel(*ids.shape, num_local, block_m, config)
    workspace = torch.full((needed + 64,), -(2**30), dtype=torch.int32, device=DEVICE)
    plan = sort_routes(ids, expert_map, num_experts, num_local, block_m, workspace[:needed], config, **keywords)
    assert (workspace[needed:] == -(2**30)).all(), "sort_routes wrote behind its workspace"
    return plan


def make_batched_plan(
    counts: list[int], max_tokens: int, block_m: int, slack: int = 0, tall: int = 0, heavy_first: int = False
) -> BlockMap:
    """`plan_batches` in a workspace of garbage, with a guard behind it."""
    needed = batch_workspace_numel(len(counts), max_tokens, block_m)
    workspace = torch.full((needed + 64,), -(2**30), dtype=torch.int32, device=DEVICE)
    expert_num_tokens = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    plan = plan_batches(
        expert_num_tokens, max_tokens, block_m, workspace[:needed], slack, tall=tall, heavy_first=heavy_first
    )
    assert (workspace[needed:] == -(2**30)).all(), "plan_batches wrote behind its workspace"
    assert expert_num_tokens.tolist() == counts
    return plan


def assert_plans_equal(plan: RoutePlan, reference: RoutePlan) -> None:
    for field in dataclasses.fields(RoutePlan):
        expected = getattr(reference, field.name)
        if isinstance(expected, torch.Tensor):
            found = getattr(plan, field.name)
            assert found.numel() >= expected.numel(), field.name
            assert torch.equal(found[: expected.numel()], expected), field.name


def make_problem(
    num_experts: int, top_k: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype, **keywords: Any
) -> MoEProblem:
    sizes = {"num_experts": num_experts, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
    return MoEProblem(**sizes, top_k=top_k, dtype=dtype, graph_capture=True, deterministic=True, **keywords)


def select_schedule(
    problem: MoEProblem, num_tokens: int, platform: Platform = SM90, device: str = "meta", **given: Any
) -> Any:
    """The schedule of a call on tensors without contents, but for `hidden_states` and `weights` that are given."""
    batched = problem.activation_format == "batched"
    packed = TritonPackedBatchedExperts if batched else TritonPackedExperts
    experts = (packed if problem.quant.weight else TritonExperts)(problem, platform)
    sizes = (problem.num_experts,) * batched + (num_tokens, problem.hidden_size)
    rows = given.get("hidden_states", torch.empty(sizes, dtype=problem.torch_dtype, device=device))
    topk_ids = torch.empty(num_tokens, problem.top_k, dtype=torch.int32, device=device)
    inputs = ExpertInputs(rows, topk_ids.float(), topk_ids)
    weights = PermutedWeights("none", given.get("weights", {}))
    return experts.implementation.select(Call(rows, inputs, weights, rows, rows))  # type: ignore[attr-defined]
