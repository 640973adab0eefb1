"""Sets of architectures, as named by the parts of a platform rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from moereg.platforms.kinds import PlatformKind


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
