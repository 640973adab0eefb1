"""Packs: files of measured times on one machine.

Values are checked when they are read, so that selection can trust them: an ArgumentError has the path of the field.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from moereg.arguments import check_text, within
from moereg.errors import ArgumentError, described, shown
from moereg.evidence.on_machine import CellRecord, Machine
from moereg.evidence.provenance import minor_version
from moereg.evidence.store import OlderFileError, change_file, decode_file, read_content
from moereg.experts import Experts
from moereg.platforms import Platform, PlatformRule
from moereg.registry import BackendCell
from moereg.runtime.json_types import Count, Date, Size, Text, Whole, convert, decode
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme

SCHEMA: Final = 2
VARIABLE: Final = "MOEREG_TUNING"
LARGEST_LOG: Final = 50.0
"""Largest logarithm of a ratio of times that a row may hold: its exponential is a finite number by far."""


def problem_key(problem: MoEProblem) -> dict[str, Any]:
    """A layer as a pack names it: its fields as JSON values, without `max_num_tokens`."""
    values = problem.to_dict()
    values.pop("max_num_tokens", None)
    return values


def key_text(key: Mapping[str, Any]) -> str:
    """A key as one text: equal keys have equal texts."""
    return json.dumps(key, sort_keys=True)


@functools.lru_cache(maxsize=1024)
def state_of(experts: type[Experts]) -> str:
    """The class's `tuning_state()`, asked once a process."""
    return check_text(f"tuning_state() of {experts.__name__}", experts.tuning_state())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimedCell(CellRecord):
    """A cell that was measured, with the code and versions that it ran with; `state` is `Experts.tuning_state()`."""

    state: Text = ""

    @classmethod
    def of(cls, cell: BackendCell, scheme: QuantScheme, rule: PlatformRule, platform: Platform) -> TimedCell:
        """The cell as it runs here now, computing a scheme by a rule."""
        fields = cls.fields_of(cell, scheme, rule, platform)
        return cls(**fields, state=state_of(cell.experts))

    def changes(
        self, cell: BackendCell, platform: Platform, part: Callable[[str], str] = minor_version
    ) -> tuple[str, ...]:
        """As `CellRecord.changes` for minor versions, then a `state` that differs or cannot be asked."""
        changed = super().changes(cell, platform, part)
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

    number: Whole
    date: Date
    commit: Text
    process: Text
    clocks: Mapping[Text, Whole] = dataclasses.field(default_factory=dict, hash=False)


class Row(msgspec.Struct, array_like=True, frozen=True):
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
    """

    session: Whole
    cell: Whole
    routing: Text
    tokens: Count
    log_ratio: Annotated[float, msgspec.Meta(ge=-LARGEST_LOG, le=LARGEST_LOG)]
    half_width: Annotated[float, msgspec.Meta(ge=0, le=LARGEST_LOG)]
    median_us: Size
    p10_us: Size
    p90_us: Size
    rounds: Count
    error: Size
    graph: bool

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
        calls: Numbers of calls by number of tokens, which weigh the choice; empty if decades count alike.
    """

    problem: Mapping[str, Any] = dataclasses.field(hash=False)
    default: Whole
    rows: tuple[Row, ...] = ()
    wrong: tuple[tuple[Whole, Text], ...] = ()
    left_out: tuple[tuple[Whole, Text], ...] = ()
    calls: tuple[tuple[Whole, Whole], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "problem", problem_key(within("problem", MoEProblem.from_dict, self.problem)))
        for at, row in enumerate(self.rows):
            if row.cell == self.default and (row.log_ratio or row.half_width):
                raise ArgumentError(
                    f"log_ratio and half_width of rows[{at}] must be 0 for the default, got {row.log_ratio}, "
                    f"{row.half_width}"
                )
        _check_unlike("rows", [row.key for row in self.rows])

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
    """Measured times on one machine; rows name sessions by number and cells by index. Immutable."""

    machine: Machine
    sessions: tuple[Session, ...] = ()
    cells: tuple[TimedCell, ...] = ()
    layers: tuple[TunedLayer, ...] = ()

    def __post_init__(self) -> None:
        _check_unlike("sessions", [session.number for session in self.sessions])
        _check_unlike("sessions", [session.process for session in self.sessions], ".process")
        _check_unlike("layers", [layer.key for layer in self.layers])
        numbers = {session.number for session in self.sessions}
        for place, layer in enumerate(self.layers):
            cells = {layer.default, *layer.cells, *(cell for cell, _ in layer.left_out)}
            if unknown := {row.session for row in layer.rows} - numbers:
                raise ArgumentError(f"layers[{place}].rows must have sessions of the pack, got {min(unknown)}")
            if unknown := cells.difference(range(len(self.cells))):
                raise ArgumentError(f"layers[{place}] must have cells of the pack, got {min(unknown)}")

    @property
    def next_session(self) -> int:
        """A number that no session has."""
        return max((session.number for session in self.sessions), default=0) + 1

    def with_session(self, session: Session) -> Pack:
        """With a session, in the place of one with the same number; its process must have no other session."""
        others = (each for each in self.sessions if each.number != session.number)
        return dataclasses.replace(self, sessions=(*others, session))

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
        """With rows of a layer, each in the place of one with the same `Row.key`; arguments as in `TunedLayer`.

        Rows beside another default are kept apart. Their sessions and cells are in the pack.
        """
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
        layer = convert(msgspec.to_builtins(layer), TunedLayer, "a layer")
        return dataclasses.replace(self, layers=(*self.layers[:place], layer, *self.layers[place + 1 :]))

    @classmethod
    def from_json(cls, content: bytes | str, here: Machine | None = None) -> Pack:
        """Inverse of `text`. If `here` is given, a pack of another machine is left empty, and its times are not read.

        Raises:
            UnknownNameError: A layer's scheme, activation or another name is not known here.
        """
        head: _Head = decode_file(content, _Head, SCHEMA)
        if here not in (None, head.machine):
            return cls(head.machine)
        if head.columns[: len(COLUMNS)] != COLUMNS:
            raise ArgumentError(f"columns must begin with {', '.join(COLUMNS)}, got {shown(list(head.columns))}")
        pack: Pack = decode(content, cls, "it")
        return pack

    def text(self) -> str:
        """The pack as JSON, one row of times a line."""
        own = msgspec.to_builtins(dataclasses.replace(self, layers=()))
        del own["layers"]
        values = {"schema": SCHEMA, **own, "columns": COLUMNS}
        lines = [f" {json.dumps(name)}: {json.dumps(value, allow_nan=False)}," for name, value in values.items()]
        layers = ",\n".join(map(_layer_text, self.layers))
        return "\n".join(["{", *lines, ' "layers": [', *([layers] if layers else []), " ]", "}", ""])


def _layer_text(layer: TunedLayer) -> str:
    values = msgspec.to_builtins(layer)
    rows = ",\n".join(f"   {json.dumps(row, allow_nan=False)}" for row in values.pop("rows"))
    return f'  {json.dumps(values)[:-1]}, "rows": [\n{rows}\n  ]}}'


COLUMNS: Final = Row.__struct_fields__


@dataclasses.dataclass(frozen=True)
class _Head:
    machine: Machine
    columns: tuple[Text, ...]


def _check_unlike(name: str, keys: Sequence[object], field: str = "") -> None:
    seen: set[object] = set()
    for place, key in enumerate(keys):
        if key in seen:
            raise ArgumentError(f"{name}[{place}]{field} must differ from those before it, got {shown(key)} again")
        seen.add(key)


def read_pack(path: Path, is_own: bool, here: Machine | None = None) -> Pack:
    """Reads a pack, as `read_content` and `Pack.from_json`."""
    return Pack.from_json(read_content(path, is_own), here)


def write_pack(path: Path, machine: Machine, change: Callable[[Pack], Pack], is_new: bool = False) -> Pack:
    """Changes a pack's file atomically and returns the new pack; concurrent writers take turns.

    A missing file is an empty pack, and so is any if `is_new`. An interrupted write leaves the former pack. A
    RecordFileError if the file cannot be read or written, or holds times of another machine.
    """
    pack = Pack(machine)

    def changed(path: Path) -> str:
        nonlocal pack
        if not is_new and path.exists():
            with contextlib.suppress(OlderFileError):
                pack = read_pack(path, is_own=True)
        if differences := pack.machine.differences(machine):
            raise ArgumentError(f"it must hold times of this machine, got {'; '.join(differences)}")
        pack = change(pack)
        return pack.text()

    change_file(path, changed, "the pack", VARIABLE)
    return pack
