"""The check of what a cell does while backends are chosen: it answers in words, and loads nothing for it.

pytest leaves the messages of its assertions as they are: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Final

from packaging.requirements import Requirement

from moereg.dispatch import Request, evaluate
from moereg.platforms import Platform
from moereg.registry import BackendCell
from moereg.spec.problem import MoEProblem
from moereg.testing.cases import machine
from moereg.testing.problems import claimed_problems, rejected_problems

__all__ = ["KERNEL_LIBRARIES", "ImportWatch", "check_deciding", "kernel_libraries", "watched_imports"]

_COMPILED: Final = (".so", ".pyd")
_LARGE_BYTES: Final = 10_000_000

KERNEL_LIBRARIES: Final = frozenset({
    "aiter", "apex", "cuda", "cupy", "cutlass", "deep_gemm", "flash_attn", "flashinfer", "humming", "jax", "mlx",
    "numba", "quack", "sgl_kernel", "sglang", "sonicmoe", "tensorflow", "tilelang", "torch_npu", "torch_xla",
    "transformer_engine", "transformers", "triton", "triton_kernels", "tvm", "vllm",
})  # fmt: skip
"""Modules that compute or compile: importing them takes seconds or touches a device."""


@dataclasses.dataclass
class ImportWatch:
    """Records which top-level packages are imported, each with the modules on the stack at that time.

    A finder of modules that finds none.
    """

    importers: dict[str, frozenset[str]] = dataclasses.field(default_factory=dict)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Notes who imports a package, and leaves finding it to the others."""
        if "." not in name:
            waiting = set()
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                waiting.add(str(frame.f_globals.get("__name__", "")))
                frame = frame.f_back
            self.importers.setdefault(name, frozenset(waiting))
        return None

    def imported_by(self, package: str) -> set[str]:
        """Top-level packages that a package imported, directly or not, and that are there."""
        return {
            name
            for name, waiting in self.importers.items()
            if sys.modules.get(name) is not None and any(f"{module}.".startswith(f"{package}.") for module in waiting)
        }


@contextlib.contextmanager
def watched_imports() -> Iterator[ImportWatch]:
    """Watches what is imported inside for the first time."""
    watch = ImportWatch()
    sys.meta_path.insert(0, watch)
    try:
        yield watch
    finally:
        sys.meta_path.remove(watch)


def kernel_libraries(cell: BackendCell) -> frozenset[str]:
    """Modules that choosing must not import: the known ones, and large compiled ones that the cell requires."""
    found = set(KERNEL_LIBRARIES)
    for requirement in cell.requires:
        try:
            files = importlib.metadata.files(Requirement(requirement).name) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        if not files:  # Nothing is known of what it brings.
            found.add(Requirement(requirement).name.replace("-", "_").lower())
        if sum(file.size or 0 for file in files if file.suffix in _COMPILED) > _LARGE_BYTES:
            found |= {str(file.parts[0]) for file in files if re.fullmatch(r"[A-Za-z]\w*", file.parts[0])}
    return frozenset(found) - {"torch", "numpy", cell.experts.__module__.partition(".")[0]}


def check_deciding(cell: BackendCell, watch: ImportWatch) -> None:
    """The predicate answers every problem with reasons in words, on every platform of the claim, and imports nothing.

    Args:
        cell: The cell.
        watch: Watches imports since before the backend was imported, where this process did that.

    Raises:
        AssertionError: It raised, gave a reason that is not a lowercase clause, or imported a kernel library.
    """
    for problem, platform in _questions(cell):
        decision = evaluate(cell, problem, platform, Request(require=(cell.name,)))
        for reason in decision.reasons:
            where = f"for {problem} on {platform}"
            assert reason.code != "predicate_error", f"{reason.text} {where}"
            assert reason.text[:1].islower(), f"a reason must be a lowercase clause, got {reason.text!r} {where}"
    package = cell.experts.__module__.partition(".")[0]
    own = f"{package}.backends" if package == __name__.partition(".")[0] else package
    imported = sorted(watch.imported_by(own) & kernel_libraries(cell))
    assert not imported, (
        f"choosing a backend imports {', '.join(imported)}; import it in permute_weights and apply alone"
    )


def _questions(cell: BackendCell) -> Iterator[tuple[MoEProblem, Platform]]:
    named = [rule.instance for rule in cell.rules if rule.instance is not None]
    problems = [*claimed_problems(cell), *(problem for _, problem in rejected_problems(cell))]
    for platform in dict.fromkeys([machine(), *named]):
        yield from ((problem, platform) for problem in problems)
