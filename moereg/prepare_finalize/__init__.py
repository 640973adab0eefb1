"""Token movement around the experts, chosen before the backend: its format is a fact of the problem."""

from moereg.prepare_finalize.base import Prepared, PrepareFinalize
from moereg.prepare_finalize.batched import BatchedPrepareFinalize
from moereg.prepare_finalize.standard import StandardPrepareFinalize
from moereg.problem import MoEProblem

__all__ = [
    "BatchedPrepareFinalize",
    "PrepareFinalize",
    "Prepared",
    "StandardPrepareFinalize",
    "local_prepare_finalize",
    "resolve_prepare_finalize",
]


def local_prepare_finalize(activation_format: str) -> PrepareFinalize:
    """The one without communication for an activation format."""
    kinds = {kind.activation_format: kind for kind in (StandardPrepareFinalize, BatchedPrepareFinalize)}
    return kinds[activation_format]()


def resolve_prepare_finalize(problem: MoEProblem, prepare_finalize: PrepareFinalize | None) -> PrepareFinalize:
    """The caller's token movement; the local one of the problem's format where None.

    Raises:
        ValueError: Its format differs from the problem's.
    """
    if prepare_finalize is None:
        return local_prepare_finalize(problem.activation_format)
    if prepare_finalize.activation_format != problem.activation_format:
        raise ValueError(
            f"prepare_finalize {prepare_finalize.name!r} makes the {prepare_finalize.activation_format} format but the "
            f"problem says {problem.activation_format}; choose it first and put its format in the problem"
        )
    return prepare_finalize
