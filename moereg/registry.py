"""BackendCell, BackendRegistry and the decorator that fills it: validate first, then store."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Final, TypeVar

from packaging.requirements import InvalidRequirement, Requirement

from moereg.activations import ACTIVATIONS
from moereg.arguments import check_instance
from moereg.errors import ArgumentError, RegistrationError, UnknownNameError, one_line, shown, unknown_name_message
from moereg.experts import INPUT_FORMS, OUTPUT_FORMS, Experts, Facts
from moereg.platforms import Platform, PlatformRule
from moereg.problem import ACTIVATION_FORMATS, DTYPES, PLACEMENTS
from moereg.quant import QUANT_SCHEMES, QuantScheme, get_scheme

__all__ = [
    "API_VERSION",
    "BUILTIN",
    "REGISTRY",
    "TIERS",
    "BackendCell",
    "BackendRegistry",
    "Probe",
    "register_moe_backend",
    "registering_origin",
]

API_VERSION: Final = "1"
BUILTIN: Final = "builtin"
TIERS: Final = ("kernel", "emulation")

Probe = Callable[[Platform], str | None]
"""Looks for a toolchain or prebuilt library on the machine at hand; returns the reason it cannot run, or None."""

E = TypeVar("E", bound=type[Experts])
T = TypeVar("T")


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

    @property
    def class_name(self) -> str:
        """Name of the experts class."""
        return self.experts.__name__

    def rule_for(self, platform: Platform) -> PlatformRule | None:
        """The most specific of the cell's rules that match, or None."""
        return _most_specific(self.rules, platform)

    def scheme_for(self, checkpoint: QuantScheme) -> QuantScheme | None:
        """What it computes for a checkpoint's scheme: the same, or the 16-bit form; None where it cannot.

        The same may have another name: formats are what counts.
        """
        serving = [scheme for scheme in self.schemes if scheme.serves(checkpoint)]
        exact = [scheme for scheme in serving if scheme.activation == checkpoint.activation]
        return checkpoint if checkpoint in serving else next(iter([*exact, *serving]), None)


@functools.lru_cache(maxsize=4096)
def _most_specific(rules: tuple[PlatformRule, ...], platform: Platform) -> PlatformRule | None:
    matching = [rule for rule in rules if rule.matches(platform)]
    return max(matching, key=lambda rule: rule.specificity, default=None)


class BackendRegistry:
    """All registered cells, in order of registration."""

    def __init__(self) -> None:
        self._cells: list[BackendCell] = []
        self._version = 0

    @property
    def version(self) -> int:
        """Changes with every registration, so that caches can be keyed by it."""
        return self._version

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
            RegistrationError: The name belongs to another distribution, the same experts class claims one of its
                schemes on an equally specific rule already, or a scheme's name means something else elsewhere. Nothing
                is stored then.
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
        self._version += 1

    def adopt(self, modules: str, origin: str) -> tuple[BackendCell, ...]:
        """Gives a distribution the cells that were registered by its modules before it was known, by a direct import.

        Args:
            modules: A module, with those below it.
            origin: The distribution.

        Returns:
            The cells, with their new origin.
        """
        adopted: list[BackendCell] = []
        for place, cell in enumerate(self._cells):
            module = cell.experts.__module__
            if cell.origin == module and f"{module}.".startswith(f"{modules}."):
                self._cells[place] = dataclasses.replace(cell, origin=origin)
                adopted.append(self._cells[place])
        self._version += bool(adopted)
        return tuple(adopted)

    def snapshot(self) -> tuple[BackendCell, ...]:
        """The cells, for `restore`."""
        return tuple(self._cells)

    def restore(self, cells: Sequence[BackendCell]) -> None:
        """Puts back what `snapshot` returned."""
        self._cells = list(cells)
        self._version += 1


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
    for first, second in itertools.product(one.rules, other.rules):
        if schemes and first.overlaps(second):
            raise RegistrationError(
                f"{other.class_name} of {other.origin} registers {other.name!r} twice for scheme {sorted(schemes)[0]}: "
                f"rules {first} (priority {one.priority}) and {second} (priority {other.priority}) are equally "
                "specific and match the same platforms; keep one decorator or name architectures exactly"
            )


REGISTRY: Final = BackendRegistry()
_ORIGIN: contextvars.ContextVar[str] = contextvars.ContextVar("moereg_origin", default="")


@contextlib.contextmanager
def registering_origin(origin: str) -> Iterator[None]:
    """Cells registered inside belong to that distribution (`builtin` for moereg's own)."""
    token = _ORIGIN.set(origin)
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
    **narrowed: Any,
) -> Callable[[E], E]:
    """Registers an experts class for quant schemes x platforms. Stack one decorator a rectangle.

    Args:
        name: As requests spell it: lower case, digits and underscores.
        priority: Higher is faster. Cite the measurement that set it.
        quant_schemes: Names or values.
        platforms: Rules such as `cuda:sm80+`, `rocm:gfx942`, `cpu`, `*`.
        requires: Distribution version ranges such as `triton>=3.6`.
        probes: Checks of the machine at hand for what versions cannot say.
        opt_in: Whether a request has to name the backend.
        tier: `kernel`, or `emulation` which never beats a kernel.
        registry: Where to store; the global one by default.
        **narrowed: Fields of `Facts` that are smaller here than in the class.

    Returns:
        A decorator that returns the class unchanged.

    Raises:
        RegistrationError: Anything invalid; nothing is stored then.
    """

    def decorate(experts: E) -> E:
        target = REGISTRY if registry is None else registry
        check_instance("registry", target, BackendRegistry, "leave it out for the one that selection reads")
        module = str(getattr(experts, "__module__", "nowhere"))
        origin = _ORIGIN.get() or (BUILTIN if module.startswith("moereg.") else module)
        who = f"backend {shown(name)} ({getattr(experts, '__name__', None) or shown(experts)} of {origin})"
        _check_name(name, who)
        _check_class(experts, who)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RegistrationError(f"{who}: priority must be an integer, got {shown(priority)}")
        if not isinstance(opt_in, bool):
            raise RegistrationError(f"{who}: opt_in must be True or False, got {shown(opt_in)}")
        if not isinstance(tier, str) or tier not in TIERS:
            raise RegistrationError(f"{who}: tier must be one of {TIERS}, got {shown(tier)}")
        cell = BackendCell(
            name=name,
            experts=experts,
            priority=priority,
            schemes=_schemes(quant_schemes, who),
            rules=_rules(platforms, who),
            facts=_narrow(experts.facts, narrowed, who),
            requires=_requirements(requires, who),
            probes=_probes(probes, who),
            opt_in=opt_in,
            tier=tier,
            origin=origin,
        )
        target.add(cell)
        return experts

    return decorate


def _check_name(name: str, who: str) -> None:
    if not isinstance(name, str) or not name.replace("_", "").isalnum() or name != name.lower() or not name.isascii():
        raise RegistrationError(f"{who}: a name is lower-case letters, digits and underscores, got {shown(name)}")


def _check_class(experts: object, who: str) -> None:
    if not (isinstance(experts, type) and issubclass(experts, Experts)):
        raise RegistrationError(f"{who}: the decorated class must subclass moereg.author.Experts")
    if missing := sorted(experts.__abstractmethods__):
        raise RegistrationError(f"{who}: abstract methods are missing: {', '.join(missing)}")
    for method in ("__init__", "permute_weights", "workspace_shapes", "apply", "unsupported_reasons", "device_types"):
        expected = list(inspect.signature(getattr(Experts, method)).parameters)
        found = list(inspect.signature(getattr(experts, method)).parameters)
        if found != expected:
            raise RegistrationError(
                f"{who}: {method} must take ({', '.join(expected)}), got ({', '.join(found)}); "
                "the dispatcher passes them by these names"
            )
    if not isinstance(experts.facts, Facts):
        raise RegistrationError(f"{who}: facts must be a moereg.author.Facts, got {type(experts.facts).__name__}")
    _check_facts(experts.facts, who)
    if experts.input_form not in INPUT_FORMS:
        raise RegistrationError(f"{who}: input_form must be one of {INPUT_FORMS}, got {experts.input_form!r}")
    if experts.output_form not in OUTPUT_FORMS:
        raise RegistrationError(f"{who}: output_form must be one of {OUTPUT_FORMS}, got {experts.output_form!r}")
    if not experts.layouts or not isinstance(experts.layouts, tuple):
        raise RegistrationError(
            f"{who}: layouts must be a tuple of at least one layout of permuted weights, got {experts.layouts!r}"
        )


_NAME_FACTS: Final[dict[str, Collection[str]]] = {
    "activations": ACTIVATIONS,
    "activation_formats": ACTIVATION_FORMATS,
    "dtypes": DTYPES,
    "placements": PLACEMENTS,
}
_DIVISOR_FACTS: Final = ("requires_multiple", "pads_to")
_COUNT_FACTS: Final = ("max_experts", "max_num_tokens")
_PROBLEM_COUNTS: Final = ("num_experts", "num_local_experts", "hidden_size", "intermediate_size", "top_k")


def _check_facts(facts: Facts, who: str) -> None:
    """Every fact is what the dispatcher reads it as, so that evaluating a cell cannot fail."""
    for field in (field.name for field in dataclasses.fields(Facts)):
        value = getattr(facts, field)
        if field in _NAME_FACTS:
            known = _NAME_FACTS[field]
            if not isinstance(value, frozenset):
                raise RegistrationError(f"{who}: {field} must be a frozenset of names, got {shown(value)}")
            if unknown := sorted(map(str, value - set(known))):
                raise RegistrationError(f"{who}: {unknown_name_message(f'name in {field}', unknown[0], known)}")
        elif field in _DIVISOR_FACTS:
            if not isinstance(value, Mapping):
                raise RegistrationError(f"{who}: {field} must map problem fields to divisors, got {shown(value)}")
            for size, divisor in value.items():
                if size not in _PROBLEM_COUNTS:
                    raise RegistrationError(f"{who}: {unknown_name_message(f'size in {field}', size, _PROBLEM_COUNTS)}")
                if not _is_count(divisor):
                    raise RegistrationError(
                        f"{who}: {field}[{size!r}] must be an integer of at least 1, got {shown(divisor)}"
                    )
        elif field in _COUNT_FACTS:
            if value is not None and not _is_count(value):
                raise RegistrationError(f"{who}: {field} must be None or an integer of at least 1, got {shown(value)}")
        elif not isinstance(value, bool):
            raise RegistrationError(f"{who}: {field} must be True or False, got {shown(value)}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _probes(probes: Iterable[Probe], who: str) -> tuple[Probe, ...]:
    checked = () if callable(probes) else _items(probes, "probes", who)
    # Answers are kept by probe.
    if callable(probes) or not all(callable(probe) and isinstance(probe, Hashable) for probe in checked):
        raise RegistrationError(f"{who}: probes must be a tuple of functions that take a Platform, got {shown(probes)}")
    return checked


def _items(values: Iterable[T], field: str, who: str) -> tuple[T, ...]:
    if not isinstance(values, (Sequence, Set)):
        raise RegistrationError(f"{who}: {field} must be a tuple, got {shown(values)}")
    return tuple(values)


def _schemes(names: Iterable[str | QuantScheme], who: str) -> tuple[QuantScheme, ...]:
    if isinstance(names, str):
        raise RegistrationError(f"{who}: quant_schemes must be a tuple of names, got the string {shown(names)}")
    try:
        schemes = tuple(get_scheme(name) for name in _items(names, "quant_schemes", who))
    except (ArgumentError, UnknownNameError) as error:
        raise RegistrationError(f"{who}: {error}; a new scheme is passed as a QuantScheme value") from error
    if not schemes:
        raise RegistrationError(f"{who}: quant_schemes must name at least one scheme")
    for scheme in schemes:
        if QUANT_SCHEMES.get(scheme.name, scheme) != scheme:
            raise RegistrationError(
                f"{who}: scheme name {scheme.name!r} is moereg's for {QUANT_SCHEMES[scheme.name]}; "
                f"give {scheme} another name"
            )
    return schemes


def _rules(texts: Iterable[str], who: str) -> tuple[PlatformRule, ...]:
    if isinstance(texts, str):
        raise RegistrationError(f"{who}: platforms must be a tuple of rules, got the string {shown(texts)}")
    try:
        rules = tuple(PlatformRule(text) for text in _items(texts, "platforms", who))
    except (ArgumentError, UnknownNameError) as error:
        raise RegistrationError(f"{who}: {error}") from error
    if not rules:
        raise RegistrationError(f"{who}: platforms must name at least one rule")
    for first, second in itertools.combinations(rules, 2):
        if first.overlaps(second):
            raise RegistrationError(f"{who}: rules {first} and {second} are equally specific and overlap; keep one")
    return rules


def _requirements(texts: Iterable[str], who: str) -> tuple[str, ...]:
    if isinstance(texts, str):
        raise RegistrationError(f"{who}: requires must be a tuple of requirements, got the string {shown(texts)}")
    checked = []
    for text in _items(texts, "requires", who):
        try:
            checked.append(str(Requirement(text)))
        except (InvalidRequirement, TypeError) as error:
            raise RegistrationError(
                f"{who}: requires {shown(text)} is not a version range: {one_line(str(error))}"
            ) from error
    return tuple(checked)


def _narrow(facts: Facts, narrowed: dict[str, Any], who: str) -> Facts:
    known = {field.name for field in dataclasses.fields(Facts)}
    changes: dict[str, Any] = {}
    for field, value in narrowed.items():
        if field not in known:
            raise RegistrationError(f"{who}: unknown fact {field!r} (known: {', '.join(sorted(known))})")
        wider = getattr(facts, field)
        if isinstance(wider, frozenset) and isinstance(value, (set, tuple, list)) and set(map(type, value)) <= {str}:
            value = frozenset(value)
        _check_facts(dataclasses.replace(facts, **{field: value}), who)
        if not _is_narrower(value, wider):
            raise RegistrationError(
                f"{who}: a decorator may narrow the class's facts, never widen them; "
                f"{field}={shown(value)} against {shown(wider)}"
            )
        changes[field] = value
    return dataclasses.replace(facts, **changes)


def _is_narrower(value: Any, wider: Any) -> bool:
    if isinstance(wider, frozenset):
        return bool(value <= wider)
    if isinstance(wider, bool):
        return wider or not value
    if isinstance(wider, Mapping):
        # A larger divisor that the class's divides rejects more sizes.
        return all(value.get(field, 1) % divisor == 0 for field, divisor in wider.items())
    return wider is None or (value is not None and value <= wider)
