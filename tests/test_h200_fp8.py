"""What the bench of 8-bit layers needs no GPU for."""

from __future__ import annotations

import math

import pytest

from benches import h200_fp8
from moereg.kernels.triton_quantized_config import select_quantized_config


@pytest.mark.parametrize("model", h200_fp8.MODELS)
@pytest.mark.parametrize("scheme", h200_fp8.SCHEMES)
def test_peers_are_known_where_they_ran(model: str, scheme: str) -> None:
    for num_tokens in h200_fp8.NUM_TOKENS:
        found = h200_fp8.peers_us(model, scheme, num_tokens)
        assert bool(found) == (scheme == h200_fp8.PEER_SCHEME)
        assert all(value > 0 for value in found.values())


@pytest.mark.parametrize("model", h200_fp8.MODELS)
def test_candidates_can_run_and_differ(model: str) -> None:
    problem = h200_fp8.make_problem(model, "fp8_block128")
    for num_tokens in h200_fp8.NUM_TOKENS:
        rows = num_tokens * problem.top_k / problem.num_experts
        candidates = h200_fp8.candidates_of(num_tokens, rows)
        names = [h200_fp8.describe(pair) for pair in candidates]
        assert len(set(names)) == len(names) > 3
        for pair in candidates:
            assert pair.gate_up.block_m == pair.down.block_m
            assert pair.sort_routes or num_tokens <= pair.gate_up.block_m
            assert 128 % pair.gate_up.block_n == 0


def test_a_candidate_replaces_the_rules_and_only_inside() -> None:
    candidate = h200_fp8.candidates_of(1, 0.06)[-1]
    with h200_fp8.selecting(candidate):
        assert h200_fp8.triton_quantized_config.select_quantized_config(1, 0.06, 2, None) is candidate
    assert h200_fp8.triton_quantized_config.select_quantized_config is select_quantized_config


def test_lines_of_rows_name_what_is_wrong_or_missing() -> None:
    row = {"model": "m", "scheme": "s", "tokens": 4}
    assert "left out: out of time" in h200_fp8.show(row | {"left_out": "out of time"})
    assert "WRONG" in h200_fp8.show(row | {"wrong": True, "relative_error": 0.5})
    right = row | {"wrong": False, "relative_error": 0.01, "ours_us": 2.0, "roof_us": 1.0, "share": 0.5}
    line = h200_fp8.show(right | {"configs_us": {"slow": 3.0, "fast": 2.0, "bad": math.nan}})
    assert line.index("fast") < line.index("slow") < line.index("bad")
    assert "50.0%" in line
