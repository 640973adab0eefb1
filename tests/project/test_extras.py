"""Versions: extras, cells and pins say the same of other people's packages, and the changelog has ours."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import moereg
from moereg.registry import BUILTIN
from moereg.selection.loader import load_backends
from tests.ranges import Row, rows_of
from tests.support.toml import tomllib

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {
    (extra, canonicalize_name(one.name)): one.specifier
    for extra, lines in PROJECT["optional-dependencies"].items()
    for one in map(Requirement, lines)
    if extra in ("triton", "flashinfer", "cutlass", "finetune", "peers") and one.name != "moereg"
}
PINS = [
    Requirement(text)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if (text := line.partition("#")[0].strip())
]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
SECTIONS = re.findall(r"^## \[([^\]]+)\](.*)$", CHANGELOG, re.MULTILINE)
# A release of triton that one cell needs is narrower than the extra.
NEEDS = sorted(
    {
        (cell.name, text)
        for cell in load_backends().cells
        if cell.origin == BUILTIN
        for text in cell.requires
        if canonicalize_name(Requirement(text).name) != "triton"
    }
)


@pytest.mark.parametrize(("name", "text"), NEEDS, ids=[" ".join(need) for need in NEEDS])
def test_an_extra_brings_what_a_cell_needs(name: str, text: str) -> None:
    need = Requirement(text)
    ranges = [specifier for (_, package), specifier in EXTRAS.items() if package == canonicalize_name(need.name)]
    assert need.specifier in ranges, f"{name} needs {text}; the extras say {[str(one) for one in ranges]}"


@pytest.mark.parametrize(("extra", "package"), EXTRAS, ids=[" ".join(key) for key in EXTRAS])
def test_a_pin_is_inside_its_range(extra: str, package: str) -> None:
    pins = [pin for pin in PINS if canonicalize_name(pin.name) == package]
    assert pins
    for pin in pins:
        versions = [one.version for one in pin.specifier if one.operator in ("==", ">=", "<=")]
        assert all(EXTRAS[extra, package].contains(version) for version in versions), f"{pin} in {extra}"


def test_tests_run_at_the_ends_of_the_ranges() -> None:
    rows = rows_of((ROOT / "pyproject.toml").read_text())
    assert rows[0] == Row("3.10", "lowest", ("torch==2.11.*", "triton==3.6.*"))
    assert [row.python for row in rows[1:]] == ["3.10", "3.11", "3.12", "3.13", "3.14"]
    assert all(row.requirements == ("torch>=2.11", "triton>=3.6") for row in rows[1:])


def test_the_newest_section_of_the_changelog_is_this_version_or_what_comes_after_it() -> None:
    names = [name for name, _ in SECTIONS]
    assert names[0] in (moereg.__version__, "Unreleased")
    assert moereg.__version__ in names


def test_released_versions_have_a_date_and_fall() -> None:
    versions = [(Version(name), rest) for name, rest in SECTIONS if name != "Unreleased"]
    # The newest one may be on its way.
    assert all(re.fullmatch(r" - \d{4}-\d\d-\d\d", rest) for _, rest in versions[1:])
    assert re.fullmatch(r" - (\d{4}-\d\d-\d\d|unreleased)", versions[0][1])
    assert versions == sorted(set(versions), reverse=True)


def test_the_changelog_is_wrapped_and_its_lists_are_whole() -> None:
    assert not [line for line in CHANGELOG.splitlines() if len(line) > 120]
    # Only a heading stands before a list.
    assert not re.findall(r"^[^#\n].*\n\n- .*", CHANGELOG, re.MULTILINE)
