"""Processes of Python that moereg starts, and its own: their cores, and that none imports from the current folder."""

from __future__ import annotations

import contextlib
import os
import sys


def leave_current_folder() -> None:
    """Takes the current folder out of where this process imports from: `python -m` puts it first."""
    with contextlib.suppress(OSError):  # The folder may be gone.
        if sys.path[0] in ("", os.getcwd()):
            del sys.path[0]


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of moereg as its own process, which imports from where this one does.

    `python -m` would put the current folder first; only Python 3.11 and later have an option against that. An empty
    entry of `sys.path`, which stands for that folder, is left out.

    Args:
        module: Dotted name.
        *arguments: What it finds in `sys.argv[1:]`.
    """
    # Without pathlib, which would be imported before the current folder is left.
    root = os.path.abspath(os.path.join(__file__, *[os.pardir] * 3))
    path = [entry for entry in sys.path if entry]
    if root not in path:  # An editable install may be found in another way.
        path.insert(0, root)
    # Nothing but sys, which is built in, is imported before the path is set.
    code = f"import sys; sys.path[:] = {path!r}; import runpy; runpy.run_module({module!r}, None, '__main__', True)"
    return [sys.executable, "-c", code, *arguments]


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
