"""Quantizes tokens with moereg's own kernel, bit for bit as `moereg.quantize` does.

FlashInfer has kernels for this too, but compiles them with nvcc at first use.
"""

from __future__ import annotations

from typing import Final

import torch

from moereg.backends._flashinfer.scratch import Piece
from moereg.kernels.quantized.operands import QuantizedRows, Quantizer, RowFormat
from moereg.kernels.quantized.rows import RouteIds, quantize_rows
from moereg.quantize import element_of
from moereg.spec.quant_schemes import WHOLE, QuantFormat

__all__ = ["CodedTokens"]

_E8M0: Final = "float8_e8m0fnu"


class CodedTokens:
    """Quantizes tokens of one width.

    Attributes:
        fmt: Format of quantized values and scales: groups of columns, or one static scale for all tokens.
    """

    def __init__(self, fmt: QuantFormat, hidden_size: int) -> None:
        """Takes a format and a width that is a multiple of 128."""
        element = element_of(fmt)
        self.fmt = RowFormat(
            dtype=fmt.storage_dtype,
            min_code=element.min_value,
            max_code=element.max_value,
            group=0 if fmt.group[1] == WHOLE else fmt.group[1],
            e8m0=fmt.scale_dtype == _E8M0,
            static=fmt.static,
            global_scale=fmt.global_scale,
        )
        self._hidden_size = hidden_size
        self._columns = fmt.packed_columns(hidden_size)

    def pieces(self, num_tokens: int) -> dict[str, Piece]:
        """Scratch memory for `run`, by name."""
        pieces = {
            "codes": Piece((num_tokens, self._columns), self.fmt.dtype),
            "scales": Piece((num_tokens, self.fmt.num_groups(self._hidden_size)), self.fmt.scale_dtype),
        }
        if self.fmt.global_scale:
            pieces["global_scales"] = Piece((num_tokens,), torch.float32)
        return pieces

    def run(
        self,
        scratch: dict[str, torch.Tensor],
        hidden_states: torch.Tensor,
        static_scale: torch.Tensor | None,
        topk_ids: torch.Tensor,
        num_experts: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes codes [T, H] and scales [T, G] to scratch.

        Args:
            scratch: Tensors of `pieces`.
            hidden_states: [T, H], contiguous.
            static_scale: [1] fp32 static or global scale, if the format has one.
            topk_ids: [T, K] int32 local experts.
            num_experts: Local experts.
        """
        rows = QuantizedRows(scratch["codes"], scratch["scales"], self.fmt.group, scratch.get("global_scales"))
        quantize_rows(
            rows,
            hidden_states,
            Quantizer(self.fmt, static_scale),
            RouteIds(topk_ids, None, num_experts, num_experts),
        )
        return rows.q, rows.scale
