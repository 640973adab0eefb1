"""The backend `cpu` against the reference, by every table of kernels that this processor runs."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import moereg_cpu.backend as backend
import pytest
import torch
from hypothesis import strategies
from moereg_cpu import library

from moereg.author import (
    ExpertInputs,
    ExpertWeights,
    MoEProblem,
    Platform,
    explain_backends,
    layer_tolerance,
    quantize_weights,
    reference_experts,
    relative_error,
)

PLATFORM = Platform.from_name("cpu")
SIZES = {"num_experts": 5, "hidden_size": 130, "intermediate_size": 70, "top_k": 2}
FLOATS = ("unquantized", *backend.FP8_WEIGHTS)
SCHEMES = (*FLOATS, *backend.INTEGER_PRODUCTS)
TABLES = () if library.why_unavailable() else library.load_library().runnable

pytestmark = pytest.mark.skipif(not TABLES, reason=library.why_unavailable() or "")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make_weights(problem: MoEProblem, separate_halves: bool = False, seed: int = 3) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    experts, rows = problem.num_local_experts, problem.activation.num_halves * problem.intermediate_size
    w13 = torch.randn(experts, rows, problem.hidden_size, generator=generator) * 0.3
    w13[:, : rows // 2] *= 2
    w2 = torch.randn(experts, problem.hidden_size, problem.intermediate_size, generator=generator) * 0.3
    dtype = problem.torch_dtype
    biases = {}
    if problem.has_bias:
        biases["w13_bias"] = torch.randn(experts, rows, generator=generator)
        biases["w2_bias"] = torch.randn(experts, problem.hidden_size, generator=generator).to(dtype)
    plain = ExpertWeights(w13=w13.to(dtype), w2=w2.to(dtype), **biases)
    if problem.quant.weight is None:
        return plain
    return quantize_weights(plain, problem.quant, separate_halves=separate_halves)


def make_inputs(problem: MoEProblem, num_tokens: int, seed: int = 0) -> ExpertInputs:
    """Some ids belong to no expert, and some experts get no token."""
    generator = torch.Generator().manual_seed(seed)
    hidden_states = torch.randn(num_tokens, problem.hidden_size, generator=generator).to(problem.torch_dtype)
    topk_weights, topk_ids = torch.rand(num_tokens, problem.num_experts, generator=generator).topk(problem.top_k)
    topk_ids = topk_ids.to(torch.int32)
    topk_ids[1::3, 0] = problem.num_experts + 3
    topk_ids[2::3, -1] = -1
    return ExpertInputs(hidden_states, topk_weights, topk_ids)


def run(problem: MoEProblem, weights: ExpertWeights, inputs: ExpertInputs, table: str = "") -> torch.Tensor:
    """The layer's output, workspaces and output full of NaN."""
    experts = backend.CpuExperts(problem, PLATFORM)
    vars(experts)["_table"] = library.load_library().table(table)
    permuted = experts.permute_weights(weights, problem)
    shapes = experts.workspace_shapes(problem, len(inputs.hidden_states))
    workspaces = [torch.full(shape, float("nan"), dtype=problem.torch_dtype) for shape in shapes]
    out = torch.full_like(inputs.hidden_states, float("nan"))
    experts.apply(out, inputs, permuted, *workspaces)
    return out


def error_of(
    problem: MoEProblem, num_tokens: int, table: str, expert_map: torch.Tensor | None = None, **keywords: Any
) -> float:
    """Relative error over its bound."""
    weights = make_weights(problem, **keywords)
    inputs = dataclasses.replace(make_inputs(problem, num_tokens), expert_map=expert_map)
    out = run(problem, weights, inputs, table)
    routes = (inputs.topk_weights, inputs.topk_ids)
    expected = reference_experts(
        problem, weights, inputs.hidden_states, *routes, expert_map=expert_map, computes=problem.quant
    )
    return float(relative_error(out, expected) / layer_tolerance(problem, num_tokens, problem.quant))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("quant", SCHEMES, ids=lambda quant: getattr(quant, "name", quant))
def test_every_scheme_by_every_table(quant: Any, table: str) -> None:
    for dtype in ("bfloat16", "float16", *(["float32"] if quant in FLOATS else [])):
        problem = MoEProblem(**SIZES, quant=quant, dtype=dtype, has_bias=True)
        assert max(error_of(problem, num_tokens, table) for num_tokens in (1, 2, 7, 40)) < 1, dtype


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("quant", SCHEMES, ids=lambda quant: getattr(quant, "name", quant))
def test_a_row_keeps_its_bits(quant: Any, table: str) -> None:
    problem = MoEProblem(**SIZES, quant=quant, batch_invariant=True)
    weights, inputs = make_weights(problem), make_inputs(problem, 40)
    whole = run(problem, weights, inputs, table)
    for num_tokens in (1, 2, 5, 17):
        parts = zip(*(each.split(num_tokens) for each in _tensors(inputs)), strict=True)
        assert torch.equal(whole, torch.cat([run(problem, weights, ExpertInputs(*part), table) for part in parts]))


@hypothesis.given(
    quant=strategies.sampled_from(SCHEMES),
    hidden=strategies.integers(16, 400),
    intermediate=strategies.integers(16, 400),
    num_tokens=strategies.integers(2, 40),
    table=strategies.sampled_from(TABLES or ("",)),
)
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_any_size(quant: Any, hidden: int, intermediate: int, num_tokens: int, table: str) -> None:
    problem = MoEProblem(
        num_experts=3, hidden_size=hidden, intermediate_size=intermediate, top_k=2, quant=quant, has_bias=True
    )
    assert error_of(problem, num_tokens, table) < 1


# Longer than a segment of 2,048 columns, and than the spans in which more than four rows are multiplied.
LONG = ("unquantized", "fp8_block128_w8a16", "mxfp8_w8a16", "int8_w8a16", "int8_w8a8", "nvfp4_w4a16")
LONG = (*LONG, *(f"int4_w4a16_g{group}" for group in ("32", "32_zp", "128", "all_zp")))


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("name", LONG)
def test_long_rows(name: str, table: str) -> None:
    quant = next((scheme for scheme in backend.FP8_WEIGHTS if scheme.name == name), name)
    for hidden, intermediate in ((4200, 48), (48, 4200)):
        sizes = {"num_experts": 3, "hidden_size": hidden, "intermediate_size": intermediate, "top_k": 2}
        problem = MoEProblem(**sizes, quant=quant)
        assert max(error_of(problem, num_tokens, table) for num_tokens in (1, 13)) < 1, (hidden, intermediate)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    "activation",
    [
        *library.ACTIVATIONS,
        "silu(alpha=1.3, limit=0.5)",
        "gelu(beta=0.5, limit=2.0)",
        "situ(beta=0.5, limit=2.0, gate_softcap=0.5, up_softcap=0.75)",
        "situ(up_softcap=None)",
    ],
)
def test_activations(activation: str, table: str) -> None:
    for dtype in ("float32", "bfloat16"):
        problem = MoEProblem(**SIZES, activation=activation, has_bias=True, dtype=dtype)
        assert error_of(problem, 40, table) < 1, dtype


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("quant", ["nvfp4_w4a16", backend.FP8_WEIGHTS[0]], ids=["nvfp4", "fp8_tensor"])
def test_gate_and_up_with_scales_of_their_own(quant: Any, table: str) -> None:
    assert error_of(MoEProblem(**SIZES, quant=quant), 40, table, separate_halves=True) < 1


@pytest.mark.parametrize("table", TABLES)
def test_expert_map(table: str) -> None:
    problem = MoEProblem(**SIZES, quant="int4_w4a16_g32_zp", num_local_experts=2, placement="map")
    assert error_of(problem, 40, table, torch.tensor([-1, 1, -1, 0, -1], dtype=torch.int32)) < 1


@pytest.mark.parametrize("table", TABLES)
def test_router_weight_on_input(table: str) -> None:
    problem = MoEProblem(**{**SIZES, "top_k": 1}, quant="int8_w8a16", apply_router_weight_on_input=True)
    assert error_of(problem, 40, table) < 1


@pytest.mark.parametrize("table", TABLES)
def test_tokens_are_rounded_to_int8(table: str) -> None:
    problem = MoEProblem(**SIZES, quant="int8_w8a8")
    weights, inputs = make_weights(problem), make_inputs(problem, 4)
    outputs = []
    for small in (0.0, 0.4, 0.6):
        inputs.hidden_states.fill_(small)
        inputs.hidden_states[:, 0] = 127  # The scale is 1.
        outputs.append(run(problem, weights, inputs, table))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("table", TABLES)
def test_the_intermediate_is_rounded_to_int8(table: str) -> None:
    problem = MoEProblem(**SIZES, quant="int8_w8a8")
    weights, inputs = make_weights(problem), make_inputs(problem, 4)
    weights.w13.zero_()
    weights.w13_scale.fill_(1)
    inputs.hidden_states.zero_()
    inputs.hidden_states[:, 0] = 127  # The scale is 1.
    gate, up = weights.w13.chunk(2, 1)
    gate[:, 0, 0] = up[:, 0, 0] = 127  # The largest of the intermediate, 127 times its scale.
    gate[:, 1, 0] = 10
    outputs = []
    for code in (0, 5, 8):
        up[:, 1, 0] = code  # 10 * code / 127 of the intermediate's scale.
        outputs.append(run(problem, weights, inputs, table))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("quant", ["unquantized", "int4_w4a16_g32_zp"])
def test_rows_of_each_expert_are_those_of_tokens_with_one_route(quant: str, table: str) -> None:
    problem = MoEProblem(**{**SIZES, "top_k": 1}, quant=quant, has_bias=True)
    weights, counts = make_weights(problem), torch.tensor([6, 0, 1, 4, 2], dtype=torch.int32)
    rows = torch.randn(5, 6, 130, generator=torch.Generator().manual_seed(0)).bfloat16()
    laid_out = dataclasses.replace(problem, activation_format="batched")
    experts = backend.CpuBatchedExperts(laid_out, PLATFORM)
    vars(experts)["_table"] = library.load_library().table(table)
    permuted, nothing = experts.permute_weights(weights, laid_out), torch.empty(0, dtype=torch.int32)
    out = torch.full_like(rows, float("nan"))
    workspaces = (torch.full(shape, float("nan"), dtype=rows.dtype) for shape in experts.workspace_shapes(laid_out, 6))
    experts.apply(out, ExpertInputs(rows, nothing, nothing, counts), permuted, *workspaces)
    for expert, count in enumerate(counts.tolist()):
        ids = torch.full((count, 1), expert, dtype=torch.int32)
        inputs = ExpertInputs(rows[expert, :count].contiguous(), torch.ones(count, 1), ids)
        assert torch.equal(out[expert, :count], run(problem, weights, inputs, table)), expert


@pytest.mark.parametrize("quant", ["unquantized", "int4_w4a16_g128", "mxfp4_w4a16"])
def test_any_number_of_threads_gives_the_same_bits(quant: str) -> None:
    problem = MoEProblem(num_experts=8, hidden_size=384, intermediate_size=320, top_k=3, quant=quant)
    weights, inputs = make_weights(problem), make_inputs(problem, 33)
    found = []
    for num_threads in (1, 2, 3, 5):
        torch.set_num_threads(num_threads)
        found.append(run(problem, weights, inputs))
    assert not found[0].isnan().any()
    for each in found[1:]:
        assert torch.equal(found[0], each)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("quant", ["unquantized", "int8_w8a16", "int4_w4a16_g64_zp", backend.FP8_WEIGHTS[3]], ids=str)
def test_a_token_of_nan_spoils_itself_alone(quant: Any, table: str) -> None:
    problem = MoEProblem(**SIZES, quant=quant)
    weights, inputs = make_weights(problem), make_inputs(problem, 40)
    clean = run(problem, weights, inputs, table)
    inputs.hidden_states[3, 17] = float("nan")
    spoiled = run(problem, weights, inputs, table)
    assert spoiled[3].isnan().all()
    others = torch.arange(40) != 3
    assert torch.equal(spoiled[others], clean[others])


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_code_of_fp8_is_nan(code: int, table: str) -> None:
    problem = MoEProblem(**SIZES, quant=backend.FP8_WEIGHTS[1])
    weights, inputs = make_weights(problem), make_inputs(problem, 40)
    clean = run(problem, weights, inputs, table)
    weights.w2.view(torch.uint8)[:, 9, -1] = code
    found = run(problem, weights, inputs, table)
    has_route = (inputs.topk_ids >= 0).logical_and(inputs.topk_ids < problem.num_experts).any(dim=1)
    assert torch.equal(found[:, 9].isnan(), has_route)
    others = torch.arange(problem.hidden_size) != 9
    assert torch.equal(found[:, others], clean[:, others])


@pytest.mark.parametrize("table", TABLES)
def test_subnormal_codes_count_where_torch_flushes_them(table: str) -> None:
    problem = MoEProblem(**SIZES, quant=backend.FP8_WEIGHTS[1])
    weights, inputs = make_weights(problem), make_inputs(problem, 40)
    for matrix in (weights.w13, weights.w2):
        matrix.view(torch.uint8).bitwise_and_(0x87)  # All codes are subnormal.
    expected = run(problem, weights, inputs, table)
    assert expected.count_nonzero() > 0
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush subnormal numbers on this CPU")
    try:
        assert torch.equal(run(problem, weights, inputs, table), expected)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("kind", [backend.CpuExperts, backend.CpuBatchedExperts])
def test_more_tokens_never_need_less_room(kind: Any) -> None:
    experts = kind(MoEProblem(**SIZES, quant="nvfp4_w4a16"), PLATFORM)
    sizes = [experts.workspace_shapes(experts.problem, num_tokens)[1][0] for num_tokens in range(1, 70)]
    assert sizes == sorted(sizes)


def test_long_calls_run_in_pieces() -> None:
    problem = MoEProblem(num_experts=3, hidden_size=65536, intermediate_size=16, top_k=2)
    experts = backend.CpuExperts(problem, PLATFORM)
    sizes = [experts.workspace_shapes(problem, num_tokens)[1][0] for num_tokens in (400, 600, 100_000)]
    assert sizes[0] < sizes[1] == sizes[2]
    weights, inputs = make_weights(problem), make_inputs(problem, 600)
    whole = run(problem, weights, inputs)
    parts = [
        run(problem, weights, ExpertInputs(*(each[place] for each in _tensors(inputs))))
        for place in (slice(0, 300), slice(300, 600))
    ]
    assert torch.equal(whole, torch.cat(parts))


def _tensors(inputs: ExpertInputs) -> tuple[torch.Tensor, ...]:
    return inputs.hidden_states, inputs.topk_weights, inputs.topk_ids


def test_long_batched_calls_run_in_pieces() -> None:
    problem = MoEProblem(num_experts=3, hidden_size=65536, intermediate_size=16, top_k=1, activation_format="batched")
    weights, most = make_weights(problem), 400
    rows = torch.randn(3, most, 65536, generator=torch.Generator().manual_seed(0)).bfloat16()
    experts = backend.CpuBatchedExperts(problem, PLATFORM)
    permuted = experts.permute_weights(weights, problem)

    def outputs(hidden_states: torch.Tensor, counts: list[int]) -> torch.Tensor:
        shapes = experts.workspace_shapes(problem, hidden_states.shape[1])
        nothing = torch.empty(0, dtype=torch.int32)
        inputs = ExpertInputs(hidden_states, nothing, nothing, torch.tensor(counts, dtype=torch.int32))
        out = torch.full_like(hidden_states, float("nan"))
        experts.apply(out, inputs, permuted, *(torch.full(shape, float("nan"), dtype=rows.dtype) for shape in shapes))
        return out

    assert experts.workspace_shapes(problem, most)[1] == experts.workspace_shapes(problem, 10 * most)[1]
    whole = outputs(rows, [most, 0, 350])
    first, second = (
        outputs(rows[:, :200].contiguous(), [200, 0, 200]),
        outputs(rows[:, 200:].contiguous(), [200, 0, 150]),
    )
    for expert, count in enumerate([most, 0, 350]):
        expected = torch.cat((first[expert], second[expert]))[:count]
        assert torch.equal(whole[expert, :count], expected)
    assert not whole[0].isnan().any()


def test_the_process_has_one_openmp_runtime() -> None:
    code = f"""
import re, torch, test_cpu_backend as tests
from pathlib import Path
torch.set_num_threads(2)
problem = tests.MoEProblem(**{SIZES!r})
out = tests.run(problem, tests.make_weights(problem), tests.make_inputs(problem, 9))
assert not out.isnan().any()
maps = Path("/proc/self/maps").read_text()
assert "libmoereg_cpu.so" in maps
threads = tests.library.current_threads()
assert threads.parallel and threads.barrier and threads.num_threads == 2
print(len(set(re.findall(r"\\S*lib(?:gomp|omp|iomp5)[-.\\w]*", maps))))
"""
    path = [str(backend.__file__).rpartition("/moereg_cpu/")[0], *sys.path, __file__.rpartition("/")[0]]
    environment = {"PYTHONPATH": ":".join(filter(None, path)), "PATH": "/usr/bin:/bin"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["1"]


def test_the_environment_names_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    found = library.load_library()
    monkeypatch.delenv(library.ISA_VARIABLE, raising=False)
    assert found.tables[found.table()] == found.runnable[-1]
    monkeypatch.setenv(library.ISA_VARIABLE, "portable")
    assert found.tables[found.table()] == "portable"
    monkeypatch.setenv(library.ISA_VARIABLE, "sse9")
    assert "got sse9" in (library.why_unavailable() or "")


def reasons(problem: MoEProblem) -> list[str]:
    """Texts against each cell of the backend; empty if one accepts."""
    decisions = [each for each in explain_backends(problem, "cpu").decisions if each.backend == "cpu"]
    assert decisions, "the backend is not registered"
    if any(each.accepted for each in decisions):
        return []
    return [reason.text for each in decisions for reason in each.reasons]


@pytest.mark.parametrize("quant", ["int4_w4a16_gall_zp", "fp8_block128", "nvfp4", "mxfp4_mxfp8", "int8_w8a8"])
def test_served_checkpoints(quant: str) -> None:
    assert reasons(MoEProblem(**SIZES, quant=quant)) == []
    assert reasons(MoEProblem(**SIZES, quant=quant, activation_format="batched")) == []


def test_integer_products_are_for_16_bits() -> None:
    found = reasons(MoEProblem(**SIZES, quant="int8_w8a16", dtype="float32"))
    assert any("requires dtype in (bfloat16, float16), got float32" in text for text in found)
