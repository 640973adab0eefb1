"""TensorRT-LLM's generated kernels through FlashInfer: sm100 and its family. No such machine has run this yet.

The kernels' own routing only sorts, since routes are given as local expert ids and fp32 weights. Other routes are -1,
which it drops. So the kernels take every rank for rank 0, and any placement works.

FlashInfer downloads the GEMMs as binaries at first use, some MiB per kind of weights.

T tokens, K experts per token, E local experts, H hidden, I intermediate.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping
from typing import Any, Final

import torch

from moereg.backends._flashinfer import shuffles
from moereg.backends._flashinfer.coded import CodedTokens
from moereg.backends._flashinfer.first_call import first_call
from moereg.backends._flashinfer.scratch import Piece, aligned_result, carved, num_bytes
from moereg.backends._loaded import Call, Implementation
from moereg.experts import Experts
from moereg.kernels.rows.direct import local_routes
from moereg.weights.layouts import aligned
from moereg.weights.permuted import ExpertWeights, PermutedWeights

_COMPILING_SECONDS: Final = 300.0
"""A guess: nvcc compiles the launcher, and FlashInfer downloads kernels."""

_KEPT: Final = "launcher and downloads are kept in FlashInfer's cache"


class TrtLlm(Implementation):
    """One entry point: prepares routes, quantizes tokens if it wants that, and calls it.

    Attributes:
        coded: How tokens are quantized, or None.
    """

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        activation = self.computes.activation
        self.coded = None if activation is None else CodedTokens(activation, self.problem.hidden_size)

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Routes and quantized tokens. The kernels' own buffers come from torch's allocator."""
        return (0,), (num_bytes(self._pieces(num_tokens)) // self.problem.torch_dtype.itemsize,)

    def run(self, call: Call) -> None:
        problem, inputs, weights = self.problem, call.inputs, call.weights
        scratch = carved(call.workspace2, self._pieces(len(inputs.hidden_states)))
        num_ids = problem.num_local_experts if inputs.expert_map is None else len(inputs.expert_map)
        local_routes(
            scratch["topk_ids"],
            scratch["topk_weights"],
            inputs.topk_ids,
            inputs.topk_weights,
            inputs.expert_map,
            num_ids,
            problem.num_local_experts,
        )
        tokens = {"hidden_states": aligned(inputs.hidden_states)}
        if self.coded is not None:
            codes, scales = self.coded.run(
                scratch,
                tokens["hidden_states"],
                weights.get("a13_scale"),
                scratch["topk_ids"],
                problem.num_local_experts,
            )
            tokens = self.coded_arguments(scratch, codes, scales)
        entry, options = self._call
        waiting = first_call("flashinfer_trtllm", problem, _COMPILING_SECONDS, _KEPT, on=call.out)
        with waiting, aligned_result(call.out) as out:
            entry(
                topk_ids=self.routes(scratch),
                **tokens,
                **self.weight_arguments(weights),
                num_experts=problem.num_experts,
                top_k=problem.top_k,
                n_group=None,
                topk_group=None,
                intermediate_size=problem.intermediate_size,
                local_expert_offset=0,
                local_num_experts=problem.num_local_experts,
                routed_scaling_factor=None,
                do_finalize=True,
                output=out,
                **options,
            )

    @functools.cached_property
    def _call(self) -> tuple[Any, dict[str, Any]]:
        return self.entry(), self.options()

    @abc.abstractmethod
    def entry(self) -> Any:
        """Imports FlashInfer's function."""

    def routes(self, scratch: Mapping[str, torch.Tensor]) -> Any:
        """Ids and weights, or both packed in one tensor."""
        return scratch["topk_ids"], scratch["topk_weights"]

    def coded_arguments(
        self, scratch: Mapping[str, torch.Tensor], codes: torch.Tensor, scales: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Quantized tokens and scales as arguments of the entry point."""
        return {"hidden_states": codes, "hidden_states_scale": scales}

    @abc.abstractmethod
    def weight_arguments(self, weights: PermutedWeights) -> dict[str, torch.Tensor | None]:
        """Permuted weights as arguments of the entry point."""

    def options(self) -> dict[str, Any]:
        """Further arguments."""
        from flashinfer.tllm_enums import ActivationType, RoutingMethodType

        activation = ActivationType.Swiglu if self.problem.activation.gated else ActivationType.Relu2
        # Routes are given. This routing method is compiled for the most experts and choices.
        return {"activation_type": activation.value, "routing_method_type": RoutingMethodType.Renormalize.value}

    @property
    def halves(self) -> int:
        """2 if gated, else 1."""
        return self.problem.activation.num_halves

    def _pieces(self, num_tokens: int) -> dict[str, Piece]:
        shape = (num_tokens, self.problem.top_k)
        pieces = {"topk_ids": Piece(shape, torch.int32), "topk_weights": Piece(shape, torch.float32)}
        if self.coded is not None:
            pieces |= self.coded.pieces(num_tokens) | self.further_pieces(num_tokens)
        return pieces

    def further_pieces(self, num_tokens: int) -> dict[str, Piece]:
        """A subclass's further workspace, by name."""
        return {}

    def scalars(self, weights: ExpertWeights) -> dict[str, torch.Tensor]:
        """Alpha, beta and clamp as [E] fp32, where they differ from the plain function's."""
        activation = self.problem.activation
        given = {
            "gemm1_alpha": None if activation.alpha == 1.0 else activation.alpha,
            "gemm1_beta": activation.beta or None,
            "gemm1_clamp_limit": activation.limit,
        }
        like = weights.w13.new_empty(0, dtype=torch.float32)
        return {
            name: like.new_full((weights.num_experts,), value) for name, value in given.items() if value is not None
        }

    def shuffled(self, tensor: torch.Tensor, matrix: str, blocks: bool = False) -> torch.Tensor:
        """Permutes rows of w13 or w2 into the kernels' order, expert by expert.

        Args:
            tensor: [E, N, ...]: a matrix, its scales, or [E, N, 1] biases.
            matrix: `w13` or `w2`.
            blocks: Whether to split rows into column blocks of 128 bytes.
        """
        num_rows = tensor.shape[1]
        order = shuffles.gemm1_rows(num_rows, self.halves) if matrix == "w13" else shuffles.gemm2_rows(num_rows)
        rows = order.to(tensor.device)

        def permute(expert: torch.Tensor) -> torch.Tensor:
            data = expert.view(torch.uint8) if expert.element_size() == 1 else expert
            data = data.index_select(0, rows)
            return shuffles.blocks_of_columns(data) if blocks else data

        return shuffles.each_expert(tensor, permute, tensor.dtype)

    def shuffled_scales(self, scale: torch.Tensor, matrix: str) -> torch.Tensor:
        """Scales [E, N, G] in their matrix's row order and blocks of 128 x 4; the shape stays."""
        shuffled = self.shuffled(scale, matrix)
        return shuffles.each_expert(shuffled, shuffles.swizzled_scales).view(scale.shape)
