"""moereg's needs of vLLM as data: versions, and the functions, fields and tensors that its source must have.

`violations` reads source files, so that it also judges an unpacked wheel that cannot run here.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

__all__ = ["CONTRACT", "FIRST", "PAST_LAST", "TENSORS", "Need", "violations"]

FIRST: Final = "0.26"
PAST_LAST: Final = "0.34"
"""Versions in [FIRST, PAST_LAST) are served."""

_MOE: Final = "model_executor/layers/fused_moe/"
_QUANT: Final = "model_executor/layers/quantization/"
_COMPRESSED: Final = _QUANT + "compressed_tensors/compressed_tensors_moe/"

_CALL: Final = (
    "topk_weights topk_ids activation global_num_experts expert_map apply_router_weight_on_input".split()  # noqa: SIM905
)


@dataclasses.dataclass(frozen=True)
class Need:
    """A class or function that must exist.

    Attributes:
        file: Its file below the package.
        name: Its dotted name there.
        takes: Parameters that a function must accept by name, or fields that a class must have.
        exactly: Whether a function may have no others, since moereg overrides it.
        abstract: For a class: whether its abstract methods must be among `takes`, since moereg subclasses it.
    """

    file: str
    name: str
    takes: tuple[str, ...] = ()
    exactly: bool = False
    abstract: bool = False


CONTRACT: Final = (
    Need(
        _MOE + "routed_experts.py",
        "RoutedExperts.__init__",
        ("params_dtype", "swiglu_limit", "swiglu_alpha", "swiglu_beta", "apply_router_weight_on_input"),
    ),
    Need(_MOE + "routed_experts.py", "RoutedExperts._get_quant_method", ("prefix", "quant_config", "moe_config"), True),
    Need(_MOE + "routed_experts.py", "RoutedExperts._expert_routing_tables", (), True),
    Need(
        _MOE + "fused_moe_method_base.py",
        "FusedMoEMethodBase.apply",
        ("layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input"),
        True,
    ),
    Need(
        _MOE + "fused_moe_method_base.py",
        "FusedMoEMethodBase.maybe_roundup_sizes",
        ("hidden_size", "intermediate_size_per_partition", "act_dtype", "moe_parallel_config"),
        True,
    ),
    *(
        Need(_MOE + "fused_moe_method_base.py", f"FusedMoEMethodBase.{name}")
        for name in ("is_monolithic", "has_unpadded_output", "skip_forward_padding", "supports_eplb")
    ),
    Need(_MOE + "modular_kernel.py", "FusedMoEKernel.__init__", ("prepare_finalize", "fused_experts"), True),
    Need(_MOE + "modular_kernel.py", "FusedMoEKernel.apply", ("hidden_states", "w1", "w2", *_CALL)),
    Need(
        _MOE + "modular_kernel.py",
        "FusedMoEExpertsModular.apply",
        (
            *("output", "hidden_states", "w1", "w2", *_CALL, "a1q_scale", "a2_scale"),
            *("workspace13", "workspace2", "expert_tokens_meta"),
        ),
        True,
    ),
    Need(
        _MOE + "modular_kernel.py",
        "FusedMoEExpertsModular.workspace_shapes",
        ("M", "N", "K", "topk", "global_num_experts", "local_num_experts", "expert_tokens_meta", "activation"),
        True,
    ),
    Need(_MOE + "modular_kernel.py", "FusedMoEExpertsModular.moe_problem_size", ("a1", "w1", "w2", "topk_ids"), True),
    Need(
        _MOE + "modular_kernel.py",
        "FusedMoEExpertsModular",
        ("apply", "workspace_shapes", "finalize_weight_and_reduce_impl"),
        abstract=True,
    ),
    Need(
        _MOE + "modular_kernel.py",
        "FusedMoEExperts",
        (
            *("activation_format", "_supports_current_device", "_supports_no_act_and_mul", "_supports_activation"),
            *("_supports_quant_scheme", "_supports_parallel_config"),
        ),
        abstract=True,
    ),
    Need(
        _MOE + "all2all_utils.py",
        "maybe_make_prepare_finalize",
        ("moe", "quant_config", "routing_tables", "allow_new_interface", "use_monolithic"),
    ),
    Need(_MOE + "topk_weight_and_reduce.py", "TopKWeightAndReduceNoOP"),
    Need(_MOE + "config.py", "FusedMoEQuantConfig.make"),
    Need(
        _MOE + "config.py",
        "FusedMoEConfig",
        (
            *("num_experts", "experts_per_token", "hidden_dim", "num_local_experts", "activation", "in_dtype"),
            *("moe_parallel_config", "moe_backend", "max_num_tokens", "has_bias", "is_lora_enabled"),
            *("intermediate_size_per_partition", "aiter_fmoe_shared_expert_enabled"),
        ),
    ),
    Need("config/parallel.py", "ParallelConfig", ("enable_elastic_ep", "use_ubatching")),
    Need("config/model.py", "ModelConfig", ("enforce_eager",)),
    Need("config/offload.py", "OffloadConfig", ("uva", "prefetch")),
    Need("config/offload.py", "UVAOffloadConfig", ("cpu_offload_gb",)),
    Need("config/offload.py", "PrefetchOffloadConfig", ("offload_group_size",)),
    Need("config/vllm.py", "VllmConfig", ("offload_config", "additional_config", "device_config", "load_config")),
    Need("config/load.py", "LoadConfig", ("load_format",)),
    Need(
        _MOE + "config.py",
        "FusedMoEParallelConfig",
        (
            *("dp_size", "pcp_size", "use_ep", "enable_eplb", "all2all_backend"),
            "use_all2all_kernels",
        ),
    ),
)

_WEIGHTS: Final = ("w13_weight", "w2_weight", "w13_weight_scale", "w2_weight_scale")
_INT4: Final = ("w13_qweight", "w2_qweight", "w13_scales", "w2_scales", "w13_qzeros", "w2_qzeros")
_PACKED: Final = ("w13_weight_packed", "w2_weight_packed", "w13_weight_scale", "w2_weight_scale")
_FP4: Final = (*_PACKED, "w13_weight_global_scale", "w2_weight_global_scale", "w13_input_global_scale")

TENSORS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "UnquantizedFusedMoEMethod": (_MOE + "unquantized_fused_moe_method.py", ("w13_weight", "w2_weight", "w13_bias")),
    "Fp8MoEMethod": (_QUANT + "fp8.py", ("w13_weight", "w2_weight", "w13_input_scale", "w2_input_scale")),
    "GptOssMxfp4MoEMethod": (_QUANT + "mxfp4.py", (*_WEIGHTS, "w13_bias", "w2_bias")),
    "AutoGPTQMoEMethod": (_QUANT + "auto_gptq.py", _INT4),
    "AutoAWQMoEMethod": (_QUANT + "auto_awq.py", _INT4),
    "ModelOptFp8MoEMethod": (_QUANT + "modelopt.py", (*_WEIGHTS, "w13_input_scale", "w2_input_scale")),
    "ModelOptMxFp8FusedMoE": (_QUANT + "modelopt.py", _WEIGHTS),
    "ModelOptNvFp4FusedMoE": (_QUANT + "modelopt.py", (*_WEIGHTS, "w13_weight_scale_2", "w13_input_scale")),
    "CompressedTensorsW8A8Fp8MoEMethod": (
        _COMPRESSED + "compressed_tensors_moe_w8a8_fp8.py",
        (*_WEIGHTS, "w13_input_scale", "w2_input_scale"),
    ),
    "CompressedTensorsW8A8Int8MoEMethod": (_COMPRESSED + "compressed_tensors_moe_w8a8_int8.py", _WEIGHTS),
    "CompressedTensorsW8A8Mxfp8MoEMethod": (_COMPRESSED + "compressed_tensors_moe_w8a8_mxfp8.py", _WEIGHTS),
    "CompressedTensorsW4A4Mxfp4MoEMethod": (_COMPRESSED + "compressed_tensors_moe_w4a4_mxfp4.py", _PACKED),
    "CompressedTensorsW4A4Nvfp4MoEMethod": (_COMPRESSED + "compressed_tensors_moe_w4a4_nvfp4.py", _FP4),
    "CompressedTensorsWNA16MoEMethod": (
        _COMPRESSED + "compressed_tensors_moe_wna16.py",
        _PACKED,
    ),
}
"""The quantization methods whose weights moereg reads: their file, and parameters that they must register.

vLLM 0.26 also has CompressedTensorsWNA16MarlinMoEMethod, with the same parameters as the last one.
"""


def violations(package: Path) -> list[str]:
    """Needs of the contract that a vLLM does not meet.

    Args:
        package: The folder of the package `vllm`.

    Returns:
        One clause for each need that is not met, in the contract's order; empty if moereg can serve it.
    """
    trees: dict[str, Mapping[str, ast.AST]] = {}
    for file in dict.fromkeys([*(need.file for need in CONTRACT), *(file for file, _ in TENSORS.values())]):
        try:
            trees[file] = dict(_definitions(ast.parse((package / file).read_text(encoding="utf-8"))))
        except OSError:
            trees[file] = {}
    found = [clause for need in CONTRACT for clause in _broken(need, trees[need.file])]
    for name, (file, tensors) in TENSORS.items():
        node = trees[file].get(name)
        if node is None:
            found.append(f"{file} has no class {name}")
            continue
        texts = {each.value for each in ast.walk(node) if isinstance(each, ast.Constant)}
        if missing := [tensor for tensor in tensors if tensor not in texts]:
            found.append(f"{name} registers no {', '.join(missing)}")
    return found


def _broken(need: Need, tree: Mapping[str, ast.AST]) -> Iterator[str]:
    node = tree.get(need.name)
    if node is None:
        yield f"{need.file} has no {need.name}"
        return
    if isinstance(node, ast.ClassDef):
        names = set(_fields(node))
        if need.abstract:
            if extra := sorted(_abstract(node) - set(need.takes)):
                yield f"{need.name} has further abstract methods: {', '.join(extra)}"
            return
        if missing := [name for name in need.takes if name not in names]:
            yield f"{need.name} has no {', '.join(missing)}"
        return
    assert isinstance(node, ast.FunctionDef)
    arguments = node.args
    names = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)} - {"self", "cls"}
    if missing := [name for name in need.takes if name not in names]:
        yield f"{need.name} takes no {', '.join(missing)}"
    if need.exactly and (extra := sorted(names - set(need.takes))):
        yield f"{need.name} also takes {', '.join(extra)}"


def _definitions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in getattr(tree, "body", ()):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _definitions(node, f"{prefix}{node.name}.")


def _fields(node: ast.ClassDef) -> Iterable[str]:
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
        elif isinstance(each, ast.FunctionDef):
            yield each.name


def _abstract(node: ast.ClassDef) -> set[str]:
    return {
        each.name
        for each in node.body
        if isinstance(each, ast.FunctionDef)
        and any(ast.unparse(decorator).endswith("abstractmethod") for decorator in each.decorator_list)
    }
