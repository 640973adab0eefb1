"""Every transformers class with routed experts, as the source lists them: with the numbers of eager, or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from moereg.errors import ArgumentError
from moereg.integrations._experts.blocks import find_experts
from moereg.integrations._experts.packed import PackedExperts, stored_in
from moereg.integrations.transformers import dequantize_experts, prepare, quantize_experts, quantize_on_load
from tests.support.tiny_models import WITHOUT_INTERFACE, experts_classes, families, tiny_model

pytestmark = pytest.mark.slow

REFUSED: Final = {
    "jetmoe": "JetMoeMoE .*: it sorts tokens by expert itself",
    "longcat_flash": "LongcatFlashExperts .*: some of its experts return their input",
    "muse_spark": "MuseSparkExperts .*: it normalizes the output of each expert",
}
"""Families that are not served, and how the error begins."""

OTHERS: Final = {"nllb_moe", "switch_transformers"}
"""Families with experts that are separate modules; `prepare` refuses their classes by name."""

UNMADE: Final = {
    "qwen3_omni_moe.Qwen3OmniMoeTalkerTextExperts": "the thinker has the same experts, and the talker makes sound"
}
"""Classes that no tiny model here has, each with the reason."""

DO_NOT_GENERATE: Final = {
    "diffusion_gemma": "it fills in a canvas instead of adding tokens",
    "openai_privacy_filter": "it labels tokens",
}

TIED: Final = {"diffusion_gemma"}
"""Families whose parts share experts, which are kept then."""

FLOAT32_BOUND: Final = 5e-6
"""Of the largest logit; most families stay below 5e-7."""

BFLOAT16_BOUND: Final = 0.04
"""Of the largest logit: rounding to 8 bits, twice a layer, along another order of sums than eager's."""

PROMPT: Final = torch.tensor([[3, 9, 27, 5, 15, 8, 2], [4, 16, 11, 44, 23, 31, 7]])


def output_of(model: Any) -> torch.Tensor:
    torch.manual_seed(0)  # One family draws noise.
    with torch.no_grad():
        found = model(PROMPT)
    logits = getattr(found, "logits", None)
    return found[0] if logits is None else logits


@pytest.mark.parametrize("family", [family for family in families() if family not in REFUSED])
def test_a_family_gives_the_logits_and_tokens_of_eager(family: str, record_property: Any) -> None:
    model = tiny_model(family)
    model.set_experts_implementation("eager")
    expected = output_of(model)
    arguments = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
    generates = family not in DO_NOT_GENERATE
    tokens = model.generate(PROMPT, **arguments) if generates else None
    prepared = prepare(model, free=True, progress=False)
    found = output_of(model)
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < FLOAT32_BOUND
    if generates:
        assert torch.equal(model.generate(PROMPT, **arguments), tokens)
    ties = "in more than one place" if family in TIED else None
    assert all(ties is not None and ties in layer.kept for layer in prepared.layers if layer.kept)
    record_property("error", error)
    record_property("bytes", (prepared.bytes_before, prepared.bytes_after))


@pytest.mark.parametrize("family", sorted(set(families()) - REFUSED.keys() - set(WITHOUT_INTERFACE)))
def test_a_family_is_quantized_when_loaded_and_while_it_loads(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, quantization_config=quantize_on_load("nf4"), dtype=torch.float32)
    quantize_experts(model, "nf4")
    for one, other in zip(model.parameters(), loaded.parameters(), strict=True):
        assert type(one) is type(other)
        assert all(map(torch.equal, stored_in(one), stored_in(other)))
    found = output_of(model)
    dequantize_experts(model)
    assert not any(isinstance(each, PackedExperts) for each in model.parameters())
    model.set_experts_implementation("eager")
    expected = output_of(model)
    assert float((found - expected).abs().max() / expected.abs().max()) < FLOAT32_BOUND


@pytest.mark.parametrize("family", [family for family in families() if family not in REFUSED])
def test_a_family_is_within_the_bound_in_bfloat16(family: str) -> None:
    """With the routes of eager: where two experts are nearly level, a rounding in the layer before picks the other."""
    model = tiny_model(family, torch.bfloat16)
    model.set_experts_implementation("eager")
    routes: list[tuple[torch.Tensor, torch.Tensor]] = []
    experts = [each.module for each in find_experts(model)]

    def record(_: Any, values: tuple[torch.Tensor, ...]) -> None:
        if len(values) == 3:
            routes.append((values[1], values[2]))

    def replay(_: Any, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (values[0], *routes.pop(0)) if len(values) == 3 else values

    hooks = [module.register_forward_pre_hook(record) for module in experts]
    expected = output_of(model).float()
    taken = list(routes)
    for hook in hooks:
        hook.remove()
    prepare(model, progress=False)
    for module in experts:
        module.register_forward_pre_hook(replay)
    found = output_of(model).float()
    assert not routes
    error = float((found - expected).abs().max())
    if error < BFLOAT16_BOUND * float(expected.abs().max()):
        return
    # A model may make more of roundings, whose order is that of the CPU's products: then what eager's own take it from
    # fp32 with the same routes is the bound.
    wide = tiny_model(family, torch.float32)
    wide.load_state_dict(model.state_dict())
    wide.set_experts_implementation("eager")
    for module in (each.module for each in find_experts(wide)):
        module.register_forward_pre_hook(replay)
    routes.extend((ids, weights.float()) for ids, weights in taken)
    assert error < float((expected - output_of(wide)).abs().max())


@pytest.mark.parametrize("family", [family for family in families() if family in REFUSED])
def test_what_is_refused_is_named_with_the_reason(family: str) -> None:
    if family == "muse_spark":
        from transformers import MuseSparkTextConfig, MuseSparkTextModel

        with torch.device("meta"):
            model: Any = MuseSparkTextModel(MuseSparkTextConfig(num_hidden_layers=4))
    else:
        model = tiny_model(family)
    with pytest.raises(ArgumentError, match=REFUSED[family]):
        prepare(model, progress=False)


def test_every_class_of_the_experts_interface_is_in_a_model_that_is_tested() -> None:
    found = {
        f"{family}.{each.class_name}"
        for family in families()
        if family not in REFUSED
        for each in find_experts(tiny_model(family))
    }
    expected = {name for name in experts_classes() if name.partition(".")[0] not in REFUSED}
    assert expected - found == set(UNMADE) & expected


def test_every_other_family_with_experts_is_refused_or_known_to_have_none_that_are_routed() -> None:
    """A new version of transformers with experts outside the interface fails here."""
    import transformers.models

    folder = Path(transformers.models.__path__[0])
    named = re.compile(r"^class (\w*(?:Experts|SparseMLP))\(", re.MULTILINE)
    found = {path.parent.name for path in folder.glob("*/modeling_*.py") if named.search(path.read_text())}
    assert found - set(families()) <= OTHERS
