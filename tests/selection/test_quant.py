"""The table of schemes: which tensors each needs, and which scheme may compute another's weights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from moereg.errors import UnknownSchemeError
from moereg.spec.quant_schemes import QUANT_SCHEMES, WHOLE, QuantFormat, QuantScheme, TensorRow, get_scheme

# Sizes that no group divides, so that every ceil-division shows: H = 200, I = 72, E = 3.
E, H, I = 3, 200, 72  # noqa: E741
FP8, E8M0, FP32, U8 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32, torch.uint8

ROWS, TENSOR = ((144, 1), (200, 1)), ((), ())
# Codes, how many share a byte, and the scales with their shapes for each expert, of w13 and of w2.
FORMS: dict[str, Any] = {
    **dict.fromkeys(("fp8_tensor_static", "fp8_tensor_dynamic"), (FP8, 1, FP32, TENSOR)),
    "fp8_channel_token": (FP8, 1, FP32, ROWS),
    "fp8_block128": (FP8, 1, FP32, ((2, 2), (2, 1))),
    "mxfp8": (FP8, 1, E8M0, ((144, 7), (200, 3))),
    **dict.fromkeys(("nvfp4", "nvfp4_w4a16"), (U8, 2, FP8, ((144, 13), (200, 5)))),
    **dict.fromkeys(("mxfp4_w4a16", "mxfp4_mxfp8"), (U8, 2, E8M0, ((144, 7), (200, 3)))),
    **dict.fromkeys(("int8_w8a8", "int8_w8a16"), (torch.int8, 1, FP32, ROWS)),
}
for group, groups13, groups2 in (("32", 7, 3), ("64", 4, 2), ("128", 2, 1), ("all", 1, 1)):
    for zero_points in ("", "_zp"):
        FORMS[f"int4_w4a16_g{group}{zero_points}"] = (U8, 2, FP32, ((144, groups13), (200, groups2)))
FORMS |= {"nf4": FORMS["int4_w4a16_g64"], "nf4_dq": (U8, 2, U8, ((144, 4), (200, 2)))}
FORMS |= dict.fromkeys(("int4_w4a8_g128_token", "int4_w4a8_g128"), FORMS["int4_w4a16_g128"])

# A tensor of w13 may have one number for gate and one for up.
GLOBAL = {"w13_scale_2": (FP32, (E,), (E, 2)), "w2_scale_2": (FP32, (E,))}
STATIC = {"a13_scale": (FP32, (E,), ()), "a2_scale": (FP32, (E,), ())}
TABLE: dict[str, dict[str, Any]] = {"unquantized": {"w13": (None, (E, 144, 200)), "w2": (None, (E, 200, 72))}}
for name, (codes, packed, scale, (scale13, scale2)) in FORMS.items():
    TABLE[name] = {
        "w13": (codes, (E, 144, 200 // packed)),
        "w13_scale": (scale, (E, *scale13), *([] if scale13 else [(E, 2)])),
        "w2": (codes, (E, 200, 72 // packed)),
        "w2_scale": (scale, (E, *scale2)),
        **(GLOBAL if name.startswith("nvfp4") else {}),
        # The offset, and one for each 256 of 576 and 400 groups.
        **({"w13_scale_2": (FP32, (E, 4)), "w2_scale_2": (FP32, (E, 3))} if name == "nf4_dq" else {}),
        **(STATIC if name in ("fp8_tensor_static", "nvfp4", "int4_w4a8_g128") else {}),
    }
    if name.endswith("_zp"):
        TABLE[name] |= {
            "w13_zero_point": (U8, (E, 144, -(-scale13[1] // 2))),
            "w2_zero_point": (U8, (E, 200, -(-scale2[1] // 2))),
        }


def test_every_scheme_has_a_row() -> None:
    assert set(TABLE) == set(QUANT_SCHEMES)
    assert all(scheme.name == name for name, scheme in QUANT_SCHEMES.items())


@pytest.mark.parametrize("name", QUANT_SCHEMES)
def test_rows(name: str) -> None:
    rows = QUANT_SCHEMES[name].tensor_rows(E, H, I, num_halves=2, has_bias=False)
    assert {row.name: (row.dtype, *row.shapes) for row in rows} == TABLE[name]


@pytest.mark.parametrize("name", QUANT_SCHEMES)
def test_only_dynamic_global_scales_are_optional_and_no_bias_is_quantized(name: str) -> None:
    rows = QUANT_SCHEMES[name].tensor_rows(E, H, I, num_halves=2, has_bias=True)
    optional = {row.name for row in rows if not row.required}
    assert optional == ({"a13_scale", "a2_scale"} if name == "nvfp4" else set())
    assert {row for row in rows if row.role == "bias"} == {
        TensorRow("w13", "bias", None, ((E, 2 * I),)),
        TensorRow("w2", "bias", None, ((E, H),)),
    }


def test_not_gated_has_one_half() -> None:
    rows = {row.name: row for row in QUANT_SCHEMES["nvfp4"].tensor_rows(E, H, I, num_halves=1, has_bias=False)}
    assert rows["w13"].shapes == ((E, 72, 100),)
    assert rows["w13_scale_2"].shapes == ((E,), (E, 1))


def test_odd_sizes_are_rounded_up_when_packed() -> None:
    rows = {row.name: row for row in QUANT_SCHEMES["mxfp4_w4a16"].tensor_rows(1, 33, 7, num_halves=2, has_bias=False)}
    assert rows["w13"].shapes == ((1, 14, 17),)
    assert rows["w13_scale"].shapes == ((1, 14, 2),)
    assert rows["w2"].shapes == ((1, 33, 4),)


SERVED_BY_16_BIT = {
    "nvfp4": {"nvfp4_w4a16"},
    "mxfp4_mxfp8": {"mxfp4_w4a16"},
    "int8_w8a8": {"int8_w8a16"},
    "int4_w4a8_g128": {"int4_w4a16_g128"},
    "int4_w4a8_g128_token": {"int4_w4a16_g128"},
}


@pytest.mark.parametrize("checkpoint", QUANT_SCHEMES)
def test_serves(checkpoint: str) -> None:
    serving = {name for name, scheme in QUANT_SCHEMES.items() if scheme.serves(QUANT_SCHEMES[checkpoint])}
    assert serving == {checkpoint} | SERVED_BY_16_BIT.get(checkpoint, set())


def test_a_new_scheme_is_served_by_value_not_by_name() -> None:
    weight = QuantFormat("uint4", (1, 128))
    new = QuantScheme("int4_w4a8_e5m2", weight, QuantFormat("float8_e5m2", (1, -1)))
    assert QUANT_SCHEMES["int4_w4a16_g128"].serves(new)
    assert not new.serves(QUANT_SCHEMES["int4_w4a16_g128"])
    assert QuantScheme("same_under_another_name", weight).serves(QUANT_SCHEMES["int4_w4a16_g128"])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"dtype": "int3"},
            "must be one of uint4, float4_e2m1fn, nf4, int8, uint8 or an 8-bit float of torch, got 'int3'",
        ),
        ({"dtype": torch.int8}, "dtype of a QuantFormat must be one of"),
        ({"dtype": "bfloat16"}, "dtype of a QuantFormat must be one of"),
        (
            {"scale_dtype": "uint16"},
            "must name a float dtype of torch, or be uint8 for scales that are quantized too, got",
        ),
        ({"scale_dtype": "e8m0"}, "or be uint8 for scales that are quantized too, got 'e8m0'; "),
        ({"scale_dtype": "uint8", "group": (2, 32)}, "belong to groups within a row, without zero points, global or"),
        ({"scale_dtype": "uint8", "global_scale": True}, "got int8 in groups of 1 x 32, uint8 scales, quantized in"),
        ({"scale_dtype": "uint8", "dtype": "uint4", "symmetric": False}, "give groups of 1 row, or float32 scales"),
        ({"group": (0, 128)}, "must be (rows, columns), each an integer of at least 1 or WHOLE (-1), got (0, 128)"),
        ({"group": (1, -2)}, "group of a QuantFormat must be (rows, columns), each an integer"),
        ({"group": (1, 32.0)}, "group of a QuantFormat must be (rows, columns), each an integer"),
        ({"group": (True, 32)}, "group of a QuantFormat must be (rows, columns), each an integer"),
        ({"dtype": "uint4", "group": (WHOLE, WHOLE), "symmetric": False}, "of a matrix, got one group for all of it"),
        ({"group": (128, 128), "global_scale": True}, "multiplies scales of groups within a row, got group (128, 128)"),
        ({"group": 128}, "group of a QuantFormat must be (rows, columns), each an integer"),
        ({"group": (1, 2, 3)}, "group of a QuantFormat must be (rows, columns), each an integer"),
    ],
)
def test_formats_that_nothing_could_store(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        QuantFormat(**{"dtype": "int8", "group": (1, 32), **fields})


def test_a_format_says_what_it_is() -> None:
    zero_points = QuantFormat("uint4", (1, 48), symmetric=False)
    assert str(zero_points) == "uint4 in groups of 1 x 48, float32 scales, zero points"
    static = QuantFormat("float8_e4m3fn", (1, 16), global_scale=True, static=True)
    assert str(static) == "float8_e4m3fn in groups of 1 x 16, float32 scales, a global scale, static"
    assert QUANT_SCHEMES["nvfp4"].description == "nvfp4"
    expected = f"nvfp4 (weights {zero_points}; activations the problem's dtype)"
    assert QuantScheme("nvfp4", zero_points).description == expected


def test_get_scheme() -> None:
    value = QuantScheme("mine", QuantFormat("int8", (1, 32)))
    assert get_scheme(value) is value
    assert get_scheme("nvfp4") is QUANT_SCHEMES["nvfp4"]
    with pytest.raises(UnknownSchemeError, match=r"^unknown quant scheme 'mxfp', did you mean one of 'mxfp4_mxfp8', "):
        get_scheme("mxfp")
