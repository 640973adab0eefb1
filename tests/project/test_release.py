"""A release: its version has a section in the changelog, and everything that pins a version says the same."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.version import Version

import moereg

ROOT = Path(__file__).parents[2]
SECTIONS = re.findall(r"^## \[([^\]]+)\](.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


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
