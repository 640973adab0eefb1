"""Both products of packed weights in one launch: the bits of two launches in every call, and which calls take it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from moereg.backends._triton import packed, schedules
from moereg.backends._triton.packed import Flagged
from moereg.backends.triton_moe import TritonPackedExperts
from moereg.bench.inputs import random_call, random_weights
from moereg.dispatch import select_backend
from moereg.experts import ExpertInputs
from moereg.kernels.gemm import flagged
from moereg.kernels.rows import reduce, sort
from moereg.kernels.rows.plan import RoutePlan, SortConfig, max_num_blocks, route_workspace_numel
from moereg.kernels.rows.sort import sort_routes
from moereg.kernels.sizes import FLAG_WORDS
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.platforms import Platform
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem
from moereg.testing.cases import default_device
from moereg.weights.permuted import ExpertWeights, PermutedWeights
from tests.kernels.triton_cases import select_schedule

DEVICE = default_device()
SM90 = Platform.from_name("cuda:sm90")

# What lies in scratch before a call, NaN twice; a flag of these bits would let every tile pass.
GARBAGE = 0x7FC07FC0


@contextlib.contextmanager
def in_two_launches() -> Iterator[None]:
    """Calls inside take the same tiles in two launches."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(packed, "shares_launch", lambda *_: False)
        yield


# Two tiles of columns in each product, of which the last reach past the matrices.
def small_problem(scheme: str, *, on_input: bool = False) -> MoEProblem:
    return MoEProblem(
        num_experts=12,
        num_local_experts=9,
        top_k=1 if on_input else 3,
        hidden_size=136,
        intermediate_size=72,
        dtype="bfloat16",
        quant=scheme,
        activation="swigluoai",
        has_bias=True,
        apply_router_weight_on_input=on_input,
    )


EXPERT_MAP = [2, -1, 0, 1, 5, 3, -1, 4, 8, 7, 6, -1]


def small_inputs(problem: MoEProblem, num_tokens: int, number: int) -> ExpertInputs:
    """Routes of a numbered call: some to experts of other ranks and to none; in call 1 one expert has most."""
    generator = torch.Generator().manual_seed(number)
    tokens, choices = torch.arange(num_tokens)[:, None], torch.arange(problem.top_k)[None, :]
    ids = (tokens * (1 if number == 1 else 5) // (4 if number == 1 else 1) + choices * 4 + number) % 12
    ids[tokens.flatten() % 5 == 3, 0] = torch.tensor([-1, 12, 99])[number % 3]
    return ExpertInputs(
        torch.randn(num_tokens, problem.hidden_size, generator=generator).to(DEVICE, problem.torch_dtype),
        torch.rand(num_tokens, problem.top_k, generator=generator).to(DEVICE),
        ids.to(DEVICE, torch.int32),
        expert_map=torch.tensor(EXPERT_MAP, dtype=torch.int32, device=DEVICE),
    )


def run(experts: TritonPackedExperts, permuted: PermutedWeights, inputs: ExpertInputs) -> torch.Tensor:
    """The output of a call in scratch full of garbage."""
    out = torch.full_like(inputs.hidden_states, torch.nan)
    shapes = experts.workspace_shapes(experts.problem, len(out))
    # Nothing of a call before is left there.
    scratch = [torch.full(s, GARBAGE & 0xFFFF, dtype=torch.int16, device=DEVICE).view(out.dtype) for s in shapes]
    experts.apply(out, inputs, permuted, *scratch)
    return out


@pytest.mark.parametrize(
    ("scheme", "on_input", "tokens"),
    [
        ("mxfp4_w4a16", False, (9,)),
        pytest.param("mxfp4_w4a16", True, (9, 16, 9), marks=pytest.mark.slow),
        pytest.param("nvfp4_w4a16", False, (12,), marks=pytest.mark.slow),
        pytest.param("int4_w4a16_g128", False, (9,), marks=pytest.mark.slow),
        pytest.param("int4_w4a16_g32_zp", False, (13,), marks=pytest.mark.slow),
    ],
)
def test_one_launch_gives_the_bits_of_two(
    scheme: str, on_input: bool, tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = small_problem(scheme, on_input=on_input)
    weights = random_weights(problem, torch.Generator().manual_seed(0), DEVICE)
    experts = TritonPackedExperts(problem, SM90)
    permuted = experts.permute_weights(weights, problem)
    plans: list[RoutePlan] = []
    both_gemms = packed.both_gemms

    def watched(*args: Any, **keywords: Any) -> None:
        plan = args[5]
        assert plan.flags[: int(plan.num_blocks), 0].tolist() == [0] * int(plan.num_blocks)
        both_gemms(*args, **keywords)
        plans.append(plan)

    monkeypatch.setattr(packed, "both_gemms", watched)
    for number, num_tokens in enumerate(tokens):
        inputs = small_inputs(problem, num_tokens, number)
        out = run(experts, permuted, inputs)
        expected = reference_experts(
            problem, weights, inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, inputs.expert_map
        )
        assert relative_error(out, expected) <= tolerance(problem.quant, problem.dtype, out.numel())
        with in_two_launches():
            alone = run(TritonPackedExperts(problem, SM90), permuted, inputs)
        assert torch.equal(out, alone)
        # Each tile of the first product has counted once, and nothing else was written there.
        assert len(plans) == number + 1
        plan, num_blocks = plans[-1], int(plans[-1].num_blocks)
        assert plan.flags[:num_blocks, 0].tolist() == [2] * num_blocks
        assert (plan.flags[num_blocks:] == GARBAGE).all()
        assert (plan.flags[:, 1:] == GARBAGE).all()
        assert 0 < num_blocks < plan.max_blocks


@pytest.mark.parametrize("config", [SortConfig(), SortConfig(single_launch_routes=0, chunk=32)], ids=["one", "several"])
def test_the_sort_clears_the_flags_of_used_tiles_alone(config: SortConfig) -> None:
    ids = torch.tensor([[0, 1, 2], [0, 3, 7], [0, 1, -1], [0, 1, 9]] * 4, dtype=torch.int32, device=DEVICE)
    words = route_workspace_numel(16, 3, 8, 8, config)
    workspace = torch.full((words,), GARBAGE, dtype=torch.int32, device=DEVICE)
    most = max_num_blocks(48, 8, 8)
    guarded = torch.full((most + 2, FLAG_WORDS), GARBAGE, dtype=torch.int32, device=DEVICE)
    plan = sort_routes(ids, None, 8, 8, 8, workspace, config, flags=guarded[1:-1])
    # Experts 0 and 1 have 16 and 12 rows, three have 4.
    num_blocks = int(plan.num_blocks)
    assert num_blocks == 7 < most
    expected = torch.full_like(guarded, GARBAGE)
    expected[1 : 1 + num_blocks, 0] = 0
    assert torch.equal(guarded, expected)


def test_only_what_comes_behind_the_sort_starts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sort clears flags that a call before may poll, so it starts when all before it have ended; see `overlap`."""
    launched: list[tuple[str, bool]] = []

    def launch(kernel: Any, _grid: tuple[int, ...], *_arguments: Any, **options: Any) -> None:
        launched.append((kernel.__name__, options.get("launch_pdl", False)))
        assert options["OVERLAP"]

    for module in (sort, flagged, reduce):
        monkeypatch.setattr(module, "launch", launch)
    monkeypatch.setattr("moereg.backends._triton.recorded.can_overlap", lambda _device: True)
    problem = small_problem("mxfp4_w4a16")
    weights = random_weights(problem, torch.Generator().manual_seed(0), DEVICE)
    experts = TritonPackedExperts(problem, SM90)
    run(experts, experts.permute_weights(weights, problem), small_inputs(problem, 9, 0))
    assert launched == [("_sort_routes_kernel", False), ("_both_kernel", True), ("_reduce_routes_kernel", True)]


@pytest.mark.parametrize(
    ("model", "num_tokens", "schedule", "columns"),
    [
        ("gpt-oss-120b", 1, schedules.Single, 32),
        ("gpt-oss-120b", 2, schedules.Direct, 64),
        ("gpt-oss-120b", 3, schedules.Direct, 128),
        ("gpt-oss-120b", 8, schedules.Direct, 128),
        ("gpt-oss-120b", 9, Flagged, 128),
        ("gpt-oss-120b", 16, Flagged, 128),
        ("gpt-oss-120b", 17, schedules.Sorted, 128),
        ("qwen3-30b-a3b", 8, schedules.Direct, 128),
        ("qwen3-30b-a3b", 16, Flagged, 128),
        ("mixtral-8x7b", 2, schedules.Direct, 64),
        ("mixtral-8x7b", 4, schedules.Direct, 128),
        ("mixtral-8x7b", 16, Flagged, 128),
    ],
)
@pytest.mark.parametrize("scheme", ["mxfp4_w4a16", "int8_w8a16"])
def test_which_calls_share_a_launch(scheme: str, model: str, num_tokens: int, schedule: type, columns: int) -> None:
    """Those that an H200 runs faster: weights of 4 bits."""
    problem = MoEProblem(**(get_shape(model).problem_keywords() | {"quant": scheme}))
    chosen = select_schedule(problem, num_tokens, device="cpu")
    if scheme == "int8_w8a16":
        columns = 32 if num_tokens == 1 else 128
        schedule = schedules.Sorted if schedule is Flagged else schedule
    assert type(chosen) is schedule
    assert chosen.configs.gate_up.block_n == columns
    if schedule is Flagged:
        assert chosen.configs.gate_up.tall is None
        with in_two_launches():
            alone = select_schedule(problem, num_tokens, device="cpu")
        assert type(alone) is schedules.Sorted
        assert alone.configs == chosen.configs


@pytest.mark.parametrize(
    ("changes", "platform"),
    [
        ({"num_experts": 9, "num_local_experts": 9}, "cuda:sm90"),  # 5.3 rows an expert.
        ({"dtype": "float16"}, "cuda:sm90"),
        ({}, "cuda:sm100"),
        ({}, "cuda:sm89"),
        ({}, "rocm:gfx942"),
        ({"activation_format": "batched"}, "cuda:sm90"),
        # No guard of 288 rows holds flags of 16 * 30 routes there.
        ({"num_experts": 100, "num_local_experts": 100, "top_k": 30, "hidden_size": 64}, "cuda:sm90"),
    ],
)
def test_others_take_two_launches(changes: dict[str, Any], platform: str) -> None:
    problem = dataclasses.replace(small_problem("mxfp4_w4a16"), num_local_experts=12)
    assert type(select_schedule(problem, 16, device="cpu")) is Flagged
    changed = dataclasses.replace(problem, **changes)
    assert type(select_schedule(changed, 16, Platform.from_name(platform), "cpu")) is not Flagged


def test_flags_take_no_scratch_of_their_own() -> None:
    """They lie in the guard, which this schedule does without."""
    problem = small_problem("mxfp4_w4a16")
    experts = TritonPackedExperts(problem, SM90)
    rest = TritonPackedExperts(problem, Platform.from_name("cuda:sm100"))
    for num_tokens in (8, 9, 16, 17):
        assert experts.workspace_shapes(problem, num_tokens) == rest.workspace_shapes(problem, num_tokens)


# On a Hopper GPU.

on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]

LARGE = MoEProblem(
    num_experts=64, top_k=8, hidden_size=1024, intermediate_size=512, dtype="bfloat16", quant="mxfp4_w4a16"
)


@dataclasses.dataclass
class Twins:
    """Two kernels of equal weights; calls of `alone` take two launches."""

    weights: ExpertWeights
    shared: MoEKernel
    other: MoEKernel

    def alone(self, *call: torch.Tensor) -> torch.Tensor:
        with in_two_launches():
            return self.other(*call)

    def fresh(self) -> MoEKernel:
        """Another one, that was never called."""
        return make_kernel(LARGE, self.weights, select_backend(LARGE, require="triton"))


@pytest.fixture
def twins() -> Twins:
    weights = random_weights(LARGE, torch.Generator().manual_seed(0), torch.device("cuda"))
    selection = select_backend(LARGE, require="triton")
    made = Twins(weights, make_kernel(LARGE, weights, selection), make_kernel(LARGE, weights, selection))
    # Compiles what the calls below launch, which a capture cannot.
    for call in calls(1):
        assert torch.equal(made.shared(*call), made.alone(*call))
    return made


def calls(count: int, num_tokens: int = 16, seed: int = 1) -> list[tuple[torch.Tensor, ...]]:
    """Calls whose routings are even, uneven and all alike in turn."""
    generator = torch.Generator("cuda").manual_seed(seed)
    routings = ("uniform", "zipf", "one_set")
    return [tuple(random_call(LARGE, num_tokens, routings[n % 3], generator)) for n in range(count)]


def assert_equal(outs: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.cuda.synchronize()
    for number, (out, one) in enumerate(zip(outs, expected, strict=True)):
        assert torch.equal(out, one), number


class TestOnHopper:
    pytestmark = on_hopper

    def test_these_calls_share_a_launch(self) -> None:
        assert all(type(select_schedule(LARGE, num_tokens, device="cpu")) is Flagged for num_tokens in range(9, 17))

    def test_a_first_call_that_is_captured_and_200_replays(self, twins: Twins) -> None:
        kernel, held = twins.fresh(), calls(1)[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernel(*held)
        between = twins.fresh()
        for number, call in enumerate(calls(200, seed=2)):
            for tensor, values in zip(held, call, strict=True):
                tensor.copy_(values)
            out.fill_(torch.nan)
            graph.replay()
            # Eager calls of the layer whose first call was captured, and of another.
            eager = (kernel if number % 2 else between)(*call)
            expected = twins.alone(*call)
            assert torch.equal(out, expected), number
            assert torch.equal(eager, expected), number

    def test_graphs_on_two_streams_at_once(self, twins: Twins) -> None:
        """Replays of captured calls of two copies, which nothing orders.

        Every call's sort clears flags in scratch that the one before has just used.
        """
        every = [calls(8, seed=7 + n) for n in range(2)]
        expected = [[twins.alone(*call) for call in own] for own in every]
        outs = [[torch.empty_like(call[0]) for call in own] for own in every]
        kernel = twins.fresh()
        kernels, graphs = (kernel, copy.deepcopy(kernel)), [torch.cuda.CUDAGraph() for _ in range(2)]
        for each, graph, own, into in zip(kernels, graphs, every, outs, strict=True):
            with torch.cuda.graph(graph):
                for call, out in zip(own, into, strict=True):
                    each(*call, out=out)
        streams = [torch.cuda.Stream() for _ in graphs]
        torch.cuda.synchronize()
        for _ in range(50):
            for stream, graph in zip(streams, graphs, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        for own_expected, own_outs in zip(expected, outs, strict=True):
            assert_equal(own_outs, own_expected)

    def test_calls_of_other_numbers_of_tokens_in_between(self, twins: Twins) -> None:
        """All share a stream's scratch, in which flags of one call lie where others have rows."""
        counts = (16, 9, 1, 12, 4, 64, 16, 300, 10, 8, 13, 2)
        every = [call for n, count in enumerate(counts * 5) for call in calls(1, count, seed=20 + n)]
        expected = [twins.alone(*call) for call in every]
        outs = [twins.shared(*call) for call in every]
        assert_equal(outs, expected)
