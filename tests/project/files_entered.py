"""Counts the files of moereg that a choice and a kernel's making enter: `python -m tests.project.files_entered`.

Both are done once before, so that discovery, imports and caches do not count. `spec/` holds values that everything
reads, and what a backend does with its weights is the backend's: neither counts.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

import moereg
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights

ROOT: Final = Path(moereg.__file__).parent
_NOT_COUNTED: Final = ("spec", "backends", "kernels")


def files_entered(call: Callable[[], Any]) -> list[str]:
    """The modules whose functions a call enters, in the order in which it first does."""
    entered: dict[str, int] = collections.Counter()

    def see(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(f"{ROOT}/"):
            entered[str(Path(frame.f_code.co_filename).relative_to(ROOT))] += 1

    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [path for path in entered if path.partition("/")[0] not in _NOT_COUNTED]


def measure() -> dict[str, list[str]]:
    """The files of a second `select_backend`, and of a second `make_kernel` with its selection, of a small problem."""
    problem = MoEProblem(num_experts=4, hidden_size=32, intermediate_size=32, top_k=2)
    weights = ExpertWeights(
        w13=torch.randn(4, 64, 32, dtype=torch.bfloat16), w2=torch.randn(4, 32, 32, dtype=torch.bfloat16)
    )

    def select() -> Any:
        return moereg.select_backend(problem)

    def make() -> Any:
        return moereg.make_kernel(problem, weights, selection)

    selection = select()
    make()
    return {"select_backend": files_entered(select), "make_kernel": files_entered(make)}


if __name__ == "__main__":
    for name, files in measure().items():
        print(f"{name}: {len(files)} files")
        for file in files:
            print(f"  {file}")
