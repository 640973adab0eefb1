"""Runs command lines of moereg, one after the other in one interpreter: an interpreter takes seconds to start.

Standard input is a JSON list of command lines, each a list. Standard output is a JSON list of an answer each: exit
code, standard output, standard error.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile


def _answer(line: list[str]) -> tuple[int, str, str]:
    from moereg import cli

    real = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            code = cli.main(line)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            for number, descriptor in enumerate(real, start=1):
                os.dup2(descriptor, number)
                os.close(descriptor)
        out.seek(0)
        err.seek(0)
        return code, out.read().decode(), err.read().decode()


def main() -> None:
    print(json.dumps([_answer(line) for line in json.load(sys.stdin)]))


if __name__ == "__main__":
    main()
