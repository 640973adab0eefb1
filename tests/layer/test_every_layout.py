"""One expert is read back and replaced in every layout of every backend, or refused by name."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moereg.dispatch import explain_backends
from moereg.errors import BackendError, LayoutNotInvertibleError
from moereg.layer import backend_calls
from moereg.layer.one_expert import OneExpert
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES
from moereg.testing.inputs import make_weights
from moereg.weights.permuted import ExpertWeights, PermutedWeights
from moereg.weights.unpermute import same_bits
from tests.layer.small_layers import CPU, problem_of, replaced

PLATFORMS = ("cpu", "cuda:sm80", "cuda:sm90", "cuda:sm100", "cuda:sm120", "rocm:gfx942", "rocm:gfx950")

# Layouts that compute with what they are given: scales are folded into powers of their row's largest, and static
# activation scales are multiplied into others.
_FOLDED = "packed64_gate_up_interleaved"
NOT_INVERTIBLE = {
    *((_FOLDED, scheme) for scheme in ("mxfp4_w4a16", "mxfp4_mxfp8", "nvfp4", "nvfp4_w4a16")),
    # Kernels that keep activations at 16 bits drop the checkpoint's scales of them.
    (_FOLDED, "int4_w4a8_g128"),
    ("flashinfer_cutedsl_interleaved", "nvfp4"),
    ("flashinfer_hopper_int4_up_gate_pad128", "int4_w4a8_g128"),
    ("flashinfer_up_gate_pad16_scaled", "fp8_tensor_static"),
    ("flashinfer_swizzled_nvfp4_up_gate_pad128", "nvfp4"),
    ("flashinfer_trtllm_float4", "nvfp4"),
    ("flashinfer_trtllm_mxint4", "int4_w4a16_g32"),
    ("flashinfer_trtllm_fp8_tensor", "fp8_tensor_static"),
}
# Their scales of activations are those of all experts together.
NOT_APART = {
    ("flashinfer_cutedsl_interleaved", "nvfp4"),
    ("flashinfer_trtllm_float4", "nvfp4"),
    ("flashinfer_trtllm_fp8_tensor", "fp8_tensor_static"),
}
# Backends whose libraries permute weights themselves.
LIBRARIES = {"cutlass": "quack", "flashinfer_b12x": "flashinfer"}


@dataclasses.dataclass
class Permuted:
    """One problem's weights in one backend's layout."""

    one: OneExpert
    permuted: PermutedWeights
    again: Any


@functools.cache
def all_backends() -> tuple[str, ...]:
    """Names of all that are registered: those that are opt-in are accepted where they are asked for."""
    return tuple(sorted({decision.backend for decision in explain_backends(problem_of(), "cpu").decisions}))


def permuted_everywhere(
    problem: MoEProblem, weights: ExpertWeights, platform: str, layouts: set[str]
) -> Iterator[Permuted]:
    """By every backend that fits and whose library is here; permuting needs no device of the platform."""
    selection = explain_backends(problem, platform, prefer=all_backends())
    for decision in selection.decisions:
        if not decision.accepted:
            continue
        chosen = dataclasses.replace(selection, decisions=(decision,))
        if importlib.util.find_spec(LIBRARIES.get(decision.backend, "torch")) is None:
            continue
        experts = backend_calls.make_experts(chosen, decision)

        def again(weights: ExpertWeights, chosen: Any = chosen, experts: Any = experts) -> PermutedWeights:
            return backend_calls.permute(chosen, experts, weights)

        permuted = again(weights)
        if permuted.layout not in layouts:
            layouts.add(permuted.layout)
            one = OneExpert(chosen, decision, weights)
            yield Permuted(one, dataclasses.replace(permuted, reader=one), again)


def all_same(one: PermutedWeights, other: PermutedWeights) -> bool:
    mine, theirs = ({**each.per_expert, **each.shared} for each in (one, other))
    return mine.keys() == theirs.keys() and all(
        same_bits(left, right)
        for name in mine
        for left, right in zip(dense(mine[name]), dense(theirs[name]), strict=True)
    )


def dense(value: Any) -> list[torch.Tensor]:
    tensors = value if isinstance(value, list) else [value]
    return [tensor if tensor.layout == torch.strided else tensor.to_dense() for tensor in tensors]


def check_problem(problem: MoEProblem, platform: str, known: set[str] | None = None) -> Iterator[tuple[str, str]]:
    """Checks the layout of every backend but those that are known; gives names of backend and layout."""
    weights, others = make_weights(problem, CPU), make_weights(problem, CPU, seed=1)
    expert = problem.num_local_experts - 1
    for each in permuted_everywhere(problem, weights, platform, set() if known is None else known):
        layout = each.permuted.layout
        yield each.one.backend, layout
        if (layout, problem.quant.name) in NOT_INVERTIBLE:
            with pytest.raises(LayoutNotInvertibleError, match=r"keep the canonical weights$"):
                each.permuted.to_canonical(expert)
        else:
            found, wanted = each.permuted.to_canonical(expert).tensors(), weights.expert(expert).tensors()
            assert found.keys() == wanted.keys()
            assert all(same_bits(found[name], wanted[name]) for name in wanted), layout
        twin = copy.deepcopy(each.permuted)
        assert all_same(twin, each.permuted), layout
        if (layout, problem.quant.name) in NOT_APART and expert:
            with pytest.raises(
                BackendError, match=r"beside .*, so one expert cannot be replaced; reload the whole layer$"
            ):
                each.one.rows_for(each.permuted, others.expert(expert))
            continue
        twin.write_expert(expert, each.one.rows_for(each.permuted, others.expert(expert)))
        assert all_same(twin, each.again(replaced(weights, expert, others))), layout
        assert all_same(each.permuted, each.again(weights)), "a copy shares memory"


@pytest.fixture
def on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_calls, "check_device", lambda *arguments: None)
    monkeypatch.setattr(backend_calls, "device_types", lambda *arguments: ("cpu",))


PROBLEMS = st.builds(
    MoEProblem,
    num_experts=st.integers(2, 4),
    num_local_experts=st.integers(1, 2),
    hidden_size=st.sampled_from([32, 96, 128, 160, 256]),
    intermediate_size=st.sampled_from([32, 64, 128, 192]),
    top_k=st.just(1),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    activation=st.sampled_from(["silu", "swigluoai", "relu2"]),
    has_bias=st.booleans(),
    activation_format=st.sampled_from(["standard", "batched"]),
)


def small(scheme: str, size: int = 64) -> MoEProblem:
    return problem_of(num_experts=2, hidden_size=size, intermediate_size=size, quant=scheme, dtype="bfloat16")


@pytest.mark.parametrize(("scheme", "platform"), [("unquantized", "cpu"), ("int4_w4a16_g32_zp", "cuda:sm90")])
def test_experts_of_each_layout(scheme: str, platform: str, on_any_device: None) -> None:
    assert list(check_problem(small(scheme), platform))


def test_layouts_of_backends_that_are_opt_in(on_any_device: None) -> None:
    """Nobody asked for them, so what was said of their layouts was never tried."""
    found = dict(check_problem(small("fp8_tensor_static", 128), "cuda:sm100"))
    assert found["flashinfer_trtllm"] == "flashinfer_trtllm_fp8_tensor"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")
def test_no_backend_and_no_exception_is_left_out(on_any_device: None) -> None:
    backends: set[str] = set()
    layouts: set[tuple[str, str]] = set()
    for scheme in sorted(QUANT_SCHEMES):
        known: set[str] = set()
        for platform in PLATFORMS:
            for backend, layout in check_problem(small(scheme, 256), platform, known):
                backends.add(backend)
                layouts.add((layout, scheme))
    absent = {name for name, library in LIBRARIES.items() if importlib.util.find_spec(library) is None}
    assert backends == {*all_backends()} - absent
    assert layouts >= NOT_INVERTIBLE | NOT_APART


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")
@pytest.mark.parametrize("scheme", sorted(QUANT_SCHEMES))
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=PROBLEMS, platform=st.sampled_from(PLATFORMS))
def test_experts_of_every_layout_and_size(scheme: str, problem: MoEProblem, platform: str, on_any_device: None) -> None:
    for _ in check_problem(dataclasses.replace(problem, quant=QUANT_SCHEMES[scheme]), platform):
        pass
