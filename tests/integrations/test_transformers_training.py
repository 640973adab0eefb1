"""Live models whose experts moereg trains: losses and gradients of eager, and inference that is never stale."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moereg.integrations._experts import training
from moereg.integrations._experts.serving import detach, served
from moereg.integrations.transformers import prepare, restore
from moereg.layer import MoEKernel
from moereg.registry import register_moe_backend
from tests.integrations.test_transformers_trained import gradients, same, with_attention_adapters
from tests.layer.small_plans import turning
from tests.support.live_models import PROMPT, close, eager, logits_of
from tests.support.tiny_models import tiny_model

FAMILY = "qwen3_moe"


def asking(model: Any) -> Any:
    """The model with moereg's implementation, as `from_pretrained(experts_implementation="moereg")` makes it."""
    model.set_experts_implementation("moereg")
    return model


BACKWARD = "backward hidden_states topk_weights w13 w2"


@pytest.mark.parametrize("first", ["called", "called in train()", "freed"])
def test_models_first_called_in_inference_mode_train(first: str) -> None:
    model, plain = tiny_model(FAMILY), tiny_model(FAMILY)
    plain.set_experts_implementation("eager")
    with torch.inference_mode():
        if first == "freed":
            prepare(model, free=True, progress=False)
            restore(model)
        asking(model).train(first == "called in train()")(PROMPT)
    assert same(gradients(model), gradients(plain))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("family", [FAMILY, "mixtral"])
def test_gradients_are_those_of_eager(
    family: str, mode: str, steps: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = tiny_model(family), tiny_model(family)
    prepare(model, progress=False)
    plain.set_experts_implementation("eager")
    for each in (model, plain):
        each.train(mode == "train")
    with caplog.at_level(logging.WARNING, "moereg"):
        assert same(gradients(model), gradients(plain), 1e-5)
    assert steps == ["forward"] * 2 + [BACKWARD] * 2
    assert not [record for record in caplog.records if record.name == "moereg"]


@pytest.mark.parametrize("is_prepared", [False, True], ids=["registered", "prepared"])
@pytest.mark.parametrize(
    "options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"]
)
def test_inference_between_steps_sees_each_of_them(options: Any, is_prepared: bool, steps: list[str]) -> None:
    model = asking(tiny_model(FAMILY))
    if is_prepared:
        prepare(model, progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **options)
    before = logits_of(model)
    for mode in (True, False):
        gradients(model.train())
        steps.clear()
        optimizer.step()
        found = logits_of(model.train(mode))  # Without gradients, train() too infers.
        assert steps == ["infer", "infer"]
        assert not close(found, before, 1e-3)
        expected = eager(model)
        asking(model)
        assert close(found, expected, 1e-5)
        before = found


@pytest.mark.parametrize("trained", ["gate_up_proj", "down_proj", "gate_up_proj down_proj"])
@pytest.mark.parametrize("is_copied", [False, True], ids=["in place", "copied"])
def test_weights_are_fresh_whoever_wrote_them(is_copied: bool, trained: str, isolated_registry: Any) -> None:
    model = asking(tiny_model(FAMILY))
    if is_copied:
        register_moe_backend("turned", 5, ("unquantized",), ("cpu",))(turning(1.0))
        prepare(model, prefer="turned", progress=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.rpartition(".")[2] in trained.split())
    before = logits_of(model)
    for name, gradient in gradients(model.train()).items():
        model.get_parameter(name).data.sub_(0.1 * gradient.sign())  # No version, and no step of torch's optimizers.
    found = logits_of(model)
    assert not close(found, before, 1e-3)
    assert close(found, eager(model), 1e-5)


def test_frozen_experts_are_not_read_again_for_each_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    model = asking(with_attention_adapters(tiny_model(FAMILY)))
    logits_of(model)
    read: list[MoEKernel] = []
    monkeypatch.setattr(MoEKernel, "reload", lambda self, *_, **__: read.append(self))
    gradients(model.train())
    logits_of(model.eval())
    assert not read


def test_the_trained_parameters_are_the_only_copy() -> None:
    model = asking(tiny_model(FAMILY))
    gradients(model.train())
    for layer in model.model.layers:
        found = served(layer.mlp.experts)
        assert found is not None
        assert not found.kernels
        (trainer,) = found.trainers.values()
        assert all(each.is_meta for each in trainer.training_kernel().weights.flat())


def test_parameters_that_are_replaced_or_converted_train() -> None:
    model, plain = tiny_model(FAMILY), tiny_model(FAMILY)
    plain.set_experts_implementation("eager")
    gradients(asking(model).train())
    for each in (model, plain):
        experts = each.model.layers[0].mlp.experts
        experts.down_proj = torch.nn.Parameter(experts.down_proj.detach() * 2)
    assert same(gradients(model), gradients(plain), 1e-5)
    for each in (model, plain):
        each.to(torch.float64).float()
        each.to(torch.bfloat16)
    for name, gradient in gradients(model).items():
        assert gradient.dtype == torch.bfloat16, name


def test_fp32_weights_under_autocast_are_as_far_from_fp32_as_eager(
    steps: list[str], caplog: pytest.LogCaptureFixture, model: Any
) -> None:
    def error(found: dict[str, torch.Tensor], name: str) -> float:
        return float((found[name] - truth[name]).norm() / truth[name].norm())

    found = {}
    for implementation in ("eager", "moereg"):
        model.set_experts_implementation(implementation)
        with torch.autocast("cpu", torch.bfloat16), caplog.at_level(logging.WARNING, "moereg"):
            found[implementation] = gradients(model.train())
    assert steps.count(BACKWARD) == 2
    assert not [record for record in caplog.records if record.name == "moereg"]
    truth = gradients(model)
    for name in truth:
        assert found["moereg"][name].dtype == torch.float32
        assert 2**-12 < error(found["moereg"], name) <= 2 * error(found["eager"], name), name


def as_one_rank_of_two(experts: Any) -> None:
    detach(experts)  # A plan is made once for the same parameters.
    experts._is_expert_parallel = True


def in_double_precision(experts: Any) -> None:
    experts.double()


def not_contiguous(experts: Any) -> None:
    experts.down_proj = torch.nn.Parameter(experts.down_proj.detach().mT.contiguous().mT)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (as_one_rank_of_two, "other ranks have some of its experts"),
        (in_double_precision, "must be bfloat16, float16, float32, got float64"),
        (not_contiguous, "weights that are read in place must be contiguous"),
    ],
)
def test_what_is_not_trained_has_a_reason(change: Callable[[Any], None], reason: str, model: Any) -> None:
    experts = model.model.layers[0].mlp.experts
    assert isinstance(training.trainer_of(experts, 2), training.Trainer)
    change(experts)
    found = training.trainer_of(experts, 2)
    assert isinstance(found, str)
    assert reason in found
