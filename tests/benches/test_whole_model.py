"""The bench of whole models: it runs on a CPU, catches wrong experts, and its page says what the file says."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benches.whole_model import __main__ as whole_model
from benches.whole_model.measure import PublishedModel
from benches.whole_model.models import MODELS, Case, cases_of
from moereg.integrations._experts import serving

CPU = torch.device("cpu")


def run(folder: pathlib.Path, *options: str, model: str = "tiny") -> tuple[int, dict[str, Any]]:
    file = folder / "whole_model_tiny.json"
    arguments = ["--model", model, "--device", "cpu", "--case-seconds", "0.01", "--json", str(file), *options]
    code = whole_model.main(arguments)
    return code, json.loads(file.read_text(encoding="utf-8"))


def test_a_tiny_model_is_measured_once_its_logits_are_right(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, record = run(tmp_path)
    assert code == 0
    assert {name for name, check in record["checks"].items() if check["passed"]} >= {"eager", "moereg"}
    cases = cases_of(MODELS["tiny"], CPU, compiles=False)
    rows = {(row["phase"], row["batch"], row["implementation"]): row for row in record["rows"]}
    for case in cases:
        row = rows[case.phase, case.batch, "moereg"]
        tokens = case.batch * (case.tokens if case.phase == "prefill" else 1)
        assert row["tokens_per_s"] == pytest.approx(tokens / row["ms"] * 1e3)
    assert [row["batch"] for row in record["host"] if "functions" in row] == [1, 2]
    assert record["prepare_free"]["bytes_after"] <= record["prepare"]["bytes_after"]
    assert record["control"]["norm"] > 2 * record["bound"]
    shown = capsys.readouterr().out
    assert shown.rstrip().splitlines()[-1].startswith("| tiny | prefill 2 x 16 |")
    # What the file has is not measured again.
    code, again = run(tmp_path, "--resume")
    assert (code, again["rows"], again["host"]) == (0, record["rows"], record["host"])
    # Nothing starts when the time is up.
    code, late = run(tmp_path, "--seconds", "0")
    assert (code, late["rows"]) == (0, [])
    assert {"phase": "decode", "batch": 2, "why": "out of time"}.items() <= late["left_out"][-1].items()


def test_what_is_wrong_or_fails_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def swapped(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return ALL_EXPERTS_FUNCTIONS["moereg"](module, hidden, (ids + 1) % module.num_experts, weights)

    def slightly(module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ALL_EXPERTS_FUNCTIONS["moereg"](module, hidden, ids, weights)
        return 1.1 * out if module is whole.experts[0] else out

    def fickle(module: Any, *inputs: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        out: torch.Tensor = ALL_EXPERTS_FUNCTIONS["moereg"](module, *inputs)
        return out if len(calls) <= len(whole.experts) else -out

    def lacking(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    calls: list[int] = []
    record: dict[str, Any] = {"rows": [], "left_out": []}
    functions = {"swapped": swapped, "slightly": slightly, "fickle": fickle, "lacking": lacking}
    with torch.no_grad():
        whole = PublishedModel(MODELS["tiny"], CPU, record, deadline=float("inf"))
        whole.prepare()
        for name, function in functions.items():
            monkeypatch.setitem(type(ALL_EXPERTS_FUNCTIONS)._global_mapping, name, function)
        whole.names = ["eager", "swapped", "slightly", "lacking"]
        whole.check()
        assert whole.names == ["eager", "lacking"]
        # One layer's error may vanish in logits.
        check = record["checks"]["slightly"]
        assert check["norm"] <= record["bound"]
        assert check["layers"] == pytest.approx(0.1, rel=0.1)
        whole.names = ["eager", "swapped", "fickle", "lacking"]
        whole.measure(Case("prefill", "eager", 1, 16), seconds=0.01)
    outcomes = {row["implementation"]: row.get("outcome") for row in record["rows"]}
    assert outcomes.pop("swapped").startswith("wrong experts at T=16: ")
    assert outcomes.pop("fickle").startswith("wrong logits in a second call: ")
    assert outcomes == {"eager": None, "lacking": "out of memory"}
    assert [row["implementation"] for row in record["rows"] if "ms" in row] == ["eager"]
    # What lacked memory beside moereg's kernels is measured without them; they are there again afterwards.
    monkeypatch.setitem(type(ALL_EXPERTS_FUNCTIONS)._global_mapping, "lacking", ALL_EXPERTS_FUNCTIONS["batched_mm"])
    with torch.no_grad():
        whole_model._retry(whole, ["eager", "lacking"], seconds=0.01)
    assert [row["implementation"] for row in record["rows"] if "ms" in row] == ["eager", "lacking"]
    assert all(serving.served(module) for module in whole.experts)
