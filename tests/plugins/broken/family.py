"""Installs broken wheels side by side and asks moereg about them, in few interpreters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.plugins.broken.wheels import (
    AT_IMPORT,
    AT_RUN,
    BACKENDS,
    CRASHES,
    GOOD_ONE,
    KIT_ONLY,
    LIARS,
    ODD,
    PREDICATES,
    SIDE_BY_SIDE,
    Broken,
)
from tests.plugins.installing import ROOT, Site

LAYER: Final = ["--experts", "8", "--hidden", "32", "--intermediate", "32", "--top-k", "2", "--tokens", "4"]
# One check of each backend: a small layer of every call that the kit makes.
ONE_LAYER: Final = ("--check", "E6-H64-I96-k2")
MANY_EXPERTS: Final = ("--check", "E40-H64-I64-k3")

NOT_HERE: Final = {broken.name for broken in (*CRASHES, *KIT_ONLY)}
"""Those that only a worker process may run."""


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

    @property
    def failures(self) -> list[str]:
        """What `verify` says of the checks that failed, in whatever way."""
        results = self.json.get("results", ())
        return [result["message"] for result in results if result["status"] not in ("passed", "skipped")]


def install(folder: Path, wheels: Sequence[Broken] = SIDE_BY_SIDE) -> Site:
    """A folder with all those wheels, installed by one pip."""
    (folder / "wheels").mkdir()
    site = Site(folder / "site")
    site.install(*(broken.write(folder / "wheels") for broken in wheels))
    return site


def ask(site: Site, lines: Sequence[list[str]], seconds: float = 500) -> list[Answer]:
    process = subprocess.run(
        [sys.executable, "-m", "tests.plugins.broken.commands"],
        input=json.dumps(lines),
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(site.folder), str(ROOT)))},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        cwd=ROOT,
    )
    assert process.returncode == 0, process.stderr
    return [Answer(*answer) for answer in json.loads(process.stdout.splitlines()[-1])]


def ask_commands(site: Site) -> dict[str, Answer]:
    """Answers of `info`, `explain`, `run` and `bench`, and under a backend's name that of running it alone."""
    runnable = [
        broken.name
        for broken in SIDE_BY_SIDE
        if broken.group == BACKENDS and not broken.point and broken.name not in NOT_HERE
    ]
    requests = {
        "info": ["info", "--json"],
        "explain": ["explain", *LAYER, "--json"],
        "run": ["run", *LAYER, "--json"],
        "bench": ["bench", *LAYER, "--json", "--deny", ",".join(sorted(NOT_HERE))],
    }
    requests |= {name: ["run", *LAYER, "--json", "--require", name] for name in runnable}
    return dict(zip(requests, ask(site, [*requests.values()]), strict=True))


def ask_kit(site: Site) -> dict[str, Answer]:
    """Answers of `verify` by backend; those that may end a process are verified in worker processes."""
    lines = {GOOD_ONE.name: ["--no-isolate"], AT_IMPORT[0].name: []}
    lines |= {broken.name: ["--no-isolate"] for broken in PREDICATES}  # Of a rejected backend the kit checks little.
    lines |= {broken.name: ["--no-isolate", *ONE_LAYER] for broken in (*ODD, *AT_RUN, *LIARS)}
    lines |= {broken.name: ["--no-isolate", *ONE_LAYER, *MANY_EXPERTS] for broken in KIT_ONLY}
    # One that hangs takes all the time that it is given.
    seconds = {"hangs": "5"}
    lines |= {broken.name: ["--check-seconds", seconds.get(broken.name, "30"), *ONE_LAYER] for broken in CRASHES}
    answers = ask(site, [["verify", name, "--json", *options] for name, options in lines.items()])
    return dict(zip(lines, answers, strict=True))
