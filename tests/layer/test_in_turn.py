"""Threads share a kernel: a call sees the weights of before a write or of after it, never some of both."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moereg.errors import BackendError
from moereg.layer.factory import MoEKernel
from moereg.layer.held_weights import InTurn
from moereg.nn.module import MoELayer
from moereg.testing.inputs import make_inputs, make_weights
from moereg.weights.permuted import PermutedWeights
from tests.layer.small_layers import CPU, INPUTS, call, kernel_of, problem_of, replaced
from tests.support.fakes import FakeExperts

WAIT_SECONDS = 0.3
"""Time in which the other thread would finish if nothing held it."""

OLD, NEW = make_weights(problem_of(), CPU), make_weights(problem_of(), CPU, seed=1)


def _reload(kernel: MoEKernel) -> None:
    kernel.reload(NEW)


def _update(kernel: MoEKernel) -> None:
    kernel.update_expert(3, NEW.expert(3))


WRITES = pytest.mark.parametrize("write", [_reload, _update])


class _Meanwhile:
    """Runs something in another thread, at one moment and for a while."""

    def __init__(self, does: Callable[[], Any]) -> None:
        self.found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self.found.append(does()), daemon=True)

    def begin(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
            self._thread.join(WAIT_SECONDS)

    def result(self) -> Any:
        self._thread.join(60)
        (found,) = self.found
        return found


@WRITES
def test_a_write_waits_for_the_call(write: Callable[[MoEKernel], None], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(problem_of(), weights=OLD, own_weights=True)
    expected = call(kernel, INPUTS)
    writing = _Meanwhile(lambda: write(kernel))
    apply = FakeExperts.apply

    def slow(self: FakeExperts, weights: PermutedWeights, **arguments: Any) -> None:
        writing.begin()
        apply(self, weights=weights, **arguments)

    monkeypatch.setattr(FakeExperts, "apply", slow)
    assert torch.equal(call(kernel, INPUTS), expected)
    writing.result()
    assert not torch.equal(call(kernel, INPUTS), expected)


@WRITES
def test_a_call_waits_for_the_write(write: Callable[[MoEKernel], None], monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(problem_of(), weights=OLD, own_weights=True)
    after = NEW if write is _reload else replaced(OLD, 3, NEW)
    calling = _Meanwhile(lambda: call(kernel, INPUTS))
    for name in ("copy_from", "write_expert"):
        whole = getattr(PermutedWeights, name)

        def half_way(self: PermutedWeights, *arguments: Any, whole: Any = whole) -> None:
            held = self["w2"].clone()
            whole(self, *arguments)
            new = self["w2"].clone()
            self["w2"].copy_(held)
            calling.begin()
            self["w2"].copy_(new)

        monkeypatch.setattr(PermutedWeights, name, half_way)
    write(kernel)
    assert torch.equal(calling.result(), call(kernel_of(problem_of(), weights=after), INPUTS))


def test_one_expert_of_a_layer_is_old_or_new_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of()
    layer, whole = MoELayer(problem, NEW), MoELayer(problem, replaced(NEW, 3, OLD))
    inputs = make_inputs(problem, 4, "uniform", CPU)

    def run(module: MoELayer) -> torch.Tensor:
        return module(*inputs.call)

    layer.prepare()
    calling = _Meanwhile(lambda: run(layer))
    write_expert = MoEKernel.update_expert

    def half_way(*arguments: Any, **keywords: Any) -> None:
        write_expert(*arguments, **keywords)
        with torch.no_grad():
            layer.w13.add_(0)  # The other call will read the parameters, w2 of which is not written yet.
        calling.begin()

    monkeypatch.setattr(MoEKernel, "update_expert", half_way)
    layer.w2.data = layer.w2.detach().clone()  # The kernel has a copy from now on.
    layer.update_expert(3, OLD.expert(3))
    assert torch.equal(calling.result(), run(whole))
    assert torch.equal(run(layer), run(whole))


def test_a_writer_may_call_and_write_inside() -> None:
    turn = InTurn()
    with turn.exclusive(), turn.exclusive():
        turn.begin(threading.get_ident())
        turn.end(threading.get_ident())
    assert (turn._calls, turn._writer) == ({}, None)


def test_a_call_that_raises_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_of(problem_of(), weights=OLD, own_weights=True)
    monkeypatch.setattr(FakeExperts, "apply", lambda: None)
    with pytest.raises(BackendError):
        call(kernel, INPUTS)
    kernel.reload(NEW)
    assert not kernel.held.in_turn._calls
