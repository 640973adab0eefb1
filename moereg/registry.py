"""Cells, the registries that hold them, and the decorator for backends: validate first, then store.

A cell is one claim of a class: what it computes, where, and with which priority. Backends and token dispatchers
between ranks (`moereg.prepare_finalize.cells`) are registered, kept and published by the same code.

A registry of one's own is filled with `register_moe_backend(..., registry=mine)` and chosen from with
`moereg.selection.decide.decide(..., cells=mine.cells)`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Final, Generic, TypeVar

from typing_extensions import Unpack

from moereg.arguments import check_instance
from moereg.errors import ArgumentError, RegistrationError, shown
from moereg.experts import Experts
from moereg.platforms import KINDS, Platform, PlatformKind, PlatformRule
from moereg.registration import (
    BUILTIN,
    TIERS,
    Probe,
    Registration,
    check_experts,
    read_schemes,
    registering_origin,
)
from moereg.spec.facts import Facts, NarrowedFacts, disjoint_fact, narrow_facts
from moereg.spec.quant_schemes import QuantScheme

__all__ = [
    "API_VERSION",
    "BUILTIN",
    "REGISTRY",
    "BackendCell",
    "BackendRegistry",
    "Cell",
    "Registry",
    "provider",
    "register_moe_backend",
    "registering_origin",
]

API_VERSION: Final = "1"

E = TypeVar("E", bound=type[Experts])
C = TypeVar("C", bound="Cell")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One registered rectangle, whatever its class does.

    Attributes:
        name: As requests spell it; several cells share one.
        priority: Higher is faster; measured, never read from the problem.
        rules: Platforms it runs on.
        requires: Distribution version ranges.
        probes: Checks of the machine, run once and only for a probed platform.
        opt_in: Whether a request has to name it.
        origin: `builtin` or the distribution that registered it.
        origin_version: That distribution's version, moereg's own for `builtin`; empty where it is not known.
    """

    # What texts call it: at registration, in a request, and its class's own `unsupported_reasons`.
    noun: ClassVar[str]
    requested_as: ClassVar[str]
    predicate: ClassVar[str]

    name: str
    priority: int
    rules: tuple[PlatformRule, ...]
    requires: tuple[str, ...] = ()
    probes: tuple[Probe, ...] = ()
    opt_in: bool = False
    origin: str = BUILTIN
    origin_version: str = ""

    @property
    def implementation(self) -> type[Any]:
        """The class that is registered."""
        raise NotImplementedError

    @property
    def provider(self) -> str:
        """The distribution with its version, or `builtin`."""
        return provider(self.origin, self.origin_version)

    @property
    def class_name(self) -> str:
        """Name of the class."""
        return self.implementation.__name__

    @property
    def rules_text(self) -> str:
        """All its platform rules, as one string."""
        return ", ".join(rule.text for rule in self.rules)

    def rule_for(self, platform: Platform) -> PlatformRule | None:
        """The most specific of the cell's rules that match, or None."""
        return _most_specific(self.rules, platform, KINDS.get(platform.kind))

    def check_beside(self, other: Any) -> None:
        """Checks that it may be stored with another cell of its registry.

        Raises:
            RegistrationError: It may not; the error names both.
        """
        if other.name == self.name and other.origin != self.origin:
            raise RegistrationError(
                f"{self.noun} name {self.name!r} belongs to {other.origin} ({other.class_name}); {self.class_name} of "
                f"{self.origin} needs another name"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackendCell(Cell):
    """One registered rectangle of quant schemes x platforms. Further attributes are those of `Cell`.

    Attributes:
        experts: Experts class.
        schemes: What it computes.
        facts: The class's, narrowed for this rectangle.
        tier: `kernel` or `emulation`.
    """

    noun: ClassVar[str] = "backend"
    requested_as: ClassVar[str] = "backend"
    predicate: ClassVar[str] = "predicate"

    experts: type[Experts]
    schemes: tuple[QuantScheme, ...]
    facts: Facts = dataclasses.field(compare=False)
    tier: str = "kernel"

    @property
    def implementation(self) -> type[Experts]:
        """Its experts class."""
        return self.experts

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

    def check_beside(self, other: BackendCell) -> None:
        """Further, no scheme's name has two meanings, and no problem has two cells of one class that fit it alike."""
        known = {scheme.name: scheme for scheme in other.schemes}
        for scheme in self.schemes:
            if known.get(scheme.name, scheme) != scheme:
                raise RegistrationError(
                    f"scheme name {scheme.name!r} of backend {self.name!r} of {self.origin} is {known[scheme.name]} in "
                    f"backend {other.name!r} of {other.origin}; give {scheme} another name"
                )
        super().check_beside(other)
        schemes = sorted(scheme.name for scheme in self.schemes if scheme.name in known)
        is_same = (other.name, other.experts) == (self.name, self.experts)
        if not is_same or not schemes or disjoint_fact(other.facts, self.facts) is not None:
            return
        for first, second in itertools.product(other.rules, self.rules):
            if first.overlaps(second):
                raise RegistrationError(
                    f"{self.class_name} of {self.origin} registers {self.name!r} twice for scheme {schemes[0]}: "
                    f"rules {first} (priority {other.priority}) and {second} (priority {self.priority}) are equally "
                    "specific and match the same platforms; keep one decorator, name architectures exactly, exclude "
                    f"platforms ({first},!...), or narrow a fact so that no problem fits both (activations=...)"
                )


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


class Registry(Generic[C]):
    """All registered cells, in order of registration. Thread-safe: readers see all of a change or nothing of it.

    Attributes:
        kind: Class of its cells.
        owner_of: Name and version of the distribution that registers a name in a module, None where it is not known.
        collect: Takes a cell of a plugin that is being imported, until all of the plugin's are known; False where none
            is.
        load: Loads all that are installed and returns the cells. The loader of plugins sets all three.
    """

    kind: ClassVar[type[Cell]]

    def __init__(self) -> None:
        self._cells: tuple[C, ...] = ()
        self._lock = threading.Lock()
        self.owner_of: Callable[[str, str], tuple[str, str] | None] = lambda name, module: None
        self.collect: Callable[[C], bool] = lambda cell: False
        self.load: Callable[[], tuple[C, ...]] = self._load_first

    def _load_first(self) -> tuple[C, ...]:
        """Imports the loader of plugins, which sets `load` of the registries that it fills."""
        importlib.import_module("moereg.plugins.loader")
        return self._cells if self.load == self._load_first else self.load()

    @property
    def cells(self) -> tuple[C, ...]:
        """All cells."""
        return self._cells

    @property
    def names(self) -> tuple[str, ...]:
        """The names that cells are registered under, sorted."""
        return tuple(sorted({cell.name for cell in self._cells}))

    def by_name(self, name: str) -> tuple[C, ...]:
        """Cells of one name."""
        return tuple(cell for cell in self._cells if cell.name == name)

    def publish(self, cells: Iterable[C], replaced: Iterable[C] = ()) -> None:
        """Stores cells, all at once, in the place of others.

        Raises:
            RegistrationError: A cell contradicts another, as `check_beside` of the cell says. Nothing is stored or
                removed then.
        """
        gone = {id(cell) for cell in replaced}
        with self._lock:
            stored = [cell for cell in self._cells if id(cell) not in gone]
            for cell in cells:
                for other in stored:
                    cell.check_beside(other)
                stored.append(cell)
            self._cells = tuple(stored)

    def snapshot(self) -> tuple[C, ...]:
        """The cells, for `restore`."""
        return self._cells

    def restore(self, cells: Iterable[C]) -> None:
        """Puts back what `snapshot` returned."""
        with self._lock:
            self._cells = tuple(cells)


class BackendRegistry(Registry[BackendCell]):
    """Cells of backends."""

    kind = BackendCell


REGISTRY: Final = BackendRegistry()


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
        registry: Where to store; the one that `select_backend` reads by default. `moereg.selection.decide.decide`
            chooses among the cells of any.
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
        registration = Registration(target, name, experts)
        with registration.checking():
            shared = registration.shared_fields(name, priority, platforms, requires, probes, opt_in)
            check_experts(experts)
            if tier not in TIERS:
                raise ArgumentError(f"tier must be one of {TIERS}, got {shown(tier)}")
            schemes, facts = read_schemes(quant_schemes), narrow_facts(experts.facts, narrowed)
        registration.store(BackendCell(experts=experts, schemes=schemes, facts=facts, tier=tier, **shared))
        return experts

    return decorate
