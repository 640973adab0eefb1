"""The `triton` backend for 8-bit activations and weights and, where hardware scales groups, 4-bit ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from moereg.backends._triton.quantized_workspace import (
    by_group,
    cut,
    intermediate_pieces,
    piece_bytes,
    row_pieces,
    token_pieces,
)
from moereg.backends._triton.recorded import RecordedExperts
from moereg.experts import ExpertInputs, Facts
from moereg.kernels.sizes import CODE_PAD, GUARD_ROWS, WORKSPACE_ALIGNMENT
from moereg.layouts import aligned, pad_columns, round_up
from moereg.platforms import Platform, PlatformRule
from moereg.problem import MoEProblem
from moereg.quant import WHOLE, QuantFormat, QuantScheme
from moereg.quantize import element_of
from moereg.registry import register_moe_backend
from moereg.weights import ExpertWeights, PermutedWeights

if TYPE_CHECKING:
    from moereg.kernels.gemm.epilogue import GateUpEpilogue
    from moereg.kernels.quantized.operands import QuantizedMatrices, QuantizedRows, RowFormat

_E8M0: Final = "float8_e8m0fnu"

# From where on the Gluon kernels run, in rows an expert: at 32 they take 0.97 of the others' time (qwen3-30b-a3b) and
# 0.93 (deepseek-v3), at 64 0.78 and 0.70, measured on an H200 on 2026-11-21.
_MIN_GLUON_ROWS: Final = 30


# Before weight-only kernels on the same checkpoint, which multiply in 16 bits at half the rate: on an H200 int8_w8a8
# took 170 us for 64 tokens of qwen3-30b-a3b and int8_w8a16 194, before either was tuned.
@register_moe_backend(
    name="triton",
    priority=110,
    quant_schemes=("fp8_block128", "fp8_channel_token", "fp8_tensor_static", "fp8_tensor_dynamic"),
    platforms=("cuda:sm89+",),
    requires=("triton>=3.6",),
    # Tensor cores of Ada and Hopper keep 14 bits or so of sums of 8-bit floats, too few for fp32.
    dtypes=("bfloat16", "float16"),
)
@register_moe_backend(
    name="triton",
    priority=110,
    quant_schemes=("int8_w8a8",),
    platforms=("cuda:sm80+", "rocm:gfx942"),
    requires=("triton>=3.6",),
)
# Not measured, and run on no such machine yet. Native, but for tiles under 128 rows on sm100, which Triton restores to
# bf16, exactly. Triton 3.6 fails to compile it.
@register_moe_backend(
    name="triton",
    priority=110,
    quant_schemes=("mxfp8",),
    platforms=("cuda:sm100+",),
    requires=("triton>=3.8",),
    dtypes=("bfloat16", "float16"),
)
# The same, but sm120 is left to the emulation until one has run it: there Triton 3.8 restores both sides of mxfp4_mxfp8
# to bf16 in all tiles, and spills.
@register_moe_backend(
    name="triton",
    priority=110,
    quant_schemes=("mxfp4_mxfp8", "nvfp4"),
    platforms=("cuda:sm100",),
    requires=("triton>=3.8",),
    dtypes=("bfloat16", "float16"),
)
# Hopper has no products of groups with scales: Triton restores both sides to bf16, exactly, and multiplies these.
@register_moe_backend(
    name="triton",
    priority=20,
    quant_schemes=("mxfp8",),
    platforms=("cuda:sm90",),
    requires=("triton>=3.6",),
    tier="emulation",
)
class TritonQuantizedExperts(RecordedExperts):
    """Standard format: codes of tokens, two grouped GEMMs of codes with the activation between them, a reduction.

    The intermediate is rounded to the problem's dtype and then quantized: in the first GEMM where a tile holds whole
    groups of it or its scales are given, else, as where rows have global scales, in a launch between the two. Up to 16
    tokens need no sort.

    Equal inputs give equal bits: a row of a product does not depend on its place in a tile, largest magnitudes on no
    order, no kernel adds atomically, and a token's rows are added in the order of its choices.
    """

    facts = Facts(
        activations=frozenset({"silu", "gelu", "gelu_tanh", "swigluoai", "relu2"}),
        activation_scalars=True,
        swiglu_limit=True,
        activation_formats=frozenset({"standard"}),
        dtypes=frozenset({"bfloat16", "float16", "float32"}),
        bias=True,
        placements=frozenset({"contiguous", "map"}),
        router_weight_on_input=True,
        graph_capture=True,
        deterministic=True,
        pads_to={"hidden_size": CODE_PAD, "intermediate_size": CODE_PAD},
        # The scan over experts keeps one value an expert and thread in registers.
        max_experts=1024,
    )
    output_form = "reduced"
    layouts = ("canonical_pad128",)
    recorded_weights = (
        *("w13", "w2", "w13_scale", "w2_scale", "w13_scale_2", "w2_scale_2", "w13_bias", "w2_bias"),
        *("a13_scale", "a2_scale"),
    )

    def __init__(self, problem: MoEProblem, platform: Platform, computes: QuantScheme | None = None) -> None:
        super().__init__(problem, platform, computes)
        # Compiled for one architecture's own instructions.
        self._has_gluon = PlatformRule("cuda:sm90").matches(platform)

    @classmethod
    def unsupported_reasons(cls, problem: MoEProblem, platform: Platform) -> list[str]:
        """Sizes beyond the kernels' 32-bit offsets within one expert."""
        rows = problem.activation.num_halves * problem.intermediate_size
        hidden, intermediate = (round_up(size, CODE_PAD) for size in (problem.hidden_size, problem.intermediate_size))
        elements = max(rows * hidden, problem.hidden_size * intermediate)
        if elements >= 2**31:
            return [f"requires fewer than 2**31 elements in one expert's w13 and w2, got {elements}"]
        return []

    def permute_weights(self, weights: ExpertWeights, problem: MoEProblem) -> PermutedWeights:
        """Zero-pads the reduced dimensions to multiples of 128, and gives every scale rows and columns.

        Returns:
            `w13` [E, 2 * I, H_pad], `w2` [E, H, I_pad], views where nothing is padded, half as many bytes of codes of 4
            bits; `w13_scale` and `w2_scale` [E, groups of rows, groups of columns] fp32, uint8 where they are powers of
            two, or float8_e4m3fn with global ones, `w13_scale_2` [E, 2] and `w2_scale_2` [E, 1]; `a2_scale` [E] and
            `a13_scale` [E], or shared and [1] where the checkpoint has one number; biases as they are.
        """
        fmt = self.computes.weight
        assert fmt is not None and fmt.symmetric
        per_expert = {name: aligned(tensor) for name, tensor in weights.tensors().items() if name.endswith("bias")}
        shared: dict[str, torch.Tensor] = {}
        for name, columns in (("w13", problem.hidden_size), ("w2", problem.intermediate_size)):
            tensors = weights.tensors()
            # As bytes, since not everything pads 8-bit floats; zero bytes are zeros.
            num_bytes = round_up(columns, CODE_PAD) * fmt.bits // 8
            padded = aligned(pad_columns(tensors[name].view(torch.uint8), num_bytes))
            per_expert[name] = padded.view(fmt.storage_dtype)
            per_expert[f"{name}_scale"] = self._permute_scale(name, tensors[f"{name}_scale"], columns)
            if fmt.global_scale:
                per_expert[f"{name}_scale_2"] = aligned(self._one_a_half(name, tensors[f"{name}_scale_2"]))
        if weights.a2_scale is not None:
            per_expert["a2_scale"] = aligned(weights.a2_scale.expand(problem.num_local_experts))
        if weights.a13_scale is not None:
            holder = per_expert if weights.a13_scale.dim() else shared
            holder["a13_scale"] = aligned(weights.a13_scale.reshape(-1))
        return PermutedWeights(self.layouts[0], per_expert, shared)

    def _permute_scale(self, name: str, scale: torch.Tensor, columns: int) -> torch.Tensor:
        fmt = self.computes.weight
        assert fmt is not None
        if scale.dim() < 3:
            scale = self._one_a_half(name, scale).unsqueeze(2)
        num_groups = 1 if fmt.group[1] == WHOLE else round_up(columns, CODE_PAD) // fmt.group[1]
        if fmt.global_scale:
            # Zeros scale zeros. As bytes, as codes are padded.
            return aligned(pad_columns(scale.view(torch.uint8), num_groups)).view(scale.dtype)
        scale = scale.view(torch.uint8) if fmt.scale_dtype == _E8M0 else scale.float()
        return aligned(pad_columns(scale, num_groups))

    def _one_a_half(self, name: str, scale: torch.Tensor) -> torch.Tensor:
        """[E, halves] of one scale a matrix, [E], or one a half of it."""
        halves = self.problem.activation.num_halves if name == "w13" else 1
        return scale.reshape(len(scale), -1).expand(-1, halves)

    def workspace_shapes(self, problem: MoEProblem, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The intermediate, its codes and scales; then, flat, the plan of the routes and rows, first codes of tokens.

        The codes of tokens, or of a row for each route, lie where the rows [N, H] to be reduced come later.
        """
        routes = num_tokens * problem.top_k
        itemsize = problem.torch_dtype.itemsize
        # Unused rows in front, whichever kernels run.
        rows = GUARD_ROWS + routes
        first = sum(map(piece_bytes, intermediate_pieces(problem, self._activation_format, rows)))
        codes = sum(map(piece_bytes, row_pieces(self._activation_format, routes, problem.hidden_size)))
        to_reduce = piece_bytes(((rows, problem.hidden_size), problem.torch_dtype))
        second = _plan_bytes(problem, num_tokens) + max(codes, to_reduce)
        return (first // itemsize,), (second // itemsize,)

    @property
    def _activation_format(self) -> QuantFormat:
        fmt = self.computes.activation
        assert fmt is not None
        return fmt

    def _launch(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        from moereg.kernels.gemm.config import max_shared_bytes
        from moereg.kernels.launch.overlap import can_overlap
        from moereg.kernels.quantized.config import select_quantized_config
        from moereg.kernels.quantized.gemm import quantized_down_gemm, quantized_gate_up_gemm
        from moereg.kernels.quantized.operands import CodedOutput, Quantizer
        from moereg.kernels.quantized.rows import RouteIds, quantize_rows, rows_of_plan
        from moereg.kernels.rows.reduce import reduce_routes
        from moereg.kernels.rows.sort import RoutePlan, sort_routes
        from moereg.kernels.rows.tiles import DirectRoutes

        if self._warp_specialized(inputs):
            self._launch_gluon(out, inputs, weights, workspace13, workspace2)
            return
        problem, fmt = self.problem, self._row_format()
        hidden_states, topk_ids, expert_map = inputs.hidden_states, inputs.topk_ids, inputs.expert_map
        num_tokens, hidden_size = hidden_states.shape
        num_routes = num_tokens * problem.top_k
        activation = problem.activation
        device = hidden_states.device
        configs = select_quantized_config(
            num_tokens, num_routes / problem.num_experts, activation.num_halves, max_shared_bytes(device)
        )
        overlap = can_overlap(device)
        experts = (problem.num_experts, problem.num_local_experts)
        plan_bytes = _plan_bytes(problem, num_tokens)
        plan_words = workspace2.view(torch.uint8)[:plan_bytes].view(torch.int32)
        behind_plan = workspace2.view(torch.uint8)[plan_bytes:]
        pieces = intermediate_pieces(problem, self._activation_format, num_routes)
        intermediate, amax, *coded = cut(workspace13.view(torch.uint8), pieces)
        rows = self._quantized_rows(*coded)
        amax_of_all = amax if fmt.spans_rows else None
        weight_on_input = problem.apply_router_weight_on_input

        plan: RoutePlan | DirectRoutes
        if configs.sort_routes:
            plan = sort_routes(topk_ids, expert_map, *experts, configs.gate_up.block_m, plan_words, overlap=overlap)
        else:
            plan = DirectRoutes(topk_ids, expert_map, problem.num_experts, configs.gate_up.block_m)

        a13_scale, a2_scale = weights.get("a13_scale"), weights.get("a2_scale")
        # Each expert's static scale means something else to the same token.
        by_route = a13_scale is not None and a13_scale.numel() > 1
        pieces = token_pieces(problem, self._activation_format, num_tokens, by_route)
        tokens = self._quantized_rows(*cut(behind_plan, pieces))
        quantize_rows(
            tokens,
            hidden_states,
            Quantizer(fmt, a13_scale, amax_of_all),
            RouteIds(topk_ids, expert_map, *experts),
            topk_weights=inputs.topk_weights if weight_on_input else None,
            # Of the sort, next to which it runs.
            independent=True,
            # Without a sort it is the layer's first kernel.
            overlap=overlap and configs.sort_routes,
        )
        quantizer = Quantizer(fmt, a2_scale, amax_of_all)
        fuses = fmt.fits_tile(configs.gate_up.block_n)
        w13, w2 = self._matrices(weights, "w13"), self._matrices(weights, "w2")
        quantized_gate_up_gemm(
            CodedOutput(rows, quantizer, problem.torch_dtype) if fuses else intermediate,
            tokens,
            w13,
            plan,
            configs.gate_up,
            self._epilogue(weights),
            top_k=problem.top_k,
            by_route=by_route,
            overlap=overlap,
        )
        if not fuses:
            own = rows_of_plan(plan, problem.num_local_experts)
            quantize_rows(rows, intermediate, quantizer, own, overlap=overlap)
        (route_rows,) = cut(behind_plan, (((num_routes, hidden_size), problem.torch_dtype),))
        quantized_down_gemm(
            route_rows,
            rows,
            w2,
            plan,
            configs.down,
            bias=weights.get("w2_bias"),
            topk_weights=None if weight_on_input else inputs.topk_weights,
            overlap=overlap,
        )
        reduce_routes(
            out,
            route_rows,
            topk_ids,
            expert_map=expert_map,
            num_experts=problem.num_experts,
            num_local_experts=problem.num_local_experts,
            overlap=overlap,
        )

    def _warp_specialized(self, inputs: ExpertInputs) -> bool:
        """Whether the Gluon kernels can run a call, and there are enough rows an expert for them to pay."""
        problem, fmt, hidden_states = self.problem, self._activation_format, inputs.hidden_states
        grouped = fmt.group[1] != WHOLE
        return (
            self._has_gluon
            and hidden_states.device.type != "cpu"
            and inputs.topk_ids.numel() / problem.num_experts > _MIN_GLUON_ROWS
            # Dynamic scales of groups or of rows.
            and not fmt.static
            and fmt.group[0] != WHOLE
            and fmt.scale_dtype == "float32"
            # Blocks of gate's scales end where up's begin.
            and (not grouped or problem.intermediate_size % CODE_PAD == 0)
            and problem.torch_dtype.itemsize == 2
            # Rows are stored in boxes, which begin at multiples of 16 bytes.
            and problem.hidden_size % 8 == 0
        )

    def _launch_gluon(
        self,
        out: torch.Tensor,
        inputs: ExpertInputs,
        weights: PermutedWeights,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
    ) -> None:
        from moereg.kernels.hopper.config import QUANTIZED_BLOCK_M
        from moereg.kernels.hopper.quantized_gemm import quantized_down_gemm, quantized_gate_up_gemm
        from moereg.kernels.launch.overlap import can_overlap
        from moereg.kernels.quantized.operands import QuantizedRows, Quantizer
        from moereg.kernels.quantized.rows import quantize_rows
        from moereg.kernels.quantized.rows_sorted import quantize_to_sorted_rows
        from moereg.kernels.rows.reduce import reduce_sorted_rows
        from moereg.kernels.rows.sort import sort_routes

        problem, fmt = self.problem, self._row_format()
        num_tokens, hidden_size = inputs.hidden_states.shape
        num_routes = num_tokens * problem.top_k
        num_rows = GUARD_ROWS + num_routes
        overlap = can_overlap(out.device)
        plan_bytes = _plan_bytes(problem, num_tokens)
        behind_plan = workspace2.view(torch.uint8)[plan_bytes:]
        plan = sort_routes(
            inputs.topk_ids,
            inputs.expert_map,
            problem.num_experts,
            problem.num_local_experts,
            QUANTIZED_BLOCK_M,
            workspace2.view(torch.uint8)[:plan_bytes].view(torch.int32),
            overlap=overlap,
        )
        topk_weights = inputs.topk_weights
        weight_on_input = problem.apply_router_weight_on_input
        token_codes, token_scales = cut(
            behind_plan, token_pieces(problem, self._activation_format, num_tokens, by_route=True)
        )
        tokens = QuantizedRows(token_codes, by_group(token_scales), fmt.group)
        quantize_to_sorted_rows(
            tokens,
            inputs.hidden_states,
            fmt,
            plan.route_row,
            topk_weights=topk_weights if weight_on_input else None,
            overlap=overlap,
        )
        pieces = intermediate_pieces(problem, self._activation_format, num_rows)
        intermediate, _, codes, scales = cut(workspace13.view(torch.uint8), pieces)
        scales = by_group(scales)
        epilogue = self._epilogue(weights)
        w13, w2 = self._matrices(weights, "w13"), self._matrices(weights, "w2")
        rows = QuantizedRows(codes[GUARD_ROWS:], scales[GUARD_ROWS:], fmt.group)
        if fmt.group:
            behind_guard = QuantizedRows(codes, scales[GUARD_ROWS:], fmt.group)
            rounded = problem.torch_dtype
            quantized_gate_up_gemm(behind_guard, tokens, w13, plan, epilogue, rounded=rounded, overlap=overlap)
        else:
            quantized_gate_up_gemm(intermediate, tokens, w13, plan, epilogue, overlap=overlap)
            quantize_rows(rows, intermediate[GUARD_ROWS:], Quantizer(fmt), plan, overlap=overlap)
        (sorted_rows,) = cut(behind_plan, (((num_rows, hidden_size), problem.torch_dtype),))
        quantized_down_gemm(sorted_rows, rows, w2, plan, bias=weights.get("w2_bias"), overlap=overlap)
        route_weights = None if weight_on_input else topk_weights
        reduce_sorted_rows(out, sorted_rows[GUARD_ROWS:], plan.route_row, route_weights, overlap=overlap)

    def _epilogue(self, weights: PermutedWeights) -> GateUpEpilogue:
        from moereg.kernels.gemm.epilogue import GateUpEpilogue

        activation = self.problem.activation
        return GateUpEpilogue(
            activation=activation.name,
            gated=activation.gated,
            alpha=activation.alpha,
            beta=activation.beta,
            limit=activation.limit,
            bias=weights.get("w13_bias"),
        )

    def _row_format(self) -> RowFormat:
        from moereg.kernels.quantized.operands import RowFormat

        fmt = self._activation_format
        element = element_of(fmt)
        return RowFormat(
            dtype=fmt.storage_dtype,
            min_code=element.min_value,
            max_code=element.max_value,
            group=_group_columns(fmt),
            e8m0=fmt.scale_dtype == _E8M0,
            spans_rows=fmt.group[0] == WHOLE and not fmt.static,
            static=fmt.static,
            global_scale=fmt.global_scale,
        )

    def _quantized_rows(self, codes: torch.Tensor, scales: torch.Tensor, *global_scale: torch.Tensor) -> QuantizedRows:
        from moereg.kernels.quantized.operands import QuantizedRows

        return QuantizedRows(codes, scales, _group_columns(self._activation_format), *global_scale)

    def _matrices(self, weights: PermutedWeights, name: str) -> QuantizedMatrices:
        from moereg.kernels.quantized.operands import QuantizedMatrices

        fmt = self.computes.weight
        assert fmt is not None
        q, scale = weights[name], weights[f"{name}_scale"]
        group_rows = q.shape[1] // scale.shape[1] if fmt.group[0] == WHOLE else fmt.group[0]
        return QuantizedMatrices(q, scale, group_rows, _group_columns(fmt), weights.get(f"{name}_scale_2"))


def _group_columns(fmt: QuantFormat) -> int:
    return 0 if fmt.group[1] == WHOLE else fmt.group[1]


def _plan_bytes(problem: MoEProblem, num_tokens: int) -> int:
    """What holds the plan of any shipped configuration."""
    from moereg.kernels.quantized.config import MIN_BLOCK_M
    from moereg.kernels.rows.sort import route_workspace_numel

    ints = route_workspace_numel(num_tokens, problem.top_k, problem.num_local_experts, MIN_BLOCK_M)
    return round_up(4 * ints, WORKSPACE_ALIGNMENT)
