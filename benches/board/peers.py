"""The tables of moereg's own kernels beside other people's, from the rows of the board.

Groups of rows first, with what they lost and to whom; then each scheme and routing, each row, and what is missing.
"""

from __future__ import annotations

import collections
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from benches.board import compare, page, rows
from benches.board.compare import MARGIN_US, OWN, SHORT_US, Comparison, Place, geometric_mean
from benches.board.layers import GPU_LAYERS
from benches.markdown import table, wrapped
from moereg.bench.inputs import ROUTINGS

__all__ = ["TABLES", "board_comparisons", "groups_of", "kind_of", "report"]

_UNIFORM: Final = ROUTINGS[0]
_BANDS: Final = ((1, 4), (16, 64), (256, 256), (1024, 1024), (4096, 16384))

# The groups that rows are judged in. Routing tells them apart too, since a mean over both would hide either.
_KINDS: Final = ("16-bit weights", "4-bit weights and int8", "8-bit floats")


def kind_of(scheme: str) -> str:
    """The group of a scheme."""
    if scheme.startswith(("fp8", "mxfp8")):
        return _KINDS[2]
    return _KINDS[1] if scheme.startswith(("int4", "int8", "mxfp4", "nvfp4")) else _KINDS[0]


def board_comparisons() -> list[Comparison]:
    """Comparisons of the H200's board: the judged rows of all its files, each from the latest commit that has it.

    Raises:
        FileNotFoundError: There is none.
    """
    of_commit: dict[str | None, list[Comparison]] = {}
    for name, document in rows.documents("h200").items():
        of_commit.setdefault(document.get("commit"), []).extend(compare.of_board(document, name))
    found: list[Comparison] = []
    for own in of_commit.values():
        places = {one.place for one in found}
        found += compare.judged(one for one in own if one.place not in places)
    return compare.judged(found)


def groups_of(found: Iterable[Comparison]) -> dict[str, list[Comparison]]:
    """Rows by the group that they are judged in."""
    groups: dict[str, list[Comparison]] = {
        f"{kind}, {routing}": [] for kind in _KINDS for routing in (_UNIFORM, " and ".join(ROUTINGS[1:]))
    }
    for one in found:
        groups[_group_of(one.place)].append(one)
    return groups


def _group_of(place: Place) -> str:
    routing = _UNIFORM if place.routing == _UNIFORM else " and ".join(ROUTINGS[1:])
    return f"{kind_of(place.scheme)}, {routing}"


def groups_table(found: Sequence[Comparison], missing: Sequence[Place] = ()) -> str:
    """For each group: rows, mean and worst ratio, rows lost and to whom, mean share, rows that are missing.

    Args:
        found: Judged rows.
        missing: Planned rows that no file has.
    """
    gone = collections.Counter(map(_group_of, missing))
    groups = [(name, own) for name, own in groups_of(found).items() if own or gone[name]]
    header = ["group", "n", "ratio, mean", "worst", "rows", "lost to", "share, mean", "missing"]
    lines = [[name, *_judgment(own), str(gone[name])] for name, own in groups]
    lines.append(["all", *_judgment(found), str(len(missing))])
    return table(header, lines)


def _judgment(found: Sequence[Comparison]) -> list[str]:
    """n, mean, worst with its row, rows won, tied and lost, the winners, mean share."""
    with_ratio = [one for one in found if one.ratio is not None]
    ratios = [one.ratio or math.nan for one in with_ratio]
    worst = min(with_ratio, key=lambda one: one.ratio or math.inf, default=None)
    shares = [one.share for one in found if one.share is not None]
    return [
        str(len(with_ratio)) + _aside(found),
        f"{geometric_mean(ratios):.2f}" if ratios else "-",
        f"{worst.ratio:.2f} ({_short(worst.place)})" if worst is not None else "-",
        page.counted([one.outcome for one in found]),
        _winners(found),
        f"{geometric_mean(shares):.0%} ({len(shares)})" if shares else "-",
    ]


def _aside(found: Sequence[Comparison]) -> str:
    """Rows that have no ratio, in words."""
    failed = sum(one.best is not None and not one.own.time_us for one in found)
    alone = sum(one.best is None for one in found)
    words = [f"{alone} without a peer"] if alone else []
    words += [f"{failed} in which {OWN} failed"] if failed else []
    return f" ({', '.join(words)})" if words else ""


def _winners(found: Iterable[Comparison]) -> str:
    winners = collections.Counter(one.best.name for one in found if one.outcome == "lost" and one.best is not None)
    return ", ".join(f"{name} {count}" for name, count in winners.most_common()) or "-"


def _short(place: Place) -> str:
    routing = "" if place.routing == _UNIFORM else f" {place.routing}"
    return f"{place.layer} {place.scheme}{routing} T {place.tokens}"


def losses_table(found: Iterable[Comparison]) -> str:
    """Rows in which a peer is faster, worst first."""
    lost = sorted((one for one in found if one.outcome == "lost"), key=lambda one: one.ratio or 0.0)
    header = ["layer", "scheme", "routing", "T", f"{OWN} us", "winner", "its us", "ratio"]
    return table(header, [[*_place(one.place), *_times(one)] for one in lost]) if lost else "No row is lost."


def _place(place: Place) -> list[str]:
    return [place.layer, place.scheme, place.routing, str(place.tokens)]


def _times(one: Comparison) -> list[str]:
    """Own time, best peer, its time, ratio."""
    own = rows.number(one.own.time_us) if one.own.time_us else "failed"
    if one.best is None or one.best.time_us is None:
        return [own, "none ran", "-", "-"]
    return [own, one.best.name, rows.number(one.best.time_us), "-" if one.ratio is None else f"{one.ratio:.2f}"]


def schemes_table(found: Iterable[Comparison]) -> str:
    """For each scheme and routing what `groups_table` has for its groups."""
    groups: dict[tuple[str, str], list[Comparison]] = {}
    for one in found:
        groups.setdefault((one.place.scheme, one.place.routing), []).append(one)
    header = ["scheme", "routing", "n", "ratio, mean", "worst", "rows", "lost to", "share, mean"]
    return table(header, [[*key, *_judgment(own)] for key, own in groups.items()])


def shares_table(found: Sequence[Comparison]) -> str:
    """For each scheme and routing the mean share of the roofline by numbers of tokens, with the number of rows."""
    keys = dict.fromkeys((one.place.scheme, one.place.routing) for one in found if one.share is not None)
    if not keys:
        return "These files have no rooflines."
    lines = []
    for key in keys:
        own = [one for one in found if (one.place.scheme, one.place.routing) == key]
        cells = []
        for low, high in _BANDS:
            shares = [one.share for one in own if low <= one.place.tokens <= high and one.share is not None]
            cells.append(f"{geometric_mean(shares):.0%} ({len(shares)})" if shares else "-")
        lines.append([*key, *cells])
    names = [f"T {low}" if low == high else f"T {low}-{high}" for low, high in _BANDS]
    return f"{table(['scheme', 'routing', *names], lines)}\n\n{_rule(found)}"


def _rule(found: Iterable[Comparison]) -> str:
    """Says which rows have no share, and which have the margin."""
    short = sum(one.is_short for one in found)
    without = sum(one.roofline_us is None for one in found)
    text = f"{MARGIN_US:.0f} us are added to a roofline below {SHORT_US:.0f} us ({short} rows), since a launch takes "
    text += (
        f"longer than the work there; ratios are of times as measured. {without} rows have no share: a row beat their "
    )
    text += "ceiling, so the ceiling was measured too low."
    return wrapped(text)


def rows_table(found: Sequence[Comparison]) -> str:
    """Every row, a table for each scheme and routing."""
    parts = []
    for scheme, routing in dict.fromkeys((one.place.scheme, one.place.routing) for one in found):
        own = [one for one in found if (one.place.scheme, one.place.routing) == (scheme, routing)]
        lines = [[one.place.layer, str(one.place.tokens), *_times(one), *_roofline(one), *_clocks(one)] for one in own]
        header = ["layer", "T", f"{OWN} us", "best peer", "its us", "ratio", "roofline us", "share", "MHz", "W"]
        parts.append(f"#### {scheme}, {routing}\n\n{table(header, lines)}")
    return "\n\n".join(parts)


def _roofline(one: Comparison) -> list[str]:
    if one.roofline_us is None:
        return ["-", "-"]
    margin = f" + {MARGIN_US:.0f}" if one.is_short else ""
    return [f"{rows.number(one.roofline_us)}{margin}", "-" if one.share is None else f"{one.share:.0%}"]


def _clocks(one: Comparison) -> list[str]:
    """Clock of the multiprocessors and power, the mean of a second, right after the row."""
    return [f"{value:,}" if (value := one.clocks.get(name)) else "-" for name in ("sm_mhz", "power_w")]


def missing_table(missing: Sequence[Place]) -> str:
    """The planned rows that no file has, by layer."""
    total = len(compare.planned(GPU_LAYERS))
    if not missing:
        return f"None of the {total} planned rows."
    by_layer: dict[tuple[str, str], dict[str, list[int]]] = {}
    for place in missing:
        by_layer.setdefault((place.layer, place.scheme), {}).setdefault(place.routing, []).append(place.tokens)
    lines = [
        [*key, "; ".join(f"{routing} {', '.join(map(str, tokens))}" for routing, tokens in lines_of.items())]
        for key, lines_of in by_layer.items()
    ]
    return f"{len(missing)} of the {total} planned rows.\n\n{table(['layer', 'scheme', 'rows'], lines)}"


# Layers with a file for the H200 and 16-bit experts in vLLM's fused_moe/configs; it takes heuristics for all others.
_VLLM_CONFIGURED: Final = ("qwen3-30b-a3b", "mixtral-8x7b", "mixtral-8x7b TP4")


def vllm_text(found: Iterable[Comparison]) -> str:
    """Layers that `vllm_triton` runs without a configuration for this GPU."""
    rows_of = [one for one in found if kind_of(one.place.scheme) == _KINDS[0]]
    bare = [one for one in rows_of if one.place.layer not in _VLLM_CONFIGURED]
    layers = ", ".join(dict.fromkeys(one.place.layer for one in bare))
    text = f"vLLM ships no H200 configuration for {len(bare)} of the {len(rows_of)} 16-bit rows ({layers}); "
    return wrapped(f"{text}`vllm_triton` runs these with its default heuristics.") if bare else ""


def headline() -> str:
    """Rows won, tied and lost, by group, with what each figure lacks: the first page's table."""
    board, missing = board_comparisons(), compare.missing(GPU_LAYERS, board_comparisons())
    groups = {name: own for name, own in groups_of(board).items() if own}
    lines = []
    for name, own in {**groups, f"all {len(board)} rows of the board": board}.items():
        _, mean, worst, *_ = _judgment(own)
        lines.append([name, mean, worst.partition(" ")[0], page.counted([one.outcome for one in own])])
    others = sorted({peer.name.partition(" (")[0] for one in board for peer in one.peers})
    text = f"Each row was measured in one process on an {_first_of_board()['device']}, each kernel only after its "
    text += "output was checked; less than 3 % is a tie, and means are geometric. The board's others are "
    text += f"{', '.join(f'`{name}`' for name in others)}; {len(missing) or 'none'} of its {len(board) + len(missing)} "
    text += "planned rows are missing."
    of_itself = sum(one.outcome == "lost" for one in page.rows_of("h200")) - sum(one.outcome == "lost" for one in board)
    if of_itself:
        text += f" It counts {of_itself} more lost, to other experts classes of `{OWN}` itself."
    heads = ["rows", f"fastest other's time / `{OWN}`'s, mean", "worst", "outcome"]
    return "\n\n".join(filter(None, (table(heads, lines), wrapped(text), page.absent_text("h200"))))


def report(paths: Sequence[pathlib.Path] = ()) -> str:
    """Everything about the rows of these boards, or of the stored one, as text for a terminal.

    Raises:
        ValueError: A file is no board.
        FileNotFoundError: There is no such file.
    """
    found = compare.judged(one for path in paths for one in compare.of_file(path)) if paths else board_comparisons()
    missing = compare.missing(GPU_LAYERS, found)
    parts = [] if paths else [f"## The board\n\n{_sources()}"]
    parts += ["Groups", groups_table(found, missing), "Lost", losses_table(found)]
    parts += ["By scheme and routing", schemes_table(found), "Shares of the roofline", shares_table(found)]
    parts += ["Missing", missing_table(missing)]
    return "\n\n".join(parts)


def _sources() -> str:
    """The files of the board, with the machine and the commit of each."""
    files = rows.documents("h200").items()
    commit = _first_of_board().get("commit")
    return "\n".join(
        f"- `{name}`: {document['device']}, commit {str(document.get('commit') or 'unknown')[:12]}, {document['date']}"
        + ("" if document.get("commit") == commit else "; used where no file above has the row")
        for name, document in files
    )


def _first_of_board() -> dict[str, Any]:
    return next(iter(rows.documents("h200").values()))


def _of_board(write: Callable[[list[Comparison], list[Place]], str]) -> Callable[[], str]:
    def fill() -> str:
        found = board_comparisons()
        return write(found, compare.missing(GPU_LAYERS, found))

    return fill


def _groups_with_notes(found: list[Comparison], missing: list[Place]) -> str:
    notes = (_rule(found), vllm_text(found), _sources())
    return "\n\n".join(filter(None, (groups_table(found, missing), *notes)))


TABLES: Final[dict[str, Callable[[], str]]] = {
    "peers_groups": _of_board(_groups_with_notes),
    "peers_losses": _of_board(lambda found, _: losses_table(found)),
    "peers_schemes": _of_board(lambda found, _: schemes_table(found)),
    "peers_shares": _of_board(lambda found, _: shares_table(found).partition("\n\n")[0]),
    "peers_rows": _of_board(lambda found, _: rows_table(found)),
    "peers_missing": _of_board(lambda found, missing: missing_table(missing)),
    "headline": headline,
}
