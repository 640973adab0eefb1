"""Entries of a checkpoint's config files, read strictly.

Nothing is converted: publishers do not write "false" or 1.9 where a flag or a count belongs, and a guessed value would
give wrong numbers without an error. Bounds are at least ten times what published models have, so that a small file
cannot cost hours or all memory.

Functions take the parsed file and an entry's name. An entry that is missing, of another type or out of range is a
`CheckpointError`; null counts as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

from moereg.errors import CheckpointError, shown

T = TypeVar("T")

LARGEST_SIZE: Final = 2**20
"""Largest hidden or intermediate size; published ones are up to 53,248."""
MOST_EXPERTS: Final = 20_480
"""Most experts of a layer; published ones have up to 2,048."""
MOST_LAYERS: Final = 5_000
"""Most layers of a model; published ones have up to 200."""
# Largest scalar of routing and activation; published ones are up to 16.
_LARGEST_NUMBER: Final = 1e6

_CURE: Final = "take the file from the model's publisher"


def read_count(
    config: Mapping[str, Any], *names: str, default: int | None = None, minimum: int = 1, maximum: int = LARGEST_SIZE
) -> int:
    """Reads a whole number, required if it has no default.

    `names` are spellings of the entry: releases and re-saved files use different ones.
    """
    rule = f"be a whole number of at least {minimum}"
    value = _read(config, names, default, lambda found: type(found) is int and found >= minimum, rule)
    return _read(config, names, value, lambda found: found <= maximum, f"be at most {maximum}")


def read_number(config: Mapping[str, Any], *names: str, default: float | None = None) -> float:
    """A finite number; arguments as in `read_count`."""

    def is_number(found: Any) -> bool:
        is_real = isinstance(found, (int, float)) and not isinstance(found, bool)
        return is_real and -_LARGEST_NUMBER <= found <= _LARGEST_NUMBER

    return float(_read(config, names, default, is_number, f"be a number of at most {_LARGEST_NUMBER:.0f} either way"))


def read_flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false, and neither "false" nor 0."""
    return _read(config, (name,), default, lambda found: type(found) is bool, "be true or false")


def read_choice(config: Mapping[str, Any], name: str, choices: Sequence[Any], default: Any, cure: str = _CURE) -> Any:
    """Reads an entry that has a closed set of values. They count with their type: 1 is not True."""
    return _read(config, (name,), default, lambda found: is_one_of(found, choices), f"be in {list(choices)}", cure)


def is_one_of(value: Any, choices: Iterable[Any]) -> bool:
    """Whether a value is among the choices, with its type and those of its items: 1 is not True, and 4.0 is not 4."""
    return any(_is_same(value, choice) for choice in choices)


def _is_same(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    if isinstance(value, list):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return bool(value == other)


def read_indices(config: Mapping[str, Any], name: str) -> frozenset[int] | None:
    """An optional list of indices of layers, no more than a model has."""

    def is_indices(found: Any) -> bool:
        is_list = isinstance(found, list) and len(found) <= MOST_LAYERS
        return is_list and all(type(item) is int and 0 <= item < MOST_LAYERS for item in found)

    rule = f"be a list of layer indices below {MOST_LAYERS}"
    return None if config.get(name) is None else frozenset(_read(config, (name,), None, is_indices, rule))


def read_name(config: Mapping[str, Any], name: str) -> str | None:
    """An optional text."""
    if config.get(name) is None:
        return None
    return _read(config, (name,), "", lambda found: isinstance(found, str), "be a name")


def read_names(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """An optional list of names."""

    def is_names(found: object) -> bool:
        return isinstance(found, (list, tuple)) and all(isinstance(item, str) for item in found)

    return tuple(_read(config, (name,), (), is_names, "be a list of module names"))


def read_object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An optional JSON object; empty where it is absent."""
    return _read(config, (name,), {}, lambda found: isinstance(found, dict), "be an object")


def read_objects(config: Mapping[str, Any], name: str) -> Mapping[str, Mapping[str, Any]]:
    """An optional JSON object of objects; empty where it is absent."""

    def is_objects(found: object) -> bool:
        return isinstance(found, dict) and all(isinstance(item, dict) for item in found.values())

    return _read(config, (name,), {}, is_objects, "be an object of objects")


def _read(
    config: Mapping[str, Any],
    names: Sequence[str],
    default: T | None,
    is_valid: Callable[[T], bool],
    rule: str,
    cure: str = _CURE,
) -> T:
    """The entry by the first of its names that is there, else the default; either has to be valid."""
    name = next((name for name in names if config.get(name) is not None), None)
    value: Any = default if name is None else config[name]
    if is_valid(value):
        valid: T = value
        return valid
    # The quantization config has no type of its own.
    model = f" of model type {shown(config['model_type'])}" if "model_type" in config else ""
    found = "none" if value is None else shown(value)
    raise CheckpointError(f"{name or ' or '.join(names)}{model} must {rule}, got {found}; {cure}")
