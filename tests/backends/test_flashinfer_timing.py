"""How tactics are timed, on a `torch.cuda` that is made up but for what torch asks of graphs and their pools."""

import contextlib
import gc
import types

import pytest
import torch

from moereg.backends._flashinfer.timing import CallTimer


class _Graph:
    """A CUDA graph. Torch takes back a pool whose last graph is gone, and raises when somebody captures into it."""

    living = 0
    captured = 0

    def capture_begin(self, pool, capture_error_mode):
        if _Graph.captured and not _Graph.living:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")

    def capture_end(self):
        _Graph.captured += 1
        _Graph.living += 1

    def __del__(self):
        _Graph.living -= 1

    def replay(self):
        pass


class _Event:
    def __init__(self, enable_timing):
        pass

    def record(self):
        pass

    synchronize = record

    def elapsed_time(self, end):
        return 0.25


@pytest.fixture
def cuda(monkeypatch):
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    replaced = {
        "CUDAGraph": _Graph,
        "Event": _Event,
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "graph_pool_handle": lambda: (0, 1),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(_Graph, "living", 0)
    monkeypatch.setattr(_Graph, "captured", 0)


def test_nothing_is_collected_during_a_capture(cuda):
    # An older graph that dies then ends the capture.
    collects = []
    CallTimer(lambda pair: collects.append(gc.isenabled()), torch.zeros(1, 1)).microseconds((0, 45))
    assert collects == [True, False]  # A run, then its capture.
    assert gc.isenabled()


def test_one_pair_after_the_other_is_captured(cuda):
    runs = []
    timer = CallTimer(runs.append, torch.zeros(1, 1))
    assert [timer.microseconds(pair) for pair in ((0, 45), (1, 45), (1, 45), (2, 45))] == [250.0] * 4
    assert runs == [(0, 45), (0, 45), (1, 45), (1, 45), (2, 45), (2, 45)]  # A run, then its capture.
    assert _Graph.living == 1
