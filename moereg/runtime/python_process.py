"""Python processes of moereg: their cores, and how they avoid imports from the current folder."""

from __future__ import annotations

import contextlib
import os
import sys


def leave_current_folder() -> None:
    """Removes the current folder from this process's import path, where `python -m` puts it first."""
    with contextlib.suppress(OSError):  # The folder may no longer exist.
        if sys.path[0] in ("", os.getcwd()):
            del sys.path[0]


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a moereg module in a new process with this one's import path.

    `python -m` would put the current folder first; only Python 3.11 and later have an option against that. An empty
    entry of `sys.path`, which means that folder, is omitted.
    """
    # Without pathlib, which would be imported before the current folder is removed.
    root = os.path.abspath(os.path.join(__file__, *[os.pardir] * 3))
    path = [entry for entry in sys.path if entry]
    if root not in path:  # An editable install may not be on the path.
        path.insert(0, root)
    # Imports only sys, which is built in, before the path is set.
    code = f"import sys; sys.path[:] = {path!r}; import runpy; runpy.run_module({module!r}, None, '__main__', True)"
    return [sys.executable, "-c", code, *arguments]


def num_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
