"""Quantizes, dequantizes and packs weights and activations by `QuantScheme`; docs/quantization.md has every rule.

All code reads the fields of `QuantFormat`, so values constructed by backends and plugins work like moereg's own.
"""

from moereg.spec.quant_schemes import spans_tokens
from moereg.weights.activations import (
    activation_scale,
    dequantize_activations,
    quantize_activations,
    quantize_dequantize_activations,
)
from moereg.weights.elements import Element, pack_nibbles, unpack_nibbles
from moereg.weights.formats import Quantized, element_of
from moereg.weights.quantize_weights import (
    dequantize_into,
    dequantize_matrices,
    dequantize_rows,
    dequantize_weights,
    expert_matrix,
    quantize_matrices,
    quantize_weights,
    row_blocks,
)

__all__ = [
    "Element",
    "Quantized",
    "activation_scale",
    "dequantize_activations",
    "dequantize_into",
    "dequantize_matrices",
    "dequantize_rows",
    "dequantize_weights",
    "element_of",
    "expert_matrix",
    "pack_nibbles",
    "quantize_activations",
    "quantize_dequantize_activations",
    "quantize_matrices",
    "quantize_weights",
    "row_blocks",
    "spans_tokens",
    "unpack_nibbles",
]
