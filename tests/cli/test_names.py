"""`moereg models` and `moereg schemes`."""

from __future__ import annotations

import pytest

from moereg.dispatch import explain_backends
from moereg.errors import UnknownPlatformError
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
    assert explain_backends(
        MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2), "h100"
    ).platform == Platform("cuda", "sm90")


NAMED: dict[str, str] = {
    "sm70": "V100; Tesla V100-SXM2-32GB",
    "sm75": "Tesla T4; RTX 2080 Ti",
    "sm80": "A100 80GB; NVIDIA A100-SXM4-40GB; a30; A800",
    "sm86": "RTX 3050; GeForce RTX 3060 Ti; 3070 ti; 3080; NVIDIA GeForce RTX 3090 Ti; RTX A6000; A6000; A5000; A4000; "
    "RTX A4500; A4500; "
    "A2; A10; NVIDIA A10G; A16; A40; GeForce RTX 3080 Laptop GPU",
    "sm87": "Jetson AGX Orin 64GB; Orin NX; Jetson Orin Nano",
    "sm89": "RTX 4050; 4060; RTX 4060 Ti; RTX 4070 SUPER; NVIDIA GeForce RTX 4070 Ti SUPER; rtx-4080; RTX 4080 SUPER; "
    "4090; RTX 4090 D; NVIDIA RTX 6000 Ada Generation; 6000 Ada; RTX 5000 Ada; RTX 4500 Ada; RTX 4000 SFF Ada; "
    "RTX 2000 Ada; NVIDIA L4; L20; L40; L40S",
    "sm90": "NVIDIA H100 80GB HBM3; H100 PCIe; H100 NVL; HGX H200; H20-3e; GH200 480GB; NVIDIA_H100_80GB_HBM3; "
    "H100 80 GB; NVIDIA-H100-80-GB-HBM3",
    "sm100": "B200; DGX B200; GB200 NVL72",
    "sm103": "B300; GB300 NVL72; NVIDIA B300 SXM6 AC",
    "sm110": "Thor; Jetson Thor; NVIDIA Thor; Jetson AGX Thor Developer Kit; Jetson T5000; T4000",
    "sm120": "RTX 5050; rtx5060; RTX 5060 Ti; 5070; GeForce RTX 5070 Ti; 5080; NVIDIA GeForce RTX 5090; RTX 5090 D; "
    "RTX PRO 6000; NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition; PRO 6000; "
    "RTX PRO 6000 Blackwell Server Edition; RTX PRO 5000 Blackwell; RTX PRO 4500 Blackwell; "
    "RTX PRO 4000 Blackwell SFF Edition; RTX PRO 2000 Blackwell",
    "sm121": "GB10; NVIDIA GB10; DGX Spark; NVIDIA DGX Spark; dgx-spark",
    "gfx90a": "MI210; AMD Instinct MI250X",
    "gfx942": "MI300; MI300A; MI300X; AMD Instinct MI300X OAM; AMD_Instinct_MI325X; MI325; MI308X; AMD Instinct MI308X",
    "gfx950": "MI350; MI350X; MI355; AMD Instinct MI355X",
}
"""As people and drivers write them; NVIDIA's and AMD's own tables name the architectures."""


@pytest.mark.parametrize("arch", NAMED)
def test_machines_go_by_the_names_that_people_write(arch: str) -> None:
    for name in NAMED[arch].split("; "):
        assert Platform.from_name(name).arch == arch, name


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("rtx 5065", "rtx50"),
        ("NVIDIA RTX 4095", "rtx409"),
        ("mi310x", "mi3"),
        ("jetson thorr", "thor"),
        ("L4S", "l40s"),
        ("RTX 6000", "6000"),  # Turing's, Ampere's, Ada's and Blackwell's are called so.
        ("h1000", "h100"),
    ],
)
def test_an_unknown_machine_names_close_ones(name: str, near: str) -> None:
    with pytest.raises(UnknownPlatformError, match=f"unknown platform '{name}', did you mean .*{near}"):
        Platform.from_name(name)


@pytest.mark.parametrize("name", ["80GB", "A100 of 80GB", "cuda:sm90", "6000", "rtx", "blackwell", "q", ""])
def test_what_is_no_product(name: str) -> None:
    assert platform_of_product(name) is None


def test_what_schemes_are_called_are_schemes() -> None:
    assert {scheme for schemes in SCHEMES_CALLED.values() for scheme in schemes} <= {*QUANT_SCHEMES}
    assert not {*SCHEMES_CALLED} & {*QUANT_SCHEMES}
