from __future__ import annotations

import time

import pytest
import torch

from benches.h200 import shapes
from benches.h200.shapes import LAYERS, PEER_MODELS, ModelLayer, all_rows, measure, needed_bytes, summary
from moereg.platforms import Platform

H200_BYTES = 139 * 2**30


def test_the_plan_has_every_row_once() -> None:
    rows = [(layer.name, *point) for layer, points in all_rows() for point in points]
    assert len(rows) == len(set(rows)) == len(LAYERS) * 8 + len(PEER_MODELS) * 4 * 3
    assert all_rows() == [*all_rows("layers"), *all_rows("skewed")]
    assert {layer.name for layer, _ in all_rows("skewed")} == set(PEER_MODELS)


def test_shards_split_the_intermediate_size() -> None:
    sizes = {layer.name: layer.problem().intermediate_size for layer in LAYERS if layer.tensor_parallel > 1}
    assert sizes == {"qwen3-30b-a3b TP4": 192, "qwen3-30b-a3b TP2": 384, "gpt-oss-120b TP8": 360}
    problem = ModelLayer("gpt-oss-120b", 8).problem()
    assert not problem.has_bias
    assert problem.activation.name == "silu"


def test_every_layer_fits_an_h200() -> None:
    for layer, points in all_rows():
        assert needed_bytes(layer.problem(), max(tokens for tokens, _ in points)) < H200_BYTES, layer
    weights = 384 * 3 * 7168 * 2048 * 2
    assert needed_bytes(ModelLayer("kimi-k2").problem(), 1) > 2 * weights


def test_what_does_not_fit_or_comes_too_late_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 2**40))
    (row,) = measure(ModelLayer("kimi-k2"), [(4, "uniform")], {}, time.monotonic() + 60)
    assert row["left_out"].startswith("needs up to")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**40, 2**40))
    (row,) = measure(ModelLayer("kimi-k2"), [(4, "zipf")], {}, time.monotonic() - 1)
    assert row == {"layer": "kimi-k2", "tokens": 4, "routing": "zipf", "left_out": "out of time"}


def test_the_summary_has_the_bands_that_were_measured() -> None:
    def row(tokens: int, share: float, routing: str = "uniform", wrong: bool = False) -> dict[str, object]:
        return {"layer": "x", "tokens": tokens, "routing": routing, "share": share, "wrong": wrong}

    lines = summary([row(1, 0.25), row(4, 1.0), row(64, 0.9), row(64, 0.4, "zipf"), row(256, 0.0, wrong=True)])
    assert [" ".join(line.split()) for line in lines] == [
        "x uniform share of the roofline: T 1-4 50.0% 16-256 90.0%",
        "x zipf share of the roofline: 16-256 40.0%",
    ]


def test_a_machine_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["shapes"])
    monkeypatch.setattr(shapes, "probe_platform", lambda: Platform.from_name("cpu"))
    assert shapes.main() == 3
