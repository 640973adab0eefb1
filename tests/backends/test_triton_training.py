"""`TritonExperts` where problems have gradients: interpreted on a CPU, compiled where there is a CUDA device.

What every class with gradients has to do, such as numbers, neighbors and parts, `tests/kit/test_conformance.py` checks.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import pytest
import torch

pytest.importorskip("triton")

from moereg.backends._triton import training
from moereg.backends._triton.training_products import fits_hopper, hopper_guard
from moereg.backends.triton_moe import TritonExperts
from moereg.dispatch import select_backend
from moereg.experts import ExpertInputs, Gradients
from moereg.kernels.sizes import GUARD_ROWS
from moereg.numerics.gradients import reference_gradients
from moereg.platforms import Platform
from moereg.spec.problem import GRADIENTS, MoEProblem
from moereg.testing.inputs import make_adapters, make_grad_out, make_inputs, make_weights
from tests.kernels.triton_cases import DEVICE, SM90

SIZES: Final = {"num_experts": 3, "hidden_size": 72, "intermediate_size": 40, "top_k": 2}


def problem_of(**changes: Any) -> MoEProblem:
    return MoEProblem(**{**SIZES, "gradients": GRADIENTS, "adapter_rank": 5, **changes})


class Run:
    """A class's instance with a layer's weights and one call."""

    def __init__(self, problem: MoEProblem, num_tokens: int, routing: str = "uniform") -> None:
        device = torch.device(DEVICE)
        self.problem, self.num_tokens = problem, num_tokens
        self.layer = TritonExperts(problem, SM90)
        self.weights = make_weights(problem, device)
        self.permuted = self.layer.permute_weights(weights=self.weights, problem=problem)
        self.call = make_inputs(problem, num_tokens, routing, device, seed=1)
        self.grad_out = make_grad_out(self.call)
        self.adapters = make_adapters(problem, device)
        self.inputs = ExpertInputs(*self.call.call, adapters=self.adapters)

    def rooms(self, shapes: tuple[tuple[int, ...], ...]) -> dict[str, torch.Tensor]:
        made = (torch.full(shape, torch.nan, dtype=self.problem.torch_dtype, device=DEVICE) for shape in shapes)
        return dict(zip(("workspace13", "workspace2"), made, strict=True))

    def forward(self, saves: bool = True) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        shapes: Any = {}
        if saves:
            shapes = self.layer.saved_shapes(problem=self.problem, num_tokens=self.num_tokens)
        saved = {
            name: torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype, device=DEVICE)
            for name, (shape, dtype) in shapes.items()
        }
        out = torch.full_like(self.inputs.hidden_states, torch.nan)
        rooms = self.rooms(self.layer.workspace_shapes(problem=self.problem, num_tokens=self.num_tokens))
        if saves:
            self.layer.apply_saving(out=out, saved=saved, inputs=self.inputs, weights=self.permuted, **rooms)
        else:
            inputs = dataclasses.replace(self.inputs, adapters=None)
            self.layer.apply(out=out, inputs=inputs, weights=self.permuted, **rooms)
        return out, saved

    def backward(self, saved: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
        like = {"hidden_states": self.inputs.hidden_states, "topk_weights": self.inputs.topk_weights}
        assert self.adapters is not None
        like |= {**self.weights.tensors(), **self.adapters.tensors()}
        grads = {name: torch.full_like(like[name], torch.nan) for name in names or like}
        rooms = self.rooms(self.layer.backward_workspace_shapes(problem=self.problem, num_tokens=self.num_tokens))
        given: dict[str, Any] = {"saved": saved, "inputs": self.inputs, "weights": self.permuted, **rooms}
        self.layer.apply_backward(grads=Gradients(**grads), grad_out=self.grad_out, **given)
        return grads


@pytest.mark.parametrize(
    ("sizes", "rank", "num_tokens", "guard"),
    [
        # Beyond 96 rows an expert tiles are taller; and several tiles of columns add to a routing weight's gradient.
        ({"hidden_size": 40, "intermediate_size": 130}, 5, 97, 0),
        # Sizes that Hopper's tensor maps cannot describe, in a call of so many rows that they would be asked; and
        # low-rank rows that take more room than the plan of a call that infers.
        ({"hidden_size": 36, "intermediate_size": 20}, 64, GUARD_ROWS, GUARD_ROWS),
    ],
)
def test_many_rows(sizes: dict[str, int], rank: int, num_tokens: int, guard: int) -> None:
    run = Run(problem_of(num_experts=1, top_k=1, adapter_rank=rank, **sizes), num_tokens)
    _, saved = run.forward()
    assert len(saved["pre"]) == guard + num_tokens
    assert saved["pre"][:guard].isnan().all()
    truth = reference_gradients(run.problem, run.weights, *run.call.call, run.grad_out, None, run.adapters)
    for comparison in truth.compare(run.backward(saved)):
        assert comparison.error <= comparison.bound, comparison


@pytest.mark.parametrize(
    ("num_routes", "rows_per_expert", "dtype", "guard"),
    [
        (GUARD_ROWS, 97.0, torch.bfloat16, GUARD_ROWS),
        (GUARD_ROWS - 1, 97.0, torch.float16, 0),
        (4096, 96.0, torch.bfloat16, 0),
        (4096, 512.0, torch.float32, 0),
    ],
)
def test_hopper_rows(num_routes: int, rows_per_expert: float, dtype: torch.dtype, guard: int) -> None:
    assert hopper_guard(num_routes, rows_per_expert, dtype) == guard


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


TENSORS_FOR_HOPPER: Final[dict[str, tuple[dict[str, Any], bool]]] = {
    "all": ({}, True),
    "tokens of a wider tensor": ({"tokens": zeros(9, 48)[:, :40]}, True),
    "low tiles": ({"block_m": 64}, False),
    "an address": ({"tokens": zeros(9 * 40 + 4)[4:].view(9, 40)}, False),
    "tokens 44 apart": ({"tokens": zeros(9, 44)[:, :40]}, False),
    "36 columns": ({"tokens": zeros(9, 40)[:, :36]}, False),
    "weights with gaps": ({"weight": zeros(4, 24, 40)[::2]}, False),
    "weights of 20 columns": ({"weight": zeros(2, 40, 20)}, False),
    "a rank of 4": ({"adapter": zeros(2, 4, 40)}, False),
}


def test_a_pass_asks_about_all_tokens_that_it_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights' gradients gather the layer's inputs again, which may lie elsewhere than the output's gradient."""
    asked: list[int] = []

    def declines(_block_m: int, tokens: torch.Tensor, *_others: Any) -> bool:
        asked.append(tokens.data_ptr())
        return tokens is not run.inputs.hidden_states

    monkeypatch.setattr(training, "fits_hopper", declines)
    run = Run(problem_of(num_experts=1, top_k=1, hidden_size=36, intermediate_size=20, adapter_rank=8), GUARD_ROWS)
    run.backward(run.forward()[1], "w13")
    assert run.inputs.hidden_states.data_ptr() in asked[1:], asked


@pytest.mark.parametrize("name", TENSORS_FOR_HOPPER)
def test_tensors_for_hopper(name: str) -> None:
    """What tensor maps and copies of 16 bytes can describe."""
    changes, fits = TENSORS_FOR_HOPPER[name]
    usual = {"block_m": 128, "tokens": zeros(9, 40), "weight": zeros(2, 24, 40), "adapter": zeros(2, 8, 40)}
    given: dict[str, Any] = {**usual, **changes}
    sides = (given["weight"], None), (given["adapter"], None)
    assert fits_hopper(given["block_m"], given["tokens"], *sides) == fits


@pytest.mark.parametrize("num_tokens", [1, 9, 40])
def test_a_layer_that_trains_evaluates_as_one_that_infers(num_tokens: int) -> None:
    """The workspaces of such a layer have room for both."""
    run = Run(problem_of(has_bias=True), num_tokens)
    plain = Run(problem_of(has_bias=True, gradients=(), adapter_rank=0), num_tokens)
    assert torch.equal(run.forward(saves=False)[0], plain.forward(saves=False)[0])


def test_a_step_has_the_bits_of_inference_if_asked_for() -> None:
    """And what it saves is what a step saves that was not asked, whose gradients are compared with the reference."""
    asked = {"has_bias": True, "gradients": set(GRADIENTS) - {"adapters"}, "adapter_rank": 0}
    usual, invariant = (Run(problem_of(**asked, batch_invariant=flag), 17) for flag in (False, True))
    out, saved = invariant.forward()
    assert torch.equal(out, invariant.forward(saves=False)[0])
    _, expected = usual.forward()
    known = torch.isfinite(expected["pre"])
    assert known.any()
    assert torch.equal(saved["pre"][known], expected["pre"][known])
    assert torch.equal(saved["plan"], expected["plan"])


@pytest.mark.parametrize(
    "names",
    [
        *(("hidden_states", "topk_weights"), ("topk_weights",), ("w2",), ("w13", "w13_bias"), ("w2_bias",)),
        *(("w13_a",), ("w13_b",), ("w2_a",), ("w2_b",)),
    ],
)
def test_a_part_of_the_gradients_has_the_bits_of_all(names: tuple[str, ...]) -> None:
    """And a second pass over what was saved, which is only read."""
    run = Run(problem_of(has_bias=True, activation="swigluoai"), 17, "one_expert")
    _, saved = run.forward()
    before = {name: tensor.clone() for name, tensor in saved.items()}
    everything = run.backward(saved)
    for name, grad in run.backward(saved, *names).items():
        assert torch.equal(grad, everything[name]), name
    assert all(torch.equal(tensor.view(torch.uint8), saved[name].view(torch.uint8)) for name, tensor in before.items())


def test_weights_are_read_where_they_lie() -> None:
    run = Run(problem_of(has_bias=True), 1)
    for name, tensor in run.weights.tensors().items():
        assert run.permuted[name].data_ptr() == tensor.data_ptr()


REFUSAL: Final = "requires apply_router_weight_on_input=False where gradients are asked, got True"


@pytest.mark.parametrize("gradients", [(), GRADIENTS])
@pytest.mark.parametrize("platform", ["cuda:sm90", "rocm:gfx942"])
def test_one_class_infers_and_trains(gradients: tuple[str, ...], platform: str) -> None:
    problem = problem_of(gradients=gradients, adapter_rank=5 if gradients else 0)
    here = Platform.from_name(platform)
    assert select_backend(problem, here).winner.cell.experts is TritonExperts
    scaled = dataclasses.replace(problem, top_k=1, apply_router_weight_on_input=True)
    assert TritonExperts.unsupported_reasons(scaled, here) == ([REFUSAL] if gradients else [])


@pytest.mark.parametrize(("intermediate_size", "is_refused"), [(2**15, True), (2**15 - 1, False)])
def test_offsets_within_an_expert_have_32_bits(intermediate_size: int, is_refused: bool) -> None:
    """But those of experts have 64: all together may be larger."""
    problem = problem_of(num_experts=128, hidden_size=2**15, intermediate_size=intermediate_size)
    assert bool(TritonExperts.unsupported_reasons(problem, SM90)) == is_refused


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_more_tokens_never_need_less_scratch_memory(dtype: str) -> None:
    problem = problem_of(dtype=dtype)
    layer = TritonExperts(problem, SM90)
    for sizes in (layer.workspace_shapes, layer.backward_workspace_shapes):
        # Around the number of rows at which tiles change.
        shapes = [sizes(problem=problem, num_tokens=tokens) for tokens in (*range(135, 155), 999)]
        for numels in zip(*(map(math.prod, both) for both in shapes), strict=True):
            assert list(numels) == sorted(numels)


def test_saved_bytes_of_a_token() -> None:
    """Of Qwen3-30B's layer: the rows before the activation, and little beside them."""
    sizes = {"num_experts": 128, "hidden_size": 2048, "intermediate_size": 768, "top_k": 8}
    problem = MoEProblem(**sizes, gradients=GRADIENTS, adapter_rank=16)
    saved = TritonExperts(problem, SM90).saved_shapes(problem=problem, num_tokens=4096)
    num_bytes = sum(torch.empty(shape, dtype=dtype, device="meta").nbytes for shape, dtype in saved.values())
    assert num_bytes / 4096 < 1.03 * 8 * 2 * 768 * 2
