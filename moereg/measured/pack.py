"""Packs: files of measured times on one machine.

Values are checked when they are read, so that selection can trust them: an error has the path of the field.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moereg.arguments import (
    check_count,
    check_field,
    check_flag,
    check_list,
    check_mapping,
    check_number,
    check_text,
    within,
)
from moereg.errors import ArgumentError, MoeregError, described, shown
from moereg.evidence.on_machine import CellRecord
from moereg.evidence.store import change_file, read_document
from moereg.experts import Experts
from moereg.measured.keys import Machine, key_text, problem_key
from moereg.platforms import Platform, PlatformRule
from moereg.registry import BackendCell
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme

SCHEMA: Final = 1
LARGEST_LOG: Final = 50.0
"""Largest logarithm of a ratio of times that a row may hold: its exponential is a finite number by far."""


class PackError(MoeregError, RuntimeError):
    """A pack's file cannot be written."""


@functools.lru_cache(maxsize=1024)
def state_of(experts: type[Experts]) -> str:
    """The class's `tuning_state()`, asked once a process."""
    return check_text(f"tuning_state() of {experts.__name__}", experts.tuning_state())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedCell(CellRecord):
    """A cell that was measured, with the code and versions that it ran with. Further attributes are inherited.

    Attributes:
        state: `Experts.tuning_state()`.
        layout: The layout of its weights that other classes read too, empty if there is none.
    """

    state: str = ""
    layout: str = ""

    @classmethod
    def of(
        cls, cell: BackendCell, scheme: QuantScheme, rule: PlatformRule, platform: Platform, layout: str = ""
    ) -> TimedCell:
        """The cell as it runs here now, computing a scheme by a rule."""
        fields = cls.fields_of(cell, scheme, rule, platform)
        return cls(**fields, state=state_of(cell.experts), layout=layout)

    def changes(self, cell: BackendCell, platform: Platform) -> tuple[str, ...]:
        """As `CellRecord.changes`, then a `layout` no longer shared and a `state` that differs or cannot be asked."""
        is_shared = not self.layout or self.layout in cell.experts.shared_layouts
        changed = (*super().changes(cell, platform), *(() if is_shared else ("layout",)))
        try:
            is_same = self.state == state_of(cell.experts)
        except Exception as error:  # A backend's code; its times cannot be trusted then.
            return (*changed, f"tuning_state() raised {described(error)}")
        return changed if is_same else (*changed, "state")


@dataclasses.dataclass(frozen=True)
class Session:
    """One fresh process that measured.

    Attributes:
        number: What rows call it.
        date: ISO date.
        commit: Commit of moereg's code; empty if unknown.
        process: A random name, so that one process never counts as two sessions.
        clocks: Such as `sm_mhz`, as the driver gives them.
    """

    number: int
    date: str
    commit: str
    process: str
    clocks: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)

    @classmethod
    def from_dict(cls, values: object, name: str = "session") -> Session:
        """Inverse of `dataclasses.asdict`; raises ArgumentError with the path of the field."""
        field = functools.partial(check_field, name, check_mapping(name, values))
        clocks = field("clocks", check_mapping)
        return cls(
            number=field("number", _count),
            date=field("date", _check_date),
            commit=field("commit", check_text),
            process=field("process", check_text),
            clocks={check_text(f"{name}.clocks", key): _count(f"{name}.clocks.{key}", clocks[key]) for key in clocks},
        )


@dataclasses.dataclass(frozen=True)
class Row:
    """One cell at one routing and number of tokens beside the default, in one session.

    Attributes:
        session: Number of the session.
        cell: Index in the pack's cells.
        routing: Name of the routing, such as `uniform`.
        tokens: T.
        log_ratio: Mean over pairs (same input, same round) of ln(time of the cell / time of the default).
        half_width: Half of its 95 % interval. The default's own rows have 0 in both.
        median_us, p10_us, p90_us: Of the cell's times.
        rounds: Number of pairs.
        error: Largest error of its numbers as a fraction of the tolerance.
        graph: Whether it ran in a CUDA graph.
        permuted_bytes: Bytes of the layer's weights in its layout.
    """

    session: int
    cell: int
    routing: str
    tokens: int
    log_ratio: float
    half_width: float
    median_us: float
    p10_us: float
    p90_us: float
    rounds: int
    error: float
    graph: bool
    permuted_bytes: int

    @property
    def key(self) -> tuple[int, int, str, int]:
        """The row's subject: a later row of the same one replaces it."""
        return self.session, self.cell, self.routing, self.tokens


@dataclasses.dataclass(frozen=True)
class TunedLayer:
    """The measured times of one layer beside one default.

    Attributes:
        problem: `problem_key` of the layer.
        default: Index of the cell that static priority chose.
        rows: The times.
        wrong: Cells with wrong numbers or failures, by their index, with the reason.
        left_out: Cells that were not measured further, such as those far behind, by their index, with the reason.
    """

    problem: Mapping[str, Any] = dataclasses.field(hash=False)
    default: int
    rows: tuple[Row, ...] = ()
    wrong: tuple[tuple[int, str], ...] = ()
    left_out: tuple[tuple[int, str], ...] = ()

    @functools.cached_property
    def key(self) -> tuple[str, int]:
        """The layer and its default."""
        return key_text(self.problem), self.default

    @functools.cached_property
    def cells(self) -> frozenset[int]:
        """Indices of the cells that were asked, whether they have rows or failed."""
        return frozenset({*(row.cell for row in self.rows), *(cell for cell, _ in self.wrong)})


@dataclasses.dataclass(frozen=True)
class Pack:
    """Measured times on one machine. Immutable.

    Attributes:
        machine: Where they were measured.
        sessions: By which processes.
        cells: The cells that rows name by index.
        layers: One for each layer and default.
        memory: Second layouts that memory was granted for: pairs of an index in `layers` and one in `cells`.
    """

    machine: Machine
    sessions: tuple[Session, ...] = ()
    cells: tuple[TimedCell, ...] = ()
    layers: tuple[TunedLayer, ...] = ()
    memory: tuple[tuple[int, int], ...] = ()

    @property
    def next_session(self) -> int:
        """A number that no session has."""
        return max((session.number for session in self.sessions), default=0) + 1

    def with_session(self, session: Session) -> Pack:
        """With a session, in the place of one with the same number.

        Raises:
            ArgumentError: Its process has another session already.
        """
        others = (each for each in self.sessions if each.number != session.number)
        pack = dataclasses.replace(self, sessions=(*others, session))
        _check_unlike("sessions", [each.process for each in pack.sessions], ".process")
        return pack

    def with_cell(self, cell: TimedCell) -> tuple[Pack, int]:
        """With a cell, and its index: that of an equal one if there is one."""
        if cell in self.cells:
            return self, self.cells.index(cell)
        return dataclasses.replace(self, cells=(*self.cells, cell)), len(self.cells)

    def with_rows(
        self,
        problem: MoEProblem,
        default: int,
        rows: Iterable[Row],
        wrong: Iterable[tuple[int, str]] = (),
        left_out: Iterable[tuple[int, str]] = (),
    ) -> Pack:
        """With rows of a layer, each in the place of one with the same `Row.key`.

        Args:
            problem: The layer.
            default: Index of the cell that the rows are beside. Rows beside another cell are kept apart.
            rows: Their sessions and cells are in the pack.
            wrong: Indices of cells that failed, with the reasons.
            left_out: Indices of cells that were not measured further, with the reasons.

        Raises:
            ArgumentError: A value is not what a pack may hold.
        """
        rows = tuple(rows)
        for row, (name, check) in itertools.product(rows, _ROW_CHECKS.items()):
            check(f"{name} of a row", getattr(row, name))
        layer = TunedLayer(problem_key(problem), default)
        keys = [each.key for each in self.layers]
        place = keys.index(layer.key) if layer.key in keys else len(keys)
        before = (*self.layers, layer)[place]
        layer = dataclasses.replace(
            layer,
            rows=tuple({row.key: row for row in (*before.rows, *rows)}.values()),
            wrong=tuple(dict([*before.wrong, *wrong]).items()),
            left_out=tuple(dict([*before.left_out, *left_out]).items()),
        )
        pack = dataclasses.replace(self, layers=(*self.layers[:place], layer, *self.layers[place + 1 :]))
        pack._check_names(f"layers[{place}]", layer)
        return pack

    @classmethod
    def from_dict(cls, values: object) -> Pack:
        """Inverse of the JSON in `text`.

        Raises:
            ArgumentError: A field is missing, has another type or contradicts another; the message has its path.
            UnknownNameError: A layer's scheme, activation or another name is not known here.
        """
        found = check_mapping("a pack", values)
        schema = found.get("schema")
        if isinstance(schema, bool) or schema != SCHEMA:
            raise ArgumentError(f"schema must be {SCHEMA}, got {shown(schema)}")
        field = functools.partial(check_field, "", found)
        columns = field("columns", functools.partial(check_list, check=check_text))
        if missing := [name for name in _COLUMNS if name not in columns]:
            raise ArgumentError(f"columns must have {', '.join(missing)}, got {shown(list(columns))}")
        pack = cls(
            machine=field("machine", lambda name, value: Machine.from_dict(value, name)),
            sessions=field(
                "sessions", functools.partial(check_list, check=lambda name, value: Session.from_dict(value, name))
            ),
            cells=field("cells", functools.partial(check_list, check=_check_cell)),
            layers=field("layers", functools.partial(check_list, check=functools.partial(_check_layer, columns))),
            memory=field("memory", functools.partial(check_list, check=_check_pair)) if "memory" in found else (),
        )
        _check_unlike("sessions", [session.number for session in pack.sessions])
        _check_unlike("sessions", [session.process for session in pack.sessions], ".process")
        _check_unlike("layers", [layer.key for layer in pack.layers])
        for place, layer in enumerate(pack.layers):
            pack._check_names(f"layers[{place}]", layer)
        for place, (of_layer, of_cell) in enumerate(pack.memory):
            _check_index(f"memory[{place}][0]", of_layer, pack.layers)
            _check_index(f"memory[{place}][1]", of_cell, pack.cells)
        return pack

    def _check_names(self, name: str, layer: TunedLayer) -> None:
        """Checks that what a layer names is in the pack, and that no row is there twice."""
        numbers = {session.number for session in self.sessions}
        _check_index(f"{name}.default", layer.default, self.cells)
        for place, row in enumerate(layer.rows):
            _check_index(f"{name}.rows[{place}].cell", row.cell, self.cells)
            if row.session not in numbers:
                raise ArgumentError(
                    f"{name}.rows[{place}].session must be the number of a session, got {shown(row.session)}"
                )
            if row.cell == layer.default and (row.log_ratio or row.half_width):
                raise ArgumentError(
                    f"{name}.rows[{place}].log_ratio and half_width must be 0 for the default, got {row.log_ratio}, "
                    f"{row.half_width}"
                )
        _check_unlike(f"{name}.rows", [row.key for row in layer.rows])
        for field in ("wrong", "left_out"):
            for place, (cell, _) in enumerate(getattr(layer, field)):
                _check_index(f"{name}.{field}[{place}][0]", cell, self.cells)

    def text(self) -> str:
        """The pack as JSON, one row of times a line."""
        values: dict[str, Any] = {
            "schema": SCHEMA,
            "machine": dataclasses.asdict(self.machine),
            "sessions": [dataclasses.asdict(session) for session in self.sessions],
            "cells": [dataclasses.asdict(cell) for cell in self.cells],
            "memory": self.memory,
            "columns": _COLUMNS,
        }
        lines = [f" {json.dumps(name)}: {json.dumps(value, allow_nan=False)}," for name, value in values.items()]
        layers = ",\n".join(map(_layer_text, self.layers))
        return "\n".join(["{", *lines, ' "layers": [', *([layers] if layers else []), " ]", "}", ""])


def _layer_text(layer: TunedLayer) -> str:
    rows = ",\n".join(
        f"   {json.dumps([getattr(row, name) for name in _COLUMNS], allow_nan=False)}" for row in layer.rows
    )
    return (
        f'  {{"problem": {json.dumps(layer.problem)}, "default": {layer.default}, '
        f'"wrong": {json.dumps(layer.wrong)}, "left_out": {json.dumps(layer.left_out)}, "rows": [\n{rows}\n  ]}}'
    )


_count: Final = functools.partial(check_count, minimum=0)


def _check_date(name: str, value: object) -> str:
    text = check_text(name, value)
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        raise ArgumentError(f"{name} must be an ISO date, got {shown(value)}") from None
    return text


def _check_log(name: str, value: object) -> float:
    number = check_number(name, value)
    if abs(number) > LARGEST_LOG:
        raise ArgumentError(f"{name} must be at most {LARGEST_LOG:g} either way, got {shown(value)}")
    return number


def _check_positive(name: str, value: object) -> float:
    number = check_number(name, value)
    if number < 0:
        raise ArgumentError(f"{name} must be at least 0, got {shown(value)}")
    return number


def _check_width(name: str, value: object) -> float:
    return _check_positive(name, _check_log(name, value))


_COLUMNS: Final = tuple(field.name for field in dataclasses.fields(Row))
_ROW_CHECKS: Final[dict[str, Callable[[str, object], Any]]] = {
    "session": _count,
    "cell": _count,
    "routing": check_text,
    "tokens": check_count,
    "log_ratio": _check_log,
    "half_width": _check_width,
    "median_us": _check_positive,
    "p10_us": _check_positive,
    "p90_us": _check_positive,
    "rounds": check_count,
    "error": _check_positive,
    "graph": check_flag,
    "permuted_bytes": _count,
}


def _check_cell(name: str, value: object) -> TimedCell:
    try:
        return TimedCell.from_dict(value)
    except ValueError as error:
        raise ArgumentError(f"{name}: {error}") from error


def _check_layer(columns: Sequence[str], name: str, value: object) -> TunedLayer:
    values = check_mapping(name, value)
    field = functools.partial(check_field, name, values)
    problem = within(f"{name}.problem", MoEProblem.from_dict, field("problem", check_mapping))
    places = [columns.index(column) for column in _COLUMNS]

    def read(path: str, cells: object) -> Row:
        if not isinstance(cells, list) or len(cells) != len(columns):
            raise ArgumentError(f"{path} must be a list of {len(columns)} values, one a column, got {shown(cells)}")
        return Row(*(_ROW_CHECKS[name](f"{path}.{name}", cells[at]) for name, at in zip(_COLUMNS, places, strict=True)))

    return TunedLayer(
        problem=problem_key(problem),
        default=field("default", _count),
        rows=field("rows", functools.partial(check_list, check=read)),
        wrong=field("wrong", functools.partial(check_list, check=_check_wrong)),
        left_out=field("left_out", functools.partial(check_list, check=_check_wrong)) if "left_out" in values else (),
    )


def _check_wrong(name: str, value: object) -> tuple[int, str]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ArgumentError(f"{name} must be a pair of a cell's index and a reason, got {shown(value)}")
    return _count(f"{name}[0]", value[0]), check_text(f"{name}[1]", value[1])


def _check_pair(name: str, value: object) -> tuple[int, int]:
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ArgumentError(f"{name} must be a pair of indices, got {shown(value)}")
    return _count(f"{name}[0]", value[0]), _count(f"{name}[1]", value[1])


def _check_index(name: str, index: int, values: Sequence[object]) -> None:
    if not 0 <= index < len(values):
        raise ArgumentError(f"{name} must be an index below {len(values)}, got {shown(index)}")


def _check_unlike(name: str, keys: Sequence[object], field: str = "") -> None:
    seen: set[object] = set()
    for place, key in enumerate(keys):
        if key in seen:
            raise ArgumentError(f"{name}[{place}]{field} must differ from those before it, got {shown(key)} again")
        seen.add(key)


def read_pack(path: Path, is_own: bool) -> Pack:
    """Reads a pack.

    Args:
        path: The file.
        is_own: Whether only this user or root may have write access.

    Raises:
        ValueError: It cannot be read, others may write to it, or it is no pack; one line.
    """
    return Pack.from_dict(read_document(path, is_own))


def write_pack(path: Path, machine: Machine, change: Callable[[Pack], Pack], is_new: bool = False) -> Pack:
    """Changes a pack's file atomically; concurrent writers take turns. An interrupted write leaves the former pack.

    Args:
        path: The file; a missing one is an empty pack.
        machine: The machine at hand.
        change: Takes the pack as it is now and returns the new one.
        is_new: Whether to begin with an empty pack, whatever the file holds.

    Returns:
        The new pack.

    Raises:
        PackError: The file cannot be read or written, or holds times of another machine.
    """
    pack = Pack(machine)

    def changed(path: Path) -> str:
        nonlocal pack
        if not is_new and path.exists():
            pack = read_pack(path, is_own=True)
        if differences := pack.machine.differences(machine):
            raise ValueError(f"it must hold times of this machine, got {'; '.join(differences)}")
        pack = change(pack)
        return pack.text()

    try:
        change_file(path, changed)
    except (OSError, ValueError) as error:
        raise PackError(
            f"the pack {shown(str(path))} must be readable and writable, got {described(error)}; delete it, or name "
            "another file in MOEREG_TUNING"
        ) from error
    return pack
