"""Selection for quantized weights on named platforms, with the backends that moereg ships: winner, or every reason."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any, Final

import pytest
import torch

from moereg.dispatch import explain_backends, select_backend
from moereg.errors import EmulationWarning, UnsupportedProblemError
from moereg.layer.factory import make_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.selection.result import Decision, Selection
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES, WHOLE, QuantFormat, QuantScheme
from moereg.testing.inputs import make_inputs, make_weights

PLATFORMS: Final = ("cuda:sm80", "cuda:sm90", "cuda:sm100", "rocm:gfx942", "cpu")
# Other backends may join; these tables are about the two that come with moereg.
SHIPPED: Final = ("triton", "torch")

QUANTIZED: Final = tuple(name for name, scheme in QUANT_SCHEMES.items() if scheme.weight is not None)
FP8: Final = tuple(name for name in QUANTIZED if name.startswith("fp8_"))
WEIGHT_ONLY: Final = tuple(name for name in QUANTIZED if QUANT_SCHEMES[name].activation is None)


def problem_of(quant: str | QuantScheme, **changes: Any) -> MoEProblem:
    sizes = {"num_experts": 8, "hidden_size": 2048, "intermediate_size": 768, "top_k": 2}
    return MoEProblem(**{**sizes, "quant": quant, **changes})


def explain(quant: str | QuantScheme, platform: str, **changes: Any) -> Selection:
    return explain_backends(problem_of(quant, **changes), platform, require=SHIPPED)


def chosen(selection: Selection) -> tuple[str, str, str] | None:
    """Backend, computed scheme and tier."""
    winner = selection.winner
    return None if winner is None else (winner.backend, winner.computes, winner.tier)


def texts(decision: Decision) -> list[str]:
    return [f"{reason.code}: {reason.text}" for reason in decision.reasons]


def of_backend(selection: Selection, backend: str) -> list[Decision]:
    return [decision for decision in selection.decisions if decision.backend == backend]


# Which backend serves which scheme.

W4A8: Final = ("int4_w4a8_g128", "int4_w4a8_g128_token")
KEPT_AT_16_BITS: Final = {
    "nvfp4": "nvfp4_w4a16",
    "mxfp4_mxfp8": "mxfp4_w4a16",
    **dict.fromkeys(W4A8, "int4_w4a16_g128"),
}
SERVED_ON_GPUS: Final = {**{name: name for name in WEIGHT_ONLY}, "int8_w8a8": "int8_w8a8", **KEPT_AT_16_BITS}
# Platform, and the computed scheme for each scheme that a kernel serves there in the standard format.
KERNELS: Final[dict[str, dict[str, str]]] = {
    "cuda:sm80": SERVED_ON_GPUS,
    "rocm:gfx942": SERVED_ON_GPUS,
    "cuda:sm90": {**SERVED_ON_GPUS, **{name: name for name in FP8}},
    "cuda:sm100": {**SERVED_ON_GPUS, **{name: name for name in (*FP8, "mxfp8", "mxfp4_mxfp8", "nvfp4")}},
    "cpu": SERVED_ON_GPUS,
}


@pytest.mark.parametrize("scheme", QUANTIZED)
def test_every_scheme_runs_on_a_cpu_exactly(scheme: str) -> None:
    for dtype, activation_format in itertools.product(("bfloat16", "float16", "float32"), ("standard", "batched")):
        facts = {"dtype": dtype, "activation_format": activation_format, "exact_activations": True}
        winner = explain(scheme, "cpu", **facts).winner
        assert winner is not None
        assert winner.computes == scheme


def test_32_bits_on_gpus() -> None:
    """Products of packed weights and of fp8 codes have no 32-bit form; those of int8 codes are exact."""
    assert chosen(explain("int8_w8a8", "cuda:sm90", dtype="float32")) == ("triton", "int8_w8a8", "kernel")
    for scheme in ("fp8_block128", "int4_w4a16_g128", "nvfp4"):
        selection = explain(scheme, "cuda:sm90", dtype="float32")
        assert chosen(selection) is None
        (nearest, *_) = of_backend(selection, "triton")
        assert texts(nearest) == ["dtype: requires dtype in (bfloat16, float16), got float32"]


# Schemes and platforms on which their activations stay at 16 bits.
KEPT: Final = [
    (scheme, platform)
    for scheme, platform in itertools.product(KEPT_AT_16_BITS, PLATFORMS)
    if KERNELS[platform][scheme] != scheme
]


# Nothing on GPUs rounds activations of 4-bit integers as these say.
_NOT_EMULATED: Final = [(scheme, platform) for scheme, platform in KEPT if scheme in W4A8 and platform != "cpu"]


@pytest.mark.parametrize("activation_format", ["standard", "batched"])
@pytest.mark.parametrize(("scheme", "platform"), [pair for pair in KEPT if pair not in _NOT_EMULATED])
def test_an_emulation_is_left_where_16_bits_are_refused(scheme: str, platform: str, activation_format: str) -> None:
    problem = problem_of(scheme, exact_activations=True, activation_format=activation_format)
    with pytest.warns(EmulationWarning):
        selection = select_backend(problem, platform, require=SHIPPED)
    backend = "torch" if platform == "cpu" else "triton"
    assert chosen(selection) == (backend, scheme, "emulation")
    refused = [row for row in of_backend(selection, backend) if row.computes == KEPT_AT_16_BITS[scheme]]
    assert refused
    for decision in refused:
        reason = f"precision: requires activations as {scheme} has them, got {KEPT_AT_16_BITS[scheme]} instead"
        assert reason in texts(decision)


@pytest.mark.parametrize(("scheme", "platform"), _NOT_EMULATED)
def test_nothing_is_left_where_16_bits_are_refused(scheme: str, platform: str) -> None:
    refused = explain(scheme, platform, exact_activations=True)
    assert refused.winner is None
    reason = f"precision: requires activations as {scheme} has them, got int4_w4a16_g128 instead"
    assert any(reason in texts(decision) for decision in of_backend(refused, "triton"))


@pytest.mark.parametrize("platform", [own for name, own in KEPT if name == "mxfp4_mxfp8" and own != "cpu"])
def test_activations_kept_at_16_bits_can_be_refused(platform: str) -> None:
    """Numbers of e4m3 times a power of two may not fit float16, so its emulation refuses that dtype."""
    with pytest.raises(UnsupportedProblemError) as error:
        select_backend(problem_of("mxfp4_mxfp8", exact_activations=True, dtype="float16"), platform, require=SHIPPED)
    reason = "requires activations as mxfp4_mxfp8 has them, got mxfp4_w4a16 instead"
    assert f"nearest is triton: {reason} (ask without exact_activations)" in str(error.value)


def test_every_reason_of_a_refused_scheme() -> None:
    with pytest.raises(UnsupportedProblemError) as error:
        select_backend(problem_of("mxfp8", activation_format="batched"), "cuda:sm80")
    reasons = [(decision.experts, texts(decision)) for decision in of_backend(error.value.selection, "triton")]
    for rule in ("cuda:sm100+", "cuda:sm90"):
        refused = f"platform: requires platform in ({rule}), got cuda:sm80"
        batched = "activation_format: requires activation format in (standard), got batched"
        assert ("TritonQuantizedExperts", [refused, batched]) in reasons
        assert ("TritonQuantizedBatchedExperts", [refused]) in reasons
    assert str(error.value).startswith("no backend fits E8 H2048 I768 k2 bfloat16 mxfp8 silu, batched on cuda:sm80")
    for text in ("triton (TritonQuantizedBatchedExperts): requires platform in (cuda:sm100+)", "torch ("):
        assert text in str(error.value)


# Schemes that are registered nowhere.

UNREGISTERED: Final = {
    scheme.name: scheme
    for scheme in (
        QuantScheme("int4_w4a16_g48", QuantFormat("uint4", (1, 48))),
        QuantScheme("int4_w4a16_g256", QuantFormat("uint4", (1, 256))),
        QuantScheme("int4_tensor", QuantFormat("uint4", (WHOLE, WHOLE))),
        QuantScheme("int8_g32", QuantFormat("int8", (1, 32))),
        QuantScheme("uint8_g32_zp", QuantFormat("uint8", (1, 32), symmetric=False)),
        QuantScheme("mxint4", QuantFormat("uint4", (1, 32), scale_dtype="float8_e8m0fnu")),
        QuantScheme("e5m2", QuantFormat("float8_e5m2", (1, WHOLE)), QuantFormat("float8_e5m2", (1, WHOLE))),
        QuantScheme("fp8_block64", QuantFormat("float8_e4m3fn", (64, 64)), QuantFormat("float8_e4m3fn", (1, 64))),
        QuantScheme("fp8_w8a16", QuantFormat("float8_e4m3fn", (128, 128)), None),
        QuantScheme("activations_only", None, QuantFormat("float8_e4m3fn", (1, WHOLE))),
        # A known name does not make a known scheme.
        QuantScheme("int4_w4a16_g128", QuantFormat("uint4", (1, 48))),
    )
}


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", UNREGISTERED)
def test_what_nobody_registered_is_refused_by_what_it_is(name: str, platform: str) -> None:
    scheme = UNREGISTERED[name]
    selection = explain(scheme, platform)
    if selection.winner is not None:
        # 16-bit weights run with 16-bit activations.
        assert (scheme.weight, selection.winner.computes) == (None, "unquantized")
        return
    for decision in selection.decisions:
        assert f"got {scheme.description}" in decision.reasons[0].text
    with pytest.raises(UnsupportedProblemError) as error:
        select_backend(problem_of(scheme), platform, require=SHIPPED)
    assert str(scheme.weight) in str(error.value)
    assert "; no backend computes this scheme: use a checkpoint of one that is named below\n" in str(error.value)
    # All that a backend reads on this platform, not only the first of its cells.
    if platform == "cuda:sm90":
        for known in ("fp8_block128", "int4_w4a16_g128", "nvfp4_w4a16", "int8_w8a8", "unquantized"):
            assert f"{known}," in str(error.value) or f"{known})" in str(error.value)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_no_value_breaks_a_predicate(platform: str) -> None:
    schemes = [*QUANT_SCHEMES.values(), *UNREGISTERED.values()]
    for scheme, activation_format in itertools.product(schemes, ("standard", "batched")):
        for sizes in ({}, {"hidden_size": 33, "intermediate_size": 7}, {"hidden_size": 2**20, "top_k": 1}):
            selection = explain_backends(problem_of(scheme, activation_format=activation_format, **sizes), platform)
            found = {reason.code for decision in selection.decisions for reason in decision.reasons}
            assert "predicate_error" not in found
            assert Selection.from_dict(json.loads(json.dumps(selection.to_dict()))).problem == selection.problem


RENAMED: Final = [
    (QuantScheme("mine", QuantFormat("uint4", (1, 128))), "int4_w4a16_g128"),
    (dataclasses.replace(QUANT_SCHEMES["fp8_block128"], name="deepseek"), "fp8_block128"),
    (dataclasses.replace(QUANT_SCHEMES["int8_w8a8"], name="mine"), "int8_w8a8"),
]


@pytest.mark.parametrize(("scheme", "computes"), RENAMED, ids=lambda value: getattr(value, "name", value))
def test_a_known_format_under_another_name_is_served(scheme: QuantScheme, computes: str) -> None:
    for exact in (False, True):
        winner = explain(scheme, "cuda:sm90", exact_activations=exact).winner
        assert winner is not None
        assert (winner.computes, winner.tier) == (computes, "kernel")


def test_activations_of_an_unknown_format_are_kept_at_16_bits() -> None:
    scheme = QuantScheme("int4_w4a8_e5m2", QuantFormat("uint4", (1, 128)), QuantFormat("float8_e5m2", (1, WHOLE)))
    for platform in PLATFORMS:
        assert chosen(explain(scheme, platform)) in {
            (backend, "int4_w4a16_g128", "kernel") for backend in ("triton", "torch")
        }
        refused = explain(scheme, platform, exact_activations=True)
        assert refused.winner is None
        assert f"requires activations as {scheme.name} has them" in refused.table()


INT4_W4A8: Final = QuantScheme("int4_w4a8_g32", QuantFormat("uint4", (1, 32)), QuantFormat("float8_e4m3fn", (1, WHOLE)))


@pytest.mark.filterwarnings("ignore::moereg.dispatch.EmulationWarning")
@pytest.mark.parametrize("scheme", [*(scheme for scheme, _ in RENAMED), INT4_W4A8], ids=lambda scheme: scheme.name)
def test_what_is_served_under_another_name_is_right(scheme: QuantScheme) -> None:
    problem = MoEProblem(num_experts=4, hidden_size=256, intermediate_size=128, top_k=2, quant=scheme)
    weights = make_weights(problem, torch.device("cpu"))
    inputs = make_inputs(problem, 17, "uniform", torch.device("cpu"))
    call = (inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    kernel = make_kernel(problem, weights, select_backend(problem, "cpu", require="torch"))
    out, computes = kernel(*call), kernel.experts.computes
    truth = reference_experts(problem, weights, *call, computes=computes)
    assert relative_error(out, truth) <= tolerance(computes, problem.dtype, out.numel())
