from __future__ import annotations

import json
import pathlib
import re
from typing import Any

import pytest

from benches import report, results_page
from benches.stored import load, quant_rows

MEASURED = {
    "schema": 1,
    "device": "NVIDIA H200",
    "versions": {"torch": "2.11.0"},
    "commit": "0123456789abcdef",
    "date": "2026-11-21",
    "left_out": [],
}


@pytest.mark.parametrize("path", report.pages(), ids=lambda path: str(path.name))
def test_a_page_says_what_was_measured_and_registered(path: pathlib.Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert report.render(page) == page, "run python -m benches.report"


def test_every_table_is_on_a_page() -> None:
    shown = {
        name
        for path in report.pages()
        for name in re.findall(r"<!-- table (\w+) -->", path.read_text(encoding="utf-8"))
    }
    # A board of a CPU has nothing that is tuned, one process for all and no picture.
    assert set(report.TABLES) - shown == {"cpu_variants", "cpu_apart", "cpu_picture"}


def test_stored_results_say_where_they_are_from() -> None:
    for path in results_page.RESULTS.glob("*.json"):
        document = load(path.name)
        assert document["schema"] == 1, path
        assert document["device"], path
        assert document["versions"], path
        assert document["date"], path
        if document["device"].startswith("NVIDIA") and "peers" not in path.name:
            benches = document.get("benchmarks", [])
            assert document["commit"], path
            has_clocks = all("clocks" in bench["extra_info"] for bench in benches) if benches else "clocks" in document
            assert has_clocks or "clocks" in document["note"], path


def test_a_table_without_its_file_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    for name in results_page.TABLES:
        page = f"before <!-- table {name} -->old<!-- end --> behind"
        expected = f"before <!-- table {name} -->\n\nNot measured yet.\n\n<!-- end --> behind"
        assert report.render(page) == expected
        assert report.render(expected) == expected


def test_rows_of_a_scheme_are_those_of_the_newest_file_that_has_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    def row(tokens: int, ours_us: float) -> dict[str, Any]:
        timed = {"ours_us": ours_us, "roof_us": 5.0, "share": 0.5, "relative_error": 1e-3, "wrong": False}
        return {"scheme": "int4", "model": "big", "tokens": tokens, **timed}

    files = {
        "h200_quant.json": ("2026-11-23", [row(1, 10.0)]),
        "h200_quant_b.json": ("2026-11-22", [row(1, 11.0), row(16, 20.0)]),
        "h200_quant_a.json": ("2026-11-21", [row(16, 21.0), row(64, 30.0)]),
    }
    for name, (date, rows) in files.items():
        stored = {**MEASURED, "date": date, "ceilings": {"read_tbps": 4.0}, "rows": rows}
        # Of all rows of its file, so that only the newest one's is of the rows beneath which it stands.
        stored["summary"] = {"int4": {"share_mean": rows[-1]["ours_us"]}}
        stored["left_out"] = [{"scheme": "int8", "model": "big", "tokens": rows[0]["tokens"]}]
        (tmp_path / name).write_text(json.dumps(stored), encoding="utf-8")
    assert [(row["tokens"], row["ours_us"]) for row in quant_rows(tmp_path)] == [(1, 10.0), (16, 20.0), (64, 30.0)]
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    page = report.render("<!-- table quant --><!-- end -->")
    assert re.findall(r"\| int4 \| big \| (\d+) \| ([\d.]+)", page) == [("1", "10.0"), ("16", "20.0"), ("64", "30.0")]
    assert page.count("Rows from an earlier commit") == 2
    assert re.findall(r"- `int4`: (.*)\.", page) == ["share_mean 10.000"]
    assert re.findall(r"Left out: (.*)\.", page) == ["int8 big T 1", "int8 big T 1", "int8 big T 16"]
