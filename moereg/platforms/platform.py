"""A machine as a value; named or probed."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from moereg.arguments import check_count, check_flag, check_instance, check_mapping, check_text
from moereg.errors import ArgumentError, UnknownPlatformError, shown
from moereg.platforms.kinds import KINDS, find_kind, unknown_kind
from moereg.platforms.products import PRODUCTS, platform_of_product


@dataclasses.dataclass(frozen=True)
class Platform:
    """A description of a machine.

    Attributes:
        kind: `cuda`, `rocm`, `cpu`, `tpu`, `npu`, `xpu`, or a plugin's.
        arch: `sm90`, `gfx942`, `x86_64`; empty if the kind has no architectures or none was given.
        device_name: The driver's name; empty for a named platform.
        memory_bytes: Memory of one device; 0 if unknown.
        versions: Versions of installed distributions by name (empty for a named platform).
        probed: Whether this describes this machine; False for a named one.
        claimed_by: The platform plugin that described it, such as `platform plugin 'mine' of moereg-mine 1.0`; empty if
            moereg probed it itself.

    Example:
        >>> platform = moereg.Platform.from_name("cuda:sm100")
        >>> print(platform, platform.arch, platform.device_type)
        cuda:sm100 sm100 cuda
    """

    kind: str
    arch: str = ""
    device_name: str = ""
    memory_bytes: int = 0
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False, compare=False, repr=False)
    probed: bool = False
    claimed_by: str = dataclasses.field(default="", hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for field in ("kind", "arch"):
            check_text(f"{field} of a platform", getattr(self, field))
        # A driver's name may hold any character.
        check_instance("device_name of a platform", self.device_name, str, "as the driver says it")
        check_count("memory_bytes of a platform", self.memory_bytes, minimum=0)
        check_flag("probed of a platform", self.probed)
        check_text("claimed_by of a platform", self.claimed_by)
        for name, version in check_mapping("versions of a platform", self.versions).items():
            if not isinstance(version, str):
                raise ArgumentError(f"versions of a platform must be texts, got {shown(version)} for {shown(name)}")
        kind = find_kind(self.kind)
        if kind is None:
            raise UnknownPlatformError(unknown_kind("platform kind", self.kind, KINDS))
        if not self.arch:
            return
        if not re.fullmatch(kind.arch_pattern, self.arch):
            raise UnknownPlatformError(
                f"unknown platform arch {shown(self.arch)}: {self.kind} architectures match {kind.arch_pattern!r}"
                f"{kind.hint}"
            )
        if kind.has_order:
            # Computed here, so that later comparisons cannot fail.
            kind.number(self.arch)

    @classmethod
    def from_name(cls, name: str) -> Platform:
        """Parses a platform such as `cuda:sm90`, `rocm:gfx942` or `cpu`, or a product such as `h100`.

        Raises:
            ArgumentError: The name is not text.
            UnknownPlatformError: The kind is unknown, the architecture does not belong to it, or a plugin's kind cannot
                order the architecture.
        """
        if not isinstance(name, str):
            raise ArgumentError(f"platform must be a name such as 'cuda:sm90', got {shown(name)}")
        name = name.strip()
        if name not in KINDS:
            name = platform_of_product(name) or name
        kind_name, _, arch = name.partition(":")
        kind = find_kind(kind_name)
        if kind is None:
            products = () if ":" in name else PRODUCTS
            examples = {f"{known.name}:{known.example}" for known in KINDS.values() if known.example}
            raise UnknownPlatformError(unknown_kind("platform", name, {*examples, *KINDS, *products}, kind_name))
        if not arch and kind.has_order:
            raise UnknownPlatformError(f"platform {shown(name)} needs an architecture{kind.hint}")
        return cls(kind_name, arch)

    @property
    def device_type(self) -> str:
        """The torch type of this platform's devices."""
        kind = find_kind(self.kind)
        if kind is None:  # Unknown only if the platform came from another process.
            raise UnknownPlatformError(unknown_kind("platform kind", self.kind, KINDS))
        return kind.device_type

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}" if self.arch and self.kind != "cpu" else self.kind
