"""Times in the unit that reads well."""

from __future__ import annotations

from typing import Final

__all__ = ["format_us", "format_us_range"]

_UNITS: Final = (("us", 1.0), ("ms", 1e3), ("s", 1e6))


def format_us(time_us: float) -> str:
    """A time with three digits or more: `8.25 us`, `412 us`, `6.19 ms`, `61.3 s`, `1234 s`."""
    unit, scale = _unit(time_us)
    return f"{_digits(time_us / scale)} {unit}"


def format_us_range(low_us: float, high_us: float) -> str:
    """Two times in the unit of the second: `0.98 to 1.21 ms`."""
    unit, scale = _unit(high_us)
    return f"{_digits(low_us / scale)} to {_digits(high_us / scale)} {unit}"


def _unit(time_us: float) -> tuple[str, float]:
    # Rounded to three digits, 999.7 us is a millisecond.
    return next((pair for pair in _UNITS[:-1] if time_us < 999.5 * pair[1]), _UNITS[-1])


def _digits(value: float) -> str:
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{places}f}"
