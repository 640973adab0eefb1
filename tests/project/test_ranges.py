"""The command that runs tests at the ends of the ranges: its rows, and what it makes of them. Nothing is installed."""

from __future__ import annotations

from pathlib import Path

from tests.ranges import Row, rows_of

ROOT = Path(__file__).parents[2]


def test_rows_are_those_of_the_metadata() -> None:
    rows = rows_of((ROOT / "pyproject.toml").read_text())
    assert rows[0] == Row("3.10", "lowest", ("torch==2.11.*", "triton==3.6.*"))
    assert [row.python for row in rows[1:]] == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert all(row.requirements == ("torch>=2.11", "triton>=3.6") for row in rows[1:])
