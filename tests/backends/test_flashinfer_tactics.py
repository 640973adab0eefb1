"""Finding FlashInfer's tactics by timing, with a clock and times that are made up."""

import contextlib
import gc
import json
import logging
import types

import pytest
import torch

from moereg.backends._flashinfer import tactics
from moereg.backends._flashinfer.tactics import UNTUNED, CallTimer, TacticStore, Tuner, bucket_of

_FIRST, _SECOND = range(4), range(4, 9)


class _Layer:
    """A call whose time depends on its tactics.

    Attributes:
        seconds: Of the made-up clock.
        tried: Pairs in the order of their first run.
    """

    def __init__(self, times, broken=(), wrong=(), step=0.001, is_finite=True):
        self.times, self.broken, self.wrong, self.step, self.is_finite = times, broken, wrong, step, is_finite
        self.seconds = 0.0
        self.tried = []
        self.num_tunings = 0

    def microseconds(self, pair):
        self.seconds += self.step
        if pair not in self.tried:
            self.tried.append(pair)
        if set(pair) & set(self.broken):
            raise RuntimeError("this tile needs more shared memory")
        first, second = pair
        assert first in _FIRST
        assert second in _SECOND
        return self.times.get(first, 50.0) + self.times.get(second, 50.0)

    def difference(self, pair, reference):
        assert not set(reference) & {-1, *self.broken}
        if not self.is_finite:
            return None
        return 0.5 if set(pair) & set(self.wrong) else 0.001

    def pair(self, tuner, num_tokens=16, is_capturing=False):
        def timer():
            self.num_tunings += 1
            return self

        return tuner.pair(num_tokens, lambda: (list(_FIRST), list(_SECOND)), timer, lambda: is_capturing)


@pytest.fixture
def store(tmp_path):
    return TacticStore(tmp_path / "deep" / "tactics.json")


def _tuner(layer, store):
    return Tuner("a layer", store, clock=lambda: layer.seconds)


def test_the_fastest_tactic_of_each_product_is_taken(store, caplog):
    layer = _Layer({2: 10.0, 7: 12.0})
    with caplog.at_level(logging.INFO, "moereg"):
        assert layer.pair(_tuner(layer, store)) == (2, 7)
    assert sorted(layer.tried) == sorted({*((first, 4) for first in _FIRST), *((2, second) for second in _SECOND)})
    assert caplog.messages[0] == (
        "timing 9 tactics of flashinfer_cutlass for 16 to 31 tokens takes about 1 s; once for each layer shape, kept "
        f"in {store.path}"
    )


def test_tactics_that_raise_or_give_other_numbers_are_not_taken(store, caplog):
    layer = _Layer({1: 1.0, 2: 10.0, 7: 12.0, 8: 5.0}, broken=[1], wrong=[8])
    with caplog.at_level(logging.WARNING, "moereg"):
        assert layer.pair(_tuner(layer, store)) == (2, 7)
    assert "drops tactics (2, 8), whose numbers are wrong" in caplog.text


def test_a_bucket_is_tuned_once_and_kept_for_other_processes(store):
    layer = _Layer({2: 10.0, 7: 12.0})
    tuner = _tuner(layer, store)
    assert {layer.pair(tuner, tokens) for tokens in (16, 17, 31)} == {(2, 7)}
    assert layer.num_tunings == 1
    later = _Layer({})
    assert later.pair(_tuner(later, TacticStore(store.path)), 20) == (2, 7)
    assert later.num_tunings == 0
    other = _Layer({3: 10.0})
    assert other.pair(Tuner("another layer", store, clock=lambda: other.seconds))[0] == 3
    assert list(json.loads(store.path.read_text())["pairs"]) == ["a layer|T16", "another layer|T16"]


def test_tuning_ends_when_its_time_is_over(store, caplog):
    layer = _Layer({4: 60.0}, step=0.2)
    with caplog.at_level(logging.WARNING, "moereg"):
        first, second = layer.pair(_tuner(layer, store))
    assert first in _FIRST
    # Also the second product had a choice.
    assert second in _SECOND[1:]
    assert len(layer.tried) < len(_FIRST) + len(_SECOND) - 1
    assert (
        "may run with slow tactics, and the next process tunes again (of 9 tactics 2 were tried and 2 ran"
        in caplog.text
    )
    assert layer.seconds < 2 * tactics.SECONDS + 1
    # Nor for the rest of the process.
    layer.pair(_tuner(layer, store))
    assert layer.num_tunings == 1
    assert not store.path.exists()


def test_one_long_call_is_enough_for_many_tactics(store):
    """A first run of a millisecond says enough."""
    layer = _Layer({2: 3000.0, 7: 3000.0, **dict.fromkeys((0, 1, 3, 4, 5, 6, 8), 9000.0)}, step=0.04)
    assert layer.pair(_tuner(layer, store)) == (2, 7)
    assert layer.seconds < 1.0


def test_a_tile_that_the_device_refuses_may_be_the_first_one(store):
    layer = _Layer({2: 10.0, 7: 12.0}, broken=[0, 4])
    assert layer.pair(_tuner(layer, store)) == (2, 7)
    assert TacticStore(store.path).get("a layer|T16") == (2, 7)


@pytest.mark.parametrize(
    ("layer", "expected", "text"),
    [
        (
            _Layer({}, broken=_FIRST),
            UNTUNED,
            "first tactics, which can be 3 to 5 times slower (none could be timed: thi",
        ),
        (
            _Layer({2: 10.0, 7: 12.0}, is_finite=False),
            (0, 4),
            "first tactics that ran, which can be slow (the layer ma",
        ),
    ],
    ids=["raises", "not-finite"],
)
def test_what_was_not_found_is_not_kept(store, layer, expected, text, caplog):
    layer.tried.clear()
    with caplog.at_level(logging.WARNING, "moereg"):
        assert layer.pair(_tuner(layer, store)) == expected
        assert layer.pair(_tuner(layer, store)) == expected
    assert text in caplog.text
    assert len(caplog.messages) == 1
    assert not store.path.exists()


def test_tactics_that_nearly_all_raise_are_a_fault_and_not_a_result(store, caplog):
    layer = _Layer({}, broken=[1, 2, 3, 5, 6, 7, 8])
    with caplog.at_level(logging.WARNING, "moereg"):
        assert layer.pair(_tuner(layer, store)) == (0, 4)
    assert "7 raised, the last: this tile needs more shared memory" in caplog.text
    assert not store.path.exists()


def test_nothing_is_timed_while_a_graph_is_captured(store, caplog):
    layer = _Layer({2: 10.0, 7: 12.0})
    tuner = _tuner(layer, store)
    with caplog.at_level(logging.WARNING, "moereg"):
        assert layer.pair(tuner, 16, is_capturing=True) == UNTUNED
        assert layer.pair(tuner, 16, is_capturing=True) == UNTUNED
    assert len(caplog.messages) == 1
    assert "can be 3 to 5 times slower (a CUDA graph is captured before a call of 16 to 31 tokens" in caplog.text
    layer.pair(tuner, 64)
    assert layer.pair(tuner, 32, is_capturing=True) == (2, 7)
    assert "takes the tactics that it found for 64 tokens" in caplog.text
    assert layer.num_tunings == 1


def test_a_process_stays_with_what_a_capture_took(store):
    """Another pair would give other bits for equal inputs."""
    layer = _Layer({2: 10.0, 7: 12.0})
    tuner = _tuner(layer, store)
    assert layer.pair(tuner, 16, is_capturing=True) == UNTUNED
    assert layer.pair(tuner, 16) == UNTUNED
    assert layer.pair(_tuner(layer, store), 16) == UNTUNED
    assert layer.num_tunings == 0
    assert layer.pair(_tuner(layer, TacticStore(store.path)), 16) == (2, 7)


def test_flashinfers_own_choice_on_request_is_warned_of_once(store, monkeypatch, caplog):
    monkeypatch.setenv(tactics.SWITCH, "first")
    with caplog.at_level(logging.WARNING, "moereg"):
        for _ in range(60):
            layer = _Layer({2: 10.0})
            assert layer.pair(_tuner(layer, store)) == UNTUNED
            assert layer.num_tunings == 0
    assert len(caplog.messages) == 1
    assert "(MOEREG_FLASHINFER_TACTICS=first)" in caplog.text
    assert not store.path.exists()


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 2}', '{"schema": 1, "pairs": {"a": 3}}', "\x00"])
def test_a_file_that_cannot_be_read_is_replaced(store, content, caplog):
    store.path.parent.mkdir()
    store.path.write_text(content)
    with caplog.at_level(logging.WARNING, "moereg"):
        assert store.get("a") is None
        store.put("a", (1, 2))
    assert TacticStore(store.path).get("a") == (1, 2)


def test_a_folder_that_cannot_be_written_costs_a_warning_alone(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    store = TacticStore(tmp_path / "file" / "tactics.json")
    store.put("a", (1, 2))
    assert store.get("a") == (1, 2)
    assert "could not be written" in caplog.text


def test_two_processes_keep_both_of_what_they_found_and_the_first_of_two_pairs(store):
    other = TacticStore(store.path)
    assert store.get("a") is other.get("b") is None
    assert other.put("a", (1, 2)) == store.put("a", (5, 6)) == (1, 2)
    store.put("b", (3, 4))
    assert [TacticStore(store.path).get(name) for name in ("a", "b")] == [(1, 2), (3, 4)]


def test_buckets_are_powers_of_two():
    assert [bucket_of(tokens) for tokens in (1, 2, 3, 4, 7, 8, 4095, 4096)] == [1, 2, 2, 4, 4, 8, 2048, 4096]


# Timing a call, on a `torch.cuda` that is made up but for what torch asks of graphs and their pools.


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
