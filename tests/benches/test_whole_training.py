"""The bench of a whole model's LoRA step: sides agree on a CPU, what is wrong is named, and the page."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benches.h200 import whole_training

OPTIONS = [
    *("--model", "tiny", "--device", "cpu", "--length", "16", "--rank", "2", "--scheme", "int4_w4a16_g32"),
    *("--steps", "3", "--warmup", "1", "--lr", "1e-3"),
]


def first_step(row: dict[str, Any], shift: float = 0.0) -> dict[str, Any]:
    """What a side gives."""
    found = {"token_losses": torch.tensor([4.0, 5.0 + shift]), "gradients": {"q_proj A": torch.tensor([1.0, 2.0])}}
    return {"row": {"ms": 1.0, "quantizes": False, **row}, "control": torch.tensor([4.0, 6.0]), **found}


@pytest.mark.parametrize(
    ("shift", "quantizes", "rounded", "is_wrong"),
    [
        (0.2, False, False, False),
        (0.3, False, False, True),
        (float("nan"), False, False, True),
        (0.3, True, False, False),
        (0.3, True, True, True),
    ],
)
def test_a_side_with_the_same_weights_has_a_bound(shift: float, quantizes: bool, rounded: bool, is_wrong: bool) -> None:
    options = whole_training._parser().parse_args(["--rounded"] if rounded else [])
    other = first_step({"side": "other", "quantizes": quantizes}, shift)
    wrong = whole_training.compare([first_step({"side": "first"}), other], options)
    assert other["row"]["difference"]["losses"] == pytest.approx(shift, nan_ok=True)
    assert wrong == ([f"other differs by {shift:.2f} from first"] if is_wrong else [])
    gradients = first_step({"side": "other"})
    gradients["gradients"] = {"q_proj A": torch.tensor([2.0, 1.0])}
    assert whole_training.compare([first_step({"side": "first"}), gradients], options) == [
        "other differs by 0.63 from first"
    ]
    lacking = {"row": {"side": "lacking", "outcome": "out of memory"}}
    assert whole_training.compare([lacking, first_step({"side": "first"})], options) == []


@pytest.mark.finetune
class TestSides:
    """All of them on a CPU."""

    @pytest.fixture(autouse=True)
    def _here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("peft", reason="peft is not installed; make test-finetune installs it")
        monkeypatch.setattr(
            whole_training, "_in_process", lambda name, options, folder: whole_training.measure(name, options)
        )

    def test_all_sides_train_the_same_model(self, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = tmp_path / "whole.json"
        assert whole_training.main([*OPTIONS, "--rounded", "--json", str(file)]) == 0
        record = json.loads(file.read_text(encoding="utf-8"))
        rows = {row["side"]: row for row in record["rows"]}
        assert list(rows) == list(whole_training.SIDES)
        assert {row.get("backend") for row in rows.values()} == {None, "torch"}
        of_ours = {tuple(row["losses"]) for row in rows.values() if row["implementation"] == "moereg"}
        assert len(of_ours) == 1
        assert len({row["trained"] for row in rows.values()}) == 1
        packed, whole = (rows[side]["memory"] for side in ("moereg_4bit-checkpoint", "moereg"))
        assert packed["experts"] < whole["experts"] / 3
        assert {**packed, "experts": 0} == {**whole, "experts": 0}
        for row in rows.values():
            assert row["losses"][2] < row["losses"][0]
            assert row["tokens_per_s"] == pytest.approx(4 * 16 / row["ms"] * 1e3)
        # The bound can fail: experts count, and so does each gradient.
        assert 0 < rows["moereg"]["difference"]["losses"] < 0.5 * whole_training.BOUND
        assert all(0 < each < 0.5 * whole_training.BOUND for each in rows["moereg"]["difference"]["gradients"].values())
        assert len(rows["moereg"]["difference"]["gradients"]) == 12
        assert "| PEFT on moereg, 4-bit experts, layers recomputed |" in capsys.readouterr().out
