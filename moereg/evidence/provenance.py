"""Provenance of stored results: where and with what they were measured. Runs no other program."""

from __future__ import annotations

import datetime
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any, Final

from packaging.version import InvalidVersion, Version

from moereg.platforms import Platform, gpu_clocks

_ROOT: Final = pathlib.Path(__file__).resolve().parents[2]
"""The package's checkout, or the folder that it is installed into, which has no history."""


def provenance(platform: Platform, distributions: Iterable[str]) -> dict[str, Any]:
    """`device`, `platform`, `versions` of some distributions, `commit` and `date` of a stored result.

    The commit is that of moereg's own checkout, whatever the current directory; MOEREG_COMMIT names it if there is no
    history, and it is empty if unknown. It does not show uncommitted changes; code digests do.
    """
    return {
        "device": platform.device_name,
        "platform": str(platform),
        "versions": {name: platform.versions[name] for name in sorted(distributions) if name in platform.versions},
        "commit": os.environ.get("MOEREG_COMMIT") or _commit(_ROOT),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def minor_version(text: str) -> str:
    """Major and minor version, such as `2.11` for `2.11.0+cu128`: patch versions do not matter to evidence."""
    try:
        return ".".join(map(str, Version(text).release[:2]))
    except InvalidVersion:
        return text


def clocks(platform: Platform) -> dict[str, dict[str, int]]:
    """`clocks` of the GPU, for results that are times, or an empty dictionary. Call it right after measuring."""
    found = gpu_clocks() if platform.kind == "cuda" else {}
    return {"clocks": found} if found else {}


def _commit(root: pathlib.Path) -> str:
    """The checked-out commit. Reads files, since git may run programs named in a repository's settings."""
    directory = root / ".git"
    try:
        if directory.is_file():  # In a linked work tree or a submodule, `.git` is a file.
            directory = root / directory.read_text(encoding="utf-8").strip().removeprefix("gitdir: ")
        head = (directory / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return _checked(head)
        reference = head.removeprefix("ref: ")
        if (directory / "commondir").is_file():  # Branches are the main work tree's.
            directory /= (directory / "commondir").read_text(encoding="utf-8").strip()
        if (directory / reference).is_file():
            return _checked((directory / reference).read_text(encoding="utf-8").strip())
        for line in (directory / "packed-refs").read_text(encoding="utf-8").splitlines():
            commit, _, name = line.partition(" ")
            if name == reference:
                return _checked(commit)
    except (OSError, ValueError):
        pass
    return ""


def _checked(commit: str) -> str:
    return commit if re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", commit) else ""
