"""A cell's digest is that of the code that it runs, no more and no less."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from typing import Any

import pytest

from moereg.evidence import code_digest as digest
from moereg.evidence.ledger import cell_digest
from moereg.platforms import Platform
from moereg.plugins.loader import load_backends
from moereg.registry import BUILTIN, BackendCell
from moereg.testing.problems import claimed_problems
from tests.kit.test_ledger import EPYC, H200, builtin

# Modules, and the classes that run them.
CODE = {
    "backends._torch.plain": r"Torch(?!Quantized|Int8|Scaled).*",
    "backends._torch.quantized": r"Torch(Quantized|Int8).*",
    "kernels.plain.quantized_mlp": r"Torch(Quantized|Int8).*",
    "backends._triton.plain": r"Triton(?!Quantized).*",
    "backends._triton.packed": r"Triton(Packed|Emulated).*",
    "backends._triton.emulated": r"TritonEmulated.*",
    "kernels.quantized.emulate": r"TritonEmulated.*",
    "kernels.gemm.gemv": r"Triton(?!Quantized).*",
    "kernels.hopper.arguments": r"Triton.*",
    "kernels.hopper.gemm": r"Triton(?!Quantized).*",
    "kernels.hopper.packed_consumer": r"Triton(Packed|Emulated).*",
    "kernels.hopper.quantized_gemm": r"TritonQuantized.*",
    "kernels.sizes": r"(Triton|Quack|FlashInfer(?!Cutlass)).*",
}


# One of each backend; the test of implementations and kernels of a class, below, has more, cell by cell.
QUICK = ("backends._torch.plain", "backends._triton.packed")


@pytest.mark.parametrize(
    "module", [module if module in QUICK else pytest.param(module, marks=pytest.mark.slow) for module in CODE]
)
def test_a_change_of_code_changes_the_digest_of_the_cells_that_run_it(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [cell for cell in load_backends().cells if cell.origin == BUILTIN]
    before = [cell_digest(cell) for cell in cells]
    edit(f"moereg.{module}", monkeypatch)
    changed = {cell.class_name for cell, old in zip(cells, before, strict=True) if cell_digest(cell) != old}
    assert changed == {cell.class_name for cell in cells if re.fullmatch(CODE[module], cell.class_name)}


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
        return dataclasses.replace(source, digest="edited") if source is not None and file == changed else source

    monkeypatch.setattr(digest, "_read", read)


@pytest.mark.parametrize(
    ("experts", "scheme", "module"),
    [
        ("TritonExperts", "unquantized", "moereg.kernels.rows.reduce"),
        ("TritonExperts", "unquantized", "moereg.backends._triton.plain"),
        ("TritonPackedExperts", "int8_w8a16", "moereg.backends._triton.ways"),
        ("TritonPackedExperts", "int8_w8a16", "moereg.backends.triton_moe"),
    ],
)
def test_a_digest_follows_kernels_private_packages_and_base_classes(
    experts: str, scheme: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, other = builtin(experts, scheme, H200), builtin("TorchDenseExperts", "unquantized", H200)
    before = cell_digest(cell), cell_digest(other)
    edit(module, monkeypatch)
    assert cell_digest(cell) != before[0]
    assert cell_digest(other) == before[1]


@pytest.mark.parametrize(
    ("experts", "scheme", "module", "follows"),
    [
        ("TritonExperts", "unquantized", "moereg.backends._triton.plain", True),
        ("TritonExperts", "unquantized", "moereg.kernels.hopper.gemm", True),
        ("TritonExperts", "unquantized", "moereg.backends._triton.packed", False),
        ("TritonExperts", "unquantized", "moereg.backends._triton.emulated", False),
        ("TritonExperts", "unquantized", "moereg.kernels.quantized.emulate", False),
        ("TritonPackedExperts", "int8_w8a16", "moereg.backends._triton.packed", True),
        ("TritonPackedExperts", "int8_w8a16", "moereg.kernels.packed.product", True),
        ("TritonEmulatedExperts", "nvfp4", "moereg.kernels.quantized.emulate", True),
        ("TorchDenseExperts", "unquantized", "moereg.kernels.plain.device", True),
        ("TorchDenseExperts", "unquantized", "moereg.kernels.plain.quantized_mlp", False),
        ("TorchInt8Experts", "int8_w8a8", "moereg.kernels.plain.quantized_mlp", True),
        ("TorchInt8Experts", "int8_w8a8", "moereg.backends._torch.quantized", True),
    ],
)
def test_a_digest_covers_the_implementation_and_the_kernels_of_its_own_class(
    experts: str, scheme: str, module: str, follows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page has the claims of every class of a backend; what runs is found by the import statement in `_load`."""
    cell = builtin(experts, scheme, EPYC if "Int8" in experts else H200)
    before = cell_digest(cell)
    edit(module, monkeypatch)
    assert (cell_digest(cell) != before) == follows
