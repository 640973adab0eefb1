"""The Triton kernels of a layer that is trained against autograd in fp64, on the same rounded operands.

Interpreted on a CPU, compiled where there is a CUDA device. `triton_cases` says what an error is, and how large it may
be.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from moereg.kernels.backward.activation import slopes_of_halves
from moereg.kernels.backward.config import TrainingConfigs
from moereg.kernels.backward.products import (
    down_input_gradients,
    down_rows,
    expanding,
    gate_up_input_gradients,
    low_rank_rows,
    num_partials,
    saving_gate_up,
)
from moereg.kernels.backward.weights import bias_gradients, routing_gradients, weight_gradients
from moereg.kernels.gemm.config import GroupedGemmConfig
from moereg.kernels.gemm.epilogue import ActivationConstant
from moereg.numerics.reference import relative_error
from moereg.spec.activations import ACTIVATIONS, Activation
from tests.kernels.test_triton_kernels import StageCase as Layer
from tests.kernels.triton_cases import (
    BF16,
    DEVICE,
    FP16,
    FP32,
    Guarded,
    bound,
    far_apart,
    make_plan,
    random,
    route,
    rows_with_gaps,
)

# The sigmoid of a very negative gate divides by infinity, as on a device; numpy mentions it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")


def tile(m: int, n: int, k: int) -> GroupedGemmConfig:
    return GroupedGemmConfig(block_m=m, block_n=n, block_k=k, group_m=2, num_warps=4, num_stages=2)


# Sums over several tiles and steps, and tails of all three sizes.
SMALL = TrainingConfigs(
    element_bytes=2,
    rows=tile(m=16, n=64, k=32),
    down_input=tile(m=16, n=32, k=64),
    weights=tile(m=32, n=64, k=16),
    low_rank=tile(m=16, n=16, k=32),
    low_rank_weights=tile(m=16, n=32, k=16),
)


LAYERS = [
    Layer(1, 1, 4, 64, 32, BF16),
    Layer(17, 2, 4, 64, 64, BF16),
    Layer(23, 2, 8, 72, 40, FP16, "gelu", bias=FP16),
    Layer(19, 2, 4, 130, 88, BF16, "gelu_tanh", bias=FP32, kind="out_of_range"),
    Layer(9, 4, 8, 80, 65, BF16, "swigluoai", bias=BF16),
    Layer(40, 2, 4, 65, 64, FP32, "silu(limit=0.5)", kind="one_expert"),
    Layer(17, 2, 8, 72, 33, FP32, "situ(limit=1.5, gate_softcap=0.5, up_softcap=0.75)", bias=FP32),
    Layer(17, 2, 8, 72, 33, FP32, "relu2", bias=FP32),
    Layer(17, 1, 4, 64, 64, BF16, kind="nothing"),
]
each_layer = pytest.mark.parametrize("layer", LAYERS, ids=str)


class Case:
    """Operands of a layer, with NaN behind each row, and its routes by expert."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        tokens, top_k, experts, hidden, width = dataclasses.astuple(layer)[:5]
        self.activation = Activation.from_name(layer.activation)
        self.columns = self.activation.num_halves * width
        dtype = layer.dtype
        self.x, self.grad_out = rows_with_gaps(tokens, hidden, dtype), rows_with_gaps(tokens, hidden, dtype).flip(0)
        self.w13 = rows_with_gaps(experts * self.columns, hidden, dtype).unflatten(0, (experts, self.columns))
        self.w13 *= hidden**-0.5
        # A swap of the halves must show.
        self.w13[:, :width] *= 2
        self.w2 = rows_with_gaps(experts * hidden, width, dtype).unflatten(0, (experts, hidden))
        self.w2 *= width**-0.5
        self.w13_bias = self.w2_bias = None
        if layer.bias is not None:
            self.w13_bias = rows_with_gaps(experts, self.columns, layer.bias)
            self.w2_bias = rows_with_gaps(experts, hidden, layer.bias)
        self.ids = route(layer.kind, tokens, top_k, experts)
        self.plan = make_plan(self.ids, None, experts, experts, SMALL.block_m)
        self.topk_weights = random(tokens, top_k, dtype=FP32).abs() + 0.1
        valid = self.plan.route_row.view_as(self.ids) >= 0
        # Routers leave any number beside an id that names no expert.
        self.topk_weights[~valid] = math.nan
        self.num_rows = int(self.plan.expert_offsets[-1])
        self.order = self.plan.sorted_routes[: self.num_rows].long()
        self.tokens = self.order // top_k
        self.experts = self.plan.route_expert[self.order].long()
        self.rows = list(itertools.pairwise(self.plan.expert_offsets.tolist()))

    @property
    def constant(self) -> ActivationConstant:
        return ActivationConstant(*dataclasses.astuple(self.activation))

    def sorted_rows(self, size: int) -> torch.Tensor:
        """[N, size] random in the valid rows, NaN in the others."""
        rows = rows_with_gaps(self.ids.numel(), size, self.layer.dtype)
        rows[self.num_rows :] = math.nan
        return rows

    def guarded(self, size: int, dtype: torch.dtype | None = None) -> Guarded:
        return Guarded(self.ids.numel(), size, dtype=dtype or self.layer.dtype)

    def check(self, found: Guarded, expected: torch.Tensor) -> None:
        """Compares the valid rows; the others must stay as they are."""
        found.check()
        assert found.tensor[self.num_rows :].isnan().all()
        self.compare(found.tensor[: self.num_rows], expected)

    def compare(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        if expected.numel() and expected.norm():
            assert relative_error(found, expected) < bound(found.dtype, 1)
        else:
            assert (found == 0).all()


@each_layer
def test_forward_keeps_the_rows_before_the_activation(layer: Layer) -> None:
    case = Case(layer)
    act, pre = case.guarded(layer.intermediate_size), case.guarded(case.columns)
    named: dict[str, Any] = {"top_k": layer.top_k, "bias": case.w13_bias}
    saving_gate_up(act.tensor, pre.tensor, case.x, case.w13, case.plan, SMALL.rows, case.constant, **named)
    expected = torch.einsum("nh,nch->nc", case.x[case.tokens].double(), case.w13[case.experts].double())
    if case.w13_bias is not None:
        expected += case.w13_bias[case.experts].double()
    case.check(pre, expected)
    case.check(act, case.activation(expected))
    alone = case.guarded(layer.intermediate_size)
    saving_gate_up(alone.tensor, None, case.x, case.w13, case.plan, SMALL.rows, case.constant, **named)
    assert torch.equal(alone.tensor[: case.num_rows], act.tensor[: case.num_rows])


@each_layer
def test_second_product_and_its_routing_weights(layer: Layer) -> None:
    case = Case(layer)
    act, out = case.sorted_rows(layer.intermediate_size), case.guarded(layer.hidden_size)
    named: dict[str, Any] = {"topk_weights": case.topk_weights, "bias": case.w2_bias}
    down_rows(out.tensor, act, case.w2, case.plan, SMALL.rows, **named)
    expected = torch.einsum("ni,nhi->nh", act[: case.num_rows].double(), case.w2[case.experts].double())
    if case.w2_bias is not None:
        expected += case.w2_bias[case.experts].double()
    case.check(out, expected * case.topk_weights.flatten()[case.order, None].double())


@each_layer
def test_gradients_of_the_second_products_input(layer: Layer) -> None:
    """The gradient of the pre-activation, the weighted activation, and the gradients of the routing weights."""
    case = Case(layer)
    width, config = layer.intermediate_size, SMALL.down_input
    pre, pre_grad, act = case.sorted_rows(case.columns), case.guarded(case.columns), case.guarded(width)
    partials = Guarded(num_partials(width, config.block_n), case.ids.numel(), dtype=FP32)
    operands = case.grad_out, case.w2, pre, case.topk_weights, case.plan, config, case.constant
    down_input_gradients(pre_grad.tensor, act.tensor, partials.tensor, *operands)
    partials.check()

    leaf = pre[: case.num_rows].double().requires_grad_()
    weights = case.topk_weights.flatten()[case.order].double().requires_grad_()
    activated = case.activation(leaf)
    y = torch.einsum("ni,nhi->nh", activated, case.w2[case.experts].double())
    if case.w2_bias is not None:
        y = y + case.w2_bias[case.experts].double()
    (y * weights[:, None]).backward(case.grad_out[case.tokens].double())
    assert leaf.grad is not None
    assert weights.grad is not None
    case.check(pre_grad, leaf.grad)
    case.check(act, (activated * weights[:, None]).detach())

    grad = Guarded(*case.ids.shape, dtype=FP32)
    routing_gradients(grad.tensor, partials.tensor, case.grad_out, case.plan, bias=case.w2_bias)
    grad.check()
    expected = torch.zeros(case.ids.numel(), dtype=torch.double, device=DEVICE)
    expected[case.order] = weights.grad
    case.compare(grad.tensor.flatten(), expected)
    assert (grad.tensor.flatten()[expected == 0] == 0).all()

    # Each alone has the same bits.
    for number, whole in enumerate((pre_grad, act, partials)):
        alone = [None if place != number else torch.full_like(whole.tensor, math.nan) for place in range(3)]
        down_input_gradients(alone[0], alone[1], alone[2], *operands)
        found = alone[number]
        assert found is not None
        assert torch.equal(found.nan_to_num(), whole.tensor.nan_to_num())


@each_layer
def test_gradients_of_each_routes_token(layer: Layer) -> None:
    case = Case(layer)
    pre_grad, out = case.sorted_rows(case.columns), case.guarded(layer.hidden_size)
    gate_up_input_gradients(out.tensor, pre_grad, case.w13, case.plan, SMALL.rows)
    case.check(out, torch.einsum("nc,nch->nh", pre_grad[: case.num_rows].double(), case.w13[case.experts].double()))


@pytest.mark.parametrize(("layer", "rank"), list(zip(LAYERS[2:5], (1, 16, 70), strict=True)), ids=str)
def test_low_rank_rows_and_each_product_that_they_are_added_to(layer: Layer, rank: int) -> None:
    """Of an adapter: of tokens or of sorted rows, then expanded in steps of at most 64."""
    case, config = Case(layer), SMALL.low_rank_products(rank)
    width, hidden = layer.intermediate_size, layer.hidden_size

    def matrix(rows: int, columns: int) -> torch.Tensor:
        made = rows_with_gaps(layer.num_experts * rows, columns, layer.dtype).unflatten(0, (layer.num_experts, rows))
        return made * columns**-0.5

    narrow = matrix(rank, hidden).transpose(1, 2)  # [E, H, R], read along the other axis.
    low = case.guarded(rank)
    low_rank_rows(low.tensor, case.x, narrow, case.plan, config, scaling=0.5, top_k=layer.top_k)
    case.check(low, 0.5 * torch.einsum("nh,nhr->nr", case.x[case.tokens].double(), narrow[case.experts].double()))
    act, wide = case.sorted_rows(width), matrix(width, rank)
    low_rank_rows(low.tensor, act, wide, case.plan, config, scaling=2.0)
    case.check(low, 2 * torch.einsum("ni,nir->nr", act[: case.num_rows].double(), wide[case.experts].double()))

    rows = low.tensor[: case.num_rows].double()

    def check(product: Callable[..., None], size: int, expanding_matrix: torch.Tensor) -> None:
        part = torch.einsum("nr,nrc->nc", rows, expanding_matrix[case.experts].double())
        with_part, without = case.guarded(size, FP32), case.guarded(size, FP32)
        product(with_part.tensor, low_rank=expanding(low.tensor, expanding_matrix))
        product(without.tensor, low_rank=None)
        case.check(with_part, without.tensor[: case.num_rows].double() + part)

    pre_grad, ones = case.sorted_rows(case.columns), torch.ones_like(case.topk_weights)
    products = {
        "down": lambda out, low_rank: down_rows(
            out, act, case.w2, case.plan, SMALL.rows, topk_weights=ones, low_rank=low_rank
        ),
        "input": lambda out, low_rank: gate_up_input_gradients(
            out, pre_grad, case.w13, case.plan, SMALL.rows, low_rank=low_rank
        ),
    }
    for product in products.values():
        check(product, hidden, matrix(hidden, rank).transpose(1, 2))
        check(product, hidden, matrix(rank, hidden))

    def gate_up(out: torch.Tensor, low_rank: Any) -> None:
        config, constant = SMALL.rows, case.constant
        room = case.guarded(width).tensor
        saving_gate_up(room, out, case.x, case.w13, case.plan, config, constant, top_k=layer.top_k, low_rank=low_rank)

    check(gate_up, case.columns, matrix(case.columns, rank).transpose(1, 2))

    def down_input(out: torch.Tensor, low_rank: Any) -> None:
        # An activation of slope one: both halves are 1, and the clamp is far.
        config, constant = SMALL.down_input, ActivationConstant("relu2", False)
        half = torch.full((case.ids.numel(), width), 0.5, dtype=layer.dtype, device=DEVICE)
        given = case.grad_out, case.w2, half, ones, case.plan, config, constant
        down_input_gradients(out, None, None, *given, low_rank=low_rank)

    check(down_input, width, matrix(rank, width))


@pytest.mark.parametrize("layer", LAYERS[2:5], ids=str)
def test_gradients_of_a_product_of_sorted_rows_alone(layer: Layer) -> None:
    """Thin ones, as an adapter has: rows of the rank, or columns."""
    case, rank = Case(layer), 5
    low, rows = case.sorted_rows(rank), case.sorted_rows(layer.intermediate_size)
    for left, right, config in ((low, rows, SMALL.a_gradients(rank)), (rows, low, SMALL.b_gradients(rank))):
        grad = Guarded(layer.num_experts, left.shape[1], right.shape[1], dtype=layer.dtype)
        named: dict[str, Any] = {"top_k": layer.top_k, "gathers": None, "accumulate": False}
        weight_gradients(grad.tensor, left, right, case.plan, config, **named)
        grad.check()
        expected = [left[row:end].double().T @ right[row:end].double() for row, end in case.rows]
        case.compare(grad.tensor, torch.stack(expected))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("gathers", ["left", "right"])
@each_layer
def test_gradients_of_weights(layer: Layer, gathers: str, accumulate: bool) -> None:
    """Rows of tokens that chose no expert and of routes without a row are NaN, as may be what is overwritten."""
    case = Case(layer)
    chosen = torch.zeros(layer.num_tokens, dtype=torch.bool, device=DEVICE)
    chosen[case.tokens] = True
    tokens, rows = case.x.clone(), case.sorted_rows(layer.intermediate_size)
    tokens[~chosen] = math.nan
    left, right = (tokens, rows) if gathers == "left" else (rows, tokens)
    grad = Guarded(layer.num_experts, left.shape[1], right.shape[1], dtype=layer.dtype)
    before = torch.zeros(grad.tensor.shape, dtype=torch.double, device=DEVICE)
    if accumulate:
        grad.tensor.copy_(random(*grad.tensor.shape, dtype=FP32))
        before = grad.tensor.double()
    named: dict[str, Any] = {"top_k": layer.top_k, "gathers": gathers, "accumulate": accumulate}
    weight_gradients(grad.tensor, left, right, case.plan, SMALL.weights, **named)
    grad.check()
    left, right = ((side[case.tokens] if side is tokens else side[: case.num_rows]).double() for side in (left, right))
    expected = before + torch.stack([left[row:end].T @ right[row:end] for row, end in case.rows])
    case.compare(grad.tensor, expected)
    for expert, (row, end) in enumerate(case.rows):
        assert row < end or torch.equal(grad.tensor[expert].double(), before[expert])


@pytest.mark.parametrize("accumulate", [False, True])
@each_layer
def test_gradients_of_biases(layer: Layer, accumulate: bool) -> None:
    case = Case(layer)
    rows = case.sorted_rows(case.columns)
    weights = case.topk_weights.flatten()[case.order, None].double()
    sources = (
        (rows, None, rows[: case.num_rows].double()),
        (case.grad_out, case.topk_weights, case.grad_out[case.tokens].double() * weights),
    )
    for source, topk_weights, addends in sources:
        grad = Guarded(layer.num_experts, source.shape[1], dtype=layer.bias or layer.dtype)
        before = torch.zeros(grad.tensor.shape, dtype=torch.double, device=DEVICE)
        if accumulate:
            grad.tensor.copy_(random(*grad.tensor.shape, dtype=FP32))
            before = grad.tensor.double()
        bias_gradients(grad.tensor, source, case.plan, topk_weights=topk_weights, accumulate=accumulate)
        grad.check()
        case.compare(grad.tensor, before + torch.stack([addends[row:end].sum(0) for row, end in case.rows]))


SCALED = ["silu(limit=1.5)", "silu(alpha=1.3,beta=0.5)", "situ(beta=0.5,limit=1.5,gate_softcap=0.5,up_softcap=0.75)"]


@pytest.mark.parametrize("name", [*SCALED, "situ(up_softcap=None)", *ACTIVATIONS])
def test_slopes(name: str) -> None:
    """Far from zero, at both clamps and beyond them; w2 is the identity, so that only the activation is left."""
    activation = Activation.from_name(name)
    limit = activation.limit or 3.0
    ends = torch.tensor([-60.0, -limit, -0.7, 0.0, 0.6, limit, limit + 1, 60.0])
    pre = torch.cartesian_prod(ends, ends) if activation.gated else ends[:, None]
    pre = pre.repeat_interleave(16, dim=1).to(DEVICE)
    width, rows = 16, len(pre)
    ids = torch.zeros(rows, 1, dtype=torch.int32, device=DEVICE)
    constant = ActivationConstant(*dataclasses.astuple(activation))
    grad_out, weights = random(rows, width, dtype=FP32), torch.ones(rows, 1, device=DEVICE)
    pre_grad = torch.full_like(pre, math.nan)
    w2, plan = torch.eye(width, device=DEVICE)[None], make_plan(ids, None, 1, 1, 16)
    down_input_gradients(pre_grad, None, None, grad_out, w2, pre, weights, plan, SMALL.down_input, constant)
    leaf = pre.double().requires_grad_()
    activation(leaf).backward(grad_out.double())
    assert leaf.grad is not None
    torch.testing.assert_close(pre_grad.double(), leaf.grad, rtol=2e-5, atol=1e-6)


@triton.jit
def _slopes_kernel(gate, up, value, by_gate, by_up, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    found = slopes_of_halves(tl.load(gate + offsets), tl.load(up + offsets), ACTIVATION)
    tl.store(value + offsets, found.value)
    tl.store(by_gate + offsets, found.gate)
    tl.store(by_up + offsets, found.up)


@pytest.mark.parametrize("name", ["situ", "situ(gate_softcap=0.5, up_softcap=0.75)", "situ(up_softcap=None)"])
def test_soft_caps_of_numbers_that_are_not_finite(name: str) -> None:
    activation = Activation.from_name(name)
    ends = [math.nan, -math.inf, -1e37, -80.0, -1e-6, 0.0, 1e-6, 1e37, math.inf]
    gates = torch.tensor(ends, device=DEVICE)
    # torch multiplies an infinite up by slopes that it has rounded to 0.
    ups = gates if activation.up_softcap is not None else gates.clamp(-1e37, 1e37)
    pairs = torch.cartesian_prod(gates, ups)
    pairs = torch.cat([pairs, pairs])[:128]
    gate, up = pairs.T.contiguous()
    found = [torch.full_like(gate, -7) for _ in range(3)]
    _slopes_kernel[(1,)](gate, up, *found, ACTIVATION=ActivationConstant(*dataclasses.astuple(activation)), BLOCK=128)
    leaf = pairs.double().requires_grad_()
    value = activation(leaf)
    value.sum().backward()
    assert leaf.grad is not None
    for ours, expected in zip(found, (value.detach()[:, 0], *leaf.grad.T), strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_equal_inputs_give_equal_bits_of_weights_in_any_tile() -> None:
    """A column's sum does not depend on its tile, so a later choice of tiles changes no result."""
    case = Case(Layer(40, 2, 4, 72, 64, BF16))
    rows, found = case.sorted_rows(64), []
    for config in (SMALL.weights, tile(m=64, n=32, k=16)):
        grad = torch.full((4, 64, 72), math.nan, dtype=BF16, device=DEVICE)
        named: dict[str, Any] = {"top_k": 2, "gathers": "right", "accumulate": False}
        weight_gradients(grad, rows, case.x, case.plan, config, **named)
        found.append(grad)
    assert torch.equal(*found)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU memory is there when it is allocated: this would take 8 GiB")
def test_experts_may_lie_2_to_the_31_elements_apart() -> None:
    apart = far_apart(3, 64, 64)
    weight = random(3, 64, 64, dtype=BF16)
    apart.copy_(weight)
    x, rows, ones = random(3, 64, dtype=BF16), random(3, 64, dtype=BF16), torch.ones(3, 1)
    plan = make_plan(torch.arange(3, dtype=torch.int32).view(3, 1), None, 3, 3, 16)
    activation = ActivationConstant("relu2", False)
    config, found = tile(m=16, n=64, k=64), []
    for each in (weight, apart):
        made = [torch.full((3, 64), math.nan, dtype=BF16) for _ in range(4)]
        saving_gate_up(made[0], None, x, each, plan, config, activation, top_k=1)
        down_rows(made[1], rows, each, plan, config, topk_weights=ones)
        gate_up_input_gradients(made[2], rows, each, plan, config)
        down_input_gradients(made[3], None, None, x, each, rows, ones, plan, config, activation)
        found.append(made)
    assert all(map(torch.equal, *found))
    grad = torch.full((3, 64, 64), math.nan, dtype=BF16)
    for one in (grad, apart):
        weight_gradients(one, rows, x, plan, config, top_k=1, gathers="right", accumulate=False)
    assert torch.equal(grad, apart)
