"""Names of the conformance kit as tests use them; the kit itself is `moereg.testing`."""

from __future__ import annotations

import torch

from moereg.discovery import current_platform
from moereg.layer import MoEKernel
from moereg.testing import cases
from moereg.testing.cases import Case, claimed_problems, runnable_platform
from moereg.testing.inputs import Inputs, make_expert_map, make_inputs, make_plain_weights, make_weights
from moereg.weights import ExpertWeights

__all__ = [
    "Case",
    "Inputs",
    "build",
    "claimed_problems",
    "current_platform",
    "make_expert_map",
    "make_inputs",
    "make_plain_weights",
    "make_weights",
    "runnable_platform",
    "test_device",
]

test_device = cases.default_device


def build(case: Case, device: torch.device, weights: ExpertWeights | None = None) -> MoEKernel:
    """The cell's kernel on random weights."""
    assert device == case.device
    return cases.build(case, weights)
