"""One layer on SonicMoE. Loads SonicMoE, whose import takes seconds."""

from __future__ import annotations

import threading
from typing import Final

import torch
import triton
from sonicmoe.enums import ActivationType
from sonicmoe.functional.forward import _down_projection_forward, _up_projection_forward

from moereg.author import ExpertInputs, MoEProblem, PermutedWeights
from moereg_sonic.kernels import sum_routes_kernel
from moereg_sonic.routes import sort_routes

_ACTIVATIONS: Final = {"silu": ActivationType.SWIGLU, "gelu_tanh": ActivationType.GEGLU}
_COLUMNS_AT_A_TIME: Final = 1024
_LOCK: Final = threading.Lock()
"""QuACK keeps a call's arguments in its tuner, and CuTe DSL compiles on one thread at a time."""


class SonicLayer:
    """The two products of a layer, by SonicMoE's kernels for inference."""

    def __init__(self, problem: MoEProblem) -> None:
        """Names the activation; nothing is compiled yet.

        Args:
            problem: The layer.
        """
        self._problem = problem
        self._activation = _ACTIVATIONS[problem.activation.name].value

    def run(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Runs the layer; see `Experts.apply`. Each number of tokens compiles and times kernels at its first call."""
        problem = self._problem
        num_tokens, top_k = inputs.topk_ids.shape
        routes = sort_routes(inputs.topk_ids, problem.num_local_experts, inputs.expert_map)
        hidden_states = inputs.hidden_states
        if hidden_states.data_ptr() % 16:
            hidden_states = hidden_states.clone()
        with _LOCK:
            _up_projection_forward(
                x=hidden_states,
                w1=weights["w13"].permute(1, 2, 0),
                h=None,  # Another tensor would be written, which is for a backward pass.
                a=workspace2,
                b1=None,
                expert_frequency_offset=routes.offsets,
                x_gather_idx=routes.tokens,
                activation_type=self._activation,
                is_inference_mode_enabled=True,
            )
            _down_projection_forward(
                w2=weights["w2"].permute(1, 2, 0),
                a=workspace2,
                y=workspace13,
                b2=None,
                expert_frequency_offset=routes.offsets,
            )
        sum_routes_kernel[(num_tokens, triton.cdiv(problem.hidden_size, _COLUMNS_AT_A_TIME))](
            workspace13,
            inputs.topk_weights,
            routes.place,
            routes.offsets[problem.num_local_experts :],
            out,
            problem.hidden_size,
            TOP_K=top_k,
            BLOCK=min(_COLUMNS_AT_A_TIME, triton.next_power_of_2(problem.hidden_size)),
        )
