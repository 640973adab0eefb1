"""The names that authors of backends and platforms import. `moereg.testing` is the kit that checks a backend."""

from moereg.dispatch import explain_backends
from moereg.experts import ExpertInputs, Experts, Gradients
from moereg.kernels.plain.device import local_expert_ids
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import layer_tolerance, tolerance
from moereg.platforms import Platform, PlatformKind, PlatformRule
from moereg.prepare_finalize import (
    DispatcherCell,
    DispatcherFacts,
    Group,
    GroupFacts,
    GroupPrepareFinalize,
    Moved,
    Prepared,
    PrepareFinalize,
    register_prepare_finalize,
)
from moereg.prepare_finalize.expert_placement import PlacementTables, token_turns
from moereg.prepare_finalize.wire import PlainWire, Received, Wire, as_bytes
from moereg.quantize import dequantize_weights, quantize_weights
from moereg.registry import API_VERSION, BackendCell, register_moe_backend
from moereg.selection.loader import list_backends, list_cells
from moereg.spec.facts import Facts
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantFormat, QuantScheme
from moereg.weights.adapters import ExpertAdapters
from moereg.weights.layouts import deinterleave_gate_up, interleave_gate_up, pad_columns, round_up
from moereg.weights.permuted import ExpertWeights, PermutedWeights
from moereg.weights.shards import pad_intermediate

__all__ = [
    "API_VERSION",
    "BackendCell",
    "DispatcherCell",
    "DispatcherFacts",
    "ExpertAdapters",
    "ExpertInputs",
    "ExpertWeights",
    "Experts",
    "Facts",
    "Gradients",
    "Group",
    "GroupFacts",
    "GroupPrepareFinalize",
    "MoEProblem",
    "Moved",
    "PermutedWeights",
    "PlacementTables",
    "PlainWire",
    "Platform",
    "PlatformKind",
    "PlatformRule",
    "PrepareFinalize",
    "Prepared",
    "QuantFormat",
    "QuantScheme",
    "Received",
    "Wire",
    "as_bytes",
    "deinterleave_gate_up",
    "dequantize_weights",
    "explain_backends",
    "interleave_gate_up",
    "layer_tolerance",
    "list_backends",
    "list_cells",
    "local_expert_ids",
    "pad_columns",
    "pad_intermediate",
    "quantize_weights",
    "reference_experts",
    "register_moe_backend",
    "register_prepare_finalize",
    "relative_error",
    "round_up",
    "token_turns",
    "tolerance",
]
