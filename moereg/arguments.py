"""Checks callers' arguments, in one wording: rule, value found, cure. The name may be a path into a mapping.

A value that is not as a check's first line says is an `ArgumentError`, an unknown name an `UnknownNameError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import torch

from moereg.errors import ArgumentError, MoeregError, UnknownNameError, shown, unknown_name_message

T = TypeVar("T")

_LARGEST: Final = 2**63 - 1
"""The largest size in torch."""


def check_count(name: str, value: object, minimum: int = 1) -> int:
    """A whole number, at least the minimum and at most 64 bits like a tensor's size; not a bool."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentError(f"{name} must be an integer, got {shown(value)}")
    if value < minimum:
        raise ArgumentError(f"{name} must be at least {minimum}, got {shown(value)}")
    if value > _LARGEST:
        raise ArgumentError(f"{name} must be at most 2**63 - 1, the largest size of a tensor, got {shown(value)}")
    return value


def check_number(name: str, value: object) -> float:
    """A finite number; not a bool."""
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
    """True or False, not 1 or "false"."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {shown(value)}")
    return value


def check_text(name: str, value: object) -> str:
    """A text that prints on one line, without control characters."""
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
    """An instance of a class; `cure` says where to get one."""
    if not isinstance(value, kind):
        # "An" before a vowel sound.
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        raise ArgumentError(f"{name} must be {article} {kind.__name__}, got {shown(value)}; {cure}")


def check_device(name: str, value: object) -> torch.device:
    """A device or its name, even one that the machine lacks."""
    try:
        return torch.device(value)  # type: ignore[call-overload,no-any-return]
    except (RuntimeError, TypeError, ValueError):
        raise ArgumentError(f"{name} must be one that torch knows, such as cpu or cuda:0, got {shown(value)}") from None


def check_list(name: str, value: object, check: Callable[[str, object], T]) -> tuple[T, ...]:
    """A list or tuple of values that pass a check."""
    if not isinstance(value, (list, tuple)):
        raise ArgumentError(f"{name} must be a list, got {shown(value)}")
    return tuple(check(f"{name}[{place}]", item) for place, item in enumerate(value))


def check_mapping(name: str, value: object) -> Mapping[str, Any]:
    """A mapping with text keys."""
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name} must be an object, got {shown(value)}")
    for key in value:
        if not isinstance(key, str):
            raise ArgumentError(f"{name} must have names for keys, got {shown(key)}")
    return value


def within(path: str, make: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    """Calls a function, and puts the part of a larger value that it was about before its MoeregError."""
    try:
        return make(*arguments, **keywords)
    except MoeregError as error:
        raise type(error)(f"{path}: {error}") from error
