"""Runs tests at the ends of the stated ranges: `python -m tests.ranges`, or `make test-ranges`.

pyproject.toml states the ranges. The lowest torch and Triton run on the lowest Python, the newest ones that pip finds
on every Python that is here. What could not be installed is named as not run.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "ranges.md"
# Pythons that no classifier names yet.
NEWER: Final = ("3.14",)
MARKS: Final = "not slow and not gpu and not peers and not finetune and not aot"
SHOWN: Final = ("torch", "triton", "numpy", "transformers", "compressed-tensors")
_TRIED: Final = 900
"""Seconds for an installation."""


class Row(NamedTuple):
    """One environment.

    Attributes:
        python: `3.10`.
        end: `lowest` or `newest`.
        requirements: For pip, beside moereg itself.
    """

    python: str
    end: str
    requirements: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.python}-{self.end}"


class Found(NamedTuple):
    """What became of an environment: columns of the table, and names of tests that failed."""

    columns: tuple[str, ...]
    failed: tuple[str, ...] = ()


class _NotRunError(Exception):
    """Why nothing ran."""


def rows_of(text: str) -> list[Row]:
    """The rows that a pyproject.toml asks for, the lowest first."""
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    bounds = {name: re.findall(rf'"{name}>=([\d.]+)[";]', text)[0] for name in ("torch", "triton")}
    pythons = sorted({*pythons, *NEWER}, key=lambda version: int(version.partition(".")[2]))
    lowest = tuple(f"{name}=={bound}.*" for name, bound in bounds.items())
    newest = tuple(f"{name}>={bound}" for name, bound in bounds.items())
    return [Row(pythons[0], "lowest", lowest), *(Row(python, "newest", newest) for python in pythons)]


def find_python(version: str) -> str:
    """An interpreter of a version."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    known = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python"))[::-1])]
    for python in filter(None, known):
        try:
            _output("", python, "-c", "import ensurepip, venv")
            return python
        except _NotRunError:
            continue
    raise _NotRunError(f"no Python {version} is here")


def _output(what: str, *command: str) -> str:
    """What a command prints.

    Raises:
        _NotRunError: With the first line that tells of an error.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TRIED, check=False)
        text, failed = done.stdout + done.stderr, done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        text, failed = str(error), True
    if failed:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "rror" in line or line.startswith("curl")]
        raise _NotRunError(f"{what}: " + (errors or lines or ["no output"])[0].replace("|", "/")[:120])
    return text


def run(row: Row, folder: Path, tests: Sequence[str]) -> Found:
    """Makes an environment, or brings it up to date, and runs tests in it."""
    python, place = find_python(row.python), folder / row.name
    inside = str(place / "bin" / "python")
    if not os.path.exists(inside):
        _output("venv", python, "-m", "venv", str(place))
    _output("pip", inside, "-m", "pip", "install", "-q", *row.requirements, "-e", f"{ROOT}[test]")
    report = folder / f"{row.name}.xml"
    report.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKS, f"--junitxml={report}", *tests]
    subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False)
    if not report.exists():
        raise _NotRunError("pytest ended without a report")
    code = (
        "import importlib.metadata as m, platform; known = {each.name: each.version for each in m.distributions()}; "
        f"print(platform.python_version(), *(known.get(name, '-') for name in {SHOWN}))"
    )
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed, skipped = (
        [case for case in cases if {child.tag for child in case} & kinds]
        for kinds in ({"failure", "error"}, {"skipped"})
    )
    counts = (len(cases) - len(failed) - len(skipped), len(skipped), len(failed))
    names = (f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}" for case in failed)
    return Found((*_output("versions", inside, "-c", code).split(), *map(str, counts)), tuple(names))


def table(found: dict[Row, Found], tests: Sequence[str]) -> str:
    """What ran, as Markdown."""
    header = ("Python", "torch", "Triton", *SHOWN[2:], "passed", "skipped", "failed")
    lines = ["| " + " | ".join(header) + " |", "|---" * 6 + "|---:" * 3 + "|"]
    for one in found.values():
        lines.append("| " + " | ".join((*one.columns, *[""] * (len(header) - len(one.columns)))) + " |")
    what = " ".join(f"`{test}`" for test in tests) or "all tests of `make test`"
    lines += ["", f"{datetime.date.today()}, {what}."]
    lines += [f"- failed with Python {row.name}: `{name}`" for row, one in found.items() for name in one.failed]
    return "\n".join(lines)


def write_page(text: str) -> None:
    """Puts the table into the page."""
    begin, end = "<!-- table -->\n", "<!-- end -->"
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    PAGE.write_text(f"{head}{begin}{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def main() -> int:
    """Runs the rows that are asked for; 1 where a test failed or nothing ran."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="", help="such as 3.10-lowest,3.13-newest; all if left out")
    parser.add_argument("--folder", type=Path, default=ROOT / ".ranges", help="of the environments, 5 GB each")
    parser.add_argument("--keep", action="store_true", help="keep each environment for the next time")
    parser.add_argument("--write", action="store_true", help="put the table into docs/ranges.md")
    parser.add_argument("tests", nargs="*", help="for pytest; all that `make test` runs if left out")
    options = parser.parse_args()
    rows = rows_of((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    asked = [name for name in options.rows.split(",") if name]
    if unknown := set(asked) - {row.name for row in rows}:
        parser.error(f"unknown row {sorted(unknown)[0]} (known: {', '.join(row.name for row in rows)})")
    options.folder.mkdir(parents=True, exist_ok=True)
    found: dict[Row, Found] = {}
    for row in rows:
        try:
            if asked and row.name not in asked:
                raise _NotRunError("not asked for")
            print(f"== Python {row.name}: {', '.join(row.requirements)}", file=sys.stderr, flush=True)
            found[row] = run(row, options.folder, options.tests)
        except _NotRunError as why:
            found[row] = Found((f"{row.python}, {row.end}", f"not run: {why}"))
        if not options.keep:
            shutil.rmtree(options.folder / row.name, ignore_errors=True)
    text = table(found, options.tests)
    print(text)
    if options.write:
        write_page(text)
    return int(all(len(one.columns) == 2 for one in found.values()) or any(one.failed for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
