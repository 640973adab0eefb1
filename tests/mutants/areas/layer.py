"""Layers: checks, sharing, workspaces, reloads, movement of tokens."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        "no tokens are run",
        "moereg/layer.py",
        old="if hidden_states.shape[0] == 0:",
        new="if hidden_states.shape[0] < 0:",
        tests=("tests/layer/test_layer_calls.py::test_experts_are_not_called_for_no_tokens",),
    ),
    Mutant(
        "contiguous ranks are off by one expert",
        "moereg/placement.py",
        old="first = ep_rank * problem.num_local_experts",
        new="first = ep_rank * problem.num_local_experts + 1",
        tests=("tests/layer/test_placement.py::test_contiguous_ranks_sum_to_the_whole",),
    ),
    Mutant(
        "64-bit ids wrap around",
        "moereg/layer.py",
        old="topk_ids.clamp(-1, problem.num_experts).to(torch.int32)",
        new="topk_ids.to(torch.int32)",
        tests=("tests/layer/test_layer.py::test_int64_ids",),
    ),
    Mutant(
        "an id past the experts is looked up in the map",
        "moereg/kernels/plain/device.py",
        old="known = (topk_ids >= 0) & (topk_ids < num_experts)",
        new="known = topk_ids >= 0",
        tests=("tests/layer/test_prepare_finalize.py::test_local_ids",),
    ),
    Mutant(
        "outputs of routes are summed in 16 bits",
        "moereg/prepare_finalize/base.py",
        old="rows.float() if apply_router_weight_on_input else rows.float() * topk_weights.unsqueeze(-1)",
        new="rows if apply_router_weight_on_input else rows * topk_weights.unsqueeze(-1).to(rows.dtype)",
        tests=("tests/layer/test_prepare_finalize.py::test_products_with_routing_weights_are_in_fp32",),
    ),
    Mutant(
        "cut tensors outlive the buffer",
        "moereg/workspace.py",
        old=("        self._views.clear()\n        self._buffer = None"),
        new="        self._buffer = None",
        tests=("tests/layer/test_workspace.py::test_one_buffer_grows_to_the_largest_need",),
    ),
    Mutant(
        "the second workspace is not aligned",
        "moereg/workspace.py",
        old="start += _aligned_bytes(shape, dtype)",
        new="start += math.prod(shape) * dtype.itemsize",
        tests=("tests/layer/test_workspace.py::test_tensors_are_aligned_and_apart",),
    ),
    Mutant(
        "threads share one buffer",
        "moereg/workspace.py",
        old="class _PerThread(threading.local):",
        new="class _PerThread:",
        tests=("tests/layer/test_workspace.py::test_threads_do_not_share",),
    ),
    Mutant(
        "tensors of another dtype are handed out",
        "moereg/workspace.py",
        old="tensors = self._views.get((shapes, dtype))",
        new="tensors = next((found for (known, _), found in self._views.items() if known == shapes), None)",
        tests=("tests/layer/test_workspace.py::test_dtypes_have_views_of_their_own",),
    ),
    Mutant(
        "a reload goes elsewhere",
        "moereg/layer.py",
        old="            self.weights.copy_from(permuted)\n",
        new="            self.weights = permuted\n",
        tests=("tests/layer/test_layer_memory.py::test_reload_keeps_storage",),
    ),
    Mutant(
        "a reload skips tensors",
        "moereg/weights.py",
        old="target.copy_(source.clone() if same else source)",
        new="target.copy_(target)",
        tests=("tests/layer/test_permuted_weights.py::test_copy_from_keeps_storage",),
    ),
    Mutant(
        "a reload of another dtype is taken",
        "moereg/weights.py",
        old="(tuple(value.shape), value.dtype)",
        new="(tuple(value.shape),)",
        tests=("tests/layer/test_permuted_weights.py::test_copy_from_refuses_and_writes_nothing",),
    ),
    Mutant(
        "biases of any dtype are taken",
        "moereg/weights.py",
        old="(problem.torch_dtype, torch.float32) if is_bias else",
        new="(tensor.dtype,) if is_bias else",
        tests=("tests/layer/test_weights.py::test_check_against",),
    ),
    Mutant(
        "the weight on the input is applied twice",
        "moereg/prepare_finalize/batched.py",
        old="row >= 0, problem.apply_router_weight_on_input)",
        new="row >= 0, False)",
        tests=("tests/layer/test_prepare_finalize.py::test_batched_scales_inputs",),
    ),
    Mutant(
        "outputs that overlap an input in part are taken",
        "moereg/call_checks.py",
        old="if address and address < end and start < address + tensor.nbytes:",
        new="if address and address == start:",
        tests=("tests/layer/test_call_checks.py::test_out_aliases_no_input",),
    ),
    Mutant(
        "a class without that argument is not told what it computes",
        "moereg/backend_calls.py",
        old="            experts.computes = computes\n",
        new="            pass\n",
        tests=(
            "tests/selection/test_backend_calls.py::"
            "test_arguments_come_by_name_and_a_class_may_leave_out_what_has_a_default",
        ),
    ),
    Mutant(
        "the experts are not told what they compute",
        "moereg/backend_calls.py",
        old="return chosen(problem=selection.problem, platform=selection.platform, computes=computes)",
        new="return chosen(problem=selection.problem, platform=selection.platform)",
        tests=("tests/backends/test_torch_quantized_moe.py::test_the_kernel_knows_what_it_computes",),
    ),
    Mutant(
        "a deep copy shares the weights",
        "moereg/layer.py",
        old="copy.deepcopy((self.weights, self.expert_map), memo)",
        new="(self.weights, self.expert_map)",
        tests=("tests/layer/test_layer_memory.py::test_a_deep_copy_is_a_kernel_of_its_own",),
    ),
    Mutant(
        "expert 0 named twice goes unnoticed",
        "moereg/call_checks.py",
        old="known = (ordered[:, 1:] >= 0)",
        new="known = (ordered[:, 1:] > 0)",
        tests=("tests/layer/test_layer_calls.py::test_any_expert_named_twice_is_refused",),
    ),
    Mutant(
        "the first call's workspace serves all calls",
        "moereg/layer.py",
        old="shapes = self._workspace_shapes.get(prepared.num_tokens)",
        new="shapes = next(iter(self._workspace_shapes.values()), None)",
        tests=("tests/layer/test_layer_calls.py::test_workspaces_are_of_this_calls_tokens",),
    ),
    Mutant(
        "twice the tokens that were promised",
        "moereg/call_checks.py",
        old="num_tokens > problem.max_num_tokens:",
        new="num_tokens > 2 * problem.max_num_tokens:",
        tests=("tests/layer/test_call_checks.py::test_max_num_tokens_is_kept",),
    ),
    Mutant(
        "the map holds an expert more than there are",
        "moereg/placement.py",
        old="(local < problem.num_local_experts), local, -1)",
        new="(local <= problem.num_local_experts), local, -1)",
        tests=("tests/layer/test_placement.py::test_contiguous_ranks_sum_to_the_whole",),
    ),
)
