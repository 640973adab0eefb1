"""Accepted problems, and the reasons against the others, on machines that are named or imitated."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import moereg_humming.backend
import pytest
from moereg_humming import toolchain

from moereg.author import MoEProblem, Platform, explain_backends

SIZES = {"num_experts": 8, "hidden_size": 2048, "intermediate_size": 768, "top_k": 2}
MACHINE = dataclasses.replace(
    Platform.from_name("cuda:sm90"), probed=True, versions={"humming-kernels": "0.1.19", "triton": "3.6.0"}
)


@pytest.fixture(autouse=True)
def _toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CUDA toolkit of the headers alone; each test's platforms have probes of their own."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "nvrtc.h").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))


def reasons(problem: MoEProblem, platform: Platform | str) -> list[str]:
    """Texts against each cell of the backend that is for this platform; empty if one accepts."""
    assert moereg_humming.backend.moereg_api == "1"
    decisions = [each for each in explain_backends(problem, platform).decisions if each.backend == "humming"]
    if any(each.accepted for each in decisions):
        return []
    here = [each for each in decisions if not any(reason.code == "platform" for reason in each.reasons)]
    return [reason.text for each in here or decisions for reason in each.reasons]


@pytest.mark.parametrize("quant", ["int4_w4a16_g128", "int4_w4a16_gall_zp", "nvfp4", "mxfp4_mxfp8", "fp8_block128"])
def test_served_checkpoints(quant: str) -> None:
    assert reasons(MoEProblem(**SIZES, quant=quant), MACHINE) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quant": "unquantized"}, "requires weights in (int4_w4a16_g32,"),
        ({"hidden_size": 2052}, "requires hidden_size % 8 == 0, got 2052"),
        ({"dtype": "float32"}, "requires dtype in (bfloat16, float16), got float32"),
        ({"activation_format": "batched"}, "requires activation format in (standard), got batched"),
        ({"quant": "fp8_block128", "exact_activations": True}, "requires activations as fp8_block128 has them"),
    ],
)
def test_refused_problems(change: dict[str, object], reason: str) -> None:
    problem = MoEProblem(**{**SIZES, "quant": "int4_w4a16_g128", **change})
    found = reasons(problem, MACHINE)
    assert len(found) == 1
    assert reason in found[0]


def test_turing_has_no_bfloat16() -> None:
    problem = MoEProblem(**SIZES, quant="int8_w8a16")
    assert reasons(problem, "cuda:sm75") == ["requires dtype in (float16), got bfloat16"]
    assert reasons(dataclasses.replace(problem, dtype="float16"), "cuda:sm75") == []
    assert reasons(problem, "cuda:sm100") == []
    assert "requires platform in (cuda:sm80+), got rocm:gfx942" in reasons(problem, "rocm:gfx942")


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ({"triton": "3.6.0"}, "humming-kernels"),
        ({"humming-kernels": "0.1.18", "triton": "3.6.0"}, "0.1.18"),
        ({"humming-kernels": "0.2.0", "triton": "3.6.0"}, "0.2.0"),
    ],
)
def test_a_missing_or_other_version_is_the_reason(versions: dict[str, str], reason: str) -> None:
    found = reasons(MoEProblem(**SIZES, quant="int8_w8a16"), dataclasses.replace(MACHINE, versions=versions))
    assert len(found) == 1
    assert reason in found[0]


def test_a_missing_compiler_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "_cuda_roots", lambda: [Path("/nowhere")])
    text = toolchain.no_compiler(MACHINE)
    assert text is not None
    assert "found no nvrtc.h" in text


def test_deciding_imports_no_kernel_library() -> None:
    code = (
        "import sys, moereg_humming.backend as backend; from moereg.author import MoEProblem, explain_backends;"
        f"explain_backends(MoEProblem(**{SIZES!r}, quant='int8_w8a16'), 'cuda:sm90');"
        "found = [name for name in ('humming', 'triton', 'moereg_humming.layer') if name in sys.modules];"
        "sys.exit(', '.join(found) or 0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
