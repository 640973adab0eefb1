"""The conformance kit on drawn layers, and the cells that it can run here."""

from __future__ import annotations

from moereg.registry import BackendCell
from moereg.selection.loader import load_backends
from moereg.testing.cases import runnable_platform
from moereg.testing.checks import check_case
from moereg.testing.drawing import DrawnLayer


def runnable_cells() -> list[BackendCell]:
    """Registered cells that this machine can run."""
    return [cell for cell in load_backends().cells if runnable_platform(cell) is not None]


def check_layer(layer: DrawnLayer, num_calls: int = 1) -> bool:
    """`check_case` on the layer's own case, in whose errors the layer stands first; False where it cannot run here."""
    case = layer.case()
    if case is None:
        return False
    try:
        check_case(case, layer, num_calls)
    except Exception as error:
        raise AssertionError(f"{layer}\n{type(error).__name__}: {error}") from error
    return True
