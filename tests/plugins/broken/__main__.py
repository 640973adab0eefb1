"""`python -m tests.plugins.broken`: what each command says of each broken wheel, as a table in Markdown."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.plugins.broken.family import Answer, ask_commands, ask_kit, install
from tests.plugins.broken.wheels import SIDE_BY_SIDE, Broken


def _cut(text: str, most: int = 110) -> str:
    text = text.partition("; do without it")[0].partition("; repair or uninstall")[0].strip().replace("|", "\\|")
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _cells(broken: Broken, commands: dict[str, Answer], kit: dict[str, Answer]) -> Iterator[str]:
    plugins = {plugin["distribution"]: plugin for plugin in commands["info"].json["plugins"]}
    plugin = plugins[f"{broken.distribution} 1.0"]
    yield _cut(f"{plugin['status']}: {plugin['error']}" if plugin["error"] else plugin["status"])
    decisions = commands["explain"].json["decisions"]
    mine = [decision for decision in decisions if decision["origin"] == broken.distribution]
    yield _cut(mine[0]["reasons"][0]["text"] if mine and mine[0]["reasons"] else "fits" if mine else "not listed")
    yield _run(commands[broken.name], plugin["error"]) if broken.name in commands else "-"
    rows = [row for row in commands["bench"].json["rows"] if row["backend"] == broken.name]
    yield _row(rows[0]) if rows else "denied" if mine and not mine[0]["reasons"] else "not compared"
    if broken.name not in kit:
        yield "-"
        return
    answer = kit[broken.name]
    texts = answer.failures or answer.err.splitlines()[-1:] if answer.code in (1, 2) else []
    yield f"exit {answer.code}: {_cut(texts[0])}" if texts else f"exit {answer.code}"


def _run(answer: Answer, error: str | None) -> str:
    found = answer.json
    if not found:
        return (
            f"exit {answer.code}: {'the wheel and that error' if error and error in answer.err else _cut(answer.err)}"
        )
    return f"exit {answer.code}" if found["passed"] is None else f"exit {answer.code}: {_row(found)}"


def _row(row: dict[str, Any]) -> str:
    if row["passed"]:
        return "right"
    error = row["relative_error"]
    return _cut(row["damage"] or row["failure"] or f"wrong, error {'NaN' if error is None else f'{error:.2g}'}")


def main() -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        site = install(Path(folder))
        commands, kit = ask_commands(site), ask_kit(site)
    print("| kind | info | explain | run --require | bench | verify |")
    print("|---|---|---|---|---|---|")
    for broken in SIDE_BY_SIDE:
        print(f"| {broken.name} | {' | '.join(_cells(broken, commands, kit))} |")


if __name__ == "__main__":
    main()
