"""QuACK's grouped GEMMs on 16-bit or 8-bit weights whose rows alternate gate and up.

Six launches, eight with 8-bit weights: sort the routes, write each sorted row's source, weight and scale, gather and
multiply with the activation, multiply again with the routing weights, and sum.

Sizes: T tokens, K experts per token, N = T * K routes, H hidden size, I intermediate size, E local experts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

from moereg.backends._cutlass.torch_scaled import row_scales
from moereg.backends._loaded import Call, Implementation
from moereg.backends._triton.workspace import plan_bytes, row_format, row_pieces
from moereg.backends._workspace import Piece, bytes_of, cut
from moereg.experts import Experts
from moereg.kernels.gemm.epilogue import ActivationConstant
from moereg.kernels.quack import (
    GemmConfig,
    cache_folder,
    down_epilogue,
    gate_up_epilogue,
    grouped_product,
    select_config,
)
from moereg.kernels.quantized.operands import QuantizedRows, Quantizer
from moereg.kernels.quantized.rows import RouteIds, quantize_rows
from moereg.kernels.rows.plan import RoutePlan
from moereg.kernels.rows.reduce import reduce_sorted_rows
from moereg.kernels.rows.sort import sort_routes
from moereg.kernels.rows.sorted_inputs import SortedInputs, sorted_inputs
from moereg.kernels.sizes import AMAX_PROGRAMS, CODE_PAD
from moereg.platforms import PlatformRule
from moereg.runtime.progress import long_wait
from moereg.weights.layouts import ALIGNMENT, aligned, interleave_gate_up, pad_columns, round_up
from moereg.weights.permuted import ExpertWeights, PermutedWeights

_BLOCK_M: Final = 128
"""Tile rows for the sort; nothing here reads its tiles."""

_COMPILE_SECONDS: Final = 3.0
"""Seconds for one kernel on one free core; 1.4 to 3.2 were measured."""

_COMPILED: Final[set[tuple[str, str, torch.dtype, str]]] = set()


class _Rows(NamedTuple):
    """Input rows [S, K] of a GEMM, `scale` [S] fp32 of quantized ones, and routes per row: K for tokens, else 1."""

    rows: torch.Tensor
    scale: torch.Tensor | None
    routes_per_row: int


class Interleaved(Implementation):
    """Standard format, 16-bit weights."""

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        self._has_codes = self.computes.activation is not None
        function = ActivationConstant(*dataclasses.astuple(self.problem.activation))
        self._gate_up = gate_up_epilogue(function, self.problem.has_bias, self._has_codes)
        self._down = down_epilogue(self.problem.has_bias, self._has_codes)
        self._ready: set[GemmConfig] = set()
        self._capability = 10 if PlatformRule("cuda:sm100f").matches(self.platform) else 9

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Alternates gate and up rows; keeps w2 as given; converts biases to fp32.

        Returns:
            `w13` [E, 2I, H] (row 2j gate j, row 2j + 1 up j; unchanged if not gated), `w2` [E, H, I], and if there are
            biases `w13_bias` [E, 2I] and `w2_bias` [E, H].
        """
        tensors = {"w13": self._interleaved(weights.w13), "w2": aligned(weights.w2)}
        return PermutedWeights(self.layouts[0], {**tensors, **self._biases(weights)})

    def _interleaved(self, w13: torch.Tensor, dim: int = -2) -> torch.Tensor:
        return interleave_gate_up(w13, dim=dim) if self.problem.activation.gated else aligned(w13)

    def _biases(self, weights: ExpertWeights) -> dict[str, torch.Tensor]:
        if weights.w13_bias is None or weights.w2_bias is None:
            return {}
        return {
            "w13_bias": self._interleaved(weights.w13_bias.float(), dim=-1),
            "w2_bias": aligned(weights.w2_bias.float()),
        }

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Flat: the intermediate, also quantized; the plan, three numbers per row, and the rows [N, H]."""
        problem, itemsize = self.problem, self.problem.torch_dtype.itemsize
        first = bytes_of(self._first_pieces(num_tokens * problem.top_k))
        second = self._plan_bytes(num_tokens) + bytes_of(self._second_pieces(num_tokens, num_tokens * problem.top_k))
        return (first // itemsize,), (second // itemsize,)

    def _plan_bytes(self, num_tokens: int) -> int:
        return plan_bytes(self.problem, num_tokens, _BLOCK_M)

    def _first_pieces(self, num_routes: int) -> tuple[Piece, ...]:
        """The intermediate [N, I], then a subclass's own pieces."""
        return (Piece((num_routes, self.problem.intermediate_size), self.problem.torch_dtype),)

    def _second_pieces(self, num_tokens: int, num_routes: int) -> tuple[Piece, ...]:
        """Source, weight and scale of each row, then the rows [N, H]."""
        numbers = (torch.int32, torch.float32, torch.float32)
        rows = Piece((num_routes, self.problem.hidden_size), self.problem.torch_dtype)
        return (*(Piece((num_routes,), dtype) for dtype in numbers), rows)

    def run(self, call: Call) -> None:
        problem, inputs, weights = self.problem, call.inputs, call.weights
        num_tokens, top_k = inputs.topk_ids.shape
        num_routes = num_tokens * top_k
        size = self._plan_bytes(num_tokens)
        second = call.workspace2.view(torch.uint8)
        plan = sort_routes(
            inputs.topk_ids,
            inputs.expert_map,
            problem.num_experts,
            problem.num_local_experts,
            _BLOCK_M,
            second[:size].view(torch.int32),
        )
        source, weight, scale, rows, *_ = cut(second[size:], *self._second_pieces(num_tokens, num_routes))
        found = self._inputs(call, second[size:])
        made = SortedInputs(source, weight, None if found.scale is None else scale)
        route_weights = None if problem.apply_router_weight_on_input else inputs.topk_weights
        sorted_inputs(made, plan, route_weights, found.routes_per_row, found.scale)
        config = select_config(self._capability, num_routes / problem.num_experts, self._has_codes)
        intermediate, *_ = cut(call.workspace13.view(torch.uint8), *self._first_pieces(num_routes))
        with self._announced(config, weights["w13"].dtype):
            grouped_product(
                self._gate_up,
                config,
                intermediate,
                found.rows,
                weights["w13"],
                plan.expert_offsets,
                made.source,
                **self._operands(weights, "w13", made.scale),
            )
            middle = self._middle(call, plan, intermediate)
            grouped_product(
                self._down,
                config,
                rows,
                middle.rows,
                weights["w2"],
                plan.expert_offsets,
                weight=made.weight,
                **self._operands(weights, "w2", middle.scale),
            )
        reduce_sorted_rows(call.out, rows, plan.route_row, None)

    def _inputs(self, call: Call, second: torch.Tensor) -> _Rows:
        """The rows that the first GEMM gathers."""
        inputs = call.inputs
        hidden_states = inputs.hidden_states
        if self.problem.apply_router_weight_on_input:
            hidden_states = (hidden_states * inputs.topk_weights).to(hidden_states.dtype)
        elif hidden_states.data_ptr() % ALIGNMENT:
            hidden_states = hidden_states.clone()
        return _Rows(hidden_states, None, self.problem.top_k)

    def _middle(self, call: Call, plan: RoutePlan, intermediate: torch.Tensor) -> _Rows:
        """The rows of the second GEMM."""
        return _Rows(intermediate, None, 1)

    def _operands(self, weights: PermutedWeights, matrix: str, scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Scales and bias of a GEMM under its epilogue's names."""
        operands = {} if scale is None else {"row_scale": scale, "column_scale": weights[f"{matrix}_scale"]}
        bias = weights.get(f"{matrix}_bias")
        return operands if bias is None else {**operands, "bias": bias}

    @contextlib.contextmanager
    def _announced(self, config: GemmConfig, dtype: torch.dtype) -> Iterator[None]:
        """Announces the wait when this process compiles these kernels for the first time."""
        if config in self._ready:
            yield
            return
        keys = {
            (epilogue.semantic_digest, repr(config), dtype, self.problem.dtype)
            for epilogue in (self._gate_up, self._down)
        }
        if num_new := len(keys - _COMPILED):
            folder = cache_folder()
            avoid = (
                "QUACK_CACHE_ENABLED=0 keeps them from the next process"
                if folder is None
                else f"the next process finds them in {folder}, which QUACK_CACHE_DIR names"
            )
            kernels = "a kernel" if num_new == 1 else f"{num_new} kernels"
            with long_wait(f"compiling {kernels} of cutlass", _COMPILE_SECONDS * num_new, avoid):
                yield
            _COMPILED.update(keys)
        else:
            yield
        self._ready.add(config)


class InterleavedCodes(Interleaved):
    """Standard format, float8_e4m3fn with a scale per row of weights and activations.

    Per-tensor scales are repeated for every row.
    """

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        fmt = self.computes.activation
        assert fmt is not None
        self._format = fmt
        self._row_format = row_format(fmt)

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """As for 16 bits, with the reduced dimensions padded to multiples of 128 and a scale per row.

        Returns:
            `w13` [E, 2I, H_pad] and `w2` [E, H, I_pad] codes, `w13_scale` [E, 2I] and `w2_scale` [E, H] fp32, biases as
            for 16 bits, and if the checkpoint has activation scales `a13_scale` and `a2_scale` [E].
        """
        problem = self.problem
        assert weights.w13_scale is not None
        assert weights.w2_scale is not None
        tensors = {
            "w13": self._padded(self._interleaved(weights.w13.view(torch.uint8))),
            "w2": self._padded(weights.w2.view(torch.uint8)),
            "w13_scale": self._interleaved(row_scales(weights.w13_scale, weights.w13.shape[1]), dim=-1),
            "w2_scale": row_scales(weights.w2_scale, problem.hidden_size),
        }
        for name in ("a13_scale", "a2_scale"):
            scale = getattr(weights, name)
            if scale is not None:
                tensors[name] = aligned(scale.expand(problem.num_local_experts))
        return PermutedWeights(self.layouts[0], {**tensors, **self._biases(weights)})

    def _padded(self, codes: torch.Tensor) -> torch.Tensor:
        # As bytes, since not every device pads 8-bit floats; a zero byte is zero.
        return aligned(pad_columns(codes, round_up(codes.shape[2], CODE_PAD))).view(self._row_format.dtype)

    def _first_pieces(self, num_routes: int) -> tuple[Piece, ...]:
        """The intermediate, each program's largest magnitude, then quantized values and scales."""
        codes = row_pieces(self._format, num_routes, self.problem.intermediate_size)
        return (*super()._first_pieces(num_routes), Piece((AMAX_PROGRAMS,), torch.int32), *codes)

    def _second_pieces(self, num_tokens: int, num_routes: int) -> tuple[Piece, ...]:
        """As for 16 bits, then quantized values and scales, a row per token or per route."""
        num_coded = num_routes if self._codes_routes else num_tokens
        return (
            *super()._second_pieces(num_tokens, num_routes),
            *row_pieces(self._format, num_coded, self.problem.hidden_size),
        )

    @property
    def _codes_routes(self) -> bool:
        """Whether tokens are quantized once per route, since their experts' static scales may differ."""
        return self._format.static and self.problem.num_local_experts > 1

    def _inputs(self, call: Call, second: torch.Tensor) -> _Rows:
        problem, inputs = self.problem, call.inputs
        num_tokens, top_k = inputs.topk_ids.shape
        *_, codes, scales = cut(second, *self._second_pieces(num_tokens, num_tokens * top_k))
        quantize_rows(
            QuantizedRows(codes, scales, 0),
            inputs.hidden_states,
            self._quantizer(call, "a13_scale"),
            RouteIds(inputs.topk_ids, inputs.expert_map, problem.num_experts, problem.num_local_experts),
            topk_weights=inputs.topk_weights if problem.apply_router_weight_on_input else None,
        )
        return _Rows(codes, scales.view(-1), 1 if self._codes_routes else top_k)

    def _middle(self, call: Call, plan: RoutePlan, intermediate: torch.Tensor) -> _Rows:
        pieces = self._first_pieces(intermediate.shape[0])
        *_, codes, scales = cut(call.workspace13.view(torch.uint8), *pieces)
        quantize_rows(QuantizedRows(codes, scales, 0), intermediate, self._quantizer(call, "a2_scale"), plan)
        return _Rows(codes, scales.view(-1), 1)

    def _quantizer(self, call: Call, static_scale: str) -> Quantizer:
        num_routes = math.prod(call.inputs.topk_ids.shape)
        _, amax, *_ = cut(call.workspace13.view(torch.uint8), *self._first_pieces(num_routes))
        amax_of_all = amax if self._row_format.spans_rows else None
        return Quantizer(self._row_format, call.weights.get(static_scale), amax_of_all)
