"""Wheels installed by pip into a folder of their own, and interpreters that have it on their path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]

_PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check")


class Site:
    """A folder that pip installs into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, *sources: Path | str) -> None:
        """Installs wheels or source folders alone, built with what this environment has."""
        command = [*_PIP, "--no-deps", "--no-build-isolation", "--target", str(self.folder), *map(str, sources)]
        process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert process.returncode == 0, process.stderr

    def python(
        self, *arguments: str, seconds: float = 240, cwd: Path = ROOT, stdin: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs an interpreter that finds these packages and this checkout's moereg."""
        return subprocess.run(
            [sys.executable, *arguments],
            input=stdin,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(self.folder), str(ROOT))), **environment},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            cwd=cwd,
        )

    def moereg(self, line: str | Sequence[str], seconds: float = 240) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "moereg", *(line.split() if isinstance(line, str) else line), seconds=seconds)


class Answer(NamedTuple):
    """What a command line answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The object on standard output; empty if there is none."""
        found: dict[str, Any] = json.loads(self.out or "{}")
        return found


def ask(site: Site, lines: Sequence[list[str]], seconds: float = 500) -> list[Answer]:
    """Answers of command lines of moereg, which one interpreter runs."""
    process = site.python("-m", "tests.plugins.installing", seconds=seconds, stdin=json.dumps(lines))
    assert process.returncode == 0, process.stderr
    return [Answer(*answer) for answer in json.loads(process.stdout.splitlines()[-1])]


def _answer(line: list[str]) -> tuple[int, str, str]:
    from moereg import cli

    real = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            code = cli.main(line)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            for number, descriptor in enumerate(real, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
        out.seek(0)
        err.seek(0)
        return code, out.read().decode(), err.read().decode()


if __name__ == "__main__":
    # A JSON list of command lines, one after the other in one interpreter: an interpreter takes seconds to start.
    print(json.dumps([_answer(line) for line in json.load(sys.stdin)]))
