"""What backends pass to other people's functions is what these functions take."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest
from packaging.requirements import Requirement

import moereg
import tests.peers.contract as contract
from tests.peers.contract import ForeignCall, all_calls, parameters_of, unbound
from tests.support.toml import tomllib

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


PACKAGE = Path(moereg.__file__).parent
ROOT = PACKAGE.parent
CALLS = all_calls()
# Plugins of engines, such as vllm-moereg, have contracts of their own, which they read at each start.
SOURCES = sorted([*PACKAGE.glob("[bkp]*/**/*.py"), *ROOT.glob("plugins/moereg-*/src/**/*.py")])


INSTALLED = {distribution.name.lower().replace("_", "-") for distribution in importlib.metadata.distributions()}


def _skip_without(package: str) -> None:
    """For environments made by hand; `test_the_pinned_versions_are_installed` fails there."""
    if package not in INSTALLED:
        pytest.skip(f"{package} is not installed; make test-peers installs it")


def _written(target: str) -> ForeignCall | None:
    """The row about a name: its own before that of a module that it is in."""
    covering = [call for call in CALLS if call.covers(target)]
    return max(covering, key=lambda call: len(call.target), default=None)


each_source = pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))


@each_source
def test_every_foreign_name_is_written_down(path: Path) -> None:
    for use in foreign_uses(path):
        found = _written(use.target)
        assert found, f"{use.line} uses {use.target}; write it down in tests/peers/calls/"
        if use.call and use.target == found.target and found.parameters:
            assert not (fault := unbound(found.parameters, use.call)), f"{use.line} calls {use.target}: {fault}"


def test_a_name_is_written_down_once() -> None:
    assert len({call.target for call in CALLS}) == len(CALLS)


@pytest.mark.peers
@pytest.mark.parametrize("call", [call for call in CALLS if not call.published], ids=str)
def test_the_installed_package_has_it(call: ForeignCall) -> None:
    _skip_without(call.package)
    assert not call.faults(), "\n".join(call.faults())


@pytest.mark.peers
@each_source
def test_the_installed_package_has_every_name(path: Path) -> None:
    """Those below a module that is a language of its own, too."""
    for use in foreign_uses(path):
        call = _written(use.target)
        if call and not call.published:
            _skip_without(call.package)
            contract.resolve(use.target)


@pytest.mark.peers
def test_the_pinned_versions_are_installed() -> None:
    """Otherwise the tests above say nothing about the versions of constraints.txt."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    pinned = [Requirement(line) for line in lines if line]
    packages = {call.package for call in CALLS if not call.published}
    assert packages <= {one.name for one in pinned}
    assert packages <= INSTALLED
    others = [
        f"{one} is pinned, {found} installed"
        for one in pinned
        if one.name in packages and (one.marker is None or one.marker.evaluate())
        if not one.specifier.contains(found := importlib.metadata.version(one.name))
    ]
    assert not others


# The tests of the tests: what is planted here must be caught.


def _example(a, b=1, *rest, c, d=None, **others):  # type: ignore[no-untyped-def]
    """Has a parameter of each kind."""


EXAMPLE = ForeignCall(f"{__name__}._example", "(a, b=1, *rest, c, d=None, **others)", "torch", ("mine", "yours"))


def test_parameters_as_they_are_written() -> None:
    assert parameters_of(_example) == EXAMPLE.parameters
    assert not EXAMPLE.faults()


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        ("(a, b=1, *rest, e, d=None, **others)", "has no parameter 'e' any more"),
        ("(a, b=1, *rest, d=None, **others)", "has a new parameter keyword-only c"),
        ("(a, b=2, *rest, c, d=None, **others)", "has b=1 where b=2 is written down"),
        ("(a, b=1, c=None, d=None, **others)", "has keyword-only c where c=None is written down"),
        ("(b=1, a=None, *rest, c, d=None, **others)", "has a where a=None is written down"),
        ("(a, b=1, *rest, d=None, c, **others)", "has its parameters in another order"),
    ],
)
def test_another_signature_is_a_fault_that_names_the_backends(written: str, fault: str) -> None:
    faults = dataclasses.replace(EXAMPLE, parameters=written).faults()
    assert any(fault in text for text in faults), faults
    assert all("test_contracts._example, which mine and yours use, " in text for text in faults)


@pytest.mark.parametrize("target", [f"{__name__}.gone", "tests.peers.gone.function"])
def test_a_name_that_is_gone_is_a_fault(target: str) -> None:
    (fault,) = dataclasses.replace(EXAMPLE, target=target).faults()
    assert "is gone" in fault


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("f(1, c=2)", None),
        ("f(1, 2, 3, c=2, e=5)", None),
        ("f(*args, c=2)", None),
        ("f(1, **options)", None),
        ("f(1)", "missing a required"),
        ("f(c=2)", "missing a required argument: 'a'"),
        ("f(1, *args, a=2, **options)", "multiple values for argument 'a'"),
    ],
)
def test_a_call_that_does_not_fit_is_found(source: str, fault: str | None) -> None:
    call = ast.parse(source, mode="eval").body
    assert isinstance(call, ast.Call)
    found = unbound(EXAMPLE.parameters, call)
    assert found is None if fault is None else fault in str(found)


def test_uses_are_resolved_through_imports(tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text(
        "import quack.gemm_interface\n"
        "import flashinfer.fused_moe as moe\n"
        "from flashinfer.fused_moe import cutlass_fused_moe as run, unused\n"
        "from json import loads\n"
        "def f():\n"
        "    run(1, tp_size=2)\n"
        "    quack.gemm_interface.gemm(loads('1'))\n"
        "    moe.tables[run](0).rows\n"
        "    table = moe.table.rows\n"
        "    table.get(0)\n"
        "    jit, core = map(importlib.import_module, ('flashinfer.jit', 'flashinfer.core'))\n"
        "    jit.env(core.load)\n"
        "    return moe.ActivationType.Swiglu.value, functools.partial(run, 1)\n"
        "def g():\n"
        "    run = importlib.import_module('flashinfer.jit.other')\n"
        "    run.load()\n"
        "def h():\n"
        "    ops, other = vllm_module('_custom_ops'), fused_moe(1)\n"
        "    fused_moe('fused_moe').invoke(ops.moe_sum(1))\n"
        "def i():\n"
        "    name, ops = 'silu', torch.ops._C\n"
        "    ops.silu_and_mul(1, 2)\n"
    )
    uses = {(use.target, use.line, use.call is not None) for use in foreign_uses(path)}
    assert uses == {
        ("flashinfer.fused_moe.cutlass_fused_moe", "source.py:6", True),
        ("quack.gemm_interface.gemm", "source.py:7", True),
        ("flashinfer.fused_moe.tables", "source.py:8", False),
        ("flashinfer.fused_moe.cutlass_fused_moe", "source.py:8", False),
        ("flashinfer.fused_moe.table.rows.get", "source.py:10", True),
        ("flashinfer.jit.env", "source.py:12", True),
        ("flashinfer.core.load", "source.py:12", False),
        ("flashinfer.fused_moe.ActivationType.Swiglu.value", "source.py:13", False),
        ("flashinfer.fused_moe.cutlass_fused_moe", "source.py:13", True),
        ("flashinfer.jit.other.load", "source.py:16", True),
        ("vllm.model_executor.layers.fused_moe.fused_moe.invoke", "source.py:19", True),
        ("vllm._custom_ops.moe_sum", "source.py:19", True),
        ("vllm._C.silu_and_mul", "source.py:22", True),
        ("flashinfer.fused_moe.unused", "source.py:1", False),
    }


def test_the_libraries_are_those_that_core_must_not_import() -> None:
    """Apart from triton and transformers, whose use is ours to test."""
    lint = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    banned = set(lint["flake8-tidy-imports"]["banned-module-level-imports"])
    assert banned - {"triton", "transformers"} <= set(FOREIGN)
