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
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol, TypeVar

from typing_extensions import Unpack

from moereg._version import __version__
from moereg.arguments import check_instance
from moereg.errors import RegistrationError, shown
from moereg.experts import Experts
from moereg.facts import Facts, NarrowedFacts, disjoint_fact, narrow_facts
from moereg.platforms import KINDS, Platform, PlatformKind, PlatformRule
from moereg.plugins import is_reserved
from moereg.quant import QuantScheme
from moereg.registration import (
    Probe,
    check_experts,
    check_name,
    check_outside_calls,
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
    "Collector",
    "collecting_with",
    "provider",
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
    def provider(self) -> str:
        """The distribution with its version, or `builtin`."""
        return provider(self.origin, self.origin_version)

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
        for scheme in self.schemes:
            if scheme is checkpoint:  # As nearly always where it fits; comparing formats takes longer.
                return checkpoint
        serving = [scheme for scheme in self.schemes if scheme.serves(checkpoint)]
        exact = [scheme for scheme in serving if scheme.activation == checkpoint.activation]
        return checkpoint if checkpoint in serving else next(iter([*exact, *serving]), None)


def provider(origin: str, version: str) -> str:
    """How texts name the place that a backend comes from: a distribution with its version, or `builtin`."""
    return origin if origin == BUILTIN or not version else f"{origin} {version}"


@functools.lru_cache(maxsize=4096)
def _most_specific(
    rules: tuple[PlatformRule, ...], platform: Platform, _kind: PlatformKind | None
) -> PlatformRule | None:
    # The kind is part of the key: a plugin may describe it anew.
    matching = [rule for rule in rules if rule.matches(platform)]
    return max(matching, key=lambda rule: rule.specificity, default=None)


class BackendRegistry:
    """All registered cells, in order of registration. Thread-safe: readers see all of a change or nothing of it.

    Attributes:
        owner_of: Name and version of the distribution of a module, None where it is not known. The loader of plugins
            sets it once it has seen the entry points.
    """

    def __init__(self) -> None:
        self._cells: tuple[BackendCell, ...] = ()
        self._lock = threading.Lock()
        self.owner_of: Callable[[str], tuple[str, str] | None] = lambda module: None

    @property
    def cells(self) -> tuple[BackendCell, ...]:
        """All cells."""
        return self._cells

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
        self.publish((cell,))

    def publish(self, cells: Iterable[BackendCell], replaced: Iterable[BackendCell] = ()) -> None:
        """Stores cells, all at once.

        Args:
            cells: What to store.
            replaced: Stored cells whose place they take.

        Raises:
            RegistrationError: As `add`, for the first cell that does not fit. Nothing is stored or removed then.
        """
        gone = {id(cell) for cell in replaced}
        with self._lock:
            stored = [cell for cell in self._cells if id(cell) not in gone]
            for cell in cells:
                for other in stored:
                    _check_compatible(other, cell)
                stored.append(cell)
            self._cells = tuple(stored)

    def snapshot(self) -> tuple[BackendCell, ...]:
        """The cells, for `restore`."""
        return self._cells

    def restore(self, cells: Iterable[BackendCell]) -> None:
        """Puts back what `snapshot` returned."""
        with self._lock:
            self._cells = tuple(cells)


def _check_compatible(other: BackendCell, cell: BackendCell) -> None:
    _check_same_schemes(other, cell)
    if other.name != cell.name:
        return
    if other.origin != cell.origin:
        raise RegistrationError(
            f"backend name {cell.name!r} belongs to {other.origin} ({other.class_name}); {cell.class_name} of "
            f"{cell.origin} needs another name"
        )
    if other.experts is cell.experts:
        _check_disjoint(other, cell)


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


def _defined_before(cell: BackendCell, cells: Iterable[BackendCell]) -> list[BackendCell]:
    """Cells of the class that a new one takes the place of: a notebook's that runs again, or a reloaded module's."""
    kind = cell.experts
    bound = getattr(sys.modules.get(kind.__module__), kind.__qualname__, kind)
    return [other for other in cells if other.name == cell.name and other.experts is bound is not kind]


REGISTRY: Final = BackendRegistry()
_ORIGIN: contextvars.ContextVar[tuple[str, str]] = contextvars.ContextVar("moereg_origin", default=("", ""))


class Collector(Protocol):
    """Keeps the cells that modules register while they are imported, until all of a module's are known."""

    registry: BackendRegistry

    def owner_of(self, module: str) -> tuple[str, str] | None:
        """Name and version of the distribution of a module."""

    def collect(self, cell: BackendCell, module: str) -> None:
        """Keeps a cell that a module registered."""


_COLLECTOR: contextvars.ContextVar[Collector | None] = contextvars.ContextVar("moereg_collector", default=None)


@contextlib.contextmanager
def collecting_with(collector: Collector) -> Iterator[None]:
    """Inside, cells that this thread registers in the collector's registry go to the collector instead."""
    token = _COLLECTOR.set(collector)
    try:
        yield
    finally:
        _COLLECTOR.reset(token)


def _registering_module(experts: type[Experts]) -> str:
    """The module that defines a class, or that registers one of a module that was imported before."""
    module = experts.__module__
    if getattr(getattr(sys.modules.get(module), "__spec__", None), "_initializing", False):
        return module
    # The innermost module whose body is running, whichever functions it called to get here.
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") != "moereg.discovery":
        if frame.f_code.co_name == "<module>":
            return str(frame.f_globals.get("__name__", module))
        frame = frame.f_back
    return module


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

    Example:
        >>> from moereg.author import Experts, Facts, PermutedWeights
        >>> @moereg.register_moe_backend("mine", priority=1, quant_schemes=("unquantized",), platforms=("cuda:sm90",))
        ... class MineExperts(Experts):
        ...     facts = Facts(
        ...         activations=frozenset({"silu"}),
        ...         activation_formats=frozenset({"standard"}),
        ...         dtypes=frozenset({"bfloat16"}),
        ...         placements=frozenset({"contiguous"}),
        ...     )
        ...     layouts = ("mine_blocked",)
        ...     def permute_weights(self, weights, problem) -> PermutedWeights: ...
        ...     def workspace_shapes(self, problem, num_tokens): ...
        ...     def apply(self, out, inputs, weights, workspace13, workspace2): ...
        >>> problem = moereg.MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2)
        >>> moereg.select_backend(problem, platform="cuda:sm90", require="mine").backend
        'mine'
    """

    def decorate(experts: E) -> E:
        target = REGISTRY if registry is None else registry
        check_instance("registry", target, BackendRegistry, "leave it out for the one that selection reads")
        collector = _COLLECTOR.get()
        module = str(getattr(experts, "__module__", "nowhere"))
        if collector is not None and isinstance(experts, type):
            module = _registering_module(experts)
        is_builtin = module.startswith("moereg.")
        if collector is not None and (collector.registry is not target or is_builtin):
            collector = None
        origin, version = _ORIGIN.get()
        if not origin:
            owner_of = target.owner_of if collector is None else collector.owner_of
            origin, version = (BUILTIN, "") if is_builtin else owner_of(module) or (module, "")
            if not is_builtin and is_reserved(origin):
                raise RegistrationError(
                    f"backend {shown(name)} of module {module}: {origin!r} stands for moereg itself; rename that "
                    "distribution or module"
                )
            if collector is None and target is REGISTRY:
                check_outside_calls(name, module, provider(origin, version))
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
        if collector is None:
            target.publish((cell,), replaced=_defined_before(cell, target.cells))
        else:
            collector.collect(cell, module)
        return experts

    return decorate
