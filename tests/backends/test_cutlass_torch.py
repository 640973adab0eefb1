"""torch's grouped matmul of 8-bit floats, which no CPU has: with a torch copy of what its documentation says."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moereg.backends._cutlass.torch_scaled import row_scales
from moereg.backends.cutlass_moe import TorchGroupedExperts, TorchScaledGroupedExperts
from moereg.kernels.plain import device
from moereg.numerics.tolerances import layer_tolerance
from moereg.platforms import Platform
from moereg.spec.activations import Activation
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_inputs, make_weights
from tests.support.experts_run import CPU, error_of, run_experts

SM90 = Platform.from_name("cuda:sm90")
SCHEMES = ("fp8_channel_token", "fp8_tensor_static")

pytestmark = pytest.mark.usefixtures("one_thread")


def scaled_grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_recipe_a: F.ScalingType,
    scale_b: torch.Tensor,
    scale_recipe_b: F.ScalingType,
    offs: torch.Tensor,
    output_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """[N,K] times [E,K,N'] by groups of rows, with the checks of torch's own function; rows past the last hold inf."""
    assert scale_recipe_a == scale_recipe_b == F.ScalingType.RowWise
    assert not use_fast_accum
    assert (mat_a.dtype, offs.dtype, output_dtype) == (torch.float8_e4m3fn, torch.int32, torch.bfloat16)
    assert (scale_a.shape, scale_b.shape) == (mat_a.shape[:1], (mat_b.shape[0], mat_b.shape[2]))
    assert mat_a.stride(1) == mat_b.stride(1) == 1
    assert all(number % 16 == 0 for number in (mat_a.stride(0), mat_b.stride(2), mat_a.data_ptr(), mat_b.data_ptr()))
    out = torch.full((mat_a.shape[0], mat_b.shape[2]), float("inf"))
    first = 0
    for expert, last in enumerate(offs.tolist()):
        product = mat_a[first:last].float() @ mat_b[expert].float()
        out[first:last] = product * scale_a[first:last, None] * scale_b[expert]
        first = last
    return out.to(output_dtype)


@pytest.fixture(autouse=True)
def _copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_grouped_mm", scaled_grouped_mm)


def make_problem(quant: str, **changes: Any) -> MoEProblem:
    return MoEProblem(
        **{"num_experts": 6, "hidden_size": 64, "intermediate_size": 48, "top_k": 2, "quant": quant, **changes}
    )


@pytest.mark.parametrize("quant", ["unquantized", *SCHEMES])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": Activation.from_name("swigluoai"), "has_bias": True},
        {"activation": Activation.from_name("situ(gate_softcap=0.5)")},
        {"activation": Activation.from_name("relu2")},
        {"placement": "map", "num_local_experts": 3},
        {"top_k": 1, "apply_router_weight_on_input": True},
        {"activation": Activation.from_name("silu", limit=0.75)},
    ],
    ids=["silu", "swigluoai-bias", "situ", "relu2", "map", "weight-on-input", "clamp"],
)
def test_grouped_products_match_the_reference(quant: str, changes: dict[str, Any]) -> None:
    problem = make_problem(quant, **changes)
    experts = TorchGroupedExperts if quant == "unquantized" else TorchScaledGroupedExperts
    for num_tokens, routing in ((24, "skewed"), (24, "unmapped"), (1, "uniform"), (257, "one_expert"), (5, "nowhere")):
        assert error_of(experts, problem, SM90, num_tokens, routing) < layer_tolerance(problem, num_tokens), routing


def test_every_row_has_the_scale_of_its_part() -> None:
    of_matrix, of_halves = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert row_scales(of_matrix, 3).tolist() == [[1, 1, 1], [2, 2, 2]]
    assert row_scales(of_halves, 4).tolist() == [[1, 1, 2, 2], [3, 3, 4, 4]]
    of_rows = torch.arange(6.0).view(2, 3, 1)
    assert row_scales(of_rows, 3).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_chunks_of_tokens_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem("fp8_channel_token")
    weights, inputs = make_weights(problem, CPU), make_inputs(problem, 24, "uniform", CPU)
    whole = run_experts(TorchScaledGroupedExperts, problem, weights, inputs, SM90)
    row_bytes = 4 * (3 * 2 * problem.intermediate_size + 3 * problem.hidden_size)
    monkeypatch.setattr(device, "DEVICE_CHUNK_BYTES", 5 * problem.top_k * row_bytes)
    assert torch.equal(run_experts(TorchScaledGroupedExperts, problem, weights, inputs, SM90), whole)


def test_the_call_is_the_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert set(inspect.signature(scaled_grouped_mm).parameters) <= set(
        inspect.signature(F.scaled_grouped_mm).parameters
    )
    assert F.ScalingType.RowWise is not None
