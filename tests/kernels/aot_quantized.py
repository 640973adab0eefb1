"""Compiles the Triton kernels of quantized weights and activations for devices that are not there; as `aot_compile`.

python tests/kernels/aot_quantized.py sm_90=mx_decode
"""

from __future__ import annotations

from typing import Any

import torch

from moereg.backends._triton import quantized
from moereg.backends.triton_moe import TritonQuantizedBatchedExperts, TritonQuantizedExperts
from moereg.experts import ExpertInputs
from moereg.platforms import Platform
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights
from tests.kernels.aot_compile import compile_targets, compiling_only, describe

# tokens (rows an expert has room for), scheme, experts, top_k, hidden, intermediate, and what else the problem says
CASES: dict[str, tuple[int, str, int, int, int, int, dict[str, Any]]] = {
    "block_one_token": (1, "fp8_block128", 128, 8, 2048, 768, {}),
    "block_decode": (16, "fp8_block128", 256, 8, 7168, 2048, {}),
    "block_to_11_rows": (64, "fp8_block128", 256, 8, 7168, 2048, {}),
    "block_to_100_rows": (1024, "fp8_block128", 256, 8, 7168, 2048, {}),
    "block_prefill": (4096, "fp8_block128", 128, 8, 2048, 768, {}),
    "block_coded": (64, "fp8_block128", 8, 2, 1288, 512, {"arrives_coded": True}),
    "block_odd": (4096, "fp8_block128", 8, 2, 511, 129, {"has_bias": True}),
    "channel_decode": (16, "fp8_channel_token", 128, 8, 2048, 768, {}),
    "channel_prefill": (4096, "fp8_channel_token", 128, 8, 2048, 768, {}),
    "static_prefill": (4096, "fp8_tensor_static", 8, 2, 4096, 14336, {}),
    "dynamic_prefill": (4096, "fp8_tensor_dynamic", 8, 2, 4096, 14336, {}),
    "mx_decode": (16, "mxfp8", 128, 8, 2048, 768, {}),
    "mx_prefill": (4096, "mxfp8", 128, 8, 2048, 768, {}),
    "mx4_decode": (16, "mxfp4_mxfp8", 128, 4, 2880, 2880, {"activation": "swigluoai", "has_bias": True}),
    "mx4_prefill": (4096, "mxfp4_mxfp8", 128, 4, 2880, 2880, {"activation": "swigluoai", "has_bias": True}),
    "nv4_decode": (16, "nvfp4", 128, 8, 2048, 768, {}),
    "nv4_prefill": (4096, "nvfp4", 128, 8, 2048, 768, {}),
    "int8_decode": (16, "int8_w8a8", 128, 8, 2048, 768, {}),
    "int8_prefill": (4096, "int8_w8a8", 128, 8, 2048, 768, {"activation": "relu2"}),
    "block_batched_decode": (16, "fp8_block128", 128, 8, 2048, 768, {"activation_format": "batched"}),
    "nv4_batched_prefill": (4096, "nvfp4", 128, 8, 2048, 768, {"activation_format": "batched"}),
    "dynamic_batched_prefill": (4096, "fp8_tensor_dynamic", 8, 2, 4096, 14336, {"activation_format": "batched"}),
}

# What tells products apart: types, scales that an instruction applies itself, and those of 16 columns of e2m1.
KINDS = ("e4m3", ".s8", ".f16.f16", ".bf16", ".block_scale", "mxf4nvf4")


def launch_layer(target: str, case: str) -> None:
    """Everything that a call of a case's layer launches."""
    tokens, scheme, experts, top_k, hidden, intermediate, keywords = CASES[case]
    keywords = dict(keywords)
    is_coded = keywords.pop("arrives_coded", False)
    problem = MoEProblem(
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        top_k=top_k,
        quant=scheme,
        **keywords,
    )

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = problem.quant.tensor_rows(experts, hidden, intermediate, problem.activation.num_halves, problem.has_bias)
    dtype = problem.torch_dtype
    canonical = {row.name: empty(*row.shapes[0], dtype=row.dtype or dtype) for row in rows}
    platform = Platform.from_name("rocm:gfx942" if target.startswith("gfx") else f"cuda:{target.replace('_', '')}")
    is_batched = problem.activation_format == "batched"
    layer = (TritonQuantizedBatchedExperts if is_batched else TritonQuantizedExperts)(problem, platform)
    if isinstance(layer.implementation, quantized.Standard):
        # `gluon_aot` compiles these.
        layer.implementation.has_hopper = False
    weights = layer.permute_weights(ExpertWeights(**canonical, quant=problem.quant), problem)
    lead = (experts, tokens) if is_batched else (tokens,)
    hidden_states = empty(*lead, hidden, dtype=dtype)
    inputs = ExpertInputs(
        hidden_states.to(torch.float8_e4m3fn) if is_coded else hidden_states,
        empty(tokens, top_k, dtype=torch.float32),
        empty(tokens, top_k, dtype=torch.int32),
        expert_num_tokens=empty(experts, dtype=torch.int32) if is_batched else None,
        hidden_scale=empty(tokens, -(-hidden // 128), dtype=torch.float32) if is_coded else None,
    )
    scratch = [empty(*shape, dtype=dtype) for shape in layer.workspace_shapes(problem, tokens)]
    layer.apply(torch.empty_like(hidden_states), inputs, weights, *scratch)


def rows_of(target: str, case: str, shared_bytes: int, done: set[str]) -> list[dict[str, Any]]:
    """What rounds, and products, with the words that tell these apart."""
    with compiling_only(done) as compiled:
        launch_layer(target, case)
    found = []
    for name, kernel in compiled:
        # The others are the 16-bit layer's too.
        if any(word in name for word in ("quantize", "amax", "coded")):
            products = [line for line in kernel.asm.get("ptx", "").splitlines() if "mma" in line]
            words = {word: sum(word in line for line in products) for word in KINDS}
            found.append(describe(target, case, name, kernel) | {"products": words})
    return found


if __name__ == "__main__":
    compile_targets(rows_of, list(CASES))
