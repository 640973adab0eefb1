"""Cells, the registries that hold them, and the decorator for backends: validate first, then store.

A cell is one claim of a class: what it computes, where, and with which priority. Backends and token dispatchers
between ranks (`moereg.prepare_finalize.cells`) are registered, kept and published by the same code.

A registry of one's own is filled with `register_moe_backend(..., registry=mine)` and chosen from with
`moereg.selection.decide.decide(..., cells=mine.cells)`.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, ClassVar, Final, Generic, ParamSpec, TypeVar

from packaging.requirements import InvalidRequirement, Requirement
from typing_extensions import Unpack

from moereg._version import __version__
from moereg.arguments import check_flag, check_instance
from moereg.errors import ArgumentError, RegistrationError, UnknownNameError, one_line, shown, unknown_name_message
from moereg.experts import INPUT_FORMS, OUTPUT_FORMS, Experts
from moereg.platforms import KINDS, Platform, PlatformKind, PlatformRule
from moereg.spec.facts import Facts, NarrowedFacts, check_facts, disjoint_fact, narrow_facts
from moereg.spec.quant_schemes import QUANT_SCHEMES, QuantScheme, get_scheme

API_VERSION: Final = "1"

BUILTIN: Final = "builtin"
"""The origin of moereg's own cells."""

AUTO: Final = "auto"
"""In require or prefer: no wish, which beats one of a weaker source. No backend has this name."""

LONGEST_NAME: Final = 100
"""Longest name of a backend, in characters: tables have a column of names."""

HIGHEST_PRIORITY: Final = 1_000_000
"""Room for every order; a number that each reader of the JSON can hold."""

TIERS: Final = ("kernel", "emulation")

_TRAINING: Final = ("saved_shapes", "apply_saving", "apply_backward")

Probe = Callable[[Platform], str | None]
"""Looks for a toolchain or prebuilt library on the machine at hand; returns the reason it cannot run, or None."""

E = TypeVar("E", bound=type[Experts])
C = TypeVar("C", bound="Cell")
T = TypeVar("T")
P = ParamSpec("P")


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
        """Checks that it may be stored with another cell of its registry: else a RegistrationError names both."""
        if other.name == self.name and other.origin != self.origin:
            raise RegistrationError(
                f"{self.noun} name {self.name!r} belongs to {other.origin} ({other.class_name}); {self.class_name} of "
                f"{self.origin} needs another name"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackendCell(Cell):
    """One registered rectangle of quant schemes x platforms. Its facts are the class's, narrowed for it."""

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
            is. The loader of plugins sets both.
    """

    kind: ClassVar[type[Cell]]

    def __init__(self) -> None:
        self._cells: tuple[C, ...] = ()
        self._lock = threading.Lock()
        self.owner_of: Callable[[str, str], tuple[str, str] | None] = lambda name, module: None
        self.collect: Callable[[C], bool] = lambda cell: False

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

        If one contradicts another by its `check_beside`, nothing is stored or removed.
        """
        gone = {id(cell) for cell in replaced}
        with self._lock:
            stored = [cell for cell in self._cells if id(cell) not in gone]
            for cell in cells:
                for other in stored:
                    cell.check_beside(other)
                stored.append(cell)
            self._cells = tuple(stored)

    def restore(self, cells: Iterable[C]) -> None:
        """Puts back `cells` as they once were."""
        with self._lock:
            self._cells = tuple(cells)


class BackendRegistry(Registry[BackendCell]):
    """Cells of backends."""

    kind = BackendCell


REGISTRY: Final = BackendRegistry()


def checks_keywords(facts: type) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Names the nearest keyword where one is misspelled; Python would name the argument that is then missing."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = {*inspect.signature(function).parameters, *facts.__annotations__} - {"narrowed"}

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name not in known:
                    raise RegistrationError(unknown_name_message(f"keyword of {function.__name__}", name, known))
            return function(*args, **kwargs)

        return call

    return decorate


@checks_keywords(NarrowedFacts)
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


_ORIGIN: contextvars.ContextVar[tuple[str, str]] = contextvars.ContextVar("moereg_origin", default=("", ""))


@contextlib.contextmanager
def registering_origin(origin: str, version: str = "") -> Iterator[None]:
    """Cells registered inside belong to that distribution (`builtin` for moereg's own) of that version."""
    token = _ORIGIN.set((origin, version))
    try:
        yield
    finally:
        _ORIGIN.reset(token)


class Registration:
    """The origin of a decorated class, and the way of its cell into a `Registry`."""

    def __init__(self, registry: Any, name: object, implementation: object) -> None:
        module = str(getattr(implementation, "__module__", "nowhere"))
        self._registry = registry
        origin, version = _ORIGIN.get()
        owner = None
        if not origin:
            owner = registry.owner_of(str(name), module)
            origin, version = owner or (BUILTIN if module.startswith("moereg.") else module, "")
        self._origin = {"origin": origin, "origin_version": __version__ if origin == BUILTIN else version}
        self._is_owned = owner is not None
        called = getattr(implementation, "__name__", None) or shown(implementation)
        self._who = f"{registry.kind.noun} {shown(name)} ({called} of {origin})"

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Errors of what is checked inside begin with the entry, its class and their origin."""
        try:
            yield
        except (ArgumentError, UnknownNameError) as error:
            raise RegistrationError(f"{self._who}: {error}") from error

    def shared_fields(
        self,
        name: str,
        priority: int,
        platforms: Iterable[str],
        requires: Iterable[str],
        probes: Iterable[Probe],
        opt_in: bool,
    ) -> dict[str, Any]:
        """The fields that cells of every kind have, checked."""
        check_name(name)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ArgumentError(f"priority must be an integer, got {shown(priority)}")
        if abs(priority) > HIGHEST_PRIORITY:
            raise ArgumentError(
                f"priority must be from {-HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}, got {shown(priority)}"
            )
        return {
            "name": "".join(name),  # Plain even if it was an enum's: other processes read it without that class.
            "priority": priority,
            "opt_in": check_flag("opt_in", opt_in),
            "rules": _read_rules(platforms),
            "requires": _read_requirements(requires),
            "probes": _read_probes(probes),
            **self._origin,
        }

    def store(self, cell: Any) -> None:
        """Stores the valid cell, or hands it to the loader of the plugin that is being imported."""
        if self._is_owned and self._registry.collect(cell):
            return
        # A notebook's cell that runs again and a reloaded module define the class anew, under the same name.
        kind = cell.implementation
        bound = getattr(sys.modules.get(kind.__module__), kind.__qualname__, kind)
        named = self._registry.by_name(cell.name)
        again = [other for other in named if other.implementation is bound is not kind]
        self._registry.publish((cell,), replaced=again)


def check_name(name: str) -> None:
    """A name is lower-case letters, digits and underscores."""
    if not isinstance(name, str) or not name.replace("_", "").isalnum() or name != name.lower() or not name.isascii():
        raise ArgumentError(f"a name is lower-case letters, digits and underscores, got {shown(name)}")
    if len(name) > LONGEST_NAME:
        raise ArgumentError(f"a name has at most {LONGEST_NAME} characters, got {len(name)}")
    if name == AUTO:
        raise ArgumentError(f"{AUTO!r} is no name of a backend, since it is no wish in requests; rename it")
    if name in (BUILTIN, "moereg"):
        raise ArgumentError(f"{name!r} is no name of a backend, since it stands for moereg itself; rename it")


def check_class(found: object, base: type, methods: Iterable[str]) -> None:
    """Checks that a class is complete and that its methods take the arguments of the base class's."""
    if not (isinstance(found, type) and issubclass(found, base)):
        raise ArgumentError(f"the decorated class must subclass moereg.author.{base.__name__}")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ArgumentError(f"abstract methods are missing: {', '.join(missing)}")
    for method in methods:
        expected = _parameters(base, method)
        parameters = inspect.signature(getattr(found, method)).parameters
        if not _can_be_called(expected.values(), parameters.values()):
            raise ArgumentError(
                f"{method} must take ({', '.join(expected)}), got ({', '.join(parameters)}); "
                "the dispatcher passes them by these names"
            )


def check_experts(experts: type[Experts]) -> None:
    """Checks that the class is complete, takes the arguments of `Experts`, and declares its facts and forms."""
    methods = ("__init__", "permute_weights", "workspace_shapes", "apply", "unsupported_reasons", "device_types")
    check_class(experts, Experts, methods)
    if not isinstance(experts.facts, Facts):
        raise ArgumentError(f"facts must be a moereg.author.Facts, got {type(experts.facts).__name__}")
    check_facts(experts.facts)
    if experts.facts.gradients:
        _check_training(experts)
    for name, known in (("output_form", OUTPUT_FORMS), ("input_form", INPUT_FORMS)):
        if (form := getattr(experts, name)) not in known:
            raise ArgumentError(f"{name} must be one of {known}, got {form!r}")
    if not experts.layouts or not isinstance(experts.layouts, tuple):
        raise ArgumentError(
            f"layouts must be a tuple of at least one layout of permuted weights, got {experts.layouts!r}"
        )
    shared: object = experts.shared_layouts
    if not isinstance(shared, tuple) or not all(name in experts.layouts for name in shared):
        raise ArgumentError(f"shared_layouts must be a tuple of names in layouts {experts.layouts!r}, got {shared!r}")


def _check_training(experts: type[Experts]) -> None:
    """Checks that a class whose facts name gradients computes them."""
    check_class(experts, Experts, (*_TRAINING, "backward_workspace_shapes"))
    if missing := [name for name in _TRAINING if getattr(experts, name) is getattr(Experts, name)]:
        named = ", ".join(sorted(experts.facts.gradients))
        raise ArgumentError(f"facts name gradients of ({named}), and methods are missing: {', '.join(missing)}")
    if experts.output_form != "reduced":
        raise ArgumentError(
            f"a class that computes gradients must have output_form 'reduced', got {experts.output_form!r}"
        )
    if "weights" in experts.facts.gradients and "canonical" not in experts.layouts:
        raise ArgumentError(
            f"a class that computes gradients of weights must read them in layout 'canonical', so that a trained "
            f"parameter is read in place, got layouts {experts.layouts!r}"
        )


@functools.cache
def _parameters(base: type, method: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(getattr(base, method)).parameters


def _can_be_called(expected: Iterable[inspect.Parameter], found: Iterable[inspect.Parameter]) -> bool:
    """Whether a method takes the arguments of the base class's: those without a default first, in order.

    Later ones may be left out: the dispatcher passes only what a method takes, so that an argument that a minor version
    adds breaks no class. A method may have more of its own, if they have defaults.
    """
    required = [parameter.name for parameter in expected if parameter.default is parameter.empty]
    named = [parameter.name for parameter in found if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = {each.name for each in found if each.default is each.empty and each.kind not in variadic}
    return named[: len(required)] == required and needed <= {parameter.name for parameter in expected}


def _read_probes(probes: Iterable[Probe]) -> tuple[Probe, ...]:
    checked = () if callable(probes) else _items(probes, "probes")
    # A probe's answer is kept under the probe itself.
    if callable(probes) or not all(callable(probe) and isinstance(probe, Hashable) for probe in checked):
        raise ArgumentError(f"probes must be a tuple of functions that take a Platform, got {shown(probes)}")
    return checked


def _items(values: Iterable[T], field: str, of: str = "") -> tuple[T, ...]:
    if of and isinstance(values, str):
        raise ArgumentError(f"{field} must be a tuple of {of}, got the string {shown(values)}")
    if not isinstance(values, (Sequence, Set)):
        raise ArgumentError(f"{field} must be a tuple, got {shown(values)}")
    return tuple(values)


def read_schemes(names: Iterable[str | QuantScheme]) -> tuple[QuantScheme, ...]:
    """Schemes as values; a known name must have its known meaning."""
    named = _items(names, "quant_schemes", of="names")
    try:
        schemes = tuple(map(get_scheme, named))
    except (ArgumentError, UnknownNameError) as error:
        raise ArgumentError(f"{error}; a new scheme is passed as a QuantScheme value") from error
    if not schemes:
        raise ArgumentError("quant_schemes must name at least one scheme")
    for scheme in schemes:
        if QUANT_SCHEMES.get(scheme.name, scheme) != scheme:
            raise ArgumentError(
                f"scheme name {scheme.name!r} is moereg's for {QUANT_SCHEMES[scheme.name]}; give {scheme} another name"
            )
    return schemes


def _read_rules(texts: Iterable[str]) -> tuple[PlatformRule, ...]:
    rules = tuple(map(PlatformRule, _items(texts, "platforms", of="rules")))
    if not rules:
        raise ArgumentError("platforms must name at least one rule")
    for first, second in itertools.combinations(rules, 2):
        if first.overlaps(second):
            raise ArgumentError(f"rules {first} and {second} are equally specific and overlap; keep one")
    return rules


def _read_requirements(texts: Iterable[str]) -> tuple[str, ...]:
    checked = []
    for text in _items(texts, "requires", of="requirements"):
        try:
            checked.append(str(Requirement(text)))
        except (InvalidRequirement, TypeError) as error:
            raise ArgumentError(f"requires {shown(text)} is not a version range: {one_line(str(error))}") from error
    return tuple(checked)
