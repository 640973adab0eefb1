"""What the tests of the Triton kernels share: inputs, guarded outputs, plans, layers, bounds.

Errors are `||out - ref|| / ||ref||` against fp32 on the same 16-bit inputs. Rounding to p bits has a relative error of
at most u = 2**-p and an rms of at most u / sqrt(3), so r independent roundings add up to u * sqrt(r / 3). The layer
rounds three times: the intermediate, a route's row, the output. Sums stay in fp32; their own error, the bound for fp32,
grows with the root of the reduced size and is about 1e-7 * sqrt(2880 / 256).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from moereg.backends.triton_moe import TritonExperts
from moereg.experts import ExpertInputs
from moereg.facts import fact_reasons
from moereg.kernels.rows.plan import RoutePlan, SortConfig, route_workspace_numel
from moereg.kernels.rows.sort import sort_routes
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.weights import ExpertWeights

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


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """NaN where either holds one."""
    return float((out.double() - reference.double()).norm() / reference.double().norm())


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
    tall: int = 0,
    heavy_first: int = False,
) -> RoutePlan:
    """`sort_routes` in a workspace of garbage, with a guard behind it."""
    needed = route_workspace_numel(*ids.shape, num_local, block_m, config)
    workspace = torch.full((needed + 64,), -(2**30), dtype=torch.int32, device=DEVICE)
    plan = sort_routes(
        ids,
        expert_map,
        num_experts,
        num_local,
        block_m,
        workspace[:needed],
        config,
        tall=tall,
        heavy_first=heavy_first,
    )
    assert (workspace[needed:] == -(2**30)).all(), "sort_routes wrote behind its workspace"
    return plan


def assert_plans_equal(plan: RoutePlan, reference: RoutePlan) -> None:
    for field in dataclasses.fields(RoutePlan):
        expected = getattr(reference, field.name)
        if isinstance(expected, torch.Tensor):
            found = getattr(plan, field.name)
            assert found.numel() >= expected.numel(), field.name
            assert torch.equal(found[: expected.numel()], expected), field.name


def make_weights(problem: MoEProblem) -> ExpertWeights:
    """Weights of the local experts; gate and up differ in scale, so that a swap shows."""
    experts, hidden, inner = problem.num_local_experts, problem.hidden_size, problem.intermediate_size
    halves, dtype = problem.activation.num_halves, problem.torch_dtype
    w13 = random(experts, halves * inner, hidden, dtype=dtype, scale=hidden**-0.5)
    w13[:, :inner] *= 3
    return ExpertWeights(
        w13=w13,
        w2=random(experts, hidden, inner, dtype=dtype, scale=inner**-0.5, seed=1),
        w13_bias=random(experts, halves * inner, dtype=dtype, seed=2) if problem.has_bias else None,
        w2_bias=random(experts, hidden, dtype=dtype, seed=3) if problem.has_bias else None,
    )


@dataclasses.dataclass
class Layer:
    """A layer with its inputs."""

    problem: MoEProblem
    num_tokens: int
    kind: str = "random"

    def __post_init__(self) -> None:
        problem = self.problem
        self.weights = make_weights(problem)
        hidden, dtype = problem.hidden_size, problem.torch_dtype
        self.hidden_states = rows_with_gaps(self.num_tokens, hidden, dtype)
        self.topk_ids = route(self.kind, self.num_tokens, problem.top_k, problem.num_experts)
        self.topk_weights = random(self.num_tokens, problem.top_k, dtype=FP32, seed=4).abs() + 0.1
        self.expert_map = make_map(problem.num_experts, problem.num_local_experts)

    @property
    def inputs(self) -> ExpertInputs:
        return ExpertInputs(self.hidden_states, self.topk_weights, self.topk_ids, expert_map=self.expert_map)

    def run(self, weights: ExpertWeights | None = None) -> torch.Tensor:
        """Runs the backend on poisoned buffers; checks that nothing around them is written and no input changes."""
        experts = TritonExperts(self.problem, SM90)
        assert fact_reasons(experts.facts, self.problem) == []
        assert experts.unsupported_reasons(self.problem, SM90) == []
        permuted = experts.permute_weights(weights or self.weights, self.problem)
        shapes = experts.workspace_shapes(self.problem, self.num_tokens)
        dtype = self.problem.torch_dtype
        out = Guarded(self.num_tokens, self.problem.hidden_size, dtype=dtype)
        workspaces = [Guarded(*shape, dtype=dtype) for shape in shapes]
        before = self.hidden_states.clone(), self.topk_ids.clone(), self.topk_weights.clone()
        experts.apply(out.tensor, self.inputs, permuted, *(workspace.tensor for workspace in workspaces))
        for guarded in (out, *workspaces):
            guarded.check()
        after = self.hidden_states, self.topk_ids, self.topk_weights
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        return out.tensor

    def reference(self) -> torch.Tensor:
        """The layer in fp32 from canonical weights, expert by expert."""
        problem, weights = self.problem, self.weights
        out = torch.zeros(self.num_tokens, problem.hidden_size, device=DEVICE)
        for expert in range(problem.num_experts):
            local = expert if self.expert_map is None else int(self.expert_map[expert])
            tokens, choices = torch.where(self.topk_ids == expert)
            if local < 0 or not tokens.numel():
                continue
            x, scale = self.hidden_states[tokens].float(), self.topk_weights[tokens, choices, None]
            if problem.apply_router_weight_on_input:
                x = x * scale
            x = x @ weights.w13[local].float().T
            if weights.w13_bias is not None:
                x += weights.w13_bias[local].float()
            y = problem.activation(x) @ weights.w2[local].float().T
            if weights.w2_bias is not None:
                y += weights.w2_bias[local].float()
            out.index_add_(0, tokens, y if problem.apply_router_weight_on_input else y * scale)
        return out

    def check(self) -> None:
        """Output against reference."""
        error = relative_error(self.run(), self.reference())
        assert error < bound(self.problem.torch_dtype, 3), error


def make_problem(
    num_experts: int, top_k: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype, **keywords: Any
) -> MoEProblem:
    return MoEProblem(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        dtype=dtype,
        graph_capture=True,
        deterministic=True,
        **keywords,
    )
