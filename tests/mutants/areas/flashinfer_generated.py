"""Faults in what FlashInfer's other backends are handed: orders of weights, routes, and a compiler that is too old."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_SHUFFLES: Final = "moereg/backends/_flashinfer/shuffles.py"
_LOCAL: Final = "moereg/kernels/rows/local.py"
_TILEIRAS: Final = "moereg/backends/_flashinfer/tileiras.py"
_FIRST_CALL: Final = "moereg/backends/_flashinfer/first_call.py"
_CLAIMS: Final = "moereg/backends/_flashinfer/claims.py"
_SCRATCH: Final = "moereg/backends/_flashinfer/scratch.py"
_OF_OTHERS: Final = "tests/backends/test_flashinfer_others.py::"
_OF_SHUFFLES: Final = "tests/backends/test_flashinfer_shuffles.py::"
_OF_ROUTES: Final = "tests/kernels/test_local_routes.py::"
_OF_TILEIRAS: Final = "tests/backends/test_flashinfer_tileiras.py::"

MUTANTS: Final = (
    Mutant(
        "gate rows alternate first",
        _SHUFFLES,
        old="return torch.stack((up, gate), dim=1).flatten()",
        new="return torch.stack((gate, up), dim=1).flatten()",
        tests=(f"{_OF_SHUFFLES}test_up_rows_come_first",),
    ),
    Mutant(
        "rows go in steps of eight",
        _SHUFFLES,
        old="_STEP: Final = 4",
        new="_STEP: Final = 8",
        tests=(f"{_OF_SHUFFLES}test_shuffled_rows_go_in_steps_of_four",),
    ),
    Mutant(
        "groups of gate rows come first",
        _SHUFFLES,
        old="unflatten(1, (2, -1, group)).flip(1)",
        new="unflatten(1, (2, -1, group))",
        tests=(f"{_OF_SHUFFLES}test_up_rows_come_first",),
    ),
    Mutant(
        "scales of rows 32 apart lie in another order",
        _SHUFFLES,
        old="unflatten(-3, (-1, 4, 32))",
        new="unflatten(-3, (-1, 32, 4)).transpose(-3, -4)",
        tests=(f"{_OF_SHUFFLES}test_scales_lie_in_blocks",),
    ),
    Mutant(
        "the first expert's weights are every expert's",
        _SHUFFLES,
        old="permute(tensor[expert]) if expert else first",
        new="first",
        tests=(f"{_OF_SHUFFLES}test_every_number_stays_once_and_in_its_expert[blocks]",),
    ),
    Mutant(
        "a route without expert keeps its weight",
        _LOCAL,
        old="    weight = tl.load(topk_weights + routes, mask=inside & (expert >= 0), other=0.0)\n"
        "    tl.store(out_ids + routes, expert, mask=inside)",
        new="    weight = tl.load(topk_weights + routes, mask=inside, other=0.0)\n"
        "    tl.store(out_ids + routes, expert, mask=inside)",
        tests=(f"{_OF_ROUTES}test_routes_become_local[map]",),
    ),
    Mutant(
        "a route without expert goes to expert 0",
        _LOCAL,
        old="tl.where(expert >= 0, expert, tl.maximum(largest, 0))",
        new="tl.maximum(expert, 0)",
        tests=(f"{_OF_ROUTES}test_a_route_without_expert_goes_to_another_of_its_token",),
    ),
    Mutant(
        "rows of live tokens are cleared",
        _LOCAL,
        old="mask=inside & (live == 0)",
        new="mask=inside",
        tests=(f"{_OF_ROUTES}test_rows_of_dead_tokens_become_zeros_and_are_not_read[8]",),
    ),
    Mutant(
        "a compiler for sm_90a is taken for one of sm_90",
        _TILEIRAS,
        old='if f"={arch} " not in text:',
        new='if f"={arch}" not in text:',
        tests=(f"{_OF_TILEIRAS}test_a_compiler_from_before_the_machine_is_a_reason",),
    ),
    Mutant(
        "packages of several releases are taken",
        _TILEIRAS,
        old="if len(releases) > 1:",
        new="if not releases:",
        tests=(f"{_OF_TILEIRAS}test_packages_of_several_releases_are_passed_over[older]",),
    ),
    Mutant(
        "a call that failed counts as compiled",
        _FIRST_CALL,
        old="        yield\n    _DONE.add(key)",
        new="        _DONE.add(key)\n        yield",
        tests=(f"{_OF_OTHERS}test_a_call_that_failed_is_announced_again",),
    ),
    Mutant(
        "one size announces them all",
        _FIRST_CALL,
        old="key = (backend, problem, size)",
        new="key = (backend, problem, None)",
        tests=(f"{_OF_OTHERS}test_each_size_is_announced_once",),
    ),
    Mutant(
        "as many choices as experts pass a launcher that wants more",
        _CLAIMS,
        old="if problem.top_k >= problem.num_experts:",
        new="if problem.top_k > problem.num_experts:",
        tests=(f"{_OF_OTHERS}test_one_launcher_wants_four_experts_at_a_time_and_more_than_are_chosen[mxfp8]",),
    ),
    Mutant(
        "a result that begins anywhere is handed on",
        _SCRATCH,
        old="if out.data_ptr() % ALIGNMENT == 0:\n        yield out",
        new="if True:\n        yield out",
        tests=(f"{_OF_OTHERS}test_a_result_that_begins_anywhere_is_written_through_one_that_does_not",),
    ),
)
