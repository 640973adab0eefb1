"""A machine as a value; named or probed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from moereg.arguments import check_count, check_flag, check_instance, check_mapping, check_text
from moereg.errors import ArgumentError, UnknownPlatformError, shown, unknown_name_message
from moereg.platforms.kinds import EXAMPLES, KINDS

__all__ = ["Platform"]


@dataclasses.dataclass(frozen=True)
class Platform:
    """The facts of a machine.

    Attributes:
        kind: `cuda`, `rocm`, `cpu`, `tpu`, `npu`, `xpu`, or a plugin's.
        arch: `sm90`, `gfx942`, `x86_64`; empty if the kind has no names for it or none was given.
        device_name: As the driver spells it; empty for a named platform.
        memory_bytes: Memory of one device; 0 if unknown.
        versions: Installed distributions by name (empty for a named platform).
        probed: Whether this describes the machine at hand; False for a named one.
    """

    kind: str
    arch: str = ""
    device_name: str = ""
    memory_bytes: int = 0
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False, compare=False, repr=False)
    probed: bool = False

    def __post_init__(self) -> None:
        for field in ("kind", "arch"):
            check_text(f"{field} of a platform", getattr(self, field))
        # A driver's name may hold any character.
        check_instance("device_name of a platform", self.device_name, str, "as the driver says it")
        check_count("memory_bytes of a platform", self.memory_bytes, minimum=0)
        check_flag("probed of a platform", self.probed)
        for name, version in check_mapping("versions of a platform", self.versions).items():
            if not isinstance(version, str):
                raise ArgumentError(f"versions of a platform must be texts, got {shown(version)} for {shown(name)}")
        if self.kind not in KINDS:
            raise UnknownPlatformError(unknown_name_message("platform kind", self.kind, KINDS))
        pattern = KINDS[self.kind].arch_pattern
        if self.arch and not re.fullmatch(pattern, self.arch):
            raise UnknownPlatformError(
                f"unknown platform arch {shown(self.arch)}: {self.kind} architectures match {pattern!r}, "
                f"for instance {EXAMPLES.get(self.kind, self.kind)!r}"
            )

    @classmethod
    def from_name(cls, name: str) -> Platform:
        """The platform of a string such as `cuda:sm90`, `rocm:gfx942` or `cpu`.

        Raises:
            ArgumentError: The name is not text.
            UnknownPlatformError: The kind is not known or the architecture does not belong to it.
        """
        if not isinstance(name, str):
            raise ArgumentError(f"platform must be a name such as 'cuda:sm90', got {shown(name)}")
        kind, _, arch = name.strip().partition(":")
        if kind not in KINDS:
            near = unknown_name_message("platform", name, {*EXAMPLES.values(), *KINDS})
            raise UnknownPlatformError(near)
        if not arch and KINDS[kind].arch_number is not None:
            raise UnknownPlatformError(f"platform {shown(name)} needs an architecture, for instance {EXAMPLES[kind]!r}")
        return cls(kind, arch)

    @property
    def device_type(self) -> str:
        """Torch's name for this platform's devices."""
        return KINDS[self.kind].device_type

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}" if self.arch and self.kind != "cpu" else self.kind
