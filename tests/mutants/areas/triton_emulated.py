"""Triton kernels that round to small floats."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        "the smallest scale of a group is zero",
        "moereg/kernels/quantized/small_floats.py",
        old="scale = tl.where(scale < 0.001953125, 0.001953125, scale)",
        new="scale = scale",
        tests=("tests/backends/test_triton_emulated.py::test_rows_are_what_codes_stand_for[130-nvfp4-torch.bfloat16]",),
    ),
    Mutant(
        "ties go up",
        "moereg/kernels/quantized/small_floats.py",
        old="+ ((code >> DROPPED) & 1)) >> DROPPED",
        new="+ 1) >> DROPPED",
        tests=(
            "tests/backends/test_triton_emulated.py::test_rows_are_what_codes_stand_for[16-mxfp4_mxfp8-torch.bfloat16]",
        ),
    ),
    Mutant(
        "one copy of a factor is missing",
        "moereg/kernels/quantized/emulate.py",
        old="mask=copies < FACTORS)",
        new="mask=copies < FACTORS - 1)",
        tests=("tests/backends/test_triton_emulated.py::test_rows_are_what_codes_stand_for[16-nvfp4-torch.bfloat16]",),
    ),
    Mutant(
        "codes are packed high one first",
        "moereg/kernels/quantized/small_floats.py",
        old="return (low | (high << 4)).to(tl.uint8)",
        new="return (high | (low << 4)).to(tl.uint8)",
        tests=("tests/backends/test_triton_nvfp4.py::test_random_rows[16-dtype0-0]",),
    ),
    Mutant(
        "the scale of a row is that of its first columns",
        "moereg/kernels/quantized/emulate.py",
        old="restored = tl.reshape(codes * tl.expand_dims(scale, 2), (1, BLOCK))",
        new="restored = tl.reshape(codes * tl.max(scale), (1, BLOCK))",
        tests=("tests/backends/test_triton_emulated.py::test_rows_are_what_codes_stand_for[130-nvfp4-torch.bfloat16]",),
    ),
)
