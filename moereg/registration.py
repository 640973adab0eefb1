"""A decorator at work: whose its class is, checks of its arguments, and where its cell goes.

A cell is valid before it is stored. Every check raises `ArgumentError`; the user gets a `RegistrationError` that starts
with the entry, its class and their origin.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Final, TypeVar

from packaging.requirements import InvalidRequirement, Requirement

from moereg._version import __version__
from moereg.arguments import check_flag
from moereg.errors import ArgumentError, RegistrationError, UnknownNameError, one_line, shown
from moereg.experts import INPUT_FORMS, OUTPUT_FORMS, Experts
from moereg.platforms import Platform, PlatformRule
from moereg.spec.facts import Facts, check_facts
from moereg.spec.quant_schemes import QUANT_SCHEMES, QuantScheme, get_scheme

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

T = TypeVar("T")


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
    """The origin of a decorated class, and the way of its cell into a registry.

    Attributes:
        who: The entry, its class and their origin.
    """

    def __init__(self, registry: Any, name: object, implementation: object) -> None:
        """Finds the origin of a class, for a `moereg.registry.Registry`."""
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
        self.who = f"{registry.kind.noun} {shown(name)} ({called} of {origin})"

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Errors of what is checked inside begin with `who`."""
        try:
            yield
        except (ArgumentError, UnknownNameError) as error:
            raise RegistrationError(f"{self.who}: {error}") from error

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
    """Whether a method takes the arguments of the base class's.

    Those without a default have to come first, in order. Later ones may be left out: the dispatcher passes only what a
    method takes, so that an argument that a minor version adds breaks no class. A method may have more of its own, if
    they have defaults.
    """
    required = [parameter.name for parameter in expected if parameter.default is parameter.empty]
    named = [parameter.name for parameter in found if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = {each.name for each in found if each.default is each.empty and each.kind not in variadic}
    return named[: len(required)] == required and needed <= {parameter.name for parameter in expected}


def _read_probes(probes: Iterable[Probe]) -> tuple[Probe, ...]:
    """Probes as a tuple of hashable functions."""
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
    """Platform rules; no two of equal specificity may match the same platform."""
    rules = tuple(map(PlatformRule, _items(texts, "platforms", of="rules")))
    if not rules:
        raise ArgumentError("platforms must name at least one rule")
    for first, second in itertools.combinations(rules, 2):
        if first.overlaps(second):
            raise ArgumentError(f"rules {first} and {second} are equally specific and overlap; keep one")
    return rules


def _read_requirements(texts: Iterable[str]) -> tuple[str, ...]:
    """Version ranges in one spelling."""
    checked = []
    for text in _items(texts, "requires", of="requirements"):
        try:
            checked.append(str(Requirement(text)))
        except (InvalidRequirement, TypeError) as error:
            raise ArgumentError(f"requires {shown(text)} is not a version range: {one_line(str(error))}") from error
    return tuple(checked)
