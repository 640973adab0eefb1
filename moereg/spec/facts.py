"""Facts: the capabilities that an experts class or a token dispatcher declares.

Each field is one row. Its `Fact` says how a value is checked at registration, whether a decorator's value narrows it,
and which reasons it gives against a problem. A new fact is a new field here, and its keyword in `NarrowedFacts`.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, TypedDict, TypeVar

from moereg.errors import ArgumentError, shown, unknown_name_message
from moereg.spec.activations import ACTIVATIONS
from moereg.spec.problem import ACTIVATION_FORMATS, DTYPES, GRADIENTS, HELD_EXPERTS, PLACEMENTS, MoEProblem
from moereg.spec.reasons import Reason


@dataclasses.dataclass(frozen=True)
class Fact(abc.ABC):
    """How one fact is checked and applied: a row of a table of facts.

    `asked` is the problem, for a token dispatcher with the group.

    Attributes:
        code: The code of its reasons.
    """

    code: str

    @property
    def widest(self) -> Any:
        """The value that gives no reason against any problem."""
        return None

    @abc.abstractmethod
    def fault(self, name: str, value: Any) -> str | None:
        """The fault in a class's or decorator's value, if any."""

    @abc.abstractmethod
    def reasons(self, value: Any, asked: Any) -> Iterable[Reason]:
        """Why a class with that value, which is not the widest, cannot serve the request."""

    def is_narrower(self, value: Any, wider: Any) -> bool:
        """Whether a value promises no more than another."""
        return wider is None or (value is not None and bool(value <= wider))

    def stored(self, value: Any) -> Any:
        """A decorator's value in the form that `Facts` stores."""
        return value

    def are_disjoint(self, one: Any, other: Any) -> bool:
        """Whether no problem fits both of two values."""
        return False


@dataclasses.dataclass(frozen=True)
class _Names(Fact):
    """The supported names, a part of those `known`; None allows any.

    `wanted` is the problem's attribute that holds its name, and `rule` begins the reason; both default to the code.
    """

    known: Collection[str] | None
    wanted: str = ""
    rule: str = ""

    @property
    def widest(self) -> Any:
        return None if self.known is None else frozenset(self.known)

    def fault(self, name: str, value: Any) -> str | None:
        if not isinstance(value, frozenset):
            return f"{name} must be a frozenset of names, got {shown(value)}"
        unknown = [] if self.known is None else sorted(map(str, value - set(self.known)))
        return unknown_name_message(f"name in {name}", unknown[0], self.known or ()) if unknown else None

    def reasons(self, value: Any, asked: Any) -> Iterable[Reason]:
        if (wanted := operator.attrgetter(self.wanted or self.code)(asked)) not in value:
            rule, names = self.rule or f"{self.code.replace('_', ' ')} in", ", ".join(map(str, sorted(value))) or "none"
            yield Reason(self.code, f"requires {rule} ({names}), got {wanted}")

    def are_disjoint(self, one: Any, other: Any) -> bool:
        return not one & other

    def stored(self, value: Any) -> Any:
        is_names = isinstance(value, (set, tuple, list)) and set(map(type, value)) <= {str}
        return frozenset(value) if is_names else value


class _Gradients(_Names):
    """Names of gradients, of which a problem may ask for several or none."""

    def reasons(self, value: Any, asked: Any) -> Iterable[Reason]:
        if lacking := asked.gradients - value:
            text = f"does not compute gradients of ({', '.join(sorted(lacking))})"
            yield Reason(self.code, f"{text}, got gradients of ({', '.join(sorted(asked.gradients))})")

    def are_disjoint(self, one: Any, other: Any) -> bool:
        return False


class _Sizes(_Names):
    """The only supported sizes, or None."""

    def fault(self, name: str, value: Any) -> str | None:
        is_fine = value is None or (isinstance(value, frozenset) and all(isinstance(size, int) for size in value))
        return None if is_fine else f"{name} must be None or a frozenset of integers, got {shown(value)}"

    def stored(self, value: Any) -> Any:
        return frozenset(value) if isinstance(value, (set, tuple, list)) else value


@dataclasses.dataclass(frozen=True)
class _Flag(Fact):
    """Whether something is supported. `lack` gives the clause against a problem that asks for it, else None.

    For a need, such as that the problem must state a size, the widest value is False, and True is narrower.
    """

    lack: Callable[[Any], str | None]
    is_need: bool = False

    @property
    def widest(self) -> Any:
        return not self.is_need

    def fault(self, name: str, value: Any) -> str | None:
        return None if isinstance(value, bool) else f"{name} must be True or False, got {shown(value)}"

    def is_narrower(self, value: Any, wider: Any) -> bool:
        return wider is self.widest or value is wider

    def reasons(self, value: Any, asked: Any) -> Iterable[Reason]:
        if (lack := self.lack(asked)) is not None:
            yield Reason(self.code, lack)


@dataclasses.dataclass(frozen=True)
class _Divisors(Fact):
    """Divisors of the problem's sizes."""

    sizes: tuple[str, ...]

    @property
    def widest(self) -> Any:
        return {}

    def fault(self, name: str, value: Any) -> str | None:
        if not isinstance(value, Mapping):
            return f"{name} must map problem fields to divisors, got {shown(value)}"
        for size, divisor in value.items():
            if size not in self.sizes:
                return unknown_name_message(f"size in {name}", size, self.sizes)
            if not _is_count(divisor):
                return f"{name}[{size!r}] must be an integer of at least 1, got {shown(divisor)}"
        return None

    def is_narrower(self, value: Any, wider: Any) -> bool:
        # A multiple of the class's divisor rejects more sizes.
        return all(value.get(size, 1) % divisor == 0 for size, divisor in wider.items())

    def reasons(self, value: Any, asked: Any) -> Iterable[Reason]:
        for size, divisor in sorted(value.items()):
            if (found := getattr(asked, size)) % divisor:
                yield Reason(self.code, f"requires {size} % {divisor} == 0, got {found}")


@dataclasses.dataclass(frozen=True)
class _Limit(Fact):
    """The largest value of one of the problem's counts, or None. `rule` words the reason, if not as `<=`."""

    count: str
    rule: str = ""

    def fault(self, name: str, value: Any) -> str | None:
        is_limit = value is None or _is_count(value)
        return None if is_limit else f"{name} must be None or an integer of at least 1, got {shown(value)}"

    def reasons(self, value: Any, asked: Any) -> Iterable[Reason]:
        count = getattr(asked, self.count)
        # A problem that does not limit its tokens may have too many.
        if count is None or count > value:
            rule = (self.rule or f"{self.count} <= {{}}").format(value)
            yield Reason(self.code, f"requires {rule}, got {count}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_SCALARS: Final = ("alpha", "beta", "gate_softcap", "up_softcap")


def _other_scalars(problem: MoEProblem) -> str | None:
    activation, standard = problem.activation, ACTIVATIONS[problem.activation.name]
    if all(getattr(activation, name) == getattr(standard, name) for name in _SCALARS):
        return None
    caps = f", gate_softcap={standard.gate_softcap} and up_softcap={standard.up_softcap}" if standard.up_softcap else ""
    return f"requires alpha={standard.alpha:g} and beta={standard.beta:g}{caps}, got {activation}"


def _clamp(problem: MoEProblem) -> str | None:
    limit = problem.activation.limit
    return None if limit is None else f"does not apply the swiglu clamp, got limit {limit}"


def _lacks_room(asked: Any) -> str | None:
    if asked.max_num_tokens is not None:
        return None
    return "requires max_num_tokens in the problem, for which it makes room, got None"


def _row(fact: Fact, default: object) -> Any:
    return dataclasses.field(default=default, metadata={"fact": fact})


def _flag(code: str, lack: str, field: str = "") -> Any:
    """The row of a flag that is off by default. `field` is the problem's field, if not named like the code."""
    field = field or code
    return _row(_Flag(code, lambda asked: f"{lack}, got {field}=True" if getattr(asked, field) else None), False)


_SIZES: Final = ("num_experts", "num_local_experts", "hidden_size", "intermediate_size", "top_k")


@dataclasses.dataclass(frozen=True)
class DeclaredFacts:
    """A table of facts, whose fields are rows."""

    def __getstate__(self) -> dict[str, Any]:
        # The cached property holds functions, which do not pickle, and is computed again.
        return {name: value for name, value in vars(self).items() if name != "binding"}

    @functools.cached_property
    def binding(self) -> tuple[tuple[Fact, Any], ...]:
        """The facts that can reject a problem, with their values; cached, since every selection reads them."""
        values = ((fact, getattr(self, name)) for name, fact in rows(type(self)))
        return tuple((fact, value) for fact, value in values if value != fact.widest)


F = TypeVar("F", bound=DeclaredFacts)


def rows(kind: type[DeclaredFacts]) -> tuple[tuple[str, Fact], ...]:
    """Every fact of a table with its field's name, in the order of reasons."""
    return tuple((field.name, field.metadata["fact"]) for field in dataclasses.fields(kind))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Facts(DeclaredFacts):
    """The capabilities of an experts class. Undeclared capabilities are refused.

    Attributes:
        activations: Names of activations.
        activation_scalars: Whether alpha, beta and soft caps may differ from the activation's standard ones.
        swiglu_limit: Whether the clamp is applied. `swigluoai` has one.
        bias: Whether w13_bias and w2_bias are applied.
        dtypes: Names of the dtypes of hidden states and output.
        activation_formats: `standard`, `batched`.
        placements: `contiguous`, `map`.
        held_experts: `all` if this rank holds every expert, `some` if other ranks hold the rest. Both unless a
            decorator narrows it, for instance to rank a backend lower under expert parallelism.
        router_weight_on_input: Whether routing weights can scale the input.
        requires_multiple: Problem field to divisor; other sizes are rejected.
        max_experts: Most local experts, or None.
        max_num_tokens: Most tokens of a call, or None.
        graph_capture: Whether `apply` can be captured in a CUDA graph.
        deterministic: Whether equal inputs give equal bits.
        batch_invariant: Whether, if the problem asks for it, a token's row has the same bits in every call.
        gradients: Names of the gradients that `apply_backward` can compute, as in `MoEProblem.gradients`.
    """

    activations: frozenset[str] = _row(_Names("activation", ACTIVATIONS, "activation.name"), frozenset())
    activation_scalars: bool = _row(_Flag("activation", _other_scalars), False)
    swiglu_limit: bool = _row(_Flag("swiglu_limit", _clamp), False)
    bias: bool = _flag("bias", "does not apply biases", "has_bias")
    dtypes: frozenset[str] = _row(_Names("dtype", DTYPES), frozenset())
    activation_formats: frozenset[str] = _row(_Names("activation_format", ACTIVATION_FORMATS), frozenset())
    placements: frozenset[str] = _row(_Names("placement", PLACEMENTS), frozenset())
    held_experts: frozenset[str] = _row(
        _Names("placement", HELD_EXPERTS, "held_experts", "experts held by this rank in"), frozenset(HELD_EXPERTS)
    )
    router_weight_on_input: bool = _flag(
        "router_weight_on_input", "does not scale inputs by the routing weight", "apply_router_weight_on_input"
    )
    requires_multiple: Mapping[str, int] = dataclasses.field(
        default_factory=dict, hash=False, metadata={"fact": _Divisors("alignment", _SIZES)}
    )
    max_experts: int | None = _row(_Limit("size", "num_local_experts"), None)
    max_num_tokens: int | None = _row(_Limit("size", "max_num_tokens"), None)
    graph_capture: bool = _flag("graph_capture", "cannot be captured in a CUDA graph")
    deterministic: bool = _flag("deterministic", "does not give the same bits each time")
    batch_invariant: bool = _flag("batch_invariant", "a token's bits depend on the other tokens of its call")
    gradients: frozenset[str] = _row(_Gradients("gradients", GRADIENTS), frozenset())


FACTS: Final = rows(Facts)


class NarrowedFacts(TypedDict, total=False):
    """Facts that a decorator may narrow: as in `Facts`, with any collection of names."""

    activations: Collection[str]
    activation_scalars: bool
    swiglu_limit: bool
    bias: bool
    dtypes: Collection[str]
    activation_formats: Collection[str]
    placements: Collection[str]
    held_experts: Collection[str]
    router_weight_on_input: bool
    requires_multiple: Mapping[str, int]
    max_experts: int | None
    max_num_tokens: int | None
    graph_capture: bool
    deterministic: bool
    batch_invariant: bool
    gradients: Collection[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatcherFacts(DeclaredFacts):
    """The capabilities of a token dispatcher. Undeclared capabilities are refused.

    Attributes:
        transports: Device and torch.distributed backend, such as `cuda:nccl` and `cpu:gloo`.
        max_group_size: Most ranks, or None.
        dtypes: Names of the dtypes of hidden states.
        graph_capture: Whether a call never waits on the host, so that a CUDA graph can capture it.
        deterministic: Whether equal inputs give equal bits.
        batch_invariant: As in `Facts`. No dispatcher has it yet.
        router_weight_on_input: Whether routing weights reach the experts, to scale inputs.
        max_num_tokens: Whether room is allocated for the problem's `max_num_tokens`, which must then be set.
        max_top_k: Most experts per token, or None.
        hidden_sizes: The only supported hidden sizes, or None.
        gradients: Names of the gradients that can return to the tokens' ranks. No dispatcher has any yet.
    """

    transports: frozenset[str] = _row(_Names("group", None, "group.transport", "a group over"), frozenset())
    max_group_size: int | None = _row(_Limit("group", "num_ranks", "at most {} ranks"), None)
    dtypes: frozenset[str] = _row(_Names("dtype", DTYPES), frozenset())
    graph_capture: bool = _flag("graph_capture", "waits for counts on the host")
    deterministic: bool = _flag("deterministic", "does not give the same bits each time")
    batch_invariant: bool = _flag("batch_invariant", "a token's bits depend on the other tokens of its call")
    router_weight_on_input: bool = _flag(
        "router_weight_on_input", "does not send routing weights", "apply_router_weight_on_input"
    )
    max_num_tokens: bool = _row(_Flag("size", _lacks_room, is_need=True), False)
    max_top_k: int | None = _row(_Limit("size", "top_k"), None)
    hidden_sizes: frozenset[int] | None = _row(_Sizes("alignment", None, "hidden_size", "hidden_size in"), None)
    gradients: frozenset[str] = _row(_Gradients("gradients", GRADIENTS), frozenset())


class NarrowedDispatcherFacts(TypedDict, total=False):
    """Facts that a decorator may narrow: as in `DispatcherFacts`, with any collection of names."""

    transports: Collection[str]
    dtypes: Collection[str]
    graph_capture: bool
    deterministic: bool
    batch_invariant: bool
    router_weight_on_input: bool
    max_num_tokens: bool
    max_group_size: int | None
    max_top_k: int | None
    hidden_sizes: Collection[int] | None
    gradients: Collection[str]


def check_facts(facts: DeclaredFacts) -> None:
    """Checks every fact of a class, so that evaluating a cell cannot fail."""
    for name, fact in rows(type(facts)):
        if fault := fact.fault(name, getattr(facts, name)):
            raise ArgumentError(fault)


def narrow_facts(facts: F, narrowed: Mapping[str, Any]) -> F:
    """The facts of one cell: the class's, narrowed by the decorator's, which may not promise more."""
    known = dict(rows(type(facts)))
    changes: dict[str, Any] = {}
    for name, value in narrowed.items():
        fact, wider = known[name], getattr(facts, name)
        value = fact.stored(value)
        if fault := fact.fault(name, value):
            raise ArgumentError(fault)
        if not fact.is_narrower(value, wider):
            text = f"{name}={shown(value)} against {shown(wider)}"
            raise ArgumentError(f"a decorator may narrow the class's facts, never widen them; {text}")
        changes[name] = value
    return dataclasses.replace(facts, **changes)


def disjoint_fact(one: Facts, other: Facts) -> str | None:
    """The name of a fact that keeps any problem from fitting both; None if one may fit both."""
    return next((name for name, fact in FACTS if fact.are_disjoint(getattr(one, name), getattr(other, name))), None)


def fact_reasons(facts: DeclaredFacts, asked: object) -> list[Reason]:
    """Reasons for everything in a request that the class does not declare."""
    return [reason for fact, value in facts.binding for reason in fact.reasons(value, asked)]


def narrowed_text(facts: Facts, of_class: Facts) -> str:
    """The facts of a cell that differ from its class's, such as `activations=silu`; empty if none do."""
    found = []
    for name, _ in FACTS:
        if (value := getattr(facts, name)) != getattr(of_class, name):
            text = ",".join(sorted(value)) if isinstance(value, frozenset) else str(value)
            found.append(f"{name}={text}")
    return "; ".join(found)
