"""Torch's ambient state changes no number: for any setting of the caller, the bits are those without it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from moereg.checkpoints import load_experts
from moereg.dispatch import select_backend
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.numerics.reference import calibrate_activation_scales, reference_experts
from moereg.prepare_finalize import local_prepare_finalize
from moereg.quantize import dequantize_activations, dequantize_weights, quantize_activations, quantize_weights
from moereg.runtime import torch_state as ambient
from moereg.runtime.torch_state import AmbientState, fp32_is_exact, in_plain_torch, plain_torch
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES
from moereg.testing.inputs import make_inputs, make_plain_weights, make_weights
from moereg.weights.permuted import ExpertWeights
from tests.layer.small_layers import CPU, copied
from tests.layer.test_routing import ROUTERS, route
from tests.support.quantized_checkpoints import CHECKPOINTS

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]


@contextlib.contextmanager
def restored(get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    with restored(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True):
        yield


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return restored(torch.get_default_dtype, torch.set_default_dtype, dtype)


def matmul_precision(name: str) -> AbstractContextManager[None]:
    return restored(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, name)


def test_warnings_about_nondeterminism_are_restored() -> None:
    with deterministic():
        torch.use_deterministic_algorithms(True, warn_only=True)
        state = AmbientState.now()
        torch.use_deterministic_algorithms(False)
        assert state.restore() == ("deterministic False", "deterministic warn only False")
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True)
        assert state.restore() == ("deterministic warn only False",)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default device meta": lambda: torch.device("meta"),
    "default device cpu": lambda: torch.device("cpu"),
    "autocast bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast float16": lambda: torch.autocast("cpu", torch.float16),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
    "deterministic algorithms": deterministic,
    "medium precision": lambda: matmul_precision("medium"),
    "high precision": lambda: matmul_precision("high"),
    "oneDNN in bfloat16": lambda: torch.backends.mkldnn.flags(enabled=True, fp32_precision="bf16"),
}


class Layer:
    """A layer, and what moereg computes of it, step by step."""

    def __init__(self, scheme: str, **changes: Any) -> None:
        facts = {"num_experts": 3, "hidden_size": 72, "intermediate_size": 40, "top_k": 2, "has_bias": True}
        self.problem = MoEProblem(**{**facts, "quant": scheme, "exact_activations": True, **changes})
        self.plain, self.weights = make_plain_weights(self.problem, CPU), make_weights(self.problem, CPU)
        self.selection = select_backend(self.problem, "cpu")
        self.kernel, self.others = self.make(self.weights), make_weights(self.problem, CPU, seed=1)
        inputs = [make_inputs(self.problem, num_tokens, "uniform", CPU) for num_tokens in (1, 9)]
        self.calls = [value.call for value in inputs]

    def make(self, weights: ExpertWeights) -> MoEKernel:
        return make_kernel(self.problem, weights, self.selection)

    def steps(self) -> dict[str, Callable[[], list[torch.Tensor]]]:
        return {
            "run": lambda: [self.kernel(*call) for call in self.calls],
            "permute": self.permuted,
            "quantize": self.quantized,
            "reference": lambda: [reference_experts(self.problem, self.weights, *call) for call in self.calls],
        }

    def permuted(self) -> list[torch.Tensor]:
        """The results of the calls on a layer that is built and then reloaded."""
        kernel = self.make(copied(self.weights))
        made = [kernel(*call) for call in self.calls]
        kernel.reload(copied(self.others), write_shared=True)
        return [*made, *(kernel(*call) for call in self.calls)]

    def quantized(self) -> list[torch.Tensor]:
        scheme, (x, *routing) = self.problem.quant, self.calls[-1]
        if scheme.weight is None:
            return []
        scales: dict[str, torch.Tensor] = {}
        activation = scheme.activation
        if activation is not None and (activation.static or activation.global_scale):
            unquantized = dataclasses.replace(self.problem, quant=QUANT_SCHEMES["unquantized"])
            a13, a2 = calibrate_activation_scales(unquantized, self.plain, x, *routing, scheme=scheme)
            scales = {"a13_scale": a13, "a2_scale": a2}
        weights = quantize_weights(self.plain, scheme, **scales)
        found = [*weights.tensors().values(), *dequantize_weights(weights, torch.float32)]
        if activation is not None:
            rows = quantize_activations(x, scheme, scales["a13_scale"][0] if activation.static else None)
            found += [rows.q, rows.scale, dequantize_activations(rows, scheme, x.shape[-1])]
        return found


def bits(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    kinds = [[(tensor.dtype, tensor.device, tensor.shape) for tensor in tensors] for tensors in (found, wanted)]
    return kinds[0] == kinds[1] and all(map(torch.equal, bits(found), bits(wanted)))


QUICK = {"unquantized", "fp8_tensor_dynamic", "nvfp4", "int8_w8a8", "int4_w4a16_g32_zp"}
OPTIONS: list[dict[str, Any]] = [{"dtype": "float32"}, {"activation_format": "batched"}, {"activation": "swigluoai"}]
LAYERS = [
    pytest.param(scheme, changes, marks=pytest.mark.slow if is_slow else ())
    for number, scheme in enumerate(QUANT_SCHEMES)
    for changes, is_slow in (
        (OPTIONS[number % 3], scheme not in QUICK),
        ({"dtype": "float16", "activation": "relu2"}, True),
    )
]


@pytest.mark.parametrize(("scheme", "changes"), LAYERS)
def test_layers(scheme: str, changes: dict[str, Any]) -> None:
    layer = Layer(scheme, **changes)
    wanted = {name: step() for name, step in layer.steps().items()}
    for state, enter in STATES.items():
        for name, step in layer.steps().items():
            with enter():
                found = step()
            assert same(found, wanted[name]), (state, name)


@pytest.mark.parametrize("name", ROUTERS)
def test_routing(name: str) -> None:
    logits = torch.randn(9, 8, generator=torch.Generator().manual_seed(0))
    for given in (logits, logits.bfloat16()):
        wanted = list(route(name, given))
        for state, enter in STATES.items():
            with enter():
                found = list(route(name, given))
            assert same(found, wanted), state


@pytest.mark.parametrize("name", ["awq", "gptq_asymmetric", "mxfp4", "ct_nvfp4"])
def test_checkpoints(name: str) -> None:
    def load() -> list[torch.Tensor]:
        layer = load_experts(CHECKPOINTS / name, 0, max_memory_fraction=1.0)
        with plain_torch():
            x = torch.linspace(-1, 1, 3 * layer.problem.hidden_size, dtype=torch.float32, device="cpu")
        x = x.view(3, -1).to(layer.problem.torch_dtype)
        return [*layer.weights.tensors().values(), *layer.route(x)]

    wanted = load()
    for state, enter in STATES.items():
        with enter():
            found = load()
        assert same(found, wanted), state


def test_compiled_callers_may_autocast() -> None:
    layer = Layer("unquantized", dtype="float32")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def model(*call: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer.kernel(*call)

    assert torch.equal(model(*layer.calls[1]), layer.kernel(*layer.calls[1]))


def test_the_state_comes_back() -> None:
    @in_plain_torch
    def fails() -> None:
        assert not torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        raise KeyError

    with matmul_precision("medium"), torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            with pytest.raises(KeyError):
                fails()
            assert torch.is_grad_enabled()
            assert torch.is_autocast_enabled("cpu")
            assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
            assert torch.get_float32_matmul_precision() == "medium"


def test_the_last_thread_restores_the_precision() -> None:
    """A setting of the process: one thread that leaves must not take it from another that still computes."""
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with plain_torch():
            inside.set()
            leave.wait(timeout=30)

    with matmul_precision("medium"):
        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(timeout=30)
        with plain_torch():
            # The other thread made it exact, and may leave at any time, so this one still has to act.
            assert not fp32_is_exact()
            leave.set()
            thread.join()
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    assert fp32_is_exact()


def test_a_thread_that_leaves_meanwhile_leaves_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact for as long as another thread is inside is not exact: users and setting are read at one moment."""
    asking, entered, leave = threading.Event(), threading.Event(), threading.Event()
    matmuls, asks = ambient._matmuls(), threading.current_thread()

    def read() -> Any:
        if threading.current_thread() is asks and not asking.is_set():
            asking.set()
            # In vain where the two are read at one moment.
            entered.wait(timeout=0.2)
        return matmuls

    def other() -> None:
        asking.wait(timeout=30)
        with ambient._EXACT:
            entered.set()
            leave.wait(timeout=30)

    monkeypatch.setattr(ambient, "_matmuls", read)
    with matmul_precision("medium"):
        thread = threading.Thread(target=other)
        thread.start()
        is_exact = fp32_is_exact()
        leave.set()
        thread.join()
        assert not is_exact


@pytest.fixture
def untouched_precision() -> Iterator[None]:
    """Settings as a new process has them, now and afterwards."""
    matmuls = (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul)

    def clear() -> None:
        torch.set_float32_matmul_precision("highest")
        for setting in (torch.backends, *matmuls):
            setting.fp32_precision = "none"

    clear()
    yield
    clear()


def precisions() -> tuple[str, str]:
    return torch.backends.mkldnn.matmul.fp32_precision, torch.backends.cuda.matmul.fp32_precision


@pytest.mark.usefixtures("untouched_precision")
def test_an_inherited_precision_stays_inherited() -> None:
    torch.backends.fp32_precision = "tf32"
    with plain_torch():
        assert precisions() == ("ieee", "ieee")
    assert precisions() == ("tf32", "tf32")
    torch.backends.fp32_precision = "none"
    assert precisions() == ("none", "none")
    torch.backends.fp32_precision = "tf32"
    # Set for one operator: others still inherit, and an exact one is not changed.
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    with plain_torch():
        assert precisions() == ("ieee", "ieee")
    assert precisions() == ("bf16", "ieee")
    torch.backends.fp32_precision = "none"
    assert precisions() == ("bf16", "ieee")


@pytest.mark.usefixtures("untouched_precision")
@pytest.mark.parametrize("name", ["high", "medium"])
def test_the_older_settings_can_be_read_inside(name: str) -> None:
    torch.set_float32_matmul_precision(name)
    before = precisions()
    with plain_torch():
        assert not torch.backends.cuda.matmul.allow_tf32
        assert torch.get_float32_matmul_precision() == "highest"
        assert precisions() == ("ieee", "ieee")
    assert torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == name
    assert precisions() == before
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    with plain_torch():
        assert precisions() == ("ieee", "ieee")
    assert precisions() == ("ieee", "tf32")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_layers_elsewhere_than_on_a_cpu_are_run_exactly(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers may allow TF32 for a GPU's fp32 matmuls; float16 layers multiply in fp32 as well."""
    layer = Layer("unquantized", dtype=dtype)
    kernel = layer.kernel
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in layer.weights.tensors().items()}
    weights = dataclasses.replace(kernel.weights, per_expert=shapes)
    elsewhere = MoEKernel(
        layer.problem, layer.selection, kernel.ranged.ranges, weights, local_prepare_finalize("standard"), None
    )
    found = []
    monkeypatch.setattr(elsewhere, "_run_plainly", lambda *_: found.append(precisions()))
    x = layer.calls[1][0]
    with matmul_precision("high"):
        elsewhere._run(*layer.calls[1], torch.empty_like(x))
    assert found == [("ieee", "ieee")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("activation_format", ["standard", "batched"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_cell_of_a_gpu_at_high_precision(dtype: str, activation_format: str) -> None:
    problem = MoEProblem(
        num_experts=4, hidden_size=256, intermediate_size=128, top_k=2, dtype=dtype, activation_format=activation_format
    )
    device = torch.device("cuda")
    weights, inputs = make_weights(problem, device), make_inputs(problem, 33, "uniform", device)
    selection = select_backend(problem)
    decisions = [decision for decision in selection.decisions if decision.accepted]
    assert decisions
    for decision in decisions:
        kernel = make_kernel(problem, weights, dataclasses.replace(selection, decisions=(decision,)))
        wanted = kernel(*inputs.call)
        for name in ("high", "medium"):
            with matmul_precision(name):
                found = kernel(*inputs.call)
            assert same([found], [wanted]), (decision, name)
