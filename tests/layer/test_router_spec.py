"""RouterSpec: its refusals, and what it reads from a model's config."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import Llama4Config

from moereg.errors import CheckpointError, UnknownModelError, UnknownNameError
from moereg.routing import RouterSpec
from moereg.routing.configs import ROUTED_MODEL_TYPES


def test_published_configs() -> None:
    """Those that neither a family's default nor a router of transformers shows."""
    # DeepSeek-V2-Lite: greedy ignores groups even where the file has some.
    sizes = {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3}
    lite = {"model_type": "deepseek_v2", **sizes, "topk_method": "greedy", "routed_scaling_factor": 1.0}
    spec = RouterSpec(kind="grouped_softmax_topk", num_experts=64, top_k=6, fp32_logits=True)
    assert RouterSpec.from_config({**lite, "norm_topk_prob": False, "scoring_func": "softmax"}) == spec
    olmoe = {"model_type": "olmoe", "num_experts": 64, "num_experts_per_tok": 8}
    assert RouterSpec.from_config(olmoe) == RouterSpec(kind="softmax_topk", num_experts=64, top_k=8)
    v3 = {"model_type": "deepseek_v3", "n_routed_experts": 256, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5}
    found = RouterSpec.from_config({**v3, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4})
    assert (found.kind, found.num_groups, found.topk_groups) == ("grouped_sigmoid_topk", 8, 4)
    assert (found.renormalize, found.scaling_factor, found.has_correction_bias) == (True, 2.5, True)
    lfm2 = RouterSpec.from_config({"model_type": "lfm2_moe", "num_experts": 32, "num_experts_per_tok": 4})
    assert (lfm2.epsilon, lfm2.has_correction_bias, lfm2.rounds_scores) == (1e-6, True, True)


def test_entries_that_are_absent_or_negative_have_the_models_meaning() -> None:
    ernie = RouterSpec.from_config({"model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 2})
    assert ernie.smallest_sum == 1e-12
    laguna = {"model_type": "laguna", "num_experts": 8, "num_experts_per_tok": 2}
    for cap, meant in ((-1.0, 0.0), (3.0, 3.0)):
        assert RouterSpec.from_config({**laguna, "moe_router_logit_softcapping": cap}).logit_softcap == meant


def test_llama4_config_of_transformers_holds_the_text_config() -> None:
    spec = RouterSpec.from_config(Llama4Config().to_dict())
    assert spec == RouterSpec(kind="llama4_topk", num_experts=16, top_k=1)
    assert spec.apply_router_weight_on_input
    assert not RouterSpec(kind="softmax_topk", num_experts=8, top_k=1).apply_router_weight_on_input


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"model_type": "qwen3_mo"}, UnknownModelError, r"^unknown model type 'qwen3_mo'; do not put another type's n"),
        ({}, UnknownModelError, r"unknown model type None"),
        ({"model_type": "mixtral", "num_local_experts": 8}, CheckpointError,
            r"num_experts_per_tok of model type 'mixtral' must be a whole number of at least 1, got none; take"),
        ({"model_type": "deepseek_v3", "scoring_func": "sqrtsoftplus"}, CheckpointError,
            r"scoring_func .* in \['sigmoid'\], got 'sqrtsoftplus'"),
        ({"model_type": "deepseek_v3", "topk_method": "greedy"}, CheckpointError, r"topk_method .* in \['noaux_tc'\]"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, CheckpointError, r"norm_topk_prob .* in .*, got True"),
        ({"model_type": "deepseek_v2", "topk_method": "noaux_tc"}, CheckpointError, r"topk_method .* in \['greedy'"),
    ],
)  # fmt: skip
def test_config_that_cannot_be_read(config: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        RouterSpec.from_config(config)
    assert isinstance(caught.value, ValueError)


FOREIGN: dict[str, dict[str, Any]] = {
    "scores": {"scoring_func": "tanh"},
    "another name of scores": {"score_func": "tanh"},
    "a method": {"topk_method": "hashed"},
    "groups": {"n_group": 4, "topk_group": 2},
    "groups by another name": {"num_expert_group": 4, "topk_group": 2},
    "scaling": {"routed_scaling_factor": 7.0},
    "a cap": {"moe_router_logit_softcapping": 3.0},
    "weights on inputs": {"moe_apply_router_weight_on_input": True},
    "experts that return their input": {"zero_expert_num": 4},
    "renormalized": {"norm_topk_prob": True},
    "not renormalized": {"norm_topk_prob": False},
}
# Mistral names no method, and DeepSeek-V2's files carry groups that its greedy method does not read.
ANY_METHOD = {"mistral4", "mistral_large4_text"}
ANY_GROUPS = {"deepseek_v2", "deepseek_ocr2_text", "unlimited_ocr_text"}
# A softmax over the chosen logits sums to 1, with the flag or without.
ANY_FLAG = {"cohere2_moe", "dbrx"}


@pytest.mark.parametrize("model_type", ROUTED_MODEL_TYPES)
def test_no_setting_is_ignored(model_type: str) -> None:
    sizes = {"num_experts": 16, "num_experts_per_tok": 2}
    ffn = {"moe_num_experts": 16, "moe_top_k": 2}
    config = {"model_type": model_type, **(dict(ffn_config=ffn) if model_type == "dbrx" else sizes)}
    spec = RouterSpec.from_config(config)
    normalizes = {}
    for name, changes in FOREIGN.items():
        try:
            found = RouterSpec.from_config({**config, **changes})
        except CheckpointError:
            continue
        if "renormalized" in name:
            normalizes[name] = found
        else:
            is_exception = {"a method": ANY_METHOD, "groups": ANY_GROUPS}.get(name.removesuffix(" by another name"), ())
            assert found != spec or model_type in is_exception, name
    # Where both are accepted they mean something.
    assert len(set(normalizes.values())) == len(normalizes) or model_type in ANY_FLAG


def test_settings_that_say_what_the_model_does_anyway_are_accepted() -> None:
    # As Hunyuan-A13B is published.
    unused = {"n_group": False, "topk_group": False, "routed_scaling_factor": False, "norm_topk_prob": True}
    config = {"model_type": "hunyuan_v1_moe", "num_experts": 64, "moe_topk": [8, 8], **unused}
    assert RouterSpec.from_config(config).renormalize
    softmax = {"scoring_func": "softmax", "topk_method": "greedy", "n_group": 1, "routed_scaling_factor": 1.0}
    plain = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    assert RouterSpec.from_config({**plain, **softmax}) == RouterSpec.from_config(plain)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": "softmax_top"}, UnknownNameError, r"'softmax_top', did you mean 'softmax_topk'"),
        ({"kind": "topk_softmax", "scaling_factor": 2.5}, ValueError, r"does not use scaling_factor, got 2.5; leave"),
        ({"kind": "llama4_topk", "renormalize": True}, ValueError, r"does not use renormalize"),
        ({"kind": "softmax_topk", "has_correction_bias": True}, ValueError, r"takes no correction bias"),
        ({"kind": "softmax_topk", "top_k": 9}, ValueError, r"top_k=9 with 8 experts"),
        ({"kind": "grouped_softmax_topk", "num_groups": 3}, ValueError, r"8 experts in 3 groups"),
        ({"kind": "grouped_sigmoid_topk", "num_groups": 8, "topk_groups": 4}, ValueError,
            r"score is the sum of its two best experts, got 8 experts in 8 groups"),
        ({"kind": "grouped_softmax_topk", "num_groups": 4, "topk_groups": 2, "scored_experts": 3}, ValueError,
            r"score is the sum of its 3 best experts, got 8 experts in 4 groups"),
    ],
)  # fmt: skip
def test_spec_refuses_what_it_would_ignore(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RouterSpec(**{"num_experts": 8, "top_k": 2, **options})


def test_spec_checks_logits_and_bias() -> None:
    spec = RouterSpec(kind="grouped_sigmoid_topk", num_experts=8, top_k=2, has_correction_bias=True)
    with pytest.raises(ValueError, match=r"num_experts=8 columns, got 4; pass"):
        spec.route(torch.randn(3, 4), torch.zeros(8))
    with pytest.raises(ValueError, match=r"must be \[E\] where has_correction_bias=True, got None"):
        spec.route(torch.randn(3, 8))
    with pytest.raises(ValueError, match=r"must be None where has_correction_bias=False, got a tensor"):
        dataclasses.replace(spec, has_correction_bias=False).route(torch.randn(3, 8), torch.zeros(8))
