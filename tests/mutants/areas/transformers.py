"""Live models of transformers."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_MODELS: Final = "tests/integrations/test_transformers.py"
_FREED: Final = "tests/integrations/test_transformers_freed.py"
_COMPILED: Final = "tests/integrations/test_transformers_compiled.py"
_REFUSED: Final = "tests/integrations/test_transformers_refused.py"
_AGAIN: Final = "tests/integrations/test_prepared_again.py"
_QUANTIZED: Final = "tests/integrations/test_transformers_quantized.py"
_COMMAND: Final = "tests/cli/test_model_dir.py"
_EXPERTS: Final = "moereg/integrations/_experts"

MUTANTS: Final = (
    Mutant(
        "gate and up that alternate are taken for halves",
        f"{_EXPERTS}/layouts.py",
        old="fields[field] = torch.cat([fields[field][:, 0::2], fields[field][:, 1::2]], dim=1)",
        new="fields[field] = fields[field].contiguous()",
        tests=(f"{_MODELS}::test_a_prepared_model_generates_the_tokens_of_eager[gpt_oss]",),
    ),
    Mutant(
        "freed gate and up come back as halves",
        f"{_EXPERTS}/layouts.py",
        old="fields[field] = torch.stack([gate, up], dim=2).flatten(1, 2)",
        new="fields[field] = torch.cat([gate, up], dim=1)",
        tests=(f"{_FREED}::test_state_dict_has_the_bits_of_before[gpt_oss]",),
    ),
    Mutant(
        "gate and up of flat experts change places",
        f"{_EXPERTS}/layouts.py",
        old="w13=torch.cat([w1, v1], dim=1)",
        new="w13=torch.cat([v1, w1], dim=1)",
        tests=(f"{_MODELS}::test_a_prepared_model_generates_the_tokens_of_eager[dbrx]",),
    ),
    Mutant(
        "a gate is recognized by small values alone",
        f"{_EXPERTS}/activation.py",
        old="points = torch.cat([near, far])",
        new="points = near.clamp(-1, 1)",
        tests=(f"{_REFUSED}::test_a_gate_is_recognized_by_what_it_computes",),
    ),
    Mutant(
        "ids of other ranks reach the kernel",
        f"{_EXPERTS}/serving.py",
        old="ids = torch.where(ids < live.num_experts, ids, -1)",
        new="ids = ids.clone()",
        tests=(f"{_MODELS}::test_one_expert_of_a_rank_takes_tokens_of_three_routes",),
    ),
    Mutant(
        "writes in place are not seen",
        "moereg/tensor_state.py",
        old="-1 if tensor.is_inference() else tensor._version",
        new="-1",
        tests=(f"{_MODELS}::test_writes_into_parameters_and_other_parameters_are_followed",),
    ),
    Mutant(
        "weights are freed that do not come back",
        f"{_EXPERTS}/memory.py",
        old="if parameter is None or not same_bits(parameter.detach(), value):",
        new="if parameter is None:",
        tests=(f"{_FREED}::test_what_does_not_come_back_is_kept_and_said",),
    ),
    Mutant(
        "training is not noticed",
        f"{_EXPERTS}/calls.py",
        old="if needs_gradient and module.training:",
        new="if False:",
        tests=(f"{_COMPILED}::TestInference::test_training_is_refused_at_once",),
    ),
    Mutant(
        "an output is cut off from the graph",
        f"{_EXPERTS}/calls.py",
        old="    if not needs_gradient:\n        return out\n",
        new="    return out\n",
        tests=(f"{_COMPILED}::TestInference::test_eval_with_gradients_enabled_runs_and_its_backward_says_why_not",),
    ),
    Mutant(
        "a patch serves models that are not prepared",
        f"{_EXPERTS}/blocks.py",
        old="(original if served(experts) is None else row.forward)",
        new="row.forward",
        tests=(f"{_MODELS}::test_a_patch_leaves_models_alone_that_are_not_prepared",),
    ),
    Mutant(
        "a method that a hook kept is not patched",
        f"{_EXPERTS}/blocks.py",
        old='if "_old_forward" in vars(block):',
        new="if False:",
        tests=(f"{_MODELS}::test_hooks_of_accelerate_run_and_patched_blocks_run_under_them",),
    ),
    Mutant(
        "offloaded weights are served",
        f"{_EXPERTS}/serving.py",
        old='if getattr(each, "offload", False):',
        new="if False:",
        tests=(f"{_REFUSED}::test_offloaded",),
    ),
    Mutant(
        "layers before the one that nothing fits are changed",
        "moereg/integrations/transformers.py",
        old="    selection = select_backend(",
        new="    serving.attach(module, serving.ServedExperts(module, request))\n    selection = select_backend(",
        tests=(f"{_AGAIN}::TestAgain::test_a_request_that_nothing_fits_changes_nothing",),
    ),
    Mutant(
        "another request drops the only copy of freed weights",
        "moereg/integrations/transformers.py",
        old="            known.give_back()  # Its kernel may hold the only copy of the weights.",
        new="            pass",
        tests=(f"{_AGAIN}::TestAgain::test_another_request_keeps_freed_weights",),
    ),
    Mutant(
        "freed weights stay as they are where the model is converted",
        f"{_EXPERTS}/memory.py",
        old="        if any(fn(probe) is not probe for probe in probes):",
        new="        if False:",
        tests=(f"{_AGAIN}::TestFreedAndChanged::test_another_dtype_brings_them_back_converted[mixtral]",),
    ),
    Mutant(
        "load_state_dict into tensors of inference mode is not seen",
        f"{_EXPERTS}/serving.py",
        old="        found.forget()",
        new="        pass",
        tests=(f"{_AGAIN}::TestWritten::test_load_state_dict_is_seen_in_models_of_inference_mode[mixtral]",),
    ),
    Mutant(
        "rows of scales of MXFP4 stay in the order of the codes",
        f"{_EXPERTS}/layouts.py",
        old='for field in ("w13", "w13_scale", "w13_bias"):',
        new='for field in ("w13", "w13_bias"):',
        tests=(f"{_QUANTIZED}::test_mxfp4_experts_are_patched_at_their_block",),
    ),
    Mutant(
        "layers that are refused fit",
        "moereg/cli/_explain.py",
        old="return all(layer.backend is not None for layer in self.layers)",
        new="return True",
        tests=(f"{_COMMAND}::test_what_is_not_served_exits_with_3_and_the_reason",),
    ),
    Mutant(
        "tied experts are freed",
        "moereg/integrations/_experts/memory.py",
        old="if address and count > 1)",
        new="if False)",
        tests=("tests/integrations/test_transformers_freed.py::test_tied_experts_stay_tied",),
    ),
    Mutant(
        "experts that an adapter wraps are freed",
        "moereg/integrations/_experts/memory.py",
        old='is_wrapped = name.rpartition(".")[2] == "base_layer"',
        new="is_wrapped = False",
        tests=("tests/integrations/test_transformers_freed.py::test_experts_with_an_adapter_are_not_freed",),
    ),
    Mutant(
        "parametrized weights are read once",
        "moereg/integrations/_experts/serving.py",
        old='if any("parametrizations" in',
        new='if False and any("parametrizations" in',
        tests=("tests/integrations/test_transformers_freed.py::test_each_adapter_of_experts_is_seen",),
    ),
    Mutant(
        "a token names no more experts than its rank has",
        "moereg/integrations/_experts/serving.py",
        old="all_experts=max(live.num_experts + 1, top_k)",
        new="all_experts=live.num_experts + 1",
        tests=("tests/integrations/test_transformers.py::test_one_expert_of_a_rank_takes_tokens_of_three_routes",),
    ),
    Mutant(
        "a hook stays where a model is restored",
        "moereg/integrations/_experts/serving.py",
        old="        module._load_state_dict_post_hooks,\n    ):",
        new="    ):",
        tests=("tests/integrations/test_prepared_again.py::test_restore_leaves_nothing_of_ours",),
    ),
    Mutant(
        "weights are read at each call once they were written",
        "moereg/integrations/_experts/serving.py",
        old="self._states, self._is_stale = states, False",
        new="self._states = states",
        tests=(
            "tests/integrations/test_transformers.py::test_writes_into_parameters_and_other_parameters_are_followed",
        ),
    ),
    Mutant(
        "a kernel serves every dtype",
        "moereg/integrations/_experts/serving.py",
        old="key = (top_k, dtype)",
        new="key = (top_k, torch.float32)",
        tests=(
            "tests/integrations/test_transformers_quantized.py::test_fp8_experts_are_served_through_their_own_interface",
        ),
    ),
)
