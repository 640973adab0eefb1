"""The bench of FSDP2: two ranks on a CPU train like one, and a limit leaves what there is."""

from __future__ import annotations

import json
import pathlib

import pytest

pytest.importorskip("transformers")

from benches.h200 import fsdp2

OPTIONS = (
    *("--model", "tiny", "--device", "cpu", "--length", "16", "--rank", "2", "--lr", "1e-3"),
    *("--steps", "3", "--warmup", "1"),
)


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fsdp2.json"
    assert fsdp2.main([*OPTIONS, "--json", str(file)]) == 0
    record = json.loads(file.read_text(encoding="utf-8"))
    rows = {(row["kind"], row["experts"], row["place"]): row for row in record["rows"]}
    assert len(rows) == len(record["rows"]) == 8
    assert record["outcome"] == "done"
    for kind in fsdp2.KINDS:
        for place in fsdp2.PLACES:
            ours, theirs = (rows[kind, experts, place] for experts in fsdp2.IMPLEMENTATIONS)
            assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-3)
            assert ours["losses"] != theirs["losses"]
            assert ours["losses"][2] < ours["losses"][0]
            assert ours["tokens_per_second"] == pytest.approx(2 * 2 * 16 / ours["seconds"])
        assert rows[kind, "moereg", "together"]["difference"] < 1e-4
    assert rows["all", "moereg", "together"]["backend"] == "torch"
    assert rows["all", "moereg", "alone"]["losses"] != rows["lora", "moereg", "alone"]["losses"]
    printed = capsys.readouterr().out.splitlines()[-8:]
    assert [line.split(" | ")[2] for line in printed] == ["2", "1"] * 4


def test_a_limit_ends_the_ranks(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "fsdp2.json"
    assert fsdp2.main([*OPTIONS, "--limit", "0", "--json", str(file)]) == 1
    assert capsys.readouterr().err.endswith("ended after 0 s\n")
    assert json.loads(file.read_text(encoding="utf-8"))["outcome"] == "ended after 0 s"
