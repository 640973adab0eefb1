"""One layer on SonicMoE. Loads SonicMoE, which needs a GPU to be imported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import torch
import triton
from sonicmoe.enums import TENSORMAP, ActivationType
from sonicmoe.functional.forward import _down_projection_forward, _up_projection_forward

from moereg.author import ExpertInputs, MoEProblem, PermutedWeights
from moereg_sonic.kernels import sum_routes_kernel
from moereg_sonic.routes import sort_routes

_ACTIVATIONS: Final = {
    "silu": ActivationType.SWIGLU,
    "gelu_tanh": ActivationType.GEGLU,
    "relu2": ActivationType.RELU_SQ,
}
_COLUMNS_AT_A_TIME: Final = 1024

_TENSORMAPS: Final[dict[tuple[Any, ...], Any]] = {}
"""Descriptors in device memory of each compiled kernel."""

_LOCK: Final = threading.Lock()


class SonicLayer:
    """The two products of a layer, by SonicMoE's kernels for inference."""

    def __init__(self, problem: MoEProblem) -> None:
        """Names the kernels; nothing is compiled yet.

        Args:
            problem: The layer.
        """
        self._problem = problem
        self._activation = _ACTIVATIONS[problem.activation.name]
        sizes = (problem.num_local_experts, problem.hidden_size, problem.intermediate_size)
        self._up_key = ("up", *sizes, self._activation.value)
        self._down_key = ("down", *sizes)

    def run(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Runs the layer; see `Experts.apply`. Compiles kernels at its first call."""
        problem = self._problem
        num_tokens, top_k = inputs.topk_ids.shape
        num_routes = num_tokens * top_k
        routes = sort_routes(inputs.topk_ids, problem.num_local_experts, inputs.expert_map)
        num_columns = problem.activation.num_halves * problem.intermediate_size
        first = workspace13.view(-1)[: num_routes * num_columns].view(num_routes, num_columns)
        rows = workspace13.view(-1)[: num_routes * problem.hidden_size].view(num_routes, problem.hidden_size)
        hidden_states = inputs.hidden_states
        if hidden_states.data_ptr() % 16:
            hidden_states = hidden_states.clone()
        stream = torch.cuda.current_stream(hidden_states.device).cuda_stream
        with _LOCK:
            _call(
                _up_projection_forward,
                self._up_key,
                x=hidden_states,
                w1=weights["w13"].permute(1, 2, 0),
                z=first,
                y1=workspace2,
                b1=None,
                expert_frequency_offset=routes.offsets,
                expert_schedule_order=None,
                x_gather_idx=routes.tokens,
                stream_id=stream,
                activation_type=self._activation.value,
                is_glu_activation=problem.activation.gated,
                is_inference_mode_enabled=True,
            )
            _call(
                _down_projection_forward,
                self._down_key,
                w2=weights["w2"].permute(1, 2, 0),
                y1=workspace2,
                y2=rows,
                b2=None,
                expert_frequency_offset=routes.offsets,
                expert_schedule_order=None,
                x_gather_idx=routes.tokens,
                stream_id=stream,
            )
        sum_routes_kernel[(num_tokens, triton.cdiv(problem.hidden_size, _COLUMNS_AT_A_TIME))](
            rows,
            inputs.topk_weights,
            routes.place,
            out,
            problem.hidden_size,
            TOP_K=top_k,
            BLOCK=min(_COLUMNS_AT_A_TIME, triton.next_power_of_2(problem.hidden_size)),
        )


def _call(function: Callable[..., None], key: tuple[Any, ...], **arguments: Any) -> None:
    """Calls a kernel of SonicMoE with descriptors of its own.

    SonicMoE keeps one set for all kernels of a kind, those of the kernel that was compiled last. Kernels of other sizes
    may need twice as many, and would write behind them.
    """
    cache: dict[Any, Any] = function.compile_cache  # type: ignore[attr-defined]
    if key in _TENSORMAPS:
        cache[TENSORMAP] = _TENSORMAPS[key]
    function(**arguments)
    _TENSORMAPS[key] = cache[TENSORMAP]
