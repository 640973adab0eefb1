"""moereg's needs of SGLang as data: versions, and the names that its source must have.

`violations` reads source files, so that it also judges an unpacked wheel that cannot run here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

__all__ = ["FIRST", "NEEDS", "PAST_LAST", "violations"]

FIRST: Final = "0.5.15"
PAST_LAST: Final = "0.5.24"
"""Versions in [FIRST, PAST_LAST) are served."""

_WEIGHTS: Final = "w13_weight w2_weight w13_weight_bias w2_weight_bias"

NEEDS: Final[Mapping[str, Mapping[str, str]]] = {
    "runtime_context.py": {"get_server_args": ""},
    "layers/moe/fused_moe_triton/layer.py": {
        "FusedMoE.__init__": ".layer_id .quant_method .moe_runner_config .dispatcher "
        ".should_fuse_routed_scaling_factor_in_topk",
        "FusedMoE.run_moe_core": "layer dispatch_output",
    },
    "layers/moe/moe_runner/base.py": {
        "MoeRunnerConfig": "num_experts num_local_experts hidden_size intermediate_size_per_partition top_k activation "
        "is_gated params_dtype apply_router_weight_on_input no_combine routed_scaling_factor gemm1_alpha "
        "gemm1_clamp_limit swiglu_limit gate_up_interleaved"
    },
    "layers/moe/token_dispatcher/standard.py": {
        "StandardDispatcher.dispatch": ".local_expert_mapping",
        "StandardDispatchOutput": "hidden_states topk_output",
        "StandardCombineInput": "hidden_states",
    },
    "layers/moe/topk.py": {"StandardTopKOutput": "topk_weights topk_ids"},
    "layers/moe/utils.py": {"get_moe_runner_backend": "", "get_moe_a2a_backend": "", "MoeA2ABackend": "is_none"},
    "layers/quantization/unquant.py": {
        "UnquantizedFusedMoEMethod": _WEIGHTS,
        "UnquantizedFusedMoEMethod.apply": "layer dispatch_output",
        "UnquantizedFusedMoEMethod.process_weights_after_loading": "layer",
    },
    "layers/quantization/fp8.py": {
        "Fp8Config": "is_checkpoint_fp8_serialized weight_block_size",
        "Fp8MoEMethod": f"{_WEIGHTS} w13_weight_scale_inv w2_weight_scale_inv .quant_config .use_mxfp8 "
        ".is_fp4_expert .dequant_fp4_to_fp8",
        "Fp8MoEMethod.apply": "layer dispatch_output",
        "Fp8MoEMethod.process_weights_after_loading": "layer",
    },
}
"""Parameters, fields, .attributes and strings that must stand in a class or function, by file of `sglang.srt`."""


def violations(package: Path) -> list[str]:
    """One clause for each need that an SGLang does not meet, whose folder of the package `sglang` is given."""
    clauses = []
    for file, needs in NEEDS.items():
        path = package / "srt" / file
        found = dict(_definitions(ast.parse(path.read_text(encoding="utf-8")))) if path.is_file() else {}
        for name, names in needs.items():
            if name not in found:
                clauses.append(f"{file} has no {name}")
            elif missing := sorted(set(names.split()) - set(_names(found[name]))):
                clauses.append(f"{name} has no {', '.join(missing)}")
    return clauses


def _definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in getattr(tree, "body", ()):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield prefix + node.name, node
            yield from _definitions(node, f"{prefix}{node.name}.")


def _names(tree: ast.AST) -> Iterator[object]:
    for node in ast.walk(tree):
        yield from (getattr(node, field, None) for field in ("arg", "id", "name", "value"))
        yield f".{getattr(node, 'attr', '')}"
