"""What the bench of one token reads beside a layer, on a CPU: its times need the GPU."""

from __future__ import annotations

import itertools

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from benches.h200 import one_token
from benches.h200.one_token import place_runs

PIECE = 16 * 1024


@hypothesis.given(st.integers(1, 1 << 32), st.integers(1 << 26, 1 << 30), st.integers(1, 40))
def test_runs_lie_side_by_side_within_the_words(num_bytes: int, num_words: int, num_runs: int) -> None:
    hypothesis.assume(num_bytes + PIECE <= 4 * num_words)
    reading = place_runs(num_bytes, num_words, num_runs)
    assert abs(reading.num_bytes - num_bytes) <= PIECE / 2 or reading.num_bytes == PIECE
    assert len(reading.places) == num_runs
    starts = [4 * place for place in reading.places]
    assert all(start % PIECE == 0 and start + reading.num_bytes <= 4 * num_words for start in starts)
    assert starts[0] == 0
    for before, start in itertools.pairwise(starts):
        assert start in (before + reading.num_bytes, 0)
        assert start or before + 2 * reading.num_bytes > 4 * (num_words // (PIECE // 4)) * (PIECE // 4)


def test_what_a_layer_reads() -> None:
    """A quarter of Qwen3-30B-A3B: two steps of 528 programs would be 8 % too few bytes."""
    quarter = 8 * 3 * 2048 * 192 * 2
    assert place_runs(quarter, 1 << 30, 16).num_bytes == quarter
    with pytest.raises(ValueError, match=r"a run of 18,874,368 bytes needs as many to read, got 4,096; take more"):
        place_runs(quarter, 1024, 16)


@pytest.mark.parametrize(("num_pieces", "programs"), [(1, 1), (7, 3), (9, 3), (2, 2)])
def test_the_reader_reads_each_element_of_a_run_once(num_pieces: int, programs: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    words = torch.arange(16 * 12, dtype=torch.float32, device=device)
    out = torch.zeros(programs, device=device)
    one_token._read_kernel[(programs,)](words, out, 32, num_pieces, WORDS=16)
    pieces = words[32 : 32 + 16 * num_pieces].view(num_pieces, 16)
    assert out.tolist() == [float(pieces[first::programs].sum()) for first in range(programs)]
