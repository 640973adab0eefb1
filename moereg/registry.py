"""BackendCell, BackendRegistry and the decorator that fills it: validate first, then store.

A registry of one's own is filled with `register_moe_backend(..., registry=mine)` and chosen from with
`moereg.decide.decide(..., cells=mine.cells)`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from typing_extensions import Unpack

from moereg._version import __version__
from moereg.arguments import check_instance
from moereg.errors import RegistrationError, shown
from moereg.experts import Experts
from moereg.facts import Facts, NarrowedFacts, disjoint_fact, narrow_facts
from moereg.platforms import KINDS, Platform, PlatformKind, PlatformRule
from moereg.quant import QuantScheme
from moereg.registration import (
    Probe,
    check_experts,
    check_name,
    check_rank,
    read_probes,
    read_requirements,
    read_rules,
    read_schemes,
)

__all__ = [
    "API_VERSION",
    "BUILTIN",
    "REGISTRY",
    "BackendCell",
    "BackendRegistry",
    "register_moe_backend",
    "registering_origin",
]

API_VERSION: Final = "1"
BUILTIN: Final = "builtin"

E = TypeVar("E", bound=type[Experts])


@dataclasses.dataclass(frozen=True)
class BackendCell:
    """One registered rectangle of quant schemes x platforms.

    Attributes:
        name: As requests spell it; several cells share one.
        experts: Experts class.
        priority: Higher is faster; measured, never read from the problem.
        schemes: What it computes.
        rules: Platforms it runs on.
        facts: The class's, narrowed for this rectangle.
        requires: Distribution version ranges.
        probes: Checks of the machine, run once and only for a probed platform.
        opt_in: Whether a request has to name it.
        tier: `kernel` or `emulation`.
        origin: `builtin` or the distribution that registered it.
        origin_version: That distribution's version, moereg's own for `builtin`; empty where it is not known.
    """

    name: str
    experts: type[Experts]
    priority: int
    schemes: tuple[QuantScheme, ...]
    rules: tuple[PlatformRule, ...]
    facts: Facts = dataclasses.field(compare=False)
    requires: tuple[str, ...] = ()
    probes: tuple[Probe, ...] = ()
    opt_in: bool = False
    tier: str = "kernel"
    origin: str = BUILTIN
    origin_version: str = ""

    @property
    def class_name(self) -> str:
        """Name of the experts class."""
        return self.experts.__name__

    @property
    def rules_text(self) -> str:
        """All its platform rules, as one string."""
        return ", ".join(rule.text for rule in self.rules)

    def rule_for(self, platform: Platform) -> PlatformRule | None:
        """The most specific of the cell's rules that match, or None."""
        return _most_specific(self.rules, platform, KINDS.get(platform.kind))

    def scheme_for(self, checkpoint: QuantScheme) -> QuantScheme | None:
        """The scheme computed for a checkpoint's scheme: the same, or its 16-bit form; None if it reads neither.

        Formats are compared, not names: the same scheme may have another name.
        """
        serving = [scheme for scheme in self.schemes if scheme.serves(checkpoint)]
        exact = [scheme for scheme in serving if scheme.activation == checkpoint.activation]
        return checkpoint if checkpoint in serving else next(iter([*exact, *serving]), None)


@functools.lru_cache(maxsize=4096)
def _most_specific(
    rules: tuple[PlatformRule, ...], platform: Platform, _kind: PlatformKind | None
) -> PlatformRule | None:
    # The kind is part of the key: a plugin may describe it anew.
    matching = [rule for rule in rules if rule.matches(platform)]
    return max(matching, key=lambda rule: rule.specificity, default=None)


class BackendRegistry:
    """All registered cells, in order of registration."""

    def __init__(self) -> None:
        self._cells: list[BackendCell] = []

    @property
    def cells(self) -> tuple[BackendCell, ...]:
        """All cells."""
        return tuple(self._cells)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all backends, sorted."""
        return tuple(sorted({cell.name for cell in self._cells}))

    def by_name(self, name: str) -> tuple[BackendCell, ...]:
        """Cells of one backend."""
        return tuple(cell for cell in self._cells if cell.name == name)

    def add(self, cell: BackendCell) -> None:
        """Stores a cell.

        Raises:
            RegistrationError: The name belongs to another distribution, the same experts class already claims one of
                its schemes by an equally specific rule for problems that may fit both, or another cell gives a scheme's
                name another meaning. Nothing is stored then.
        """
        for other in self._cells:
            _check_same_schemes(other, cell)
            if other.name != cell.name:
                continue
            if other.origin != cell.origin:
                raise RegistrationError(
                    f"backend name {cell.name!r} belongs to {other.origin} ({other.class_name}); {cell.class_name} of "
                    f"{cell.origin} needs another name"
                )
            if other.experts is cell.experts:
                _check_disjoint(other, cell)
        self._cells.append(cell)

    def adopt(self, modules: str, origin: str, version: str = "") -> tuple[BackendCell, ...]:
        """Gives a distribution the cells that were registered by its modules before it was known, by a direct import.

        Args:
            modules: A module, with those below it.
            origin: The distribution.
            version: Its version.

        Returns:
            The cells, with their new origin.
        """
        adopted: list[BackendCell] = []
        for place, cell in enumerate(self._cells):
            module = cell.experts.__module__
            if cell.origin == module and f"{module}.".startswith(f"{modules}."):
                self._cells[place] = dataclasses.replace(cell, origin=origin, origin_version=version)
                adopted.append(self._cells[place])
        return tuple(adopted)

    def snapshot(self) -> tuple[BackendCell, ...]:
        """The cells, for `restore`."""
        return tuple(self._cells)

    def restore(self, cells: Sequence[BackendCell]) -> None:
        """Puts back what `snapshot` returned."""
        self._cells = list(cells)


def _check_same_schemes(one: BackendCell, other: BackendCell) -> None:
    known = {scheme.name: scheme for scheme in one.schemes}
    for scheme in other.schemes:
        if known.get(scheme.name, scheme) != scheme:
            raise RegistrationError(
                f"scheme name {scheme.name!r} of backend {other.name!r} of {other.origin} is {known[scheme.name]} in "
                f"backend {one.name!r} of {one.origin}; give {scheme} another name"
            )


def _check_disjoint(one: BackendCell, other: BackendCell) -> None:
    schemes = {scheme.name for scheme in one.schemes} & {scheme.name for scheme in other.schemes}
    if not schemes or disjoint_fact(one.facts, other.facts) is not None:
        return
    for first, second in itertools.product(one.rules, other.rules):
        if first.overlaps(second):
            raise RegistrationError(
                f"{other.class_name} of {other.origin} registers {other.name!r} twice for scheme {sorted(schemes)[0]}: "
                f"rules {first} (priority {one.priority}) and {second} (priority {other.priority}) are equally "
                "specific and match the same platforms; keep one decorator, name architectures exactly, exclude "
                f"platforms ({first},!...), or narrow a fact so that no problem fits both (activations=...)"
            )


REGISTRY: Final = BackendRegistry()
_ORIGIN: contextvars.ContextVar[tuple[str, str]] = contextvars.ContextVar("moereg_origin", default=("", ""))


@contextlib.contextmanager
def registering_origin(origin: str, version: str = "") -> Iterator[None]:
    """Cells registered inside belong to that distribution (`builtin` for moereg's own) of that version."""
    token = _ORIGIN.set((origin, version))
    try:
        yield
    finally:
        _ORIGIN.reset(token)


def register_moe_backend(
    name: str,
    priority: int,
    quant_schemes: Iterable[str | QuantScheme],
    platforms: Iterable[str],
    *,
    requires: Iterable[str] = (),
    probes: Iterable[Probe] = (),
    opt_in: bool = False,
    tier: str = "kernel",
    registry: BackendRegistry | None = None,
    **narrowed: Unpack[NarrowedFacts],
) -> Callable[[E], E]:
    """Registers an experts class for quant schemes x platforms. Stack one decorator per rectangle.

    Args:
        name: As requests spell it: lower case, digits and underscores.
        priority: Higher is faster. Cite the measurement that set it.
        quant_schemes: Names or values.
        platforms: Rules such as `cuda:sm80+`, `rocm:gfx942`, `cpu`, `*`.
        requires: Distribution version ranges such as `triton>=3.6`.
        probes: Checks of the machine at hand for what versions cannot say.
        opt_in: Whether a request has to name the backend.
        tier: `kernel`, or `emulation` which never beats a kernel.
        registry: Where to store; the one that `select_backend` reads by default. `moereg.decide.decide` chooses among
            the cells of any.
        **narrowed: Fields of `Facts` that promise less here than in the class.

    Returns:
        A decorator that returns the class unchanged.

    Raises:
        RegistrationError: Anything invalid; nothing is stored then.
    """

    def decorate(experts: E) -> E:
        target = REGISTRY if registry is None else registry
        check_instance("registry", target, BackendRegistry, "leave it out for the one that selection reads")
        module = str(getattr(experts, "__module__", "nowhere"))
        origin, version = _ORIGIN.get()
        origin = origin or (BUILTIN if module.startswith("moereg.") else module)
        who = f"backend {shown(name)} ({getattr(experts, '__name__', None) or shown(experts)} of {origin})"
        check_name(name, who)
        check_experts(experts, who)
        check_rank(priority, opt_in, tier, who)
        cell = BackendCell(
            name=name,
            experts=experts,
            priority=priority,
            schemes=read_schemes(quant_schemes, who),
            rules=read_rules(platforms, who),
            facts=narrow_facts(experts.facts, narrowed, who),
            requires=read_requirements(requires, who),
            probes=read_probes(probes, who),
            opt_in=opt_in,
            tier=tier,
            origin=origin,
            origin_version=__version__ if origin == BUILTIN else version,
        )
        target.add(cell)
        return experts

    return decorate
