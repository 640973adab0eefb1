"""The backend of moereg-aiter."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_WHEEL: Final = "plugins/moereg-aiter/src/moereg_aiter"
_AITER: Final = "plugins/moereg-aiter/tests/test_aiter_backend.py"

MUTANTS: Final = (
    Mutant(
        "rows and lanes of a tile change places",
        f"{_WHEEL}/weights.py",
        old="tiles.permute(0, 2, 3, 1, 4)",
        new="tiles.permute(0, 2, 1, 3, 4).reshape(tiles.permute(0, 2, 3, 1, 4).shape)",
        tests=(f"{_AITER}::test_the_order_is_the_one_that_aiter_documents[torch.bfloat16]",),
    ),
    Mutant(
        "scales of gfx942's float stay",
        f"{_WHEEL}/weights.py",
        old="return codes.view(torch.float8_e4m3fnuz), scale * 2",
        new="return codes.view(torch.float8_e4m3fnuz), scale",
        tests=(f"{_AITER}::test_layers_of_8_bits[fp8_tensor_static-rocm:gfx942]",),
    ),
    Mutant(
        "a negative zero becomes gfx942's NaN",
        f"{_WHEEL}/weights.py",
        old="bits.masked_fill_(bits == _NEGATIVE_ZERO, 0).masked_fill_(is_nan, _NEGATIVE_ZERO)",
        new="bits.masked_fill_(is_nan, _NEGATIVE_ZERO)",
        tests=(f"{_AITER}::test_the_float_of_gfx942_means_the_same_numbers",),
    ),
    Mutant(
        "a rank's last expert is masked",
        f"{_WHEEL}/layer.py",
        old="device=device) < num_local_experts).to(torch.int32)",
        new="device=device) < num_local_experts - 1).to(torch.int32)",
        tests=(f"{_AITER}::test_experts_of_one_rank[1]",),
    ),
    Mutant(
        "ids out of range reach AITER",
        f"{_WHEEL}/layer.py",
        old="torch.where(local >= 0, local, num_experts).to(torch.int32)",
        new="local.to(torch.int32)",
        tests=(f"{_AITER}::test_experts_of_one_rank[0]",),
    ),
    Mutant(
        "routes to nowhere go to the first experts",
        f"{_WHEEL}/layer.py",
        old="torch.where(is_route, topk_ids, free).to(torch.int32)",
        new="torch.where(is_route, topk_ids, 0).to(torch.int32)",
        tests=(f"{_AITER}::test_layers_of_16_bits[rocm:gfx942]",),
    ),
    Mutant(
        "where every expert is here, nobody's routes are masked",
        f"{_WHEEL}/layer.py",
        old="        if num_local_experts == num_experts:\n",
        new="        if False:\n",
        tests=(f"{_AITER}::test_kernels_that_sort_no_routes_read_ids_that_exist",),
    ),
    Mutant(
        "of two routes to one expert AITER keeps the last",
        f"{_WHEEL}/layer.py",
        old="    return torch.where(is_repeated, -1, local), total\n",
        new="    return local, inputs.topk_weights\n",
        tests=(f"{_AITER}::test_a_map_in_any_order[some]",),
    ),
    Mutant(
        "blocks of 8 bits run without every expert",
        f"{_WHEEL}/backend.py",
        old='    held_experts=("all",),\n',
        new="",
        tests=(f"{_AITER}::test_blocks_of_8_bits_want_every_expert",),
    ),
    Mutant(
        "weights are not marked as shuffled",
        f"{_WHEEL}/layer.py",
        old="for matrix in (w13, w2):",
        new="for matrix in (w13,):",
        tests=(f"{_AITER}::test_layers_of_16_bits[rocm:gfx942]",),
    ),
    Mutant(
        "modules for another GPU count as kernels",
        f"{_WHEEL}/package.py",
        old="if targets and platform.arch not in targets:",
        new="if not targets:",
        tests=(f"{_AITER}::test_kernels_of_another_gpu",),
    ),
)
