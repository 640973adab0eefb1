"""Backends and packs for tests: what the rows say is given as logarithms of ratios."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moereg.evidence.measured import Source
from moereg.evidence.on_machine import machine_of
from moereg.evidence.pack import Pack, Row, Session, TimedCell, write_pack
from moereg.platforms import Platform
from moereg.registry import BackendCell, BackendRegistry, register_moe_backend
from moereg.selection.decide import candidate_of, decide
from moereg.selection.request import Request
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from tests.support.fakes import FakeExperts

VERSIONS = {"torch": "2.13.0", "moereg": "0.1.0", "kernels": "1.2", "other": "3"}
HERE = Platform("cpu", "x86_64", "A CPU", versions=VERSIONS, probed=True)
PROBLEM = MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2)
NAMES = ("first", "second", "third", "fourth")
ROUTINGS = ("uniform", "zipf", "one_set")
GRID = (1, 4, 16, 64)

Logs = Mapping[int, float | Mapping[int, float]]
"""The logarithm of a cell's ratio for all numbers of tokens or for each, by its place in `NAMES`."""


def make_cells(
    names: Sequence[str] = NAMES, attributes: Mapping[int, Mapping[str, Any]] | None = None, **keywords: Any
) -> tuple[BackendCell, ...]:
    """Cells of falling priority, whose classes all run everything and have these attributes, by place."""
    registry = BackendRegistry()
    for place, name in enumerate(names):
        kind = type(f"{name.capitalize()}Experts", (FakeExperts,), dict((attributes or {}).get(place, {})))
        given = {"requires": ("kernels>=1",), **keywords}
        register_moe_backend(
            name, 100 - place, ("unquantized", "int8_w8a16"), ("cpu", "cuda:sm90"), registry=registry, **given
        )(kind)
    return registry.cells


def rows_of(
    logs: Logs,
    sessions: Iterable[int] = (1, 2),
    routings: Sequence[str] = ROUTINGS,
    grid: Sequence[int] = GRID,
    half_width: float = 0.001,
) -> list[Row]:
    """Rows of cells by their index, which is 0 for the default."""
    return [
        row(session, cell, routing, tokens, log if isinstance(log, float) else log[tokens], half_width if cell else 0.0)
        for session in sessions
        for cell, log in {0: 0.0, **logs}.items()
        for routing in routings
        for tokens in (grid if isinstance(log, float) else sorted(log))
    ]


def row(
    session: int, cell: int, routing: str, tokens: int, log_ratio: float = 0.0, half_width: float = 0.0, **more: Any
) -> Row:
    measured = {"median_us": 10.0, "p10_us": 9.0, "p90_us": 12.0, "rounds": 48, "error": 0.1, "graph": False}
    return Row(session, cell, routing, tokens, log_ratio, half_width, **{**measured, **more})


def pack_of(
    cells: Sequence[BackendCell],
    rows: Iterable[Row],
    problem: MoEProblem = PROBLEM,
    wrong: Sequence[tuple[int, str]] = (),
) -> Pack:
    """A pack of `HERE` in which the cells have their own indices."""
    rows = list(rows)
    pack = Pack(machine_of(HERE))
    for number in sorted({each.session for each in rows}):
        pack = pack.with_session(Session(number, f"2026-11-2{number}", "abc", f"process {number}", {"sm_mhz": 1980}))
    for cell in cells:
        rule = cell.rule_for(HERE)
        scheme = cell.scheme_for(problem.quant)
        assert rule is not None
        assert scheme is not None
        pack, _ = pack.with_cell(TimedCell.of(cell, scheme, rule, HERE))
    return pack.with_rows(problem, 0, rows, wrong)


def write_here(path: Path, selection: Selection, names: Sequence[str], rows: Iterable[Row]) -> None:
    """Writes a pack of this machine in which backends of a selection have their own indices, the default first."""
    platform, by_name = selection.platform, {one.backend: one for one in selection.decisions}
    rows = list(rows)

    def measured(pack: Pack) -> Pack:
        for number in sorted({each.session for each in rows}):
            pack = pack.with_session(Session(number, "2026-11-28", "", f"process {number}"))
        for name in names:
            pack, _ = pack.with_cell(TimedCell.of(*candidate_of(by_name[name], platform), platform))
        return pack.with_rows(selection.problem, 0, rows)

    write_pack(path, machine_of(platform), measured, is_new=True)


def choose(
    cells: Sequence[BackendCell],
    *packs: Pack | Source,
    platform: Platform = HERE,
    problem: MoEProblem = PROBLEM,
    **request: tuple[str, ...],
) -> Selection:
    """The selection among cells with packs in force."""
    sources = [each if isinstance(each, Source) else Source(each) for each in packs]
    return decide(problem, platform, Request(**request), cells, tuning=sources)


def changed_cell(pack: Pack, place: int, **changes: Any) -> Pack:
    """The pack with another record of a cell."""
    cells = list(pack.cells)
    cells[place] = dataclasses.replace(cells[place], **changes)
    return dataclasses.replace(pack, cells=tuple(cells))
