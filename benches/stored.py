"""Results whose file was measured again in part: rows of earlier commits count where the newest file has none."""

from __future__ import annotations

import json
import pathlib
from typing import Any, Final

__all__ = ["RESULTS", "earlier_rows", "load", "quant_rows"]

RESULTS: Final = pathlib.Path(__file__).resolve().parent / "results"


def load(name: str, folder: pathlib.Path = RESULTS) -> dict[str, Any]:
    """A stored file.

    Raises:
        FileNotFoundError: It is not there.
    """
    document: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
    return document


def quant_rows(folder: pathlib.Path = RESULTS) -> list[dict[str, Any]]:
    """Every row of `triton` in a quantized scheme on an H200, of the newest file that has it."""
    return [
        *load("h200_quant.json", folder)["rows"],
        *(row for document in earlier_rows(folder) for row in document["rows"]),
    ]


def earlier_rows(folder: pathlib.Path = RESULTS) -> list[dict[str, Any]]:
    """The documents `h200_quant_COMMIT.json`, the newest first, with the rows that no newer one has.

    Their summaries are those of schemes with all rows, since others would be of rows that are not there.
    """
    known = {_key(row) for row in load("h200_quant.json", folder)["rows"]}
    documents = [load(path.name, folder) for path in folder.glob("h200_quant_*.json")]
    found = []
    for document in sorted(documents, key=lambda document: str(document["date"]), reverse=True):
        rows = [row for row in document["rows"] if _key(row) not in known]
        replaced = {row["scheme"] for row in document["rows"] if _key(row) in known}
        known |= {_key(row) for row in rows}
        summary = {scheme: line for scheme, line in document["summary"].items() if scheme not in replaced}
        found.append({**document, "rows": rows, "summary": summary})
    return found


def _key(row: dict[str, Any]) -> tuple[str, str, int]:
    return row["scheme"], row["model"], row["tokens"]
