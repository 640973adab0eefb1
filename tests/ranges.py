"""Runs tests at the ends of the stated ranges: `python -m tests.ranges`, or `make test-ranges`.

pyproject.toml states the ranges. The lowest torch and Triton run on the lowest Python, the newest ones that pip finds
on every Python that is here. What could not be installed is named as not run.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "ranges.md"
# Pythons that no classifier names yet.
NEWER: Final = ("3.14",)
MARKS: Final = "not slow and not gpu and not peers and not finetune and not aot"
SHOWN: Final = ("torch", "triton", "numpy", "transformers", "compressed-tensors")
_HEADER: Final = (
    "Python",
    "torch",
    "Triton",
    "numpy",
    "transformers",
    "compressed-tensors",
    "passed",
    "skipped",
    "failed",
)
_TRIED: Final = 900
"""Seconds for an installation."""


@dataclasses.dataclass(frozen=True)
class Row:
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


@dataclasses.dataclass(frozen=True)
class Found:
    """What became of it: why it did not run, or versions and counts."""

    row: Row
    not_run: str = ""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    passed: int = 0
    skipped: int = 0
    failed: tuple[str, ...] = ()

    def cells(self) -> list[str]:
        """A row of the table."""
        if self.not_run:
            return [f"{self.row.python}, {self.row.end}", f"not run: {self.not_run}", *[""] * (len(_HEADER) - 2)]
        python, *others = (self.versions.get(name, "") for name in ("python", *SHOWN))
        return [python, *others, str(self.passed), str(self.skipped), str(len(self.failed))]


def rows_of(text: str) -> list[Row]:
    """The rows that a pyproject.toml asks for, the lowest first."""
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', text)
    bounds = {name: re.findall(rf'"{name}>=([\d.]+)[";]', text)[0] for name in ("torch", "triton")}
    pythons = sorted({*pythons, *NEWER}, key=lambda version: int(version.partition(".")[2]))
    lowest = tuple(f"{name}=={bound}.*" for name, bound in bounds.items())
    newest = tuple(f"{name}>={bound}" for name, bound in bounds.items())
    return [Row(pythons[0], "lowest", lowest), *(Row(python, "newest", newest) for python in pythons)]


def find_python(version: str) -> tuple[str, str]:
    """An interpreter of a version, or, as the second, why there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    known = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python"))[::-1])]
    for python in known:
        if python and _output([python, "-c", "import ensurepip, venv"])[0] == 0:
            return python, ""
    return "", f"no Python {version} is here"


def _last_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if "rror" in line or line.startswith("curl")]
    return (errors or lines or ["no output"])[0].replace("|", "/")[:120]


def _output(command: Sequence[str]) -> tuple[int, str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TRIED, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, str(error)
    return done.returncode, done.stdout + done.stderr


def run(row: Row, folder: Path, tests: Sequence[str]) -> Found:
    """Makes an environment, or brings it up to date, and runs tests in it."""
    python, why = find_python(row.python)
    if why:
        return Found(row, why)
    place = folder / row.name
    inside = str(place / "bin" / "python")
    if not os.path.exists(inside):
        code, text = _output([python, "-m", "venv", str(place)])
        if code:
            return Found(row, f"venv: {_last_error(text)}")
    code, text = _output([inside, "-m", "pip", "install", "-q", *row.requirements, "-e", f"{ROOT}[test]"])
    if code:
        return Found(row, f"pip: {_last_error(text)}")
    report = folder / f"{row.name}.xml"
    report.unlink(missing_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKS, f"--junitxml={report}", *tests]
    subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False)
    if not report.exists():
        return Found(row, "pytest ended without a report")
    return read_report(row, report.read_text(encoding="utf-8"), _versions(inside))


def _versions(python: str) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, platform; print('python', platform.python_version());\n"
        f"for name in {SHOWN}: print(name, m.version(name))"
    )
    return dict(line.split() for line in _output([python, "-c", code])[1].splitlines() if len(line.split()) == 2)


def read_report(row: Row, text: str, versions: dict[str, str]) -> Found:
    """Counts of a JUnit report."""
    passed, skipped, failed = 0, 0, []
    for case in ElementTree.fromstring(text).iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return Found(row, "", versions, passed, skipped, tuple(failed))


def table(found: Sequence[Found], tests: Sequence[str]) -> str:
    """What ran, as Markdown."""
    lines = ["| " + " | ".join(_HEADER) + " |", "|---" * 6 + "|---:" * 3 + "|"]
    lines += ["| " + " | ".join(one.cells()) + " |" for one in found]
    what = " ".join(f"`{test}`" for test in tests) or "all tests of `make test`"
    lines += ["", f"{datetime.date.today()}, {what}."]
    lines += [f"- failed with Python {one.row.name}: `{name}`" for one in found for name in one.failed]
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
    found = []
    for row in rows:
        if asked and row.name not in asked:
            found.append(Found(row, "not asked for"))
            continue
        print(f"== Python {row.name}: {', '.join(row.requirements)}", file=sys.stderr, flush=True)
        found.append(run(row, options.folder, options.tests))
        if not options.keep:
            shutil.rmtree(options.folder / row.name, ignore_errors=True)
    text = table(found, options.tests)
    print(text)
    if options.write:
        write_page(text)
    ran = [one for one in found if not one.not_run]
    return int(not ran or any(one.failed for one in ran))


if __name__ == "__main__":
    sys.exit(main())
