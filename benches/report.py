"""Writes the tables of docs/results.md from the stored results, so that no number there is typed.

python -m benches.report            # rewrites docs/results.md
python -m benches.report --check    # exits with 1 where it is out of date
"""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benches" / "results"
PAGE = ROOT / "docs" / "results.md"


def _load(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return document


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _where(document: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return f"Measured on {document['device']} with {versions} at commit {document['commit'][:12]}, {document['date']}."


def cpu_table() -> str:
    """The torch backend against transformers' experts."""
    document = _load("cpu_epyc_2threads.json")
    rows = []
    for row in document["rows"]:
        times = row["times_us"]
        peers = {name: time for name, time in times.items() if name != "moereg"}
        best = min(peers, key=lambda name: peers[name])
        share = max(row["flop_share"], row["bandwidth_share"])
        rows.append(
            [
                f"{row['shape']} {row['dtype']}",
                str(row["num_tokens"]),
                f"{times['moereg'] / 1e3:.2f}",
                f"{peers[best] / 1e3:.2f} ({best})",
                f"{peers[best] / times['moereg']:.2f}",
                f"{share:.0%}",
            ]
        )
    summary = f"Geometric mean {document['geometric_mean']:.2f}x over {len(rows)} rows."
    header = ["layer", "T", "ours ms", "best peer ms", "ratio", "share of the ceiling"]
    return f"{_table(header, rows)}\n\n{summary} {_where(document)}"


def full_size_table() -> str:
    """Errors of every backend at full size on a GPU."""
    document = _load("h200_full_size.json")
    rows = [
        [
            row["model"],
            row["dtype"],
            row["backend"],
            str(row["tokens"]),
            f"{row['relative_error']:.1e}",
            f"{row['bound']:.0e}",
            "equal" if row["replay_equals_eager"] else "DIFFERS",
        ]
        for row in document["rows"]
    ]
    return f"{_table(['layer', 'dtype', 'backend', 'T', 'error', 'bound', 'replay'], rows)}\n\n{_where(document)}"


def h200_table() -> str:
    """The triton backend beside the best peers on an H200."""
    document = _load("h200_table_bf16.json")
    rows = [
        [
            row["model"],
            str(row["tokens"]),
            f"{row['ours_us']:.1f}",
            f"{row['best_peer_us']:.1f}",
            f"{row['best_peer_over_ours']:.3f}",
            f"{row['roof_us']:.1f}",
        ]
        for row in document["rows"]
    ]
    mean = document["summary"]["geomean_best_peer_over_ours"]
    ceilings = document["ceilings"]
    summary = (
        f"Geometric mean {mean:.3f}. Ceilings in the same process: {ceilings['matmul_tflops']:.0f} TFLOP/s, "
        f"{ceilings['read_tbps']:.2f} TB/s. {_where(document)} {document['note'].capitalize()}."
    )
    header = ["layer", "T", "ours us", "best peer us", "ratio", "roofline us"]
    return f"{_table(header, rows)}\n\n{summary}"


TABLES: dict[str, Callable[[], str]] = {"cpu": cpu_table, "full_size": full_size_table, "h200": h200_table}


def render(page: str) -> str:
    """The page with each `<!-- table NAME -->` ... `<!-- end -->` filled from the stored results."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n\n{TABLES[match[1]]()}\n\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->.*?<!-- end -->", fill, page, flags=re.DOTALL)


def main() -> int:
    """Rewrites or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    rendered = render(page)
    if arguments.check:
        return int(rendered != page)
    PAGE.write_text(rendered, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
