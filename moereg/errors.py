"""Errors and warnings of moereg, and the wording they share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moereg.dispatch import Selection

__all__ = [
    "CheckpointError",
    "LayoutMismatchError",
    "MoeregError",
    "MoeregWarning",
    "PluginError",
    "RegistrationError",
    "RequestError",
    "TooLargeError",
    "UnknownBackendError",
    "UnknownModelError",
    "UnknownNameError",
    "UnknownPlatformError",
    "UnknownSchemeError",
    "UnsupportedProblemError",
    "unknown_name_message",
]


class MoeregError(Exception):
    """Base of every error that moereg raises on purpose."""


class MoeregWarning(UserWarning):
    """Base of every warning that moereg issues."""


class RegistrationError(MoeregError, ValueError):
    """A backend registered something invalid; nothing of it was stored."""


class RequestError(MoeregError, ValueError):
    """A request contradicts itself, for instance one name both required and denied."""


class PluginError(MoeregError, RuntimeError):
    """A plugin that was asked for by name could not be loaded."""


class CheckpointError(MoeregError, ValueError):
    """A checkpoint cannot be read as a Mixture-of-Experts layer."""


class LayoutMismatchError(MoeregError, ValueError):
    """Permuted weights do not have the layout that the experts class reads."""


class TooLargeError(MoeregError, MemoryError):
    """A layer would not fit in the memory that is free."""


class UnknownNameError(MoeregError, ValueError):
    """A name that is not known; the message lists the known ones and the nearest."""


class UnknownBackendError(UnknownNameError):
    """No backend of that name is registered."""


class UnknownModelError(UnknownNameError):
    """No model shape of that name is known."""


class UnknownSchemeError(UnknownNameError):
    """No quantisation scheme of that name is known."""


class UnknownPlatformError(UnknownNameError):
    """A platform string names a kind or architecture that is not known."""


class UnsupportedProblemError(MoeregError, NotImplementedError):
    """No backend fits the problem.

    Attributes:
        selection: The `Selection` with every candidate's reasons.
    """

    def __init__(self, message: str, selection: Selection) -> None:
        super().__init__(message)
        self.selection = selection


def unknown_name_message(kind: str, name: str, known: Iterable[str]) -> str:
    """Words an unknown-name error: the rule, the name found, the nearest and all known names.

    Args:
        kind: What the name should have been, e.g. `backend`.
        name: What was found.
        known: All names that would have been accepted.

    Returns:
        One line.
    """
    names = sorted(set(known))
    lowered = {known_name.lower(): known_name for known_name in names}
    near = [lowered[match] for match in difflib.get_close_matches(name.lower(), lowered, n=1, cutoff=0.5)]
    hint = f", did you mean {near[0]!r}?" if near else ""
    return f"unknown {kind} {name!r}{hint} (known: {', '.join(names) or 'none'})"
