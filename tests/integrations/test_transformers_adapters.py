"""Low-rank adapters of experts, by PEFT and by a likeness: trained and inferred by factors, never their product."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize

from moereg.errors import ArgumentError
from moereg.integrations._experts import adapters as adapters_module
from moereg.integrations._experts import own
from moereg.integrations._experts.adapters import adapters_of, rank_of
from moereg.integrations._experts.serving import served
from moereg.integrations.transformers import prepare, refresh, register
from moereg.weights.adapters import ExpertAdapters
from tests.integrations.test_transformers_trained import gradients, same, with_attention_adapters
from tests.support.live_models import PROMPT, close, logits_of
from tests.support.tiny_models import needs, tiny_model

BOTH = ("gate_up_proj", "down_proj")
OF_FACTORS = "w13_a w13_b w2_a w2_b"


class Proxy(torch.nn.Module):
    """Has the attributes of PEFT's."""

    def __init__(self, lhs: torch.Tensor, rhs: torch.Tensor, scaling: float) -> None:
        super().__init__()
        self.lhs, self.rhs, self.scaling = lhs, rhs, scaling

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(weight, self.lhs, self.rhs, alpha=self.scaling)


class _LoraFactorsProxy(Proxy):
    """Has the name of PEFT's, too."""


class _LoraParameterProxy(Proxy):
    """Likewise, of a product."""


class Another(Proxy):
    """Has a name that nobody knows."""


class Likeness(torch.nn.Module):
    """Wraps experts as PEFT does, with its layout: experts outermost in `a`, and innermost in `b`."""

    scaling = 4.0
    kind = _LoraFactorsProxy

    def __init__(self, experts: torch.nn.Module, rank: int) -> None:
        super().__init__()
        self.base_layer = experts
        self.lora_a, self.lora_b = torch.nn.ParameterDict(), torch.nn.ParameterDict()
        for name in BOTH:
            num_experts, num_out, num_in = getattr(experts, name).shape
            self.lora_a[name] = torch.nn.Parameter(torch.empty(num_experts * rank, num_in).normal_(std=0.2))
            self.lora_b[name] = torch.nn.Parameter(torch.empty(num_out, rank * num_experts).normal_(std=0.2))

    def factors(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        weight = getattr(self.base_layer, name)
        left = self.lora_b[name].view(weight.shape[1], -1, len(weight)).permute(2, 0, 1)
        return left.to(weight.dtype), self.lora_a[name].view(len(weight), -1, weight.shape[2]).to(weight.dtype)

    @torch.no_grad()
    def merge(self) -> None:
        for name in BOTH:
            left, right = self.factors(name)
            getattr(self.base_layer, name).data += self.scaling * left @ right

    def forward(self, *arguments: Any) -> Any:
        experts: Any = self.base_layer
        for name in BOTH:
            weight = getattr(experts, name)
            parametrize.register_parametrization(experts, name, self.kind(*self.factors(name), self.scaling))
            experts.parametrizations[name].original.requires_grad_(weight.requires_grad)
        try:
            with parametrize.cached():
                return experts(*arguments)
        finally:
            for name in BOTH:
                parametrize.remove_parametrizations(experts, name, leave_parametrized=False)


def like_peft(model: Any, rank: int = 2) -> Any:
    model.requires_grad_(False)
    torch.manual_seed(7)
    for layer in model.model.layers:
        layer.mlp.experts = Likeness(layer.mlp.experts, rank)
    return model


def needs_peft() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed; make test-finetune installs it")
    register()  # Once PEFT is imported, several active adapters have factors too.
    return peft


def by_peft(model: Any, name: str | None = None, **options: Any) -> Any:
    peft = needs_peft()
    config = peft.LoraConfig(**{"r": 2, "target_modules": [], "target_parameters": list(BOTH), **options})
    if name is None:
        found = peft.get_peft_model(model, config)
    else:
        found = model
        found.add_adapter(name, config)
    torch.manual_seed(7)
    with torch.no_grad():
        for each, parameter in found.named_parameters():
            if "lora" in each and parameter.requires_grad:
                parameter.normal_(std=0.2)
    return found


HOWS = [pytest.param(like_peft, id="likeness"), pytest.param(by_peft, id="peft", marks=pytest.mark.finetune)]


def pair(how: Callable[..., Any], family: str = "mixtral", implementation: str = "grouped_mm", **options: Any) -> Any:
    """Two equal models with adapters: on moereg, and on transformers' own implementation."""
    found = []
    for each in ("moereg", implementation):
        model = how(tiny_model(family), **options)
        model.set_experts_implementation(each)
        found.append(model)
    return found


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("how", HOWS)
def test_gradients_are_those_of_transformers(
    how: Any, family: str, implementation: str, mode: str, steps: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    model, plain = (each.train(mode == "train") for each in pair(how, family, implementation))
    with caplog.at_level(logging.WARNING, "moereg"):
        found = gradients(model)
    assert len(found) == 8
    assert same(found, gradients(plain))
    # A frozen base costs no gradient, and below the first layer nothing trains.
    of_second = f"backward hidden_states topk_weights {OF_FACTORS}"
    assert [each for each in steps if each != "infer"] == ["forward"] * 2 + [of_second, f"backward {OF_FACTORS}"]
    assert not [record for record in caplog.records if record.name == "moereg"]


@pytest.mark.parametrize("how", HOWS)
def test_no_call_multiplies_the_factors(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = pair(how)
    computed: list[Any] = []
    registered: list[str] = []
    compute, register = parametrize.ParametrizationList.forward, parametrize.register_parametrization
    monkeypatch.setattr(parametrize.ParametrizationList, "forward", lambda self: computed.append(self) or compute(self))
    monkeypatch.setattr(
        parametrize, "register_parametrization", lambda *args: registered.append(args[1]) or register(*args)
    )
    logits_of(model)
    if how is by_peft:  # PEFT is known from now on.
        monkeypatch.setattr(torch, "baddbmm", None)
        monkeypatch.setattr("peft.tuners.lora.layer.ParamWrapper.get_delta_weight", None)
    gradients(model.train())
    logits_of(model)
    logits_of(model.eval())
    # Registering computes once, to compare dtypes and shapes.
    assert len(computed) == len(registered) == 4 * 2 * len(BOTH)


@pytest.mark.parametrize("how", HOWS)
def test_steps_are_seen_by_the_next_call(how: Any, steps: list[str]) -> None:
    model, plain = pair(how)
    before = logits_of(model)
    assert close(before, logits_of(plain))
    for each in (model, plain):
        # Adam divides by gradients' own size, and what is near zero for one is not for the other.
        optimizer = torch.optim.AdamW([one for one in each.parameters() if one.requires_grad], lr=0.05, eps=1e-4)
        gradients(each.train())
        optimizer.step()
    steps.clear()
    found = logits_of(model)
    assert steps == ["forward"] * 2  # Without gradients, train() infers by the factors too.
    assert not close(found, before, 1e-3)
    assert close(found, logits_of(plain), 1e-5)
    assert close(found, logits_of(model.eval()), 1e-6)


@pytest.mark.parametrize("how", HOWS)
def test_checkpointed_layers_have_the_same_gradients(how: Any, steps: list[str]) -> None:
    model, plain = pair(how)
    for each in (model, plain):
        each.train()
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        each.enable_input_require_grads()
    assert same(gradients(model), gradients(plain))
    assert steps.count("forward") == 4


def test_the_first_call_of_all_may_be_checkpointed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes weights for torch's check, and so has its recomputation; later layers compute none."""
    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(__version__="0.21.2"))
    computed: list[torch.Tensor] = []

    class Unknown(Proxy):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            computed.append(weight)
            return super().forward(weight)

    Unknown.__name__ = "_LoraFactorsProxy"
    monkeypatch.setattr(Likeness, "kind", Unknown)
    model, plain = pair(like_peft)
    for each in (model, plain):
        each.train()
        each.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        each.enable_input_require_grads()
    found = gradients(model)
    first, _ = (layer.mlp.experts.base_layer for layer in model.model.layers)
    assert len(computed) == 2 * len(BOTH)
    assert {id(each) for each in computed} == {id(getattr(first, name)) for name in BOTH}
    assert same(found, gradients(plain))


def test_products_that_are_written_into_the_weights_are_seen(steps: list[str]) -> None:
    model, _ = pair(like_peft, "qwen3_moe")  # Its kernels have copies of the weights.
    layers = [layer.mlp for layer in model.model.layers]
    adapted = [layer.experts for layer in layers]
    for layer in layers:
        layer.experts = layer.experts.base_layer
    without = logits_of(model)  # From here on kernels have the weights.
    for layer, experts in zip(layers, adapted, strict=True):
        layer.experts = experts
    expected = logits_of(model)
    for layer in layers:
        layer.experts.merge()
        layer.experts = layer.experts.base_layer
    steps.clear()
    assert close(logits_of(model), expected, 1e-5)  # Parametrizing a weight counts as a write.
    assert steps == ["infer"] * 2
    assert not close(expected, without, 1e-3)


def test_ranks_share_plans() -> None:
    model = like_peft(tiny_model("mixtral"), rank=3)
    model.set_experts_implementation("moereg")
    logits_of(model)
    experts = model.model.layers[0].mlp.experts.base_layer
    for rank in (5, 12):
        model.model.layers[0].mlp.experts = Likeness(experts, rank)
        logits_of(model)
    model.model.layers[0].mlp.experts = experts
    gradients(with_attention_adapters(model))
    found = served(experts)
    assert found is not None
    assert [each.problem.adapter_rank for each in found.trainers.values()] == [8, 16, 0]
    ranks = {1: 8, 8: 8, 9: 16, 16: 16, 33: 64, 128: 128, 129: 256}
    for rank, planned in ranks.items():
        small, large = torch.empty(4, 1, 32), torch.empty(4, rank, 32)
        factors = {"w13_a": small, "w13_b": small.mT, "w2_a": large, "w2_b": large.mT}
        assert rank_of(ExpertAdapters(**factors)) == planned
    assert rank_of(None) == 0


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            _LoraParameterProxy,
            "PEFT adds a product to gate_up_proj: more than one adapter is active, or PEFT is older than 0.21",
        ),
        (Another, "Another computes gate_up_proj, which is not one adapter of PEFT's LoRA"),
    ],
    ids=["a product", "another"],
)
def test_other_adapters_run_on_transformers_and_say_so_once(
    kind: Any, reason: str, steps: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Likeness, "kind", kind)
    model, plain = pair(like_peft)
    with caplog.at_level(logging.WARNING, "moereg"):
        found = gradients(model.train())
        assert close(logits_of(model.eval()), logits_of(plain))
    assert same(found, gradients(plain.train()))
    assert "forward" not in steps
    trained, inferred = [record.message for record in caplog.records if record.name == "moereg"]
    assert trained.startswith(f"moereg does not train MixtralExperts ({reason}), which runs transformers' own grouped_")
    assert inferred.startswith(
        f"moereg copies no weights unasked, and MixtralExperts ({reason}) runs transformers' own"
    )


KINDS = {"factors": _LoraFactorsProxy, "product": _LoraParameterProxy, "another": Another}


@pytest.mark.parametrize("kinds", [names for count in (1, 2, 3) for names in itertools.product(KINDS, repeat=count)])
def test_only_one_adapter_alone_is_read_as_factors(kinds: tuple[str, ...]) -> None:
    module = torch.nn.Module()
    module.down_proj = torch.nn.Parameter(torch.randn(2, 3, 5))
    left, right = torch.randn(2, 3, 1), torch.randn(2, 1, 5)
    for kind in kinds:
        parametrize.register_parametrization(module, "down_proj", KINDS[kind](left, right, 2.0))
    found = adapters_of(module)
    if kinds == ("factors",):
        assert isinstance(found, ExpertAdapters)
        assert (found.w2_a is right, found.w2_b is left, found.w2_scaling) == (True, True, 2.0)
    else:
        assert isinstance(found, str)


@pytest.mark.parametrize("trained", ["", "weight", "left", "right", "left right"])
def test_autograd_follows_a_call_by_either_factor(trained: str) -> None:
    module = torch.nn.Module()
    module.down_proj = torch.nn.Parameter(torch.randn(2, 3, 5), requires_grad=trained == "weight")
    factors = {"left": torch.randn(2, 3, 1), "right": torch.randn(2, 1, 5)}
    for name, factor in factors.items():
        factor.requires_grad_(name in trained.split())
    parametrize.register_parametrization(module, "down_proj", _LoraFactorsProxy(*factors.values(), 2.0))
    module.parametrizations["down_proj"].original.requires_grad_(trained == "weight")  # type: ignore[index, union-attr]
    for parent in (module, torch.nn.Sequential(torch.nn.Identity(), module)):
        assert own.follows(parent, ()) is bool(trained)
        with torch.no_grad():
            assert not own.follows(parent, ())


@pytest.mark.parametrize(("version", "is_skipped"), [("0.21.2", True), ("0.20.0", False), ("0.99.0", False)])
def test_torchs_check_of_a_parametrization_compares_a_tensor_on_meta(
    version: str, is_skipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Doubled(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(__version__=version))
    module, earlier = torch.nn.Linear(2, 2), Doubled()
    doubled = (2 * module.weight).detach()
    adapters_module.skip_check(Doubled)
    adapters_module.skip_check(Doubled)
    assert torch.equal(earlier(module.weight), doubled)
    later = Doubled()
    assert later(module.weight).is_meta is is_skipped
    assert torch.equal(later(module.weight), doubled)
    parametrize.register_parametrization(module, "weight", Doubled())
    assert torch.equal(module.weight, doubled)


@pytest.mark.finetune
class TestPeft:
    """What the likeness does not have."""

    @pytest.mark.parametrize(
        ("options", "ranks", "kinds"),
        [
            ({"target_parameters": ["gate_up_proj"]}, {2}, "w13_a w13_b"),
            ({"target_parameters": ["down_proj"]}, {2}, "w2_a w2_b"),
            ({"r": 3, "rank_pattern": {"down_proj": 12}, "alpha_pattern": {"down_proj": 5}}, {3, 12}, OF_FACTORS),
            ({"r": 8, "use_rslora": True, "lora_alpha": 3}, {8}, OF_FACTORS),
        ],
        ids=["gate_up_proj", "down_proj", "ranks", "rslora"],
    )
    def test_targets_and_scalings(self, options: Any, ranks: set[int], kinds: str, steps: list[str]) -> None:
        model, plain = pair(by_peft, "qwen3_moe", **options)
        found = gradients(model.train())
        assert {len(each) // 4 for name, each in found.items() if "lora_A" in name} == ranks
        assert len(found) == 2 * len(kinds.split())
        assert same(found, gradients(plain.train()))
        assert steps[-1] == f"backward {kinds}"
        unmerged = logits_of(model.eval())
        assert close(unmerged, logits_of(plain.eval()))
        assert close(logits_of(model.merge_and_unload()), unmerged, 1e-5)
        assert steps[-2:] == ["infer"] * 2

    @pytest.mark.parametrize("is_prepared_first", [True, False])
    def test_models_are_prepared_before_and_after(self, is_prepared_first: bool, steps: list[str]) -> None:
        model, plain = tiny_model("mixtral"), tiny_model("mixtral")
        base = logits_of(model)
        if is_prepared_first:
            prepare(model, progress=False)
        model, plain = by_peft(model), by_peft(plain)
        if not is_prepared_first:
            prepare(model, progress=False)
        steps.clear()
        assert same(gradients(model.train()), gradients(plain.train()))
        assert steps.count("forward") == 2
        adapted = logits_of(model.eval())
        tokens = [each.eval().generate(PROMPT, max_new_tokens=5, do_sample=False) for each in (model, plain)]
        assert torch.equal(*tokens)
        steps.clear()
        with model.disable_adapter():
            assert close(logits_of(model), base)
        assert steps == ["infer"] * 2
        assert close(logits_of(model), adapted, 1e-6)
        with pytest.raises(ArgumentError, match=r"free=True needs experts without adapters.*; leave free out"):
            prepare(model, free=True, progress=False)

    def test_merging_is_seen(self, steps: list[str]) -> None:
        model, plain = pair(by_peft)
        adapted = logits_of(model)
        model.merge_adapter()  # Right after a call with the adapter.
        steps.clear()
        assert close(logits_of(model), adapted, 1e-5)
        model.unmerge_adapter()
        refresh(model)
        with model.disable_adapter():
            base = logits_of(model)
        model.merge_adapter()
        refresh(model)
        assert close(logits_of(model), adapted, 1e-5)
        assert not close(base, adapted, 1e-3)
        tokens = [each.generate(PROMPT, max_new_tokens=5, do_sample=False) for each in (model, plain)]
        assert torch.equal(*tokens)
        assert set(steps) == {"infer"}

    def test_saved_adapters_are_read_with_and_without_moereg(self, tmp_path: Path) -> None:
        peft = needs_peft()
        writer, _ = pair(by_peft)
        gradients(writer.train())
        torch.optim.SGD([one for one in writer.parameters() if one.requires_grad], lr=0.1).step()
        writer.save_pretrained(tmp_path)
        for implementation in ("moereg", "eager"):
            reader = tiny_model("mixtral")
            reader.set_experts_implementation(implementation)
            found = peft.PeftModel.from_pretrained(reader, tmp_path).eval()
            assert close(logits_of(found), logits_of(writer.eval()))

    @pytest.mark.parametrize("family", ["gpt_oss", "aria"])
    def test_experts_in_other_layouts_infer_on_moereg_and_train_on_transformers(
        self, family: str, steps: list[str]
    ) -> None:
        needs(family)
        model, plain = by_peft(tiny_model(family)).eval(), by_peft(tiny_model(family)).eval()
        prepare(model, progress=False)
        for _ in range(2):
            steps.clear()
            assert close(logits_of(model), logits_of(plain))
            assert steps == ["infer"] * 2
            for each in (model, plain):
                assert len(gradients(each.train())) == 8
                torch.optim.SGD([one for one in each.eval().parameters() if one.requires_grad], lr=0.1).step()

    def test_attention_trains_along(self, steps: list[str]) -> None:
        model, plain = pair(by_peft, target_modules=["q_proj"])
        found = gradients(model.train())
        assert len(found) == 12
        assert same(found, gradients(plain.train()))
        assert steps.count(f"backward hidden_states topk_weights {OF_FACTORS}") == 2

    def test_of_two_adapters_the_active_one_counts(self, steps: list[str], caplog: pytest.LogCaptureFixture) -> None:
        model, plain = pair(by_peft)
        both = [by_peft(each, "other", r=5) for each in (model, plain)]
        before = logits_of(model)
        for each in both:
            each.set_adapter("other")
        assert close(logits_of(model), logits_of(plain))
        assert not close(logits_of(model), before, 1e-3)
        assert "infer" not in steps
        for each in both:
            each.base_model.set_adapter(["default", "other"])
        steps.clear()
        with caplog.at_level(logging.WARNING, "moereg"):
            found = gradients(model.train())
        assert len(found) == 16
        assert same(found, gradients(plain.train()))
        assert steps.count("forward") == 2
        assert not [record for record in caplog.records if record.name == "moereg"]
        assert close(logits_of(model.eval()), logits_of(plain.eval()))

    def test_several_active_adapters_keep_their_scalings(self) -> None:
        model, plain = pair(by_peft, lora_alpha=3)
        for each in (model, plain):
            by_peft(each, "other", r=5, lora_alpha=7)
            each.base_model.set_adapter(["default", "other"])
        assert same(gradients(model.train()), gradients(plain.train()))

    def test_a_newer_peft_hands_over_products(
        self, steps: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from peft.tuners.lora.layer import ParamWrapper

        model, plain = pair(by_peft)
        for each in (model, plain):
            by_peft(each, "other", r=5)
            each.base_model.set_adapter(["default", "other"])
        monkeypatch.setattr(ParamWrapper, "_activate_lora", ParamWrapper._activate_lora.__wrapped__)
        with caplog.at_level(logging.WARNING, "moereg"):
            assert same(gradients(model.train()), gradients(plain.train()))
        assert "(PEFT adds a product to down_proj: more than one adapter is active, or PEFT is " in caplog.text
        assert not steps
