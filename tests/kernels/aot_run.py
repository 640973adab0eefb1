"""Runs `aot_compile` in one process for all targets; bounds on the registers and spills of what it compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import triton

__all__ = ["compile_all", "register_bound", "spill_bound"]

# The version of Triton that bounds were recorded with.
_RECORDED_WITH: Final = "3.8."
_IS_SAME: Final = triton.__version__.startswith(_RECORDED_WITH)
_MOST: Final = 255


def compile_all(cases: Mapping[str, tuple[str, ...]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of the named cases of each target, by target."""
    path = Path(__file__).with_name("aot_compile.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(path.parents[2]), environment.get("PYTHONPATH", "")])
    arguments = [f"{target}={','.join(names)}" for target, names in cases.items()]
    done = subprocess.run(
        [sys.executable, str(path), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{path.name} {' '.join(arguments)}:\n{done.stderr}"
    rows: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    assert rows.keys() == cases.keys()
    return rows


def register_bound(recorded: int) -> int:
    """The recorded bound; with another Triton up to a sixth more."""
    return recorded if _IS_SAME else min(recorded + recorded // 6, _MOST)


def spill_bound(recorded: int) -> int:
    """The recorded bytes; with another Triton up to four words more."""
    return recorded if _IS_SAME else recorded + 16
