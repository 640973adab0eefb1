"""A layer read from a checkpoint: its experts and its router."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moereg.errors import ArgumentError
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.routing import RouterSpec
from moereg.runtime.memory import format_bytes
from moereg.runtime.torch_state import in_plain_torch
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class CheckpointLayer:
    """The routed experts of one layer of a checkpoint, and its router.

    Attributes:
        problem: The layer, in the dtype that it was loaded in.
        weights: Canonical weights of local experts; quantized if the checkpoint is.
        model_type: The type in config.json; for multimodal models the language model's.
        layer: Index in the whole model.
        router: How the model routes.
        router_weight: [E,H], all experts, in the problem's dtype; fp32 if `router.fp32_weight`.
        router_bias: [E] in the problem's dtype, or None.
        correction_bias: [E] fp32, DeepSeek-V3's bias for choosing experts, or None.
        ep_rank: Local experts start at `ep_rank * num_local_experts`.
        has_shared_experts: Whether the model's layer also has experts that take every token. They are not part of
            this layer: the model combines their output with the kernel's.
    """

    problem: MoEProblem
    weights: ExpertWeights
    model_type: str
    layer: int
    router: RouterSpec
    router_weight: torch.Tensor
    router_bias: torch.Tensor | None = None
    correction_bias: torch.Tensor | None = None
    ep_rank: int = 0
    has_shared_experts: bool = False

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes for the layer's user, one line each; usually none."""
        if not self.has_shared_experts:
            return ()
        return (
            f"layer {self.layer} also has shared experts, which are not in it: combine their output with the kernel's "
            "as the model does",
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of experts and router."""
        router = (self.router_weight, self.router_bias, self.correction_bias)
        tensors = [*self.weights.tensors().values(), *(tensor for tensor in router if tensor is not None)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def __repr__(self) -> str:
        others = ", shared experts left out" if self.has_shared_experts else ""
        return (
            f"CheckpointLayer({self.model_type} layer {self.layer}, {self.problem}, {self.router.kind}{others}, "
            f"{format_bytes(self.num_bytes)} on {self.weights.w13.device})"
        )

    @in_plain_torch
    def route(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes tokens like the checkpoint's own router, with logits in the model's dtype for them.

        Args:
            hidden_states: [T,H] in the problem's dtype, on the weights' device.

        Returns:
            topk_weights [T,K] fp32 and topk_ids [T,K] int32, global experts. Models that round the weights to the
            logits' dtype differ by that rounding, and those that round scores before choosing (DeepSeek-V4, LFM2,
            Mistral 4 and DBRX in transformers) may choose another expert in 16 bits if two are nearly tied.

        Raises:
            ArgumentError: hidden_states have another shape, dtype or device.
        """
        expected = (self.problem.hidden_size, self.problem.torch_dtype, self.router_weight.device)
        columns = hidden_states.shape[1] if hidden_states.dim() == 2 else None
        if (columns, hidden_states.dtype, hidden_states.device) != expected:
            raise ArgumentError(
                f"hidden_states must be [T,{expected[0]}] {expected[1]} on {expected[2]}, got "
                f"{list(hidden_states.shape)} {hidden_states.dtype} on {hidden_states.device}; convert them"
            )
        dtype = torch.float32 if self.router.fp32_logits else self.router_weight.dtype
        bias = None if self.router_bias is None else self.router_bias.to(dtype)
        logits = torch.nn.functional.linear(hidden_states.to(dtype), self.router_weight.to(dtype), bias)
        return self.router.route(logits, self.correction_bias)

    def make_kernel(self, selection: Selection | None = None, **keywords: Any) -> MoEKernel:
        """Calls `moereg.make_kernel` for this layer and its rank.

        Args:
            selection: From `select_backend(layer.problem)`; made here if None.
            **keywords: Arguments of `make_kernel` except `ep_rank`.
        """
        return make_kernel(self.problem, self.weights, selection, ep_rank=self.ep_rank, **keywords)
