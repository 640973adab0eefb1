"""A cell's digest is that of the code that it runs, no more and no less."""

from __future__ import annotations

import functools
import pathlib
import re
from typing import Any

import pytest

from moereg.evidence import code_digest as digest
from moereg.evidence.code_digest import class_digest, files_stay
from moereg.evidence.ledger import cell_digest
from moereg.experts import Experts
from moereg.platforms import Platform
from moereg.plugins.loader import load_backends
from moereg.registry import BUILTIN, BackendCell
from moereg.testing.problems import claimed_problems

# Modules, and the classes that run them.
CODE = {
    "backends._torch.plain": r"Torch(?!Quantized|Int8|Scaled).*",
    "backends._torch.quantized": r"Torch(Quantized|Int8).*",
    "kernels.plain.quantized_mlp": r"Torch(Quantized|Int8).*",
    "backends._triton.plain": r"Triton(?!Quantized|Training).*",
    "backends._triton.packed": r"Triton(Packed|Emulated).*",
    "backends._triton.emulated": r"TritonEmulated.*",
    "kernels.quantized.emulate": r"TritonEmulated.*",
    "kernels.gemm.gemv": r"Triton(?!Quantized|Training).*",
    "kernels.hopper.arguments": r"Triton.*",
    "kernels.hopper.training_weights": r"TritonTraining.*",
    "kernels.hopper.gemm": r"Triton(?!Quantized|Training).*",
    "kernels.hopper.packed_consumer": r"Triton(Packed|Emulated).*",
    "kernels.hopper.quantized_gemm": r"TritonQuantized.*",
    "backends.triton_moe": r"Triton.*",
    "backends._triton.ways": r"Triton(?!Quantized|Training).*",
    "kernels.packed.product": r"Triton(?!Quantized|Training).*",
    "kernels.rows.reduce": r"(Triton|Quack).*",
    "kernels.plain.device": r"Torch(?!Int8|Quantized).*|FlashInferCutlass.*",
    "kernels.sizes": r"(Triton|Quack|FlashInfer(?!Cutlass)).*",
}


@functools.cache
def experts_classes() -> dict[type[Experts], str]:
    """Every built-in class with its digest."""
    classes = {cell.experts for cell in load_backends().cells if cell.origin == BUILTIN}
    with files_stay():
        return {experts: class_digest(experts) for experts in classes}


@pytest.mark.parametrize("module", CODE)
def test_a_change_of_code_changes_the_digest_of_the_classes_that_run_it(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = experts_classes()
    edit(f"moereg.{module}", monkeypatch)
    with files_stay():
        changed = {experts.__name__ for experts, old in before.items() if class_digest(experts) != old}
    assert changed == {experts.__name__ for experts in before if re.fullmatch(CODE[module], experts.__name__)}


@pytest.mark.slow
def test_a_digest_covers_what_runs_behind_each_cell() -> None:
    seen: set[str] = set()
    for cell in load_backends().cells:
        problem = next(iter(claimed_problems(cell)))
        try:
            experts = cell.experts(problem, cell_platform(cell), cell.scheme_for(problem.quant))
        except ModuleNotFoundError as error:
            # Another project's library, which make test-peers installs.
            if error.name in ("quack", "cutlass"):
                continue
            raise
        behind = getattr(experts, "implementation", experts)
        modules = {kind.__module__ for kind in type(behind).__mro__ if kind.__module__.startswith("moereg.backends.")}
        before = cell_digest(cell)
        for module in modules:
            with pytest.MonkeyPatch.context() as patch:
                edit(module, patch)
                assert cell_digest(cell) != before, (cell.class_name, module)
        seen |= modules
    assert {"moereg.backends._triton.plain", "moereg.backends._torch.quantized"} < seen


def cell_platform(cell: BackendCell) -> Platform:
    """A platform that a cell names."""
    text = cell.rules[0].text.rstrip("+f")
    return Platform.from_name("cpu" if text == "*" else text)


def edit(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes the code of a module, as far as digests can tell."""
    real, changed = digest._read, digest.module_file(module)
    assert changed is not None

    def read(file: pathlib.Path, *arguments: Any) -> Any:
        source = real(file, *arguments)
        return source._replace(digest="edited") if source is not None and file == changed else source

    monkeypatch.setattr(digest, "_read", read)
