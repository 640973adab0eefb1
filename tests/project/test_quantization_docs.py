"""The tables of docs/quantization.md against the code: what each scheme stores, and who runs it where."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Final

import pytest
import torch

from moereg.bench.inputs import random_call, random_weights
from moereg.bench.roofline import expert_bytes
from moereg.dispatch import explain_backends
from moereg.numerics.reference import scheme_loss
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES, WHOLE, QuantFormat, QuantScheme, get_scheme

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "quantization.md"
QUANTIZED: Final = tuple(name for name, scheme in QUANT_SCHEMES.items() if scheme.weight is not None)
ELEMENTS: Final = {"float8_e4m3fn": "e4m3", "float8_e8m0fnu": "e8m0", "float4_e2m1fn": "e2m1", "float32": "fp32"}
# Columns of the second table: activation formats and platforms that agree.
MACHINES: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "CPU": (("standard", "batched"), ("cpu",)),
    "`sm80`, `gfx942`": (("standard", "batched"), ("cuda:sm80", "rocm:gfx942")),
    "`sm90`": (("standard", "batched"), ("cuda:sm90",)),
    "`sm100`": (("standard", "batched"), ("cuda:sm100",)),
}


def table(header: str) -> list[list[str]]:
    """Rows of the table whose first columns are named so, its header first."""
    lines = DOCUMENT.read_text().splitlines()
    (start,) = [place for place, line in enumerate(lines) if line.startswith(header)]
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [rows[0], *rows[2:]]


def problem_of(scheme: str, activation_format: str = "standard") -> MoEProblem:
    return MoEProblem(
        num_experts=128,
        hidden_size=2048,
        intermediate_size=768,
        top_k=8,
        quant=scheme,
        activation_format=activation_format,
    )


def element(name: str) -> str:
    return ELEMENTS.get(name, name)


def weight_scales(fmt: QuantFormat) -> str:
    rows, columns = fmt.group
    where = {(WHOLE, WHOLE): "one per matrix", (1, WHOLE): "one per row"}.get(fmt.group, f"{rows} x {columns}")
    words = [f"{'8-bit codes' if fmt.nested else element(fmt.scale_dtype)}, {where}"]
    words += ["fp32, one per 256 scales"] * fmt.nested
    words += ["fp32, one per matrix"] * fmt.global_scale
    words += ["a zero point per group"] * (not fmt.symmetric)
    return "; ".join(words)


def activations(fmt: QuantFormat | None) -> str:
    if fmt is None:
        return "16 bits"
    rows, columns = fmt.group
    where = {(WHOLE, WHOLE): "one per call", (1, WHOLE): "one per token"}.get(fmt.group, f"{rows} x {columns}")
    scale = f"{element(fmt.scale_dtype)}, {'from the checkpoint' if fmt.static else where}"
    return f"{element(fmt.dtype)}; {scale}{'; fp32, from the checkpoint or one per token' * fmt.global_scale}"


def stored(scheme: QuantScheme) -> list[str]:
    assert scheme.weight is not None
    problem = problem_of(scheme.name)
    num_bytes = expert_bytes(problem)
    bits = 8 * num_bytes / (3 * problem.hidden_size * problem.intermediate_size)
    return [
        f"`{scheme.name}`",
        element(scheme.weight.dtype),
        weight_scales(scheme.weight),
        activations(scheme.activation),
        f"{bits:.3f}",
        f"{num_bytes:,}",
    ]


def runs(scheme: str, activation_formats: tuple[str, ...], platforms: tuple[str, ...]) -> str:
    """`kernel`, `16 bits` of a kernel that keeps activations at that, `emulation` or `-`."""
    found = {}
    for activation_format, platform in itertools.product(activation_formats, platforms):
        problem = problem_of(scheme, activation_format)
        winner = explain_backends(problem, platform, require=("torch", "triton")).winner
        words = [] if winner is None else ["emulation"] * (winner.tier == "emulation")
        words += ["16 bits"] * (winner is not None and winner.computes != scheme)
        found[f"{activation_format} on {platform}"] = ", ".join(words) or ("-" if winner is None else "kernel")
    assert len(set(found.values())) == 1, f"the document has one column for what differs: {found}"
    return next(iter(found.values()))


def test_what_is_stored() -> None:
    header, *rows = table("| scheme | weights | scales of the weights |")
    assert header[-2:] == ["bits per weight", "bytes per expert"]
    assert rows == [stored(QUANT_SCHEMES[name]) for name in QUANTIZED]


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_who_runs_it(scheme: str) -> None:
    header, *rows = table("| scheme | CPU |")
    assert header == ["scheme", *MACHINES]
    assert [row[0] for row in rows] == [f"`{name}`" for name in QUANTIZED]
    (row,) = [row for row in rows if row[0] == f"`{scheme}`"]
    assert row == [f"`{scheme}`", *(runs(scheme, *machine) for machine in MACHINES.values())]


@pytest.mark.few(most=8)
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_what_it_costs(scheme: str) -> None:
    header, *rows = table("| scheme | loss |")
    assert header == ["scheme", "loss"]
    assert [row[0] for row in rows] == [f"`{name}`" for name in QUANTIZED]
    (written,) = [float(row[1]) for row in rows if row[0] == f"`{scheme}`"]
    plain = MoEProblem(num_experts=4, hidden_size=1024, intermediate_size=512, top_k=2)
    quantized = dataclasses.replace(plain, quant=get_scheme(scheme))
    weights, unquantized = (
        random_weights(problem, torch.Generator().manual_seed(0), torch.device("cpu")) for problem in (quantized, plain)
    )
    call = random_call(plain, 64, "uniform", torch.Generator().manual_seed(1))
    # Sums in another order move a few codes of activations.
    assert scheme_loss(quantized, weights, unquantized, *call) == pytest.approx(written, rel=0.01)
