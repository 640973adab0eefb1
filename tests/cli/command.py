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

SIZES = "--experts 8 --hidden 64 --intermediate 32 --top-k 2"
SELECTION_KEYS = ["schema", "problem", "platform", "platform_source", "request", "selected", "source", "decisions"]
SELECTION_KEYS += ["notices", "platform_claimed_by"]
RUN_KEYS = ["schema", "backend", "platform", "problem", "tokens", "relative_error", "tolerance", "passed"]
RUN_KEYS += ["failure", "damage", "time_us", "permute_ms", "selection"]
Call = Callable[[str], tuple[int, str, str]]
CallJson = Callable[[str], tuple[int, dict[str, Any]]]


def strict_json(text: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    value = json.loads(text, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


def run_module(line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moereg", *line.split()],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
    )


def run_code(code: str, *arguments: str, **keywords: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=root, **keywords)


def check_run(found: dict[str, Any]) -> None:
    assert list(found) == RUN_KEYS
    assert found["schema"] == 1
    assert list(found["selection"]) == SELECTION_KEYS
    assert found["backend"] == found["selection"]["selected"]
    assert found["problem"] == found["selection"]["problem"]
    assert found["platform"] == found["selection"]["platform"]
