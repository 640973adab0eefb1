"""Canonical weights are checked where they are made; permuted ones own all tensors that a backend runs on."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moereg.errors import UnknownSchemeError
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES, TENSOR_ROLES, QuantFormat, QuantScheme
from moereg.weights.checks import checks_values
from moereg.weights.permuted import ExpertWeights, PermutedWeights

E, H, I = 3, 64, 40  # noqa: E741


def plain(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> ExpertWeights:
    tensors = {"w13": torch.zeros(E, 2 * I, H, dtype=dtype), "w2": torch.zeros(E, H, I, dtype=dtype)}
    return ExpertWeights(**{**tensors, **changes})


def of_scheme(name: str, has_bias: bool = False, **changes: Any) -> ExpertWeights:
    rows = QUANT_SCHEMES[name].tensor_rows(E, H, I, num_halves=2, has_bias=has_bias)
    tensors = {
        row.name: torch.full(row.shapes[0], float("_scale" in row.name)).to(row.dtype or torch.bfloat16) for row in rows
    }
    return ExpertWeights(**{**tensors, "quant": name, **changes})


def problem_of(**changes: Any) -> MoEProblem:
    return MoEProblem(**{"num_experts": E, "hidden_size": H, "intermediate_size": I, "top_k": 2, **changes})


@pytest.mark.parametrize("name", QUANT_SCHEMES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_scheme_can_be_made(name: str, has_bias: bool) -> None:
    weights = of_scheme(name, has_bias)
    weights.check_against(problem_of(quant=name, has_bias=has_bias))
    assert weights.scheme is QUANT_SCHEMES[name]
    assert ("w13_bias" in weights.tensors()) == has_bias
    assert (weights.num_experts, weights.hidden_size, weights.intermediate_size, weights.num_halves) == (E, H, I, 2)


def test_every_tensor_has_a_role() -> None:
    fields = [field.name for field in dataclasses.fields(ExpertWeights) if field.name != "quant"]
    assert list(TENSOR_ROLES) == fields


def test_tensors_of_some_roles() -> None:
    weights = of_scheme("nvfp4", has_bias=True)
    assert list(weights.tensors("bias")) == ["w13_bias", "w2_bias"]
    assert list(weights.tensors("scale_2", "weight")) == ["w13", "w2", "w13_scale_2", "w2_scale_2"]
    assert weights.tensors("zero_point") == {}
    assert set(weights.tensors()) == {row.name for row in QUANT_SCHEMES["nvfp4"].tensor_rows(E, H, I, 2, has_bias=True)}


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def ones(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(shape).to(dtype)


# fmt: off
BAD_PLAIN: list[tuple[dict[str, Any], str]] = [
    ({"w13": None}, "w13 must be a tensor, got NoneType"),
    ({"w13_scale": 2.0}, "w13_scale must be a tensor or None, got float"),
    ({"w13": zeros(2 * I, H)}, "w13 must be [E,2I,H] (or [E,I,H] not gated) and w2 [E,H,I], got w13 [80, 64] and w2 ["),
    ({"w2": zeros(4, H, I)}, "w13 and w2 must hold the same experts, got 3 and 4; stack those of this rank along dim"),
    ({"w2": zeros(E, I, H)}, "w13 columns and w2 rows must both be hidden_size, got w13 [3, 80, 64] and w2 [3, 40, 64"),
    ({"w2": zeros(E, H, 30)}, "w13 must have 2*I rows (gated) or I rows (not gated) where w2 has I columns, got w13 ["),
    ({"w13": zeros(E, 2 * I, H, dtype=torch.int8)},
        "w13 must be bfloat16, float16 or float32 in scheme unquantized, got torch.int8; pass quant=... if the weight"),
    ({"w13_bias": zeros(E, 2 * I)}, "scheme unquantized needs w2_bias of shape [3, 64], got none"),
    ({"w13_bias": zeros(E, I), "w2_bias": zeros(E, H)},
        "w13_bias must have shape [3, 80] in scheme unquantized, got [3, 40]"),
    ({"w2_scale": zeros(E)}, "scheme unquantized has no tensor 'w2_scale'; pass quant=... if the weights are of anoth"),
    ({"w13": zeros(0, 2 * I, H), "w2": zeros(0, H, I)},
        "w13 and w2 must hold at least one expert, row and column, got w13 [0, 80, 64] and w2 [0, 64, 40]; a rank wi"),
    ({"w13": zeros(E, 2 * I, 0), "w2": zeros(E, 0, I)},
        "w13 and w2 must hold at least one expert, row and column, got w13 [3, 80, 0] and w2 [3, 0, 40]; a rank with"),
    ({"w2": torch.zeros(E, H, I).to_sparse()}, "w2 must be a dense tensor, got layout torch.sparse_coo; call .to_dens"),
    ({"w2": zeros(E, H, I, device="meta")}, "all expert weights must be on one device, got w2 on meta and w13 on cpu;"),
]
# fmt: on


@pytest.mark.parametrize(("changes", "text"), BAD_PLAIN, ids=[text[:40] for _, text in BAD_PLAIN])
def test_bad_construction(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        plain(**changes)


@pytest.mark.parametrize(
    ("scheme", "changes", "text"),
    [
        ("nvfp4", {"w2_scale_2": zeros(E)}, "w2_scale_2 must be torch.float32 in scheme nvfp4, got torch.bfloat16; co"),
        ("mxfp4_w4a16", {"w2_scale": zeros(E, H, 2, dtype=torch.uint8)},
            "w2_scale must be torch.float8_e8m0fnu in scheme mxfp4_w4a16, got torch.uint8; view its bytes as torch.f"),
        ("fp8_block128", {"w13": zeros(E, 2 * I, H)}, "w13 must be torch.float8_e4m3fn in scheme fp8_block128, got "
            "torch.bfloat16; quantize with moereg.quantize.quantize_weights, or leave quant out"),
        ("nvfp4", {"w13_scale": ones(E, 2 * I, 2, dtype=torch.float8_e4m3fn)}, "w13_scale must have shape [3, 80, 4] "
            "in scheme nvfp4, got [3, 80, 2]; pass one for each group of 1 rows x 16 columns, in order, not swizzled "),
        ("int8_w8a16", {"w2_scale": ones(E, H, dtype=torch.float32)}, "w2_scale must have shape [3, 64, 1] in scheme "
            "int8_w8a16, got [3, 64]; pass one for each group of 1 rows x all columns, in order, not swizzled and not"),
        ("fp8_tensor_dynamic", {"w2_scale": ones(E, 1, dtype=torch.float32)}, "w2_scale must have shape [3] in scheme "
            "fp8_tensor_dynamic, got [3, 1]; pass one for each expert, or of w13 one for gate and one for up"),
        ("int4_w4a16_g32_zp", {"w13_zero_point": zeros(E, 2 * I, 2, dtype=torch.uint8)}, "w13_zero_point must have "
            "shape [3, 80, 1] in scheme int4_w4a16_g32_zp, got [3, 80, 2]; pass one for each group, two 4-bit ones to"),
        ("int4_w4a16_gall", {"w13": zeros(E, 2 * I, H, dtype=torch.uint8)}, "w13 must have hidden_size / 2 columns in "
            "scheme int4_w4a16_gall, two 4-bit codes to a byte, where w2 has hidden_size rows, got w13 [3, 80, 64] an"),
        ("fp8_tensor_static", {"a2_scale": None}, "scheme fp8_tensor_static needs a2_scale of shape [3] or [], got n"),
    ],
)  # fmt: skip
def test_bad_quantized_construction(scheme: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        of_scheme(scheme, **changes)


@pytest.mark.parametrize("scheme", [name for name, each in QUANT_SCHEMES.items() if each.weight is not None])
def test_every_tensor_of_every_scheme_is_checked(scheme: str) -> None:
    """What is missing, of another shape or dtype, not a scale, or has no place is one line that names it."""
    rows = QUANT_SCHEMES[scheme].tensor_rows(E, H, I, num_halves=2, has_bias=True)
    weights = of_scheme(scheme, has_bias=True)
    bad: list[tuple[str, torch.Tensor | None]] = [(row.name, None) for row in rows if row.required]
    for row in rows:
        tensor = weights.tensors()[row.name]
        # One group, row or expert more, as in swizzled, padded and unsharded tensors; and one dimension more.
        bad += [(row.name, torch.cat((tensor, tensor.narrow(dim, 0, 1)), dim)) for dim in range(tensor.dim())]
        others = {torch.float64, torch.int32, torch.bool} | ({torch.bfloat16, torch.int8} if row.dtype else set())
        bad += [(row.name, torch.ones(tensor.shape, dtype=dtype)) for dtype in others - {tensor.dtype}]
        bad.append((row.name, tensor.unsqueeze(-1)))
        if "scale" in row.role and tensor.is_floating_point():
            bad.append((row.name, torch.full(tensor.shape, math.nan).to(tensor.dtype)))
        if row.role == "activation_scale":
            bad.append((row.name, torch.zeros_like(tensor)))
    bad += [(name, torch.ones(3)) for name in {*TENSOR_ROLES} - {row.name for row in rows}]
    for name, tensor in bad:
        with pytest.raises(ValueError, match=name) as error:
            dataclasses.replace(weights, **{name: tensor})  # type: ignore[arg-type]
        assert "\n" not in str(error.value)


@pytest.mark.few(most=6)
@pytest.mark.parametrize("scheme", QUANT_SCHEMES)
def test_weights_of_another_scheme_are_refused(scheme: str) -> None:
    for other in {*QUANT_SCHEMES} - {scheme}:
        text = f"^the weights are {other} but the problem says {scheme}; make both name the checkpoint's"
        with pytest.raises(ValueError, match=text):
            of_scheme(other).check_against(problem_of(quant=scheme))


def spoiled(scheme: str, name: str, value: float, *place: int) -> dict[str, torch.Tensor]:
    tensor = of_scheme(scheme).tensors()[name].clone()
    tensor[place] = value
    return {name: tensor}


INF, NAN = math.inf, math.nan
# fmt: off
BAD_VALUES: list[tuple[str, dict[str, torch.Tensor], str]] = [
    *(
        (scheme, spoiled(scheme, "w13_scale", value, *place),
            f"w13_scale must be finite and not negative, got {value} at {list(place)}; look at the checkpoint and at")
        for scheme, value, place in (
            ("fp8_tensor_dynamic", -1.0, (2,)),
            ("fp8_channel_token", INF, (1, 7, 0)),
            ("fp8_block128", NAN, (0, 0, 0)),
            ("nvfp4", -0.5, (1, 2, 3)),
            ("nvfp4", NAN, (1, 2, 3)),
            ("mxfp8", NAN, (2, 79, 1)),
        )
    ),
    ("nvfp4", {"w2_scale_2": torch.tensor([1.0, -INF, 1.0])}, "w2_scale_2 must be finite and not negative, got -inf "),
    ("nvfp4", {"a13_scale": torch.tensor([1.0, 1.0, 0.0])},
        "a13_scale must be finite and positive, got 0.0 at [2]; calibrate again, or leave it out where the scheme can"),
    ("fp8_tensor_static", {"a2_scale": torch.tensor(NAN)}, "a2_scale must be finite and positive, got nan; calibrate"),
    # 40 columns are two groups of w2, 64 columns two of w13 in groups of 32, so only one of 64 leaves one over.
    ("int4_w4a16_g64_zp", {"w2_zero_point": torch.full((E, H, 1), 0x88, dtype=torch.uint8)},
        "w2_zero_point must have 0 in the last nibble of a row of 1 groups, got 8 at [0, 0]; pack them along the gro"),
]
# fmt: on


@pytest.mark.parametrize(("scheme", "changes", "text"), BAD_VALUES)
def test_bad_values(scheme: str, changes: dict[str, torch.Tensor], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        of_scheme(scheme, **changes)


def test_weights_that_are_fine() -> None:
    """Groups of zeros may have any scale that is not negative, also -0, and every nibble is a zero point."""
    of_scheme("nvfp4", a13_scale=None, a2_scale=None)
    of_scheme("nvfp4", a13_scale=torch.ones(()), w13_scale_2=torch.ones(E, 2))
    of_scheme("fp8_tensor_dynamic", w13_scale=torch.ones(E, 2))
    not_gated = plain(w13=zeros(E, I, H))
    not_gated.check_against(problem_of(activation="relu2"))
    assert not_gated.num_halves == 1
    biases = {"w13_bias": zeros(E, 2 * I, dtype=torch.float32), "w2_bias": zeros(E, H, dtype=torch.float32)}
    plain(**biases).check_against(problem_of(has_bias=True))
    of_scheme("fp8_channel_token", w13_scale=torch.zeros(E, 2 * I, 1))
    of_scheme("nvfp4", **spoiled("nvfp4", "w13_scale", -0.0, 0, 0, 0))
    of_scheme("int4_w4a16_g32_zp", w13_zero_point=torch.full((E, 2 * I, 1), 0xFF, dtype=torch.uint8))
    of_scheme("mxfp8", **spoiled("mxfp8", "w13_scale", 2.0**127, 0, 0, 0))


def test_values_on_a_gpu_are_checked_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checks_values(torch.device("cpu"))
    assert not checks_values(torch.device("cuda"))
    monkeypatch.setenv("MOEREG_DEBUG", "1")
    assert checks_values(torch.device("cuda"))
    assert not checks_values(torch.device("meta"))


def test_fake_weights_have_no_values_to_check() -> None:
    with FakeTensorMode():
        of_scheme("nvfp4")


def test_unknown_scheme() -> None:
    with pytest.raises(UnknownSchemeError, match=r"did you mean 'nvfp4'"):
        plain(quant="nvfp40")


# fmt: off
MISMATCHES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"num_experts": 4}, "w13 must be [4, 80, 64] for E4 H64 I40 k2 bfloat16 unquantized silu, got [3, 80, 64]; c"),
    # 2I rows of a gated layer are as many as 2I rows of one that is not; w2 tells them apart.
    ({}, {"activation": "relu2", "intermediate_size": 2 * I},
        "w2 must be [3, 64, 80] for E3 H64 I80 k2 bfloat16 unquantized relu2, got [3, 64, 40]; correct the problem's"),
    ({}, {"quant": "nvfp4"}, "the weights are unquantized but the problem says nvfp4; make both name the checkpoint's"),
    ({}, {"quant": QuantScheme("unquantized", QuantFormat("int8", (1, 32)))},
        "the weights are unquantized but the problem says unquantized (weights int8 in groups of 1 x 32, float32 "),
    ({}, {"dtype": "float16"}, "w13 must be float16 for this problem, got torch.bfloat16; convert one"),
    ({"w2": zeros(E, H, I, dtype=torch.float16)}, {}, "w2 must be bfloat16 for this problem, got torch.float16; conve"),
    ({"w13_bias": zeros(E, 2 * I), "w2_bias": zeros(E, H, dtype=torch.float16)}, {"has_bias": True},
        "w2_bias must be bfloat16 or float32 for this problem, got torch.float16; convert one"),
    ({}, {"has_bias": True}, "the problem says has_bias=True, got weights without biases"),
    ({"w13_bias": zeros(E, 2 * I), "w2_bias": zeros(E, H)}, {}, "the problem says has_bias=False, got weights with bi"),
]
# fmt: on


@pytest.mark.parametrize(("weights", "problem", "text"), MISMATCHES, ids=[text[:40] for *_, text in MISMATCHES])
def test_check_against(weights: dict[str, Any], problem: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        plain(**weights).check_against(problem_of(**problem))


def test_to_keeps_what_is_there_already() -> None:
    weights = of_scheme("nvfp4")
    assert weights.to("cpu").w13 is weights.w13
    moved = weights.to("meta")
    assert {tensor.device.type for tensor in moved.tensors().values()} == {"meta"}
    assert moved.scheme is weights.scheme


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def permuted(start: int = 0, **changes: Any) -> PermutedWeights:
    values: dict[str, Any] = {
        "layout": "some_layout",
        "per_expert": {
            "w13": numbered(2, 4, start=start),
            "opaque": [numbered(3, start=start), numbered(3, start=start)],
        },
        "shared": {"scale": numbered(5, start=start)},
    }
    return PermutedWeights(**{**values, **changes})


def test_permuted_lookup() -> None:
    weights = permuted()
    assert torch.equal(weights["w13"], numbered(2, 4))
    assert torch.equal(weights["scale"], numbered(5))
    assert len(weights.experts("opaque")) == 2
    assert weights.get("w2") is None
    assert weights.get("scale") is weights["scale"]
    assert weights.num_bytes == 4 * (8 + 6 + 5)
    assert weights.device == torch.device("cpu")
    with pytest.raises(KeyError):
        weights["w2"]


def test_permuted_experts_are_counted() -> None:
    text = "per_expert tensors must hold the same number of experts, got {'w13': 2, 'w2': 3}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        PermutedWeights("layout", {"w13": numbered(2, 4), "w2": [numbered(1)] * 3})


def test_copy_from_keeps_storage() -> None:
    weights, other = permuted(), permuted(start=100)
    pointers = {name: weights[name].data_ptr() for name in ("w13", "scale")}
    opaque = weights.experts("opaque")
    weights.copy_from(other)
    assert {name: weights[name].data_ptr() for name in pointers} == pointers
    assert torch.equal(weights["w13"], numbered(2, 4, start=100))
    assert torch.equal(weights["scale"], numbered(5, start=100))
    # Opaque tensors cannot be written into; the list that holds them is the same.
    assert weights.experts("opaque") is opaque
    assert torch.equal(opaque[0], numbered(3, start=100))
    other["w13"].zero_()
    assert weights["w13"].any()


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "other_layout"},
        {"per_expert": {"w13": numbered(2, 5), "opaque": [numbered(3), numbered(3)]}},
        {"per_expert": {"w13": numbered(2, 4).half(), "opaque": [numbered(3), numbered(3)]}},
        {"per_expert": {"w13": numbered(2, 4)}},
        {"shared": {}},
        {"shared": {"scale": numbered(6)}},
    ],
)
def test_copy_from_refuses_and_writes_nothing(changes: dict[str, Any]) -> None:
    weights = permuted()
    with pytest.raises(ValueError, match=r"^reload needs weights of the same layout and shapes, got .* for "):
        weights.copy_from(permuted(start=100, **changes))
    assert torch.equal(weights["w13"], numbered(2, 4))
    assert torch.equal(weights["scale"], numbered(5))
