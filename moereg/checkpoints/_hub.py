"""Names of the Hub, looked up in its local cache. Nothing is downloaded."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from moereg.errors import CheckpointError, shown

_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def snapshot_of(name: Path) -> Path | None:
    """The directory in the Hub's local cache that holds a model's main branch; None where it cannot be a name.

    A path that exists is no name. huggingface_hub says where the cache is (HF_HUB_CACHE, HF_HOME).

    Raises:
        CheckpointError: The cache has no such model, or huggingface_hub is not installed.
    """
    if os.path.lexists(name) or not _NAME.fullmatch(str(name)):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        missing, cure = "huggingface_hub, which looks for models, is missing", "`pip install huggingface_hub` and "
    else:
        missing, cure = "the Hub's local cache has no such model", ""
        try:
            config = try_to_load_from_cache(str(name), "config.json")
        except (ValueError, OSError):  # Not a name by the Hub's rules, or a cache that cannot be read.
            config = None
        if isinstance(config, str):
            return Path(config).parent
    raise CheckpointError(
        f"there is no directory {shown(str(name))}, and {missing}; nothing is downloaded, so give the directory of a "
        f"checkpoint, or run {cure}{download(name)}"
    )


def download(name: Path) -> str:
    """The command that brings a model into the cache."""
    return f"`hf download {name}`"


def link_roots(folder: Path) -> tuple[Path, ...]:
    """Directories that the files of a checkpoint may be links into: its own, and the blobs of the Hub's cache.

    In the cache, `models--ORGANIZATION--NAME/snapshots/COMMIT` links into `blobs` of that model, which may link into
    those that all models share.
    Source: file_download.py and utils/_shared_blobs.py of huggingface_hub 2.4.0.

    Args:
        folder: Directory of the checkpoint, without links.
    """
    model = folder.parent.parent
    if folder.parent.name == "snapshots" and model.name.startswith("models--"):
        return folder, *(Path(os.path.realpath(each / "blobs")) for each in (model, model.parent))
    return (folder,)
