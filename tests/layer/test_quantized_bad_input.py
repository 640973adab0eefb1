"""Bad weights of every quantized scheme: each is one error that names the tensor, before any kernel runs."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import pytest
import torch

from moereg.dispatch import select_backend
from moereg.layer.factory import make_kernel
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES, TensorRow
from moereg.testing.inputs import make_weights
from moereg.weights.permuted import ExpertWeights

CPU: Final = torch.device("cpu")
QUANTIZED: Final = tuple(name for name, scheme in QUANT_SCHEMES.items() if scheme.weight is not None)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # On a CPU, quantized activations are emulated.
    pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning"),
]


def problem_of(scheme: str, **changes: Any) -> MoEProblem:
    sizes = {"num_experts": 3, "hidden_size": 256, "intermediate_size": 128, "top_k": 2}
    return MoEProblem(**{**sizes, "quant": scheme, "has_bias": True, **changes})


def weights_of(scheme: str) -> ExpertWeights:
    return make_weights(problem_of(scheme), CPU)


def rows_of(scheme: str) -> list[TensorRow]:
    return list(QUANT_SCHEMES[scheme].tensor_rows(3, 256, 128, num_halves=2, has_bias=True))


def refused(weights: ExpertWeights, name: str, tensor: torch.Tensor | None) -> str:
    with pytest.raises(ValueError, match=name) as error:
        dataclasses.replace(weights, **{name: tensor})  # type: ignore[arg-type]
    message = str(error.value)
    assert "\n" not in message
    assert "got" in message
    return message


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_every_tensor_is_needed(scheme: str) -> None:
    weights = weights_of(scheme)
    for row in rows_of(scheme):
        if row.required:
            refused(weights, row.name, None)


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_every_shape_is_checked(scheme: str) -> None:
    weights = weights_of(scheme)
    for row in rows_of(scheme):
        tensor = weights.tensors()[row.name]
        # One group, row or expert more, as in swizzled, padded and unsharded tensors; and one dimension more.
        longer = [torch.cat((tensor, tensor.narrow(dim, 0, 1)), dim) for dim in range(tensor.dim())]
        for spoiled in (*longer, tensor.unsqueeze(-1)):
            message = refused(weights, row.name, spoiled)
            assert str(list(spoiled.shape)) in message or "must hold the same experts, got" in message


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_every_dtype_is_checked(scheme: str) -> None:
    weights = weights_of(scheme)
    for row in rows_of(scheme):
        tensor = weights.tensors()[row.name]
        others = {torch.float64, torch.int32, torch.bool} | ({torch.bfloat16, torch.int8} if row.dtype else set())
        for dtype in others - {tensor.dtype}:
            # Codes of a byte are only looked at, so that neither kind of 8-bit float has to be converted.
            other = torch.ones(tensor.shape, dtype=dtype)
            assert str(dtype) in refused(weights, row.name, other)


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_every_scale_is_checked(scheme: str) -> None:
    weights = weights_of(scheme)
    checked = []
    for name, tensor in weights.tensors().items():
        if not name.endswith(("_scale", "_scale_2")):
            continue
        checked.append(name)
        is_unsigned = tensor.dtype == torch.float8_e8m0fnu
        for value in (float("nan"), float("inf"), *(() if is_unsigned else (-1.0,))):
            spoiled = tensor.clone()
            spoiled.view(-1)[-1] = value
            # 8-bit floats have no infinity: it becomes NaN or, in some releases of torch, the largest number.
            if not (spoiled.float().view(-1)[-1].isfinite() and value > 0):
                refused(weights, name, spoiled)
        if name.startswith("a"):
            refused(weights, name, torch.zeros_like(tensor))
    assert {"w13_scale", "w2_scale"} <= set(checked)
    if QUANT_SCHEMES[scheme].activation is not None and QUANT_SCHEMES[scheme].activation.static:
        assert {"a13_scale", "a2_scale"} <= set(checked)


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_what_a_scheme_has_no_place_for(scheme: str) -> None:
    weights = weights_of(scheme)
    has = {row.name for row in rows_of(scheme)}
    others = {field.name for field in dataclasses.fields(ExpertWeights) if field.name != "quant"} - has
    for name in others:
        with pytest.raises(ValueError, match=f"scheme {scheme} has no tensor '{name}'; pass quant="):
            dataclasses.replace(weights, **{name: torch.ones(3)})  # type: ignore[arg-type]


@pytest.mark.few(most=6)
@pytest.mark.parametrize("scheme", QUANTIZED)
def test_weights_of_another_scheme_make_no_kernel(scheme: str) -> None:
    problem = problem_of(scheme)
    selection = select_backend(problem, "cpu", require="torch")
    for other in {*QUANT_SCHEMES} - {scheme}:
        with pytest.raises(
            ValueError, match=f"the weights are {other} but the problem says {scheme}; make both name the checkpoint's"
        ):
            make_kernel(problem, weights_of(other), selection)
