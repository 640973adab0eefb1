"""Folders of kernels compiled ahead, maybe on another machine, and checked against this one before use."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moereg._version import __version__
from moereg.errors import ArgumentError, described
from moereg.layer.warm_up.result import summary_of
from moereg.platforms import Platform
from moereg.selection.result import Selection

KERNEL_CACHE: Final = "MOEREG_KERNEL_CACHE"
"""Variable that names a folder of `moereg compile`."""

_USED: Final[set[tuple[str, str]]] = set()
"""Folders named by the variable that this process uses, each with the platform it was checked for."""


def note_layer(
    folder: Path, selection: Selection, counts: Sequence[int], facts: Mapping[str, str], num_kernels: int
) -> None:
    """Records what was compiled for a layer in the folder's note."""
    from moereg.kernels.launch import cache

    layer = {
        "problem": selection.problem.to_dict(),
        "platform": str(selection.platform),
        "backend": selection.backend,
        "token_counts": summary_of(counts),
        "num_kernels": num_kernels,
        "moereg": __version__,
        "facts": dict(facts),
    }
    note = cache.read_note(folder)
    layers = [] if note is None else list(note["layers"])
    cache.write_note(folder, layers if layer in layers else [*layers, layer])


def check_writable(folder: Path, is_named: bool = False) -> None:
    """Checks that kernels can be compiled into a folder, made if missing: one that was named, or else Triton's own."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        cure = "name another one" if is_named else "set TRITON_CACHE_DIR to one that can"
        fault = error.strerror or described(error)
        raise ArgumentError(
            f"kernels are compiled into a folder that can be written, got {folder} ({fault}); {cure}"
        ) from None


@contextlib.contextmanager
def use_folder(platform: Platform, folder: Path | None) -> Iterator[Path]:
    """Points Triton's cache at a folder, made if missing, or at its own for None; yields the path."""
    from moereg.kernels.launch import cache

    place = cache.cache_folder() if folder is None else folder.expanduser().absolute()
    check_writable(place, is_named=folder is not None)
    if folder is None:
        yield place
        return
    note = cache.read_note(place)
    if note is not None and any(layer["platform"] == str(platform) for layer in note["layers"]):
        check_shipped(place, platform)
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = str(place)
    try:
        yield place
    finally:
        if before is None:
            del os.environ["TRITON_CACHE_DIR"]
        else:
            os.environ["TRITON_CACHE_DIR"] = before


def check_shipped(folder: Path, platform: Platform, shared_bytes: int | None = None) -> dict[str, Any] | None:
    """Checks a folder filled by `moereg compile` for a platform and this Triton, and adapts it if it was moved.

    Returns:
        Its note, or None for an ordinary Triton cache.
    """
    from moereg.kernels.launch import cache
    from moereg.kernels.launch.ahead import Target

    note = cache.read_note(folder)
    if note is None:
        return None
    target = Target.of(platform.kind, platform.arch, shared_bytes)
    if target is None:
        raise ArgumentError(f"kernels can be compiled for {', '.join(Target.known())}, got {platform}")
    cache.check_facts(folder, note, cache.compiler_facts(target), str(platform))
    cache.move_in(folder, note)
    return note


def use_shipped_kernels(platform: Platform) -> None:
    """Lets Triton read the kernels in the folder that `MOEREG_KERNEL_CACHE` names, after checking that they fit.

    Does nothing for a platform that Triton does not compile for.
    """
    name = os.environ[KERNEL_CACHE]
    if (name, str(platform)) in _USED or platform.kind not in ("cuda", "rocm"):
        return
    folder = Path(name).expanduser().absolute()
    if importlib.util.find_spec("triton") is None:
        raise ArgumentError(f"{KERNEL_CACHE}={name} needs Triton, which is not installed; leave it unset")
    if check_shipped(folder, platform) is None:
        raise ArgumentError(
            f"{KERNEL_CACHE} must name a folder that `moereg compile --cache` has filled, got {name}; leave it unset "
            "for Triton's own cache"
        )
    os.environ["TRITON_CACHE_DIR"] = str(folder)  # For its children, too.
    _USED.add((name, str(platform)))
