"""Compiles layers whose activations are rounded in 16 bits, for devices that are not there; as `aot_compile`.

python tests/kernels/aot_emulated.py sm_90=mx_decode
"""

from __future__ import annotations

from typing import Any

import torch

from moereg.backends.triton_moe import TritonEmulatedBatchedExperts, TritonEmulatedExperts
from moereg.experts import ExpertInputs
from moereg.platforms import Platform
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights
from tests.kernels.aot_compile import compile_targets, compiling_only, describe

# tokens, scheme, hidden, intermediate, whether global scales are given, and what else the problem says; in the batched
# format tokens are max_T
CASES: dict[str, tuple[int, str, int, int, bool, dict[str, Any]]] = {
    "nvfp4_decode": (16, "nvfp4", 2048, 768, False, {}),
    "nvfp4_static_prefill": (4096, "nvfp4", 4096, 14336, True, {"dtype": "float16"}),
    "nvfp4_odd": (4096, "nvfp4", 511, 129, False, {"has_bias": True}),
    "nvfp4_batched": (256, "nvfp4", 2048, 768, True, {"activation_format": "batched"}),
    "mx_decode": (16, "mxfp4_mxfp8", 2880, 2880, False, {"activation": "swigluoai", "has_bias": True}),
    "mx_prefill": (4096, "mxfp4_mxfp8", 2880, 2880, False, {"activation": "swigluoai", "has_bias": True}),
}


def launch_layer(target: str, case: str) -> None:
    """Everything that a call of a case's layer launches."""
    tokens, scheme, hidden, intermediate, static, keywords = CASES[case]
    problem = MoEProblem(
        num_experts=8, hidden_size=hidden, intermediate_size=intermediate, top_k=2, quant=scheme, **keywords
    )

    def empty(*shape: int, dtype: torch.dtype = problem.torch_dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = problem.quant.tensor_rows(8, hidden, intermediate, problem.activation.num_halves, problem.has_bias)
    canonical = {
        row.name: empty(*row.shapes[0], dtype=row.dtype or problem.torch_dtype)
        for row in rows
        if row.required or static
    }
    batched = problem.activation_format == "batched"
    platform = Platform.from_name("rocm:gfx942" if target.startswith("gfx") else f"cuda:{target.replace('_', '')}")
    layer = (TritonEmulatedBatchedExperts if batched else TritonEmulatedExperts)(problem, platform)
    weights = layer.permute_weights(ExpertWeights(**canonical, quant=problem.quant), problem)
    hidden_states = empty(8, tokens, hidden) if batched else empty(tokens, hidden)
    inputs = ExpertInputs(
        hidden_states,
        empty(tokens, 2, dtype=torch.float32),
        empty(tokens, 2, dtype=torch.int32),
        expert_num_tokens=empty(8, dtype=torch.int32) if batched else None,
    )
    scratch = [empty(*shape) for shape in layer.workspace_shapes(problem, tokens)]
    layer.apply(torch.empty_like(hidden_states), inputs, weights, *scratch)


def rows_of(target: str, case: str, shared_bytes: int, done: set[str]) -> list[dict[str, Any]]:
    """What rounds, and products."""
    with compiling_only(done) as compiled:
        launch_layer(target, case)
    # The others are the 16-bit layer's too.
    names = ("_requantize_rows_kernel", "_gate_up_kernel", "_down_kernel")
    return [describe(target, case, *kernel) for kernel in compiled if kernel[0] in names]


if __name__ == "__main__":
    compile_targets(rows_of, list(CASES))
