"""Entries of a checkpoint's config files, read strictly.

Nothing is converted: publishers do not write "false" or 1.9 where a flag or a count belongs, and a guessed value would
give wrong numbers without an error. Bounds are at least ten times what published models have, so that a small file
cannot cost hours or all memory.

Functions take the parsed file and an entry's name. An entry that is missing, of another type or out of range is a
`CheckpointError`; null counts as absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from moereg.errors import CheckpointError, shown

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
    """Reads a whole number.

    Args:
        config: The parsed file.
        *names: Spellings of the entry; releases and re-saved files use different ones.
        default: Value of an absent entry; None if the entry is required.
        minimum: Smallest value that makes sense.
        maximum: Largest value that is accepted.
    """
    value = _find(config, names)
    value = default if value is None else value
    if type(value) is not int or not minimum <= value <= maximum:
        exceeds = type(value) is int and value > maximum
        rule = f"be at most {maximum}" if exceeds else f"be a whole number of at least {minimum}"
        raise _error(config, names, rule, value)
    return value


def read_number(config: Mapping[str, Any], *names: str, default: float | None = None) -> float:
    """Reads a finite number; arguments as in `read_count`."""
    value = _find(config, names)
    value = default if value is None else value
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not -_LARGEST_NUMBER <= value <= _LARGEST_NUMBER
    ):
        raise _error(config, names, f"be a number of at most {_LARGEST_NUMBER:.0f} either way", value)
    return float(value)


def read_flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Reads true or false; neither "false" nor 0 is accepted."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not bool:
        raise _error(config, (name,), "be true or false", value)
    return value


def read_choice(config: Mapping[str, Any], name: str, choices: Sequence[Any], default: Any, cure: str = _CURE) -> Any:
    """Reads an entry that has a closed set of values. They count with their type: 1 is not True.

    Args:
        config: The parsed file.
        name: Name of the entry.
        choices: Accepted values.
        default: Value of an absent entry.
        cure: What to do about another value.
    """
    value = config.get(name)
    value = default if value is None else value
    if not is_one_of(value, choices):
        raise _error(config, (name,), f"be in {list(choices)}", value, cure)
    return value


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
    """Reads an optional list of layer indices, no more than a model may have."""
    value = config.get(name)
    if value is None:
        return None
    if not (
        isinstance(value, list)
        and len(value) <= MOST_LAYERS
        and all(type(item) is int and 0 <= item < MOST_LAYERS for item in value)
    ):
        raise _error(config, (name,), f"be a list of layer indices below {MOST_LAYERS}", value)
    return frozenset(value)


def read_name(config: Mapping[str, Any], name: str) -> str | None:
    """Reads an optional text."""
    value = config.get(name)
    if value is not None and not isinstance(value, str):
        raise _error(config, (name,), "be a name", value)
    return value


def read_names(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Reads an optional list of names."""
    value = config.get(name)
    if value is None:
        return ()
    if not (isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)):
        raise _error(config, (name,), "be a list of module names", value)
    return tuple(value)


def read_object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Reads an optional JSON object; empty if it is absent."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _error(config, (name,), "be an object", value)
    return value


def read_objects(config: Mapping[str, Any], name: str) -> Mapping[str, Mapping[str, Any]]:
    """Reads an optional JSON object of objects; empty if it is absent."""
    value = config.get(name)
    if value is None:
        return {}
    if not (isinstance(value, dict) and all(isinstance(item, dict) for item in value.values())):
        raise _error(config, (name,), "be an object of objects", value)
    return value


def _find(config: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _error(
    config: Mapping[str, Any], names: Sequence[str], rule: str, value: Any, cure: str = _CURE
) -> CheckpointError:
    found = next((name for name in names if config.get(name) is not None), " or ".join(names))
    # The quantization config has no model type.
    model = f" of model type {shown(config['model_type'])}" if "model_type" in config else ""
    return CheckpointError(f"{found}{model} must {rule}, got {'none' if value is None else shown(value)}; {cure}")
