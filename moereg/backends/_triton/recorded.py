"""Implementations whose launches are recorded at the first call of a size and replayed at later ones."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

from moereg.backends._loaded import Call, Implementation
from moereg.backends._triton.work import Way
from moereg.backends._triton.workspace import plan_bytes
from moereg.experts import Experts
from moereg.kernels.launch.device import can_overlap
from moereg.kernels.launch.replay import LaunchRecording, recording

# Triton compiles pointers that are multiples of this into wider loads, so recordings hold for such pointers only.
_POINTER_ALIGNMENT = 16

# About 24 KB each on the host, and every layer has its own; the one that was not used for longest goes.
_MAX_RECORDINGS = 128


class Recorded(Implementation):
    """A subclass says which tensors of its weights kernels are given, and launches.

    Attributes:
        recordings: By strides, tokens, the output's dtype, device and which tensors are present; the problem fixes
            everything else that a launch depends on, except pointers. The latest used is last.
    """

    recorded_weights: ClassVar[tuple[str, ...]] = ()
    """Names, of those that may be absent too."""

    shortest_tile: ClassVar[int]
    """Rows of the shortest tile of the shipped configurations."""

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        self.recordings: dict[tuple[Any, ...], LaunchRecording] = {}

    def plan_bytes(self, num_tokens: int) -> int:
        """In front of the second workspace, for a call of that many tokens (max_T in the batched format)."""
        return plan_bytes(self.problem, num_tokens, self.shortest_tile)

    @abc.abstractmethod
    def work(self, call: Call, overlap: bool) -> Any:
        """The arguments of the way that a call takes."""

    @abc.abstractmethod
    def select(self, call: Call) -> Way[Any]:
        """The way that a call takes."""

    def launch(self, call: Call) -> None:
        """`run` without a recording."""
        self.select(call).run(self.work(call, can_overlap(call.out.device)))

    def run(self, call: Call) -> None:
        """A few launches; no allocation, no host synchronization."""
        out, inputs, weights, workspace13, workspace2 = call
        tensors = (
            out,
            inputs.hidden_states,
            inputs.topk_ids,
            inputs.topk_weights,
            inputs.expert_num_tokens,
            inputs.expert_map,
            workspace13,
            workspace2,
            *(weights.get(name) for name in self.recorded_weights),
        )
        device = out.device
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        all_bits = missing = 0
        for number, pointer in enumerate(pointers):
            all_bits |= pointer
            if not pointer:
                missing |= 1 << number
        if device.type != "cuda" or all_bits % _POINTER_ALIGNMENT:
            self.launch(call)
            return
        hidden_states = inputs.hidden_states
        # The last dimension but one is tokens in either format.
        key = (hidden_states.stride(), hidden_states.shape[-2], out.stride(-2), out.dtype, device.index, missing)
        recorded = self.recordings.pop(key, None)
        if recorded is None:
            with recording(tensors) as recorded:
                self.launch(call)
            if len(self.recordings) >= _MAX_RECORDINGS:
                self.recordings.pop(next(iter(self.recordings)), None)
        elif recorded.complete:
            recorded.replay(pointers)
        else:
            self.launch(call)
        self.recordings[key] = recorded
