"""One layer's part of a pack's file, by the keys of candidates on this machine."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from moereg.bench.points import Point
from moereg.bench.session import Key, timed_cell
from moereg.errors import one_line
from moereg.evidence.on_machine import machine_of
from moereg.evidence.pack import Pack, Row, Session, TunedLayer, problem_key, write_pack
from moereg.evidence.provenance import provenance
from moereg.platforms import Platform
from moereg.selection.result import Decision
from moereg.spec.problem import MoEProblem

_LONGEST_REASON: Final = 500


class LayerRecord:
    """A layer's times in a pack, written with each change: candidates, the default first, and all of the file."""

    def __init__(
        self,
        path: Path,
        platform: Platform,
        problem: MoEProblem,
        decisions: Mapping[Key, Decision],
        refresh: bool = False,
    ) -> None:
        """Reads the file. Forgets the layer's times if asked to, or if a candidate is new or has changed."""
        self.decisions: Final = decisions
        self.pack: Pack
        self._path: Final = path
        self._platform: Final = platform
        self._problem: Final = problem
        self._cells: Final = {key: timed_cell(one, platform) for key, one in decisions.items()}
        self._change(self._emptied if refresh else lambda pack: pack)
        if self.rows and not set(self.keys) <= {*self.participants, *self.left_out}:
            self._change(self._emptied)

    def _change(self, change: Callable[[Pack], Pack]) -> None:
        def changed(pack: Pack) -> Pack:
            for cell in self._cells.values():
                pack, _ = pack.with_cell(cell)
            return change(pack)

        self.pack = write_pack(self._path, machine_of(self._platform), changed)

    def _with_layers(self, pack: Pack, change: Callable[[TunedLayer], TunedLayer]) -> Pack:
        """With the layer changed beside each default, and without sessions whose last row that takes out."""
        key = problem_key(self._problem)
        layers = tuple(change(layer) if layer.problem == key else layer for layer in pack.layers)
        before, after = ({row.session for layer in each for row in layer.rows} for each in (pack.layers, layers))
        # Another command's session may have no rows yet.
        sessions = tuple(one for one in pack.sessions if one.number not in before - after)
        return dataclasses.replace(pack, layers=layers, sessions=sessions)

    def _emptied(self, pack: Pack) -> Pack:
        return self._with_layers(pack, lambda layer: dataclasses.replace(layer, rows=(), wrong=(), left_out=()))

    def index(self, key: Key) -> int:
        """A candidate's index in the pack's cells."""
        return self.pack.cells.index(self._cells[key])

    def _by_key(self, reasons: Iterable[tuple[int, str]]) -> dict[Key, str]:
        found = dict(reasons)
        return {key: found[self.index(key)] for key in self._cells if self.index(key) in found}

    @property
    def wrong(self) -> dict[Key, str]:
        """Candidates that failed beside whatever default, with the reason."""
        key = problem_key(self._problem)
        return self._by_key(pair for layer in self.pack.layers if layer.problem == key for pair in layer.wrong)

    @property
    def keys(self) -> list[Key]:
        """The candidates that did not fail, the default first."""
        wrong = self.wrong
        return [key for key in self._cells if key not in wrong]

    @property
    def place(self) -> int | None:
        """The index of the layer in the pack, beside its present default; None if it is not there."""
        if not self.keys:
            return None
        own = TunedLayer(problem_key(self._problem), self.index(self.keys[0])).key
        return next((place for place, layer in enumerate(self.pack.layers) if layer.key == own), None)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Times beside the present default."""
        return () if self.place is None else self.pack.layers[self.place].rows

    @property
    def left_out(self) -> dict[Key, str]:
        """Candidates that are not measured further, with the reason."""
        return {} if self.place is None else self._by_key(self.pack.layers[self.place].left_out)

    @property
    def participants(self) -> list[Key]:
        """The candidates to measure, the default first: all at the beginning, then those that have times."""
        timed, left_out = {row.cell for row in self.rows}, self.left_out
        return [key for key in self.keys if key not in left_out and (not timed or self.index(key) in timed)]

    @property
    def sessions(self) -> list[int]:
        """Numbers of its sessions, in order."""
        return sorted({row.session for row in self.rows})

    def measured(self, session: int) -> set[Point]:
        """The points of a session."""
        return {Point(row.routing, row.tokens) for row in self.rows if row.session == session}

    def begin(self, number: int | None, clocks: Mapping[str, int]) -> int:
        """Adds a session, or to one that goes on the name of its next process; returns its number."""
        where, process = provenance(self._platform, ()), secrets.token_hex(4)

        def begun(pack: Pack) -> Pack:
            own = pack.next_session if number is None else number  # Another command may write to the same file.
            before = [one.process for one in pack.sessions if one.number == own]
            names = "+".join((*before, process))
            return pack.with_session(Session(own, where["date"], where["commit"], names, clocks))

        self._change(begun)
        return next(one.number for one in self.pack.sessions if process in one.process)

    def add_times(self, session: int, point: Point, times: Mapping[Key, Mapping[str, Any]]) -> None:
        """Writes what a session measured at a point: values of rows by candidate."""
        place: dict[str, Any] = {"session": session, "routing": point.routing, "tokens": point.tokens}
        self._add([Row(cell=self.index(key), **place, **values) for key, values in times.items()])

    def leave_out(self, reasons: Mapping[Key, str], wrong: bool = False) -> None:
        """Writes which candidates are not measured further, or are wrong, and why."""
        pairs = [(self.index(key), one_line(reason, _LONGEST_REASON)) for key, reason in reasons.items()]
        self._add((), **{"wrong" if wrong else "left_out": pairs})

    def _add(self, rows: Iterable[Row], **pairs: Iterable[tuple[int, str]]) -> None:
        default = self.index(self.keys[0])
        self._change(lambda pack: pack.with_rows(self._problem, default, rows, **pairs))

    def drop(self, session: int) -> None:
        """Forgets a session's times."""

        def without(layer: TunedLayer) -> TunedLayer:
            return dataclasses.replace(layer, rows=tuple(row for row in layer.rows if row.session != session))

        def dropped(pack: Pack) -> Pack:
            pack = self._with_layers(pack, without)
            used = {row.session for layer in pack.layers for row in layer.rows}
            return dataclasses.replace(
                pack, sessions=tuple(one for one in pack.sessions if one.number != session or session in used)
            )

        self._change(dropped)

    def weigh(self, calls: Mapping[int, int]) -> None:
        """Writes the numbers of calls by number of tokens that weigh the choice; empty if decades count alike."""
        weights = tuple(sorted(calls.items()))
        self._change(lambda pack: self._with_layers(pack, lambda layer: dataclasses.replace(layer, calls=weights)))
