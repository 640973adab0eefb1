"""Makes the modules of a plugin out of one file that registers a backend.

Every process that chooses imports `backend.py`. So what needs a kernel library when it is imported moves to
`kernels.py`, and the methods of classes import it when they run.
"""

from __future__ import annotations

import ast
import re
import textwrap
from typing import Final

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


def plugin_modules(source: str, name: str, package: str) -> dict[str, str]:
    """The text of `backend.py`, and of `kernels.py` if the file imports kernel libraries at its top.

    Raises:
        SyntaxError: The source is not Python.
        ValueError: It does not register that backend alone, or a class needs a kernel library outside of its methods.
    """
    body, lines = ast.parse(source).body, [f"{line}\n" for line in source.rstrip().split("\n")]
    found = {*re.findall(r"register_moe_backend\W+(?:name\s*=\s*)?[\"'](\w+)", source)}
    used = {getattr(each, "attr", getattr(each, "id", "")) for node in body for each in ast.walk(node)}
    if found - {name} or "register_moe_backend" not in used:
        others = ", ".join(sorted(map(repr, found))) or "none"
        raise ValueError(f"it must register {name!r} alone, got {others}; name the plugin like the backend")
    # A statement's lines include the comments above it, and the last one's those at the end.
    ends = [*(node.end_lineno or 0 for node in body[:-1]), len(lines)]
    spans = {node: slice(*span) for node, span in zip(body, zip([0, *ends], ends, strict=False), strict=True)}
    moved = libraries = [node for node in body if _libraries(node)]
    names = set[str]()
    while (bound := set[str]().union(*map(_bound, moved))) != names:
        names = bound
        moved = [node for node in body if node in libraries or _read_at_once(node) & names]
    kept = [node for node in body if node not in moved]
    for node in (*kept, *moved):
        if isinstance(node, ast.ClassDef) and moved:
            _import_in_methods(node, names, f"{package}.kernels", lines, "triton" in _libraries(*libraries))
    imports = [node for node in kept if isinstance(node, (ast.Import, ast.ImportFrom))]
    own = set[str]().union(*(_bound(node) for node in kept if node not in imports))
    if "moereg_api" not in own:
        lines[spans[(imports or kept)[-1]].stop - 1] += _API
    texts = {node: "".join(lines[span]) for node, span in spans.items()}
    backend = (texts[node] if node in kept else "\n" * texts[node].startswith("\n") for node in body)
    modules = {"backend.py": re.sub(r"\n{4,}", "\n\n\n", "".join(backend))}
    if moved:
        read = _read(*moved)
        head = [f'"""What the methods of `{package}.backend` run."""\n']
        head += [ast.unparse(node) for node in imports if _bound(node) & (read | {"annotations"})]
        head += [f"from {package}.backend import {', '.join(sorted(read & own))}\n"] if read & own else []
        modules["kernels.py"] = "\n".join([*head, "".join(texts[node] for node in moved)])
    return modules


def _import_in_methods(node: ast.ClassDef, names: set[str], module: str, lines: list[str], is_triton: bool) -> None:
    """Lets the methods of a class import what they read, and the CPU run it in Triton's interpreter if it is Triton."""
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    if found := sorted(_read_at_once(node) & names):
        if "apply" not in methods:  # No experts class: it moves.
            return
        raise ValueError(
            "a plugin's class is made before kernel libraries are imported and can use them in its methods alone, got "
            f"{', '.join(found)} elsewhere in {node.name}; move it into a method"
        )
    # A parameter hides what the module calls alike.
    hidden = {
        method: {each.arg for each in ast.walk(method.args) if isinstance(each, ast.arg)} for method in methods.values()
    }
    used = {method: sorted((_read(*method.body) & names) - hidden[method]) for method in methods.values()}
    for method, found in used.items():
        first = method.body[0]
        if not found:
            continue
        if first.lineno == method.lineno:
            raise ValueError(
                f"a method that uses a kernel library needs lines of its own, got {node.name}.{method.name}"
            )
        text = f"{' ' * first.col_offset}from {module} import {', '.join(found)}\n\n"
        place = first.lineno - 1 if ast.get_docstring(method) is None else first.end_lineno or 0
        while lines[place - 1].lstrip().startswith("#"):
            place -= 1
        lines[place] = text + lines[place]
    if is_triton and any(used.values()) and "device_types" not in methods:
        lines[(node.end_lineno or 0) - 1] += textwrap.indent(_DEVICE_TYPES, " " * node.body[0].col_offset)


def _read_at_once(node: ast.stmt) -> set[str]:
    """Names that a statement needs where it stands: of a class not what its methods read, but of a function all."""
    if not isinstance(node, ast.ClassDef):
        return _read(node)
    parts: list[ast.AST] = [*node.decorator_list, *node.bases]
    for each in node.body:
        parts += [*each.decorator_list, each.args] if isinstance(each, ast.FunctionDef) else [each]
    return _read(*parts)


def _libraries(*nodes: ast.stmt) -> set[str]:
    """Kernel libraries that statements import as soon as they run."""
    at_once = [node for node in nodes if not isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    statements = [each for node in at_once for each in ast.walk(node)]
    found = {alias.name for each in statements if isinstance(each, ast.Import) for alias in each.names}
    found |= {each.module or "" for each in statements if isinstance(each, ast.ImportFrom)}
    return {name.partition(".")[0] for name in found} & {*KERNEL_LIBRARIES}


def _bound(node: ast.stmt) -> set[str]:
    """Names that a statement of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    found = list(ast.walk(node))
    defined = {(each.asname or each.name).partition(".")[0] for each in found if isinstance(each, ast.alias)}
    defined |= {each.name for each in found if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
    return defined | {each.id for each in found if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def _read(*nodes: ast.AST) -> set[str]:
    found = (each for node in nodes for each in ast.walk(node))
    return {each.id for each in found if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)}
