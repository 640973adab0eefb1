"""Token movement around the experts, chosen before the backend: its format is a fact of the problem."""

from moereg.prepare_finalize.base import Prepared, PrepareFinalize
from moereg.prepare_finalize.batched import BatchedPrepareFinalize
from moereg.prepare_finalize.standard import StandardPrepareFinalize

__all__ = ["BatchedPrepareFinalize", "PrepareFinalize", "Prepared", "StandardPrepareFinalize", "local_prepare_finalize"]


def local_prepare_finalize(activation_format: str) -> PrepareFinalize:
    """The one without communication for an activation format."""
    return {kind.activation_format: kind for kind in (StandardPrepareFinalize, BatchedPrepareFinalize)}[
        activation_format
    ]()
