"""Where and on what a result was measured, for everything that is stored."""

from __future__ import annotations

import datetime
import os
import subprocess
from collections.abc import Iterable
from typing import Any

from moereg.platforms import Platform, gpu_clocks

__all__ = ["clocks", "provenance"]


def provenance(platform: Platform, distributions: Iterable[str]) -> dict[str, Any]:
    """The facts that a stored result carries.

    Args:
        platform: The machine, probed.
        distributions: Whose versions matter.

    Returns:
        `device`, `platform`, `versions`, `commit` (`-dirty` where files differ from it; MOEREG_COMMIT says it where
        the checkout has no history; empty where unknown) and `date`.
    """
    return {
        "device": platform.device_name,
        "platform": str(platform),
        "versions": {name: platform.versions[name] for name in sorted(distributions) if name in platform.versions},
        "commit": os.environ.get("MOEREG_COMMIT") or _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def clocks(platform: Platform) -> dict[str, dict[str, int]]:
    """What the GPU ran at, for results that are times; to be asked right after measuring.

    Args:
        platform: The machine, probed.

    Returns:
        `clocks` with what `gpu_clocks` says; empty where that is nothing.
    """
    found = gpu_clocks() if platform.kind == "cuda" else {}
    return {"clocks": found} if found else {}


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""
