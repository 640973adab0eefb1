"""Token dispatchers around the experts, chosen before the backend: their format is a fact of the problem."""

from moereg.errors import ArgumentError
from moereg.prepare_finalize.all_gather import AllGather
from moereg.prepare_finalize.all_to_all import AllToAll, AllToAllSums
from moereg.prepare_finalize.base import Prepared, PrepareFinalize, StandardPrepareFinalize
from moereg.prepare_finalize.batched import BatchedPrepareFinalize
from moereg.prepare_finalize.cells import DISPATCHERS, DispatcherCell, DispatcherRegistry, register_prepare_finalize
from moereg.prepare_finalize.group import Group, GroupFacts
from moereg.prepare_finalize.moving import GroupPrepareFinalize, Moved, local_prepare_finalize
from moereg.spec.facts import DispatcherFacts
from moereg.spec.problem import MoEProblem

__all__ = [
    "DISPATCHERS",
    "AllGather",
    "AllToAll",
    "AllToAllSums",
    "BatchedPrepareFinalize",
    "DispatcherCell",
    "DispatcherFacts",
    "DispatcherRegistry",
    "Group",
    "GroupFacts",
    "GroupPrepareFinalize",
    "Moved",
    "PrepareFinalize",
    "Prepared",
    "StandardPrepareFinalize",
    "local_prepare_finalize",
    "register_prepare_finalize",
    "resolve_prepare_finalize",
]


def resolve_prepare_finalize(problem: MoEProblem, prepare_finalize: PrepareFinalize | None) -> PrepareFinalize:
    """Returns the caller's token dispatcher, or the local one of the problem's format if None.

    Raises ArgumentError if its format differs from the problem's.
    """
    if prepare_finalize is None:
        return local_prepare_finalize(problem.activation_format)
    if prepare_finalize.activation_format != problem.activation_format:
        raise ArgumentError(
            f"prepare_finalize {prepare_finalize.name!r} makes the {prepare_finalize.activation_format} format but the "
            f"problem says {problem.activation_format}; choose it first and put its format in the problem"
        )
    return prepare_finalize
