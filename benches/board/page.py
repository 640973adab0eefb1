"""The tables of docs/board.md, from the stored boards: losses of the default first."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from benches.board.variants import UNTUNED
from benches.markdown import cell, table
from moereg.tuning.inputs import ROUTINGS

__all__ = ["BOARDS", "TABLES", "Standing", "documents", "standings"]

RESULTS: Final = pathlib.Path(__file__).resolve().parents[1] / "results"

# By kind of machine: the file whose process had most backends first, then those of backends whose libraries do not fit
# beside the others' in one process.
BOARDS: Final = {"h200": ("board_h200.json", "board_h200_sonic.json"), "cpu": ("board_cpu.json",)}

# Below this two times are the same: medians of one kernel differ by it from run to run.
_SAME: Final = 1.01
_COLUMNS: Final = 9

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One candidate in a row.

    Attributes:
        name: Its backend, with the class where that is not the backend's first.
        time_us: None if it failed.
        share: Of the roofline.
        failure: Why it failed.
        first_ms, permute_ms: Time of its first call, compiling and tuning included, and of permuting the weights.
        is_scaled: Whether it was measured in another process, and scaled by the default's times in both.
    """

    name: str
    time_us: float | None
    share: float | None
    failure: str | None
    first_ms: float | None
    permute_ms: float | None
    is_scaled: bool = False

    @property
    def backend(self) -> str:
        """Its backend alone."""
        return self.name.partition(" (")[0]

    @property
    def is_variant(self) -> bool:
        """Whether only the board has it, to compare with."""
        return UNTUNED in self.name

    @property
    def text(self) -> str:
        """Time and share as a cell of a table."""
        if self.time_us is None:
            return "failed" if self.failure else "-"
        share = "" if self.share is None else f" ({self.share:.0%})"
        return f"{'~' if self.is_scaled else ''}{number(self.time_us)}{share}"


@dataclasses.dataclass(frozen=True)
class Standing:
    """One row of a board.

    Attributes:
        layer, scheme, routing, tokens: Which.
        default: Name of the entry that `select_backend` would choose.
        entries: By name, in the order of the file.
    """

    layer: str
    scheme: str
    routing: str
    tokens: int
    default: str
    entries: dict[str, Entry]

    @property
    def place(self) -> str:
        """The row in words."""
        return f"{self.layer} | {self.scheme} | {self.routing} | {self.tokens}"

    @property
    def ranking(self) -> list[Entry]:
        """The backends that are right, fastest first; those that only the board has take no place."""
        timed = [entry for entry in self.entries.values() if entry.time_us is not None and not entry.is_variant]
        return sorted(timed, key=lambda entry: entry.time_us or math.inf)

    @property
    def is_alone(self) -> bool:
        """Whether one backend alone ran, if any."""
        return len({entry.backend for entry in self.ranking}) < 2

    @property
    def ratio(self) -> float | None:
        """Time of `best_other` over the default's: above 1 the default is the fastest; None if it has no rival."""
        own, other = self.entries.get(self.default), self.best_other
        if other is None or other.time_us is None or own is None:
            return None
        return 0.0 if own.time_us is None else other.time_us / own.time_us

    @property
    def best_other(self) -> Entry | None:
        """The fastest candidate of another backend, or of the default's own if that is faster than the default."""
        own = self.entries.get(self.default)
        backend, time_us = (own.backend, own.time_us or math.inf) if own is not None else ("", math.inf)
        rivals = (one for one in self.ranking if one is not own)
        return next((one for one in rivals if one.backend != backend or (one.time_us or 0.0) < time_us), None)

    @property
    def lead(self) -> str:
        """By how much the fastest is ahead of the fastest of another backend."""
        if self.is_alone:
            return "-"
        first = self.ranking[0]
        times = [entry.time_us for entry in self.ranking if entry.backend != first.backend and entry.time_us]
        return f"{times[0] / (first.time_us or math.nan) - 1:.1%}"

    @property
    def is_loss(self) -> bool:
        """Whether another candidate is faster, beyond what medians vary by."""
        return self.ratio is not None and self.ratio * _SAME < 1


def number(value: float) -> str:
    """A time in us with three digits or more."""
    return f"{value:,.1f}" if value < 10_000 else f"{value:,.0f}"


@functools.lru_cache(maxsize=8)
def _parsed(path: pathlib.Path, _stamp: int) -> Row:
    document: Row = json.loads(path.read_text(encoding="utf-8"))
    return document


def documents(board: str) -> list[Row]:
    """The stored files of a board.

    Raises:
        FileNotFoundError: There is none.
    """
    paths = [RESULTS / name for name in BOARDS[board] if (RESULTS / name).exists()]
    if not paths:
        raise FileNotFoundError(RESULTS / BOARDS[board][0])
    return [_parsed(path, path.stat().st_mtime_ns) for path in paths]


def standings(found: Sequence[Row]) -> list[Standing]:
    """The rows of the first document, with the backends of the others that it lacks."""
    first, *others = map(_with_true_shares, found)
    rows = []
    for row in first["rows"]:
        entries = _entries(row)
        default = _name(row["default"], row["results"]) if row["default"] else ""
        for other in others:
            entries |= _scaled(row, other, entries, default)
        rows.append(Standing(row["layer"], row["scheme"], row["routing"], row["tokens"], default, entries))
    # A run that went on where another was cut has its rows at the end.
    layers = list(dict.fromkeys((row.layer, row.scheme) for row in rows))
    return sorted(
        rows, key=lambda row: (layers.index((row.layer, row.scheme)), ROUTINGS.index(row.routing), row.tokens)
    )


def _exceeds_ceilings(document: Row) -> bool:
    """Whether a row took clearly less time than the measured ceilings allow, so that they are none."""
    return any((one.get("share") or 0.0) > _SAME for row in document["rows"] for one in row["results"])


def _with_true_shares(document: Row) -> Row:
    """A document without the shares of ceilings that were measured too low."""
    if not _exceeds_ceilings(document):
        return document
    rows = [{**row, "results": [{**one, "share": None} for one in row["results"]]} for row in document["rows"]]
    return {**document, "rows": rows}


def _name(one: Row, results: Iterable[Row]) -> str:
    own = [result for result in results if result["backend"] == one["backend"]]
    identity = ("experts", "computes")
    is_first = not own or all(own[0][key] == one[key] for key in identity)
    return str(one["backend"]) if is_first else f"{one['backend']} ({one['experts'].removesuffix('Experts')})"


def _entries(row: Row) -> dict[str, Entry]:
    found = {}
    for one in row["results"]:
        name = _name(one, row["results"])
        keys = ("share", "first_ms", "permute_ms")
        share, first_ms, permute_ms = (one.get(key) for key in keys)
        failed = one["failure"]
        found[name] = Entry(name, None if failed else one["time_us"], share, failed, first_ms, permute_ms)
    return found


def _scaled(row: Row, other: Row, entries: dict[str, Entry], default: str) -> dict[str, Entry]:
    """Entries of the same row of another process that this one lacks, at this process's pace."""
    keys = ("layer", "scheme", "routing", "tokens")
    same = next((one for one in other["rows"] if all(one[key] == row[key] for key in keys)), None)
    theirs = {} if same is None else _entries(same)
    here, there = (found.get(default) for found in (entries, theirs))
    if here is None or there is None or not here.time_us or not there.time_us:
        return {}
    pace = here.time_us / there.time_us
    return {
        name: dataclasses.replace(
            entry,
            time_us=entry.time_us and entry.time_us * pace,
            share=entry.share and entry.share / pace,
            is_scaled=True,
        )
        for name, entry in theirs.items()
        if name not in entries
    }


def picture(board: str) -> str:
    """The link to a board's picture, which `benches.pictures` draws from the same rows."""
    device = documents(board)[0]["device"]
    return f"![The fastest backend by layer and tokens on {device}, and its lead or lag](board_{board}.svg)"


def losses_table(board: str) -> str:
    """Rows in which another backend is faster than the default, worst first."""
    found = standings(documents(board))
    lost = sorted((one for one in found if one.is_loss), key=lambda one: one.ratio or 0.0)
    alone = sum(one.is_alone for one in found)
    head = f"{len(lost)} of {len(found)} rows" + (f"; in {alone} of them one backend ran alone." if alone else ".")
    if not lost:
        return head
    rows = []
    for one in lost:
        best, own = one.best_other, one.entries[one.default]
        assert best is not None
        assert best.time_us is not None
        gain = f"{1 - (one.ratio or 0.0):.1%}" if own.time_us else "all of it: the default failed"
        rows.append([one.place, one.default, own.text, best.name, best.text, gain])
    header = ["layer", "scheme", "routing", "T", "default", "its us", "fastest", "its us", "less time"]
    return f"{head}\n\n{table(header, rows)}"


def summary_table(board: str) -> str:
    """For each layer and routing: rows won, and how far ahead of the fastest other backend."""
    groups: dict[tuple[str, str, str], list[Standing]] = {}
    for one in standings(documents(board)):
        groups.setdefault((one.layer, one.scheme, one.routing), []).append(one)
    rows = []
    for (layer, scheme, routing), found in groups.items():
        ratios = [one.ratio for one in found if one.ratio]
        lost = sum(one.is_loss for one in found)
        winners = sorted({one.ranking[0].name for one in found if one.ranking})
        mean = f"{math.exp(math.fsum(map(math.log, ratios)) / len(ratios)):.2f}" if ratios else "alone"
        worst = f"{min(ratios):.2f}" if ratios else "alone"
        defaults = ", ".join(dict.fromkeys(one.default for one in found))
        rows.append([layer, scheme, routing, defaults, f"{lost} of {len(found)}", mean, worst, ", ".join(winners)])
    header = ["layer", "scheme", "routing", "default", "rows lost", "ratio, mean", "worst", "fastest somewhere"]
    return table(header, rows)


def rows_table(board: str) -> str:
    """Every row: the time of each backend and its share of the roofline, a table for each layer."""
    files = documents(board)
    parts = []
    groups: dict[tuple[str, str], list[Standing]] = {}
    for one in standings(files):
        groups.setdefault((one.layer, one.scheme), []).append(one)
    for (layer, scheme), found in groups.items():
        names = _columns(found)
        rows = []
        for one in found:
            fastest = one.ranking[0].name if one.ranking else ""
            cells = [one.entries[name].text if name in one.entries else "-" for name in names]
            bold = [f"**{text}**" if name == fastest else text for name, text in zip(names, cells, strict=True)]
            rows.append([one.routing, str(one.tokens), *bold, one.lead])
        parts.append(f"### {layer}, {scheme}\n\n{table(['routing', 'T', *names, 'lead'], rows)}")
    parts.append(" ".join(map(_where, files)))
    return "\n\n".join(parts)


def _columns(found: Sequence[Standing]) -> list[str]:
    """The default first, then the others by their mean rank; if there are too many, the slowest are left out."""
    names = dict.fromkeys(name for one in found for name, entry in one.entries.items() if not entry.is_variant)
    ranks: dict[str, list[float]] = {name: [] for name in names}
    for one in found:
        ranking = [entry.name for entry in one.ranking]
        for name in names:
            ranks[name].append(ranking.index(name) if name in ranking else len(names))
    default = found[0].default
    return sorted(names, key=lambda name: (name != default, math.fsum(ranks[name])))[:_COLUMNS]


def failures_table(board: str) -> str:
    """Everything that failed, was wrong or was left out, each reason once."""
    files = documents(board)
    where: dict[tuple[str, str], list[str]] = {}
    for one in standings(files):
        for entry in one.entries.values():
            if entry.failure:
                key = (entry.name, entry.failure)
                where.setdefault(key, []).append(f"{one.layer} {one.scheme} {one.routing} T {one.tokens}")
    rows = [
        [name, places[0] + (f" and {len(places) - 1} more" if len(places) > 1 else ""), cell(reason)]
        for (name, reason), places in where.items()
    ]
    rows += [
        [name, f"{layer['layer']} {layer['scheme']}", cell(reason)]
        for document in files
        for layer in document["layers"].values()
        for name, reason in layer["skipped"].items()
        if _lacks_a_library(reason)
    ]
    missing = [row for document in files for row in document["left_out"]]
    by_reason: dict[tuple[str, str, str], int] = {}
    for row in missing:
        key3 = (row["layer"], row["scheme"], row["left_out"])
        by_reason[key3] = by_reason.get(key3, 0) + 1
    rows += [
        ["every backend", f"{layer} {scheme}: {count} rows", cell(reason)]
        for (layer, scheme, reason), count in by_reason.items()
    ]
    return table(["backend", "where", "reason"], rows) if rows else "Nothing failed and nothing was left out."


def _lacks_a_library(reason: str) -> bool:
    """Whether a backend did not run for what the machine lacked, and not for what it computes."""
    return all(re.search(r"not installed|^requires the |^install ", part) for part in reason.split("; "))


def first_use_table(board: str) -> str:
    """How long backends take before they are fast: permuting, and the first call with its compiling and tuning."""
    first: dict[str, list[float]] = {}
    permute: dict[str, list[float]] = {}
    for one in standings(documents(board)):
        for entry in one.entries.values():
            if entry.time_us is not None:
                first.setdefault(entry.name, []).append(entry.first_ms or math.nan)
                permute.setdefault(entry.name, []).append(entry.permute_ms or math.nan)
    rows = [
        [name, *(f"{value:,.0f}" for value in (max(permute[name]), max(times), sorted(times)[len(times) // 2]))]
        for name, times in sorted(first.items())
    ]
    return table(["backend", "longest permute ms", "longest first call ms", "median first call ms"], rows)


def variants_table(board: str) -> str:
    """A backend beside itself without its tactics."""
    rows = []
    for one in standings(documents(board)):
        for name, entry in one.entries.items():
            base = name.replace(UNTUNED, "").replace("(Untuned", "(")
            own = one.entries.get(base)
            if base == name or own is None or not own.time_us or not entry.time_us:
                continue
            rows.append([one.place, base, own.text, entry.text, f"{entry.time_us / own.time_us:.2f}"])
    header = ["layer", "scheme", "routing", "T", "backend", "tuned us", "untuned us", "untuned / tuned"]
    return table(header, rows) if rows else "Not measured yet."


def _where(document: Row) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    ceilings = "; ".join(
        f"{name} {found['matmul_tflops']:.3g} TFLOP/s, read {found['read_gbps'] / 1e3:.3g} TB/s"
        for name, found in document["ceilings"].items()
    )
    note = f" {document['note']}" if document.get("note") else ""
    if _exceeds_ceilings(document):
        note = f" A row exceeds one of them, which was measured too low, so no shares are given.{note}"
    return (
        f"Measured on {document['device']} with {versions} at commit {document['commit'][:12] or 'unknown'}, "
        f"{document['date']}, in {document['seconds']:.0f} s. Ceilings in the same process: {ceilings}.{note}"
    )


_KINDS: Final[dict[str, Callable[[str], str]]] = {
    "picture": picture,
    "losses": losses_table,
    "summary": summary_table,
    "variants": variants_table,
    "first_use": first_use_table,
    "failures": failures_table,
    "rows": rows_table,
}

TABLES: Final[dict[str, Callable[[], str]]] = {
    f"{board}_{kind}": functools.partial(table, board) for board in BOARDS for kind, table in _KINDS.items()
}
