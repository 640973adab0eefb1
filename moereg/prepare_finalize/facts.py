"""What a way of moving tokens can do, as its class declares it, and the reasons against a problem and a group."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Final, TypedDict

from moereg.errors import RegistrationError, shown
from moereg.prepare_finalize.group import GroupFacts
from moereg.problem import DTYPES, MoEProblem
from moereg.reasons import Reason

__all__ = [
    "MovementFacts",
    "NarrowedMovementFacts",
    "check_movement_facts",
    "movement_reasons",
    "narrow_movement_facts",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovementFacts:
    """The capabilities of a way of moving tokens. A capability that is not declared is refused.

    Attributes:
        transports: Device and torch.distributed backend, such as `cuda:nccl` and `cpu:gloo`.
        dtypes: Names of the dtypes of hidden states.
        graph_capture: Whether a call waits for nothing on the host, so that a CUDA graph can capture it.
        deterministic: Whether equal inputs give equal bits.
        router_weight_on_input: Whether routing weights reach the experts, to scale inputs.
        max_num_tokens: Whether room is made for `max_num_tokens` of the problem, which has to say it then.
        max_group_size: Most ranks, or None.
        max_top_k: Most experts a token, or None.
        hidden_sizes: The only hidden sizes that are served, or None.
    """

    transports: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()
    graph_capture: bool = False
    deterministic: bool = False
    router_weight_on_input: bool = False
    max_num_tokens: bool = False
    max_group_size: int | None = None
    max_top_k: int | None = None
    hidden_sizes: frozenset[int] | None = None


class NarrowedMovementFacts(TypedDict, total=False):
    """Facts that a decorator may give: as in `MovementFacts`, but any collection of names."""

    transports: Collection[str]
    dtypes: Collection[str]
    graph_capture: bool
    deterministic: bool
    router_weight_on_input: bool
    max_num_tokens: bool
    max_group_size: int | None
    max_top_k: int | None
    hidden_sizes: Collection[int] | None


_PROMISES: Final = ("graph_capture", "deterministic", "router_weight_on_input")
_LIMITS: Final = ("max_group_size", "max_top_k")
_SETS: Final = ("transports", "dtypes", "hidden_sizes")


def check_movement_facts(facts: object, who: str) -> None:
    """Checks every fact, so that judging cannot fail.

    Raises:
        RegistrationError: One is not what it must be.
    """
    if not isinstance(facts, MovementFacts):
        raise RegistrationError(f"{who}: facts must be a MovementFacts, got {type(facts).__name__}")
    for name in (*_PROMISES, "max_num_tokens"):
        if not isinstance(getattr(facts, name), bool):
            raise RegistrationError(f"{who}: {name} must be True or False, got {shown(getattr(facts, name))}")
    for name in _LIMITS:
        limit = getattr(facts, name)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise RegistrationError(f"{who}: {name} must be None or an integer of at least 1, got {shown(limit)}")
    for name, kind in (("transports", str), ("dtypes", str), ("hidden_sizes", int)):
        values = getattr(facts, name)
        if name == "hidden_sizes" and values is None:
            continue
        if not isinstance(values, frozenset) or not all(isinstance(value, kind) for value in values):
            raise RegistrationError(f"{who}: {name} must be a frozenset of {kind.__name__}, got {shown(values)}")
    if unknown := sorted(facts.dtypes - set(DTYPES)):
        raise RegistrationError(f"{who}: dtypes must be among {', '.join(DTYPES)}, got {shown(unknown[0])}")
    if unknown := sorted(name for name in facts.transports if name.count(":") != 1):
        raise RegistrationError(f"{who}: transports are written device:backend, got {shown(unknown[0])}")


def narrow_movement_facts(facts: MovementFacts, narrowed: Mapping[str, Any], who: str) -> MovementFacts:
    """The facts of one decorator.

    Raises:
        RegistrationError: A fact is unknown, has a value of another kind, or promises more than the class.
    """
    known = [field.name for field in dataclasses.fields(MovementFacts)]
    changes: dict[str, Any] = {}
    for name, value in narrowed.items():
        if name not in known:
            raise RegistrationError(f"{who}: unknown fact {name!r} (known: {', '.join(known)})")
        if name in _SETS and isinstance(value, (set, tuple, list)):
            value = frozenset(value)
        changes[name] = value
    found = dataclasses.replace(facts, **changes)
    check_movement_facts(found, who)
    for name, value in changes.items():
        if not _is_narrower(name, value, getattr(facts, name)):
            raise RegistrationError(
                f"{who}: a decorator may narrow the class's facts, never widen them; "
                f"{name}={shown(value)} against {shown(getattr(facts, name))}"
            )
    return found


def _is_narrower(name: str, value: Any, wider: Any) -> bool:
    if name in _PROMISES:
        return wider or not value
    if name == "max_num_tokens":  # A need, so more of it is narrower.
        return value or not wider
    if wider is None or value is None:
        return wider is None
    return bool(value <= wider)


def movement_reasons(facts: MovementFacts, problem: MoEProblem, group: GroupFacts) -> list[Reason]:
    """Every fact in the problem and the group that a way does not declare."""
    reasons: list[Reason] = []

    def refuse(code: str, text: str) -> None:
        reasons.append(Reason(code, text))

    if group.transport not in facts.transports:
        names = ", ".join(sorted(facts.transports)) or "none"
        refuse("group", f"requires a group over ({names}), got {group.transport}")
    if facts.max_group_size is not None and group.size > facts.max_group_size:
        refuse("group", f"requires at most {facts.max_group_size} ranks, got {group.size}")
    if problem.dtype not in facts.dtypes:
        refuse("dtype", f"requires dtype in ({', '.join(sorted(facts.dtypes)) or 'none'}), got {problem.dtype}")
    if problem.graph_capture and not facts.graph_capture:
        refuse("graph_capture", "waits for counts on the host, got graph_capture=True")
    if problem.deterministic and not facts.deterministic:
        refuse("deterministic", "does not give the same bits each time, got deterministic=True")
    if problem.apply_router_weight_on_input and not facts.router_weight_on_input:
        refuse("router_weight_on_input", "does not send routing weights, got apply_router_weight_on_input=True")
    if facts.max_num_tokens and problem.max_num_tokens is None:
        refuse("size", "requires max_num_tokens in the problem, for which it makes room, got None")
    if facts.max_top_k is not None and problem.top_k > facts.max_top_k:
        refuse("size", f"requires top_k <= {facts.max_top_k}, got {problem.top_k}")
    if facts.hidden_sizes is not None and problem.hidden_size not in facts.hidden_sizes:
        sizes = ", ".join(map(str, sorted(facts.hidden_sizes)))
        refuse("alignment", f"requires hidden_size in ({sizes}), got {problem.hidden_size}")
    return reasons
