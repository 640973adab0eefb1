"""Opens files that something else may have taken the place of."""

from __future__ import annotations

import os
import stat


def open_regular(path: str, flags: int) -> int:
    """The `opener` of `open` that refuses a pipe, which would wait for a writer for ever, a device and a folder.

    Raises:
        OSError: As `os.open`, or it is no regular file.
    """
    handle = os.open(path, flags | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError("no regular file")
