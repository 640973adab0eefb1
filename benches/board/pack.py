"""Writes a pack of measured times from stored boards, each of which is a session."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benches import stored
from benches.board.variants import UNTUNED
from moereg.bench.session import drifted
from moereg.evidence.on_machine import Machine
from moereg.evidence.pack import Pack, Row, Session, TimedCell, write_pack
from moereg.evidence.significance import NUM_SESSIONS
from moereg.runtime.json_types import convert
from moereg.selection.loader import load_backends
from moereg.spec.problem import MoEProblem

__all__ = ["write_pack_of"]

_OF_A_SESSION: Final = ("machine", "process", "cells")
_OF_A_RESULT: Final = ("log_ratio", "half_width", "rounds", "graph", "is_wrong", "cell")

Document = Mapping[str, Any]


def write_pack_of(out: pathlib.Path, paths: Sequence[pathlib.Path]) -> str:
    """Writes a new pack; returns a line that says what is in it.

    Args:
        out: The file, written over.
        paths: Stored boards, measured one after the other by processes of their own.

    Raises:
        ValueError: There are too few, or one is not a session or was measured elsewhere; names the file.
        RecordFileError: The file cannot be written.
    """
    load_backends()  # Problems may have schemes of wheels.
    boards = {path: stored.read(path) for path in paths}
    if len(boards) < NUM_SESSIONS:
        raise ValueError(f"--pack takes at least {NUM_SESSIONS} boards, since one chooses nothing, got {len(boards)}")
    for path, board in boards.items():
        _check(path, board)
    first, *others = boards
    for path in others:
        if boards[path]["machine"] != boards[first]["machine"]:
            raise ValueError(
                f"--pack takes boards of one machine, and that of {path} is {boards[path]['machine']!r}, of {first} "
                f"{boards[first]['machine']!r}; measure both on one"
            )
    if len({board["process"] for board in boards.values()}) < len(boards):
        raise ValueError("--pack takes sessions of their own, got one process twice; measure again into another file")

    pack = Pack(convert(boards[first]["machine"], Machine, "the machine"))
    for path, board in boards.items():
        try:
            pack = _with_board(pack, board)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    write_pack(out, pack.machine, lambda _: pack, is_new=True)
    num_rows = sum(len(layer.rows) for layer in pack.layers)
    return f"{out}: {num_rows} rows of {len(pack.layers)} layers in {len(boards)} sessions on {pack.machine.device}"


def _check(path: pathlib.Path, board: Document) -> None:
    lacking = [key for key in _OF_A_SESSION if key not in board]
    lacking += [key for key in _OF_A_RESULT if any(key not in one for one in _timed(board))]
    if lacking:
        raise ValueError(
            f"--pack takes boards that are sessions, and {path} lacks {', '.join(dict.fromkeys(lacking))}; measure it "
            "again: python -m benches.board --json FILE"
        )
    clocks = [row["clocks"][1] for row in board["rows"] if row.get("clocks")]
    if clocks and (drift := drifted(clocks[0], clocks[-1])):
        raise ValueError(f"{path}: {drift}; measure it again on an idle machine")


def _timed(board: Document) -> Iterator[Document]:
    return (one for row in board["rows"] for one in row["results"] if one["failure"] is None)


def _with_board(pack: Pack, board: Document) -> Pack:
    number = pack.next_session
    session = Session(number, board["date"], board["commit"], board["process"], board.get("clocks", {}))
    pack = pack.with_session(session)
    rows = [(row, [one for one in row["results"] if _is_a_choice(one)]) for row in board["rows"]]
    indices: dict[int, int] = {}
    for cell in sorted({one["cell"] for _, results in rows for one in results}):
        pack, indices[cell] = pack.with_cell(convert(board["cells"][cell], TimedCell, "a record"))
    problems = {(one["layer"], one["scheme"]): one["problem"] for one in board["layers"].values()}
    for row, results in rows:
        default = next((one for one in results if one["log_ratio"] is not None and _is_default(one, row)), None)
        if default is None:
            continue
        problem = MoEProblem.from_dict(problems[row["layer"], row["scheme"]])
        place = number, row["routing"], row["tokens"]
        timed = [_row(one, indices[one["cell"]], *place) for one in results if one["log_ratio"] is not None]
        wrong = [(indices[one["cell"]], one["failure"]) for one in results if one["is_wrong"]]
        pack = pack.with_rows(problem, indices[default["cell"]], timed, wrong)
    return pack


def _is_a_choice(one: Document) -> bool:
    """Whether it took part and is not of a backend that only boards have."""
    return "cell" in one and UNTUNED not in one["backend"] and not one["origin"].startswith("benches.")


def _is_default(one: Document, row: Document) -> bool:
    return all(one[key] == row["default"][key] for key in ("backend", "experts", "computes"))


def _row(one: Document, cell: int, session: int, routing: str, tokens: int) -> Row:
    return Row(
        session=session,
        cell=cell,
        routing=routing,
        tokens=tokens,
        log_ratio=one["log_ratio"],
        half_width=one["half_width"],
        median_us=one["time_us"],
        p10_us=one["p10_us"],
        p90_us=one["p90_us"],
        rounds=one["rounds"],
        error=one["relative_error"] / one["tolerance"],
        graph=one["graph"],
    )
