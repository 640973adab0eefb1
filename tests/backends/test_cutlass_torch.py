"""torch's grouped matmul of 8-bit floats, which no CPU has: with a torch copy of what its documentation says."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moereg.activations import Activation
from moereg.backends.cutlass_moe import TorchScaledGroupedExperts
from moereg.kernels.plain import device
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.testing.inputs import make_inputs, make_weights
from moereg.tolerances import layer_tolerance
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
    """[N,K] times [E,K,N'] by groups of rows, with the checks of torch's own function; rows past the last are NaN."""
    assert scale_recipe_a == scale_recipe_b == F.ScalingType.RowWise
    assert not use_fast_accum
    # What torch's meta function checks holds on the device too.
    torch._scaled_grouped_mm(
        *(tensor.to("meta") for tensor in (mat_a, mat_b, scale_a, scale_b, offs)), out_dtype=output_dtype
    )
    assert mat_a.data_ptr() % 16 == mat_b.data_ptr() % 16 == 0
    out = torch.full((mat_a.shape[0], mat_b.shape[2]), float("nan"))
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


@pytest.mark.parametrize("quant", SCHEMES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": Activation.from_name("swigluoai"), "has_bias": True},
        {"activation": Activation.from_name("relu2")},
        {"placement": "map", "num_local_experts": 3},
        {"top_k": 1, "apply_router_weight_on_input": True},
    ],
    ids=["silu", "swigluoai-bias", "relu2", "map", "weight-on-input"],
)
def test_scaled_products_match_the_reference(quant: str, changes: dict[str, Any]) -> None:
    problem = make_problem(quant, **changes)
    bound = layer_tolerance(problem, 24)
    assert error_of(TorchScaledGroupedExperts, problem, SM90) < bound
    assert error_of(TorchScaledGroupedExperts, problem, SM90, routing="unmapped") < bound


def test_routes_to_nobody_add_nothing() -> None:
    problem = make_problem("fp8_channel_token")
    inputs = make_inputs(problem, 5, "nowhere", CPU)
    found = run_experts(TorchScaledGroupedExperts, problem, make_weights(problem, CPU), inputs, SM90)
    assert torch.equal(found, torch.zeros_like(found))


def test_chunks_of_tokens_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem("fp8_channel_token")
    weights, inputs = make_weights(problem, CPU), make_inputs(problem, 24, "uniform", CPU)
    whole = run_experts(TorchScaledGroupedExperts, problem, weights, inputs, SM90)
    row_bytes = 4 * (3 * 2 * problem.intermediate_size + 3 * problem.hidden_size)
    monkeypatch.setattr(device, "DEVICE_CHUNK_BYTES", 5 * problem.top_k * row_bytes)
    assert torch.equal(run_experts(TorchScaledGroupedExperts, problem, weights, inputs, SM90), whole)


def test_the_call_is_the_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    taken = inspect.signature(F.scaled_grouped_mm).parameters
    assert set(inspect.signature(scaled_grouped_mm).parameters) <= set(taken)
    assert F.ScalingType.RowWise is not None
