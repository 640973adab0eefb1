"""The command that runs tests at the ends of the ranges: its rows, and what it makes of them. Nothing is installed."""

from __future__ import annotations

from pathlib import Path

from tests.ranges import Found, Row, read_report, rows_of, table

ROOT = Path(__file__).parents[2]


def test_rows_are_those_of_the_metadata() -> None:
    rows = rows_of((ROOT / "pyproject.toml").read_text())
    assert rows[0] == Row("3.10", "lowest", ("torch==2.11.*", "triton==3.6.*"))
    assert [row.python for row in rows[1:]] == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert all(row.requirements == ("torch>=2.11", "triton>=3.6") for row in rows[1:])


def test_a_report_is_counted() -> None:
    report = """<testsuites><testsuite>
    <testcase classname="tests.a.test_b" name="test_c[1]"><failure/></testcase>
    <testcase classname="tests.a.test_b" name="test_d"><skipped/></testcase>
    <testcase classname="tests.a.test_b" name="test_e"/><testcase classname="tests.a.test_b" name="test_f"/>
    </testsuite></testsuites>"""
    row = Row("3.10", "lowest", ())
    found = read_report(row, report, {"python": "3.10.13", "torch": "2.11.0"})
    assert found == Found(row, "", found.versions, 2, 1, ("tests/a/test_b.py::test_c[1]",))
    shown = table([found], ["tests/a"])
    assert "| 3.10.13 | 2.11.0 |  |  |  |  | 2 | 1 | 1 |" in shown
    assert "- failed with Python 3.10-lowest: `tests/a/test_b.py::test_c[1]`" in shown
