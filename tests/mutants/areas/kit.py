"""What `moereg verify` says of a backend."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_COMMAND: Final = "tests/cli/test_verify.py::"
_VERIFY: Final = "tests/kit/test_verify.py::"

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
)
