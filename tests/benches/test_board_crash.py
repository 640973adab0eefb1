"""The board as its users run it, beside a wheel that takes the process down."""

from __future__ import annotations

import json
import pathlib

import pytest

from tests.plugins.installing import Site, write_wheel

CRASHER = """
import os
import signal

from moereg.author import Experts, Facts, PermutedWeights, register_moe_backend

moereg_api = "1"


@register_moe_backend(name="crasher", priority=1000, quant_schemes=("unquantized",), platforms=("cpu",))
class CrasherExperts(Experts):
    facts = Facts(
        activations=frozenset({"silu"}),
        activation_formats=frozenset({"standard"}),
        dtypes=frozenset({"bfloat16"}),
        placements=frozenset({"contiguous"}),
    )
    layouts = ("canonical",)

    def permute_weights(self, weights, problem):
        return PermutedWeights("canonical", weights.tensors())

    def workspace_shapes(self, problem, num_tokens):
        return (0,), (0,)

    def apply(self, out, inputs, weights, workspace13, workspace2):
        os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.slow
def test_a_backend_that_crashes_is_a_reason_in_the_row(tmp_path: pathlib.Path) -> None:
    site = Site(tmp_path / "site")
    points = {"moereg.backends": {"crasher": "crasher"}}
    site.install(write_wheel(tmp_path, "moereg-crasher", {"crasher.py": CRASHER}, points))
    file = tmp_path / "board.json"
    arguments = ["--json", str(file), "--layers", "small:unquantized", "--tokens", "1", "--rounds", "1"]
    process = site.python("-m", "benches.board", *arguments, "--deny", "triton")
    assert process.returncode == 1, process.stderr
    document = json.loads(file.read_text())
    (out,) = document["out"]
    reason = "it ended the process with SIGSEGV in apply"
    assert out == {"layer": "small:unquantized", "backend": "crasher", "experts": "CrasherExperts", "reason": reason}
    (row,) = document["rows"]
    found = {one["backend"]: one for one in row["results"]}
    assert found["crasher"]["failure"] == reason
    assert found["torch"]["time_us"] > 0
    assert row["default"]["backend"] == "crasher"
    assert "1 rows, 1 results failed, 0 rows left out" in process.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"site", "board.json", "moereg_crasher-1.0-py3-none-any.whl"}
