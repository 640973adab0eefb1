"""Rules that match platforms, and how specific each is."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable
from typing import Final

from moereg.arguments import check_text
from moereg.errors import UnknownPlatformError, shown
from moereg.platforms.kinds import KINDS, PlatformKind, find_kind, unknown_kind
from moereg.platforms.platform import Platform


@dataclasses.dataclass(frozen=True)
class Archs:
    """Architectures of one kind.

    Attributes:
        kind: Their kind.
        arch: The architecture; with a suffix the first one or a prefix; empty for the whole kind.
        suffix: Empty, `+` (from it on), `f` (its family from it on) or `*` (all with this prefix).
    """

    kind: PlatformKind
    arch: str = ""
    suffix: str = ""

    @property
    def span(self) -> tuple[int, float]:
        """First and last number of a set with suffix `+` or `f`."""
        first, size = self.kind.number(self.arch), self.kind.family_size
        # A family shares architecture-specific instructions with its later members: sm100f is sm100 and sm103.
        return first, math.inf if self.suffix == "+" else first // size * size + size - 1

    @property
    def _is_span(self) -> bool:
        return self.suffix in ("+", "f")

    def __contains__(self, arch: str) -> bool:
        if self.suffix == "*":
            return arch.startswith(self.arch)
        if self._is_span:
            first, last = self.span
            return first <= self.kind.number(arch) <= last
        return self.arch in ("", arch)

    def meets(self, other: Archs) -> bool:
        """Whether some architecture may be in both."""
        if not self.arch or not other.arch:
            return True
        if not self.suffix:
            return self.arch in other
        if not other.suffix:
            return other.arch in self
        if self._is_span and other._is_span:
            first, last = self.common_span(other)
            return first <= last
        if self.suffix == other.suffix:
            return self.arch.startswith(other.arch) or other.arch.startswith(self.arch)
        return True  # Only the kind's author knows whether a name with this prefix has such a number.

    def common_span(self, other: Archs) -> tuple[int, float]:
        """First and last number of the intersection of two spans; reversed if it is empty."""
        (first, last), (other_first, other_last) = self.span, other.span
        return max(first, other_first), min(last, other_last)

    def common_is_within(self, other: Archs, excluded: Iterable[Archs]) -> bool:
        """Whether the intersection with another set is certainly excluded.

        The other one meets this one, and has the same suffix or is also a span.
        """
        excluded = list(excluded)
        if any(not archs.arch for archs in excluded):
            return True
        if self._is_span:
            place, last = self.common_span(other)
            for from_number, to_number in sorted(archs.span for archs in excluded if archs._is_span):
                if from_number <= place <= to_number:
                    if to_number == math.inf:
                        return True
                    place = int(to_number) + 1
            return place > last
        if self.suffix == "*":
            longer = max(self.arch, other.arch, key=len)
            return any(archs.suffix == "*" and longer.startswith(archs.arch) for archs in excluded)
        return bool(self.arch) and any(self.arch in archs for archs in excluded)


_SPECIFICITY: Final = {"+": 2, "f": 3, "*": 3, "": 4}


@dataclasses.dataclass(frozen=True)
class PlatformRule:
    """A string that matches platforms.

    `cuda:sm90` is one architecture, `cuda:sm100f` its family, `cuda:sm80+` all from it on, `rocm:gfx9*` all with that
    prefix, `cpu` a kind, `*` everything. Exclusions follow: `cuda:sm90+,!sm120`, `cuda:sm80+,!sm100+`, `*,!cpu`. They
    are spelled like rules, without the kind if the rule names one. A prefix is for kinds without numbered families.

    Numbers of different kinds are never compared. A platform without an architecture matches no rule that depends on
    one.

    Raises:
        ArgumentError: The rule is not text.
        UnknownPlatformError: The text is not a rule.
    """

    text: str

    def __post_init__(self) -> None:
        check_text("a platform rule", self.text)
        base, *excluded = self.text.split(",")
        kind = _kind_of(base)
        if kind is not None:
            _check_archs(self.text, kind, base)
        for part in excluded:
            self._check_exclusion(base, kind, part)

    def _check_exclusion(self, base: str, kind: PlatformKind | None, part: str) -> None:
        rule = f"platform rule {shown(self.text)}"
        name = part.removeprefix("!")
        if not part.startswith("!") or not name:
            raise UnknownPlatformError(
                f"{rule}: an exclusion is '!' and what it excludes, without spaces, got {shown(part)}; write two rules "
                "for two sets of platforms"
            )
        if kind is None:
            excluded_kind = _kind_of(name)
            if excluded_kind is None:
                raise UnknownPlatformError(f"{rule}: it excludes every platform; leave '!*' out")
            _check_archs(self.text, excluded_kind, name)
            return
        if ":" in name:
            raise UnknownPlatformError(
                f"{rule}: an exclusion names architectures of {kind.name} without the kind, got {shown(part)}"
            )
        _check_archs(self.text, kind, f"{kind.name}:{name}")
        named, excluded = _archs(kind, base), _archs(kind, f"{kind.name}:{name}")
        if not named.meets(excluded):
            raise UnknownPlatformError(
                f"{rule}: {shown(part)} excludes nothing that {base} names; leave it out or correct it"
            )
        if named.common_is_within(named, [excluded]):
            raise UnknownPlatformError(f"{rule}: {shown(part)} excludes everything that {base} names; leave one out")

    @property
    def specificity(self) -> int:
        """0 for `*`, 1 for a kind, 2 from an architecture on, 3 for a family or a prefix, 4 for one architecture.

        If several cells of a class match, the most specific one applies. Exclusions do not count.
        """
        named = self._parts()[0]
        if named is None:
            return 0
        return _SPECIFICITY[named.suffix] if named.arch else 1

    @property
    def instance(self) -> Platform | None:
        """A platform that it names: the first of a range, else the kind's example; None for `*` or without one."""
        named = self._parts()[0]
        if named is None:
            return None
        kind, has_first = named.kind, named.suffix != "*"
        archs = [named.arch if has_first else "", kind.example]
        platforms = [Platform(kind.name, arch) for arch in archs if arch]
        if not kind.has_order:
            platforms.append(Platform(kind.name))
        return next((platform for platform in platforms if self.matches(platform)), None)

    def overlaps(self, other: PlatformRule) -> bool:
        """Whether both are equally specific and some platform may match both, so that neither could take precedence."""
        if self.specificity != other.specificity:
            return False
        (named, excluded), (others, other_excluded) = self._parts(), other._parts()
        if named is None or others is None:
            return True
        if named.kind.name != others.kind.name or not named.meets(others):
            return False
        return not named.common_is_within(others, (*excluded, *other_excluded))

    def matches(self, platform: Platform) -> bool:
        """Whether the rule names the platform."""
        named, excluded = self._parts()
        if named is not None and not _may_hold(named, platform, unknown=not named.arch):
            return False
        return not any(_may_hold(archs, platform, unknown=True) for archs in excluded)

    def _parts(self) -> tuple[Archs | None, tuple[Archs, ...]]:
        """The rule's set without exclusions (None for `*`), and the exclusions."""
        # The rule may come from another process, and its kind may have been redefined since.
        return _parsed(self.text, _kind_of(self.text.partition(",")[0]))

    def __str__(self) -> str:
        return self.text


def _kind_of(name: str) -> PlatformKind | None:
    """The kind of a rule without exclusions; None for `*`."""
    if name == "*":
        return None
    kind = name.partition(":")[0]
    found = find_kind(kind)
    if found is None:
        raise UnknownPlatformError(unknown_kind("platform kind", kind, {*KINDS, "*"}))
    return found


def _may_hold(archs: Archs, platform: Platform, unknown: bool) -> bool:
    """Whether a platform is in a set; `unknown` is the answer for one of that kind without an architecture."""
    if archs.kind.name != platform.kind:
        return False
    return platform.arch in archs if platform.arch else unknown


@functools.lru_cache(maxsize=4096)
def _parsed(text: str, kind: PlatformKind | None) -> tuple[Archs | None, tuple[Archs, ...]]:
    base, *parts = text.split(",")
    names = [part.removeprefix("!") for part in parts]
    if kind is None:
        kinds = [(_kind_of(name), name) for name in names]
        return None, tuple(_archs(known, name) for known, name in kinds if known is not None)
    return _archs(kind, base), tuple(_archs(kind, f"{kind.name}:{name}") for name in names)


@functools.lru_cache(maxsize=4096)
def _archs(kind: PlatformKind, name: str) -> Archs:
    _, _, rest = name.partition(":")
    suffixes = ("+", "f") if kind.has_order and kind.family_size else ("+", "*")
    suffix = rest[-1] if rest.endswith(suffixes) else ""
    return Archs(kind, rest.removesuffix(suffix) if suffix else rest, suffix)


def _check_archs(rule: str, kind: PlatformKind, name: str) -> None:
    """Checks the architectures of a rule or an exclusion."""
    archs = _archs(kind, name)
    if archs.suffix == "*":
        if not _can_begin(kind, archs.arch):
            raise UnknownPlatformError(
                f"platform rule {shown(rule)}: {kind.name} architectures match {kind.arch_pattern!r}, and none begins "
                f"with {shown(archs.arch)}"
            )
        return
    if ":" in name and not re.fullmatch(kind.arch_pattern, archs.arch):
        raise UnknownPlatformError(
            f"platform rule {shown(rule)}: {kind.name} architectures match {kind.arch_pattern!r}, "
            f"got {shown(archs.arch)}"
        )
    if archs.suffix and not kind.has_order:
        raise UnknownPlatformError(
            f"platform rule {shown(rule)}: {kind.name} architectures have no order; name each one exactly"
        )
    if archs.arch and kind.has_order:
        kind.number(archs.arch)


@functools.lru_cache(maxsize=256)
def _can_begin(kind: PlatformKind, start: str) -> bool:
    """Whether an architecture may have this prefix."""
    # For partial matches, which Python's own engine lacks; imported here, since few rules need it.
    import regex

    try:
        return bool(start) and regex.fullmatch(kind.arch_pattern, start, partial=True) is not None
    except regex.error:  # The engines differ slightly, and only Python's must accept the pattern.
        return bool(start)
