"""Moves folders of compiled kernels from one machine to another.

Triton finds a kernel by a digest of its source, its options, the compiler and Triton's own files, and records the files
by their paths. So a folder works on another machine with the same Triton and Python at the path where it was made, and
at another path once the paths in it are rewritten. A note in the folder records how it was made.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.runtime.cache import triton_key

from moereg.errors import ArgumentError, described, shown
from moereg.kernels.launch.ahead import Target

NOTE: Final = "moereg_compiled.json"
"""Name of the note."""

_SCHEMA: Final = 1

_MEANINGS: Final = {
    "triton": "Triton {there}, and here is {here}",
    "python": "Triton for {there}, and here is {here}",
    "build": "another build of Triton {triton}",
    "settings": "Triton with the settings {there}, and here are {here}",
    "options": "Triton with other options or another assembler",
    "kernels": "another version of moereg's kernels",
}
"""Facts that keys in the cache depend on, each with the wording of a difference; the first that differs is named."""


def cache_folder() -> Path:
    """Returns the folder of this process's Triton cache."""
    return Path(knobs.cache.dir)


def compiler_facts(target: Target) -> dict[str, str]:
    """Everything that keys in the cache depend on besides a kernel and its arguments."""
    backend = triton.compiler.make_backend(target.gpu)
    debug, instrumentation = knobs.runtime.debug, getattr(knobs.compilation, "instrumentation_mode", "")
    options = backend.parse_options({"debug": debug, "instrumentation_mode": instrumentation})
    settings = ", ".join(f"{name}={value}" for name, value in sorted(get_cache_invalidating_env_vars().items()))
    return {
        "triton": triton.__version__,
        "python": f"{sys.implementation.cache_tag} on {platform.machine()}",
        "build": _digest(triton_key()),
        "settings": settings or "of an empty environment",
        "options": _digest(f"{backend.hash()} {options.hash()}"),
        "kernels": _kernels_digest(),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _kernels_digest() -> str:
    """Digest of the code of all kernels; code that only launches or ships them is left out."""
    own = Path(__file__).parent
    folder = own.parent
    files = sorted(file for file in folder.rglob("*.py") if file.parent != own or file.name == "overlap.py")
    return _digest("\n".join(f"{file.relative_to(folder)} {_digest(file.read_text('utf-8'))}" for file in files))


def read_note(folder: Path) -> dict[str, Any] | None:
    """The note of a folder that `moereg compile` filled, or None where there is none."""
    try:
        text = (folder / NOTE).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(
            f"{folder / NOTE} must be readable, got {described(error)}; copy the folder again"
        ) from None
    try:
        note = json.loads(text)
        if note["schema"] != _SCHEMA:
            raise ValueError(f"schema {shown(note['schema'])}")
        if not (isinstance(note["root"], str) and all(isinstance(each["facts"], dict) for each in note["layers"])):
            raise ValueError("other fields")
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"{folder / NOTE} must be what `moereg compile` writes, got {described(error)}; compile again"
        ) from None
    return dict(note)


def check_facts(folder: Path, note: Mapping[str, Any], facts: Mapping[str, str], platform_name: str) -> None:
    """Checks that this process's Triton will find what was compiled for a platform, and that something was."""
    layers = [layer for layer in note["layers"] if layer["platform"] == platform_name]
    if not layers:
        made_for = ", ".join(sorted({layer["platform"] for layer in note["layers"]})) or "nothing"
        raise ArgumentError(
            f"the kernels in {folder} are for {made_for}, and this is {platform_name}; "
            f"compile them with --platform {platform_name}"
        )
    for layer in layers:
        made_by = layer["facts"]
        for name, meaning in _MEANINGS.items():
            if made_by.get(name) != facts[name]:
                found = meaning.format(there=made_by.get(name), here=facts[name], triton=facts["triton"])
                raise ArgumentError(
                    f"the kernels in {folder} were compiled by {found}, which would compile them all again; "
                    "compile them with what runs them"
                )


def write_note(folder: Path, layers: list[dict[str, Any]]) -> None:
    """Writes the note of a folder that was filled at its current path."""
    _replace(folder / NOTE, {"schema": _SCHEMA, "root": str(folder), "layers": layers})


def move_in(folder: Path, note: Mapping[str, Any]) -> None:
    """Rewrites the paths in a folder that was made elsewhere, so that Triton finds its files."""
    if note["root"] == str(folder):
        return
    try:
        for group in folder.glob("*/__grp__*.json"):
            paths = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
            here = {name: str(group.parent / Path(path).name) for name, path in paths.items()}
            if here != paths:
                _replace(group, {"child_paths": here})
        write_note(folder, note["layers"])
    except OSError as error:
        raise ArgumentError(
            f"the kernels in {folder} were compiled in {note['root']}, and the paths in it cannot be rewritten "
            f"({error.strerror or described(error)}); put it there, or where it can be written"
        ) from None


def _replace(file: Path, values: Mapping[str, Any]) -> None:
    """Writes JSON atomically."""
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False, encoding="utf-8") as sink:
        json.dump(values, sink)
    os.chmod(sink.name, 0o644)
    os.replace(sink.name, file)
