"""What `moereg verify` says of a backend."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_COMMAND: Final = "tests/cli/test_verify.py::"
_VERIFY: Final = "tests/kit/test_verify.py::"
_BROKEN: Final = "tests/kit/test_broken_promises.py::"
_CASES: Final = "tests/kit/test_cases.py::"
_GUARDS: Final = "tests/kit/test_guards.py::"

MUTANTS: Final = (
    Mutant(
        "choosing may import kernel libraries",
        "moereg/testing/deciding.py",
        old="sorted(watch.imported_by(own) & kernel_libraries(cell))",
        new="sorted(watch.imported_by(own) & set())",
        tests=(f"{_VERIFY}test_a_broken_promise_is_an_outcome_of_one_line[importing_predicate]",),
    ),
    Mutant(
        "memory that nothing wrote is zero",
        "moereg/testing/check.py",
        old="if self.kind in _POISONED_KINDS:",
        new="if not _POISONED_KINDS:",
        tests=(f"{_VERIFY}test_a_broken_promise_is_an_outcome_of_one_line[uninitialized]",),
    ),
    Mutant(
        "a drawn layer stays as large as it was drawn",
        "moereg/testing/suite.py",
        old="self._make_simpler(len(self._results) - 1)",
        new="assert self._results",
        tests=(f"{_COMMAND}test_a_drawn_layer_is_made_simpler_and_runs_again",),
    ),
    Mutant(
        "what cannot run here has passed",
        "moereg/testing/outcomes.py",
        old="return True if any(result.check.cell not in self.idle for result in ran) else None",
        new="return True if ran else None",
        tests=(f"{_COMMAND}test_a_machine_that_can_run_nothing_says_why",),
    ),
    Mutant(
        "a part of the checks is evidence",
        "moereg/cli/_verify.py",
        old="    if only:\n        raise UsageError",
        new="    if not path:\n        raise UsageError",
        tests=(f"{_COMMAND}test_a_part_of_the_checks_is_no_evidence",),
    ),
    Mutant(
        "a crash is not told by the line that it came from",
        "moereg/testing/worker.py",
        old="            faulthandler.enable(2)\n",
        new="",
        tests=(f"{_VERIFY}test_a_crash_and_a_hang_are_outcomes_and_the_next_check_runs",),
    ),
    Mutant(
        "reloading is not checked",
        "moereg/testing/listing.py",
        old='    yield "reload", None\n',
        new="",
        tests=("tests/kit/test_conformance.py::test_verifying_runs_every_check_of_the_kit",),
    ),
    Mutant(
        "the interpreter keeps one type of block for all sizes",
        "moereg/testing/interpreter.py",
        old='key = element_ty.name, getattr(element_ty, "address_space", None), str(sizes)',
        new='key = element_ty.name, getattr(element_ty, "address_space", None), str(len(sizes))',
        tests=("tests/kit/test_interpreter.py::test_types_of_blocks_differ_by_element_and_sizes",),
    ),
    Mutant(
        "a device function is never patched within a launch",
        "moereg/testing/interpreter.py",
        old="            if seen[function] and seen[function] <= patched[-1]:\n",
        new="            if patched[-1]:\n",
        tests=("tests/kit/test_interpreter.py::test_a_device_function_patches_what_its_kernel_does_not_see",),
    ),
    Mutant(
        "the interpreter broadcasts nothing",
        "moereg/testing/interpreter.py",
        old='if sizes is not None and sizes == vars(rhs.type).get("_sizes"):',
        new='if sizes is not None and "_sizes" in vars(rhs.type):',
        tests=("tests/kit/test_interpreter.py::test_sums_broadcast_and_wrap_and_are_computed_once",),
    ),
    Mutant(
        "memory that prepare made is not looked at",
        "moereg/testing/checks.py",
        old="for guarded in (memory, self._memory, self._prepare.memory):",
        new="for guarded in (memory, self._memory):",
        tests=(f"{_BROKEN}test_a_broken_promise_is_seen",),
    ),
    Mutant(
        "a planted fault just above the bound is enough",
        "moereg/testing/checks.py",
        old="least = (10 if case.computes",
        new="least = (1 if case.computes",
        tests=(f"{_BROKEN}test_each_fault_must_be_seen_well_above_the_bound",),
    ),
    Mutant(
        "permuted weights may have any layout",
        "moereg/testing/checks.py",
        old="assert layout in layouts,",
        new="assert layout or layouts,",
        tests=(f"{_BROKEN}test_a_broken_promise_is_seen",),
    ),
    Mutant(
        "a reload may leave the old weights",
        "moereg/testing/checks.py",
        old="before.float()) > 0.1,",
        new="before.float()) > -1,",
        tests=(f"{_BROKEN}test_a_broken_promise_is_seen",),
    ),
    Mutant(
        "workspaces may shrink",
        "moereg/testing/checks.py",
        old="assert all(small <= large for",
        new="assert all(small or large for",
        tests=(f"{_BROKEN}test_a_broken_promise_is_seen",),
    ),
    Mutant(
        "a reason may be worded in any way",
        "moereg/testing/checks.py",
        old="assert reason.text[0].islower(),",
        new="assert reason.text[0],",
        tests=(f"{_BROKEN}test_a_broken_promise_is_seen",),
    ),
    Mutant(
        "a kernel may return what it likes",
        "moereg/testing/checks.py",
        old="assert returned is out,",
        new="assert returned is not None,",
        tests=(f"{_BROKEN}test_a_broken_promise_is_seen",),
    ),
    Mutant(
        "numbers may be off by ten bounds",
        "moereg/testing/checks.py",
        old="    if error <= bound:",
        new="    if error <= 10 * bound:",
        tests=(f"{_BROKEN}test_a_broken_promise_is_seen",),
    ),
    Mutant(
        "the last of the calls decides",
        "moereg/testing/checks.py",
        old="    for out in outs:\n        _check_close(case, out, truth)",
        new="    _check_close(case, outs[-1], truth)",
        tests=(f"{_BROKEN}test_a_broken_promise_is_seen",),
    ),
    Mutant(
        "a replay may read an input of the capture",
        "moereg/testing/checks.py",
        old="            getattr(inputs, field.name).copy_(getattr(fresh, field.name))",
        new="            assert hasattr(fresh, field.name)",
        tests=(f"{_BROKEN}test_a_replay_must_read_its_inputs_anew_each_time",),
    ),
    Mutant(
        "nothing in front of a tensor is guarded",
        "moereg/testing/guards.py",
        old="(block.raw[: block.start] != _BYTE).any() | (block.raw[block.end :] != _BYTE).any()",
        new="(block.raw[block.end :] != _BYTE).any()",
        tests=(f"{_BROKEN}test_a_broken_promise_is_seen",),
    ),
    Mutant(
        "freezing once more forgives what was written",
        "moereg/testing/guards.py",
        old="            if number not in self._frozen:\n                self",
        new="            if self._blocks:\n                self",
        tests=(f"{_GUARDS}test_freezing_more_tensors_does_not_forgive_what_was_written",),
    ),
    Mutant(
        "interpreted runs are evidence for a GPU",
        "moereg/testing/outcomes.py",
        old="if cell not in self.idle and cell not in self.imitated and own",
        new="if cell not in self.idle and own",
        tests=(f"{_VERIFY}test_a_run_as_another_platform_passes_and_verifies_nothing",),
    ),
    Mutant(
        "running out of time is no failure",
        "moereg/testing/outcomes.py",
        old='_FAILURES: Final = ("failed", "crashed", "timed_out")',
        new='_FAILURES: Final = ("failed", "crashed")',
        tests=(f"{_VERIFY}test_running_out_of_time_is_a_failure_and_one_print_names_its_check",),
    ),
    Mutant(
        "no call is without tokens",
        "moereg/testing/cases.py",
        old="TOKENS: Final = (0, 1, 2, 17, 63)",
        new="TOKENS: Final = (1, 2, 17, 63)",
        tests=(f"{_CASES}test_calls_have_no_tokens_few_and_many_and_every_routing",),
    ),
    Mutant(
        "stale scratch is never drawn",
        "moereg/testing/guards.py",
        old='FILLS: Final = ("nan", "huge", "stale")',
        new='FILLS: Final = ("nan", "huge")',
        tests=(f"{_GUARDS}test_every_fill_and_every_form_is_drawn",),
    ),
    Mutant(
        "the bound of bfloat16 is ten times larger",
        "moereg/tolerances.py",
        old='"bfloat16": 8e-3,',
        new='"bfloat16": 8e-2,',
        tests=("tests/kit/test_tolerances.py::test_bounds_of_large_layers",),
    ),
    Mutant(
        "a decorated function is left out of a digest",
        "moereg/digest.py",
        old="isinstance(statement, ast.FunctionDef) and not statement.decorator_list",
        new="isinstance(statement, ast.FunctionDef)",
        tests=("tests/kit/test_digest.py::test_a_class_counts_with_what_it_names",),
    ),
    Mutant(
        "names in strings are left out of a digest",
        "moereg/digest.py",
        old='yield from re.findall(r"\\w+", node.value)',
        new="yield from ()",
        tests=("tests/kit/test_digest.py::test_a_class_counts_with_what_it_names",),
    ),
    Mutant(
        "what timed runs left is not compared",
        "moereg/tuning/compare.py",
        old="            errors.append(relative_error(own.outs[0], references[0]))\n",
        new="",
        tests=("tests/tuning/test_compare_hostile.py::test_wrong_in_timed_runs_alone",),
    ),
    Mutant(
        "the kit's worker imports from the current folder",
        "moereg/testing/workers.py",
        old='python_command("moereg.testing.worker"),',
        new='[__import__("sys").executable, "-m", "moereg.testing.worker"],',
        tests=("tests/cli/test_current_folder.py::test_nothing_of_the_current_folder_is_imported",),
    ),
)
