"""The tables of the boards, from the stored files: losses of the default first."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from benches.board.rows import (
    BOARDS,
    Entry,
    Row,
    Standing,
    absent,
    apart,
    beaten_ceilings,
    compiled_ahead,
    documents,
    lacks_a_library,
    number,
    rows_of,
    standings,
)
from benches.board.variants import UNTUNED
from benches.markdown import cell, table, wrapped

__all__ = ["TABLES", "absent_text", "counted"]

_COLUMNS: Final = 9
# Calls of a row are unlike where a sample in ten takes so many times what one in ten takes.
_UNLIKE: Final = 1.5


def picture(board: str) -> str:
    """The link to a board's picture, which `benches.pictures` draws from the same rows."""
    device = next(iter(documents(board).values()))["device"]
    return f"![The fastest backend by layer and tokens on {device}, and its lead or lag](board_{board}.svg)"


def counted(outcomes: Sequence[str]) -> str:
    """How many rows are won, tied and lost."""
    return ", ".join(f"{outcomes.count(word)} {word}" for word in ("won", "tied", "lost"))


def losses_table(board: str) -> str:
    """How many rows the default wins, ties and loses, those that it loses, worst first, and what the rows lack."""
    found = rows_of(board)
    lost = sorted((one for one in found if one.outcome == "lost"), key=lambda one: one.ratio or 0.0)
    alone = sum(not one.outcome for one in found)
    head = f"{len(found)} rows: {counted([one.outcome for one in found])}" + (
        f"; in {alone} one backend ran alone." if alone else "."
    )
    notes = "\n\n".join(filter(None, (absent_text(board), _unlike_text(lost))))
    if not lost:
        return "\n\n".join(filter(None, (head, notes)))
    rows = []
    for one in lost:
        best, own = one.best_other, one.entries[one.default]
        assert best is not None
        assert best.time_us is not None
        gain = f"{1 - (one.ratio or 0.0):.1%}" if own.time_us else "all of it: the default failed"
        rows.append([one.place, one.default, own.text, best.name, best.text, gain])
    header = ["layer", "scheme", "routing", "T", "default", "its us", "fastest", "its us", "less time"]
    return "\n\n".join(filter(None, (head, table(header, rows), notes)))


def absent_text(board: str) -> str:
    """The backends that are missing from rows in which they could have been, in a sentence."""
    parts: dict[str, list[str]] = {}
    for (name, reason), rows in absent(board).items():
        schemes = ", ".join(dict.fromkeys(one.scheme for one in rows))
        parts.setdefault(f"`{name}`", []).append(f"{len(rows)} row{'s' * (len(rows) > 1)} ({schemes}; {reason})")
    if not parts:
        return ""
    text = "; ".join(f"{name} in {', '.join(words)}" for name, words in sorted(parts.items()))
    return wrapped(f"Missing from rows that they could have joined: {text}.")


def _unlike_text(rows: Sequence[Standing]) -> str:
    parts = []
    for one in rows:
        own = one.entries.get(one.default)
        if own is not None and own.p10_us and own.p90_us and own.p90_us > _UNLIKE * own.p10_us:
            low, high = number(own.p10_us), number(own.p90_us)
            parts.append(f"{one.layer} {one.routing} T {one.tokens} ({low} to {high} us from p10 to p90)")
    return wrapped(f"Calls varied too much for their ratio to mean much: {', '.join(parts)}.") if parts else ""


def summary_table(board: str) -> str:
    """For each layer and routing: rows won, and how far ahead of the fastest other backend."""
    groups: dict[tuple[str, str, str], list[Standing]] = {}
    for one in rows_of(board):
        groups.setdefault((one.layer, one.scheme, one.routing), []).append(one)
    rows = []
    for (layer, scheme, routing), found in groups.items():
        ratios = [one.ratio for one in found if one.ratio]
        winners = sorted({one.ranking[0].name for one in found if one.ranking})
        mean = f"{math.exp(math.fsum(map(math.log, ratios)) / len(ratios)):.2f}" if ratios else "alone"
        worst = f"{min(ratios):.2f}" if ratios else "alone"
        defaults = ", ".join(dict.fromkeys(one.default for one in found))
        outcomes = counted([one.outcome for one in found])
        rows.append([layer, scheme, routing, defaults, outcomes, mean, worst, ", ".join(winners)])
    header = ["layer", "scheme", "routing", "default", "rows", "ratio, mean", "worst", "fastest somewhere"]
    return table(header, rows)


def rows_table(board: str) -> str:
    """Every row: the time of each backend and its share of the roofline, a table for each layer."""
    parts = []
    groups: dict[tuple[str, str], list[Standing]] = {}
    for one in rows_of(board):
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
    parts.append(" ".join(map(_where, documents(board).values())))
    return "\n\n".join(parts)


def apart_table(board: str) -> str:
    """Backends that the rows lack, from other processes, each beside the default of the same process."""
    rows = []
    for one in _apart(board):
        own = one.entries.get(one.default)
        for entry in one.entries.values():
            if own is None or entry.backend == own.backend or entry.is_variant:
                continue
            is_timed = bool(own.time_us and entry.time_us)
            ratio = f"{(entry.time_us or 0.0) / (own.time_us or math.nan):.2f}" if is_timed else "-"
            rows.append([one.place, own.name, own.text, entry.name, entry.text, ratio])
    if not rows:
        return "No backend has rows of a process of its own."
    header = ["layer", "scheme", "routing", "T", "default", "its us", "backend", "its us", "ratio"]
    return table(header, rows)


def _apart(board: str) -> list[Standing]:
    """Rows of other processes: their default and what the board's own row of the place lacks."""
    there = {(one.place, entry.name) for one in rows_of(board) for entry in one.entries.values() if entry.time_us}

    def lacking(one: Standing) -> dict[str, Entry]:
        return {name: own for name, own in one.entries.items() if name == one.default or (one.place, name) not in there}

    return [dataclasses.replace(one, entries=lacking(one)) for one in apart(board)]


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
    files = documents(board).values()
    where: dict[tuple[str, str], list[str]] = {}
    for one in rows_of(board) + apart(board):
        for entry in one.entries.values():
            if entry.failure:
                key = (entry.name, entry.failure)
                where.setdefault(key, []).append(f"{one.layer} {one.scheme} {one.routing} T {one.tokens}")
    rows = [
        [name, places[0] + (f" and {len(places) - 1} more" if len(places) > 1 else ""), cell(reason)]
        for (name, reason), places in where.items()
    ]
    ran = {(one.layer, one.scheme, entry.backend) for one in apart(board) for entry in one.ranking}
    lacking: dict[tuple[str, str], dict[str, None]] = {}
    for layer in (layer for document in files for layer in document["layers"].values()):
        for name, reason in layer["skipped"].items():
            if lacks_a_library(reason) and (layer["layer"], layer["scheme"], name) not in ran:
                key = (name, _shortened(reason))
                lacking.setdefault(key, {})[f"{layer['layer']} {layer['scheme']}"] = None
    rows += [[name, ", ".join(layers), cell(reason)] for (name, reason), layers in lacking.items()]
    there = {one.place for one in rows_of(board)}
    names = ("layer", "scheme", "routing", "tokens")
    # A row that several runs left out is missing once, for the last one's reason.
    left_out: dict[str, dict[str, Any]] = {}
    for document in files:
        for row in document["left_out"]:
            left_out.setdefault(" | ".join(str(row[name]) for name in names), row)
    by_reason: dict[tuple[str, str, str], int] = {}
    for row in (row for place, row in left_out.items() if place not in there):
        key3 = (row["layer"], row["scheme"], row["left_out"])
        by_reason[key3] = by_reason.get(key3, 0) + 1
    rows += [
        ["every backend", f"{layer} {scheme}: {count} rows", cell(reason)]
        for (layer, scheme, reason), count in by_reason.items()
    ]
    return table(["backend", "where", "reason"], rows) if rows else "Nothing failed and nothing was left out."


def _shortened(reason: str) -> str:
    """A reason without what holds on that machine alone: folders, and the command that was the cure."""
    return re.sub(r"(?<= )/\S*/|; run .*", "", reason)


def first_use_table(board: str) -> str:
    """How long backends take before they are fast: permuting, and the first call with its compiling and tuning.

    From the files of `--first-use`, or from all where there is none; what was compiled ahead has no first call there.
    """
    files = documents(board).values()
    alike = [document for document in files if not compiled_ahead(document)]
    first: dict[str, list[float]] = {}
    permute: dict[str, list[float]] = {}
    for one in (one for document in alike or files for one in standings(document)):
        for entry in one.entries.values():
            if entry.time_us is not None:
                first.setdefault(entry.name, []).extend([entry.first_ms] if entry.first_ms else [])
                permute.setdefault(entry.name, []).append(entry.permute_ms or math.nan)
    rows = []
    for name, times in sorted(first.items()):
        calls = [f"{max(times):,.0f}", f"{sorted(times)[len(times) // 2]:,.0f}"] if times else ["compiled ahead"] * 2
        rows.append([name, f"{max(permute[name]):,.0f}", *calls])
    filled = table(["backend", "longest permute ms", "longest first call ms", "median first call ms"], rows)
    if all(first.values()):
        return filled
    return f"{filled}\n\nDo not compare with a backend that was compiled ahead: no stored run measured both alike."


def variants_table(board: str) -> str:
    """A backend beside itself without its tactics, from the first file that has the row and both."""
    rows = []
    for one in rows_of(board) + _apart(board):
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
    is_cpu = document.get("platform") == "cpu"
    instructions = f" ({document.get('instruction_set', 'instruction set not stored')})" if is_cpu else ""
    if beaten := " and ".join(beaten_ceilings(document)):
        note = f" A row beats the ceiling of {beaten}, so that was measured too low, and its rows get no share.{note}"
    where = f"{document['device']}{instructions} with {versions} at commit {document['commit'][:12] or 'unknown'}"
    return (
        f"Measured on {where}, {document['date']}, in {document['seconds']:.0f} s. "
        f"Ceilings in the same process: {ceilings}.{note}"
    )


_KINDS: Final[dict[str, Callable[[str], str]]] = {
    "picture": picture,
    "losses": losses_table,
    "summary": summary_table,
    "variants": variants_table,
    "first_use": first_use_table,
    "failures": failures_table,
    "rows": rows_table,
    "apart": apart_table,
}

TABLES: Final[dict[str, Callable[[], str]]] = {
    f"{board}_{kind}": functools.partial(table, board) for board in BOARDS for kind, table in _KINDS.items()
}
