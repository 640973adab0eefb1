from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("triton")

from benches.h200 import quant_configs, sweep
from benches.h200.candidates import gemv, grouped, rotated, spell
from benches.h200.sweep import (
    MODELS,
    NUM_TOKENS,
    candidates_of,
    class_of,
    make_problem,
    report,
    row_candidates,
    selecting,
    shipped,
    uses_hopper,
)
from moereg.backends._triton import ways
from moereg.backends.triton_moe import TritonExperts
from moereg.kernels.gemm import rules as gemm_rules
from moereg.kernels.gemm.config import GemmPair
from moereg.kernels.hopper import config as hopper_config
from moereg.kernels.sizes import GUARD_ROWS
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from tests.benches.selecting import select_way

H200_SHARED_BYTES = 227 * 1024

EACH_ROW = [(make_problem(model), tokens) for model, tokens in itertools.product(MODELS, NUM_TOKENS)]


def test_the_sweep_splits_classes_where_the_backend_changes_kernels() -> None:
    assert ways.MIN_HOPPER_ROWS in sweep.CLASS_ROWS
    assert uses_hopper(4096, ways.MIN_HOPPER_ROWS + 1)
    assert not uses_hopper(4096, ways.MIN_HOPPER_ROWS)


def test_each_row_has_8_to_15_candidates_and_the_shipped_one_among_them() -> None:
    for problem, tokens in EACH_ROW:
        candidates = row_candidates(problem, tokens, H200_SHARED_BYTES)
        assert 8 <= len(candidates) <= 15, (problem, tokens)
        assert candidates[0] == shipped(problem, tokens, H200_SHARED_BYTES)
        assert len({candidate.name for candidate in candidates}) == len(candidates)
        rows = tokens * problem.top_k / problem.num_experts
        assert candidates[0] in candidates_of(tokens, rows), "the class lacks the configuration that is shipped"


def test_a_tile_is_what_its_text_spells() -> None:
    texts = [text for pair in quant_configs.TILES.values() for texts in pair for text in texts]
    assert [spell(grouped(text)) for text in texts] == texts
    config = grouped("16x64x128 4w5s", mask_rows=False)
    assert (config.block_m, config.block_n, config.block_k) == (16, 64, 128)
    assert (config.num_warps, config.num_stages, config.group_m, config.mask_rows) == (4, 5, 1, False)
    vector = gemv("32x128 2w4s")
    assert (vector.block_n, vector.block_k, vector.num_warps, vector.num_stages) == (32, 128, 2, 4)
    assert spell(vector) == "32x128 2w4s"


def test_rows_of_a_class_have_the_same_candidates() -> None:
    by_class: dict[str, set[frozenset[str]]] = {}
    for problem, tokens in EACH_ROW:
        names = frozenset(c.name for c in row_candidates(problem, tokens, H200_SHARED_BYTES))
        by_class.setdefault(class_of(tokens, tokens * problem.top_k / problem.num_experts), set()).add(names)
    assert len(by_class) == 7
    assert all(len(names) == 1 for names in by_class.values())


def test_candidates_fit_what_the_kernels_take() -> None:
    for tokens, rows in ((1, 1), (16, 1), (64, 4), (256, 16), (256, 32), (1024, 64), (4096, 128), (4096, 256)):
        for candidate in candidates_of(tokens, rows):
            configs = candidate.configs
            if isinstance(configs, GemmPair):
                assert configs.gate_up.block_m == configs.down.block_m >= gemm_rules.MIN_BLOCK_M
                assert configs.sort_routes or tokens <= configs.gate_up.block_m
            if uses_hopper(tokens, rows):
                for config in (configs.gate_up, configs.down):
                    assert config.block_m + config.slack <= GUARD_ROWS
                assert configs.gate_up.block_m == configs.down.block_m
                assert configs.gate_up.slack == configs.down.slack


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (64, 4), (4096, 256)])
def test_selecting_replaces_what_the_backend_asks_and_puts_it_back(tokens: int, rows: float) -> None:
    modules: tuple[Any, ...] = (gemm_rules, hopper_config)
    before = [module.select_config for module in modules]
    candidate = candidates_of(tokens, rows)[-1]
    with selecting(candidate):
        module = modules[uses_hopper(tokens, rows)]
        assert module.select_config(tokens, rows) is candidate.configs
    assert [module.select_config for module in modules] == before


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (4, 1), (64, 4)])
def test_a_layer_runs_with_the_candidate(tokens: int, rows: float) -> None:
    problem = MoEProblem(num_experts=8, hidden_size=64, intermediate_size=64, top_k=2)
    candidate = candidates_of(tokens, rows)[-1]
    with selecting(candidate):
        way = select_way(TritonExperts(problem, Platform.from_name("cuda:sm90")), tokens)
    assert way.configs is candidate.configs


def test_candidates_begin_on_different_inputs() -> None:
    runs = [object() for _ in range(4)]
    turned = [rotated(runs, number) for number in range(9)]  # type: ignore[arg-type]
    for candidate in turned:
        assert sorted(map(id, candidate)) == sorted(map(id, runs))
    for place in range(4):
        assert all(first[place] is not second[place] for first, second in itertools.pairwise(turned))


def test_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    def row(model: str, a: float, b: float, **more: Any) -> dict[str, Any]:
        times = {"a": a, "b": b}
        return {
            "model": model,
            "tokens": 4,
            "class": "few",
            "shipped": "a",
            "times_us": times,
            "skipped": [],
            "wrong": [],
        } | more

    good = [row("x", 1.0, 1.1), row("y", 1.0, 1.1), row("z", 1.1, 1.0)]
    assert report(good, [], 1.0) == 0
    text = capsys.readouterr().out
    assert "worst ratio 1.100" in text
    assert report([*good, row("v", 1.2, 1.0)], [], 1.0) == 1
    assert "v T 4: ratio 1.200 (best b, chosen a)" in capsys.readouterr().out
    assert report([*good[:2], row("z", 1.0, 1.0, wrong=["b"])], [], 1.0) == 1
    assert report(good, [{"model": "w", "tokens": 1, "left_out": "out of time"}], 1.0) == 0
    assert "left out: w T 1: out of time" in capsys.readouterr().out


def test_a_machine_without_a_hopper_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["sweep"])
    monkeypatch.setattr(sweep, "probe_platform", lambda: Platform.from_name("cuda:sm80"))
    assert sweep.main() == 3
