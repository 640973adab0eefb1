"""Rules that match platforms, and how closely each names them."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Final

from moereg.arguments import check_text
from moereg.errors import UnknownPlatformError, shown, unknown_name_message
from moereg.platforms.kinds import KINDS
from moereg.platforms.platform import Platform

__all__ = ["PlatformRule", "Specificity"]


class Specificity:
    """How closely a rule names a platform: where several cells of a class match, the one with the closest stands."""

    ANY: Final = 0
    KIND: Final = 1
    AT_LEAST: Final = 2
    FAMILY: Final = 3
    EXACT: Final = 4


@dataclasses.dataclass(frozen=True)
class PlatformRule:
    """A string that matches platforms: `cuda:sm90` exact, `cuda:sm100f` family, `cuda:sm80+` at least, `cpu`, `*`.

    A number of one kind is never compared with another kind's.

    Raises:
        ArgumentError: The rule is not text.
        UnknownPlatformError: The text is not a rule.
    """

    text: str

    def __post_init__(self) -> None:
        check_text("a platform rule", self.text)
        if self.text == "*":
            return
        kind, colon, _ = self.text.partition(":")
        if kind not in KINDS:
            raise UnknownPlatformError(unknown_name_message("platform kind", kind, {*KINDS, "*"}))
        _, arch, suffix = self._parts()
        if colon and not re.fullmatch(KINDS[kind].arch_pattern, arch):
            raise UnknownPlatformError(
                f"platform rule {shown(self.text)}: {kind} architectures match {KINDS[kind].arch_pattern!r}, "
                f"got {shown(arch)}"
            )
        if suffix and KINDS[kind].arch_number is None:
            raise UnknownPlatformError(
                f"platform rule {shown(self.text)}: {kind} architectures have no order; name each one exactly"
            )

    @functools.cache  # noqa: B019  (rules are few, frozen and live as long as the process)
    def _parts(self) -> tuple[str, str, str]:
        kind, _, rest = self.text.partition(":")
        has_families = KINDS[kind].arch_number is not None and KINDS[kind].family_size > 0
        suffix = rest[-1] if rest.endswith("+") or (rest.endswith("f") and has_families) else ""
        return kind, rest.removesuffix(suffix) if suffix else rest, suffix

    @property
    def specificity(self) -> int:
        """A `Specificity`."""
        if self.text == "*":
            return Specificity.ANY
        _, arch, suffix = self._parts()
        if not arch:
            return Specificity.KIND
        return {"+": Specificity.AT_LEAST, "f": Specificity.FAMILY, "": Specificity.EXACT}[suffix]

    def overlaps(self, other: PlatformRule) -> bool:
        """Whether both are equally specific and some platform matches both, so that neither could stand."""
        if self.specificity != other.specificity:
            return False
        if self.specificity in (Specificity.ANY, Specificity.KIND, Specificity.EXACT):
            return self.text == other.text
        (kind, arch, suffix), (other_kind, other_arch, _) = self._parts(), other._parts()
        if kind != other_kind:
            return False
        described = KINDS[kind]
        assert described.arch_number is not None
        families = {described.arch_number(name) // described.family_size for name in (arch, other_arch)}
        return suffix == "+" or len(families) == 1

    def matches(self, platform: Platform) -> bool:
        """Whether the platform is one of those that the rule names."""
        if self.text == "*":
            return True
        kind, arch, suffix = self._parts()
        if kind != platform.kind:
            return False
        if not arch:
            return True
        if not platform.arch:
            return False
        if not suffix:
            return arch == platform.arch
        described = KINDS[kind]
        assert described.arch_number is not None
        wanted, found = described.arch_number(arch), described.arch_number(platform.arch)
        if suffix == "+":
            return found >= wanted
        # A family shares its architecture-specific instructions: sm100f is sm100 and sm103, later members only.
        return found // described.family_size == wanted // described.family_size and found >= wanted

    def __str__(self) -> str:
        return self.text
