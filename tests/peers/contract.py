"""Foreign functions as the backends know them: their parameters, written down, and who passes what.

A `ForeignCall` says the parameters of one function of another project. Two tests in `test_contracts.py` read it:

- everywhere, that the backend's source passes only what is written down, by reading the source;
- where the library is installed (`make test-peers`), that its function has exactly these parameters.

So an upgrade that renames an argument fails in a test that names the backend, and not in a user's first call. To add
one, write it into the backend's table in `tests/peers/calls/`, below a line that says the package and the backends:

    [flashinfer-python] flashinfer_cutlass
    flashinfer.fused_moe.cutlass_fused_moe(input, token_selected_experts, ..., *, backend='cutlass')

Where a test runs a backend on an imitation of its library, `stand_in` makes the imitation as strict as the row.
`python -m tests.peers.contract flashinfer.fused_moe.cutlass_fused_moe` prints the row to paste.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import importlib.metadata
import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class ForeignCall:
    """One name of another project that backends use.

    Attributes:
        target: Where it is, dotted: a function, class, enum, or the overload of a torch operator.
        parameters: As Python writes them, without annotations, `self` or what is returned: `(a, *, b=None)`. The
            members of an enum are parameters, and their values the defaults. Empty for a value, and for a module that
            is a language of its own, such as `jax.numpy`: names below it only have to exist.
        package: Distribution that has it.
        backends: Those that use it, as they are registered.
        published: Project, version and file that the parameters were read from, where the package cannot be installed
            on a machine without its GPU. Empty where the tests ask the package itself.
    """

    target: str
    parameters: str
    package: str
    backends: tuple[str, ...]
    published: str = ""

    def __str__(self) -> str:
        return self.target

    def covers(self, target: str) -> bool:
        """Whether this is what is written down for a name: itself, a member of its enum, or a word of its language."""
        if target == self.target or not target.startswith(f"{self.target}."):
            return target == self.target
        member = target.removeprefix(f"{self.target}.").partition(".")[0]
        return not self.parameters or member in _by_name(self.parameters)

    def faults(self) -> list[str]:
        """What the installed package has otherwise; empty if nothing."""
        version = importlib.metadata.version(self.package)
        who = f"{self.package} {version}: {self.target}, which {' and '.join(self.backends)} use"
        try:
            has_it = resolve(self.target)
            found = parameters_of(has_it) if self.parameters else ""
        except (ImportError, AttributeError) as error:
            return [f"{who}, is gone: {error}"]
        wanted, has = _by_name(self.parameters), _by_name(found)
        faults = [f"{who}, has no parameter {name!r} any more" for name in wanted if name not in has]
        faults += [f"{who}, has a new parameter {has[name]}" for name in has if name not in wanted]
        faults += [
            f"{who}, has {has[name]} where {text} is written down"
            for name, text in wanted.items()
            if has.get(name, text) != text
        ]
        if not faults and list(wanted) != list(has):
            faults = [f"{who}, has its parameters in another order: {found}"]
        return faults


def all_calls() -> list[ForeignCall]:
    """Every `ForeignCall` of every table in `tests/peers/calls/`.

    `[package] backends`, and behind ` @ ` what it was published in, stand above the calls that they are of. Each is a
    target with its parameters in parentheses, if any; the lines that go on with it are indented. `#` begins a comment.
    """
    found = []
    for table in sorted((Path(__file__).parent / "calls").glob("*.txt")):
        for line in table.read_text(encoding="utf-8").replace("\n    ", " ").splitlines():
            if line.startswith("["):
                package, _, rest = line[1:].partition("] ")
                backends, _, published = rest.partition(" @ ")
            elif not line.startswith("#"):
                target, bracket, parameters = line.partition("(")
                found.append(ForeignCall(target, bracket + parameters, package, tuple(backends.split()), published))
    return found


def stand_in(target: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function for tests in place of a foreign one, which refuses what the foreign one would refuse.

    Reading the source shows no arguments that are collected in a dict first; with this, the calls of a test show them.

    Args:
        target: Of a `ForeignCall`.
        function: Called with what was passed, by name.
    """
    (parameters,) = (call.parameters for call in all_calls() if call.target == target)
    signature = inspect.Signature(list(_parsed(parameters).values()))

    def checked(*given: Any, **named: Any) -> Any:
        return function(**signature.bind(*given, **named).arguments)

    return checked


def unbound(parameters: str, call: ast.Call) -> str | None:
    """Why a call does not fit parameters, or None. Unpacked arguments (`*a`, `**b`) may be any.

    Args:
        parameters: As in `ForeignCall`.
        call: From the source.
    """
    signature = inspect.Signature(
        [
            parameter.replace(default=None) if parameter.default is not parameter.empty else parameter
            for parameter in _parsed(parameters).values()
        ]
    )
    unpacked = any(isinstance(value, ast.Starred) for value in call.args) or any(
        keyword.arg is None for keyword in call.keywords
    )
    positional = [value for value in call.args if not isinstance(value, ast.Starred)]
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
    try:
        (signature.bind_partial if unpacked else signature.bind)(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return None


def parameters_of(found: Any) -> str:
    """The parameters of a function, class, enum or overload of a torch operator, as `ForeignCall` writes them."""
    if schema := getattr(found, "_schema", None):
        parameters = [
            _parameter(
                argument.name,
                inspect.Parameter.KEYWORD_ONLY if argument.kwarg_only else inspect.Parameter.POSITIONAL_OR_KEYWORD,
                repr(argument.default_value) if argument.has_default_value() else None,
            )
            for argument in schema.arguments
        ]
    elif isinstance(found, type) and issubclass(found, enum.Enum):
        parameters = [
            _parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, repr(member.value))
            for name, member in found.__members__.items()
        ]
    else:
        parameters = [
            _parameter(value.name, value.kind, None if value.default is value.empty else _text(value.default))
            for value in inspect.signature(found).parameters.values()
        ]
    return _written(parameters)


class _Text:
    """A default by its text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _parameter(name: str, kind: Any, default: str | None) -> inspect.Parameter:
    return inspect.Parameter(name, kind, default=inspect.Parameter.empty if default is None else _Text(default))


def _written(parameters: list[inspect.Parameter]) -> str:
    return str(inspect.Signature(parameters))


def _text(default: Any) -> str:
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    if inspect.isroutine(default) or isinstance(default, type):
        return default.__name__
    text = repr(default)
    # A value whose text names where it lies in memory, or is no expression, differs from run to run.
    return type(default).__name__ if text.startswith("<") else text


def _parsed(parameters: str) -> dict[str, inspect.Parameter]:
    arguments = ast.parse(f"def f{parameters}: ...").body[0].args  # type: ignore[attr-defined]
    kinds = inspect.Parameter
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    found = [
        (node.arg, kinds.POSITIONAL_ONLY if i < len(arguments.posonlyargs) else kinds.POSITIONAL_OR_KEYWORD, default)
        for i, (node, default) in enumerate(zip(plain, defaults, strict=True))
    ]
    if arguments.vararg:
        found.append((arguments.vararg.arg, kinds.VAR_POSITIONAL, None))
    found += [
        (node.arg, kinds.KEYWORD_ONLY, default)
        for node, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        found.append((arguments.kwarg.arg, kinds.VAR_KEYWORD, None))
    return {
        name: _parameter(name, kind, None if default is None else ast.unparse(default)) for name, kind, default in found
    }


def _by_name(parameters: str) -> dict[str, str]:
    """Each parameter's name with its text, which tells a keyword-only one."""
    if not parameters:
        return {}
    return {
        name: f"{'keyword-only ' if value.kind is value.KEYWORD_ONLY else ''}{value}"
        for name, value in _parsed(parameters).items()
    }


def resolve(target: str) -> Any:
    """The object at a dotted name: the longest module that imports, then attributes.

    Raises:
        ImportError: No part of the name is a module, or a module fails to import.
        AttributeError: The module lacks the rest.
    """
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            # A module that is there and misses another one is broken, not absent.
            if length == 1 or error.name is None or not name.startswith(error.name):
                raise
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(target)


def _row(target: str) -> str:
    """The lines about an installed function; its backends are to be filled in."""
    found = resolve(target)
    parameters = parameters_of(found) if callable(found) or hasattr(found, "_schema") else ""
    package = importlib.metadata.packages_distributions()[target.partition(".")[0]][0]
    lines = textwrap.wrap(target + parameters, 120, subsequent_indent="    ", break_long_words=False)
    return "\n".join([f"[{package}] BACKENDS", *lines])


if __name__ == "__main__":
    print("\n".join(map(_row, sys.argv[1:])))
