"""The rows of the stored boards: who took part, how long it took, and who is the fastest."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from benches import stored
from benches.board.variants import UNTUNED
from moereg.bench.inputs import ROUTINGS
from moereg.spec.quant_schemes import QuantScheme, get_scheme

__all__ = [
    "BOARDS",
    "EIGHT_BITS",
    "RESULTS",
    "Entry",
    "Row",
    "Standing",
    "absent",
    "apart",
    "beaten_ceilings",
    "ceiling_name",
    "class_name",
    "compiled_ahead",
    "documents",
    "lacks_a_library",
    "number",
    "rows_of",
    "standings",
]

RESULTS: Final = pathlib.Path(__file__).resolve().parents[1] / "results"

# Kinds of machine. `board_KIND.json` is the board, `board_KIND_*.json` are runs of other processes, such as of backends
# whose libraries do not fit beside the others'. Times of two files are never divided by each other.
BOARDS: Final = ("h200", "cpu")

EIGHT_BITS: Final = ("float8_e4m3fn", "int8")
"""Element types whose products have a ceiling of their own on a GPU."""

_OWN: Final = ("triton", "torch")
_REMOVED: Final = "flashinfer_cutile"
"""A backend that is gone: stored files still say why it did not run, pages do not."""

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One candidate in a row.

    Attributes:
        name: Its backend, with the class where that is not the backend's first.
        time_us: None if it failed.
        share: Of the roofline.
        failure: Why it failed.
        first_ms, permute_ms: Time of its first call, compiling and tuning included, and of permuting the weights;
            None where its kernels had been compiled before.
        p10_us, p90_us: Of the samples.
    """

    name: str
    time_us: float | None
    share: float | None
    failure: str | None
    first_ms: float | None
    permute_ms: float | None
    p10_us: float | None = None
    p90_us: float | None = None

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
        return f"{number(self.time_us)}{share}"


@dataclasses.dataclass(frozen=True)
class Standing:
    """One row of a board.

    Attributes:
        layer, scheme, routing, tokens: Which.
        default: Name of the entry that `select_backend` would choose.
        entries: By name, in the order of the file.
        roofline_us: By the ceilings of its process; None where the file has none, or a row of it beats them.
        skipped: Why each backend that is not in the layer did not fit.
        clocks: Of the GPU right after the row, as `moereg.platforms.gpu_clocks` has them; empty in older files.
    """

    layer: str
    scheme: str
    routing: str
    tokens: int
    default: str
    entries: dict[str, Entry]
    roofline_us: float | None = None
    skipped: Mapping[str, str] = dataclasses.field(default_factory=dict)
    clocks: Mapping[str, int] = dataclasses.field(default_factory=dict)

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
    def outcome(self) -> str:
        """Whether the default has `won`, `tied` or `lost`; empty where it is alone."""
        return stored.outcome(self.ratio)


def number(value: float) -> str:
    """A time in us with three digits or more."""
    return f"{value:,.1f}" if value < 10_000 else f"{value:,.0f}"


@functools.lru_cache(maxsize=8)
def _parsed(path: pathlib.Path, _stamp: int) -> Row:
    document = stored.read(path)
    for layer in document["layers"].values():
        layer.get("skipped", {}).pop(_REMOVED, None)
    return document


def documents(board: str) -> dict[str, Row]:
    """The stored files of a board by name: the board itself, then those of earlier runs, whose numbers count up.

    Raises:
        FileNotFoundError: There is none.
    """
    path = RESULTS / f"board_{board}.json"
    earlier = sorted(RESULTS.glob(f"{path.stem}_*.json"), key=_number_of_run, reverse=True)
    paths = [one for one in (path, *earlier) if one.exists()]
    if not paths:
        raise FileNotFoundError(path)
    return {path.name: _parsed(path, path.stat().st_mtime_ns) for path in paths}


def _number_of_run(path: pathlib.Path) -> tuple[int, str]:
    number = re.search(r"_(\d+)(?:_[^_]*)?$", path.stem)
    return int(number[1]) if number else 0, path.stem


def standings(document: Row) -> list[Standing]:
    """The rows of one document, each with the times of one process."""
    rows = []
    for row in _with_true_shares(document)["rows"]:
        default = _name(row["default"], row["results"]) if row["default"] else ""
        where = (row["layer"], row["scheme"], row["routing"], row["tokens"])
        skipped = _layer(document, row).get("skipped", {})
        entries = _entries(row, compiled_ahead(document))
        clocks = row.get("clocks", [{}])[-1]
        rows.append(Standing(*where, default, entries, row.get("roofline_us"), skipped, clocks))
    return rows


def rows_of(board: str) -> list[Standing]:
    """The rows of a board by layer, routing and tokens; one that several files have is the first one's."""
    found: dict[str, Standing] = {}
    for document in documents(board).values():
        for one in standings(document):
            found.setdefault(one.place, one)
    # A run that went on where another was cut has its rows at the end.
    layers = list(dict.fromkeys((row.layer, row.scheme) for row in found.values()))
    return sorted(
        found.values(), key=lambda row: (layers.index((row.layer, row.scheme)), ROUTINGS.index(row.routing), row.tokens)
    )


def apart(board: str) -> list[Standing]:
    """The rows that an earlier file of a board has too, from the processes of their own."""
    found, seen = [], set()
    for document in documents(board).values():
        rows = standings(document)
        found += [one for one in rows if one.place in seen]
        seen |= {one.place for one in rows}
    return found


def beaten_ceilings(document: Row) -> list[str]:
    """Element types whose ceilings a row of a document beats."""
    shares: dict[str, list[float | None]] = {}
    for row in document["rows"]:
        shares.setdefault(_ceiling(document, row), []).extend(one.get("share") for one in row["results"])
    return [name for name, own in shares.items() if stored.beats_ceilings(own)]


def ceiling_name(scheme: QuantScheme, dtype: str, kind: str) -> str:
    """The element type whose products are the ceiling of a scheme in layers of a dtype on a kind of platform."""
    activation = scheme.activation
    return activation.dtype if kind == "cuda" and activation and activation.dtype in EIGHT_BITS else dtype


def _ceiling(document: Row, row: Row) -> str:
    dtype = _layer(document, row).get("problem", {}).get("dtype", "")
    return ceiling_name(get_scheme(row["scheme"]), dtype, document.get("platform", "cuda").partition(":")[0])


def _layer(document: Row, row: Row) -> Row:
    return document["layers"].get(f"{row['layer']}:{row['scheme']}".replace(" ", "-"), {})


def compiled_ahead(document: Row) -> list[str]:
    """Backends whose kernels were compiled before their first call was timed; files of before do not say so."""
    return list(document.get("compiled_ahead", ["triton"]))


def absent(board: str) -> dict[tuple[str, str], list[Standing]]:
    """The rows that lack a backend which could have run in them, by backend and reason in a few words.

    A row that has the backend in a process of its own lacks nothing.
    """
    rows, others = rows_of(board), apart(board)
    elsewhere = {(one.place, entry.backend) for one in others for entry in one.ranking}
    ran: dict[tuple[str, str], set[str]] = {}
    for one in (*rows, *others):
        ran.setdefault((one.layer, one.scheme), set()).update(entry.backend for entry in one.ranking)
    found: dict[tuple[str, str], list[Standing]] = {}
    for one in rows:
        lacking = {name: _in_short(reason) for name, reason in one.skipped.items() if lacks_a_library(reason)}
        there = {entry.backend for entry in one.entries.values()} | set(lacking)
        lacking |= dict.fromkeys(ran[one.layer, one.scheme] - there, "not in that process")
        lacking |= {
            entry.name: "too large beside the others" if entry.failure.startswith("left out") else "failed"
            for entry in one.entries.values()
            if entry.failure
        }
        for name, reason in lacking.items():
            if name not in _OWN and UNTUNED not in name and (one.place, name) not in elsewhere:
                found.setdefault((name, reason), []).append(one)
    return found


def lacks_a_library(reason: str) -> bool:
    """Whether a backend did not run for what the machine lacked, and not for what it computes."""
    wanted = r"not installed|^requires (the|CuTe DSL|QuACK's) |^(re)?install |^run "
    return all(re.search(wanted, part) for part in reason.split("; "))


def _in_short(reason: str) -> str:
    return "its kernels were not built" if reason.startswith("requires the kernels") else "not installed"


def _with_true_shares(document: Row) -> Row:
    """A document without the shares of ceilings that were measured too low."""
    beaten = beaten_ceilings(document)
    rows = [
        {**row, "roofline_us": None, "results": [{**one, "share": None} for one in row["results"]]}
        if _ceiling(document, row) in beaten
        else row
        for row in document["rows"]
    ]
    return {**document, "rows": rows}


def _name(one: Row, results: Iterable[Row]) -> str:
    own = [result for result in results if result["backend"] == one["backend"]]
    identity = ("experts", "computes")
    is_first = not own or all(own[0][key] == one[key] for key in identity)
    return str(one["backend"]) if is_first else class_name(one["backend"], one["experts"])


def class_name(backend: str, experts: str) -> str:
    """A class of a backend that has another one beside it."""
    return f"{backend} ({experts.removesuffix('Experts')})"


def _entries(row: Row, ahead: Collection[str]) -> dict[str, Entry]:
    found = {}
    for one in row["results"]:
        name = _name(one, row["results"])
        failed = one["failure"]
        found[name] = Entry(
            name,
            time_us=None if failed else one["time_us"],
            share=one.get("share"),
            failure=failed,
            first_ms=None if one["backend"] in ahead else one.get("first_ms"),
            permute_ms=one.get("permute_ms"),
            p10_us=one.get("p10_us"),
            p90_us=one.get("p90_us"),
        )
    return found
