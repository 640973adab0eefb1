"""Routing against transformers' own routers, and the rules around it.

Comparisons with transformers scatter weights and ids into a dense [T,E] matrix, so that they do not depend on the order
of the chosen experts: transformers leaves it unspecified for DeepSeek and does not return it for Llama 4. If a router
specifies its order (descending), ids are compared in order as well. Inputs are continuous, so ties do not occur.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    Llama4TextConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.llama4.modeling_llama4 import Llama4Router
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from moereg.routing import (
    RouterSpec,
    biased_softmax_topk,
    grouped_sigmoid_topk,
    grouped_softmax_topk,
    llama4_topk,
    softmax_topk,
    sparsemixer,
    sqrtsoftplus_topk,
    topk_sigmoid,
    topk_softmax,
)

HIDDEN_SIZE = 64

DEEPSEEK_V2 = {"n_routed_experts": 24, "num_experts_per_tok": 6, "routed_scaling_factor": 16.0}
DEEPSEEK_V3 = {"n_routed_experts": 32, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5}


# One a routing function, and its variants: tests of checkpoints have every family. id -> config class, its arguments,
# router class, whether transformers orders its choice.
# fmt: off
MODELS: dict[str, tuple[type, dict[str, Any], type, bool]] = {
    "qwen3_moe": (Qwen3MoeConfig, {"num_experts": 128, "num_experts_per_tok": 8}, Qwen3MoeTopKRouter, True),
    "qwen3_moe-norm": (Qwen3MoeConfig, {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True},
        Qwen3MoeTopKRouter, True),
    "gpt_oss": (GptOssConfig, {"num_local_experts": 32, "num_experts_per_tok": 4}, GptOssTopKRouter, True),
    "deepseek_v2-greedy": (DeepseekV2Config, {**DEEPSEEK_V2, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
        DeepseekV2TopkRouter, False),
    "deepseek_v2-groups": (DeepseekV2Config,
        {**DEEPSEEK_V2, "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}, DeepseekV2TopkRouter,
        False),
    "deepseek_v3": (DeepseekV3Config, {**DEEPSEEK_V3, "n_group": 8, "topk_group": 4}, DeepseekV3TopkRouter, False),
    "deepseek_v3-one-group": (DeepseekV3Config, {**DEEPSEEK_V3, "n_group": 1, "topk_group": 1}, DeepseekV3TopkRouter,
        False),
    "deepseek_v3-not-normalized": (DeepseekV3Config,
        {**DEEPSEEK_V3, "n_group": 4, "topk_group": 2, "norm_topk_prob": False}, DeepseekV3TopkRouter, False),
    "llama4_text": (Llama4TextConfig, {"num_local_experts": 16, "num_experts_per_tok": 1}, Llama4Router, False),
    "llama4_text-top-2": (Llama4TextConfig, {"num_local_experts": 16, "num_experts_per_tok": 2}, Llama4Router, False),
}
# fmt: on


# All functions with small valid arguments for 8 experts; True stands for a correction bias.
BIASED = {"correction_bias": True}
GROUPS = {"num_groups": 4, "topk_groups": 2, "scaling_factor": 16.0}
ROUTERS: dict[str, tuple[Callable[..., tuple[torch.Tensor, torch.Tensor]], dict[str, Any]]] = {
    f"{function.__name__}{', rounded' * ('rounds_scores' in keywords)}": (function, keywords)
    for function, keywords in (
        (softmax_topk, {"renormalize": True}),
        (softmax_topk, {"renormalize": False, "rounds_scores": True}),
        (topk_softmax, {}),
        (grouped_sigmoid_topk, {**GROUPS, **BIASED, "renormalize": True}),
        (grouped_sigmoid_topk, {**GROUPS, "correction_bias": None, "renormalize": False, "rounds_scores": True}),
        (grouped_softmax_topk, GROUPS),
        (grouped_softmax_topk, {**GROUPS, "rounds_scores": True}),
        (llama4_topk, {}),
        (topk_sigmoid, {**BIASED, "renormalize": True}),
        (biased_softmax_topk, {**BIASED, "smallest_sum": 1e-12}),
        (sqrtsoftplus_topk, {**BIASED, "scaling_factor": 1.5}),
        (sqrtsoftplus_topk, {"correction_bias": None, "scaling_factor": 1.5, "rounds_scores": True}),
        (sparsemixer, {"jitter": 0.1}),
    )
}


def route(name: str, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    function, keywords = ROUTERS[name]
    if keywords.get("correction_bias"):
        bias = torch.linspace(-1, 1, 8, dtype=torch.float32, device=logits.device)
        keywords = {**keywords, "correction_bias": bias}
    return function(logits, 2, **keywords)


def _build_router(name: str) -> tuple[torch.nn.Module, RouterSpec]:
    """transformers' router with random parameters and bias, and our spec read from its config."""
    config_class, arguments, router_class, _ = MODELS[name]
    config = config_class(hidden_size=HIDDEN_SIZE, **arguments)
    router = router_class(config)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_(std=0.3)
        for buffer in router.buffers():
            buffer.normal_(std=0.2)
    return router, RouterSpec.from_config(config.to_dict())


def _route_with_transformers(
    router: torch.nn.Module, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Logits [T,E], dense weights [T,E], and ids [T,K] where the router returns them."""
    with torch.no_grad():
        outputs = router(hidden_states)
    if isinstance(router, Llama4Router):
        dense_weights, logits = outputs
        return logits, dense_weights, None
    logits, topk_weights, topk_ids = outputs
    dense_weights = torch.zeros(logits.shape, dtype=topk_weights.dtype).scatter_(1, topk_ids.long(), topk_weights)
    return logits, dense_weights, topk_ids


def _dense(topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    return torch.zeros(topk_ids.shape[0], num_experts).scatter_(1, topk_ids.long(), topk_weights)


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_router_of_transformers(name: str) -> None:
    torch.manual_seed(0)
    router, spec = _build_router(name)
    logits, dense_weights, topk_ids = _route_with_transformers(router, torch.randn(257, HIDDEN_SIZE))
    our_weights, our_ids = spec.route(logits, getattr(router, "e_score_correction_bias", None))

    assert our_weights.dtype == torch.float32
    assert our_ids.dtype == torch.int32
    assert our_weights.shape == our_ids.shape == (257, spec.top_k)
    torch.testing.assert_close(_dense(our_weights, our_ids, spec.num_experts), dense_weights, rtol=1e-6, atol=1e-7)
    if topk_ids is not None:
        is_ordered = MODELS[name][3]
        theirs, ours = (topk_ids, our_ids) if is_ordered else (topk_ids.sort().values, our_ids.sort().values)
        assert torch.equal(theirs.to(torch.int32), ours)


def test_correction_bias_decides_who_is_chosen_but_not_with_what_weight() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    bias = torch.tensor([0.0, -1.0, 0.0, 1.0])
    topk_weights, topk_ids = grouped_sigmoid_topk(logits, 2, 1, 1, bias, False, 1.0)
    # Biased scores: 0.881, -0.269, 0.5, 1.269.
    assert topk_ids.tolist() == [[3, 0]]
    torch.testing.assert_close(topk_weights, torch.sigmoid(torch.tensor([[-1.0, 2.0]])))


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        # Group 0 holds the best expert, group 1 the best pair.
        (lambda logits: grouped_softmax_topk(logits, 2, 2, 1, 1.0), [0, 1]),
        (lambda logits: grouped_sigmoid_topk(logits, 2, 2, 1, None, True, 1.0), [2, 3]),
        (lambda logits: grouped_softmax_topk(logits, 2, 1, 1, 1.0), [0, 2]),
    ],
    ids=["best-expert", "best-pair", "no-groups"],
)
def test_group_scores(route: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], expected: list[int]) -> None:
    assert route(torch.tensor([[3.0, -5.0, 2.0, 1.5]]))[1].tolist() == [expected]


def test_experts_of_other_groups_are_out_whatever_the_scores() -> None:
    """A correction bias below -1 makes every choice negative, so that 0 would be the best."""
    logits = torch.tensor([[3.0, 2.0, -1.0, -2.0]])
    _, topk_ids = grouped_sigmoid_topk(logits, 2, 2, 1, torch.full((4,), -2.0), True, 1.0)
    assert sorted(topk_ids[0].tolist()) == [0, 1]
    _, topk_ids = grouped_sigmoid_topk(logits.flip(1), 2, 2, 1, torch.full((4,), -2.0), True, 1.0)
    assert sorted(topk_ids[0].tolist()) == [2, 3]


def test_small_sigmoids_are_renormalized_all_the_same() -> None:
    """The epsilon of DeepSeek-V3 is for sums that underflow, and nothing beside sigmoids of 1e-11."""
    topk_weights, _ = grouped_sigmoid_topk(torch.full((1, 8), -25.0), 2, 1, 1, None, True, 1.0)
    torch.testing.assert_close(topk_weights, torch.full((1, 2), 0.5))


def test_the_smallest_sum_is_what_weights_are_divided_by() -> None:
    """Ernie divides by its `moe_norm_min` where the bias chose experts that hardly have a weight."""
    logits = torch.tensor([[40.0, 0.0, 0.0, 0.0]])
    bias = torch.tensor([-9.0, 0.0, 0.0, -9.0])
    topk_weights, topk_ids = biased_softmax_topk(logits, 2, bias, 1e-12)
    assert sorted(topk_ids[0].tolist()) == [1, 2]
    torch.testing.assert_close(topk_weights, torch.softmax(logits, -1)[:, 1:3] / 1e-12)


def test_sparsemixer_only_weighs_logits_that_are_near() -> None:
    logits = torch.tensor([[1.0, 0.9, 0.3, 0.2]])
    # Within 0.2 of 1.0 there are two logits; of those left, nothing is near 0.9.
    topk_weights, topk_ids = sparsemixer(logits, 2, 0.1)
    assert topk_ids.tolist() == [[0, 1]]
    expected = torch.tensor([[torch.softmax(logits[0, :2], -1)[0], 1.0]])
    torch.testing.assert_close(topk_weights, expected)


def test_epsilons_are_the_models_own() -> None:
    logits = torch.full((1, 8), -200.0)  # Whose sigmoids underflow.
    assert grouped_sigmoid_topk(logits, 2, 1, 1, None, True, 1.0)[0].tolist() == [[0.0, 0.0]]
    assert grouped_sigmoid_topk(logits, 2, 1, 1, None, True, 1.0, epsilon=0.0)[0].isnan().all()
    lfm2 = grouped_sigmoid_topk(torch.full((1, 8), -14.0), 2, 1, 1, None, True, 1.0, epsilon=1e-6)[0]
    score = torch.sigmoid(torch.tensor(-14.0))
    torch.testing.assert_close(lfm2, (score / (2 * score + 1e-6)).expand(1, 2))


def test_a_soft_cap_keeps_small_logits_and_bounds_large_ones() -> None:
    logits = torch.tensor([[0.01, 100.0]])
    found, ids = grouped_sigmoid_topk(logits, 2, 1, 1, None, False, 1.0, logit_softcap=4.0)
    torch.testing.assert_close(found[0, ids[0].argsort()], torch.sigmoid(torch.tensor([0.01, 4.0])), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ROUTERS)
def test_shapes_and_dtypes(name: str) -> None:
    # A meta tensor has no values: anything that would synchronize raises.
    for num_tokens, device in ((0, "cpu"), (1, "cpu"), (5, "cpu"), (5, "meta")):
        topk_weights, topk_ids = route(name, torch.randn(num_tokens, 8, dtype=torch.bfloat16, device=device))
        assert topk_weights.shape == topk_ids.shape == (num_tokens, 2)
        assert (topk_weights.dtype, topk_ids.dtype) == (torch.float32, torch.int32)
        assert topk_weights.device.type == topk_ids.device.type == device


@pytest.mark.parametrize("name", ROUTERS)
def test_input_is_not_changed_and_strides_do_not_matter(name: str) -> None:
    torch.manual_seed(2)
    logits = torch.randn(8, 5).t()
    before = logits.clone()
    topk_weights, topk_ids = route(name, logits)
    assert torch.equal(logits, before)
    expected_weights, expected_ids = route(name, before.contiguous())
    assert torch.equal(topk_ids, expected_ids)
    torch.testing.assert_close(topk_weights, expected_weights)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: softmax_topk(torch.randn(2, 3, 8), 2, True), r"\[num_tokens, num_experts\], got \[2, 3, 8\]; flatten"),
        (lambda: topk_softmax(torch.zeros(3, 8, dtype=torch.int32), 2), r"floating point, got torch.int32; pass"),
        (lambda: llama4_topk(torch.randn(3, 8), 9), r"top_k must be in 1..num_experts, got top_k=9 with 8 .*; lower"),
        (lambda: softmax_topk(torch.randn(3, 8), 0, True), r"got top_k=0 with 8 experts"),
        (lambda: grouped_softmax_topk(torch.randn(3, 8), 2, 3, 1, 1.0), r"divisible by num_groups, got 8 experts in 3"),
        (lambda: grouped_softmax_topk(torch.randn(3, 8), 2, 0, 1, 1.0), r"got 8 experts in 0 groups"),
        (lambda: grouped_softmax_topk(torch.randn(3, 8), 2, 4, 5, 1.0),
            r"must be in 1..num_groups, got topk_groups=5 of"),
        (lambda: grouped_softmax_topk(torch.randn(3, 8), 3, 4, 1, 1.0), r"got top_k=3 with 2 experts in 1 of 4 groups"),
        (lambda: grouped_sigmoid_topk(torch.randn(3, 8), 2, 8, 4, None, True, 1.0),
            r"two best experts, got 8 experts in 8 groups; use"),
        (lambda: grouped_softmax_topk(torch.randn(3, 8), 2, 4, 2, 1.0, scored_experts=3),
            r"sum of its 3 best experts, got 8 experts in 4 groups; use num_groups <= num_experts / 3"),
        (lambda: sparsemixer(torch.randn(3, 8), 3, 0.1), r"chooses two experts, got top_k=3; use top_k=2"),
        (lambda: topk_sigmoid(torch.randn(3, 8), 2, True, torch.zeros(4)),
            r"correction_bias must be \[8\] .* got \[4\]; pass"),
        (lambda: grouped_sigmoid_topk(torch.randn(3, 8), 2, 2, 1, torch.zeros(4), True, 1.0),
            r"correction_bias must be \[8\] .* got \[4\]; pass"),
    ],
)  # fmt: skip
def test_bad_input_names_rule_value_and_cure(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
