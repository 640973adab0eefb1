"""Selection among vLLM's backends, without a GPU and without vllm."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from moereg_vllm import marlin

from moereg.author import (
    BackendCell,
    MoEProblem,
    Platform,
    explain_backends,
    list_cells,
)
from moereg.evidence.ledger import Verification, evidence_of, merge_ledger

NAMES = ("deepgemm", "marlin", "triton_kernels", "vllm_cutlass", "vllm_triton")
LAYER = {"num_experts": 8, "hidden_size": 1024, "intermediate_size": 256, "top_k": 2}
H200 = "cuda:sm90"


def accepted(problem: MoEProblem, platform: str | Platform = H200) -> dict[str, str]:
    """The backends of this wheel that can serve a problem, each with what it computes."""
    decisions = explain_backends(problem, platform=platform).decisions
    return {found.backend: found.computes for found in decisions if found.accepted and found.backend in NAMES}


def reasons(problem: MoEProblem, name: str, platform: str | Platform = H200) -> str:
    """Everything that is said against a backend, cell by cell."""
    decisions = explain_backends(problem, platform=platform).decisions
    return "\n".join(reason.text for found in decisions if found.backend == name for reason in found.reasons)


SERVED = {
    "unquantized": {"vllm_triton"},
    "fp8_tensor_static": {"marlin"},
    "fp8_tensor_dynamic": {"marlin"},
    "fp8_channel_token": {"marlin", "vllm_cutlass", "vllm_triton"},
    "fp8_block128": {"deepgemm", "marlin", "vllm_triton"},
    "nvfp4": {"marlin"},
    "nvfp4_w4a16": {"marlin"},
    "mxfp4_w4a16": {"marlin", "triton_kernels"},
    "int8_w8a8": {"marlin", "vllm_triton"},
    "int8_w8a16": {"marlin"},
    "int4_w4a16_g32": {"marlin"},
    "int4_w4a16_g128_zp": {"marlin"},
    "int4_w4a16_gall": {"marlin"},
    "mxfp8": set(),
}


@pytest.mark.parametrize(("quant", "names"), SERVED.items())
def test_which_backends_serve_a_scheme(quant: str, names: set[str]) -> None:
    assert set(accepted(MoEProblem(**LAYER, quant=quant))) == names


def test_marlin_says_that_it_leaves_activations_at_16_bits() -> None:
    assert accepted(MoEProblem(**LAYER, quant="fp8_channel_token"))["marlin"] == "fp8_channel_w8a16"
    exact = MoEProblem(**LAYER, quant="fp8_channel_token", exact_activations=True)
    assert set(accepted(exact)) == {"vllm_cutlass", "vllm_triton"}


REJECTED = [
    ({"hidden_size": 1000}, "marlin", "int4_w4a16_g32", "hidden_size % 64 == 0, got 1000"),
    ({"intermediate_size": 192}, "marlin", "int4_w4a16_g128", "intermediate_size % 128 == 0, got 192"),
    ({"hidden_size": 1536}, "deepgemm", "fp8_block128", "hidden_size % 1024 == 0, got 1536"),
    ({"dtype": "float16"}, "deepgemm", "fp8_block128", "dtype in (bfloat16), got float16"),
    ({"dtype": "float16"}, "marlin", "mxfp4_w4a16", "dtype in (bfloat16), got float16"),
    ({"has_bias": True}, "vllm_cutlass", "fp8_channel_token", "does not apply biases"),
    ({"activation": "swigluoai"}, "vllm_cutlass", "fp8_channel_token", "requires activation in"),
    ({"activation": "silu(limit=3.0)"}, "vllm_cutlass", "fp8_channel_token", "does not apply the swiglu clamp"),
    ({"hidden_size": 128}, "triton_kernels", "mxfp4_w4a16", "requires hidden_size > 128, got 128"),
    ({"intermediate_size": 64}, "triton_kernels", "mxfp4_w4a16", "requires intermediate_size > 64, got 64"),
    ({"activation": "relu2"}, "triton_kernels", "mxfp4_w4a16", "got relu2"),
    ({"num_experts": 1024, "num_local_experts": 64}, "vllm_triton", "unquantized", "num_experts <= 991, got 1024"),
    ({"deterministic": True}, "vllm_triton", "unquantized", "does not give the same bits each time"),
    ({"activation_format": "batched"}, "marlin", "nvfp4_w4a16", "got batched"),
    ({"dtype": "float32"}, "vllm_triton", "unquantized", "got float32"),
]


@pytest.mark.parametrize(("changes", "name", "quant", "text"), REJECTED)
def test_what_is_rejected_says_why(changes: dict[str, object], name: str, quant: str, text: str) -> None:
    problem = MoEProblem(**{**LAYER, "quant": quant, **changes})  # type: ignore[arg-type]
    assert name not in accepted(problem)
    assert text in reasons(problem, name)


def test_architectures() -> None:
    block = MoEProblem(**LAYER, quant="fp8_block128")
    assert set(accepted(block, "cuda:sm80")) == {"marlin"}
    assert set(accepted(block, "cuda:sm89")) == {"marlin", "vllm_triton"}
    assert set(accepted(block, "cuda:sm100")) == {"marlin", "vllm_triton"}
    assert accepted(block, "rocm:gfx942") == {}


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ({}, "requires vllm"),
        ({"vllm": "0.25.1"}, "0.25.1"),
        ({"vllm": "0.27.0"}, "0.27.0"),
        ({"vllm": "0.26.0"}, ""),
    ],
)
def test_the_version_of_vllm(versions: dict[str, str], text: str) -> None:
    platform = Platform("cuda", "sm90", versions=versions, probed=True)
    problem = MoEProblem(**LAYER)
    assert ("vllm_triton" in accepted(problem, platform)) == (not text)
    assert text in reasons(problem, "vllm_triton", platform)


def test_deciding_imports_no_kernel_library() -> None:
    code = (
        "import sys, moereg\n"
        f"from moereg_vllm import {', '.join(NAMES)}\n"
        f"problem = moereg.MoEProblem(**{LAYER})\n"
        f"assert moereg.select_backend(problem, platform={H200!r}, require='vllm_triton').backend == 'vllm_triton'\n"
        "assert not {'vllm', 'triton', 'deep_gemm', 'triton_kernels'} & set(sys.modules)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert process.returncode == 0, process.stderr


def test_the_wheel_names_what_it_registers() -> None:
    cells = [cell for cell in list_cells() if cell.experts.__module__.startswith("moereg_vllm.")]
    assert {cell.name for cell in cells} == set(NAMES)
    assert all(cell.requires == ("vllm<0.27,>=0.26",) for cell in cells)
    assert Path(marlin.__file__).with_name("py.typed").exists()
    points = {point.name for point in importlib.metadata.entry_points(group="moereg.backends")}
    assert set(NAMES) <= points


def own_cells() -> list[BackendCell]:
    return [cell for cell in list_cells() if cell.name in NAMES]


def test_each_record_is_of_a_cell() -> None:
    """It may be older than the code: to make a new one takes a Hopper GPU and vllm."""
    ledger = Path(marlin.__file__).with_name("moereg_ledger.json")
    evidence = [evidence_of(cell) for cell in own_cells()]
    found = [record for each in evidence for record in (*each.current, *each.stale)]
    assert len(found) == len(json.loads(ledger.read_text())["records"]) > 0


def test_a_ledger_of_other_code_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereg.evidence.ledger.module_file", lambda module: tmp_path / "__init__.py")
    cells = own_cells()
    records = [Verification.of(cell, Platform.from_name(H200), 1) for cell in cells]
    merge_ledger(tmp_path / "moereg_ledger.json", records)
    assert all(len(evidence_of(cell).current) == 1 and not evidence_of(cell).stale for cell in cells)
    merge_ledger(tmp_path / "moereg_ledger.json", [dataclasses.replace(one, digest="0" * 64) for one in records])
    assert all(len(evidence_of(cell).stale) == 1 and not evidence_of(cell).current for cell in cells)
