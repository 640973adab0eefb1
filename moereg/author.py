"""The names that the author of a backend imports."""

from moereg.experts import ExpertInputs, Experts
from moereg.facts import Facts
from moereg.layouts import deinterleave_gate_up, interleave_gate_up, pad_columns, round_up
from moereg.quant import QuantFormat, QuantScheme
from moereg.registry import API_VERSION, register_moe_backend
from moereg.weights import ExpertWeights, PermutedWeights

__all__ = [
    "API_VERSION",
    "ExpertInputs",
    "ExpertWeights",
    "Experts",
    "Facts",
    "PermutedWeights",
    "QuantFormat",
    "QuantScheme",
    "deinterleave_gate_up",
    "interleave_gate_up",
    "pad_columns",
    "register_moe_backend",
    "round_up",
]
