"""Layers of every Triton class, in both formats, at sizes and counts that only these kernels have borders at.

Interpreted on a CPU, compiled where there is a CUDA device. The bounds are those of kernels that round where the
reference does; what every backend has to do, `tests/kit/test_conformance.py` checks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

pytest.importorskip("triton")

from moereg.backends import triton_moe
from moereg.dispatch import select_backend
from moereg.experts import ExpertInputs
from moereg.layer.factory import make_kernel
from moereg.numerics.reference import calibrate_activation_scales, reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.platforms import Platform
from moereg.quantize import quantize_weights
from moereg.spec.facts import fact_reasons
from moereg.spec.problem import MoEProblem
from moereg.testing.cases import Case
from moereg.testing.checks import GuardedLayer
from moereg.testing.inputs import make_inputs, make_plain_weights, make_weights
from moereg.weights.permuted import ExpertWeights
from tests.backends.test_triton_quantized import DEVICE, MULTIPLIES_NVFP4, NAMED, SM90, bits, random, rows_that_count
from tests.kernels.triton_cases import Guarded, on_gpu

pytestmark = pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")

SM100: Final = Platform.from_name("cuda:sm100")
CODES: Final = tuple(name for name in NAMED if name != "nvfp4")
# nvfp4 is multiplied as codes on sm100, and rounded to 16-bit numbers on sm90.
EMULATED: Final = ("nvfp4", "mxfp4_mxfp8")
EVERY: Final = (
    *(("unquantized", SM90), ("int4_w4a16_g32_zp", SM90), *((name, SM90) for name in (*EMULATED, *CODES))),
    *([("nvfp4", SM100)] if MULTIPLIES_NVFP4 else []),
)
QUANTIZED: Final = EVERY[2:]
each_format = pytest.mark.parametrize("activation_format", ["standard", "batched"])


def each(*kinds: tuple[str, Platform]) -> Any:
    """Parametrizes with schemes and platforms."""
    return pytest.mark.parametrize(("scheme", "platform"), kinds, ids=[f"{name}-{on}" for name, on in kinds])


def make_problem(scheme: str, **keywords: Any) -> MoEProblem:
    sizes = {"num_experts": 4, "hidden_size": 130, "intermediate_size": 200, "top_k": 2}
    return MoEProblem(**{**sizes, "quant": scheme, "exact_activations": True, **keywords})


def case_of(problem: MoEProblem, platform: Platform) -> Case:
    winner = select_backend(problem, platform, require="triton").winner
    return Case(winner.cell, platform, problem)


def bound_of(problem: MoEProblem, num_rows: int) -> float:
    numel = num_rows * problem.hidden_size
    return tolerance(problem.quant, problem.dtype, numel, rounds_as_reference=True)


def check(
    problem: MoEProblem,
    platform: Platform,
    num_tokens: int,
    routing: str = "unmapped",
    weights: ExpertWeights | None = None,
) -> None:
    """Compares two calls of a layer under guard bands with the reference, and with each other."""
    inputs = make_inputs(problem, num_tokens, routing, DEVICE)
    weights = make_weights(problem, DEVICE) if weights is None else weights
    layer = GuardedLayer(case_of(problem, platform), weights, calls=[inputs])
    out = layer(inputs)
    error = relative_error(out, layer.truths[0])
    assert error < bound_of(problem, num_tokens), error
    if DEVICE.type == "cuda":
        assert torch.equal(out, layer(inputs))


PLAIN: Final[dict[str, tuple[int, str, dict[str, Any]]]] = {
    "one_token": (1, "uniform", {}),
    # Tiles of rows that fill no whole number of groups of four.
    "fp32": (9, "uniform", {"dtype": "float32", "has_bias": True, "activation": "gelu", "num_experts": 6, "top_k": 3}),
    "map": (9, "unmapped", {"num_experts": 60, "top_k": 8, "num_local_experts": 15, "placement": "map"}),
    "one_expert": (63, "one_expert", {"dtype": "float16", "intermediate_size": 64}),
}


@pytest.mark.few(most=10)
@each_format
@pytest.mark.parametrize("name", PLAIN)
def test_16_and_32_bits(name: str, activation_format: str) -> None:
    num_tokens, routing, keywords = PLAIN[name]
    check(make_problem("unquantized", activation_format=activation_format, **keywords), SM90, num_tokens, routing)


LAYERS: Final[tuple[tuple[int, dict[str, Any]], ...]] = (
    (1, {"has_bias": True, "activation": "swigluoai"}),
    (2, {"top_k": 1, "apply_router_weight_on_input": True, "has_bias": True}),
    (17, {"num_experts": 8, "num_local_experts": 3, "placement": "map", "activation": "silu(limit=0.5)"}),
    (17, {"activation": "relu2", "has_bias": True}),
)


@pytest.mark.few(most=8)
@pytest.mark.parametrize(("num_tokens", "keywords"), LAYERS)
@each(*QUANTIZED)
@each_format
def test_quantized_layers_round_where_the_reference_does(
    activation_format: str, scheme: str, platform: Platform, num_tokens: int, keywords: dict[str, Any]
) -> None:
    dtype = "bfloat16" if scheme == "mxfp4_mxfp8" else "float16"
    problem = make_problem(scheme, dtype=dtype, activation_format=activation_format, **keywords)
    # One token has no route to spare.
    check(problem, platform, num_tokens, "unmapped" if num_tokens > 1 else "uniform")


def without_static_scales(weights: ExpertWeights) -> ExpertWeights:
    return dataclasses.replace(weights, a13_scale=None, a2_scale=None)


def with_shared_scales(weights: ExpertWeights) -> ExpertWeights:
    return dataclasses.replace(weights, a13_scale=weights.a13_scale.amax(), a2_scale=weights.a2_scale.amax())


@pytest.mark.few(most=3)
@each_format
@each(*((name, on) for name, on in QUANTIZED if name in ("nvfp4", "fp8_tensor_static")))
@pytest.mark.parametrize("change", [without_static_scales, with_shared_scales])
def test_scales_come_from_tokens_or_are_shared(
    change: Callable[[ExpertWeights], ExpertWeights], scheme: str, platform: Platform, activation_format: str
) -> None:
    if change is without_static_scales and scheme == "fp8_tensor_static":
        pytest.skip("the scheme has static scales")
    problem = make_problem(scheme, has_bias=True, activation_format=activation_format)
    check(problem, platform, 9, weights=change(make_weights(problem, DEVICE)))


@dataclasses.dataclass
class Batches:
    """A layer with rows by expert; those behind an expert's count are NaN."""

    problem: MoEProblem
    counts: list[int]
    max_tokens: int
    platform: Platform = SM90

    def __post_init__(self) -> None:
        # The conformance kit's router knows tokens, which are the same in either format.
        self.weights = make_weights(self.problem, DEVICE)
        shape = (self.problem.num_local_experts, self.max_tokens, self.problem.hidden_size)
        held = [min(max(count, 0), self.max_tokens) for count in self.counts]
        self.valid = rows_that_count(held, self.max_tokens)
        self.experts = torch.nonzero(self.valid)[:, 0]
        self.hidden_states = random(*shape).to(self.problem.torch_dtype)
        self.hidden_states[~self.valid] = math.nan

    def run(self, hidden_states: torch.Tensor | None = None) -> torch.Tensor:
        """[rows that count, H], on poisoned buffers; checks that nothing is written around them or to an input."""
        problem = self.problem
        layer = case_of(problem, self.platform).cell.experts(problem, self.platform)
        assert fact_reasons(layer.facts, problem) == []
        x = self.hidden_states if hidden_states is None else hidden_states
        counts = torch.tensor(self.counts, dtype=torch.int32, device=DEVICE)
        before = bits(x.float()).clone()
        none = torch.empty(0, problem.top_k, device=DEVICE)
        inputs = ExpertInputs(x, none, none.int(), expert_num_tokens=counts)
        out = Guarded(*x.shape, dtype=layer.rows_dtype)
        shapes = layer.workspace_shapes(problem, self.max_tokens)
        workspaces = [Guarded(*shape, dtype=problem.torch_dtype) for shape in shapes]
        permuted = layer.permute_weights(self.weights, problem)
        layer.apply(out.tensor, inputs, permuted, *(workspace.tensor for workspace in workspaces))
        for guarded in (out, *workspaces):
            guarded.check()
        assert torch.equal(bits(x.float()), before)
        assert counts.tolist() == self.counts
        # Any row of an expert with rows may have been written, but none of an expert without.
        assert out.tensor[~self.valid.any(1)].isnan().all(), "a kernel wrote to the rows of another expert"
        return out.tensor[self.valid]

    def reference(self) -> torch.Tensor:
        """[rows that count, H] in fp32."""
        num_local = self.problem.num_local_experts
        own = {"num_experts": num_local, "num_local_experts": num_local, "placement": "contiguous"}
        problem = dataclasses.replace(self.problem, **own, top_k=1, activation_format="standard")
        x = self.hidden_states[self.valid]
        ones = torch.ones(len(x), 1, device=DEVICE)
        return reference_experts(problem, self.weights, x, ones, self.experts.int().unsqueeze(1))

    def check(self) -> None:
        found = self.run()
        if len(found):
            error = relative_error(found, self.reference())
            assert error < bound_of(self.problem, len(found)), error


def batches(scheme: str, counts: list[int], max_tokens: int, platform: Platform = SM90, **keywords: Any) -> Batches:
    return Batches(make_problem(scheme, activation_format="batched", **keywords), counts, max_tokens, platform)


COUNTS: Final[dict[str, tuple[dict[str, Any], list[int], int]]] = {
    "one_row_at_most": ({}, [1, 0, 1, 1], 1),
    "empty": ({"has_bias": True}, [0, 0, 0, 0], 5),
    "skewed": ({"has_bias": True}, [0, 17, 0, 1], 17),
    "full": ({"num_experts": 2}, [33, 33], 33),
    "some_local": ({"num_experts": 8, "num_local_experts": 3, "placement": "map"}, [2, 5, 0], 5),
}


@pytest.mark.few(most=6)
@pytest.mark.parametrize("name", COUNTS)
@each(*EVERY)
def test_rows_of_each_expert(scheme: str, platform: Platform, name: str) -> None:
    keywords, counts, max_tokens = COUNTS[name]
    batches(scheme, counts, max_tokens, platform, **keywords).check()


@pytest.mark.parametrize(("max_tokens", "counts"), [(40, [40, 1, 0, 33]), (80, [80, 0, 2, 17]), (130, [129, 0, 3, 0])])
@pytest.mark.parametrize("scheme", ["unquantized", "fp8_block128", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_higher_tiles(scheme: str, max_tokens: int, counts: list[int]) -> None:
    """Every number of rows that picks another launch configuration."""
    platform = SM100 if scheme == "nvfp4" and MULTIPLIES_NVFP4 else SM90
    batches(scheme, counts, max_tokens, platform, hidden_size=64, intermediate_size=64).check()


@pytest.mark.parametrize("scheme", ["unquantized", "fp8_tensor_dynamic", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_rows_that_do_not_count_change_no_bit(scheme: str) -> None:
    """Of all rows the largest number may decide every row's bits; a larger one in a row that does not count may not."""
    layer = batches(scheme, [3, 0, 1, 2], 4)
    poisoned = layer.run()
    assert torch.equal(layer.run(hidden_states=layer.hidden_states.nan_to_num(nan=1e4)), poisoned)
    layer.hidden_states[2, 0, 5] = 60.0
    assert torch.equal(layer.run()[:3], poisoned[:3]) == (scheme != "fp8_tensor_dynamic")
    layer.check()


CLASSES: Final = [
    (getattr(triton_moe, f"Triton{kind}Experts"), getattr(triton_moe, f"Triton{kind}BatchedExperts"))
    for kind in ("", "Packed", "Emulated", "Quantized")
]


@pytest.mark.parametrize(("standard", "batched"), CLASSES)
def test_batched_format_takes_all_that_the_standard_one_does(standard: Any, batched: Any) -> None:
    facts = standard.facts, batched.facts
    assert [each.activation_formats for each in facts] == [{"standard"}, {"batched"}]
    others = {"activation_formats": frozenset({"batched"}), "gradients": frozenset(), "batch_invariant": False}
    assert dataclasses.replace(facts[0], **others) == facts[1]
    assert standard.layouts == batched.layouts


@pytest.mark.parametrize(("standard", "batched"), CLASSES)
def test_backend_refuses_what_overflows_its_offsets(standard: Any, batched: Any) -> None:
    scheme = {"TritonPackedExperts": "int4_w4a16_g128", "TritonQuantizedExperts": "fp8_block128"}.get(standard.__name__)
    problem = make_problem(scheme or "unquantized", hidden_size=32768, intermediate_size=40000)
    for experts in (standard, batched):
        (reason,) = experts.unsupported_reasons(problem, SM90)
        assert reason.startswith("requires fewer than 2**31")


def test_device_types_follow_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("0", ("cuda",)), ("1", ("cuda", "cpu"))):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert triton_moe.TritonExperts.device_types(SM90) == expected


# On Hopper the Gluon kernels run 16-bit layers from over 22 rows an expert on, and layers of codes from over 30 on.
LARGE: Final[tuple[tuple[int, tuple[int, int, int, int], dict[str, Any]], ...]] = (
    (1, (128, 8, 2048, 768), {}),
    (16, (32, 4, 1288, 360), {"has_bias": True}),
    (64, (128, 8, 2048, 768), {}),
    (4096, (128, 8, 2048, 768), {}),
    (1024, (32, 4, 2880, 2880), {"activation": "swigluoai", "has_bias": True}),
    (63, (64, 8, 2880, 360), {"dtype": "float16"}),
    (700, (60, 4, 2048, 1408), {"activation": "gelu_tanh"}),
    (4096, (64, 6, 2688, 1856), {"activation": "relu2"}),
    (4096, (16, 2, 511, 511), {"has_bias": True, "activation": "gelu"}),
    (333, (16, 2, 511, 704), {"has_bias": True, "dtype": "float32"}),
    (1001, (16, 4, 1288, 744), {"activation": "gelu_tanh", "dtype": "float16", "has_bias": True}),
    (63, (8, 8, 255, 129), {}),
    (4096, (512, 8, 1024, 511), {"num_local_experts": 64, "placement": "map"}),
    (512, (16, 1, 5120, 1408), {"apply_router_weight_on_input": True}),
)


@pytest.mark.gpu
@on_gpu
@each_format
@pytest.mark.parametrize(("num_tokens", "sizes", "keywords"), LARGE)
def test_layer_large(num_tokens: int, sizes: tuple[int, ...], keywords: dict[str, Any], activation_format: str) -> None:
    names = ("num_experts", "top_k", "hidden_size", "intermediate_size")
    problem = make_problem(
        "unquantized", activation_format=activation_format, **dict(zip(names, sizes, strict=True)), **keywords
    )
    check(problem, SM90, num_tokens, "unmapped" if num_tokens > 1 else "uniform")


LARGEST = 65504.0

FLOAT16_SCHEMES = (
    *("unquantized", "int4_w4a16_g128", "int8_w8a16", "mxfp4_w4a16", "nvfp4_w4a16", "nvfp4", "mxfp8", "int8_w8a8"),
    *("fp8_block128", "fp8_channel_token", "fp8_tensor_static", "fp8_tensor_dynamic"),
)


def check_float16(
    scheme: str, activation_format: str, routing_scale: float, size: int, tokens: tuple[int, ...]
) -> None:
    """Compares calls whose routing weights bring rows of up to millions, or of some 1e-5, back to about 1."""
    problem = MoEProblem(
        num_experts=4,
        hidden_size=2 * size,
        intermediate_size=size,
        top_k=2,
        dtype="float16",
        quant=scheme,
        exact_activations=True,
        activation_format=activation_format,
    )
    plain = make_plain_weights(problem, DEVICE)
    input_scale, w2_scale = (10.0, 0.1 / routing_scale) if routing_scale < 1 else (0.03, 1e-2)
    w2 = (plain.w2.float() * w2_scale).clamp(-6e4, 6e4).half()
    weights = dataclasses.replace(plain, w2=w2)
    if problem.quant.weight:
        scales: dict[str, torch.Tensor] = {}
        if problem.quant.activation is not None and problem.quant.activation.static:
            sample = make_inputs(problem, 64, "uniform", DEVICE, seed=77)
            call = (sample.hidden_states * input_scale, sample.topk_weights, sample.topk_ids)
            unquantized = dataclasses.replace(problem, quant=weights.scheme)
            given = calibrate_activation_scales(unquantized, weights, *call, problem.quant)
            scales = dict(zip(("a13_scale", "a2_scale"), given, strict=True))
        weights = quantize_weights(weights, scheme, **scales)
    selection = select_backend(problem, SM90 if DEVICE.type == "cpu" else None, require="triton")
    kernel = make_kernel(problem, weights, selection)
    for num_tokens in tokens:
        inputs = make_inputs(problem, num_tokens, "uniform", DEVICE)
        x, ids, factors = inputs.hidden_states * input_scale, inputs.topk_ids, inputs.topk_weights * routing_scale
        if num_tokens > 1:
            # Weights of routes that no expert takes may be anything.
            ids[1::3, 0], factors[1::3, 0] = -1, math.nan
        truth = reference_experts(problem, weights, x, factors, ids, computes=selection.winner.scheme)
        assert truth.half().isfinite().all()
        assert truth.abs().amax() > 1e-3, "the output has few digits in float16"
        assert routing_scale > 1 or truth.abs().amax() / routing_scale > LARGEST
        out = kernel(x, factors, ids, out=torch.full_like(x, math.nan))
        assert relative_error(out, truth) < tolerance(selection.winner.scheme, "float16", truth.numel()), num_tokens


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("activation_format", ["standard", "batched"])
@pytest.mark.parametrize("scheme", ["unquantized", "int8_w8a16", "nvfp4", "int8_w8a8", "fp8_tensor_static"])
def test_float16_of_every_class(scheme: str, activation_format: str) -> None:
    check_float16(scheme, activation_format, 1e-6, 32, (17,))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("activation_format", ["standard", "batched"])
@pytest.mark.parametrize("scheme", FLOAT16_SCHEMES)
def test_float16_of_every_way_of_every_scheme(scheme: str, activation_format: str) -> None:
    """One token, few without and with a sort, and so many an expert that Hopper has schedules of its own."""
    for routing_scale in (1e-8, 1e-6, 1e5):
        check_float16(scheme, activation_format, routing_scale, 128, (1, 12, 40, 600))
