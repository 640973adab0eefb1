"""`moereg new-backend`: writes a plugin package with one working backend that passes the conformance kit."""

from __future__ import annotations

import importlib.resources
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moereg._version import __version__
from moereg.cli._options import UsageError
from moereg.cli._plugin_modules import plugin_modules
from moereg.errors import ArgumentError, shown
from moereg.registry import check_name
from moereg.selection.loader import list_backends, list_cells
from moereg.selection.result import SCHEMA

# Valid in names of distributions, packages and entry points alike.
_NAME: Final = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_LONGEST_NAME: Final = 40

_TEMPLATES: Final = importlib.resources.files("moereg.cli") / "_wheel"
# Templates and the files that they become. They are named `*.template`, so that no tool reads them as code.
_FILES: Final = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "ci.yml": ".github/workflows/test.yml",
    "init.py": "src/@package@/__init__.py",
    "py.typed": "src/@package@/py.typed",
    "test.py": "tests/test_@name@.py",
}

_KERNELS: Final = ("torch_kernel", "triton_kernel")


def show_wheel(written: Mapping[str, Any], is_complete: bool) -> None:
    """Prints the files that `write_wheel` wrote, and the next steps; one `is_complete` has its author's kernel."""
    folder = shlex.quote(written["directory"])
    print(f"wrote {written['distribution']} into {written['directory']}:")
    for path in written["files"]:
        print(f"  {path}")
    print("it works as it is:")
    print(f"  pip install -e {folder}  # and pytest for its tests")
    module = written["files"][-1]
    # A kernel of GPUs alone is explained as on one.
    platform = " --platform cuda:sm90" if module.endswith("kernels.py") else ""
    print(f"  moereg explain --model qwen3-30b-a3b{platform} --prefer {written['name']}")
    print(f"  moereg verify {written['name']}")
    if not is_complete:
        print(f"put your kernel into {module}")


def write_wheel(
    name: str, directory: Path | None = None, source: Path | None = None, is_triton: bool = False
) -> dict[str, Any]:
    """Writes the source of a plugin with the backend of a file, or one with a kernel in torch or Triton.

    Returns the object that `moereg new-backend --json` prints.
    """
    distribution = _distribution(name)
    package = distribution.replace("-", "_")
    words = {
        "name": name,
        "distribution": distribution,
        "package": package,
        "class_name": "".join(part.capitalize() for part in name.split("_")) + "Experts",
        "moereg_version": __version__,
    }
    folder = Path(distribution) if directory is None else directory
    contents = {_filled(path, words): _filled(_template(kind), words) for kind, path in _FILES.items()}
    words["imports"], words["kernel"] = _template(_KERNELS[is_triton]).split("\n\n\n", 1)
    words["platforms"] = 'platforms=("cuda:sm80+",),\n    requires=("triton>=3.4",)'
    if not is_triton:
        words["platforms"] = 'platforms=("cpu", "cuda:sm80+")'
    try:
        text = _filled(_template("backend.py"), words) if source is None else source.read_text(encoding="utf-8")
        modules = plugin_modules(text, name, package)
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(
            f"--from must name a file that can become a plugin, got {shown(str(source))}: {error}"
        ) from error
    contents |= {f"src/{package}/{path}": text for path, text in modules.items()}
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"--directory must be new or empty, got {shown(str(folder))}; name another or empty it")
        for path, text in contents.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--directory must be writable, got {shown(str(folder))}: {error.strerror or error}; name another"
        ) from error
    return {
        "schema": SCHEMA,
        "name": name,
        "distribution": distribution,
        "package": package,
        "directory": str(folder),
        "files": list(contents),
    }


def _template(name: str) -> str:
    return (_TEMPLATES / f"{name}.template").read_text(encoding="utf-8")


def _distribution(name: str) -> str:
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise UsageError(
            f"a backend's name is at most {_LONGEST_NAME} lower-case letters and digits, a letter first and words "
            f"joined by underscores, got {shown(name)}; for instance my_kernel"
        )
    try:
        check_name(name)
    except ArgumentError as error:
        raise UsageError(f"backend {name!r}: {error}") from error
    distribution = f"moereg-{name.replace('_', '-')}"
    origin = list_cells(name)[0].origin if name in list_backends() else distribution
    if origin != distribution:
        raise UsageError(f"a backend's name belongs to one distribution, and {name} is of {origin}; choose another")
    return distribution


def _filled(text: str, words: dict[str, str]) -> str:
    return re.sub(rf"@({'|'.join(words)})@", lambda match: words[match[1]], text)
