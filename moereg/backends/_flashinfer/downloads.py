"""FlashInfer's downloads at first use: TensorRT-LLM's generated kernels, and headers that other modules include.

Without a network the first call fails after a minute of retries, so probes look for the files.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path
from typing import Final

from moereg.backends._flashinfer.package import cache_folder, installed_version, package_folder

__all__ = ["download_folder", "has_generated_headers", "has_generated_kernels"]

_WHEEL: Final = "flashinfer_cubin"
_PIN: Final = re.compile(r'TRTLLM_GEN_BMM\s*:\s*str\s*=\s*\(?\s*"([^"]+)"')
_CURE: Final = "run flashinfer download-cubin where there is a network, or name a folder that has them in "
_VARIABLE: Final = "FLASHINFER_CUBIN_DIR"


def download_folder() -> Path:
    """The folder of FlashInfer's downloads: a named one, a wheel of the same version, or its cache."""
    if named := os.environ.get(_VARIABLE):
        return Path(named)
    return _in_wheel() or cache_folder() / "cubins"


def _in_wheel() -> Path | None:
    try:
        spec = importlib.util.find_spec(_WHEEL)
        version = importlib.metadata.version(_WHEEL.replace("_", "-"))
    except (ImportError, ValueError):
        return None
    if version != installed_version() and not os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK"):
        return None
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(locations[0]) / "cubins" if locations else None


def generated_folder() -> str | None:
    """This release's folder of generated GEMMs below `download_folder()`; None if the release does not name it."""
    folder = package_folder()
    return None if folder is None else _pinned(folder / "artifacts.py")


@functools.lru_cache(maxsize=4)
def _pinned(file: Path) -> str | None:
    try:
        found = _PIN.search(file.read_text())
    except OSError:
        return None
    return None if found is None else found.group(1).strip("/")


def has_generated_headers() -> str | None:
    """Why FlashInfer would have to download headers of the generated GEMMs, or None."""
    return _lacking("headers of TensorRT-LLM's kernels", "include/trtllmGen_bmm_export/*.h")


def has_generated_kernels() -> str | None:
    """Why FlashInfer would have to download the generated GEMMs themselves, or None."""
    return _lacking("TensorRT-LLM's kernels", "*.cubin")


def _lacking(what: str, pattern: str) -> str | None:
    generated = generated_folder()
    if generated is None:
        return None
    folder = download_folder() / generated
    if any(folder.glob(pattern)):
        return None
    return f"requires {what}, which FlashInfer downloads, found none in {folder}; {_CURE}{_VARIABLE}"
