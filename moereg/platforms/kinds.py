"""Kinds of machines: how the architectures of each are spelled and ordered."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Final

from moereg.arguments import check_count, check_instance, check_text
from moereg.errors import ArgumentError, shown

__all__ = ["EXAMPLES", "KINDS", "PlatformKind", "register_platform_kind"]


@dataclasses.dataclass(frozen=True)
class PlatformKind:
    """A family of machines whose architectures can be compared.

    Attributes:
        name: `cuda`, `rocm`, `cpu`, ... or a plugin's.
        device_type: Torch's name for its devices.
        arch_pattern: Regular expression that an architecture has to match.
        arch_number: Orders architectures; None where `+` and family rules mean nothing.
        family_size: Architectures with the same `arch_number // family_size` are one family; 0 for none.
    """

    name: str
    device_type: str
    arch_pattern: str
    arch_number: Callable[[str], int] | None = None
    family_size: int = 0

    def __post_init__(self) -> None:
        for field in ("name", "device_type", "arch_pattern"):
            check_text(f"{field} of a PlatformKind", getattr(self, field))
        try:
            re.compile(self.arch_pattern)
        except re.error as error:
            raise ArgumentError(
                f"arch_pattern of a PlatformKind must be a regular expression, got {shown(self.arch_pattern)}: {error}"
            ) from None
        if self.arch_number is not None and not callable(self.arch_number):
            raise ArgumentError(
                f"arch_number of a PlatformKind must be a function or None, got {shown(self.arch_number)}"
            )
        check_count("family_size of a PlatformKind", self.family_size, minimum=0)


@functools.cache
def _digits(arch: str) -> int:
    return int("".join(character for character in arch if character.isdigit()))


KINDS: Final[dict[str, PlatformKind]] = {
    kind.name: kind
    for kind in (
        PlatformKind("cuda", "cuda", r"sm\d{2,3}", _digits, family_size=10),
        PlatformKind("rocm", "cuda", r"gfx[0-9a-f]{3,4}"),
        PlatformKind("cpu", "cpu", r"[a-z0-9_]+"),
        PlatformKind("tpu", "xla", r"v\d+[a-z]*"),
        PlatformKind("npu", "npu", r"[a-z0-9_]+"),
        PlatformKind("xpu", "xpu", r"[a-z0-9_]+"),
    )
}


def register_platform_kind(kind: PlatformKind) -> None:
    """Adds a plugin's kind of machine; adding the same kind twice changes nothing.

    Raises:
        ArgumentError: Another kind has that name.
    """
    check_instance("kind", kind, PlatformKind, "make one")
    known = KINDS.setdefault(kind.name, kind)
    if known != kind:
        raise ArgumentError(f"platform kind {kind.name!r} is already registered as {known}; choose another name")


EXAMPLES: Final = {"cuda": "cuda:sm90", "rocm": "rocm:gfx942", "cpu": "cpu", "tpu": "tpu:v5e"}
"""A name of a platform for error messages, by kind."""
