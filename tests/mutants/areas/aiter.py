"""The `aiter` backend, and what is said of broken packages and foreign calls."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_AITER: Final = "tests/backends/test_aiter.py"
_BROKEN: Final = "tests/selection/test_broken_packages.py"
_CALLS: Final = "tests/selection/test_backend_calls.py"

MUTANTS: Final = (
    Mutant(
        "rows and lanes of a tile change places",
        "moereg/backends/_aiter/weights.py",
        old="tiles.permute(0, 2, 3, 1, 4)",
        new="tiles.permute(0, 2, 1, 3, 4).reshape(tiles.permute(0, 2, 3, 1, 4).shape)",
        tests=(f"{_AITER}::test_the_order_is_the_one_that_aiter_documents[torch.bfloat16]",),
    ),
    Mutant(
        "scales of gfx942's float stay",
        "moereg/backends/_aiter/weights.py",
        old="return codes.view(torch.float8_e4m3fnuz), scale * 2",
        new="return codes.view(torch.float8_e4m3fnuz), scale",
        tests=(f"{_AITER}::test_layers_of_8_bits[fp8_tensor_static-rocm:gfx942]",),
    ),
    Mutant(
        "a negative zero becomes gfx942's NaN",
        "moereg/backends/_aiter/weights.py",
        old="bits.masked_fill_(bits == _NEGATIVE_ZERO, 0).masked_fill_(is_nan, _NEGATIVE_ZERO)",
        new="bits.masked_fill_(is_nan, _NEGATIVE_ZERO)",
        tests=(f"{_AITER}::test_the_float_of_gfx942_means_the_same_numbers",),
    ),
    Mutant(
        "a rank's last expert is masked",
        "moereg/backends/_aiter/layer.py",
        old="device=device) < num_local_experts).to(torch.int32)",
        new="device=device) < num_local_experts - 1).to(torch.int32)",
        tests=(f"{_AITER}::test_experts_of_one_rank[1]",),
    ),
    Mutant(
        "ids out of range reach AITER",
        "moereg/backends/_aiter/layer.py",
        old="torch.where(local >= 0, local, num_experts).to(torch.int32)",
        new="local.to(torch.int32)",
        tests=(f"{_AITER}::test_experts_of_one_rank[0]",),
    ),
    Mutant(
        "routes to nowhere go to the first experts",
        "moereg/backends/_aiter/layer.py",
        old="torch.where(is_route, topk_ids, free).to(torch.int32)",
        new="torch.where(is_route, topk_ids, 0).to(torch.int32)",
        tests=(f"{_AITER}::test_layers_of_16_bits[rocm:gfx942]",),
    ),
    Mutant(
        "where every expert is here, nobody's routes are masked",
        "moereg/backends/_aiter/layer.py",
        old="        if num_local_experts == num_experts:\n",
        new="        if False:\n",
        tests=(f"{_AITER}::test_kernels_that_sort_no_routes_read_ids_that_exist",),
    ),
    Mutant(
        "of two routes to one expert AITER keeps the last",
        "moereg/backends/_aiter/layer.py",
        old="    return torch.where(is_repeated, -1, local), total\n",
        new="    return local, inputs.topk_weights\n",
        tests=(f"{_AITER}::test_a_map_in_any_order[some]",),
    ),
    Mutant(
        "blocks of 8 bits run without every expert",
        "moereg/backends/aiter_moe.py",
        old='    held_experts=("all",),\n',
        new="",
        tests=(f"{_AITER}::test_blocks_of_8_bits_want_every_expert",),
    ),
    Mutant(
        "weights are not marked as shuffled",
        "moereg/backends/_aiter/layer.py",
        old="for matrix in (w13, w2):",
        new="for matrix in (w13,):",
        tests=(f"{_AITER}::test_layers_of_16_bits[rocm:gfx942]",),
    ),
    Mutant(
        "modules for another GPU count as kernels",
        "moereg/backends/_aiter/package.py",
        old="if targets and platform.arch not in targets:",
        new="if not targets:",
        tests=(f"{_AITER}::test_kernels_of_another_gpu",),
    ),
    Mutant(
        "a cell of another machine is the nearest one",
        "moereg/selection.py",
        old='sum(code not in ("package", "probe") for code in codes)',
        new="len(codes)",
        tests=(f"{_BROKEN}::test_what_is_broken_is_a_reason_and_something_else_runs[aiter cache]",),
    ),
    Mutant(
        "an error names nobody who would do",
        "moereg/backend_calls.py",
        old='return f"; {selection.instead} would do instead" if selection.instead else ""',
        new='return ""',
        tests=(f"{_BROKEN}::test_an_import_that_fails_names_backend_cure_and_what_would_do",),
    ),
    Mutant(
        "a lack of memory while permuting has no name",
        "moereg/backend_calls.py",
        old="raise lack from error",
        new="raise error",
        tests=(f"{_CALLS}::test_lack_of_memory_while_weights_are_permuted[error1]",),
    ),
)
