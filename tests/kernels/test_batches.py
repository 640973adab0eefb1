"""Triton's kernels of the batched format against torch's way, of which they are the same function, bit for bit."""

from __future__ import annotations

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from moereg.bench.inputs import random_weights
from moereg.dispatch import select_backend
from moereg.errors import ArgumentError
from moereg.kernels.rows import batches
from moereg.kernels.rows.batches import lay_out_batches, sum_batches
from moereg.layer.factory import make_kernel
from moereg.platforms import Platform
from moereg.prepare_finalize import BatchedPrepareFinalize
from moereg.prepare_finalize import batched as module
from moereg.spec.problem import MoEProblem
from moereg.testing.guards import GuardedMemory

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IN_TORCH, IN_TRITON = BatchedPrepareFinalize(in_triton=False), BatchedPrepareFinalize(in_triton=True)
NAN = math.nan


def problem_of(num_experts: int, num_local: int, top_k: int, hidden_size: int, **facts: object) -> MoEProblem:
    return MoEProblem(
        num_experts=num_experts,
        num_local_experts=num_local,
        hidden_size=hidden_size,
        intermediate_size=8,
        top_k=top_k,
        activation_format="batched",
        **{"placement": "contiguous" if num_local == num_experts else "map", "dtype": "float32", **facts},
    )


@st.composite
def layers(draw: st.DrawFn) -> tuple[MoEProblem, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A problem, tokens, ids in and out of range, the same ones several times, and a map that may lead anywhere."""
    num_tokens, num_experts, top_k = (draw(st.integers(*ends)) for ends in ((0, 9), (1, 6), (1, 4)))
    top_k = min(top_k, num_experts)
    has_map = draw(st.booleans())
    num_local = draw(st.integers(1, num_experts)) if has_map else num_experts
    dtype = draw(st.sampled_from(("float32", "bfloat16", "float16")))
    problem = problem_of(num_experts, num_local, top_k, draw(st.sampled_from((8, 72))), dtype=dtype)
    strange = (-(2**31), -1, num_experts, 2**31 - 1)
    one = st.integers(0, num_experts - 1) | st.sampled_from(strange)
    ids = draw(st.lists(one, min_size=num_tokens * top_k, max_size=num_tokens * top_k))
    goal = st.integers(-2, num_local)
    expert_map = draw(st.lists(goal, min_size=num_experts, max_size=num_experts)) if has_map else None
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tokens = torch.randn(num_tokens, problem.hidden_size, generator=generator).to(DEVICE, problem.torch_dtype)
    return (
        problem,
        tokens,
        torch.tensor(ids, dtype=torch.int32).view(num_tokens, top_k).to(DEVICE),
        None if expert_map is None else torch.tensor(expert_map, dtype=torch.int32).to(DEVICE),
    )


@hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
@hypothesis.given(layers())
def test_any_routing(layer: tuple[MoEProblem, torch.Tensor, torch.Tensor, torch.Tensor | None]) -> None:
    problem, tokens, ids, expert_map = layer
    check(problem, tokens, ids, expert_map)


def check(problem: MoEProblem, tokens: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor | None) -> None:
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    expected = IN_TORCH.prepare(tokens, weights, ids, problem, expert_map)
    goes = expected.row_of_route
    assert goes is not None
    weights[goes < 0] = NAN  # Nobody checks the weight of a route that goes nowhere.
    prepared = IN_TRITON.prepare(tokens, weights, ids, problem, expert_map)
    assert prepared.num_tokens == expected.num_tokens
    rows, counts = prepared.inputs.hidden_states, prepared.inputs.expert_num_tokens
    assert counts is not None
    assert prepared.row_of_route is not None
    assert expected.inputs.expert_num_tokens is not None
    assert counts.dtype == torch.int32
    assert torch.equal(counts, expected.inputs.expert_num_tokens)
    assert torch.equal(prepared.row_of_route.long(), goes)
    valid = torch.arange(len(tokens), device=DEVICE) < counts.unsqueeze(1)
    assert rows.shape == expected.inputs.hidden_states.shape
    assert rows.is_contiguous()
    assert torch.equal(rows[valid], expected.inputs.hidden_states[valid])
    # What experts leave in rows that do not count must not come through.
    expert_out = torch.randn(rows.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, rows.dtype)
    expert_out[~valid] = NAN
    outs = [torch.full_like(tokens, NAN) for _ in range(3)]
    IN_TORCH.finalize(outs[0], expert_out, expected, problem)
    IN_TRITON.finalize(outs[1], expert_out, prepared, problem)
    IN_TRITON.finalize(outs[2], expert_out, expected, problem)
    assert torch.equal(outs[1], outs[2])
    if ids.shape[1] <= 2 and DEVICE.type == "cpu":
        # torch adds more than two in an order of its own, and a GPU multiplies and adds in one step.
        assert torch.equal(outs[0], outs[1])
    torch.testing.assert_close(outs[1], outs[0])


def ids_of(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("ids_at_once", [2, 8, 2048])
def test_places_go_on_from_one_piece_to_the_next(ids_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than a program reads at a time."""
    monkeypatch.setattr(batches, "_IDS", ids_at_once)
    ids = ids_of([0, 1], [1, 2], [1, 1], [3, 0], [2, 1], [-1, 0], [0, 3], [1, 0], [1, 7])
    tokens = torch.randn(9, 24, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    check(problem_of(4, 4, 2, 24), tokens, ids, None)


def test_rows_of_more_columns_than_a_program_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_COLUMNS", 16)
    tokens = torch.randn(3, 40, generator=torch.Generator().manual_seed(4)).to(DEVICE, torch.bfloat16)
    problem = problem_of(4, 2, 3, 40, dtype="bfloat16")
    check(problem, tokens, ids_of([2, 0, 2], [0, 1, 3], [3, 3, 1]), ids_of([1, -1, 1, 0])[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_may_scale_inputs(dtype: str) -> None:
    problem = problem_of(4, 4, 1, 24, dtype=dtype, apply_router_weight_on_input=True)
    tokens = torch.randn(5, 24, generator=torch.Generator().manual_seed(5)).to(DEVICE, problem.torch_dtype)
    check(problem, tokens, ids_of([2], [0], [2], [4], [-1]), None)


def test_writes_nothing_beside_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard bands stand around what is allocated, and rows that do not count keep what was there."""
    memory = GuardedMemory(DEVICE)

    real = torch.Tensor.new_empty

    def new_empty(tensor: torch.Tensor, *shape: int, **options: object) -> torch.Tensor:
        # The interpreter makes copies of its own.
        return real(tensor, *shape, **options) if options else memory.allocate("new", shape, tensor.dtype)

    problem = problem_of(4, 4, 3, 40)
    tokens = torch.randn(5, 40, generator=torch.Generator().manual_seed(6)).to(DEVICE)
    # Every token names one expert more often than there are rows for.
    ids = ids_of(*[[3, 3, 3]] * 4, [-1, 9, 0])
    weights = torch.rand(5, 3, device=DEVICE)
    given = [memory.copy("given", tensor) for tensor in (tokens, weights, ids)]
    memory.freeze()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", new_empty)
        patch.setattr(torch, "empty_like", lambda tensor: new_empty(tensor, *tensor.shape))
        prepared = IN_TRITON.prepare(*given, problem, None)
    rows, counts = prepared.inputs.hidden_states, prepared.inputs.expert_num_tokens
    assert counts is not None
    assert counts.tolist() == [1, 0, 0, 4]
    assert rows[torch.arange(5, device=DEVICE) >= counts.unsqueeze(1)].isnan().all()
    assert torch.equal(rows[3, :4], tokens[:4])
    out = memory.allocate("out", (5, 40), torch.float32)
    IN_TRITON.finalize(out, rows, prepared, problem)
    torch.testing.assert_close(out[:4], tokens[:4] * weights[:4].sum(1, keepdim=True))
    memory.check()


def test_inputs_of_other_strides() -> None:
    tokens = torch.randn(6, 80, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    ids = ids_of([0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 2, 2])
    weights = torch.rand(3, 4, device=DEVICE)
    # Rows that are further apart, columns that are, and routes that are.
    for x in (tokens[::2, :40], tokens[:3, ::2]):
        found = lay_out_batches(x, ids[:, ::2], None, 4)
        expected = lay_out_batches(x.contiguous(), ids[:, ::2].contiguous(), None, 4)
        assert torch.equal(found.row_of_route, expected.row_of_route)
        outs = torch.full((6, 40), NAN, device=DEVICE), torch.full((3, 40), NAN, device=DEVICE)
        sum_batches(outs[0][::2], found.rows, found.row_of_route, weights[:, ::2])
        sum_batches(outs[1], expected.rows, expected.row_of_route, weights[:, ::2].contiguous())
        assert torch.equal(outs[0][::2], outs[1])
        assert outs[0][1::2].isnan().all()


def test_a_layer_gives_the_same_where_kernels_move_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code too, in which a layer is one op."""
    problem = problem_of(4, 4, 2, 16)
    weights = random_weights(problem, torch.Generator().manual_seed(0), DEVICE)
    kernel = make_kernel(problem, weights, select_backend(problem, require="torch"))
    tokens = torch.randn(3, 16, generator=torch.Generator().manual_seed(8)).to(DEVICE)
    gates, ids = torch.rand(3, 2, device=DEVICE), ids_of([0, 3], [-1, 3], [2, 0])
    monkeypatch.setattr(kernel.prepare_finalize, "_in_triton", False)
    expected = kernel(tokens, gates, ids)
    monkeypatch.setattr(kernel.prepare_finalize, "_in_triton", True)
    called: list[int] = []
    monkeypatch.setattr(batches, "lay_out_batches", lambda *given: called.append(1) or lay_out_batches(*given))
    for call in (kernel, torch.compile(kernel.__call__, backend="eager", fullgraph=True)):
        torch.testing.assert_close(call(tokens, gates, ids), expected)
    assert kernel(tokens[:0], gates[:0], ids[:0]).shape == (0, 16)
    assert len(called) == 2


def test_triton_where_it_cannot_run_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(2, 2, 1, 8)
    given = torch.zeros(1, 8), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    expected = IN_TORCH.prepare(*given, problem, None)
    calls = (
        lambda: IN_TRITON.prepare(*given, problem, None),
        lambda: IN_TRITON.finalize(given[0], expected.inputs.hidden_states, expected, problem),
    )
    with monkeypatch.context() as patched:
        patched.delenv("TRITON_INTERPRET", raising=False)
        for call in calls:
            with pytest.raises(ArgumentError, match="needs a GPU that Triton knows, got tokens on cpu; pass None"):
                call()
        assert module.calls_kernels(True, "cuda")
        assert not module.calls_kernels(False, "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert module.calls_kernels(True, "cpu")
    monkeypatch.setattr(module, "_has_triton", lambda: False)
    for call in calls:
        with pytest.raises(ArgumentError, match="needs Triton, got a Python without it; install triton or pass None"):
            call()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU: graphs are captured there")
def test_a_graph_follows_its_inputs() -> None:
    problem = problem_of(8, 4, 3, 520, dtype="bfloat16")
    expert_map = ids_of([0, -1, 1, 1, 2, -1, 3, 0])[0]
    static = [torch.empty(33, 520, dtype=torch.bfloat16, device=DEVICE), torch.empty(33, 3, device=DEVICE)]
    ids = torch.zeros(33, 3, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(static[0])

    def run() -> None:
        prepared = IN_TRITON.prepare(*static, ids, problem, expert_map)
        IN_TRITON.finalize(out, prepared.inputs.hidden_states, prepared, problem)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ids.copy_(torch.randint(-1, 9, (33, 3), generator=generator, dtype=torch.int32))
        for tensor in static:
            tensor.copy_(torch.rand(tensor.shape, generator=generator))
        graph.replay()
        found = out.clone()
        prepared = IN_TORCH.prepare(*static, ids, problem, expert_map)
        IN_TORCH.finalize(out, prepared.inputs.hidden_states, prepared, problem)
        torch.testing.assert_close(found, out)
        # Replayed eagerly, with tensors elsewhere; and launched, from addresses that no recording serves.
        for offset in (0, 1):
            moved = torch.empty(33 * 520 + 8, dtype=torch.bfloat16, device=DEVICE)[offset:][: 33 * 520].view(33, 520)
            moved.copy_(static[0])
            check(problem, moved, ids.clone(), expert_map)


def test_who_moves_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = (
        ("cuda", "sm90", {"triton": "3.6.0"}, True),
        ("cuda", "sm80", {"triton": "3.8.0+git1"}, True),
        ("cuda", "sm90", {}, False),
        ("cuda", "sm90", {"triton": "3.5.1"}, False),
        ("cuda", "sm90", {"triton": "unknown"}, False),
        ("cuda", "sm75", {"triton": "3.6.0"}, False),
        ("rocm", "gfx942", {"triton": "3.6.0"}, False),
    )
    for kind, arch, versions, expected in machines:
        platform = Platform(kind, arch, versions=versions)
        module._device_runs_kernels.cache_clear()
        monkeypatch.setattr(module, "probe_platform", lambda platform=platform: platform)
        assert module._device_runs_kernels("cuda") is expected, (platform, versions)
        assert not module._device_runs_kernels("cpu")
        assert not module._device_runs_kernels("meta")
    module._device_runs_kernels.cache_clear()
