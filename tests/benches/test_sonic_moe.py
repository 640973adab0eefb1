"""The bench beside SonicMoE: how two processes take turns, and what fails is not timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benches.h200 import sonic_moe


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
