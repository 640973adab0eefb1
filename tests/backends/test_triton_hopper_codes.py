"""What lies around Hopper's products of 8-bit codes where rows or tensors have one scale: sorting, encoding, adding up.

The products have no interpreter; torch stands in for both, without what is not promised to them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from moereg.backends._triton import quantized, quantized_schedules
from moereg.backends.triton_moe import TritonQuantizedExperts
from moereg.dispatch import select_backend
from moereg.experts import ExpertInputs
from moereg.kernels.gemm.epilogue import GateUpEpilogue
from moereg.kernels.hopper.config import select_quantized_rule
from moereg.kernels.quantized.operands import QuantizedMatrices, QuantizedRows
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.sizes import GUARD_ROWS
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.platforms import Platform
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES, WHOLE, QuantFormat, QuantScheme, get_scheme
from moereg.testing.cases import default_device
from moereg.testing.inputs import make_expert_map, make_inputs, make_weights
from moereg.weights.permuted import ExpertWeights
from tests.support.experts_run import apply_experts

DEVICE = default_device()
SM90 = Platform.from_name("cuda:sm90")
ROW, TENSOR = (1, WHOLE), (WHOLE, WHOLE)
E4M3, INT8 = "float8_e4m3fn", "int8"

# Values that no list of names holds stand beside those that it does.
SCHEMES = (
    *map(get_scheme, ("fp8_channel_token", "int8_w8a8", "fp8_tensor_static", "fp8_tensor_dynamic")),
    QuantScheme("int8_static", QuantFormat(INT8, TENSOR), QuantFormat(INT8, TENSOR, static=True)),
    QuantScheme("fp8_channel_static", QuantFormat(E4M3, ROW), QuantFormat(E4M3, TENSOR, static=True)),
    QuantScheme("fp8_tensor_token", QuantFormat(E4M3, TENSOR), QuantFormat(E4M3, ROW)),
)
PROBLEMS: dict[str, dict[str, Any]] = {
    "gated": {},
    "plain, float16, biases": {"dtype": "float16", "activation": "relu2", "has_bias": True},
    "weights on inputs": {"top_k": 1, "apply_router_weight_on_input": True},
    "a map": {"num_experts": 6, "num_local_experts": 3, "placement": "map"},
}

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclasses.dataclass
class Products:
    """Both products in torch; counts what the first one wrote."""

    problem: MoEProblem
    coded: int = 0

    def gate_up(
        self,
        out: torch.Tensor | QuantizedRows,
        rows: QuantizedRows,
        w13: QuantizedMatrices,
        plan: RoutePlan,
        epilogue: GateUpEpilogue,
        config: object,
        *,
        rounded: torch.dtype | None = None,
        static_scale: torch.Tensor | None = None,
        overlap: bool = False,
    ) -> None:
        """As `hopper.quantized_gate_up_gemm`."""
        y, experts = self._multiply(rows, w13, plan)
        bias = epilogue.bias
        y = self.problem.activation(y if bias is None else y + bias[experts].float())
        behind_guard = slice(GUARD_ROWS, GUARD_ROWS + len(y))
        if not isinstance(out, QuantizedRows):
            assert static_scale is None
            out[behind_guard] = F.pad(y, (0, out.shape[1] - y.shape[1])).to(out.dtype)
            return
        assert static_scale is not None
        assert rounded == self.problem.torch_dtype
        self.coded += 1
        scale = static_scale[experts] if static_scale.numel() > 1 else static_scale.expand(len(y))
        codes = (y.to(rounded).float() / scale[:, None]).clamp(-448.0, 448.0)
        out.q[behind_guard] = F.pad(codes, (0, out.q.shape[1] - y.shape[1])).to(out.q.dtype)
        out.scale[: len(y), 0] = scale

    def down(
        self,
        out: torch.Tensor,
        intermediate: QuantizedRows,
        w2: QuantizedMatrices,
        plan: RoutePlan,
        config: object,
        *,
        bias: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        overlap: bool = False,
    ) -> None:
        """As `hopper.quantized_down_gemm`."""
        y, experts = self._multiply(intermediate, w2, plan)
        y = y if bias is None else y + bias[experts].float()
        assert (topk_weights is not None) == (out.dtype == torch.float16)
        if topk_weights is not None:
            y = y * topk_weights.flatten()[plan.sorted_routes[: len(y)].long(), None]
        out[GUARD_ROWS : GUARD_ROWS + len(y)] = y.to(out.dtype)

    def _multiply(
        self, rows: QuantizedRows, weight: QuantizedMatrices, plan: RoutePlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows in use times the matrices of their experts, [rows, columns] fp32; and these experts."""
        counts = plan.expert_offsets.diff().long()
        experts = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        n = len(experts)
        scale = weight.scale[:, :, 0].repeat_interleave(weight.group_rows, 1)[experts]  # [rows, columns]
        product = torch.einsum("rk,rnk->rn", rows.q[:n].float(), weight.q.float()[experts])
        return product * rows.scale[:n] * scale, experts


def run(problem: MoEProblem, weights: ExpertWeights, monkeypatch: pytest.MonkeyPatch) -> tuple[float, float, Products]:
    """Error of a poisoned call of the Hopper schedule, the bound, and the products."""
    layer = TritonQuantizedExperts(problem, SM90)
    implementation = layer.implementation
    assert isinstance(implementation, quantized.Standard)
    assert implementation.has_hopper
    products = Products(problem)
    monkeypatch.setattr(quantized_schedules.hopper, "quantized_gate_up_gemm", products.gate_up)
    monkeypatch.setattr(quantized_schedules.hopper, "quantized_down_gemm", products.down)
    schedule = quantized_schedules.Hopper(select_quantized_rule(64, False))
    monkeypatch.setattr(quantized.Standard, "select", lambda self, call: schedule)
    inputs = make_inputs(problem, 23, "uniform", DEVICE)
    ids, x = inputs.topk_ids.clone(), inputs.hidden_states.clone()
    expert_map = make_expert_map(problem, DEVICE) if problem.placement == "map" else None
    if problem.top_k > 1:
        # A token of no local expert has no part in a scale of all tokens.
        other = 99 if expert_map is None else int((expert_map < 0).nonzero()[0])
        ids[3, 0], ids[5] = -1, other
        x[5] *= 1e3
    given = ExpertInputs(x, inputs.topk_weights, ids, expert_map=expert_map)
    out = apply_experts(layer, given, layer.permute_weights(weights, problem))
    truth = reference_experts(problem, weights, x, inputs.topk_weights, ids, expert_map=expert_map)
    return float(relative_error(out, truth)), tolerance(problem.quant, problem.dtype, out.numel()), products


@pytest.mark.few
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
@pytest.mark.parametrize("case", PROBLEMS)
def test_a_layer_around_the_products(scheme: QuantScheme, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"num_experts": 4, "hidden_size": 136, "intermediate_size": 72, "top_k": 2}
    problem = MoEProblem(quant=scheme, **{**sizes, **PROBLEMS[case]})
    weights = make_weights(problem, DEVICE)
    given = [weights]
    if weights.a13_scale is not None and weights.a2_scale is not None:
        experts = torch.linspace(0.5, 2.0, problem.num_local_experts, device=DEVICE)
        by_expert = {name: getattr(weights, name).reshape(-1) * experts for name in ("a13_scale", "a2_scale")}
        of_all = {name: scale.max() for name, scale in by_expert.items()}
        given = [dataclasses.replace(weights, **scales) for scales in (by_expert, of_all)]
    for own in given:
        error, bound, products = run(problem, own, monkeypatch)
        assert error <= bound
        activation = scheme.activation
        assert products.coded == (activation.static and activation.dtype == E4M3)


TAKEN = ("fp8_block128", "fp8_channel_token", "fp8_tensor_static", "fp8_tensor_dynamic", "int8_w8a8")


@pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")
# Layers in nf4 only train on GPUs.
@pytest.mark.parametrize("name", [name for name in QUANT_SCHEMES if not name.startswith("nf4")])
def test_schemes_that_hopper_multiplies(name: str) -> None:
    problem = MoEProblem(num_experts=4, hidden_size=256, intermediate_size=256, top_k=2, quant=name)
    winner = select_backend(problem, SM90, require="triton").winner
    implementation = getattr(winner.cell.experts(problem, SM90, winner.scheme), "implementation", None)
    assert getattr(implementation, "has_hopper", False) == (name in (*TAKEN, "unquantized"))
