"""Records an implementation's launches at the first call of a size and replays them at later calls."""

from __future__ import annotations

import abc
import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch

from moereg.backends._loaded import Call, Implementation
from moereg.backends._triton.work import Schedule
from moereg.backends._triton.workspace import plan_bytes
from moereg.experts import Experts
from moereg.kernels.launch.device import can_overlap
from moereg.kernels.launch.remembered import POINTER_ALIGNMENT, replay_or_record
from moereg.weights.permuted import PermutedWeights


@functools.lru_cache(maxsize=1024)
def shape_of_layer(*_facts: Hashable) -> object:
    """A key that layers with equal facts share, quick to hash: comparing a problem takes as long as a launch."""
    return object()


class Recorded(Implementation):
    """Records and replays launches; a subclass names the weights that its kernels take, and selects the schedule.

    Layers of one shape share recordings: a model's first layer records a number of tokens that the model has not seen
    yet, and the others replay it.
    """

    recorded_weights: ClassVar[tuple[str, ...]] = ()
    """Names of the kernels' weights, including optional ones."""

    arriving: ClassVar[tuple[str, ...]] = ()
    """Those of them that come with each call, of a shape that follows from its tokens."""

    shortest_tile: ClassVar[int]
    """The fewest rows per tile in the shipped configurations."""

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        self.layer_key = shape_of_layer(type(self), self.problem, self.computes, str(self.platform))
        # One value, since layers and threads may share this object. Weakly, since it holds no weights.
        self._keyed: tuple[Callable[[], object], object] = (lambda: None, None)

    def shared_key(self, weights: PermutedWeights, tensors: Sequence[torch.Tensor | None]) -> Hashable:
        """Equal for layers whose launches differ in pointers alone; `tensors` are those of `recorded_weights`."""
        keyed, key = self._keyed
        if keyed() is not weights:
            named = zip(self.recorded_weights, tensors, strict=True)
            fixed = ((name, one) for name, one in named if one is not None and name not in self.arriving)
            kinds = tuple((name, one.dtype, one.shape, one.stride()) for name, one in fixed)
            key = shape_of_layer(self.layer_key, kinds)
            self._keyed = weakref.ref(weights), key
        return key

    def plan_bytes(self, num_tokens: int) -> int:
        """Bytes of the plan at the front of the second workspace, for T tokens (max_T in the batched format)."""
        return plan_bytes(self.problem, num_tokens, self.shortest_tile)

    @abc.abstractmethod
    def work(self, call: Call, overlap: bool) -> Any:
        """The arguments of the call's schedule."""

    @abc.abstractmethod
    def select(self, call: Call) -> Schedule[Any]:
        """Selects the call's schedule."""

    def launch(self, call: Call) -> None:
        """Runs without a recording."""
        self.select(call).run(self.work(call, can_overlap(call.out.device)))

    def run(self, call: Call) -> None:
        """Launches a few kernels; no allocation, no host synchronization."""
        out, inputs, weights, workspace13, workspace2 = call
        held = [weights.get(name) for name in self.recorded_weights]
        tensors = (
            out,
            inputs.hidden_states,
            inputs.topk_ids,
            inputs.topk_weights,
            inputs.expert_num_tokens,
            inputs.expert_map,
            workspace13,
            workspace2,
            *held,
        )
        device = out.device
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        all_bits = missing = 0
        for number, pointer in enumerate(pointers):
            all_bits |= pointer
            if not pointer:
                missing |= 1 << number
        if device.type != "cuda" or all_bits % POINTER_ALIGNMENT:
            self.launch(call)
            return
        hidden_states = inputs.hidden_states
        # Tokens are the second to last dimension in either format.
        sizes = hidden_states.stride(), hidden_states.shape[-2], out.stride(-2), out.dtype
        key = (self.shared_key(weights, held), *sizes, device.index, missing)
        replay_or_record(key, functools.partial(self.launch, call), tensors, pointers)
