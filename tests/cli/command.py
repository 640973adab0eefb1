"""The command line as tests call it, and what several of them expect of its JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SIZES = "--experts 8 --hidden 64 --intermediate 32 --top-k 2"
Call = Callable[[str], tuple[int, str, str]]
CallJson = Callable[[str], tuple[int, dict[str, Any]]]


def strict_json(text: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    value = json.loads(text, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


def run_python(*arguments: str, **keywords: Any) -> subprocess.CompletedProcess[str]:
    keywords = {"capture_output": True, "text": True, "timeout": 240, "cwd": ROOT, **keywords}
    return subprocess.run([sys.executable, *arguments], check=False, **keywords)


def printed(*arguments: str, timeout: float = 240, **environment: str) -> str:
    """What Python prints in a process of its own, which finds moereg and tests here and has to succeed."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = run_python(*arguments, timeout=timeout, env={**os.environ, "PYTHONPATH": paths, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_module(line: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "moereg", *line.split(), cwd=cwd or ROOT, env={**os.environ, **environment})


def run_code(code: str, *arguments: str, **keywords: Any) -> subprocess.CompletedProcess[str]:
    return run_python("-c", textwrap.dedent(code), *arguments, **keywords)


def check_run(found: dict[str, Any]) -> None:
    assert found["schema"] == 1
    assert found["backend"] == found["selection"]["selected"]
    assert found["problem"] == found["selection"]["problem"]
    assert found["platform"] == found["selection"]["platform"]
