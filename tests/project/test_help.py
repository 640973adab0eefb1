"""What `help` shows of every public name: its own text, every parameter, and examples that run."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import moereg
from tests.support.snippets import write_layers

PUBLIC: Final = sorted(set(moereg.__all__) - {"__version__"})


# Whose examples are in another's text.
ELSEWHERE: Final = {"ExpertWeights": "make_kernel", "MoEKernel": "make_kernel", "Selection": "select_backend"}


def is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, (Exception, Warning))


def members(value: Any) -> Iterator[tuple[str, Any]]:
    """The value, and the functions that its class defines under public names, calling it included."""
    yield "", value
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        if name.startswith("_") and name != "__call__":
            continue
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        function = getattr(function, "func", function)  # functools.cached_property
        if inspect.isfunction(function):
            yield name, function


def unsaid(value: Any) -> list[str]:
    """Parameters that the text does not name under Args or Attributes."""
    text = value.__doc__ or ""
    _, _, sections = text.partition("Args:") if "Args:" in text else text.partition("Attributes:")
    said = set(re.findall(r"[*\w]+", " ".join(re.findall(r"^\s+([\w*, ]+):", sections, re.MULTILINE))))
    names = [name for name in inspect.signature(value).parameters if name not in ("self", "cls")]
    return [name for name in names if not said & {name, f"*{name}", f"**{name}"}]


@pytest.mark.parametrize("name", PUBLIC)
def test_help_says_what_it_is_and_what_it_takes(name: str) -> None:
    value = getattr(moereg, name)
    for member, function in members(value):
        where = f"{name}.{member}" if member else name
        text = inspect.getdoc(function) if member else value.__doc__
        assert text, f"{where} has no text"
        assert not text.startswith(f"{name}("), f"{where} has the text that dataclasses make"
        if "Make one with" in text:  # Its constructor is not for users.
            continue
        # A member with one argument says it in its sentence.
        if not member and not is_error(value):
            assert not unsaid(value), f"{where} does not say what {unsaid(value)} are"
        elif inspect.isfunction(function) and len(inspect.signature(function).parameters) > 2:
            assert not unsaid(function), f"{where} does not say what {unsaid(function)} are"


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(recurse=False)
    return [
        found
        for name in PUBLIC
        for member, function in members(getattr(moereg, name))
        for found in finder.find(function, f"{name}.{member}".rstrip("."), globs={})
        if found.examples
    ]


@pytest.mark.parametrize("example", examples(), ids=lambda example: str(example.name))
def test_an_example_shows_what_it_says(
    example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolated_registry: object
) -> None:
    write_layers(tmp_path / "path" / "to" / "checkpoint")
    monkeypatch.chdir(tmp_path)
    example.globs = {"moereg": moereg}
    report: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(
        example, out=report.append
    )
    assert not failed, "".join(report)


def test_what_one_works_with_has_an_example() -> None:
    shown = {example.name.partition(".")[0] for example in examples()}
    assert {name for name in PUBLIC if not is_error(getattr(moereg, name))} - set(ELSEWHERE) <= shown
    for name, where in ELSEWHERE.items():
        assert re.search(rf"\b{name}\b", getattr(moereg, where).__doc__.partition("Example:")[2]), name


def test_help_of_the_package_names_everything() -> None:
    text = moereg.__doc__ or ""
    assert not [name for name in PUBLIC if f"`{name}`" not in text]
