"""Reads stored results, and says what holds for all of them: when two times are the same, and when a ceiling is one."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any, Final

__all__ = [
    "RESULTS",
    "SAME",
    "beats_ceilings",
    "earlier_rows",
    "earlier_rows_of",
    "instruction_set",
    "load",
    "outcome",
    "quant_rows",
    "read",
]

RESULTS: Final = pathlib.Path(__file__).resolve().parent / "results"

SAME: Final = 1.03
"""Two times whose ratio is below this are a tie: that much one kernel's time differs between processes."""


def outcome(ratio: float | None) -> str:
    """A row is `won`, `tied` or `lost`, by the best rival's time over ours; empty without a rival."""
    if ratio is None:
        return ""
    return "lost" if ratio * SAME < 1 else "won" if ratio > SAME else "tied"


def beats_ceilings(shares: Iterable[float | None]) -> bool:
    """Whether a row was clearly faster than its measured ceilings allow. They are none then, and no row has a share."""
    return any((share or 0.0) > SAME for share in shares)


def instruction_set() -> str:
    """Instructions that torch and oneDNN may use on this CPU, such as `AVX512 with bf16, int8` or `AVX2`."""
    import torch

    from moereg.kernels.plain import cpu

    found, limit = cpu.features(), os.environ.get("ONEDNN_MAX_CPU_ISA")
    extra = [name for name in ("bf16", "fp16", "int8", "amx") if getattr(found, name)]
    text = torch.backends.cpu.get_cpu_capability() + (f" with {', '.join(extra)}" if extra else "")
    return text + (f", oneDNN limited to {limit}" if limit else "")


def read(path: pathlib.Path) -> dict[str, Any]:
    """A stored file, with layers by the names that they have now."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").replace('"sonic-30b', '"sonic-120b'))
    return document


def earlier_rows_of(path: pathlib.Path | None, facts: dict[str, Any], same: Iterable[str]) -> list[dict[str, Any]]:
    """The rows that a file has from runs whose facts named in `same` are these.

    Raises:
        ValueError: The file is of other facts.
    """
    if path is None or not path.exists():
        return []
    found = read(path)
    for name in same:
        if found.get(name) != facts[name]:
            raise ValueError(
                f"--json adds to a file of the same {name}, and that of {path} is {found.get(name)!r}, here "
                f"{facts[name]!r}; name another file"
            )
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def load(name: str, folder: pathlib.Path = RESULTS) -> dict[str, Any]:
    """A stored file.

    Raises:
        FileNotFoundError: It is not there.
    """
    return read(folder / name)


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
