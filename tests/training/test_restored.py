"""Training above frozen quantized weights, which each call restores to the layer's dtype."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
from typing import Any

import pytest
import torch

import moereg
from moereg.backends.torch_moe import TorchTrainingExperts
from moereg.errors import ArgumentError, UnsupportedProblemError
from moereg.layer import admission
from moereg.layer.restored import RestoredExperts
from moereg.numerics.gradients import ReferenceGradients, reference_gradients
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import layer_tolerance
from moereg.platforms import Platform
from moereg.quantize import dequantize_into, dequantize_weights
from moereg.registry import BackendRegistry, register_moe_backend
from moereg.runtime.workspace import WORKSPACES
from moereg.spec.quant_schemes import QUANT_SCHEMES
from moereg.testing.inputs import Inputs, make_adapters, make_expert_map, make_grad_out, make_inputs, make_weights
from moereg.weights.adapters import ExpertAdapters
from moereg.weights.unpermute import same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
QUANTIZED = [name for name, scheme in QUANT_SCHEMES.items() if scheme.weight is not None]
EXACT = {"mxfp8", "mxfp4_w4a16", "mxfp4_mxfp8"}
"""Schemes whose weights have at most 4 significant bits, so that rounding them to 16 bits changes nothing."""
FROZEN = frozenset({"hidden_states", "topk_weights"})


def frozen_problem(quant: str = "int4_w4a16_g32", rank: int = 0, **changes: Any) -> moereg.MoEProblem:
    """A layer of 6 experts in bfloat16 whose quantized weights do not train; its adapters do."""
    sizes = {"num_experts": 6, "hidden_size": 72, "intermediate_size": 40, "top_k": 2}
    gradients = FROZEN | ({"adapters"} if rank else frozenset())
    return moereg.MoEProblem(**{**sizes, "quant": quant, "gradients": gradients, "adapter_rank": rank, **changes})


@dataclasses.dataclass
class Frozen:
    """A layer with its kernel, and a call."""

    problem: moereg.MoEProblem
    weights: moereg.ExpertWeights
    kernel: moereg.MoEKernel
    inputs: Inputs
    grad_out: torch.Tensor
    adapters: ExpertAdapters | None
    expert_map: torch.Tensor | None

    @classmethod
    def drawn(
        cls, problem: moereg.MoEProblem, num_tokens: int = 33, seed: int = 0, platform: str | None = None
    ) -> Frozen:
        weights, expert_map = make_weights(problem, CPU, seed), make_expert_map(problem, CPU)
        inputs = make_inputs(problem, num_tokens, "unmapped", CPU, seed)
        selection = moereg.select_backend(problem, platform)
        kernel = moereg.make_kernel(problem, weights, selection, expert_map=expert_map)
        made = make_adapters(problem, CPU, seed)
        return cls(problem, weights, kernel, inputs, make_grad_out(inputs), made, expert_map)

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        held = {} if self.adapters is None else self.adapters.tensors()
        leaves = {"hidden_states": self.inputs.hidden_states, "topk_weights": self.inputs.topk_weights, **held}
        return {name: tensor.requires_grad_() for name, tensor in leaves.items()}

    @property
    def truth(self) -> ReferenceGradients:
        with torch.no_grad():
            call = *self.inputs.call, self.grad_out, self.expert_map, self.adapters
            return reference_gradients(self.problem, self.weights, *call)

    def forward(self) -> torch.Tensor:
        assert self.leaves
        return self.kernel(*self.inputs.call, adapters=self.adapters)

    def backward(self, out: torch.Tensor) -> dict[str, torch.Tensor]:
        leaves = self.leaves
        found = torch.autograd.grad(out, list(leaves.values()), self.grad_out)
        return dict(zip(leaves, found, strict=True))

    def check(self) -> None:
        truth, out = self.truth, self.forward()
        bound = layer_tolerance(self.problem, len(out))
        assert relative_error(out.detach(), truth.output) <= bound
        for each in truth.compare(self.backward(out)):
            assert each.error <= each.bound, each
        with torch.no_grad():
            calls = self.kernel(*self.inputs.call, adapters=self.adapters), torch.empty_like(out)
            self.kernel(*self.inputs.call, out=calls[1], adapters=self.adapters)
        assert all(relative_error(each, truth.output) <= bound for each in calls)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("quant", QUANTIZED)
def test_gradients_are_those_of_the_reference(quant: str, dtype: str) -> None:
    place = QUANTIZED.index(quant)
    layers: list[dict[str, Any]] = [{"rank": 5}, {"has_bias": True}, {"rank": 16, "activation": "relu2"}]
    Frozen.drawn(frozen_problem(quant, dtype=dtype, **layers[place % 3])).check()


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 33, "intermediate_size": 7, "quant": "int4_w4a16_g32_zp"},
        {"num_local_experts": 3, "placement": "map", "rank": 4},
        {"activation": moereg.Activation("silu", limit=0.6), "has_bias": True, "rank": 4},
        {"activation": "swigluoai", "has_bias": True, "quant": "mxfp4_w4a16"},
    ],
    ids=["odd sizes", "expert map", "clamped", "gpt-oss"],
)
def test_layers_of_other_kinds(changes: dict[str, Any]) -> None:
    layer = Frozen.drawn(frozen_problem(**changes))
    layer.check()
    empty = Frozen.drawn(layer.problem, num_tokens=0)
    assert not any(gradient.any() for gradient in empty.backward(empty.forward()).values())


@pytest.mark.parametrize("quant", QUANTIZED)
def test_the_reference_is_that_of_restored_weights(quant: str) -> None:
    """Whatever the scheme does to activations of a layer that infers."""
    layer = Frozen.drawn(frozen_problem(quant, rank=4, has_bias=True, dtype="float32"))
    w13, w2 = dequantize_weights(layer.weights, torch.float32)
    restored = moereg.ExpertWeights(w13=w13, w2=w2, **layer.weights.tensors("bias"))  # type: ignore[arg-type]
    problem, call = layer.problem.restored, layer.inputs.call
    with torch.no_grad():
        plain = reference_gradients(problem, restored, *call, layer.grad_out, None, layer.adapters)
        truth = layer.truth
        out = reference_experts(layer.problem, layer.weights, *call)
        assert relative_error(out, reference_experts(problem, restored, *call)) < 1e-5
    assert relative_error(truth.output, plain.output) < 1e-6
    assert plain.tensors.keys() - truth.tensors.keys() == {"w13", "w2"}
    assert all(relative_error(tensor, plain.tensors[name]) < 1e-6 for name, tensor in truth.tensors.items())


@pytest.mark.parametrize("quant", QUANTIZED)
def test_bounds_grow_by_what_rounding_weights_costs(quant: str) -> None:
    for dtype, most in (("float32", 1e-6), ("bfloat16", 2.0**-7), ("float16", 2.0**-10)):
        truth = Frozen.drawn(frozen_problem(quant, rank=4, dtype=dtype)).truth
        costs = {name: float(truth.moved[name].norm() / truth.sizes[name].norm()) for name in truth.tensors}
        if quant in EXACT:
            assert not any(costs.values())
        else:
            assert all(0 < cost < most for cost in costs.values()), costs


def plain_tensors() -> list[torch.Tensor]:
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is torch.Tensor]


@pytest.mark.parametrize("quant", ["int4_w4a16_g32", "nvfp4", "fp8_tensor_static"])
def test_a_layer_keeps_its_weights_quantized_alone(quant: str) -> None:
    layer = Frozen.drawn(frozen_problem(quant, hidden_size=256, intermediate_size=128))
    kernel, weights = layer.kernel, layer.weights
    assert not kernel.weights.copied_from(weights)
    assert kernel.weights.num_bytes == weights.num_bytes
    wide = sum(tensor.nbytes for tensor in dequantize_weights(weights))
    WORKSPACES.release()
    before = set(map(id, plain_tensors()))
    layer.backward(layer.forward())
    assert WORKSPACES.num_bytes > wide
    WORKSPACES.release()
    left = [each for each in plain_tensors() if id(each) not in before]
    assert sum(each.untyped_storage().nbytes() for each in left) < wide // 100


@pytest.mark.parametrize("rank", [0, 4])
def test_a_backward_pass_after_another_layer_restores_again(rank: int) -> None:
    first, second = (Frozen.drawn(frozen_problem(rank=rank), seed=seed) for seed in (0, 1))
    alone = [layer.backward(layer.forward()) for layer in (first, second)]
    outs = [layer.forward() for layer in (first, second)]
    found = [first.backward(outs[0]), second.backward(outs[1])]
    for wanted, gradients in zip(alone, found, strict=True):
        assert all(torch.equal(wanted[name], gradient) for name, gradient in gradients.items())


def test_a_backward_pass_reads_what_its_layer_restored_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a layer is recomputed for it; a forward pass always restores, since weights may have been reloaded."""
    restored: list[int] = []

    def counted(weights: moereg.ExpertWeights, *out: torch.Tensor) -> None:
        restored.append(weights.w13.data_ptr())
        dequantize_into(weights, *out)

    monkeypatch.setattr("moereg.layer.restored.dequantize_into", counted)
    first, second = (Frozen.drawn(frozen_problem(), seed=seed) for seed in (0, 1))
    one, other = first.weights.w13.data_ptr(), second.weights.w13.data_ptr()
    first.backward(first.forward())
    assert restored == [one]
    outs = [layer.forward() for layer in (first, first, second)]
    for layer, out in zip((second, first, first), reversed(outs), strict=True):
        layer.backward(out)
    assert restored == [one, one, one, other, one]
    # With other sizes and dtypes too, the memory is as large as the largest needs.
    held, wide = WORKSPACES.num_bytes, Frozen.drawn(frozen_problem(dtype="float32", hidden_size=264))
    wide.check()
    assert WORKSPACES.num_bytes > held
    WORKSPACES.release()
    out = first.forward()
    WORKSPACES.release()
    del restored[:]
    first.backward(out)
    assert restored == [one]
    first.check()


def test_it_says_that_weights_are_restored() -> None:
    problem = frozen_problem("fp8_block128", rank=4)
    selection = moereg.select_backend(problem, platform="cpu", require="torch")
    assert selection.winner is not None
    assert (selection.winner.experts, selection.winner.computes) == ("TorchTrainingExperts", "unquantized")
    text = (
        "each call, forward and backward, restores fp8_block128 weights to bfloat16 and quantizes no activations; to "
        "infer, make a kernel of the problem without gradients"
    )
    assert text in selection.notices
    assert text in selection.table()
    again = moereg.Selection.from_json(selection.to_json())
    assert again.fingerprint == selection.fingerprint
    assert isinstance(moereg.make_kernel(problem, make_weights(problem, CPU), again).experts, RestoredExperts)
    values = selection.to_dict()
    values["problem"].update(gradients=[], adapter_rank=0)
    with pytest.raises(ArgumentError, match="must be a scheme that serves fp8_block128, got 'unquantized'"):
        moereg.Selection.from_dict(values)


def test_other_problems_are_decided_as_before() -> None:
    inference = dataclasses.replace(frozen_problem(), gradients=frozenset())
    selection = moereg.select_backend(inference, platform="cpu")
    assert selection.winner is not None
    assert selection.winner.computes == "int4_w4a16_g32"
    assert not any("restores" in notice for notice in selection.notices)
    assert all(decision.experts != "TorchTrainingExperts" for decision in selection.decisions if decision.accepted)
    for problem in (inference, inference.restored, dataclasses.replace(inference, quant="unquantized")):
        assert problem.restored is problem
    trained = frozen_problem(quant="unquantized", gradients=FROZEN | {"weights"})
    assert trained.restored is trained
    assert not any("restores" in notice for notice in moereg.select_backend(trained, platform="cpu").notices)


class AskedExperts(TorchTrainingExperts):
    """Keeps the problems that it was made for, refuses quantized ones, and writes to all of its first workspace."""

    seen: list[str]

    def __init__(self, problem: moereg.MoEProblem, platform: Platform) -> None:
        self.seen.append(problem.quant.name)
        super().__init__(problem, platform)

    @classmethod
    def unsupported_reasons(cls, problem: moereg.MoEProblem, platform: Platform) -> list[str]:
        return [] if problem.quant.weight is None else ["requires weights in 16 bits"]

    def workspace_shapes(self, problem: moereg.MoEProblem, num_tokens: int) -> Any:
        assert problem.quant.weight is None
        return (3, num_tokens), super().workspace_shapes(problem, num_tokens)[1]

    def backward_workspace_shapes(self, problem: moereg.MoEProblem, num_tokens: int) -> Any:
        return (num_tokens, 7), super().backward_workspace_shapes(problem, num_tokens)[1]

    @functools.wraps(TorchTrainingExperts.apply)
    def apply(self, *_: Any, **given: Any) -> None:
        self.spoil(given["workspace13"], (3, len(given["out"])))
        super().apply(**given)

    @functools.wraps(TorchTrainingExperts.apply_saving)
    def apply_saving(self, *_: Any, **given: Any) -> None:
        self.spoil(given["workspace13"], (3, len(given["out"])))
        super().apply_saving(**given)

    @functools.wraps(TorchTrainingExperts.apply_backward)
    def apply_backward(self, *_: Any, **given: Any) -> None:
        self.spoil(given["workspace13"], (len(given["grad_out"]), 7))
        super().apply_backward(**given)

    @staticmethod
    def spoil(workspace: torch.Tensor, shape: tuple[int, ...]) -> None:
        assert workspace.shape == shape
        assert workspace.data_ptr() % 256 == 0
        workspace.fill_(float("nan"))


def test_a_class_is_asked_about_the_layer_that_it_sees(isolated_registry: BackendRegistry) -> None:
    AskedExperts.seen = []
    register_moe_backend("asked", 1000, ("unquantized",), ("cpu",))(AskedExperts)
    for dtype in ("bfloat16", "float32"):
        layer = Frozen.drawn(frozen_problem(rank=4, dtype=dtype, hidden_size=33, intermediate_size=7))
        assert layer.kernel.selection.backend == "asked"
        layer.check()
    assert set(AskedExperts.seen) == {"unquantized"}


def test_gpus_train_above_quantized_weights() -> None:
    selection = moereg.explain_backends(frozen_problem("mxfp4_w4a16"), platform="cuda:sm90")
    assert selection.winner is not None
    assert selection.winner.experts == "TritonExperts"


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets kernels only where there is no GPU")
def test_triton_reads_restored_weights() -> None:
    pytest.importorskip("triton")
    layer = Frozen.drawn(frozen_problem("nvfp4", dtype="float32", has_bias=True), num_tokens=9, platform="cuda:sm90")
    assert isinstance(layer.kernel.experts, RestoredExperts)
    assert type(layer.kernel.experts.inner).__name__ == "TritonExperts"
    layer.check()


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match="gradients of weights require unquantized weights, got int4_w4a16_g32"):
        frozen_problem(gradients=FROZEN | {"weights"})
    with pytest.raises(UnsupportedProblemError, match="requires activations as mxfp8 has them, got unquantized"):
        moereg.select_backend(frozen_problem("mxfp8", exact_activations=True), platform="cpu")
    with pytest.raises(UnsupportedProblemError, match="no backend fits"):
        moereg.select_backend(frozen_problem(top_k=1, apply_router_weight_on_input=True), platform="cpu")


def equal_bits(one: moereg.ExpertWeights, other: moereg.ExpertWeights) -> bool:
    pairs = zip(one.tensors().values(), other.tensors().values(), strict=True)
    return all(same_bits(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("quant", ["int4_w4a16_g32_zp", "nvfp4", "fp8_tensor_static"])
def test_weights_are_loaded_and_replaced_as_in_other_kernels(quant: str) -> None:
    layer, other = (Frozen.drawn(frozen_problem(quant), seed=seed) for seed in (0, 1))
    before, copied = copy.deepcopy(layer.weights), copy.deepcopy(layer.kernel)
    layer.kernel.reload(other.weights, write_shared=True)
    dataclasses.replace(layer, weights=other.weights).check()
    layer.kernel.update_expert(3, before.expert(3), write_shared=True)
    mixed = copy.deepcopy(other.weights)
    for name, tensor in mixed.tensors().items():
        tensor[3:4].copy_(before.tensors()[name][3:4])
    dataclasses.replace(layer, weights=mixed).check()
    assert equal_bits(layer.kernel.weights.to_canonical(3), before.expert(3))
    assert equal_bits(layer.weights, mixed)  # Read in place, and written by request.
    dataclasses.replace(layer, weights=before, kernel=copied).check()


def test_a_first_check_compares_with_the_reference() -> None:
    layer = Frozen.drawn(frozen_problem("nvfp4"))
    found = admission._compared(layer.kernel, layer.weights)
    assert not found.failure
    assert 0 < found.error < found.bound
    wrong = Frozen.drawn(layer.problem, seed=1)
    assert "its first check was off by" in admission._compared(layer.kernel, wrong.weights).failure
