"""The layouts that publishers and tools write, by name: each makes a layer of it.

Names and config fields are those of nvidia-modelopt 0.47, DeepSeek-V4, llm-compressor 0.14, transformers 5.23,
auto-round 0.16 and amd-quark 0.13.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from tests.checkpoints import published
from tests.checkpoints.published import (
    BLOCK,
    FP8_DYNAMIC,
    GATE_UP_DOWN,
    NUM_EXPERTS,
    QWEN,
    Layer,
    arguments,
    compressed,
    fused,
    layer_of,
)

partial = functools.partial
ODD: Final = (37, 23)


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head", "*.gate"], **more}


def mixed(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    attention = {"model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}
    return modelopt("MIXED_PRECISION", quantized_layers={**attention, **layers})


NVFP4: Final = {"quant_algo": "NVFP4", "group_size": 16}
BY_PROJECTION: Final = {f"{BLOCK}.experts.{e}.{name}": NVFP4 for e in range(NUM_EXPERTS) for name in GATE_UP_DOWN}
DEEPSEEK_V4: Final = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 1,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "num_hash_layers": 0,
    "swiglu_limit": 10.0,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.5,
    "dtype": "bfloat16",
}
FP8_BLOCK: Final = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
IN_V4: Final = {"block": "layers.0.ffn", "names": ("w1", "w3", "w2")}


def in_v4(**family: Any) -> dict[str, Any]:
    bias = {"layers.0.ffn.gate.bias": torch.randn(NUM_EXPERTS)}
    return {**IN_V4, "family": {**DEEPSEEK_V4, **family}, "extra": bias}


NV: Final = arguments(4, "float", "tensor_group", group_size=16)
INT4: Final = compressed("pack-quantized", arguments(4, "int", "group", group_size=32), None)
GRANITE: Final = {**QWEN, "model_type": "granitemoe", "num_local_experts": NUM_EXPERTS, "shared_intermediate_size": 0}
IN_GRANITE: Final[dict[str, Any]] = {
    "family": {name: value for name, value in GRANITE.items() if name not in ("num_experts", "norm_topk_prob")},
    "block": "model.layers.0.block_sparse_moe",
    "router": "router.layer",
    "intermediate": "intermediate_size",
}
GPT_OSS: Final = {**IN_GRANITE["family"], "model_type": "gpt_oss"}
IN_GPT_OSS: Final[dict[str, Any]] = {
    "family": GPT_OSS,
    "router": "router",
    "has_bias": True,
    "intermediate": "intermediate_size",
}
LLAMA4: Final = {**GPT_OSS, "model_type": "llama4_text", "num_experts_per_tok": 1, "interleave_moe_layer_step": 1}
IN_LLAMA4: Final[dict[str, Any]] = {
    "family": LLAMA4,
    "block": "model.layers.0.feed_forward",
    "router": "router",
    "intermediate": "intermediate_size",
}


DBRX: Final = {
    "model_type": "dbrx",
    "n_layers": 1,
    "d_model": ODD[0],
    "ffn_config": {"ffn_hidden_size": ODD[1], "moe_num_experts": NUM_EXPERTS, "moe_top_k": 2},
    "dtype": "bfloat16",
}
NEMOTRON: Final = {
    "model_type": "nemotron_h",
    "layers_block_type": ["moe"],
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "mlp_hidden_act": "relu2",
    "routed_scaling_factor": 2.5,
    "dtype": "bfloat16",
}
MINIMAX_M3: Final = {
    "model_type": "minimax_m3_vl_text",
    "num_hidden_layers": 1,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_layer_freq": [1],
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "dtype": "bfloat16",
}


# Of moonshotai/Kimi-K3, whose language model is a `kimi_linear`, with other sizes.
KIMI_K3: Final = {
    "model_type": "kimi_linear",
    "num_hidden_layers": 1,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_token": 2,
    "num_shared_experts": 2,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 1.0,
    "latent_moe_use_norm": True,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "dtype": "bfloat16",
}
IN_KIMI_K3: Final[dict[str, Any]] = {
    "family": KIMI_K3,
    "block": "language_model.model.layers.0.block_sparse_moe",
    "names": ("w1", "w3", "w2"),
}


def kimi_k3(width: int = 224) -> Layer:
    """Experts behind a projection from the model's width, which the router reads."""
    inner = layer_of(
        partial(published.mxfp4, weight="weight_packed"),
        compressed("mxfp4-pack-quantized", arguments(4, "float", "group", group_size=32), None),
        **IN_KIMI_K3,
    )
    block, size = IN_KIMI_K3["block"], inner.config["hidden_size"]
    router = torch.randn(NUM_EXPERTS, width).bfloat16()
    others: dict[str, tuple[int, ...]] = {
        "gate.e_score_correction_bias": (NUM_EXPERTS,),
        "routed_expert_down_proj.weight": (size, width),
        "routed_expert_norm.weight": (size,),
        "routed_expert_up_proj.weight": (width, size),
        "shared_experts.up_proj.weight": (8, width),
    }
    tensors = {f"{block}.{name}": torch.randn(shape) for name, shape in others.items()}
    text = {**inner.config, "hidden_size": width, "routed_expert_hidden_size": size}
    return dataclasses.replace(
        inner,
        config={"model_type": "kimi_k3", "text_config": text},
        tensors={**inner.tensors, **tensors, f"{block}.gate.weight": router},
        router=router.double(),
    )


INKLING2: Final = {
    "model_type": "inkling2_text",
    "num_hidden_layers": 1,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "route_scale": 8.0,
    "mlp_gate_softcap": 4.0,
    "mlp_up_softcap": 25.0,
    "dtype": "bfloat16",
}


def inkling2() -> Layer:
    """As transformers' class says that it is published: the config leaves out how experts are stored."""
    block = "model.llm.layers.0.mlp"
    bias = {f"{block}.gate.bias": torch.randn(NUM_EXPERTS)}
    apart = layer_of(published.mxfp8, {}, family=INKLING2, block=block, extra=bias)
    names = ("experts.w13_weight", "experts.w2_weight")
    layer = fused(apart, block=block, names=names, rename=parameters, is_interleaved=True)
    text = {name: value for name, value in layer.config.items() if name != "quantization_config"}
    return dataclasses.replace(layer, config={"model_type": "inkling2", "text_config": text})


def parameters(name: str, part: str) -> str:
    """As transformers' FP8Experts has them."""
    return name if part == "weight" else f"{name}_{part.removeprefix('weight_')}"


def long_parameters(name: str, part: str) -> str:
    """As ModelOpt has them."""
    return name if part == "weight" else f"{name}_{part}"


def auto_round(packing: str, **more: Any) -> dict[str, Any]:
    settings = {"bits": 4, "group_size": 32, "sym": True, "data_type": "int", "act_bits": 16, "iters": 200}
    extra = {f"{BLOCK}.gate": {"bits": 16}, ".*self_attn.*": {"bits": 8}}
    return {"quant_method": "auto-round", "packing_format": packing, **settings, "extra_config": extra, **more}


def quark(weight: Mapping[str, Any], inputs: Mapping[str, Any] | None, **more: Any) -> dict[str, Any]:
    export = {"kv_cache_group": [], "pack_method": "reorder", "weight_format": "real_quantized"}
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": inputs, "bias": None, "output_tensors": None},
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": ["lm_head", "*.mlp.gate"],
        "export": export,
        **more,
    }


def spec(dtype: str, qscheme: str, is_dynamic: bool = False, **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "qscheme": qscheme, "is_dynamic": is_dynamic, "symmetric": True, "ch_axis": 0, **more}


MX: Final = {"group_size": 32, "scale_format": "e8m0"}
FP8_TENSOR: Final = spec("fp8_e4m3", "per_tensor")
QUARK_MXFP4: Final = quark(spec("fp4", "per_group", **MX), spec("fp4", "per_group", True, **MX))
TO_CHANNEL: Final = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}


def _padded_gptq(rows: int, columns: int) -> published.Stored:
    """Three experts in words of eight rows: GPTQModel pads zero points."""
    tensors, values = published.gptq(8, columns)
    tensors["qweight"], tensors["scales"] = tensors["qweight"][:, :rows], tensors["scales"][:, :rows]
    return tensors, values[:rows]


LAYERS: Final[dict[str, tuple[str, Callable[[], Layer]]]] = {
    # ModelOpt: by projection, by a module around them, in other letters, under another class's prefix.
    "mixed": ("nvfp4", lambda: layer_of(published.nvfp4, mixed(BY_PROJECTION), sizes=(80, 48))),
    "mixed coarse": ("nvfp4", lambda: layer_of(published.nvfp4, mixed({f"{BLOCK}.experts": NVFP4}), sizes=(80, 48))),
    "mixed by layer": (
        "fp8_channel_token",
        lambda: layer_of(
            partial(published.per_channel, is_flat=True),
            mixed({"model.layers.0.mlp": {"quant_algo": "fp8_per_channel_per_token"}, "mtp.layers.0.mlp": NVFP4}),
            sizes=ODD,
        ),
    ),
    "mixed, prefix": (
        "mxfp8",
        lambda: layer_of(
            published.mxfp8,
            mixed({"language_model.model.layers.0.mlp.experts": {"quant_algo": "MXFP8", "group_size": 32}}),
            block="model.language_model.layers.0.mlp",
        ),
    ),
    "modelopt_fp8": ("fp8_tensor_static", lambda: layer_of(published.per_tensor, modelopt("FP8"), sizes=ODD)),
    "modelopt_pb": (
        "fp8_block128",
        lambda: layer_of(
            partial(published.blocks, name="weight_scale", is_wide=True), modelopt("fp8_pb_wo"), sizes=(136, 128)
        ),
    ),
    "modelopt_mxfp4": ("mxfp4_w4a16", lambda: layer_of(published.mxfp4, modelopt("mxfp4", group_size=32))),
    "modelopt_w4a8": (
        "mxfp4_w4a16",
        lambda: layer_of(partial(published.mxfp4, input_scale=0.5), modelopt("W4A8_MXFP4_FP8", group_size=32)),
    ),
    "modelopt_int8": ("int8_w8a16", lambda: layer_of(published.int8_channel, modelopt("W8A16"), sizes=ODD)),
    "modelopt_fp4": (
        "nvfp4_w4a16",
        lambda: layer_of(
            partial(published.nvfp4, has_inputs=False),
            modelopt(
                "NVFP4", quant_method="modelopt_fp4", config_groups={"g": {"weights": {}, "input_activations": None}}
            ),
            sizes=(80, 48),
        ),
    ),
    "weight only with inputs": (
        "nvfp4_w4a16",
        lambda: layer_of(published.nvfp4, modelopt("W4A16_NVFP4", group_size=16), sizes=(80, 48)),
    ),
    "mixed, fused names": (
        "nvfp4",
        lambda: layer_of(
            published.nvfp4,
            mixed(
                {
                    "model.layers.0.mlp": {"quant_algo": "FP8"},
                    f"{BLOCK}.experts.gate_up_proj": NVFP4,
                    f"{BLOCK}.experts.down_proj": NVFP4,
                }
            ),
            sizes=(80, 48),
        ),
    ),
    "fused mixed": (
        "nvfp4",
        lambda: fused(layer_of(published.nvfp4, mixed(BY_PROJECTION), sizes=(80, 48)), rename=long_parameters),
    ),
    "mixed nemotron": (
        "nvfp4",
        lambda: layer_of(
            published.nvfp4,
            mixed({"backbone.layers.0.mixer.experts": NVFP4}),
            sizes=(80, 48),
            family={**NEMOTRON, "n_routed_experts": NUM_EXPERTS},
            block="backbone.layers.0.mixer",
            names=("up_proj", "down_proj"),
            extra={"backbone.layers.0.mixer.gate.e_score_correction_bias": torch.randn(NUM_EXPERTS)},
        ),
    ),
    "mixed minimax_m3": (
        "nvfp4",
        lambda: layer_of(
            published.nvfp4,
            mixed({"language_model.model.layers.0.block_sparse_moe.experts": NVFP4}),
            sizes=(80, 48),
            family=MINIMAX_M3,
            block="language_model.model.layers.0.block_sparse_moe",
            names=("w1", "w3", "w2"),
            extra={"language_model.model.layers.0.block_sparse_moe.e_score_correction_bias": torch.randn(NUM_EXPERTS)},
            intermediate="intermediate_size",
        ),
    ),
    # DeepSeek-V4, with fp4 and with fp8 experts.
    "deepseek_v4": (
        "mxfp4_mxfp8",
        lambda: layer_of(published.deepseek_v4, FP8_BLOCK, **in_v4(expert_dtype="fp4")),
    ),
    "deepseek_v4.1": (
        "mxfp4_mxfp8",
        lambda: layer_of(published.deepseek_v4, {**FP8_BLOCK, "expert_dtype": "fp4"}, **in_v4()),
    ),
    "deepseek_v4 fp8": (
        "fp8_block128",
        lambda: layer_of(partial(published.blocks, name="scale"), FP8_BLOCK, sizes=(136, 256), **in_v4()),
    ),
    "deepseek_v4 nvfp4": ("nvfp4", lambda: layer_of(published.nvfp4, modelopt("NVFP4"), sizes=(80, 48), **in_v4())),
    # Divided by llm-compressor.
    "divided granite": (
        "fp8_channel_token",
        lambda: layer_of(published.per_channel, FP8_DYNAMIC, sizes=ODD, **IN_GRANITE),
    ),
    "divided gpt_oss": (
        "fp8_channel_token",
        lambda: layer_of(published.per_channel, FP8_DYNAMIC, sizes=ODD, **IN_GPT_OSS),
    ),
    "divided llama4": ("int4_w4a16_g32", lambda: layer_of(published.packed_int4, INT4, **IN_LLAMA4)),
    "divided dbrx": (
        "fp8_channel_token",
        lambda: layer_of(
            published.per_channel,
            FP8_DYNAMIC,
            sizes=ODD,
            family=DBRX,
            block="transformer.blocks.0.ffn",
            experts="experts.mlp",
            names=("w1", "v1", "w2"),
            router="router.layer",
        ),
    ),
    "mixtral mxfp4": (
        "mxfp4_w4a16",
        lambda: layer_of(
            published.mxfp4,
            {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
            family={**GPT_OSS, "model_type": "mixtral"},
            block="model.layers.0.block_sparse_moe",
            names=("w1", "w3", "w2"),
            intermediate="intermediate_size",
        ),
    ),
    # Fused.
    "fused granite": (
        "fp8_channel_token",
        lambda: fused(
            layer_of(published.per_channel, FP8_DYNAMIC, sizes=ODD, **IN_GRANITE),
            block=IN_GRANITE["block"],
            names=("input_linear", "output_linear"),
        ),
    ),
    "fused fp8": (
        "fp8_block128",
        lambda: fused(layer_of(published.blocks, FP8_BLOCK, sizes=(136, 128)), rename=parameters),
    ),
    "fused fp8 qwen3_vl": (
        "fp8_block128",
        lambda: fused(
            layer_of(
                published.blocks,
                FP8_BLOCK,
                sizes=(136, 256),
                family={**QWEN, "model_type": "qwen3_vl_moe_text"},
                block="model.language_model.layers.0.mlp",
            ),
            block="model.language_model.layers.0.mlp",
            rename=parameters,
            is_transposed=True,
        ),
    ),
    "fused fp8 per matrix": (
        "fp8_tensor_dynamic",
        lambda: fused(
            layer_of(
                partial(published.per_tensor, is_static=False, shape=(1, 1)),
                {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None},
                sizes=ODD,
            ),
            rename=parameters,
        ),
    ),
    "fused fp4": (
        "mxfp4_mxfp8",
        lambda: fused(
            layer_of(partial(published.mxfp4, scale="weight_scale_inv"), {**FP8_BLOCK, "expert_dtype": "fp4"}),
            rename=parameters,
        ),
    ),
    "fused fp4, float scales": (
        "mxfp4_mxfp8",
        lambda: fused(
            layer_of(published.mxfp4_in_floats, {**FP8_BLOCK, "scale_fmt": "float", "expert_dtype": "fp4"}),
            rename=parameters,
        ),
    ),
    "fused nvfp4 modules": (
        "nvfp4",
        lambda: fused(
            layer_of(
                published.nvfp4_divided,
                compressed("nvfp4-pack-quantized", NV, NV | {"dynamic": "local"}),
                sizes=(80, 48),
            )
        ),
    ),
    "fused mxfp8": (
        "mxfp8",
        lambda: fused(
            layer_of(partial(published.mxfp8, name="weight_scale_inv"), {**FP8_BLOCK, "weight_block_size": [1, 32]}),
            rename=parameters,
        ),
    ),
    "fused packed": ("int4_w4a16_g32", lambda: fused(layer_of(published.packed_int4, INT4), rename=parameters)),
    "fused packed modules": ("int4_w4a16_g32", lambda: fused(layer_of(published.packed_int4, INT4))),
    "fused llama4": (
        "nvfp4",
        lambda: fused(
            layer_of(published.nvfp4, modelopt("NVFP4", ignore=["*router*"]), sizes=(80, 48), **IN_LLAMA4),
            block=IN_LLAMA4["block"],
            rename=long_parameters,
            is_transposed=True,
        ),
    ),
    "fused gpt_oss": (
        "fp8_channel_token",
        lambda: fused(
            layer_of(published.per_channel, FP8_DYNAMIC, sizes=ODD, **IN_GPT_OSS),
            rename=long_parameters,
            is_interleaved=True,
        ),
    ),
    "kimi_k3": ("mxfp4_w4a16", kimi_k3),
    "fused inkling2": ("mxfp8", inkling2),
    # AutoRound.
    "auto_round auto_gptq": ("int4_w4a16_g32", lambda: layer_of(published.gptq, auto_round("auto_round:auto_gptq"))),
    "auto_round deepseek_v4": (
        "int4_w4a16_g32",
        lambda: layer_of(
            published.gptq,
            auto_round("auto_round:gptq", extra_config={"head": {"bits": 16, "data_type": "float"}}),
            router_writer=_padded_gptq,
            **in_v4(),
        ),
    ),
    "auto_round": (
        "int4_w4a16_g32_zp",
        lambda: layer_of(
            partial(published.gptq, offset=0, is_symmetric=False), auto_round("auto_round:gptqmodel", sym=False)
        ),
    ),
    "auto_round auto_awq": (
        "int4_w4a16_g32_zp",
        lambda: layer_of(published.awq, auto_round("auto_round:auto_awq", sym=False, quant_method="intel/auto-round")),
    ),
    "auto_round mx": (
        "mxfp4_w4a16",
        lambda: layer_of(
            partial(published.mxfp4, weight="weight_packed"),
            auto_round("auto_round:mx_fp", data_type="mx_fp", act_bits=4, act_group_size=32, act_data_type="mx_fp"),
        ),
    ),
    "auto_round nv": (
        "nvfp4",
        lambda: layer_of(
            published.nvfp4_divided,
            auto_round("auto_round:nv_fp", data_type="nv_fp", group_size=16, act_bits=4, act_group_size=16),
            sizes=(80, 48),
        ),
    ),
    "auto_round fp8": (
        "fp8_block128",
        lambda: layer_of(
            published.blocks,
            auto_round("auto_round:fp8", data_type="fp", bits=8, group_size=[128, 128], act_bits=8, act_group_size=128),
            sizes=(136, 128),
        ),
    ),
    # Quark.
    "quark fp8": (
        "fp8_tensor_static",
        lambda: layer_of(published.per_tensor, quark(FP8_TENSOR, FP8_TENSOR), sizes=ODD),
    ),
    "quark ptpc": (
        "fp8_channel_token",
        lambda: layer_of(
            partial(published.per_channel, is_flat=True),
            quark(spec("fp8_e4m3", "per_channel"), spec("fp8_e4m3", "per_channel", True)),
            sizes=ODD,
        ),
    ),
    "quark mxfp4": ("mxfp4_w4a16", lambda: layer_of(published.mxfp4, QUARK_MXFP4)),
    "quark for transformers": (
        "fp8_tensor_static",
        lambda: layer_of(
            published.quantizer_names,
            {"quant_method": "quark", "quant_config": quark(FP8_TENSOR, FP8_TENSOR)},
            sizes=ODD,
        ),
    ),
    "quark by layer": (
        "mxfp4_w4a16",
        lambda: layer_of(
            published.mxfp4,
            quark(
                spec("int8", "per_channel"),
                spec("int8", "per_tensor"),
                layer_quant_config={"*.experts.*": {"weight": spec("fp4", "per_group", **MX), "input_tensors": None}},
            ),
        ),
    ),
    # Routers that are quantized.
    "gptq with its router": (
        "int4_w4a16_g32",
        lambda: layer_of(
            published.gptq,
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
            router_writer=_padded_gptq,
        ),
    ),
    "fp8 with its router": (
        "fp8_block128",
        lambda: layer_of(published.blocks, FP8_BLOCK, sizes=(136, 128), router_writer=published.blocks),
    ),
}


def made(name: str) -> Layer:
    torch.manual_seed(sum(name.encode()))
    return LAYERS[name][1]()
