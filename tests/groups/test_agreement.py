"""How a difference between ranks is worded."""

from __future__ import annotations

from moereg.prepare_finalize.ranks_agree import differences


def test_ranks_that_say_the_same_differ_in_nothing() -> None:
    assert differences([{"moereg": "1.0", "top_k": 2}] * 4) == []


def test_who_differs_and_in_what() -> None:
    said = [{"moereg": "1.0", "code": "builtin ab"} for _ in range(6)]
    said[2]["moereg"], said[5]["moereg"] = "1.1", "1.2"
    del said[0]["code"]
    assert differences(said) == [
        "moereg 1.0 on ranks 0-1 and 3-4, 1.1 on rank 2, 1.2 on rank 5",
        "code nothing on rank 0, builtin ab on ranks 1-5",
    ]
