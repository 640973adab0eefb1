from __future__ import annotations

from benches import report


def test_the_results_page_says_what_was_measured() -> None:
    page = report.PAGE.read_text(encoding="utf-8")
    assert report.render(page) == page, "run python -m benches.report"
    assert all(f"<!-- table {name} -->" in page for name in report.TABLES)


def test_stored_results_say_where_they_are_from() -> None:
    for path in report.RESULTS.glob("*.json"):
        document = report._load(path.name)
        assert document["schema"] == 1, path
        assert document["device"], path
        assert document["versions"], path
        assert document["date"], path
