"""`moereg models` and `moereg schemes`."""

from __future__ import annotations

import pytest

from moereg.dispatch import explain_backends
from moereg.platforms import PRODUCTS, Platform, platform_of_product
from moereg.spec.model_shapes import MODEL_SHAPES
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES, SCHEMES_CALLED
from tests.cli.command import Call, CallJson


def test_models_are_those_of_the_option(call: Call, call_json: CallJson, monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = call_json("models")
    assert (code, found["schema"]) == (0, 1)
    assert [model["name"] for model in found["models"]] == list(MODEL_SHAPES)
    assert all(model["released_quant"] in QUANT_SCHEMES for model in found["models"])
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = call("models")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == len(MODEL_SHAPES) + 3
    assert max(map(len, lines)) <= 80
    assert next(line.split() for line in lines if line.startswith("gpt-oss-20b")) == (
        ["gpt-oss-20b", "32", "2880", "2880", "4", "24", "swigluoai,", "bias", "mxfp4_w4a16"]
    )


@pytest.mark.parametrize("platform", ["cpu", "cuda:sm90", "b200"])
def test_backends_of_schemes_are_those_that_selection_knows(call_json: CallJson, platform: str) -> None:
    code, found = call_json(f"schemes --platform {platform}")
    assert code == 0
    assert [scheme["name"] for scheme in found["schemes"]][: len(QUANT_SCHEMES)] == list(QUANT_SCHEMES)
    for name in ("unquantized", "fp8_block128", "mxfp4_w4a16", "int8_w8a8"):
        scheme = next(scheme for scheme in found["schemes"] if scheme["name"] == name)
        problem = MoEProblem(num_experts=8, hidden_size=1024, intermediate_size=512, top_k=2, quant=name)
        fitting = [one for one in explain_backends(problem, platform).decisions if one.accepted]
        assert {one.backend for one in fitting} <= {*scheme["backends"], *scheme["emulated_by"]}
        assert {one.backend for one in fitting if one.tier == "kernel"} <= {*scheme["backends"]}


def test_schemes_for_people(call: Call) -> None:
    code, out, err = call("schemes --platform h100")
    assert (code, err) == (0, "")
    assert "note: --platform h100 is cuda:sm90" in out
    rows = {line.split()[0]: " ".join(line.split()) for line in out.splitlines() if line}
    assert rows["fp8_block128"].startswith("fp8_block128 fp8 by 128 x 128 fp8 by 128 ")
    assert rows["int4_w4a16_g128_zp"].startswith("int4_w4a16_g128_zp int4 by 128, zeros 16 bits ")
    assert "triton" in rows["mxfp4_w4a16"]


def test_products_are_platforms() -> None:
    for product, name in PRODUCTS.items():
        assert str(Platform.from_name(product)) == name
    for name in ("NVIDIA H100", "h-100", "GeForce RTX 5090", "Instinct MI300X", "AMD Instinct mi300x"):
        assert platform_of_product(name) in ("cuda:sm90", "cuda:sm120", "rocm:gfx942")
    # As drivers call them.
    for name, arch in {
        "A100 80GB": "sm80",
        "NVIDIA A100-SXM4-40GB": "sm80",
        "NVIDIA H100 80GB HBM3": "sm90",
        "H100 PCIe": "sm90",
    }.items():
        assert platform_of_product(name) == f"cuda:{arch}"
    assert platform_of_product("80GB") is platform_of_product("A100 of 80GB") is None
    assert platform_of_product("cuda:sm90") is None
    assert platform_of_product("h1000") is None
    assert explain_backends(
        MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2), "h100"
    ).platform == Platform("cuda", "sm90")


def test_what_schemes_are_called_are_schemes() -> None:
    assert {scheme for schemes in SCHEMES_CALLED.values() for scheme in schemes} <= {*QUANT_SCHEMES}
    assert not {*SCHEMES_CALLED} & {*QUANT_SCHEMES}
