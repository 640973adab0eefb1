"""`python -m moereg.testing.one_call`: runs one layer of every cell that runs natively here, once, under guard bands.

Small enough for tools that slow a program down, such as `compute-sanitizer --tool memcheck`; with
`PYTORCH_NO_CUDA_MEMORY_CACHING=1` in the environment each tensor is an allocation that such a tool knows. Lines that a
drawn layer failed with may be given as arguments: these layers run instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch

from moereg.registry import BackendCell
from moereg.testing import cases
from moereg.testing.checks import check_layer
from moereg.testing.drawing import DrawnLayer
from moereg.testing.interpreter import patch_interpreter

__all__ = ["layer_of", "main"]


def layer_of(cell: BackendCell) -> DrawnLayer:
    """The first case of a cell, with so many tokens that tiles are not full."""
    case = cases.first_case(cell)
    return DrawnLayer(
        backend=cell.name,
        experts=cell.class_name,
        rule=cell.rules[0].text,
        computes=case.computes.name,
        problem=case.problem,
        num_tokens=33,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the layers of the arguments, one of each cell where there are none; 1 where one fails."""
    lines = sys.argv[1:] if arguments is None else arguments
    if not torch.cuda.is_available():
        # Read when a kernel's module is imported, which no import so far has done.
        os.environ.setdefault("TRITON_INTERPRET", "1")
        if lines:
            patch_interpreter()
    drawn = [DrawnLayer.from_json(line) for line in lines]
    drawn = drawn or [layer_of(cell) for cell in cases.runnable_cells() if not cases.is_imitated(cell)]
    num_failures = 0
    for layer in drawn:
        name = f"{layer.backend} {layer.experts} {layer.rule} {layer.problem}, {layer.num_tokens} tokens"
        try:
            print(f"{name}: {'passed' if check_layer(layer) else 'does not run here'}", flush=True)
        except AssertionError as error:
            num_failures += 1
            print(f"{name}: {str(error).partition(chr(10))[2]}", flush=True)
    return int(num_failures > 0)


if __name__ == "__main__":
    sys.exit(main())
