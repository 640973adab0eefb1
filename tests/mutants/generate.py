"""Generates faults from a module's syntax tree: small edits that leave it valid and change what it does.

The operators are kinds of mistakes that tests are known to miss: a condition or an element dropped, a limit moved, a
collection cut to its first element. Swapped tensors are not among them: a comparison with a reference catches those.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import Final

from tests.mutants.mutant import Mutant

_OPPOSITE: Final = {"any": "all", "all": "any", "combinations": "pairwise", "pairwise": "combinations"}
_STRICT: Final = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_NEGATED: Final = {ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt}
_ARITHMETIC: Final = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_COLLECTIONS: Final = ("frozenset", "isinstance", "list", "max", "min", "set", "sorted", "startswith", "tuple")
"""Calls whose argument may lose an element; what a tuple with a fixed number of elements loses, any test sees."""
_COPIES: Final = ("clone", "contiguous", "lower", "removeprefix", "removesuffix", "sorted", "strip")
"""Calls that often return what they were called on."""

Edit = tuple[str, ast.expr, ast.expr]
"""What is wrong, the expression, and what stands in its place."""


def faults_in(path: str, source: str) -> Iterator[Mutant]:
    """The faults of a module, in the order of its lines, without the tests that reach them.

    Left out: annotations, assertions, texts of errors, and what only a type checker sees.

    Args:
        path: The module, relative to the root of the tree.
        source: Its text.
    """
    offsets = [0]
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    text = source.encode()
    for what, old, new in _edits(ast.parse(source)):
        start, end = (
            len(text[: offsets[line - 1] + column].decode())
            for line, column in ((old.lineno, old.col_offset), (old.end_lineno or 0, old.end_col_offset or 0))
        )
        yield Mutant(what, path, old.lineno, start, source[start:end], f"({ast.unparse(new)})")


def _edits(tree: ast.AST) -> Iterator[Edit]:
    """Edits of a tree, outermost first."""
    for child in ast.iter_child_nodes(tree):
        # Before Python 3.12, what is in an f-string does not know its place.
        if isinstance(child, (ast.Assert, ast.JoinedStr, ast.Raise)) or _is_for_type_checkers(child):
            continue
        if isinstance(child, ast.AnnAssign):
            yield from _edits(ast.Expr(child.value)) if child.value else ()
            continue
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            for part in (*child.args.defaults, *(each for each in child.args.kw_defaults if each is not None)):
                yield from _edits(ast.Expr(part))
            body = child.body if isinstance(child.body, list) else [child.body]
            yield from _edits(ast.Module(body, []))  # type: ignore[arg-type, list-item]
            continue
        yield from _edits_of(child)
        yield from _edits(child)


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _edits_of(node: ast.AST) -> Iterator[Edit]:
    match node:
        case ast.BoolOp():
            for place, operand in enumerate(node.values):
                rest = [*node.values[:place], *node.values[place + 1 :]]
                yield f"no `{_short(operand)}`", node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        case ast.Compare(ops=[operator], comparators=[right]) if type(operator) in _STRICT:
            yield "the boundary moved", node, ast.Compare(node.left, [_STRICT[type(operator)]()], [right])
            if isinstance(right, ast.Constant) and type(right.value) is int:
                yield "a limit of one more", node, ast.Compare(node.left, [operator], [ast.Constant(right.value + 1)])
        case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[ast.Tuple() | ast.List() | ast.Set() as choices]):
            yield from _shorter(choices)
        case ast.UnaryOp(op=ast.Not(), operand=ast.Compare(ops=[operator]) as compared) if type(operator) in _NEGATED:
            negated = ast.Compare(compared.left, [_NEGATED[type(operator)]()], compared.comparators)
            yield "NaN passes", node, negated
        case ast.Call():
            yield from _edits_of_call(node)
        case ast.For() | ast.comprehension():
            if isinstance(node.iter, (ast.Tuple, ast.List, ast.Set)):
                yield from _shorter(node.iter)
            first = ast.parse(f"list({ast.unparse(node.iter)})[:1]", mode="eval").body
            yield "only the first is looked at", node.iter, first
        case ast.With():
            for item in node.items:
                if item.optional_vars is None:
                    nothing = ast.parse("__import__('contextlib').nullcontext()", mode="eval").body
                    yield f"not within `{_short(item.context_expr)}`", item.context_expr, nothing
        case ast.If() | ast.IfExp():
            yield "the condition never holds", node.test, ast.Constant(False)
        case ast.BinOp(op=operator) if isinstance(operator, _ARITHMETIC) and not _is_text(node):
            yield f"no `{_short(node.right)}`", node, node.left
        case ast.Subscript(slice=ast.Slice(), ctx=ast.Load()):
            yield "all of it, not a slice", node, node.value
        case ast.Starred(value=value, ctx=ast.Load()):
            yield "only the first is unpacked", value, ast.parse(f"list({ast.unparse(value)})[:1]", mode="eval").body
        case _:
            pass


def _edits_of_call(call: ast.Call) -> Iterator[Edit]:
    function = call.func
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    if name in _OPPOSITE and call.args:
        opposite = copy.deepcopy(function)
        if isinstance(opposite, ast.Name):
            opposite.id = _OPPOSITE[name]
        elif isinstance(opposite, ast.Attribute):
            opposite.attr = _OPPOSITE[name]
        yield f"{_OPPOSITE[name]}, not {name}", call, ast.Call(opposite, call.args[:1], [])
    if name in _COPIES and isinstance(function, ast.Attribute):
        yield f"no .{name}()", call, function.value
    elif name in _COPIES and len(call.args) == 1:
        yield f"no {name}()", call, ast.parse(f"list({ast.unparse(call.args[0])})", mode="eval").body
    if name in _COLLECTIONS:
        for argument in call.args:
            if isinstance(argument, (ast.Tuple, ast.List, ast.Set)):
                yield from _shorter(argument)


def _shorter(collection: ast.Tuple | ast.List | ast.Set) -> Iterator[Edit]:
    for place, element in enumerate(collection.elts):
        rest = [*collection.elts[:place], *collection.elts[place + 1 :]]
        shorter = copy.copy(collection)
        shorter.elts = rest
        if rest:
            yield f"no `{_short(element)}`", collection, shorter


def _is_text(node: ast.BinOp) -> bool:
    """Whether texts are put together or formatted."""
    return any(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in ast.walk(node)
    )


def _short(node: ast.expr) -> str:
    text = ast.unparse(node)
    return text if len(text) <= 60 else f"{text[:57]}..."
