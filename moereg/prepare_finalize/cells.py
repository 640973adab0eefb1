"""Registry cells of token dispatchers, and the decorator that registers one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import ClassVar, Final, TypeVar

from typing_extensions import Unpack

from moereg.arguments import check_flag, check_instance
from moereg.errors import ArgumentError, RegistrationError, shown
from moereg.prepare_finalize.moving import GroupPrepareFinalize
from moereg.registry import Cell, Probe, Registration, Registry, check_class, checks_keywords
from moereg.spec.facts import DispatcherFacts, NarrowedDispatcherFacts, check_facts, narrow_facts
from moereg.spec.problem import ACTIVATION_FORMATS

_METHODS: Final = ("__init__", "prepare", "finalize", "experts_problem_of", "unsupported_reasons")

M = TypeVar("M", bound=type[GroupPrepareFinalize])


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatcherCell(Cell):
    """One registered rectangle of activation formats x platforms. Further attributes are those of `Cell`.

    Attributes:
        dispatcher: The class.
        formats: Activation formats that the experts may see.
        facts: The class's, narrowed for this rectangle.
        predicted: Whether the priority was predicted, not measured.
    """

    noun: ClassVar[str] = "prepare/finalize"
    requested_as: ClassVar[str] = "dispatcher"
    predicate: ClassVar[str] = "unsupported_reasons"

    dispatcher: type[GroupPrepareFinalize]
    formats: tuple[str, ...]
    facts: DispatcherFacts
    predicted: bool = False

    @property
    def implementation(self) -> type[GroupPrepareFinalize]:
        """The dispatcher's class."""
        return self.dispatcher

    def check_beside(self, other: DispatcherCell) -> None:
        """Also refuses a class that registers the same rectangle twice."""
        super().check_beside(other)
        mine, theirs = (dataclasses.replace(each, priority=0, predicted=False) for each in (self, other))
        if mine == theirs:
            raise RegistrationError(
                f"{self.class_name} of {self.origin} registers {self.name!r} twice for the same formats, platforms and "
                f"facts (priorities {other.priority} and {self.priority}); keep one decorator, or narrow a fact"
            )


class DispatcherRegistry(Registry[DispatcherCell]):
    """Cells of token dispatchers."""

    kind = DispatcherCell


DISPATCHERS: Final = DispatcherRegistry()


@checks_keywords(NarrowedDispatcherFacts)
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
    registry: DispatcherRegistry | None = None,
    **narrowed: Unpack[NarrowedDispatcherFacts],
) -> Callable[[M], M]:
    """Registers a token dispatcher for activation formats x platforms. Stack one decorator per rectangle.

    Args:
        name, priority, platforms, requires, probes, opt_in: As in `register_moe_backend`.
        formats: Activation formats that it offers the experts: `standard`, `batched`.
        predicted: Whether the priority was predicted, not measured; `explain` then says so.
        registry: Where to store it; by default the one that `make_kernel` reads.
        **narrowed: Fields of `DispatcherFacts` that promise less here than in the class.

    Returns:
        A decorator that returns the class unchanged.

    Raises:
        RegistrationError: Something is invalid; nothing is stored.

    Example:
        >>> from moereg.prepare_finalize import GroupPrepareFinalize, DispatcherFacts
        >>> @moereg.register_prepare_finalize("mine", priority=1, formats=("standard",), platforms=("cuda:sm90+",))
        ... class Mine(GroupPrepareFinalize):
        ...     facts = DispatcherFacts(transports=frozenset({"cuda:nccl"}), dtypes=frozenset({"bfloat16"}))
        ...     def prepare(self, hidden_states, topk_weights, topk_ids, problem, expert_map): ...
        ...     def finalize(self, out, expert_out, prepared, problem): ...
        >>> problem = moereg.MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2)
        >>> group = moereg.prepare_finalize.GroupFacts(4)
        >>> moereg.explain_dispatchers(problem, group, platform="cuda:sm90", require="mine").winner.name
        'mine'
    """

    def decorate(dispatcher: M) -> M:
        target = DISPATCHERS if registry is None else registry
        check_instance("registry", target, DispatcherRegistry, "leave it out for the one that make_kernel reads")
        registration = Registration(target, name, dispatcher)
        with registration.checking():
            shared = registration.shared_fields(name, priority, platforms, requires, probes, opt_in)
            check_class(dispatcher, GroupPrepareFinalize, _METHODS)
            if not isinstance(dispatcher.facts, DispatcherFacts):
                raise ArgumentError(f"facts must be a DispatcherFacts, got {type(dispatcher.facts).__name__}")
            check_facts(dispatcher.facts)
            check_flag("predicted", predicted)
            offered, facts = _read_formats(formats), narrow_facts(dispatcher.facts, narrowed)
        registration.store(
            DispatcherCell(dispatcher=dispatcher, formats=offered, facts=facts, predicted=predicted, **shared)
        )
        dispatcher.name = name
        return dispatcher

    return decorate


def _read_formats(formats: Iterable[str]) -> tuple[str, ...]:
    if not isinstance(formats, (tuple, list, set, frozenset)) or not formats:
        raise ArgumentError(f"formats must be a tuple of activation formats, got {shown(formats)}")
    for name in formats:
        if name not in ACTIVATION_FORMATS:
            raise ArgumentError(f"formats must be among {', '.join(ACTIVATION_FORMATS)}, got {shown(name)}")
    return tuple(name for name in ACTIVATION_FORMATS if name in formats)
