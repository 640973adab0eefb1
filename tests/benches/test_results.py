from __future__ import annotations

import pathlib
import re

import pytest

from benches import report, results_page
from benches.stored import load


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
