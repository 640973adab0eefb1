"""Checks of a decorator's arguments: a cell is valid before it is stored.

Every check raises `RegistrationError`, whose message starts with `who`: the backend, its class and their origin.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from typing import Final, TypeVar

from packaging.requirements import InvalidRequirement, Requirement

from moereg.errors import ArgumentError, RegistrationError, UnknownNameError, one_line, shown
from moereg.experts import INPUT_FORMS, OUTPUT_FORMS, Experts
from moereg.facts import Facts, check_facts
from moereg.platforms import Platform, PlatformRule
from moereg.plugins import is_reserved
from moereg.quant import QUANT_SCHEMES, QuantScheme, get_scheme

__all__ = [
    "AUTO",
    "HIGHEST_PRIORITY",
    "LONGEST_NAME",
    "TIERS",
    "Probe",
    "check_experts",
    "check_name",
    "check_outside_calls",
    "check_rank",
    "read_probes",
    "read_requirements",
    "read_rules",
    "read_schemes",
]

AUTO: Final = "auto"
"""In require or prefer: no wish, which beats one of a weaker source. No backend has this name."""

LONGEST_NAME: Final = 100
"""Of a backend, in characters: tables have a column of them."""

HIGHEST_PRIORITY: Final = 1_000_000
"""Room for every order; a number that each reader of the JSON can hold."""

TIERS: Final = ("kernel", "emulation")

Probe = Callable[[Platform], str | None]
"""Looks for a toolchain or prebuilt library on the machine at hand; returns the reason it cannot run, or None."""

T = TypeVar("T")


def check_name(name: str, who: str) -> None:
    """A name is lower-case letters, digits and underscores."""
    if not isinstance(name, str) or not name.replace("_", "").isalnum() or name != name.lower() or not name.isascii():
        raise RegistrationError(f"{who}: a name is lower-case letters, digits and underscores, got {shown(name)}")
    if len(name) > LONGEST_NAME:
        raise RegistrationError(f"{who}: a name has at most {LONGEST_NAME} characters, got {len(name)}")
    if name == AUTO:
        raise RegistrationError(f"{who}: {AUTO!r} is no name of a backend, since it is no wish in requests; rename it")
    if is_reserved(name):
        raise RegistrationError(
            f"{who}: {name!r} is no name of a backend, since it stands for moereg itself; rename it"
        )


_CALLERS: Final = ("moereg.asking", "moereg.backend_calls", "moereg.layer", "moereg.machine", "moereg.moe_kernel")
"""Modules that call the code of backends once all are loaded."""


def check_outside_calls(name: object, module: str, owner: str) -> None:
    """Refuses what a backend's own code registers while it is called: choices made so far would be of other cells.

    Found on the stack, so that calls cost nothing for it and compiled layers know nothing of it.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and (caller := frame.f_globals.get("__name__")) != "moereg.discovery":
        if caller in _CALLERS:
            raise RegistrationError(
                f"{module} of {owner} registers backend {shown(name)} while a backend's code is called; register when "
                "the module of an entry point is imported"
            )
        frame = frame.f_back


def check_experts(experts: object, who: str) -> None:
    """Checks that the class is complete, takes the arguments of `Experts`, and declares its facts and forms."""
    if not (isinstance(experts, type) and issubclass(experts, Experts)):
        raise RegistrationError(f"{who}: the decorated class must subclass moereg.author.Experts")
    if missing := sorted(experts.__abstractmethods__):
        raise RegistrationError(f"{who}: abstract methods are missing: {', '.join(missing)}")
    for method in ("__init__", "permute_weights", "workspace_shapes", "apply", "unsupported_reasons", "device_types"):
        expected = _parameters(method)
        found = inspect.signature(getattr(experts, method)).parameters
        if not _can_be_called(expected.values(), found.values()):
            raise RegistrationError(
                f"{who}: {method} must take ({', '.join(expected)}), got ({', '.join(found)}); "
                "the dispatcher passes them by these names"
            )
    if not isinstance(experts.facts, Facts):
        raise RegistrationError(f"{who}: facts must be a moereg.author.Facts, got {type(experts.facts).__name__}")
    check_facts(experts.facts, who)
    if experts.output_form not in OUTPUT_FORMS:
        raise RegistrationError(f"{who}: output_form must be one of {OUTPUT_FORMS}, got {experts.output_form!r}")
    if experts.input_form not in INPUT_FORMS:
        raise RegistrationError(f"{who}: input_form must be one of {INPUT_FORMS}, got {experts.input_form!r}")
    if not experts.layouts or not isinstance(experts.layouts, tuple):
        raise RegistrationError(
            f"{who}: layouts must be a tuple of at least one layout of permuted weights, got {experts.layouts!r}"
        )


@functools.cache
def _parameters(method: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(getattr(Experts, method)).parameters


def _can_be_called(expected: Iterable[inspect.Parameter], found: Iterable[inspect.Parameter]) -> bool:
    """Whether a method takes the arguments of the base class's.

    Those without a default have to come first, in order. Later ones may be left out: the dispatcher passes only what a
    method takes, so that an argument that a minor version adds breaks no class. A method may have more of its own, if
    they have defaults.
    """
    required = [parameter.name for parameter in expected if parameter.default is parameter.empty]
    optional = {parameter.name for parameter in expected} - set(required)
    named = [parameter for parameter in found if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    others = {parameter.name: parameter for parameter in found}
    for name in required:
        others.pop(name, None)
    return [parameter.name for parameter in named[: len(required)]] == required and all(
        name in optional or parameter.default is not parameter.empty or parameter.kind in _VARIADIC
        for name, parameter in others.items()
    )


_VARIADIC: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_rank(priority: int, opt_in: bool, tier: str, who: str) -> None:
    """Checks what ranks a cell: an integer, a flag and a known tier."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RegistrationError(f"{who}: priority must be an integer, got {shown(priority)}")
    if abs(priority) > HIGHEST_PRIORITY:
        raise RegistrationError(
            f"{who}: priority must be from {-HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}, got {shown(priority)}"
        )
    if not isinstance(opt_in, bool):
        raise RegistrationError(f"{who}: opt_in must be True or False, got {shown(opt_in)}")
    if not isinstance(tier, str) or tier not in TIERS:
        raise RegistrationError(f"{who}: tier must be one of {TIERS}, got {shown(tier)}")


def read_probes(probes: Iterable[Probe], who: str) -> tuple[Probe, ...]:
    """Probes as a tuple of hashable functions."""
    checked = () if callable(probes) else _items(probes, "probes", who)
    # A probe's answer is kept under the probe itself.
    if callable(probes) or not all(callable(probe) and isinstance(probe, Hashable) for probe in checked):
        raise RegistrationError(f"{who}: probes must be a tuple of functions that take a Platform, got {shown(probes)}")
    return checked


def _items(values: Iterable[T], field: str, who: str) -> tuple[T, ...]:
    if not isinstance(values, (Sequence, Set)):
        raise RegistrationError(f"{who}: {field} must be a tuple, got {shown(values)}")
    return tuple(values)


def read_schemes(names: Iterable[str | QuantScheme], who: str) -> tuple[QuantScheme, ...]:
    """Schemes as values; a known name must have its known meaning."""
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


def read_rules(texts: Iterable[str], who: str) -> tuple[PlatformRule, ...]:
    """Platform rules; no two of equal specificity may match the same platform."""
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


def read_requirements(texts: Iterable[str], who: str) -> tuple[str, ...]:
    """Version ranges in one spelling."""
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
