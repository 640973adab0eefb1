"""Libraries that come as source: they take part where they were built, and get weights and routes in their order."""

from __future__ import annotations

import pathlib

import pytest
import torch

from benches.board import libraries
from benches.board.layers import GPU_LAYERS
from benches.board.libraries import interleaved
from benches.board.padded_routes import padded_on_host, padded_routes
from moereg.bench.session import timed_cell, tuning_candidates
from moereg.platforms import read_platform
from moereg.registry import BackendRegistry

NAMES = ("hpc_ops", "alpha_moe")


def test_what_was_built_takes_part_where_it_fits(
    tmp_path: pathlib.Path, isolated_registry: BackendRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.so").touch()
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    libraries.register(tmp_path)
    platform = read_platform("cuda:sm90")
    (layer,) = (layer for layer in GPU_LAYERS if layer.name == "qwen3-30b-a3b:fp8_block128")
    found = tuning_candidates(layer.problem(), platform, prefer=NAMES).decisions
    own = [one for one in found if one.backend in NAMES and one.accepted]
    assert sorted(one.backend for one in own) == sorted(NAMES)
    assert all(timed_cell(one, platform) for one in own)
    unasked = tuning_candidates(layer.problem(), platform).decisions
    assert not any(one.accepted for one in unasked if one.backend in NAMES)


def test_gate_and_up_alternate() -> None:
    rows = torch.arange(8).view(1, 8, 1)
    assert interleaved(rows, 2).flatten().tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert interleaved(rows, 1).flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_routes_are_padded_to_tiles() -> None:
    topk_ids = torch.tensor([[2, 0], [2, 5], [2, 0]], dtype=torch.int32)
    routes, experts = padded_on_host(topk_ids.flatten().tolist(), 4, 2)
    assert routes == [1, 5, 0, 2, 4, 6]
    assert experts == [0, 2, 2]
    found = padded_routes(topk_ids, None, 4, 4, 2)
    assert found.routes[:6].tolist() == routes
    assert set(found.routes[6:].tolist()) <= {6}
    assert found.experts[:3].tolist() == experts
    assert found.num_rows.tolist() == [6]
