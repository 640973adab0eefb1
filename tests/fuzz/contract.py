"""The promise of every public callable: it works, or raises moereg's own error on one line that can be printed."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import moereg
from moereg.errors import MoeregError, UnsupportedProblemError

__all__ = ["NOTHING", "breach_of"]

_PACKAGE: Final = str(Path(moereg.__file__).parent)
_LONGEST: Final = 5_000

NOTHING: Final = object()
"""The result of `breach_of` for a call that was refused as it should be."""


def breach_of(call: Callable[[], Any]) -> tuple[str | None, Any]:
    """Makes a call.

    Returns:
        How the contract is broken, or None where it holds; and what the call returned, or `NOTHING`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return None, call()
    except MoeregError as error:
        return _breach_in(error), NOTHING
    except Exception as error:
        return f"raised {_place(error)}", NOTHING


def _breach_in(error: MoeregError) -> str | None:
    text = str(error)
    # Its first line is followed by one for each backend.
    lines = text.splitlines() if isinstance(error, UnsupportedProblemError) else [text]
    if not text or not all(line.isprintable() for line in lines) or len(max(lines, key=len)) > _LONGEST:
        return f"is not one printable line: {_place(error)}"
    return None


def _place(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_PACKAGE)]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    try:
        text = ascii(str(error))[:300]
    except Exception:
        text = "without a text"
    return f"{type(error).__name__}{where}: {text}"
