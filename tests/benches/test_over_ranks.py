"""Layers over several ranks: all token dispatchers against the reference and one rank, by processes on this machine."""

from __future__ import annotations

import json

import pytest

from benches.over_ranks import HEAD, NO_ROW, cells
from tests.cli.command import printed


@pytest.mark.slow
def test_every_dispatcher_over_two_ranks_computes_what_one_rank_does() -> None:
    line = "--ranks 2 --sizes 8,2,128,64 --dtype float32 --platform cpu --json --whole"
    line += " --tokens 3,9 --routing uniform,zipf --rounds 3 --replicas 2"
    rows = [json.loads(text) for text in printed("-m", "benches.over_ranks", *line.split()).splitlines()]
    dispatchers = {row["dispatcher"] for row in rows}
    assert dispatchers == {"all_to_all", "all_gather"}
    kinds = {(row["dispatcher"], row["tokens"], row["routing"]) for row in rows}
    assert len(rows) == len(kinds) == len(dispatchers) * 2 * 2
    for row in rows:
        assert set(row) == {"dispatcher", "tokens", *NO_ROW}
        assert row["failure"] is None
        assert row["passed"]
        assert row["repeats"]
        assert row["relative_error"] <= row["tolerance"]
        assert row["one_rank_error"] < 1e-6
        for name in ("time_us", "one_rank_us", "over_one_rank", "bare_us", "bytes_out", "bytes_back"):
            assert row[name] > 0, name
        assert len(cells(row)) == len(HEAD)
