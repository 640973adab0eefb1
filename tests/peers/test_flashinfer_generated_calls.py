"""`flashinfer_trtllm`, `_cutedsl` and `_b12x` beside the package: what they pass, and what that means as documented.

No CPU runs these kernels. An imitation stands in for each entry point: it binds what it is given to the real signature,
takes weights apart with FlashInfer's own indices, and computes the layer as the entry point's documentation says. So
an order of rows, a scale that is dropped, or gate for up gives other numbers than moereg's reference.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moereg.author import (
    ExpertInputs,
    ExpertWeights,
    MoEProblem,
    PermutedWeights,
    layer_tolerance,
    quantize_weights,
    reference_experts,
    relative_error,
)
from moereg.backends import flashinfer_moe as page
from moereg.experts import Experts
from moereg.numerics.reference import calibrate_activation_scales
from moereg.platforms import Platform
from moereg.testing.interpreter import patch_interpreter
from tests.support.tensors import unaligned

pytestmark = pytest.mark.peers

patch_interpreter()

B200 = Platform.from_name("cuda:sm100")
T, E, H, I, K = 5, 4, 256, 256, 2  # noqa: E741
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _codes(packed: torch.Tensor) -> torch.Tensor:
    """float4_e2m1fn as numbers, two to a byte, the first in the low half."""
    halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    return E2M1[halves & 7] * (1 - 2 * (halves >> 3))


def _integers(packed: torch.Tensor) -> torch.Tensor:
    halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).int()
    return (halves - 16 * (halves > 7)).float()


def _powers(scale: torch.Tensor) -> torch.Tensor:
    return torch.exp2(scale.view(torch.uint8).float() - 127)


def _linear(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """[E, N, G] of scales in blocks of 128 x 4."""
    groups = scale[0].numel() // rows
    blocks = scale.reshape(len(scale), rows // 128, groups // 4, 32, 4, 4)
    return blocks.permute(0, 1, 4, 3, 2, 5).reshape(len(scale), rows, groups)


def _unshuffled(tensor: torch.Tensor, gated: bool | None) -> torch.Tensor:
    """[E, N, ...] in the order that FlashInfer's indices start from: up rows first where gated; w2 where None."""
    from flashinfer.fused_moe.core import _maybe_get_cached_w3_w1_permute_indices, get_w2_permute_indices_with_cache

    rows = torch.zeros(tensor.shape[1], 1, dtype=torch.uint8)
    if gated is None:
        order = get_w2_permute_indices_with_cache({}, rows, 128)
    else:
        order = _maybe_get_cached_w3_w1_permute_indices({}, rows, 128, is_gated_act_gemm=gated)
    return tensor[:, order.argsort()]


def _unblocked(tensor: torch.Tensor) -> torch.Tensor:
    """[E, N, K] of [E, K / block, N, block]."""
    return tensor.transpose(1, 2).flatten(2)


def _grouped(scale: torch.Tensor, columns: int) -> torch.Tensor:
    return scale.repeat_interleave(columns // scale.shape[-1], -1)


def _layer(
    problem: MoEProblem,
    out: torch.Tensor,
    x: torch.Tensor,
    routing: tuple[torch.Tensor, torch.Tensor],
    up_first: torch.Tensor,
    w2: torch.Tensor,
    *,
    scales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    scalars: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
) -> None:
    """The layer in fp32; ids outside the local experts are dropped. Whole vectors are stored."""
    assert out.data_ptr() % 16 == 0
    result = torch.zeros(out.shape)
    ones = torch.ones(len(w2))
    gate_scale, up_scale, out_scale = (ones if scale is None else scale for scale in scales)
    alpha, beta, limit = scalars
    for token, (ids, weights) in enumerate(zip(routing[0].tolist(), routing[1].float().tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if not 0 <= expert < len(w2):
                continue
            rows = up_first[expert].float() @ x[token].float()
            if biases[0] is not None:
                rows = rows + biases[0][expert]
            if problem.activation.gated:
                up, gate = rows.chunk(2)
                if limit is not None:
                    gate, up = gate.clamp(max=limit[expert]), up.clamp(-limit[expert], limit[expert])
                gate = gate * gate_scale[expert]
                slope = 1.0 if alpha is None else alpha[expert]
                hidden = gate * torch.sigmoid(slope * gate) * (up + (0.0 if beta is None else beta[expert]))
            else:
                hidden = torch.relu(rows * gate_scale[expert]) ** 2
            rows = w2[expert].float() @ (hidden * up_scale[expert]) * out_scale[expert]
            result[token] += weight * (rows if biases[1] is None else rows + biases[1][expert])
    out.copy_(result)


def _scalars(given: dict[str, Any]) -> tuple[torch.Tensor | None, ...]:
    return given["gemm1_alpha"], given["gemm1_beta"], given["gemm1_clamp_limit"]


def _imitated(problem: MoEProblem, name: str) -> Callable[..., None]:
    """What TensorRT-LLM's entry points do by their documentation."""
    gated = problem.activation.gated

    def run(given: dict[str, Any]) -> None:
        assert (given["local_expert_offset"], given["local_num_experts"]) == (0, problem.num_local_experts)
        w13, w2, x = given["gemm1_weights"], given["gemm2_weights"], given["hidden_states"]
        s13, s2 = given.get("gemm1_weights_scale"), given.get("gemm2_weights_scale")
        if name == "trtllm_bf16_routed_moe":
            up_first, w2 = _unshuffled(_unblocked(w13), gated), _unshuffled(_unblocked(w2), None)
            _layer(problem, given["output"], x, given["topk_ids"], up_first, w2, scalars=_scalars(given))
        elif name == "trtllm_mxint4_block_scale_routed_moe":
            packed = given["topk_ids"]
            routing = (packed >> 16, (packed & 0xFFFF).to(torch.int16).view(torch.bfloat16))
            matrices = []
            for matrix, scale, kind in ((w13, s13, gated), (w2, s2, None)):
                codes = _integers(_unblocked(matrix))
                scaled = codes * _grouped(_linear(scale, codes.shape[1]).float(), codes.shape[2])
                matrices.append(_unshuffled(scaled, kind))
            _layer(problem, given["output"], x, routing, *matrices, scalars=_scalars(given))
        elif name == "trtllm_fp8_per_tensor_scale_routed_moe":
            scales = tuple(
                given[f"output{part}"] for part in ("1_scales_gate_scalar", "1_scales_scalar", "2_scales_scalar")
            )
            up_first, w2 = _unshuffled(w13.float(), gated), _unshuffled(w2.float(), None)
            _layer(problem, given["output"], x, given["topk_ids"], up_first, w2, scales=scales)
        elif not given.get("use_shuffled_weight", True):
            tokens = x.float() * _grouped(given["hidden_states_scale"].T, H)
            matrices = [
                matrix.float() * _grouped(scale.repeat_interleave(128, 1), matrix.shape[2])
                for matrix, scale in ((w13, s13), (w2, s2))
            ]
            _layer(problem, given["output"], tokens, given["topk_ids"], *matrices, scalars=_scalars(given))
        else:
            is_nvfp4 = name.startswith("trtllm_fp4") and s13.shape[-1] == H // 16
            number = (lambda scale: scale.float()) if is_nvfp4 else _powers
            tokens = _codes(x) if x.dtype == torch.uint8 else x.float()
            if given["hidden_states_scale"] is not None:
                tokens = tokens * _grouped(number(given["hidden_states_scale"]), H)
            matrices = []
            for matrix, scale, kind in ((w13, s13, gated), (w2, s2, None)):
                codes = _codes(matrix) if matrix.dtype == torch.uint8 else matrix.float()
                linear = number(_linear(scale.view(torch.uint8), codes.shape[1]).view(scale.dtype))
                matrices.append(_unshuffled(codes * _grouped(linear, codes.shape[2]), kind))
            scales = tuple(
                given.get(f"output{part}") for part in ("1_scale_gate_scalar", "1_scale_scalar", "2_scale_scalar")
            )
            biases = [given.get("gemm1_bias"), given.get("gemm2_bias")]
            for place, kind in enumerate((gated, None)):
                if biases[place] is not None:
                    biases[place] = _unshuffled(biases[place].unsqueeze(2), kind).squeeze(2)
            _layer(
                problem,
                given["output"],
                tokens,
                given["topk_ids"],
                *matrices,
                scales=scales,
                biases=(biases[0], biases[1]),
                scalars=_scalars(given),
            )

    return run


def _weights(problem: MoEProblem) -> ExpertWeights:
    torch.manual_seed(1)
    halves, count = problem.activation.num_halves, problem.num_local_experts
    w13 = torch.randn(count, halves * I, H) / H**0.5
    w13[:, :I] *= 2.0  # Gate and up differ in size, so that a swap shows.
    return ExpertWeights(
        w13=w13.bfloat16(),
        w2=(torch.randn(count, H, I) / I**0.5).bfloat16(),
        w13_bias=torch.randn(count, halves * I) if problem.has_bias else None,
        w2_bias=torch.randn(count, H) if problem.has_bias else None,
    )


def _inputs(problem: MoEProblem) -> ExpertInputs:
    ids = torch.stack([torch.randperm(problem.num_experts)[:K] for _ in range(T)]).int()
    ids[1, 0] = -1
    expert_map = None
    if problem.is_expert_parallel:
        expert_map = torch.full((problem.num_experts,), -1, dtype=torch.int32)
        expert_map[torch.tensor([5, 0, 6, 3])] = torch.arange(E, dtype=torch.int32)
    return ExpertInputs(torch.randn(T, H).bfloat16(), torch.rand(T, K), ids, expert_map=expert_map)


def _bound(signature: inspect.Signature, given: dict[str, Any]) -> dict[str, Any]:
    bound = signature.bind(**given)
    bound.apply_defaults()
    return dict(bound.arguments)


def _checked(cls: type[Experts], problem: MoEProblem, static: bool) -> None:
    weights, inputs = _weights(problem), _inputs(problem)
    scales: dict[str, torch.Tensor] = {}
    if static:
        plain = dataclasses.replace(problem, quant="unquantized")
        tokens, routes = inputs.hidden_states, (inputs.topk_weights, inputs.topk_ids)
        found = calibrate_activation_scales(plain, weights, tokens, *routes, problem.quant)
        scales = dict(zip(("a13_scale", "a2_scale"), found, strict=True))
    if problem.quant.weight is not None:
        weights = quantize_weights(weights, problem.quant, **scales)
    experts = cls(problem, B200)
    permuted = experts.permute_weights(weights=weights.contiguous(), problem=problem)
    first, second = (torch.empty(shape, dtype=torch.bfloat16) for shape in experts.workspace_shapes(problem, T))
    out = unaligned(T, H)
    experts.apply(out=out, inputs=inputs, weights=permuted, workspace13=first, workspace2=second)
    expected = reference_experts(
        problem, weights, inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, inputs.expert_map
    )
    assert relative_error(out, expected) < layer_tolerance(problem, T)


# fmt: off
CASES = [
    ("FlashInferTrtLlmExperts", "trtllm_bf16_routed_moe", {}, "unquantized"),
    ("FlashInferTrtLlmExperts", "trtllm_bf16_routed_moe", {"activation": "relu2"}, "relu2"),
    ("FlashInferTrtLlmExperts", "trtllm_bf16_routed_moe", {"num_experts": 8, "num_local_experts": E}, "some"),
    ("FlashInferTrtLlmFloat8BlockExperts", "trtllm_fp8_block_scale_routed_moe", {"quant": "fp8_block128"}, "block"),
    ("FlashInferTrtLlmFloat8GroupExperts", "trtllm_fp8_block_scale_routed_moe", {"quant": "mxfp8"}, "mxfp8"),
    ("FlashInferTrtLlmFloat8TensorExperts", "trtllm_fp8_per_tensor_scale_routed_moe", {"quant": "fp8_tensor_static"},
        "tensor"),
    ("FlashInferTrtLlmFloat4Experts", "trtllm_fp4_block_scale_routed_moe", {"quant": "nvfp4"}, "nvfp4"),
    ("FlashInferTrtLlmFloat4Experts", "trtllm_fp4_block_scale_routed_moe",
        {"quant": "nvfp4", "activation": "silu(limit=2.0)"}, "clamped"),
    ("FlashInferTrtLlmFloat4Experts", "trtllm_fp4_block_scale_routed_moe",
        {"quant": "mxfp4_w4a16", "activation": "swigluoai", "has_bias": True}, "gpt-oss"),
    ("FlashInferTrtLlmFloat4Experts", "trtllm_fp4_block_scale_routed_moe", {"quant": "mxfp4_mxfp8"}, "mxfp4_mxfp8"),
    ("FlashInferTrtLlmInteger4Experts", "trtllm_mxint4_block_scale_routed_moe", {"quant": "int4_w4a16_g32"}, "mxint4"),
]
# fmt: on


@pytest.mark.parametrize(("cls", "name", "keywords"), [case[:3] for case in CASES], ids=[case[3] for case in CASES])
def test_trtllm_computes_the_layer_as_its_entry_point_is_documented(
    cls: str, name: str, keywords: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import flashinfer.fused_moe as library

    sizes = {"num_experts": E, "hidden_size": H, "intermediate_size": I, "top_k": K}
    problem = MoEProblem(**{**sizes, **keywords})
    signature, run = inspect.signature(getattr(library, name)), _imitated(problem, name)

    def entry(**given: Any) -> None:
        run(_bound(signature, given))

    monkeypatch.setattr(library, name, entry)
    _checked(getattr(page, cls), problem, static=problem.quant.name in ("fp8_tensor_static", "nvfp4"))


@pytest.mark.parametrize("quant", ["nvfp4", "nvfp4_w4a16", "mxfp4_mxfp8"])
def test_cutedsl_computes_the_layer_as_its_entry_point_is_documented(
    quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import flashinfer.fused_moe as library
    from flashinfer.cute_dsl.utils import convert_sf_from_mma_layout
    from flashinfer.fused_moe.cute_dsl.fused_moe import validate_w4a8_inputs

    problem = MoEProblem(num_experts=E, hidden_size=H, intermediate_size=I, top_k=K, quant=quant)
    signature = inspect.signature(library.cute_dsl_fused_moe)
    is_nvfp4 = quant != "mxfp4_mxfp8"
    group = 16 if is_nvfp4 else 32

    def entry(**given: Any) -> None:
        given = _bound(signature, given)
        assert given["quant_mode"] == {"nvfp4": "w4a4", "nvfp4_w4a16": "w4a16"}.get(quant, "w4a8")
        if not is_nvfp4:
            validate_w4a8_inputs(**{name: given[name] for name in inspect.signature(validate_w4a8_inputs).parameters})
        number = (lambda scale: scale.float()) if is_nvfp4 else _powers
        tokens = given["x"].float() if given["x"].dtype != torch.uint8 else _codes(given["x"])
        if given["x_sf"] is not None:
            tokens = tokens * _grouped(number(given["x_sf"].reshape(T, -1)), H)
        matrices = []
        for name, rows, columns in (("w1", 2 * I, H), ("w2", H, I)):
            swizzled = convert_sf_from_mma_layout(given[f"{name}_weight_sf"], rows, columns, E, group)
            scale = number(_linear(swizzled.reshape(E, -1).view(torch.uint8), rows).view(swizzled.dtype))
            matrices.append(_codes(given[f"{name}_weight"]) * _grouped(scale, columns))
        # Groups of 64 rows of up and of gate, in turn.
        up_first = matrices[0].view(E, -1, 2, 64, H).transpose(1, 2).reshape(E, 2 * I, H)
        inverse = given["fc2_input_scale"]
        first, up = given["w1_alpha"], given["w1_alpha"] * (torch.ones(E) if inverse is None else inverse)
        scales = (first, up, given["w2_alpha"])
        routing = (given["token_selected_experts"], given["token_final_scales"])
        _layer(problem, given["moe_output"], tokens, routing, up_first, matrices[1], scales=scales)

    monkeypatch.setattr(library, "cute_dsl_fused_moe", entry)
    _checked(page.FlashInferCuTeDslExperts, problem, static=quant == "nvfp4")


def test_cutedsl_multiplies_each_experts_own_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batched format: FlashInfer's two quantizers and its masked product, imitated."""
    import flashinfer
    import flashinfer.cute_dsl as library
    from flashinfer.cute_dsl.utils import convert_sf_from_mma_layout

    problem = MoEProblem(
        num_experts=E, hidden_size=H, intermediate_size=I, top_k=K, quant="nvfp4", activation_format="batched"
    )
    quantize = inspect.signature(flashinfer.scaled_fp4_grouped_quantize)
    activate = inspect.signature(flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize)
    product = inspect.signature(library.grouped_gemm_nt_masked)

    # The quantizers divide by the inverse of what they multiply with, so their codes stand for scaled numbers.
    def grouped_quantize(*positional: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = quantize.bind(*positional, **named).arguments
        assert given["a_global_sf"].shape == (E,)
        assert given["a"].data_ptr() % 16 == 0
        return given["a"].float() * given["a_global_sf"].view(E, 1, 1), given["mask"]

    def silu_and_mul(*positional: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given = activate.bind(*positional, **named).arguments
        gate, up = given["a"].float().chunk(2, -1)
        return torch.nn.functional.silu(gate) * up * given["a_global_sf"].view(E, 1, 1), given["mask"]

    def masked_product(*positional: Any, **named: Any) -> None:
        given = product.bind(*positional, **named).arguments
        (rows, counts), (matrix, scale) = given["lhs"], given["rhs"]
        out, options = given["out"], given["kwargs"]
        assert out.permute(2, 0, 1).is_contiguous()
        assert out.data_ptr() % 16 == 0
        assert (given["ab_dtype"], given["sf_dtype"], given["sf_vec_size"]) == ("float4_e2m1fn", "float8_e4m3fn", 16)
        codes = _codes(matrix.permute(2, 0, 1).contiguous())
        swizzled = convert_sf_from_mma_layout(scale, codes.shape[1], codes.shape[2], E, 16).reshape(E, -1)
        linear = _linear(swizzled.view(torch.uint8), codes.shape[1]).view(swizzled.dtype).float()
        whole = codes * _grouped(linear, codes.shape[2])
        result = torch.einsum("emk,enk->emn", rows, whole) * options["alpha"].view(E, 1, 1)
        for expert, count in enumerate(counts.tolist()):
            out[:count, :, expert] = result[expert, :count]

    monkeypatch.setattr(flashinfer, "scaled_fp4_grouped_quantize", grouped_quantize)
    monkeypatch.setattr(flashinfer, "silu_and_mul_scaled_nvfp4_experts_quantize", silu_and_mul)
    monkeypatch.setattr(library, "grouped_gemm_nt_masked", masked_product)

    plain = dataclasses.replace(problem, quant="unquantized", activation_format="standard")
    weights, inputs = _weights(plain), _inputs(plain)
    sample = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    scales = calibrate_activation_scales(plain, weights, *sample, problem.quant)
    weights = quantize_weights(weights, problem.quant, a13_scale=scales[0], a2_scale=scales[1])
    experts = page.FlashInferCuTeDslBatchedExperts(problem, B200)
    permuted = experts.permute_weights(weights=weights.contiguous(), problem=problem)
    first, second = (
        torch.empty(shape, dtype=torch.bfloat16) for shape in experts.workspace_shapes(problem=problem, num_tokens=T)
    )
    counts = torch.tensor([T, 0, 1, 3], dtype=torch.int32)
    batch = unaligned(E, T, H).copy_(inputs.hidden_states)
    out = unaligned(E, T, H)
    inputs = dataclasses.replace(inputs, hidden_states=batch, expert_num_tokens=counts)
    experts.apply(out=out, inputs=inputs, weights=permuted, workspace13=first, workspace2=second)
    standard = dataclasses.replace(problem, activation_format="standard", top_k=1)
    for expert, count in enumerate(counts.tolist()):
        if count:
            ids = torch.full((count, 1), expert, dtype=torch.int32)
            rows = batch[expert, :count]
            expected = reference_experts(standard, weights, rows, torch.ones(count, 1), ids)
            assert relative_error(out[expert, :count], expected) < layer_tolerance(standard, count)


def test_b12x_writes_whole_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    import flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_dispatch as library

    problem = MoEProblem(num_experts=E, hidden_size=H, intermediate_size=I, top_k=K, quant="nvfp4_w4a16")
    signature = inspect.signature(library.launch_sm120_moe)

    def launch(**given: Any) -> None:
        out = signature.bind(**given).arguments["scatter_output"]
        assert out.data_ptr() % 16 == 0
        out.fill_(3.0)

    monkeypatch.setattr(library, "launch_sm120_moe", launch)
    experts = page.FlashInferB12xExperts(problem, Platform.from_name("cuda:sm120"))
    names = ("w13", "w13_scale", "w13_global_scale", "w2", "w2_scale", "w2_global_scale", "workspace")
    weights = PermutedWeights(experts.layouts[0], {}, dict.fromkeys(names, torch.zeros(1)))
    first, second = (torch.empty(shape, dtype=torch.bfloat16) for shape in experts.workspace_shapes(problem, T))
    ids = torch.arange(T * K, dtype=torch.int32).view(T, K) % E
    inputs = ExpertInputs(torch.randn(T, H).bfloat16(), torch.rand(T, K), ids)
    out = unaligned(T, H)
    experts.apply(out=out, inputs=inputs, weights=weights, workspace13=first, workspace2=second)
    assert bool((out == 3.0).all())
