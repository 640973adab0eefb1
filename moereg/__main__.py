"""The `moereg` command, and `python -m moereg`.

Answers `--version` itself, and loads torch, which takes a second or two, only for commands that need it.
"""

import sys

from moereg._version import __version__
from moereg.runtime.python_process import leave_current_folder

__all__ = ["main"]


def main() -> int:
    """Runs the process's arguments and returns the exit code."""
    if sys.argv[1:] == ["--version"]:
        try:
            print("moereg", __version__, flush=True)
            return 0
        except OSError:  # The command line handles closed or full streams.
            pass
    from moereg.runtime.lazy_torch import ctrl_c_ends_imports, load_torch_at_first_use

    with ctrl_c_ends_imports():
        load_torch_at_first_use()
        from moereg.cli import main as run_command

    return run_command()


if __name__ == "__main__":
    leave_current_folder()
    sys.exit(main())
