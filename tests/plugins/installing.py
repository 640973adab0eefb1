"""Wheels installed by pip into a folder of their own, and interpreters that have it on their path."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]

_PIP = (sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check")


class Site:
    """A folder that pip installs into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(self, *sources: Path | str) -> None:
        """Installs wheels or source folders alone, built with what this environment has."""
        self._pip("--no-deps", "--no-build-isolation", *sources)

    def install_from_index(self, *requirements: str) -> None:
        self._pip(*requirements)

    def _pip(self, *arguments: Path | str) -> None:
        command = [*_PIP, "--target", str(self.folder), *map(str, arguments)]
        process = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert process.returncode == 0, process.stderr

    def python(
        self, *arguments: str, seconds: float = 240, cwd: Path = ROOT, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs an interpreter that finds these packages and this checkout's moereg."""
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(self.folder), str(ROOT))), **environment},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            cwd=cwd,
        )

    def moereg(self, line: str | Sequence[str], seconds: float = 240) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "moereg", *(line.split() if isinstance(line, str) else line), seconds=seconds)


def write_wheel(
    folder: Path,
    distribution: str,
    files: Mapping[str, str | bytes],
    entry_points: Mapping[str, Mapping[str, str]],
    version: str = "1.0",
) -> Path:
    """A wheel as a build tool would write it, in a fraction of the time: its files, and values by name by group."""
    stem = f"{distribution.replace('-', '_')}-{version}"
    points = [
        line
        for group, named in entry_points.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in named.items()))
    ]
    everything = {
        **files,
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: moereg\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{stem}.dist-info/entry_points.txt": "\n".join([*points, ""]),
    }
    record = []
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in everything.items():
            data = content.encode() if isinstance(content, str) else content
            wheel.writestr(name, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            record.append(f"{name},sha256={digest},{len(data)}\n")
        wheel.writestr(f"{stem}.dist-info/RECORD", "".join([*record, f"{stem}.dist-info/RECORD,,\n"]))
    return path
