"""Timing, comparing, rooflines, inputs."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        "all experts are moved",
        "moereg/tuning/roofline.py",
        old="local.unique().numel() * expert_bytes",
        new="local.numel() * expert_bytes",
        tests=("tests/tuning/test_roofline.py::test_only_active_experts_are_moved",),
    ),
    Mutant(
        "the roofline is the smaller of both times",
        "moereg/tuning/roofline.py",
        old="        max(work.num_bytes / ceilings",
        new="        min(work.num_bytes / ceilings",
        tests=("tests/tuning/test_roofline.py::test_the_roofline_is_the_larger_of_both_times",),
    ),
    Mutant(
        "scales do not count as bytes",
        "moereg/tuning/roofline.py",
        old="* (row.dtype or problem.torch_dtype).itemsize for row in rows)",
        new="* problem.torch_dtype.itemsize for row in rows)",
        tests=("tests/tuning/test_roofline.py::test_bytes_of_an_expert",),
    ),
    Mutant(
        "half of the multiplications of the ceiling",
        "moereg/tuning/roofline.py",
        old="return 2 * size**3 / time_us / 1e6",
        new="return size**3 / time_us / 1e6",
        tests=("tests/tuning/test_roofline.py::test_a_product_counts_additions_and_multiplications",),
    ),
    Mutant(
        "samples before the clock has settled",
        "moereg/tuning/roofline.py",
        old="statistics.median(times_us[-max(1, int(len(times_us) * _SETTLED_FRACTION)) :])",
        new="statistics.median(times_us)",
        tests=("tests/tuning/test_roofline.py::test_only_the_settled_samples_count",),
    ),
    Mutant(
        "the mean for the median",
        "moereg/tuning/timing.py",
        old="return statistics.median(self.samples_us)",
        new="return statistics.fmean(self.samples_us)",
        tests=("tests/cli/test_cli_numbers.py::test_run_gives_the_median_in_us_and_permuting_in_ms",),
    ),
    Mutant(
        "always the first input",
        "moereg/tuning/timing.py",
        old=("        run = runs[key][number % len(runs[key])]\n        if before is not None:"),
        new=("        run = runs[key][0]\n        if before is not None:"),
        tests=("tests/tuning/test_timing.py::test_rounds_are_interleaved_and_inputs_rotate",),
    ),
    Mutant(
        "always the first graph",
        "moereg/tuning/timing.py",
        old=("        run = runs[key][number % len(runs[key])]\n        start.record()"),
        new=("        run = runs[key][0]\n        start.record()"),
        tests=("tests/tuning/test_timing.py::test_on_a_gpu_each_call_is_a_graph_whose_replays_are_timed",),
    ),
    Mutant(
        "the clock starts after the run",
        "moereg/tuning/timing.py",
        old=("        start = time.perf_counter()\n        run()\n        wait_for(device)\n        samples[key]"),
        new=("        run()\n        start = time.perf_counter()\n        wait_for(device)\n        samples[key]"),
        tests=("tests/tuning/test_timing.py::test_time_is_in_microseconds",),
    ),
    Mutant(
        "what comes before a sample is timed",
        "moereg/tuning/timing.py",
        old="            before()\n        start = time.perf_counter()",
        new="            start = time.perf_counter()\n            before()",
        tests=("tests/tuning/test_timing.py::test_what_comes_before_a_sample_is_not_timed",),
    ),
    Mutant(
        "milliseconds of events as microseconds",
        "moereg/tuning/timing.py",
        old="start.elapsed_time(end) * 1e3",
        new="start.elapsed_time(end)",
        tests=("tests/tuning/test_timing.py::test_on_a_gpu_each_call_is_a_graph_whose_replays_are_timed",),
    ),
    Mutant(
        "each graph captures the first input",
        "moereg/tuning/timing.py",
        old=("error_mode=error_mode):\n            run()"),
        new=("error_mode=error_mode):\n            eager[0]()"),
        tests=("tests/tuning/test_timing.py::test_each_graph_captures_the_run_on_its_own_inputs",),
    ),
    Mutant(
        "Python collects while a graph is captured",
        "moereg/undisturbed.py",
        old="            gc.disable()",
        new="            pass",
        tests=(
            "tests/tuning/test_timing.py::test_an_older_graph_is_not_destroyed_during_a_capture",
            "tests/backends/test_flashinfer_timing.py::test_nothing_is_collected_during_a_capture",
        ),
    ),
    Mutant(
        "the first capture that ends lets Python collect during others",
        "moereg/undisturbed.py",
        old="if not _CAPTURES.running and _CAPTURES.was_enabled:",
        new="if _CAPTURES.was_enabled:",
        tests=("tests/tuning/test_timing.py::test_captures_of_two_threads_end_before_python_collects",),
    ),
    Mutant(
        "Python never collects again",
        "moereg/undisturbed.py",
        old="                gc.enable()",
        new="                pass",
        tests=("tests/tuning/test_timing.py::test_an_older_graph_is_not_destroyed_during_a_capture",),
    ),
    Mutant(
        "gigabytes a second off by a thousand",
        "moereg/tuning/measurement.py",
        old="return self.num_bytes / self.time_us / 1e3",
        new="return self.num_bytes / self.time_us / 1e6",
        tests=("tests/tuning/test_compare.py::test_every_candidate_is_measured_in_order",),
    ),
    Mutant(
        "wrong numbers are timed",
        "moereg/tuning/compare.py",
        old="return is_whole and found.relative_errors[decision] <= self._bound(decision, key)",
        new="return is_whole",
        tests=("tests/tuning/test_compare.py::test_wrong_numbers_get_no_time",),
    ),
    Mutant(
        "what was not written goes unnoticed",
        "moereg/tuning/compare.py",
        old=("    out = torch.full_like(call.hidden_states, math.nan)\n    kernel(*call, out=out)"),
        new=("    out = reference.clone()\n    kernel(*call, out=out)"),
        tests=("tests/tuning/test_compare.py::test_every_candidate_is_measured_in_order",),
    ),
    Mutant(
        "every candidate is compared with the first scheme's reference",
        "moereg/tuning/compare.py",
        old="reference = self._references[key][decision.computes][0]\n",
        new="reference = next(iter(self._references[key].values()))[0]\n",
        tests=("tests/tuning/test_compare_hostile.py::test_each_candidate_is_checked_against_what_it_computes",),
    ),
    Mutant(
        "all router weights are equal",
        "moereg/tuning/inputs.py",
        old="topk_weights = topk_weights / topk_weights.sum(1, keepdim=True)",
        new="topk_weights = torch.full_like(topk_weights, 1 / problem.top_k)",
        tests=("tests/tuning/test_inputs.py::test_the_routing_weights_of_a_token_differ",),
    ),
    Mutant(
        "the reference is compared with itself",
        "moereg/tuning/compare.py",
        old=("    kernel(*call, out=out)\n    return relative_error(out, reference)"),
        new=("    kernel(*call, out=out)\n    return relative_error(reference, reference)"),
        tests=("tests/tuning/test_compare.py::test_what_was_not_written_is_no_number",),
    ),
    Mutant(
        "time of permuting in microseconds",
        "moereg/tuning/compare.py",
        old="self.permute_ms[decision] = (time.perf_counter() - start) * 1e3",
        new="self.permute_ms[decision] = (time.perf_counter() - start) * 1e6",
        tests=("tests/cli/test_cli_numbers.py::test_run_gives_the_median_in_us_and_permuting_in_ms",),
    ),
)
