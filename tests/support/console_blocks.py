"""Pages whose console blocks are run: a fresh environment with this checkout's wheel, and every command as written."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]

_EXITS = re.compile(r"#.*\bexits with (\d+)")


@dataclasses.dataclass(frozen=True)
class Command:
    """One line of a console block.

    Attributes:
        line: The command.
        code: The exit code that its comment promises; 0 where it does not say `exits with N`.
        expected: Lines that the block shows below it; each has to be in the output, white space aside.
    """

    line: str
    code: int
    expected: tuple[str, ...]


def commands_in(block: str) -> list[Command]:
    found: list[Command] = []
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, *shown = part.rstrip("\n").split("\n")
        promised = _EXITS.search(line)
        text = re.split(r"\s{2,}# ", line)[0].strip()
        # Three dots stand for what is left out.
        expected = tuple(each for each in (" ".join(text.split()) for text in shown) if each not in ("", "..."))
        found.append(Command(text, int(promised[1]) if promised else 0, expected))
    return found


class Environment:
    """A virtual environment that has what tests have, but moereg only as pip finds it: a wheel of this checkout."""

    def __init__(self, folder: Path) -> None:
        """Makes it; needs no network.

        Args:
            folder: A new folder for it.
        """
        self._venv, self.wheels = folder / "venv", folder / "wheels"
        # By this name hypothesis knows that they are not the code under test, which it parses for constants: 20 s.
        libraries = folder / "libraries" / "site-packages"
        _run([sys.executable, "-m", "venv", "--without-pip", str(self._venv)])
        libraries.mkdir(parents=True)
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.startswith(("moereg", "_editable_impl_moereg", "__editable__")):
                (libraries / entry.name).symlink_to(entry)
        (site,) = self._venv.glob("lib/python*/site-packages")
        (site / "libraries.pth").write_text(f"{libraries}\n")
        for name in ("pip", "pytest"):
            script = self._venv / "bin" / name
            script.write_text(f'#!/bin/sh\nexec "{self._venv}/bin/python" -m {name} "$@"\n')
            script.chmod(0o755)
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
        _run([*command, "--wheel-dir", str(self.wheels), str(ROOT)])

    @property
    def variables(self) -> dict[str, str]:
        """The environment's variables: pip has no index but the folder of wheels, and builds with what is there."""
        dropped = ("PYTHONPATH", "PYTHONHOME", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "TRITON_INTERPRET")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        return {
            **kept,
            "PATH": f"{self._venv}/bin{os.pathsep}{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self._venv),
            "XDG_DATA_HOME": str(self._venv / "data"),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_NO_CACHE_DIR": "1",
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # As an option it would be --no-build-isolation.
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "OMP_NUM_THREADS": "1",
            # Pages show what a machine without a GPU answers.
            "CUDA_VISIBLE_DEVICES": "",
            "COLUMNS": "140",
        }

    def run(self, command: Command, cwd: Path, seconds: float = 600) -> str:
        """Runs a command by a shell and returns its output.

        Raises:
            AssertionError: Another exit code, or a line that the page shows is missing.
        """
        variables = self.variables
        variables.pop("MOEREG_QUARANTINE", None)
        done = subprocess.run(
            command.line,
            shell=True,
            executable="/bin/bash",
            cwd=cwd,
            env=variables,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        output = done.stdout + done.stderr
        assert done.returncode == command.code, f"$ {command.line}\nexit {done.returncode}\n{output}"
        plain = " ".join(output.split())
        for line in command.expected:
            assert line in plain, f"$ {command.line}\nlacks: {line}\n{output}"
        return output


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
