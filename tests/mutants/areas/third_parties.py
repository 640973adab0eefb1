"""What third parties meet: the quarantine, the pytest plugin and written wheels."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_QUARANTINE: Final = "tests/selection/test_quarantine.py::"
_COMMAND: Final = "tests/cli/test_quarantine.py::"
_PLUGIN: Final = "tests/kit/test_pytest_plugin.py::"

MUTANTS: Final = (
    Mutant(
        "updated versions stay quarantined",
        "moereg/quarantine.py",
        old="return self.versions == _versions(cell, platform) and self.digest",
        new="return self.digest",
        tests=(f"{_QUARANTINE}test_versions_are_those_that_the_cell_runs_on",),
    ),
    Mutant(
        "repaired code stays quarantined",
        "moereg/quarantine.py",
        old=" and self.digest == _digest_once(cell.experts)",
        new="",
        tests=(f"{_QUARANTINE}test_changed_code_is_selected_again",),
    ),
    Mutant(
        "a named platform is quarantined",
        "moereg/quarantine.py",
        old="rule is None or not platform.probed:\n            return None\n        found",
        new="rule is None:\n            return None\n        found",
        tests=(f"{_QUARANTINE}test_schemes_are_held_one_by_one_and_other_machines_are_not",),
    ),
    Mutant(
        "what somebody else may write is believed",
        "moereg/quarantine.py",
        old="or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)",
        new="",
        tests=(f"{_QUARANTINE}test_a_file_that_others_may_write_is_not_believed",),
    ),
    Mutant(
        "what belongs to somebody else is believed",
        "moereg/quarantine.py",
        old="status.st_uid not in (os.geteuid(), 0) or ",
        new="",
        tests=(f"{_QUARANTINE}test_a_file_that_others_may_write_is_not_believed",),
    ),
    Mutant(
        "the file is written in place",
        "moereg/quarantine.py",
        old="            os.fsync(file.fileno())\n        os.replace(name, path)",
        new="        os.replace(name, path)\n        os.fsync(os.open(path, os.O_RDONLY))",
        tests=(f"{_QUARANTINE}test_a_write_that_fails_leaves_the_file_and_no_other",),
    ),
    Mutant(
        "writers do not wait for each other",
        "moereg/quarantine.py",
        old='with filelock.FileLock(f"{path}.lock", timeout=_LOCK_SECONDS):',
        new="with contextlib.nullcontext():",
        tests=(f"{_QUARANTINE}test_writers_take_turns",),
    ),
    Mutant(
        "deciding forgets the quarantine",
        "moereg/dispatch.py",
        old=", quarantine=read_quarantine()",
        new="",
        tests=(f"{_QUARANTINE}test_selection_reads_the_file_that_the_variable_names",),
    ),
    Mutant(
        "a failure of one scheme quarantines all",
        "moereg/cli/_quarantine.py",
        old="return cell.schemes if computed is None else (computed,)",
        new="return cell.schemes",
        tests=(f"{_COMMAND}test_a_check_of_one_scheme_quarantines_that_scheme",),
    ),
    Mutant(
        "a part of the kit lifts the quarantine",
        "moereg/cli/_quarantine.py",
        old="if is_whole and name in known",
        new="if name in known",
        tests=(f"{_COMMAND}test_a_cell_that_passes_everything_is_lifted",),
    ),
    Mutant(
        "what is imitated is quarantined",
        "moereg/cli/_quarantine.py",
        old="name in report.imitated or name in report.idle or ",
        new="",
        tests=(f"{_COMMAND}test_what_this_machine_does_not_select_is_left",),
    ),
    Mutant(
        "a crash passes in pytest",
        "moereg/pytest_plugin.py",
        old='if outcome.status != "passed":',
        new='if outcome.status == "failed":',
        tests=(f"{_PLUGIN}test_checks_are_tests_with_their_outcomes",),
    ),
    Mutant(
        "the plugin imports the kit",
        "moereg/pytest_plugin.py",
        old="if TYPE_CHECKING:\n    from",
        new="if not TYPE_CHECKING:\n    from",
        tests=(f"{_PLUGIN}test_it_costs_nothing_when_it_is_not_used",),
    ),
    Mutant(
        "a folder in use is written into",
        "moereg/cli/_new_backend.py",
        old="if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):",
        new="if folder.exists() and not folder.is_dir():",
        tests=("tests/cli/test_new_backend.py::test_it_writes_over_nothing",),
    ),
    Mutant(
        "a written backend adds rows of experts elsewhere",
        "moereg/cli/_wheel/backend.py.template",
        old="inputs.topk_ids, problem.num_local_experts, inputs.expert_map)",
        new="inputs.topk_ids, problem.num_local_experts, None)",
        tests=("tests/cli/test_new_backend.py::test_the_backend_keeps_the_contract",),
    ),
)
