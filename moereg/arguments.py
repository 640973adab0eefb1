"""Checks of what callers pass, in one wording: rule, value found, cure. The name may be a path into a mapping.

What is not as a check's first line says is an `ArgumentError`, and a name that is not known an `UnknownNameError`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, ParamSpec, TypeVar

import torch

from moereg.errors import ArgumentError, MoeregError, UnknownNameError, shown, unknown_name_message

P = ParamSpec("P")
T = TypeVar("T")

_LARGEST: Final = 2**63 - 1
"""The largest size in torch."""


def check_count(name: str, value: object, minimum: int = 1) -> int:
    """A whole number, from the minimum on, that a tensor's size could be: in 64 bits; True is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"{name} must be an integer, got {shown(value)}")
    if value < minimum:
        raise ArgumentError(f"{name} must be at least {minimum}, got {shown(value)}")
    if value > _LARGEST:
        raise ArgumentError(f"{name} must be at most 2**63 - 1, the largest size of a tensor, got {shown(value)}")
    return value


def check_number(name: str, value: object) -> float:
    """A finite number; True is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentError(f"{name} must be a finite number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ArgumentError(f"{name} must be a finite number, got {shown(value)}")
    return number


def check_flag(name: str, value: object) -> bool:
    """True or False; 1 and "false" are neither."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {shown(value)}")
    return value


def check_text(name: str, value: object) -> str:
    """A text that can be printed on a line, without control characters."""
    if not isinstance(value, str):
        raise ArgumentError(f"{name} must be a text, got {shown(value)}")
    if not value.isprintable():
        raise ArgumentError(f"{name} must be printable on one line, got {shown(value)}")
    return value


def check_one_of(name: str, value: object, known: tuple[str, ...]) -> str:
    """One of the known names."""
    if not isinstance(value, str):
        raise ArgumentError(f"{name} must be a text, one of {', '.join(known)}, got {shown(value)}")
    if value not in known:
        raise UnknownNameError(unknown_name_message(name, value, known))
    return value


def check_instance(name: str, value: object, kind: type[object], cure: str) -> None:
    """A value of a class; `cure` says where to get one."""
    if not isinstance(value, kind):
        # "An" for the classes that start with a vowel's sound.
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        raise ArgumentError(f"{name} must be {article} {kind.__name__}, got {shown(value)}; {cure}")


def takes(**kinds: tuple[type[object], str]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Checks arguments of a function with `check_instance` before it runs. None passes where it is the default.

    Args:
        **kinds: For each argument to check, its class and where to get one.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(function).parameters
        places = {name: place for place, name in enumerate(parameters)}
        optional = {name for name in kinds if parameters[name].default is None}

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for name, (kind, cure) in kinds.items():
                if name in kwargs:
                    value = kwargs[name]
                elif places[name] < len(args):
                    value = args[places[name]]
                else:
                    continue  # Left out: Python says so, or the default serves.
                if not (value is None and name in optional):
                    check_instance(name, value, kind, cure)
            return function(*args, **kwargs)

        return checked

    return decorate


def check_device(name: str, value: object) -> torch.device:
    """A device or its name; the machine need not have it."""
    try:
        return torch.device(value)  # type: ignore[call-overload,no-any-return]
    except (RuntimeError, TypeError, ValueError):
        raise ArgumentError(f"{name} must be one that torch knows, such as cpu or cuda:0, got {shown(value)}") from None


def check_optional(check: Callable[[str, object], T]) -> Callable[[str, object], T | None]:
    """The check of a value that may be None."""
    return lambda name, value: None if value is None else check(name, value)


def check_list(name: str, value: object, check: Callable[[str, object], T]) -> tuple[T, ...]:
    """A list, or tuple, of values that pass a check."""
    if not isinstance(value, (list, tuple)):
        raise ArgumentError(f"{name} must be a list, got {shown(value)}")
    return tuple(check(f"{name}[{place}]", item) for place, item in enumerate(value))


def check_mapping(name: str, value: object) -> Mapping[str, Any]:
    """A mapping with texts for keys."""
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name} must be an object, got {shown(value)}")
    for key in value:
        if not isinstance(key, str):
            raise ArgumentError(f"{name} must have names for keys, got {shown(key)}")
    return value


def check_field(name: str, values: Mapping[str, Any], field: str, check: Callable[[str, object], T]) -> T:
    """A field that a mapping must have, checked under the path of both; the mapping's own name may be empty."""
    path = f"{name}.{field}" if name else field
    if field not in values:
        raise ArgumentError(f"{path} is required, got an object with {shown(sorted(values))}")
    return check(path, values[field])


def within(path: str, make: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """Calls a function, and says in its error which part of a larger value it was about.

    Raises:
        MoeregError: Of the function's own kind, the path first.
    """
    try:
        return make(*arguments, **keywords)
    except MoeregError as error:
        raise type(error)(f"{path}: {error}") from error
