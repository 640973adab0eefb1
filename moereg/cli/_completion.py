"""Values of options for the shell's tab key. A list of names loads no torch."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "activation_names",
    "backend_list",
    "backend_names",
    "dtype_names",
    "model_names",
    "platform_names",
    "routing_names",
    "scheme_list",
    "scheme_names",
]


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete.lower())]


def model_names(incomplete: str) -> list[str]:
    """Completes `--model`."""
    from moereg.shapes import MODEL_SHAPES

    return _starting(MODEL_SHAPES, incomplete)


def scheme_names(incomplete: str) -> list[str]:
    """Completes `--quant`; schemes of plugins are left out, since they would have to be imported."""
    from moereg.quant import QUANT_SCHEMES

    return _starting(QUANT_SCHEMES, incomplete)


def scheme_list(incomplete: str) -> list[str]:
    """Completes a `--quant` that takes several: the last of `a,b`."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in scheme_names(last)]


def platform_names(incomplete: str) -> list[str]:
    """Completes `--platform`: products, and the platforms that they are."""
    from moereg.platforms import PRODUCTS

    return _starting(("cpu", *dict.fromkeys(PRODUCTS.values()), *PRODUCTS), incomplete)


def dtype_names(incomplete: str) -> list[str]:
    """Completes `--dtype`."""
    from moereg.problem import DTYPES

    return _starting(DTYPES, incomplete)


def activation_names(incomplete: str) -> list[str]:
    """Completes `--activation`."""
    from moereg.activations import ACTIVATIONS

    return _starting(ACTIVATIONS, incomplete)


def routing_names(incomplete: str) -> list[str]:
    """Completes `--routing`."""
    from moereg.tuning.inputs import ROUTINGS

    return _starting(ROUTINGS, incomplete)


def backend_names(incomplete: str) -> list[str]:
    """Completes the name of a backend, plugins included."""
    from moereg.cli._output import only_results_on_stdout
    from moereg.discovery import list_backends

    with only_results_on_stdout(False):
        return _starting(list_backends(), incomplete)


def backend_list(incomplete: str) -> list[str]:
    """Completes `--require`, `--prefer` and `--deny`: the last of `a,b`."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in backend_names(last)]
