"""Routes for kernels that know local experts only."""

from __future__ import annotations

import pytest
import torch

from moereg.kernels.plain.device import local_expert_ids
from moereg.kernels.rows.direct import local_routes
from moereg.testing.interpreter import patch_interpreter

NUM_IDS, NUM_LOCAL = 6, 3
MAP = torch.tensor([-1, 2, -1, 0, 1, -1], dtype=torch.int32)

# Token 1 has no local expert, token 2 one that is no id and one of another rank, token 3 the smallest id beyond.
IDS = torch.tensor([[1, 3, 4], [0, 2, 5], [-1, 4, 0], [6, 3, -7]], dtype=torch.int32)


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    patch_interpreter()


def _weights() -> torch.Tensor:
    weights = torch.rand(IDS.shape) + 0.5
    # The weight of a route without expert may be anything.
    weights[3, 0] = float("nan")
    return weights


@pytest.mark.parametrize("expert_map", [None, MAP], ids=["all", "map"])
def test_routes_become_local(expert_map: torch.Tensor | None) -> None:
    num_ids = NUM_LOCAL if expert_map is None else NUM_IDS
    weights, ids, scaled = _weights(), torch.empty_like(IDS), torch.empty(IDS.shape)
    local_routes(ids, scaled, IDS, weights, expert_map, num_ids, NUM_LOCAL)
    expected = local_expert_ids(IDS, NUM_LOCAL, expert_map)
    assert torch.equal(ids.long(), expected)
    assert torch.equal(scaled, torch.where(expected < 0, 0.0, weights))
