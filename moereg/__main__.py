"""The `moereg` command, and `python -m moereg`.

Answers `--version` itself, since all else needs torch, which takes a second to import.
"""

import sys

from moereg._version import __version__

__all__ = ["main"]


def main() -> int:
    """Runs the process's arguments; returns the exit code."""
    if sys.argv[1:] == ["--version"]:
        try:
            print("moereg", __version__, flush=True)
            return 0
        except OSError:  # The command line knows what to say of streams that are closed or full.
            pass
    from moereg.cli import main as run_command

    return run_command()


if __name__ == "__main__":
    sys.exit(main())
