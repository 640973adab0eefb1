"""What a layer of `triton` selects for a call, on a CPU, where nothing runs."""

from __future__ import annotations

from typing import Any

import torch

from moereg.backends._loaded import Call, LoadedExperts
from moereg.experts import ExpertInputs
from moereg.weights import PermutedWeights


def select_way(experts: LoadedExperts, num_tokens: int) -> Any:
    """The way of a call with so many tokens."""
    problem = experts.problem
    hidden_states = torch.zeros(num_tokens, problem.hidden_size, dtype=problem.torch_dtype)
    topk_ids = torch.zeros(num_tokens, problem.top_k, dtype=torch.int32)
    inputs = ExpertInputs(hidden_states, topk_ids.float(), topk_ids)
    call = Call(hidden_states, inputs, PermutedWeights("none", {}), hidden_states, hidden_states)
    return experts.implementation.select(call)  # type: ignore[attr-defined]
