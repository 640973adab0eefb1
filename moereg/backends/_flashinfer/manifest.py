"""The manifest next to a FlashInfer shared object: which kernels it contains.

FlashInfer builds all of its CUTLASS kernels or none. `moereg build-kernels` builds selected sets in a tenth of the time
and records them here. A full build has no manifest.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Final

__all__ = ["Manifest", "ManifestError", "manifest_path", "read_manifest"]

_SCHEMA: Final = 1


class ManifestError(ValueError):
    """A manifest does not describe its shared object; the text is a clause."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Contents of a shared object.

    Attributes:
        module: FlashInfer's name of the module, such as `fused_moe_90`.
        flashinfer: Version of the distribution that the sources come from.
        target: Compute capability, such as `90a`.
        sets: Names of the kernel sets, sorted.
        num_bytes: Size of the shared object.
        nvcc: Release of the compiler.
    """

    module: str
    flashinfer: str
    target: str
    sets: tuple[str, ...]
    num_bytes: int
    nvcc: str = ""

    def write(self, path: Path) -> None:
        """Writes the manifest next to a shared object, atomically."""
        values = {"schema": _SCHEMA, **dataclasses.asdict(self), "sets": sorted(self.sets)}
        temporary = manifest_path(path).with_suffix(".tmp")
        temporary.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        temporary.replace(manifest_path(path))


def manifest_path(path: Path) -> Path:
    """Path of a shared object's manifest."""
    return path.with_suffix(".moereg.json")


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of a shared object; None if it has none.

    Raises:
        ManifestError: It cannot be read or describes another file.
    """
    try:
        values: Any = json.loads(manifest_path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        raise ManifestError(f"cannot be read ({manifest_path(path)})") from None
    try:
        if values.pop("schema") != _SCHEMA:
            raise ManifestError(f"has another schema than {_SCHEMA}")
        found = Manifest(**{**values, "sets": tuple(map(str, values["sets"]))})
    except (AttributeError, KeyError, TypeError):
        raise ManifestError(f"lacks a field ({manifest_path(path)})") from None
    if found.num_bytes != path.stat().st_size:
        raise ManifestError(f"speaks of {found.num_bytes} bytes, and {path.name} has {path.stat().st_size}")
    return found
