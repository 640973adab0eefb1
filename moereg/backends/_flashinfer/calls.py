"""Layers on the entry points of FlashInfer other than `cutlass_fused_moe`: what they share.

Routes are given as local expert ids and fp32 weights, -1 for a route without a local expert. So the kernels take every
rank for rank 0, and any placement works. Tokens are quantized by moereg's own kernel, bit for bit as `moereg.quantize`
does: FlashInfer has kernels for this too, but compiles them with nvcc at first use.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Final

import torch

from moereg.backends._loaded import Call, Implementation
from moereg.backends._triton.workspace import row_format, row_pieces
from moereg.backends._workspace import Piece, bytes_of, cut
from moereg.experts import Experts
from moereg.kernels.quantized.operands import QuantizedRows, Quantizer
from moereg.kernels.quantized.rows import RouteIds, quantize_rows
from moereg.kernels.rows.direct import local_routes
from moereg.runtime.progress import long_wait
from moereg.spec.problem import MoEProblem
from moereg.weights.layouts import ALIGNMENT, aligned

logger: Final = logging.getLogger("moereg")

_DONE: Final[set[tuple[str, MoEProblem]]] = set()
"""Backends and problems that this process has called."""


class LocalRoutes(Implementation):
    """Standard format: kernels that take local routes and, where the scheme says so, quantized tokens.

    Attributes:
        coded: Format of quantized tokens, or None.
    """

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        activation = self.computes.activation
        self.coded = None if activation is None else row_format(activation)

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Routes and quantized tokens. FlashInfer allocates the kernels' own buffers."""
        return (0,), (bytes_of(self.pieces(num_tokens).values()) // self.problem.torch_dtype.itemsize,)

    def pieces(self, num_tokens: int) -> dict[str, Piece]:
        """The second workspace, by name."""
        shape = (num_tokens, self.problem.top_k)
        pieces = {"topk_ids": Piece(shape, torch.int32), "topk_weights": Piece(shape, torch.float32)}
        if (activation := self.computes.activation) is not None:
            coded = row_pieces(activation, num_tokens, self.problem.hidden_size)
            pieces |= zip(("codes", "scales", "global_scales"), coded, strict=False)
        return pieces

    def place_routes(self, call: Call) -> dict[str, torch.Tensor]:
        """The pieces of a call, with `topk_ids` [T,K] int32 and `topk_weights` [T,K] fp32 written."""
        inputs, num_local = call.inputs, self.problem.num_local_experts
        pieces = self.pieces(len(inputs.hidden_states))
        views = cut(call.workspace2.view(-1).view(torch.uint8), *pieces.values())
        scratch = dict(zip(pieces, views, strict=True))
        local_routes(
            scratch["topk_ids"],
            scratch["topk_weights"],
            inputs.topk_ids,
            inputs.topk_weights,
            inputs.expert_map,
            num_local if inputs.expert_map is None else len(inputs.expert_map),
            num_local,
        )
        return scratch

    def quantize_tokens(self, call: Call, scratch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes codes [T, H] and scales [T, G] to scratch memory; a static or global scale is `a13_scale`, [1]."""
        assert self.coded is not None
        num_local = self.problem.num_local_experts
        rows = QuantizedRows(scratch["codes"], scratch["scales"], self.coded.group, scratch.get("global_scales"))
        quantizer = Quantizer(self.coded, call.weights.get("a13_scale"))
        ids = RouteIds(scratch["topk_ids"], None, num_local, num_local)
        quantize_rows(rows, aligned(call.inputs.hidden_states), quantizer, ids)
        return rows.q, rows.scale


@contextlib.contextmanager
def first_call(
    backend: str, problem: MoEProblem, seconds: float, avoid: str, out: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Announces a layer's first call in this process, until one call has succeeded.

    Args:
        backend, problem: The kernels' backend, and the layer.
        seconds, avoid: As in `long_wait`, if nothing was compiled before.
        out: Contiguous; if its device is capturing a CUDA graph, a warning says so.

    Yields:
        The output to write, for kernels with vector stores: `out`, or aligned memory that is copied to it.
    """
    key = (backend, problem)
    with contextlib.ExitStack() as stack:
        if key not in _DONE:
            what = f"compiling kernels of {backend} for {problem}"
            if out.is_cuda and torch.cuda.is_current_stream_capturing():
                logger.warning("%s while a CUDA graph is captured, which may fail; call the layer once before", what)
            stack.enter_context(long_wait(what, seconds, avoid))
        result = out if out.data_ptr() % ALIGNMENT == 0 else torch.empty_like(out)
        yield result
        if result is not out:
            out.copy_(result)
    _DONE.add(key)
