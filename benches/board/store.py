"""The file of a board: one machine, one set of versions, written after each row, so that a cut run keeps its rows."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from benches.board.layers import BoardLayer, Point
from moereg.evidence.pack import TimedCell

__all__ = ["SCHEMA", "Board", "OtherRunError", "Row"]

SCHEMA: Final = 1
# What has to be equal where a file is continued.
_SAME: Final = ("device", "platform", "versions", "commit", "compiled_ahead", "machine")

Row = dict[str, Any]


class OtherRunError(ValueError):
    """The file was measured elsewhere, or with other versions."""


class Board:
    """Measured rows, in memory and on disk.

    Attributes:
        document: What the file holds. `rows` are the measured ones; `layers` has for each layer its problem, the
            default and why backends do not fit; `cells` those that results name by index; `out` lists candidates that
            took the process down; `left_out` the rows that are missing. `process` is random: the file is a session.
    """

    def __init__(self, path: pathlib.Path, measured_on: Mapping[str, Any]) -> None:
        """Reads the file, or starts it.

        Args:
            path: Written after each change, by way of a second file beside it.
            measured_on: As `provenance` makes it, `machine` as packs have it, and `compiled_ahead`, the backends whose
                first calls compile nothing.

        Raises:
            OtherRunError: The file is of another machine, other versions or another commit, or no board.
        """
        self._path: Final = path
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            **measured_on,
            "process": secrets.token_hex(4),
            "ceilings": {},
            "seconds": 0.0,
            "cells": [],
            "layers": {},
            "out": [],
            "left_out": [],
            "rows": [],
        }
        if path.exists():
            self._continue(measured_on)

    def _continue(self, measured_on: Mapping[str, Any]) -> None:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            is_board = found["schema"] == SCHEMA and {"layers", "out", "left_out", "rows"} <= set(found)
        except (ValueError, KeyError, TypeError):
            is_board = False
        if not is_board:
            raise OtherRunError(f"--json continues a board, and {self._path} is none; name another file")
        for key in _SAME:
            if found.get(key) != measured_on.get(key):
                raise OtherRunError(
                    f"--json continues a board of one machine and one set of versions, and the {key} of {self._path} "
                    f"is {found.get(key)!r}, here {measured_on.get(key)!r}; name another file"
                )
        self.document = found

    def save(self) -> None:
        """Writes the file; whoever reads it meanwhile sees all of the old one or all of the new one."""
        head = {key: value for key, value in self.document.items() if key != "rows"}
        text = json.dumps(_finite(head), indent=1)
        rows = ",\n  ".join(json.dumps(_finite(row)) for row in self.document["rows"])
        beside = self._path.with_name(f"{self._path.name}.part")
        beside.write_text(f'{text[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n', encoding="utf-8")
        os.replace(beside, self._path)

    def add(self, layer: BoardLayer, point: Point, row: Row) -> None:
        """Keeps a row."""
        self.document["rows"].append({**_place(layer, point), **row})
        self.save()

    def missing(self, layer: BoardLayer) -> list[Point]:
        """The points of a layer that have no row yet."""
        done = {(row["routing"], row["tokens"]) for row in self.document["rows"] if _is_of(row, layer)}
        return [point for point in layer.points if (point.routing, point.tokens) not in done]

    def leave_out(self, layers: Iterable[BoardLayer], reasons: Mapping[str, str]) -> None:
        """Lists the rows that are missing, with the reason of each layer."""
        self.document["left_out"] = [
            {**_place(layer, point), "left_out": reasons.get(layer.name, "no time was left")}
            for layer in layers
            for point in self.missing(layer)
        ]
        self.save()

    def add_cell(self, cell: TimedCell) -> int:
        """The index of a cell in `cells`, to which it is added if it is new."""
        cells, values = self.document["cells"], json.loads(json.dumps(dataclasses.asdict(cell)))
        if values not in cells:
            cells.append(values)
        return int(cells.index(values))

    def put_out(self, layer: str, backend: str, experts: str, reason: str) -> None:
        """Excludes a candidate that took the process down, from its layer; from all once two layers have lost it."""
        self.document["out"].append({"layer": layer, "backend": backend, "experts": experts, "reason": reason})
        self.save()

    def reason_out(self, layer: str, backend: str, experts: str) -> str | None:
        """Why a candidate is excluded from a layer; None if it is not."""
        found = [out for out in self.document["out"] if (out["backend"], out["experts"]) == (backend, experts)]
        own = [out["reason"] for out in found if out["layer"] == layer]
        if own:
            return str(own[0])
        return f"{found[0]['reason']}, in {len(found)} other layers" if len(found) > 1 else None


def _place(layer: BoardLayer, point: Point) -> Row:
    return {"layer": layer.layer, "scheme": layer.scheme, "routing": point.routing, "tokens": point.tokens}


def _is_of(row: Row, layer: BoardLayer) -> bool:
    return (row["layer"], row["scheme"]) == (layer.layer, layer.scheme)


def _finite(value: Any) -> Any:
    """The value with numbers to five digits, and null for those that are none."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(one) for one in value]
    return value
