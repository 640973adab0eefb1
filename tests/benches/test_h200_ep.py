"""The bench of layers over several GPUs: what it measures first, and what it says of rows that are lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benches.h200 import ep
from benches.scale.page import LAYERS as PREDICTED


def test_every_prediction_is_measured_and_what_matters_most_first() -> None:
    found = ep.items(())
    assert len(set(found)) == len(found)
    assert [item.tokens for item in found[:8]] == [8192] * 4 + [64] * 4
    assert {(item.layer, item.tokens, item.routing) for item in found} == {
        (layer, tokens, routing)
        for layer in ep.LAYERS
        for tokens in (1, 64, 1024, 8192)
        for routing in ("uniform", "zipf")
    }
    predicted = {(layer.model, layer.quant) for layer in PREDICTED}
    assert predicted < {(model, ep.problem_of(name).quant.name) for name, (model, _) in ep.LAYERS.items()}
    assert {item.part for item in ep.items(("zipf",))} == {"zipf"}
    with pytest.raises(ValueError, match=r"all_gather.*, got half, qwen$"):
        ep.items(("qwen", "zipf", "half"))


def test_an_item_that_ends_its_process_is_told_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ranks that are stand-ins: the second item ends its process, the third writes its row in a new one."""
    script = (
        "import json, sys, time; from pathlib import Path; folder = Path(sys.argv[1])\n"
        "def write(name, value):\n"
        "    with (folder / name).open('a') as file: file.write(json.dumps(value) + '\\n')\n"
        "for place, item in enumerate(json.loads((folder / 'left').read_text())):\n"
        "    write('progress', {'begin': place, 'time': time.time()})\n"
        "    if item[2] == 1024: sys.exit(3)\n"
        "    write('rows', {'layer': item[1], 'tokens': item[2]})\n"
        "    write('progress', {'end': place, 'time': time.time()})\n"
    )
    popen = subprocess.Popen

    def stand_in(command: list[str], **keywords: Any) -> Any:
        return popen([sys.executable, "-c", script, command[6]], **keywords)

    monkeypatch.setattr(ep.subprocess, "Popen", stand_in)
    left = [ep.Item("more", "qwen3", tokens, "uniform", ("all_gather",)) for tokens in (64, 1024, 1)]
    rows, lost = ep.measure(left, 1, time.time() + 100, tmp_path / "log")
    assert [row["tokens"] for row in rows] == [64, 1]
    (text,) = lost
    assert "tokens=1024" in text
    assert text.endswith("a rank ended")
    # Without time nothing begins.
    assert ep.measure(left, 1, time.time(), tmp_path / "log")[1] == [f"{item}: no time left" for item in left]


def test_the_document_is_read_by_the_page_of_predictions() -> None:
    row = {"layer": "qwen3", "way": "all_gather", "tokens": 64, "routing": "uniform", "wire": "bfloat16"}
    document = json.loads(json.dumps(ep.document_of([{**row, "time_us": 1.0}], ["lost"], 2)))
    (bench,) = (bench for bench in document["benches"] if bench["rows"])
    assert (bench["model"], bench["problem"]["quant"], bench["ranks"], bench["balanced"]) == (
        "qwen3-30b-a3b",
        "unquantized",
        2,
        False,
    )
    assert {"schema", "device", "versions", "commit", "date", "link", "lost"} <= set(document)
