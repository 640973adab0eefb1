"""`moereg models` and `moereg schemes`: the names that options take."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, Final

from moereg.cli._output import console
from moereg.cli._show import machine, new_table
from moereg.discovery import current_platform, load_backends
from moereg.dispatch import machine_reasons
from moereg.platforms import Platform, platform_of_product
from moereg.quant import QUANT_SCHEMES, WHOLE, QuantFormat, QuantScheme
from moereg.registry import BackendCell
from moereg.selection import SCHEMA
from moereg.shapes import MODEL_SHAPES, MoEShape

__all__ = ["list_models", "list_schemes", "show_models", "show_schemes"]

_SHORT_DTYPES: Final = {"uint4": "int4", "float4_e2m1fn": "fp4", "float8_e4m3fn": "fp8"}


def list_models() -> dict[str, Any]:
    """The object that `moereg models --json` prints."""
    return {"schema": SCHEMA, "models": [dataclasses.asdict(shape) for shape in MODEL_SHAPES.values()]}


def show_models() -> None:
    """Prints a line a model."""
    target = console(sys.stdout)
    table = new_table("model", "E", "H", "I", "K", "L", "activation", "released as")
    for shape in MODEL_SHAPES.values():
        table.add_row(
            shape.name,
            str(shape.num_experts),
            str(shape.hidden_size),
            str(shape.intermediate_size),
            str(shape.top_k),
            str(shape.num_moe_layers or ""),
            _activation(shape),
            "16 bits" if shape.released_quant == "unquantized" else shape.released_quant,
        )
    target.print(table)
    target.print("E experts of sizes H and I, K a token, L layers; 16 bits unless --quant is given")


def _activation(shape: MoEShape) -> str:
    return f"{shape.activation}, bias" if shape.has_bias else shape.activation


def list_schemes(name: str | None) -> tuple[dict[str, Any], Platform]:
    """Everything that `moereg schemes` shows.

    Args:
        name: What `--platform` says; this machine where None.

    Returns:
        The object that `moereg schemes --json` prints, and the platform.
    """
    registry = load_backends()
    platform = current_platform() if name is None else Platform.from_name(name)
    known = {scheme.name: scheme for cell in registry.cells for scheme in cell.schemes}
    schemes = {**QUANT_SCHEMES, **{name: known[name] for name in sorted(known) if name not in QUANT_SCHEMES}}
    cells = [cell for cell in registry.cells if not machine_reasons(cell, platform)]
    rows = [{**dataclasses.asdict(scheme), **_backends(scheme, cells)} for scheme in schemes.values()]
    product = None if name is None else platform_of_product(name)
    notices = [] if product is None else [f"--platform {name} is {product}"]
    source = "probed" if platform.probed else "named"
    return {
        "schema": SCHEMA,
        "platform": str(platform),
        "platform_source": source,
        "schemes": rows,
        "notices": notices,
    }, platform


def _backends(checkpoint: QuantScheme, cells: list[BackendCell]) -> dict[str, list[str]]:
    """Names of backends that run such weights, those whose speed is the scheme's apart from those that emulate it."""
    serving = [cell for cell in cells if any(scheme.serves(checkpoint) for scheme in cell.schemes)]
    kernels = sorted({cell.name for cell in serving if cell.tier == "kernel"})
    return {"backends": kernels, "emulated_by": sorted({cell.name for cell in serving} - {*kernels})}


def show_schemes(found: dict[str, Any], platform: Platform) -> None:
    """Prints a line a scheme."""
    target = console(sys.stdout)
    target.print(f"on {machine(platform) if platform.probed else f'{platform} (named, not this machine)'}")
    table = new_table("scheme", "weights", "activations", "backends")
    table.columns[0].no_wrap = True
    for row in found["schemes"]:
        weight = None if row["weight"] is None else QuantFormat(**row["weight"])
        activation = None if row["activation"] is None else QuantFormat(**row["activation"])
        names = [*row["backends"], *(f"{name} (emulated)" for name in row["emulated_by"])]
        table.add_row(row["name"], _format(weight, "row"), _format(activation, "token"), ", ".join(names) or "none")
    target.print(table)
    for notice in found["notices"]:
        target.print(f"note: {notice}")


def _format(value: QuantFormat | None, line: str) -> str:
    """A format in few words: `fp8 by 128 x 128`, `int4 by 32, zeros`."""
    if value is None:
        return "16 bits"
    rows, columns = value.group
    group = {(WHOLE, WHOLE): "tensor", (1, WHOLE): line}.get(value.group, str(columns))
    if rows not in (1, WHOLE):
        group = f"{rows} x {columns}"
    zeros = "" if value.symmetric else ", zeros"
    static = ", static" if value.static else ""
    return f"{_SHORT_DTYPES.get(value.dtype, value.dtype)} by {group}{zeros}{static}"
