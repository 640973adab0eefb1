"""Live models that moereg does not train: on transformers' own code, and back on moereg with fresh weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch.nn.utils import parametrize
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from moereg.errors import ArgumentError
from moereg.integrations.transformers import prepare, restore
from moereg.layer import MoEKernel
from tests.support.live_models import PROMPT, close, eager, logits_of
from tests.support.no_backward import refuses_backward
from tests.support.tiny_models import WITHOUT_INTERFACE, needs, tiny_model


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[MoEKernel]:
    """Kernels in the order of their calls."""
    calls: list[MoEKernel] = []
    right = MoEKernel.__call__
    monkeypatch.setattr(MoEKernel, "__call__", lambda self, *args: calls.append(self) or right(self, *args))
    return calls


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of a language model's loss, by parameter."""
    model.zero_grad()
    model(PROMPT, labels=PROMPT).loss.backward()
    return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


# Two computations in fp32 differ by what each of them rounds. A sum of n products is off by sqrt(n) * 2^-24 of its size
# (moereg.numerics.tolerances), and independent errors add in squares. On the way to a gradient of a tiny model lie at
# most 38 sums of up to 64 products, as many as it has words: in each of two layers queries, scores, values, output, two
# for either matrix of adapted experts and one over routes, then the head, and all of them backward. So it is 4.2e-6;
# torch without vector instructions is 2.2e-6 away from fp64, in transformers' code and in ours.
BOUND: Final = math.sqrt(2 * 38 * 64) * 2.0**-24


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float = BOUND) -> bool:
    return found.keys() == expected.keys() and all(close(found[name], expected[name], bound) for name in expected)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt_oss", "its matrices are transposed, and moereg reads [E,2I,H] and [E,H,I] in place"),
        ("llama4", "it does not use transformers' experts interface"),
        ("dbrx", "it does not use transformers' experts interface"),
    ],
    ids=["gpt_oss", "llama4", "dbrx"],
)
def test_gradients_are_those_of_transformers(
    family: str, reason: str, mode: str, kernel_calls: list[MoEKernel], caplog: pytest.LogCaptureFixture
) -> None:
    needs(family)
    model, plain = tiny_model(family), tiny_model(family)
    way = "code" if family in WITHOUT_INTERFACE else "grouped_mm"
    if way == "grouped_mm":
        plain.set_experts_implementation("grouped_mm")
    prepare(model, progress=False)
    for each in (model, plain):
        each.train(mode == "train")
    with caplog.at_level(logging.WARNING, "moereg"):
        found = gradients(model)
        assert same(found, gradients(plain), 1e-6)
        assert any("experts" in name for name in found)
        gradients(model)
    assert not kernel_calls
    (said,) = [record.message for record in caplog.records if record.name == "moereg"]
    assert said.startswith("moereg does not train ")
    assert f" ({reason}), which runs transformers' own {way} in train() and where inputs or weights require" in said
    logits_of(model.eval())
    assert len(kernel_calls) == 2


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_transforms_of_a_functional_call_are_those_of_transformers(
    transform: str, kernel_calls: list[MoEKernel], caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = tiny_model("mixtral"), tiny_model("mixtral")
    plain.set_experts_implementation("eager")
    prepare(model, progress=False)
    found = []
    for each in (model, plain):
        each.set_attn_implementation("eager")  # No other one has a forward mode.
        parameters = {name: parameter.detach() for name, parameter in each.named_parameters()}

        def loss(given: dict[str, torch.Tensor], each: Any = each) -> torch.Tensor:
            out: torch.Tensor = torch.func.functional_call(each, given, (PROMPT,)).logits
            return out.square().mean()

        is_grad = transform == "grad"
        found.append(
            torch.func.grad(loss)(parameters)
            if is_grad
            else {"": torch.func.jvp(loss, (parameters,), (parameters,))[1]}
        )
    assert same(*found)
    assert not kernel_calls
    way = "grouped_mm does" if transform == "grad" else "eager does; grouped_mm raised NotImplementedError"
    assert f"torch.func's transforms and forward-mode AD, where transformers' own {way}" in caplog.text
    experts = model.model.layers[0].mlp.experts
    with pytest.raises(ArgumentError, match="got a call inside of vmap"):
        torch.vmap(experts, (0, None, None))(torch.randn(2, 3, 32), torch.tensor([[0, 1]] * 3), torch.rand(3, 2))


@pytest.mark.parametrize("family", ["gpt_oss", "dbrx"])
def test_weights_are_fresh_after_training_whoever_wrote_them(family: str, kernel_calls: list[MoEKernel]) -> None:
    model = tiny_model(family)
    prepare(model, progress=False)
    before = logits_of(model)
    for name, gradient in gradients(model.train()).items():
        model.get_parameter(name).data.sub_(0.1 * gradient.sign())  # No version, and no step of torch's optimizers.
    found = logits_of(model.eval())
    assert kernel_calls[:2] == kernel_calls[2:]  # Written in place: captured graphs see it.
    restore(model)
    assert close(found, eager(model))
    assert not close(found, before, 1e-3)


@pytest.mark.parametrize("is_training", [False, True])
def test_a_layer_that_trains_on_its_own_code_runs_it_in_train_without_gradients_too(
    is_training: bool, kernel_calls: list[MoEKernel]
) -> None:
    """Reentrant checkpointing calls it without gradients first, and with gradients when it computes again."""
    model = tiny_model("gpt_oss")
    prepare(model, progress=False)
    logits_of(model.train(is_training))
    assert len(kernel_calls) == (0 if is_training else 2)


class LoRA(torch.nn.Module):
    """An adapter of a linear layer."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, 2, bias=False)
        self.up = torch.nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.up(self.down(x))
        return out


def with_attention_adapters(model: Any) -> Any:
    model.requires_grad_(False)
    torch.manual_seed(7)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj)
    return model


def test_adapters_of_attention_train_through_frozen_experts(kernel_calls: list[MoEKernel]) -> None:
    model, plain = (with_attention_adapters(tiny_model("gpt_oss")) for _ in range(2))
    plain.set_experts_implementation("grouped_mm")
    prepare(model, progress=False)
    for each in (model, plain):
        each.train()
        each.enable_input_require_grads()
        if each is model:  # Recomputing ends by an exception, which must reach whoever waits for it.
            each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        optimizer = torch.optim.AdamW([one for one in each.parameters() if one.requires_grad], lr=0.1)
        for _ in range(2):
            assert len(gradients(each)) == 4
            optimizer.step()
    assert not kernel_calls
    assert close(logits_of(model.eval()), logits_of(plain.eval()))
    assert len(kernel_calls) == 2


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_freed_experts_infer_and_say_how_to_train(mode: str, model: Any) -> None:
    with_attention_adapters(model)
    expected = logits_of(model)
    prepare(model, free=True, progress=False)
    out = model.train(mode == "train")(PROMPT).logits
    assert close(out.detach(), expected)
    refuses_backward(out)
    restore(model)
    assert len(gradients(model)) == 4


def cut_off(*arguments: Any) -> torch.Tensor:
    return grouped_mm_experts_forward(*arguments).detach()


def raising(error: Exception) -> Callable[..., torch.Tensor]:
    def raises(*_: Any) -> torch.Tensor:
        raise error

    return raises


@pytest.mark.parametrize(
    ("way", "said"),
    [
        (raising(NotImplementedError("no such strides")), "grouped_mm raised NotImplementedError: no such strides"),
        (cut_off, "grouped_mm has no backward"),
    ],
    ids=["raises", "cut off"],
)
def test_eager_trains_where_grouped_mm_does_not(
    way: Callable[..., torch.Tensor], said: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    model = tiny_model("gpt_oss")
    expected = gradients(model)
    prepare(model, progress=False)
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", way)
    with caplog.at_level(logging.WARNING, "moereg"):
        assert same(gradients(model.train()), expected)
    assert "own eager in train() and where inputs or weights require a gradient; " in caplog.text
    assert f"; {said}" in caplog.text
    # Where that has no backward either, the forward works all the same.
    monkeypatch.setattr(type(model.model.layers[0].mlp.experts).forward, "__wrapped__", way)
    out = model.eval()(PROMPT).logits
    assert close(out.detach(), logits_of(model))
    refuses_backward(out)


def test_a_lack_of_memory_is_no_reason_for_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt_oss")
    prepare(model, progress=False)
    error = torch.OutOfMemoryError("no memory is left")
    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", raising(error))
    with pytest.raises(torch.OutOfMemoryError):
        model(PROMPT)


class Plus(torch.nn.Module):
    """A parametrization that adds what is trained."""

    def __init__(self, delta: torch.Tensor) -> None:
        super().__init__()
        self.factors = (delta,)  # Computed of an adapter's parameters, and none itself.

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.factors[0]


def test_adapters_of_experts_get_their_gradients(model: Any) -> None:
    model.requires_grad_(False)
    delta = torch.zeros((), requires_grad=True)
    parametrize.register_parametrization(model.model.layers[0].mlp.experts, "down_proj", Plus(delta))
    found = []
    for implementation in ("grouped_mm", "moereg"):
        model.set_experts_implementation(implementation)
        found += torch.autograd.grad(model(PROMPT, labels=PROMPT).loss, delta)  # In eval mode, of frozen inputs.
    assert found[0]
    assert close(found[1], found[0])


def test_nothing_advises_inference_that_is_refused(model: Any, caplog: Any) -> None:
    adapted = model.double().model.layers[0].mlp.experts  # Another layer has no adapter.
    parametrize.register_parametrization(adapted, "down_proj", Plus(torch.zeros((), dtype=torch.float64)))
    model.set_experts_implementation("moereg")
    gradients(model.train())
    assert caplog.text.count("own eager in train()") == 2
    assert "runs moereg" not in caplog.text
    with pytest.raises(ArgumentError, match="does not serve"):
        logits_of(model.eval())
