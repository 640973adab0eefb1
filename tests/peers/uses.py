"""Foreign names that source code uses, read without running it."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

FOREIGN: Final = (
    *("aiter", "cuda", "cutlass", "deep_ep", "flashinfer", "humming", "jax", "quack", "sonicmoe", "tvm_ffi", "vllm"),
)
"""Import names of libraries whose functions have to be written down where a backend uses them."""

LOADERS: Final = {"vllm_module": "vllm.", "fused_moe": "vllm.model_executor.layers.fused_moe."}
"""Functions of the wheels that import a module by its name below a package."""

OPERATORS: Final = {"torch.ops._C": "vllm._C"}
"""Namespaces of torch's operators, with the module that fills them."""

LOADED: Final = ("vllm",)


@dataclasses.dataclass(frozen=True)
class Passed:
    """A use of a foreign name in the source of a backend.

    Attributes:
        target: Dotted name, as far as the source says.
        line: `file:line`.
        call: The call, or None where the name is only read or handed on. `functools.partial(name, a)` is a call that
            leaves out the rest.
    """

    target: str
    line: str
    call: ast.Call | None


def foreign_uses(path: Path, libraries: Iterable[str] = FOREIGN) -> Iterator[Passed]:
    """Foreign names that a file uses, resolved through its imports.

    Args:
        path: Python source.
        libraries: Import names that count as foreign.

    Yields:
        Each longest dotted name once a place: `from quack import gemm_interface` and `gemm_interface.gemm(a, b)` give
        `quack.gemm_interface.gemm` with its call. An import at the top whose name is never used counts as read.
    """
    tree = _Loaded().visit(ast.parse(path.read_text()))
    roots = frozenset(libraries)
    functions, outside = _scopes(tree)
    shared = _bindings(outside, roots, {})
    own = {id(function): _bindings(list(ast.walk(function)), roots, shared) for function in functions}
    used: set[str] = set()
    for nodes, bound in [(outside, shared), *((list(ast.walk(one)), shared | own[id(one)]) for one in functions)]:
        for name, use in _uses(nodes, bound, path.name):
            used.add(name)
            yield use
    for name, target in sorted(shared.items()):
        if name not in used:
            yield Passed(target, f"{path.name}:1", None)


def _scopes(tree: ast.AST) -> tuple[list[ast.AST], list[ast.AST]]:
    """The outermost functions of a file, and every node outside of them."""
    functions: list[ast.AST] = []
    outside: list[ast.AST] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            functions.append(node)
            # Decorators and defaults are read outside.
            waiting += [*node.decorator_list, *node.args.defaults, *filter(None, node.args.kw_defaults)]
        else:
            outside.append(node)
            waiting += ast.iter_child_nodes(node)
    return functions, outside


class _Loaded(ast.NodeTransformer):
    """Writes `vllm_module("a.b")` as the name `vllm.a.b`, and a namespace of operators as its module."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        module = OPERATORS.get(ast.unparse(node))
        return node if module is None else _moved(ast.parse(module, mode="eval").body, node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        prefix = LOADERS.get(ast.unparse(node.func))
        match node.args:
            case [ast.Constant(value=str(name))] if prefix and not node.keywords:
                return _moved(ast.parse(prefix + name, mode="eval").body, node)
        return node


def _moved(name: ast.expr, to: ast.expr) -> ast.expr:
    for part in ast.walk(name):
        ast.copy_location(part, to)
    return name


def _bindings(nodes: Iterable[ast.AST], roots: frozenset[str], outer: dict[str, str]) -> dict[str, str]:
    """Names that imports, and assignments of foreign names, bind; with what they mean."""
    bound: dict[str, str] = {}
    assigned: list[tuple[str, str]] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                if root in roots:
                    bound[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in roots and not node.level:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Assign) and "import_module" in ast.unparse(node.value):
            bound |= zip(_assigned(node.targets[0]), _modules(node.value, roots), strict=False)
        elif isinstance(node, ast.Assign):
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            assigned += zip(_assigned(node.targets[0]), map(ast.unparse, values), strict=False)
    for name, text in assigned:
        base, _, attributes = text.partition(".")
        target = (outer | bound).get(base) or (base if base in LOADED else None)
        if target and re.fullmatch(r"[\w.]*", attributes):
            bound[name] = f"{target}.{attributes}".rstrip(".")
    return bound


def _uses(nodes: list[ast.AST], bound: dict[str, str], file: str) -> Iterator[tuple[str, Passed]]:
    """Uses of bound names, each with that name."""
    calls: dict[int, ast.Call] = {}
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "functools.partial":
            rest = ast.Starred(ast.Name("rest"))
            calls[id(node.args[0])] = ast.Call(
                node.args[0], [*node.args[1:], rest], [*node.keywords, ast.keyword(None, rest.value)]
            )
        elif isinstance(node, ast.Call):
            calls[id(node.func)] = node
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    # What is only given another name is used under that one.
    for node in nodes:
        if isinstance(node, ast.Assign) and _assigned(node.targets[0]):
            inner |= {id(value) for value in (node.value.elts if isinstance(node.value, ast.Tuple) else [node.value])}
    for node in nodes:
        if not isinstance(node, (ast.Name, ast.Attribute)) or id(node) in inner or isinstance(node.ctx, ast.Store):
            continue
        text = ast.unparse(node)
        name = text.partition(".")[0]
        attributes = text.removeprefix(name).removeprefix(".")
        if (name in bound or name in LOADED) and re.fullmatch(r"[\w.]*", attributes):
            target = f"{bound.get(name, name)}.{attributes}".rstrip(".")
            yield name, Passed(target, f"{file}:{node.lineno}", calls.get(id(node)))


def _assigned(target: ast.expr) -> list[str]:
    return [
        node.id for node in (target.elts if isinstance(target, ast.Tuple) else [target]) if isinstance(node, ast.Name)
    ]


def _modules(value: ast.expr, roots: frozenset[str]) -> list[str]:
    """Names of foreign modules that stand in an expression as texts, in order."""
    texts = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text for text in texts if re.fullmatch(r"[\w.]+", text) and text.partition(".")[0] in roots]
