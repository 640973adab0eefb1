"""`python -m moereg.testing.one_call`: runs a layer of every cell that runs natively here, under guard bands.

Each layer runs once with few rows an expert and once with many, which other kernels compute. All this is small enough
for tools that slow a program down, such as `compute-sanitizer --tool memcheck`; with
`PYTORCH_NO_CUDA_MEMORY_CACHING=1` in the environment each tensor is an allocation that such a tool knows. Lines that a
drawn layer failed with may be given as arguments: these layers run instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

import torch

from moereg.registry import BackendCell
from moereg.testing import cases
from moereg.testing.checks import check_layer
from moereg.testing.drawing import DrawnLayer
from moereg.testing.interpreter import patch_interpreter

__all__ = ["layers_of", "main"]

_NUM_TOKENS: Final = (33, 400)


def layers_of(cell: BackendCell) -> list[DrawnLayer]:
    """The first case of a cell, with numbers of tokens at which the last tiles are not full."""
    case = cases.first_case(cell)
    return [
        DrawnLayer(
            backend=cell.name,
            experts=cell.class_name,
            rule=cell.rules[0].text,
            computes=case.computes.name,
            problem=case.problem,
            num_tokens=num_tokens,
        )
        for num_tokens in _NUM_TOKENS
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the arguments' layers, or each cell's where there are none; 1 where one fails, 3 where none ran."""
    lines = sys.argv[1:] if arguments is None else arguments
    if not torch.cuda.is_available():
        # Read when a kernel's module is imported, which no import so far has done.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        if lines:
            patch_interpreter()
    drawn = [DrawnLayer.from_json(line) for line in lines]
    if not drawn:
        native = [cell for cell in cases.runnable_cells() if not cases.is_imitated(cell)]
        drawn = [layer for cell in native for layer in layers_of(cell)]
    num_ran = num_failures = 0
    for layer in drawn:
        name = f"{layer.backend} {layer.experts} {layer.rule} {layer.problem}, {layer.num_tokens} tokens"
        try:
            ran = check_layer(layer)
            num_ran += ran
            print(f"{name}: {'passed' if ran else 'does not run here'}", flush=True)
        except AssertionError as error:
            num_ran += 1
            num_failures += 1
            print(f"{name}: {str(error).partition(chr(10))[2]}", flush=True)
    if not num_ran:
        return 3
    return int(num_failures > 0)


if __name__ == "__main__":
    sys.exit(main())
