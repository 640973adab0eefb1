"""Records an implementation's launches at the first call of a size and replays them at later calls."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

from moereg.backends._loaded import Call, Implementation
from moereg.backends._triton.work import Way
from moereg.backends._triton.workspace import plan_bytes
from moereg.experts import Experts
from moereg.kernels.launch.device import can_overlap
from moereg.kernels.launch.replay import LaunchRecording, recording

# Triton specializes on pointers that are multiples of this, so recordings hold only for such pointers.
_POINTER_ALIGNMENT = 16

# About 24 KB each on the host, per layer; the least recently used one is dropped.
_MAX_RECORDINGS = 128


class Recorded(Implementation):
    """Records and replays launches; a subclass names the weights that its kernels take, and selects the way.

    Attributes:
        recordings: Recordings by strides, tokens, the output's dtype, device and the set of present tensors; the
            problem fixes everything else that a launch depends on, except pointers. The most recently used is last.
    """

    recorded_weights: ClassVar[tuple[str, ...]] = ()
    """Names of the kernels' weights, including optional ones."""

    shortest_tile: ClassVar[int]
    """The fewest rows per tile in the shipped configurations."""

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        self.recordings: dict[tuple[Any, ...], LaunchRecording] = {}

    def plan_bytes(self, num_tokens: int) -> int:
        """Bytes of the plan at the front of the second workspace, for T tokens (max_T in the batched format)."""
        return plan_bytes(self.problem, num_tokens, self.shortest_tile)

    @abc.abstractmethod
    def work(self, call: Call, overlap: bool) -> Any:
        """The arguments of the call's way."""

    @abc.abstractmethod
    def select(self, call: Call) -> Way[Any]:
        """Selects the call's way."""

    def launch(self, call: Call) -> None:
        """Runs without a recording."""
        self.select(call).run(self.work(call, can_overlap(call.out.device)))

    def run(self, call: Call) -> None:
        """Launches a few kernels; no allocation, no host synchronization."""
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
        # Tokens are the second to last dimension in either format.
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
