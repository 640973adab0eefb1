"""Makes the modules of a plugin out of one file that registers a backend.

Every process that chooses imports `backend.py`. If the file imports a kernel library at its top, that has its classes
alone, and `kernels.py` has all else, which the classes' methods import when they run.
"""

from __future__ import annotations

import ast
import re
from typing import Final

from moereg.cli._options import UsageError
from moereg.errors import shown
from moereg.registry import API_VERSION
from moereg.testing.checks import KERNEL_LIBRARIES

_API: Final = f'''
moereg_api = "{API_VERSION}"
"""The major version of `moereg.author` that this is written for."""
'''
_DEVICE_TYPES: Final = '''
    @classmethod
    def device_types(cls, platform):
        """The platform's, and the CPU for Triton's interpreter."""
        import os

        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        return (platform.device_type, "cpu") if interpreted else (platform.device_type,)
'''


def plugin_modules(source: str, file: str, name: str, package: str) -> dict[str, str]:
    """The text of `backend.py`, and of `kernels.py` if there is one.

    Raises:
        UsageError: The file does not register that backend alone, or a class needs a kernel library outside of methods.
    """
    if (found := set(re.findall(r"register_moe_backend\(\s*(?:name\s*=\s*)?[\"'](\w+)", source))) != {name}:
        raise UsageError(
            f"--from must register {name!r} alone, since a plugin's entry point has its backend's name, got "
            f"{', '.join(sorted(map(repr, found))) or 'none'} in {shown(file)}; name the plugin like the backend"
        )
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise UsageError(f"--from must name a file of Python, got {shown(file)}: {error}") from error
    lines = source.splitlines(keepends=True)
    starts = [0, *(_end(node) for node in body)]
    # Statements with the comments above them.
    spans = {node: slice(start, _end(node)) for start, node in zip(starts, body, strict=False)}
    libraries = [node for node in body if _imports_library(node, "".join(lines[spans[node]]))]
    imports = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom)) and node not in libraries]
    kept = [*body[: ast.get_docstring(ast.Module(body, [])) is not None], *imports]
    kept += [node for node in body if isinstance(node, ast.ClassDef) and node.decorator_list] if libraries else body
    moved = [node for node in body if node not in kept]
    names = set().union(*map(_bound, moved))
    for node in kept:
        if isinstance(node, ast.ClassDef) and moved:
            _import_in_methods(node, names, f"{package}.kernels", file, lines)
    if "moereg_api" not in set().union(*map(_bound, body)):
        lines[_end(imports[-1]) - 1] += _API
    texts = {node: "".join(lines[span]) for node, span in spans.items()}
    blank = {node: text[: len(text) - len(text.lstrip("\n"))] for node, text in texts.items()}
    backend = "".join(texts[node] if node in kept else blank[node] for node in body)
    modules = {"backend.py": re.sub(r"\n{4,}", "\n\n\n", backend)}
    if moved:
        read = _read(*moved) | {"annotations"}
        copied = (ast.unparse(node) + "\n" for node in imports if _bound(node) & read)
        head = f'"""What the methods of `{package}.backend` run."""\n\n'
        modules["kernels.py"] = head + "".join([*copied, *(texts[node] for node in moved)])
    return modules


def _import_in_methods(node: ast.ClassDef, names: set[str], module: str, file: str, lines: list[str]) -> None:
    """Lets the methods of a class import what they read."""
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    at_once = [each for each in node.body if each not in methods]
    at_once += [part for each in methods for part in (*each.decorator_list, each.args)]
    if found := sorted(_read(*node.decorator_list, *node.bases, *at_once) & names):
        raise UsageError(
            "--from makes a plugin, which is chosen before kernel libraries are imported: of what stands beside a class, "
            f"its methods alone may read, got {', '.join(found)} in {node.name} of {shown(file)}; write it into the class"
        )
    for method in methods:
        if used := sorted(_read(*method.body) & names):
            first = method.body[0]
            text = f"{' ' * first.col_offset}from {module} import {', '.join(used)}\n\n"
            if ast.get_docstring(method) is None:
                lines[first.lineno - 1] = text + lines[first.lineno - 1]
            else:
                lines[_end(first) - 1] += text
    if "device_types" not in {method.name for method in methods}:
        lines[_end(node) - 1] += _DEVICE_TYPES


def _end(node: ast.stmt) -> int:
    assert node.end_lineno is not None
    return node.end_lineno


def _imports_library(node: ast.stmt, text: str) -> bool:
    found = re.findall(r"^\s*(?:import|from)\s+(\w+)", text, re.MULTILINE)
    return not isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not KERNEL_LIBRARIES.isdisjoint(found)


def _bound(node: ast.stmt) -> set[str]:
    """Names that a statement of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    stored = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return stored | {(each.asname or each.name).partition(".")[0] for each in ast.walk(node) if isinstance(each, ast.alias)}


def _read(*nodes: ast.AST) -> set[str]:
    found = (each for node in nodes for each in ast.walk(node))
    return {each.id for each in found if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
