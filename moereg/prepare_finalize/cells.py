"""The registry of ways to move tokens between ranks, and the decorator that fills it, as `moereg.registry` is."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

from typing_extensions import Unpack

from moereg._version import __version__
from moereg.arguments import check_instance
from moereg.errors import RegistrationError, shown
from moereg.platforms import Platform, PlatformRule
from moereg.plugins import is_reserved
from moereg.prepare_finalize.facts import (
    MovementFacts,
    NarrowedMovementFacts,
    check_movement_facts,
    narrow_movement_facts,
)
from moereg.prepare_finalize.moving import GroupPrepareFinalize
from moereg.problem import ACTIVATION_FORMATS
from moereg.registration import Probe, check_name, check_rank, read_probes, read_requirements, read_rules
from moereg.registry import BUILTIN, provider

__all__ = ["MOVEMENTS", "MovementCell", "MovementRegistry", "register_prepare_finalize", "registering_movements"]

M = TypeVar("M", bound=type[GroupPrepareFinalize])


@dataclasses.dataclass(frozen=True)
class MovementCell:
    """One registered rectangle of activation formats x platforms of a way to move tokens.

    Attributes:
        name: As requests spell it; several cells share one.
        movement: The class.
        priority: Higher is faster; never reads the problem.
        formats: Activation formats that the experts may see.
        rules: Platforms it runs on.
        facts: The class's, narrowed for this rectangle.
        requires: Distribution version ranges.
        probes: Checks of the machine.
        opt_in: Whether a request has to name it.
        predicted: Whether the priority was predicted and not measured.
        origin: `builtin` or the distribution that registered it.
        origin_version: That distribution's version.
    """

    name: str
    movement: type[GroupPrepareFinalize]
    priority: int
    formats: tuple[str, ...]
    rules: tuple[PlatformRule, ...]
    facts: MovementFacts
    requires: tuple[str, ...] = ()
    probes: tuple[Probe, ...] = ()
    opt_in: bool = False
    predicted: bool = False
    origin: str = BUILTIN
    origin_version: str = ""

    @property
    def provider(self) -> str:
        """The distribution with its version, or `builtin`."""
        return provider(self.origin, self.origin_version)

    @property
    def class_name(self) -> str:
        """Name of the class."""
        return self.movement.__name__

    @property
    def rules_text(self) -> str:
        """All its platform rules, as one string."""
        return ", ".join(rule.text for rule in self.rules)

    def rule_for(self, platform: Platform) -> PlatformRule | None:
        """The most specific of the cell's rules that match, or None."""
        matching = [rule for rule in self.rules if rule.matches(platform)]
        return max(matching, key=lambda rule: rule.specificity, default=None)


class MovementRegistry:
    """All registered ways, in order of registration. Thread-safe: readers see all of a change or nothing of it.

    Attributes:
        owner_of: Name and version of the distribution of a module, None where it is not known; the loader of plugins
            sets it.
    """

    def __init__(self) -> None:
        self._cells: tuple[MovementCell, ...] = ()
        self._lock = threading.Lock()
        self.owner_of: Callable[[str], tuple[str, str] | None] = lambda module: None

    @property
    def cells(self) -> tuple[MovementCell, ...]:
        """All cells."""
        return self._cells

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all ways, sorted."""
        return tuple(sorted({cell.name for cell in self._cells}))

    def publish(self, cells: Iterable[MovementCell]) -> None:
        """Stores cells, all at once.

        Raises:
            RegistrationError: A name belongs to another distribution, or a class says the same twice. Nothing is
                stored then.
        """
        with self._lock:
            stored = list(self._cells)
            for cell in cells:
                stored = [other for other in stored if not _is_redefined(other, cell)]
                for other in stored:
                    _check_compatible(other, cell)
                stored.append(cell)
            self._cells = tuple(stored)

    def snapshot(self) -> tuple[MovementCell, ...]:
        """The cells, for `restore`."""
        return self._cells

    def restore(self, cells: Iterable[MovementCell]) -> None:
        """Puts back what `snapshot` returned."""
        with self._lock:
            self._cells = tuple(cells)


def _is_redefined(other: MovementCell, cell: MovementCell) -> bool:
    """Whether a notebook's cell that runs again brings the class anew."""
    mine, theirs = cell.movement, other.movement
    same = (mine.__module__, mine.__qualname__) == (theirs.__module__, theirs.__qualname__)
    return other.name == cell.name and mine is not theirs and same


def _check_compatible(other: MovementCell, cell: MovementCell) -> None:
    if other.name != cell.name:
        return
    if other.origin != cell.origin:
        raise RegistrationError(
            f"prepare/finalize name {cell.name!r} belongs to {other.origin} ({other.class_name}); {cell.class_name} of "
            f"{cell.origin} needs another name"
        )
    mine, theirs = (dataclasses.replace(each, priority=0, predicted=False) for each in (cell, other))
    if mine == theirs:
        raise RegistrationError(
            f"{cell.class_name} of {cell.origin} registers {cell.name!r} twice for the same formats, platforms and "
            f"facts (priorities {other.priority} and {cell.priority}); keep one decorator, or narrow a fact"
        )


MOVEMENTS: Final = MovementRegistry()

_PENDING: contextvars.ContextVar[tuple[list[MovementCell], tuple[str, str]] | None] = contextvars.ContextVar(
    "moereg_movements", default=None
)


@contextlib.contextmanager
def registering_movements(origin: str, version: str) -> Iterator[list[MovementCell]]:
    """Inside, ways that this thread registers are of that distribution and collected in the list that this yields."""
    pending: list[MovementCell] = []
    token = _PENDING.set((pending, (origin, version)))
    try:
        yield pending
    finally:
        _PENDING.reset(token)


def register_prepare_finalize(
    name: str,
    priority: int,
    formats: Iterable[str],
    platforms: Iterable[str],
    *,
    requires: Iterable[str] = (),
    probes: Iterable[Probe] = (),
    opt_in: bool = False,
    predicted: bool = False,
    registry: MovementRegistry | None = None,
    **narrowed: Unpack[NarrowedMovementFacts],
) -> Callable[[M], M]:
    """Registers a way to move tokens for activation formats x platforms. Stack one decorator per rectangle.

    Args:
        name: As requests spell it: lower case, digits and underscores.
        priority: Higher is faster. Cite the measurement that set it.
        formats: Activation formats that it offers the experts: `standard`, `batched`.
        platforms: Rules such as `cuda:sm90+`, `cpu`, `*`.
        requires: Distribution version ranges such as `deep_ep>=1.2`.
        probes: Checks of the machine at hand for what versions cannot say.
        opt_in: Whether a request has to name it.
        predicted: Whether the priority was predicted and not measured, which `explain` says then.
        registry: Where to store; the one that `make_kernel` reads by default.
        **narrowed: Fields of `MovementFacts` that promise less here than in the class.

    Returns:
        A decorator that returns the class unchanged.

    Raises:
        RegistrationError: Anything invalid; nothing is stored then.

    Example:
        >>> from moereg.prepare_finalize import GroupPrepareFinalize, MovementFacts
        >>> @moereg.register_prepare_finalize("mine", priority=1, formats=("standard",), platforms=("cuda:sm90+",))
        ... class Mine(GroupPrepareFinalize):
        ...     facts = MovementFacts(transports=frozenset({"cuda:nccl"}), dtypes=frozenset({"bfloat16"}))
        ...     def prepare(self, hidden_states, topk_weights, topk_ids, problem, expert_map): ...
        ...     def finalize(self, out, expert_out, prepared, problem): ...
        >>> problem = moereg.MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2)
        >>> group = moereg.prepare_finalize.GroupFacts(4)
        >>> moereg.explain_movements(problem, group, platform="cuda:sm90", require="mine").winner.name
        'mine'
    """

    def decorate(movement: M) -> M:
        target = MOVEMENTS if registry is None else registry
        check_instance("registry", target, MovementRegistry, "leave it out for the one that make_kernel reads")
        module = str(getattr(movement, "__module__", "nowhere"))
        is_builtin = module.startswith("moereg.")
        pending = _PENDING.get() if target is MOVEMENTS and not is_builtin else None
        if pending is not None:
            origin, version = pending[1]
        else:
            origin, version = (BUILTIN, __version__) if is_builtin else target.owner_of(module) or (module, "")
        who = f"prepare/finalize {shown(name)} ({getattr(movement, '__name__', None) or shown(movement)} of {origin})"
        if not is_builtin and is_reserved(origin):
            raise RegistrationError(f"{who}: {origin!r} stands for moereg itself; rename that distribution or module")
        check_name(name, who)
        _check_class(movement, who)
        check_rank(priority, opt_in, "kernel", who)
        if not isinstance(predicted, bool):
            raise RegistrationError(f"{who}: predicted must be True or False, got {shown(predicted)}")
        cell = MovementCell(
            name=name,
            movement=movement,
            priority=priority,
            formats=_read_formats(formats, who),
            rules=read_rules(platforms, who),
            facts=narrow_movement_facts(movement.facts, narrowed, who),
            requires=read_requirements(requires, who),
            probes=read_probes(probes, who),
            opt_in=opt_in,
            predicted=predicted,
            origin=origin,
            origin_version=version,
        )
        if pending is None:
            target.publish((cell,))
        else:
            pending[0].append(cell)
        movement.name = name
        return movement

    return decorate


def _read_formats(formats: Iterable[str], who: str) -> tuple[str, ...]:
    if isinstance(formats, str) or not isinstance(formats, (tuple, list, set, frozenset)) or not formats:
        raise RegistrationError(f"{who}: formats must be a tuple of activation formats, got {shown(formats)}")
    for name in formats:
        if name not in ACTIVATION_FORMATS:
            raise RegistrationError(f"{who}: formats must be among {', '.join(ACTIVATION_FORMATS)}, got {shown(name)}")
    return tuple(name for name in ACTIVATION_FORMATS if name in formats)


def _check_class(movement: object, who: str) -> None:
    """Checks that the class is complete, takes the arguments of `GroupPrepareFinalize`, and declares its facts."""
    if not (isinstance(movement, type) and issubclass(movement, GroupPrepareFinalize)):
        raise RegistrationError(f"{who}: the decorated class must subclass moereg.author.GroupPrepareFinalize")
    if missing := sorted(movement.__abstractmethods__):
        raise RegistrationError(f"{who}: abstract methods are missing: {', '.join(missing)}")
    for method in ("__init__", "prepare", "finalize", "experts_problem_of", "unsupported_reasons"):
        expected = list(inspect.signature(getattr(GroupPrepareFinalize, method)).parameters)
        found = inspect.signature(getattr(movement, method)).parameters
        required = [each.name for each in list(found.values())[len(expected) :] if each.default is each.empty]
        if list(found)[: len(expected)] != expected or required:
            raise RegistrationError(f"{who}: {method} must take ({', '.join(expected)}), got ({', '.join(found)})")
    check_movement_facts(movement.facts, who)
