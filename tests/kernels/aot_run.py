"""Runs a script that compiles kernels for devices that are not there: one process for all of its targets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["compile_all"]


def compile_all(script: str, cases: Mapping[str, tuple[str, ...]]) -> dict[str, list[dict[str, Any]]]:
    """The rows of a script of this folder by target, for the named cases of each target."""
    path = Path(__file__).with_name(script)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(path.parents[2]), environment.get("PYTHONPATH", "")])
    arguments = [f"{target}={','.join(names)}" for target, names in cases.items()]
    done = subprocess.run(
        [sys.executable, str(path), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{script} {' '.join(arguments)}:\n{done.stderr}"
    rows: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    assert rows.keys() == cases.keys()
    return rows
