"""What run, bench, info and explain say."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        "the error is compared the wrong way",
        "moereg/cli/_run.py",
        old="return self.relative_error <= self.tolerance  #",
        new="return not self.relative_error <= self.tolerance  #",
        tests=("tests/cli/test_run.py::test_the_local_experts_that_a_refusal_names_fit",),
    ),
    Mutant(
        "rows that are left out count as failures",
        "moereg/cli/_ep.py",
        old='ran = [row for row in self.rows if not (row["failure"] or "").startswith("left out")]',
        new="ran = list(self.rows)",
        tests=("tests/cli/test_ep.py::test_rows_that_are_left_out_have_not_failed",),
    ),
    Mutant(
        "not a number passes",
        "moereg/cli/_run.py",
        old="return self.relative_error <= self.tolerance  #",
        new="return not self.relative_error > self.tolerance  #",
        tests=("tests/cli/test_run.py::test_not_a_number_is_null_and_exit_1",),
    ),
    Mutant(
        "the reference computes the checkpoint's activations",
        "moereg/tuning/compare.py",
        old="*call, computes=scheme) for call in checked]",
        new="*call, computes=self.problem.quant) for call in checked]",
        tests=("tests/tuning/test_compare_hostile.py::test_each_candidate_is_checked_against_what_it_computes",),
    ),
    Mutant(
        "the last layer with experts",
        "moereg/cli/_subject.py",
        old="layer = with_experts[0]",
        new="layer = with_experts[-1]",
        tests=("tests/cli/test_run_checkpoint.py::test_a_checkpoint_is_named",),
    ),
    Mutant(
        "time in milliseconds",
        "moereg/cli/_run.py",
        old="time_us=row.timing.median_us if row.timing else None",
        new="time_us=row.timing.median_us / 1e3 if row.timing else None",
        tests=("tests/cli/test_cli_numbers.py::test_run_gives_the_median_in_us_and_permuting_in_ms",),
    ),
    Mutant(
        "the scheme's loss is the output's error",
        "moereg/cli/_run.py",
        old="loss = relative_error(reference, reference_experts(_plain_problem",
        new="loss = relative_error(out, reference_experts(_plain_problem",
        tests=("tests/cli/test_cli_numbers.py::test_the_loss_is_the_schemes_whatever_the_backend_computes",),
    ),
    Mutant(
        "a bench passes where one is right",
        "moereg/cli/_bench.py",
        old="return all(row.passed for row in self.rows)",
        new="return any(row.passed for row in self.rows)",
        tests=("tests/cli/test_bench.py::test_bench_gives_a_wrong_backend_no_time",),
    ),
    Mutant(
        "slowest first",
        "moereg/cli/_bench.py",
        old="row.time_us if row.timing else 0.0)",
        new="-row.time_us if row.timing else 0.0)",
        tests=("tests/cli/test_cli_numbers.py::test_bench_for_people_has_the_fastest_first_and_marks_it",),
    ),
    Mutant(
        "p90 is p10",
        "moereg/cli/_bench.py",
        old="row.timing.p90_us if row.timing",
        new="row.timing.p10_us if row.timing",
        tests=("tests/cli/test_cli_numbers.py::test_bench_numbers_are_those_of_the_samples",),
    ),
    Mutant(
        "explain says that what does not fit does",
        "moereg/cli/_layer_commands.py",
        old="return OK if selection.winner else NOTHING_FITS",
        new="return OK",
        tests=("tests/cli/test_explain.py::test_nothing_fits_is_exit_3_with_every_reason",),
    ),
    Mutant(
        "wrong numbers exit as right ones",
        "moereg/cli/_exits.py",
        old="return NOTHING_FITS if passed is None else OK if passed else WRONG_NUMBERS",
        new="return NOTHING_FITS if passed is None else OK",
        tests=("tests/cli/test_run.py::test_wrong_numbers_are_exit_1",),
    ),
    Mutant(
        "a run's verdict is always right",
        "moereg/cli/_show_results.py",
        old='style="bold green") if result.passed else Text("WRONG"',
        new='style="bold green") if True else Text("WRONG"',
        tests=("tests/cli/test_run.py::test_wrong_numbers_are_exit_1",),
    ),
    Mutant(
        "a time in the unit of another",
        "moereg/cli/_units.py",
        old='f"{_digits(time_us / scale)} {unit}"',
        new='f"{_digits(time_us)} {unit}"',
        tests=("tests/cli/test_cli_numbers.py::test_run_for_people_has_units_that_read_well",),
    ),
    Mutant(
        "the slowest is marked fastest",
        "moereg/cli/_show_results.py",
        old='"fastest" if row is rows[0]',
        new='"fastest" if row is rows[-1]',
        tests=("tests/cli/test_cli_numbers.py::test_bench_for_people_has_the_fastest_first_and_marks_it",),
    ),
    Mutant(
        "runs here is inverted",
        "moereg/cli/_show_info.py",
        old="yes_no(not machine_reasons(cell, platform))",
        new="yes_no(bool(machine_reasons(cell, platform)))",
        tests=("tests/cli/test_cli_numbers.py::test_info_says_yes_where_the_cell_runs_here",),
    ),
    Mutant(
        "p10 to p10",
        "moereg/cli/_show_results.py",
        old="format_us_range(row.timing.p10_us, row.timing.p90_us)",
        new="format_us_range(row.timing.p10_us, row.timing.p10_us)",
        tests=("tests/cli/test_cli_numbers.py::test_bench_for_people_has_the_fastest_first_and_marks_it",),
    ),
    Mutant(
        "a candidate counts as verified wherever it was",
        "moereg/cli/_show.py",
        old="    if evidence.on(platform):\n        return Text(",
        new="    if evidence.current:\n        return Text(",
        tests=("tests/cli/test_explain.py::test_every_candidate_says_whether_it_was_verified",),
    ),
    Mutant(
        "a model that is released quantized is not noted",
        "moereg/cli/_options.py",
        old="if self.model is not None and self.quant is None:",
        new="if self.model is not None and self.quant is not None:",
        tests=("tests/cli/test_explain.py::test_sixteen_bits_of_a_model_that_is_released_quantized",),
    ),
    Mutant(
        "a bench of a checkpoint is of random weights",
        "moereg/cli/_bench.py",
        old="if subject.checkpoint is not None and subject.layer is not None:",
        new="if subject.checkpoint is not None and subject.layer is None:",
        tests=("tests/cli/test_run_checkpoint.py::test_bench_of_a_checkpoint_is_of_its_weights",),
    ),
    Mutant(
        "the spelling that is nearest goes before the names that begin so",
        "moereg/errors.py",
        old="if near and len(typed) >= fewest_letters:",
        new="if near and len(typed) < fewest_letters:",
        tests=("tests/cli/test_cli.py::test_bad_input_is_one_line_and_exit_2",),
    ),
)
