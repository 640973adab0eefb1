"""Checkpoints: names, layouts, formats; and routing."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        "zero points of GPTQ v1 lack their one",
        "moereg/checkpoints/_gptq.py",
        old="canonical_zero_points(stored + _ONE_IN_EACH_NIBBLE if",
        new="canonical_zero_points(stored if",
        tests=("tests/checkpoints/test_quantized_checkpoints.py::test_a_format_stands_for_what_its_library_says",),
    ),
    Mutant(
        "AWQ's nibbles in natural order",
        "moereg/checkpoints/_awq.py",
        old="_ORDER: Final = (0, 2, 4, 6, 1, 3, 5, 7)",
        new="_ORDER: Final = (0, 1, 2, 3, 4, 5, 6, 7)",
        tests=("tests/checkpoints/test_quantized_checkpoints.py::test_a_format_stands_for_what_its_library_says",),
    ),
    Mutant(
        "scales of blocks may not be 16-bit",
        "moereg/checkpoints/_fp8.py",
        old='("F32", "BF16", "F16", "F8_E8M0")',
        new='("F32",)',
        tests=("tests/checkpoints/test_quantized_checkpoints.py::test_a_format_stands_for_what_its_library_says",),
    ),
    Mutant(
        "gate and up in halves where they are interleaved",
        "moereg/checkpoints/_parts.py",
        old="deinterleave_gate_up(canonical, out=rows, dim=0)",
        new="rows.copy_(canonical)",
        tests=("tests/checkpoints/test_models.py::test_a_layer_computes_what_the_saved_module_computes",),
    ),
    Mutant(
        "the last of two static scales stands",
        "moereg/checkpoints/_parts.py",
        old="canonical if self.half == 0 else torch.maximum(rows, canonical.to(rows))",
        new="canonical",
        tests=("tests/checkpoints/test_quantized_checkpoints.py::test_gate_and_up_share_the_larger_static_scale",),
    ),
    Mutant(
        "Mixtral's down projection as its up",
        "moereg/checkpoints/_models.py",
        old='projections=("w1", "w3", "w2")',
        new='projections=("w3", "w1", "w2")',
        tests=("tests/checkpoints/test_models.py::test_a_layer_computes_what_the_saved_module_computes",),
    ),
    Mutant(
        "Qwen's sparse layers begin at 0",
        "moereg/checkpoints/_models.py",
        old="in range(step - 1, num_layers, step) if layer not in dense_layers",
        new="in range(0, num_layers, step) if layer not in dense_layers",
        tests=("tests/checkpoints/test_models.py::test_a_layer_computes_what_the_saved_module_computes",),
    ),
    Mutant(
        "gpt-oss is read as not interleaved",
        "moereg/checkpoints/_models.py",
        old=("            is_interleaved=True,\n            has_bias=True,"),
        new=("            is_interleaved=False,\n            has_bias=True,"),
        tests=("tests/checkpoints/test_models.py::test_a_layer_computes_what_the_saved_module_computes",),
    ),
    Mutant(
        "DeepSeek's frequency is ignored",
        "moereg/checkpoints/_models.py",
        old="if layer % frequency == 0",
        new="if layer % 1 == 0",
        tests=("tests/checkpoints/test_models.py::test_moe_layers_that_models_made_by_transformers_do_not_show",),
    ),
    Mutant(
        "a rank reads all experts",
        "moereg/checkpoints/_manifest.py",
        old="listed = list(list_parts(model, sizes, storage, experts_root, expert))",
        new="listed = list(list_parts(model, sizes, storage, experts_root, expert - experts.start))",
        tests=("tests/checkpoints/test_checkpoints.py::test_a_rank_reads_only_its_own_experts",),
    ),
    Mutant(
        "global scales multiply where they divide",
        "moereg/checkpoints/_compressed_layouts.py",
        old="    return 1 / number",
        new="    return number",
        tests=("tests/checkpoints/test_quantized_checkpoints.py::test_a_format_stands_for_what_its_library_says",),
    ),
    Mutant(
        "zero points are not transposed",
        "moereg/checkpoints/_compressed_layouts.py",
        old="return canonical_zero_points(stored.mT, rows)",
        new="return canonical_zero_points(stored.reshape(stored.mT.shape), rows)",
        tests=("tests/checkpoints/test_quantized_checkpoints.py::test_a_format_stands_for_what_its_library_says",),
    ),
    Mutant(
        "the correction bias is rounded",
        "moereg/checkpoints/_load.py",
        old="read(manifest.correction_bias, torch.float32)",
        new="read(manifest.correction_bias, problem.torch_dtype)",
        tests=("tests/checkpoints/test_models.py::test_correction_bias_keeps_32_bits",),
    ),
    Mutant(
        "the router's logits are always 16-bit",
        "moereg/checkpoints/_layer.py",
        old="torch.float32 if self.router.fp32_logits else self.router_weight.dtype",
        new="self.router_weight.dtype",
        tests=("tests/checkpoints/test_models.py::test_route_equals_the_models_own_router",),
    ),
    Mutant(
        "the least exact target is taken",
        "moereg/checkpoints/_compressed_tensors.py",
        old="parse(found.index(max(found)))",
        new="parse(found.index(min(score for score in found if score)))",
        tests=("tests/checkpoints/test_quantized_checkpoints.py::test_compressed_tensors_picks_the_most_exact_target",),
    ),
    Mutant(
        "a part of a component's name matches",
        "moereg/checkpoints/_patterns.py",
        old='rf"(?:^|\\.)(?:{text})(?:\\.|$)"',
        new='rf"(?:^|\\.)(?:{text})"',
        tests=("tests/checkpoints/test_patterns.py::test_a_pattern_means_whole_components",),
    ),
    Mutant(
        "DeepSeek-V3's epsilon is 1e-6",
        "moereg/routing/topk.py",
        old="_DEEPSEEK_V3_EPSILON: Final = 1e-20",
        new="_DEEPSEEK_V3_EPSILON: Final = 1e-6",
        tests=("tests/layer/test_routing.py::test_small_sigmoids_are_renormalized_all_the_same",),
    ),
    Mutant(
        "sigmoid for softmax",
        "moereg/routing/topk.py",
        old="torch.topk(torch.softmax(router_logits.float(), dim=-1), top_k, dim=-1)",
        new="torch.topk(torch.sigmoid(router_logits.float()), top_k, dim=-1)",
        tests=("tests/layer/test_routing.py::test_equals_the_router_of_transformers",),
    ),
    Mutant(
        "a group's score is its best expert's",
        "moereg/routing/topk.py",
        old=".topk(2, dim=-1).values.sum(dim=-1)",
        new=".amax(dim=-1)",
        tests=("tests/layer/test_routing.py::test_equals_the_router_of_transformers",),
    ),
    Mutant(
        "the correction bias counts in the weight",
        "moereg/routing/topk.py",
        old="topk_weights = scores.gather(-1, topk_ids)",
        new="topk_weights = choice_scores.gather(-1, topk_ids)",
        tests=("tests/layer/test_routing.py::test_equals_the_router_of_transformers",),
    ),
    Mutant(
        "a group's score is its sum",
        "moereg/routing/topk.py",
        old="_group(scores, num_groups).amax(dim=-1)",
        new="_group(scores, num_groups).sum(dim=-1)",
        tests=("tests/layer/test_routing.py::test_equals_the_router_of_transformers",),
    ),
    Mutant(
        "DeepSeek-V2 weights are renormalized",
        "moereg/routing/topk.py",
        old=(
            "    topk_weights, topk_ids = torch.topk(scores, top_k, dim=-1)\n    return topk_weights * scaling_factor"
        ),
        new=(
            "    topk_weights, topk_ids = torch.topk(scores, top_k, dim=-1)\n"
            "    topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)\n"
            "    return topk_weights * scaling_factor"
        ),
        tests=("tests/layer/test_routing.py::test_equals_the_router_of_transformers",),
    ),
    Mutant(
        "Llama 4's weight is the logit",
        "moereg/routing/topk.py",
        old="return torch.sigmoid(topk_logits), topk_ids",
        new="return topk_logits, topk_ids",
        tests=("tests/layer/test_routing.py::test_equals_the_router_of_transformers",),
    ),
    Mutant(
        "other groups are masked with 0",
        "moereg/routing/topk.py",
        old='masked_fill(~is_best.unsqueeze(-1), float("-inf"))',
        new="masked_fill(~is_best.unsqueeze(-1), 0.0)",
        tests=("tests/layer/test_routing.py::test_experts_of_other_groups_are_out_whatever_the_scores",),
    ),
    Mutant(
        "renormalized where the config does not say so",
        "moereg/routing/configs.py",
        old='renormalize=read_flag(config, "norm_topk_prob"), **',
        new="renormalize=True, **",
        tests=("tests/layer/test_router_spec.py::test_published_configs",),
    ),
    Mutant(
        "DeepSeek-V3's scaling factor is 1",
        "moereg/routing/configs.py",
        old=('        scaling_factor=read_number(config, "routed_scaling_factor"),\n        has_correction_bias=True'),
        new=("        scaling_factor=1.0,\n        has_correction_bias=True"),
        tests=("tests/layer/test_routing.py::test_equals_the_router_of_transformers",),
    ),
)
