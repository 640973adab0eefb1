"""The bench beside SonicMoE: its call of that library, what it compares, and how two processes take turns."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from benches.h200 import sonic_moe

SHAPE = "256,64,32,8,2"


class Library:
    """A stand-in for what the bench calls of SonicMoE, in torch: its arguments, its layouts, gate and up in turn."""

    gate = 0

    def metadata(self, ids: torch.Tensor, num_experts: int, *out: torch.Tensor) -> None:
        order = ids.flatten().argsort(stable=True)
        counts = ids.flatten().bincount(minlength=num_experts)
        found = counts, torch.nn.functional.pad(counts.cumsum(0), (1, 0)), order // ids.shape[1], order, order.argsort()
        for target, values in zip(out, found, strict=True):
            target.copy_(values)

    def up(self, x: torch.Tensor, w1: torch.Tensor, b1: None, offsets: torch.Tensor, *rest: Any) -> tuple[Any, Any]:
        _, _, source, _, _, by_token, is_varlen, act, is_inference, is_concatenated = rest
        assert (by_token, is_varlen, act, is_inference, is_concatenated) == (None, False, "swiglu", False, False)
        pre = self.grouped(x[source], w1, offsets)
        halves = pre[:, ::2], pre[:, 1::2]
        return torch.nn.functional.silu(halves[self.gate]) * halves[1 - self.gate], pre

    def down(self, act: torch.Tensor, pre: Any, w2: torch.Tensor, b2: None, *rest: Any) -> torch.Tensor:
        weights, offsets, num_tokens, top_k, _, _, reverse, *_ = rest
        rows = self.grouped(act, w2, offsets)[reverse].view(num_tokens, top_k, -1)
        return (rows * weights[:, :, None].to(rows.dtype)).sum(1)

    def grouped(self, rows: torch.Tensor, matrices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        parts = rows.split(offsets.diff().tolist())
        return torch.cat([part @ matrix.T for part, matrix in zip(parts, matrices.unbind(2), strict=True)])


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    enums, functional = types.ModuleType("sonicmoe.enums"), types.ModuleType("sonicmoe.functional")
    vars(enums)["ActivationType"] = types.SimpleNamespace(SWIGLU="swiglu")
    vars(functional).update(
        TC_topk_router_metadata_triton=library.metadata,
        _UpProjection=types.SimpleNamespace(apply=library.up),
        _DownProjection=types.SimpleNamespace(apply=library.down),
    )
    for module in (types.ModuleType("sonicmoe"), enums, functional):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return library


@pytest.mark.parametrize("side", sonic_moe.SIDES)
def test_a_side_compares_the_output_and_every_gradient_before_it_is_timed(side: str, library: Library) -> None:
    checked, turn = sonic_moe.answers(side, [f"{SHAPE}\n", "go\n"])
    assert checked["errors"].keys() == {"out", "hidden_states", "topk_weights", "w13", "w2"}
    assert "failed" not in checked
    assert checked["versions"]["torch"] == torch.__version__
    assert turn["ms"] > 0


def test_a_library_that_is_wrong_or_raises_is_told(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.gate = 1
    (swapped,) = sonic_moe.answers("sonic", [SHAPE])
    assert swapped["failed"].startswith("wrong: ")
    assert set(swapped["failed"][len("wrong: ") :].split(", ")) == swapped["errors"].keys()
    library.gate = 0
    # NaN is not a small error.
    monkeypatch.setattr(torch.nn.functional, "silu", lambda gate: gate * torch.nan)
    (missing,) = sonic_moe.answers("sonic", [SHAPE])
    assert missing["failed"].startswith("wrong: ")
    functional = sys.modules["sonicmoe.functional"]
    monkeypatch.delattr(functional, "_DownProjection")
    unlike, lost = sonic_moe.answers("sonic", [SHAPE, "go"])
    assert unlike["failed"].startswith("ImportError: ")
    assert "failed" in lost


def test_processes_take_turns_and_what_fails_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes that are stand-ins: of SonicMoE's, one is wrong on the second shape and ends on the third."""
    script = (
        "import json, sys\n"
        "side, log = sys.argv[1:]\n"
        "for line in sys.stdin:\n"
        "    question = line.strip()\n"
        "    with open(log, 'a') as file: file.write(f'{side} {question}\\n')\n"
        "    if side == 'sonic' and question.startswith('3'): sys.exit(5)\n"
        "    wrong = {'failed': 'wrong: w13'} if side == 'sonic' and question.startswith('2') else {}\n"
        "    times = {'moereg': 2.0, 'sonic': 3.0}\n"
        "    print(json.dumps({'ms': times[side]} if question == 'go' else {'errors': {}, **wrong}), flush=True)\n"
    )
    log, popen, paths = tmp_path / "log", subprocess.Popen, {}

    def start(command: list[str], env: dict[str, str], **keywords: Any) -> Any:
        paths[command[-1]] = env["PYTHONPATH"]
        return popen([sys.executable, "-c", script, command[-1], str(log)], **keywords)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setenv("PYTHONPATH", "ours")
    arguments = ["bench", "--shapes", "1,1,1,1,1", "2,1,1,1,1", "3,1,1,1,1", "--peer-path", "a", "b"]
    monkeypatch.setattr("sys.argv", [*arguments, "--json", str(tmp_path / "json")])
    assert sonic_moe.main() == 1
    assert paths == {"sonic": "a:b:ours", "moereg": "ours"}
    asked = log.read_text().splitlines()
    turns = ["sonic go", "moereg go"] * sonic_moe.ROUNDS
    alone = ["moereg go"] * sonic_moe.ROUNDS
    first = ["sonic 1,1,1,1,1", "moereg 1,1,1,1,1", *turns]
    assert asked == [
        *first,
        "sonic 2,1,1,1,1",
        "moereg 2,1,1,1,1",
        *alone,
        "sonic 3,1,1,1,1",
        "moereg 3,1,1,1,1",
        *alone,
    ]
    rows = json.loads((tmp_path / "json").read_text())["rows"]
    assert [row["moereg"]["ms"] for row in rows.values()] == [2.0] * 3
    assert rows["1,1,1,1,1"]["sonic"]["ms"] == 3.0
    assert rows["2,1,1,1,1"]["sonic"]["failed"] == "wrong: w13"
    assert rows["3,1,1,1,1"]["sonic"]["failed"] == "the process ended with 5"
    assert "1,1,1,1,1: 2.000 ms / 3.000 ms = 1.500" in capsys.readouterr().out
