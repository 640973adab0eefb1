"""Experts whose launches are recorded at the first call of a size and replayed at later ones."""

from __future__ import annotations

import abc
import os
from typing import TYPE_CHECKING, ClassVar

import torch

from moereg.experts import ExpertInputs, Experts
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.quant import QuantScheme
from moereg.weights import PermutedWeights

if TYPE_CHECKING:
    from moereg.kernels.launch.replay import LaunchRecording

# Triton compiles pointers that are multiples of this into wider loads, so recordings hold for such pointers only.
_POINTER_ALIGNMENT = 16

# About 24 KB each on the host, and every layer has its own; the one that was not used for longest goes.
_MAX_RECORDINGS = 128


class RecordedExperts(Experts):
    """A subclass says which tensors of its weights kernels are given, and launches."""

    recorded_weights: ClassVar[tuple[str, ...]] = ()
    """Names, of those that may be absent too."""

    def __init__(self, problem: MoEProblem, platform: Platform, computes: QuantScheme | None = None) -> None:
        super().__init__(problem, platform, computes)
        # By strides, tokens, device and which tensors there are; the problem fixes everything else that a launch
        # depends on but pointers. The latest used is last.
        self._recordings: dict[tuple[tuple[int, ...], int, int, int | None, int], LaunchRecording] = {}

    @classmethod
    def device_types(cls, platform: Platform) -> tuple[str, ...]:
        """The platform's, and the CPU where Triton's interpreter was asked for."""
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return (platform.device_type, "cpu") if interpreted else (platform.device_type,)

    def apply(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """A few launches; no allocation, no host synchronization."""
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
            self._launch(out, inputs, weights, workspace13, workspace2)
            return
        hidden_states = inputs.hidden_states
        # The last dimension but one is tokens in either format.
        key = (hidden_states.stride(), hidden_states.shape[-2], out.stride(-2), device.index, missing)
        recorded = self._recordings.pop(key, None)
        if recorded is None:
            from moereg.kernels.launch.replay import recording

            with recording(tensors) as recorded:
                self._launch(out, inputs, weights, workspace13, workspace2)
            if len(self._recordings) >= _MAX_RECORDINGS:
                self._recordings.pop(next(iter(self._recordings)), None)
        elif recorded.complete:
            recorded.replay(pointers)
        else:
            self._launch(out, inputs, weights, workspace13, workspace2)
        self._recordings[key] = recorded

    @abc.abstractmethod
    def _launch(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """`apply` without a recording."""
