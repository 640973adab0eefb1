"""One layer on Humming: its configurations, permuted tensors and launches. Loads Humming and Triton."""

from __future__ import annotations

import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch
import triton
from humming import ops
from humming.config import GemmType
from humming.kernel.humming import HummingKernel
from humming.schema import HummingWeightSchema
from humming.transform import prepare_fp16_e8m0_scale, prepare_layer_config, transform_humming_tensors
from humming.tune import get_heuristics_config

from moereg.author import ExpertInputs, ExpertWeights, MoEProblem, PermutedWeights, pad_intermediate
from moereg_humming import formats, kernels
from moereg_humming.buffers import NUM_LOCKS, Buffers
from moereg_humming.formats import MatrixFormat, matrix_format

_MATRICES: Final = ("w13", "w2")
_PERMUTE_BYTES: Final = 64 << 20
"""Codes of experts that are reordered at a time, which bounds what permuting needs beside its result."""

_ROUTES_AT_A_TIME: Final = 1024
_COLUMNS_AT_A_TIME: Final = 1024


@dataclasses.dataclass(frozen=True)
class Tiles:
    """Compiled kernels of one range of rows.

    Attributes:
        kernel: Humming's table of kernels, int64 on the CPU.
        rows: Rows of a tile.
    """

    kernel: torch.Tensor
    rows: int


class IndexedLayer:
    """The two products of a layer, by Humming's indexed GEMM.

    Holds configurations and handles of compiled kernels, no tensors of the layer. Thread-safe.
    """

    def __init__(self, problem: MoEProblem) -> None:
        """Names the matrices; nothing is compiled yet.

        Args:
            problem: The layer, with quantized weights.
        """
        weight = problem.quant.weight
        assert weight is not None
        self._problem = problem = formats.whole_blocks(problem)
        rows = problem.activation.num_halves * problem.intermediate_size
        self._formats = {
            "w13": matrix_format(weight, problem.torch_dtype, rows, problem.hidden_size),
            "w2": matrix_format(weight, problem.torch_dtype, problem.hidden_size, problem.intermediate_size),
        }
        self._configs: dict[tuple[str, torch.device, bool], Any] = {}
        self._tiles: dict[tuple[torch.device, int], dict[str, Tiles]] = {}
        self._lock = threading.Lock()

    def permute(self, weights: ExpertWeights) -> dict[str, torch.Tensor]:
        """Tensors of both matrices in Humming's order, dim 0 the expert.

        Args:
            weights: Of the layer, on a GPU.
        """
        permuted: dict[str, torch.Tensor] = {}
        weights = pad_intermediate(weights, self._problem.intermediate_size)
        factors = formats.half_factors(weights)
        if factors is not None:
            permuted["w13_factors"] = factors
            if weights.w13_bias is not None:
                # The factors multiply the product alone, so the bias is added after them.
                permuted["w13_own_bias"] = weights.w13_bias.clone()
        for matrix in _MATRICES:
            has_bias = weights.w13_bias is not None and not (matrix == "w13" and factors is not None)
            tensors = weights.tensors()
            found = {
                role: tensors.get(f"{matrix}{suffix}")
                for role, suffix in (
                    ("weight", ""),
                    ("scale", "_scale"),
                    ("scale_2", "_scale_2"),
                    ("zero_point", "_zero_point"),
                    ("bias", "_bias"),
                )
            }
            if not has_bias:
                found["bias"] = None
            config = self._config(matrix, weights.w13.device, has_bias)
            for name, tensor in self._permute_matrix(config, self._formats[matrix], found).items():
                permuted[f"{matrix}_{name}"] = tensor
        return permuted

    def _permute_matrix(
        self, config: Any, fmt: MatrixFormat, found: dict[str, torch.Tensor | None]
    ) -> dict[str, torch.Tensor]:
        weight, dtype = found["weight"], self._problem.torch_dtype
        assert weight is not None
        num_experts = len(weight)
        at_a_time = max(1, _PERMUTE_BYTES // (fmt.padded_rows * fmt.padded_columns))
        outputs: dict[str, torch.Tensor] = {}
        for first in range(0, num_experts, at_a_time):
            some = slice(first, min(first + at_a_time, num_experts))
            part = {name: None if tensor is None else tensor[some] for name, tensor in found.items()}
            for name, tensor in transform_humming_tensors(
                config, _humming_tensors(config, fmt, part, dtype), already_padded=True
            ).items():
                if name not in outputs:
                    outputs[name] = tensor.new_empty((num_experts, *tensor.shape[1:]))
                outputs[name][some].copy_(tensor)
        return outputs

    def run(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        """Runs the layer; see `Experts.apply`. Compiles kernels at the first call of a range of tokens."""
        problem, topk_ids, expert_map = self._problem, inputs.topk_ids, inputs.expert_map
        num_tokens, top_k = topk_ids.shape
        num_routes, device = num_tokens * top_k, topk_ids.device
        buffers = Buffers(problem, num_tokens)
        has_bias = {matrix: weights.get(f"{matrix}_bias") is not None for matrix in _MATRICES}
        tiles = self._tiles_for(device, has_bias, num_routes)
        sorted_routes = buffers.part(workspace2, "sorted", torch.int32).view(2, -1)
        tile_experts = buffers.part(workspace2, "experts", torch.int32).view(2, -1)
        totals = buffers.part(workspace2, "totals", torch.int32)
        locks = buffers.part(workspace2, "locks", torch.int32)
        experts = {
            "num_experts": problem.num_experts,
            "num_local_experts": problem.num_local_experts,
            "HAS_MAP": expert_map is not None,
        }
        a_map = topk_ids if expert_map is None else expert_map
        kernels.sort_routes_kernel[(problem.num_local_experts, 2)](
            topk_ids,
            a_map,
            sorted_routes,
            tile_experts,
            totals,
            locks,
            num_routes,
            buffers.num_padded,
            num_locks=NUM_LOCKS,
            FIRST_ROWS=tiles["w13"].rows,
            SECOND_ROWS=tiles["w2"].rows,
            NUM_BINS=triton.next_power_of_2(problem.num_local_experts + 1),
            BLOCK=min(_ROUTES_AT_A_TIME, max(128, triton.next_power_of_2(num_routes))),
            **experts,
        )

        hidden_states = self._aligned_inputs(inputs, buffers, workspace2)
        products = workspace13[: num_routes * buffers.num_columns].view(num_routes, buffers.num_columns)
        intermediate = buffers.part(workspace2, "intermediate", problem.torch_dtype)
        intermediate = intermediate.view(num_routes, problem.intermediate_size)
        rows = workspace13[: num_routes * problem.hidden_size].view(num_routes, problem.hidden_size)

        def multiply(place: int, matrix: str, left: torch.Tensor, result: torch.Tensor, routes_per_row: int) -> None:
            ops.launch_kernel(
                configs=tiles[matrix].kernel,
                inputs=left,
                weight=weights[f"{matrix}_weight"],
                weight_scale=weights[f"{matrix}_weight_scale"],
                weight_scale_2=weights.get(f"{matrix}_weight_scale_2"),
                zero_point=weights.get(f"{matrix}_zero_point"),
                bias=weights.get(f"{matrix}_bias"),
                outputs=result,
                sorted_ids=sorted_routes[place],
                expert_ids=tile_experts[place],
                num_tokens_padded=totals[place],
                locks=locks,
                top_k=routes_per_row,
            )

        multiply(0, "w13", hidden_states, products, top_k)
        activation, factors, bias = problem.activation, weights.get("w13_factors"), weights.get("w13_own_bias")
        kernels.activate_kernel[(num_routes, triton.cdiv(problem.intermediate_size, _COLUMNS_AT_A_TIME))](
            products,
            intermediate,
            topk_ids,
            a_map,
            products if factors is None else factors,
            products if bias is None else bias,
            problem.intermediate_size,
            NAME=activation.name,
            GATED=activation.gated,
            ALPHA=activation.alpha,
            BETA=activation.beta,
            LIMIT=activation.limit,
            HAS_FACTORS=factors is not None,
            HAS_BIAS=bias is not None,
            BLOCK=min(_COLUMNS_AT_A_TIME, triton.next_power_of_2(problem.intermediate_size)),
            **experts,
        )
        multiply(1, "w2", intermediate, rows, 1)
        kernels.sum_routes_kernel[(num_tokens, triton.cdiv(problem.hidden_size, _COLUMNS_AT_A_TIME))](
            rows,
            inputs.topk_weights,
            topk_ids,
            a_map,
            out,
            problem.hidden_size,
            TOP_K=top_k,
            IS_WEIGHTED=not problem.apply_router_weight_on_input,
            BLOCK=min(_COLUMNS_AT_A_TIME, triton.next_power_of_2(problem.hidden_size)),
            **experts,
        )

    def _aligned_inputs(self, inputs: ExpertInputs, buffers: Buffers, workspace2: torch.Tensor) -> torch.Tensor:
        """[T,H] as the first product reads it, at a multiple of 16 bytes."""
        hidden_states = inputs.hidden_states
        if not self._problem.apply_router_weight_on_input:
            return hidden_states if hidden_states.data_ptr() % 16 == 0 else hidden_states.clone()
        scaled = buffers.part(workspace2, "inputs", hidden_states.dtype).view_as(hidden_states)
        num_tokens, hidden_size = hidden_states.shape
        kernels.scale_rows_kernel[(num_tokens, triton.cdiv(hidden_size, _COLUMNS_AT_A_TIME))](
            hidden_states,
            inputs.topk_weights,
            scaled,
            hidden_size,
            BLOCK=min(_COLUMNS_AT_A_TIME, triton.next_power_of_2(hidden_size)),
        )
        return scaled

    def _config(self, matrix: str, device: torch.device, has_bias: bool) -> Any:
        """Humming's configuration of a matrix."""
        key = (matrix, device, has_bias)
        if key not in self._configs:
            fmt = self._formats[matrix]
            self._configs[key] = prepare_layer_config(
                shape_n=fmt.rows,
                shape_k=fmt.columns,
                weight_schema=_schema(fmt),
                num_experts=self._problem.num_local_experts,
                pad_n_to_multiple=formats.PAD_ROWS,
                pad_k_to_multiple=formats.PAD_COLUMNS,
                has_bias=has_bias,
                torch_dtype=self._problem.torch_dtype,
                device=device,
            )
        return self._configs[key]

    def _tiles_for(self, device: torch.device, has_bias: dict[str, bool], num_routes: int) -> dict[str, Tiles]:
        """Kernels of both matrices for a number of routes, compiled if they are new.

        Raises:
            RuntimeError: They are new, and a graph is being captured.
        """
        problem = self._problem
        share = problem.num_local_experts / problem.num_experts
        key = (device, _rounded_routes(max(1, round(num_routes * share))))
        found = self._tiles.get(key)
        if found is not None:
            return found
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"no kernel is compiled for {num_routes} routes yet, and a graph is being captured; run one call of as "
                "many tokens before"
            )
        with self._lock, ThreadPoolExecutor(len(_MATRICES)) as pool:
            # The compiler is a process of its own, so two threads take the time of one.
            compiled = pool.map(lambda matrix: self._compiled(matrix, device, has_bias[matrix], key[1]), _MATRICES)
            self._tiles[key] = dict(zip(_MATRICES, compiled, strict=True))
        return self._tiles[key]

    def _compiled(self, matrix: str, device: torch.device, has_bias: bool, num_routes: int) -> Tiles:
        config, is_deterministic = self._config(matrix, device, has_bias), self._problem.deterministic
        tuning = get_heuristics_config(
            config,
            shape_m=num_routes,
            # Products that are split along K are added in any order.
            use_batch_invariant=is_deterministic,
            gemm_type=GemmType.INDEXED,
            device=device,
        )
        compute = {"gemm_type": GemmType.INDEXED.value, "use_batch_invariant": is_deterministic}
        kernel = HummingKernel.prepare_kernels(config.to_str(), json.dumps(compute), tuning, device)
        return Tiles(kernel, tuning["block_shape"][0])


def _rounded_routes(num_routes: int) -> int:
    """The number of routes that tiles are chosen for: steps of an eighth, so that few kernels are compiled."""
    step = max(1, 1 << max(0, num_routes.bit_length() - 4))
    return -(-num_routes // step) * step


def _schema(fmt: MatrixFormat) -> HummingWeightSchema:
    return HummingWeightSchema(
        b_dtype=fmt.element,
        bs_dtype=fmt.scale,
        weight_scale_group_size=fmt.group[1],
        weight_scale_group_size_n=fmt.group[0],
        weight_scale_type=fmt.scale_type,
        weight_scale_2_type="tensor" if fmt.has_tensor_scale else "none",
        has_zero_point=fmt.has_zero_point,
    )


def _humming_tensors(
    config: Any, fmt: MatrixFormat, part: dict[str, torch.Tensor | None], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Padded tensors of some experts, in the order that Humming's transformation starts from."""
    weight, scale, zero_point, bias = part["weight"], part["scale"], part["zero_point"], part["bias"]
    assert weight is not None
    assert scale is not None
    scales, tensor_scale = formats.scales(scale, part["scale_2"], fmt, dtype)
    tensors = {"weight": formats.codes(weight, fmt), "weight_scale": scales}
    if tensor_scale is not None:
        tensors["weight_scale_2"] = tensor_scale
    if zero_point is not None:
        tensors["zero_point"] = formats.zero_points(zero_point, fmt, scale.shape[2])
    if bias is not None:
        tensors["bias"] = formats.bias(bias, fmt, dtype)
    if fmt.scale == "float8e8m0" and dtype == torch.float16:
        # Powers of two outside of float16's range go to the expert's fp32 scale.
        some = dataclasses.replace(config, num_experts=len(weight))
        _, tensors = prepare_fp16_e8m0_scale(some, tensors)
    return tensors
