"""FSDP2: models whose experts moereg serves, sharded over two ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.groups.ranks import results_of, value_of


def check_losses(found: list[dict[str, Any]], computed: str) -> None:
    """In bf16 with recomputed layers, over the same batches."""
    assert found[0]["together"] == found[1]["together"]
    for each in found:
        assert each["together"] == pytest.approx(each["alone"], rel=1e-5)
        assert each["together"] == pytest.approx(each["eager"], rel=1e-2)
        assert each["together"][-1] < 0.97 * each["together"][0]
        assert each["together steps"] == each["alone steps"] == [f"backward {computed}", "forward"]
        assert each["eager steps"] == []


def test_losses_are_those_of_one_rank_and_quantized_experts_are_not_sharded() -> None:
    names = ("all_weights", "quantized_experts_are_not_sharded")
    results = results_of(2, *names, module="tests.integrations.fsdp_cases")
    check_losses([value_of(result, names[0]) for result in results], "hidden_states topk_weights w13 w2")
    for result in results:  # Shards would hold restored values.
        assert value_of(result, names[1]).startswith("quantized experts are not split over ranks")


@pytest.mark.finetune
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="make test-finetune installs peft")
def test_losses_of_adapters_on_quantized_experts() -> None:
    name = "adapters_on_quantized_experts"
    results = results_of(2, name, module="tests.integrations.fsdp_cases")
    check_losses([value_of(result, name) for result in results], "hidden_states topk_weights w13_a w13_b w2_a w2_b")
