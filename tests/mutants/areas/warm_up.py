"""Compiling before the first call."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_WARM_UP: Final = "tests/warm_up/test_warm_up.py"
_AHEAD: Final = "tests/warm_up/test_compile_ahead.py"

MUTANTS: Final = (
    Mutant(
        "only the first number of each block is looked at",
        "moereg/warm_up/worker.py",
        old="for count in counts[number::num_blocks]:",
        new="for count in counts[number : number + 1]:",
        tests=(f"{_AHEAD}::test_after_compiling_ahead_nothing_compiles",),
    ),
    Mutant(
        "paths of a moved folder stay",
        "moereg/kernels/launch/cache.py",
        old="here = {name: str(group.parent / Path(path).name)",
        new="here = {name: path",
        tests=(f"{_WARM_UP}::test_a_folder_that_was_moved_serves_there",),
    ),
    Mutant(
        "settings of the compiler are not compared",
        "moereg/kernels/launch/cache.py",
        old="if made_by.get(name) != facts[name]:",
        new='if name != "settings" and made_by.get(name) != facts[name]:',
        tests=(f"{_WARM_UP}::test_a_folder_of_another_compiler_is_refused[settings]",),
    ),
    Mutant(
        "a task whose fork ended is not answered",
        "moereg/warm_up/fan_out.py",
        old="for task in sorted(unanswered)",
        new="for task in ()",
        tests=(f"{_WARM_UP}::test_work_is_spread_over_forks",),
    ),
    Mutant(
        "numbers that a caller names are not called",
        "moereg/warm_up/here.py",
        old="to_run = tuple(sorted({*found.counts, *named}))",
        new="to_run = found.counts",
        tests=(f"{_WARM_UP}::test_calls_load_what_was_compiled",),
    ),
    Mutant(
        "what one layer asked for serves another number of tokens",
        "moereg/warm_up/here.py",
        old="counts[0], counts[-1], hash(counts), has_map",
        new="counts[0], has_map",
        tests=(f"{_WARM_UP}::test_a_process_compiles_for_a_kind_of_layer_once",),
    ),
    Mutant(
        "Triton keeps the folder that was compiled into",
        "moereg/warm_up/shipped.py",
        old='del os.environ["TRITON_CACHE_DIR"]',
        new="pass",
        tests=(f"{_WARM_UP}::test_a_folder_that_was_moved_serves_there",),
    ),
    Mutant(
        "the process that compiles imports from the current folder",
        "moereg/warm_up/ahead.py",
        old='python_command("moereg.warm_up.worker"),',
        new='[__import__("sys").executable, "-m", "moereg.warm_up.worker"],',
        tests=("tests/cli/test_current_folder.py::test_nothing_of_the_current_folder_is_imported",),
    ),
)
