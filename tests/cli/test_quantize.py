"""`moereg quantize`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moereg.bench import compare
from moereg.cli import _quantize
from moereg.cli._options import ProblemFlags
from moereg.cli._quantize import compare_schemes, find_schemes
from moereg.cli._show import format_us_range
from moereg.spec.quant_schemes import QUANT_SCHEMES
from tests.cli.command import Call, CallJson
from tests.support.quantized_checkpoints import CHECKPOINTS

TIME_KEYS = ["tokens", "time_us", "original_us", "speedup", "p10_us", "p90_us", "relative_error", "tolerance"]
TIME_KEYS += ["passed", "failure", "damage"]


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here depends on times."""
    monkeypatch.setattr(_quantize, "_ROUNDS", 1)
    monkeypatch.setattr(_quantize, "_SECONDS", 0.0)


def test_the_comparison(call_json: CallJson, checkpoint: Path) -> None:
    schemes = ["int4_w4a16_g32", "int8_w8a16", "fp8_channel_token", "nvfp4"]
    code, found = call_json(f"quantize --checkpoint {checkpoint} --quant {','.join(schemes)} --tokens 3,1")
    assert (code, found["layer"], found["inputs"], found["skipped"]) == (0, 1, "random", [])
    rows = {row["quant"]: row for row in found["rows"]}
    assert list(rows) == schemes
    for row in (found["original"], *found["rows"]):
        assert [list(time) for time in row["times"]] == [TIME_KEYS] * 2
        assert [time["tokens"] for time in row["times"]] == [1, 3]
        assert row["passed"]
        assert all(time["speedup"] == time["original_us"] / time["time_us"] for time in row["times"])
    assert found["original"]["bytes"] == 4 * 3 * 64 * 32 * 2
    assert (found["original"]["bits"], rows["int4_w4a16_g32"]["bits"]) == (16, 5)
    # What int4 and int8 cost of random normal weights, as docs/quantization.md has it.
    assert 0.06 < rows["int4_w4a16_g32"]["weights_error"] < 0.12
    assert rows["int8_w8a16"]["weights_error"] < 0.01
    assert rows["int8_w8a16"]["output_error"] < rows["fp8_channel_token"]["output_error"] < 0.1
    assert found["original"]["output_error"] < 1e-6
    assert rows["nvfp4"]["computes"] == "nvfp4_w4a16"
    assert set(found["unbeaten"]) <= {"int4_w4a16_g32", "int8_w8a16", "nvfp4"}


def test_the_table(call: Call, checkpoint: Path) -> None:
    code, out, _ = call(f"quantize --checkpoint {checkpoint} --quant int4*g32*,fp8_channel_token,nvfp4 --tokens 1")
    assert code == 0
    assert f"{checkpoint.name}, layer 1: E4 H64 I32 k2" in out
    assert re.search(r"^original +49.2 kB +[\d.]+( \wm?s)?( to [\d.]+ \wm?s)? *$", out, re.MULTILINE)
    for name in ("int4_w4a16_g32", "int4_w4a16_g32_zp", "fp8_channel_token", "nvfp4"):
        assert re.search(rf"^{name}\*? +\S+ kB +\S+% +\S+% +~?\S+ \S+ \S+x *$", out, re.MULTILINE), name
    assert "~ an emulation here" in out
    assert "nvfp4 as nvfp4_w4a16" in out
    assert max(map(len, out.splitlines())) < 140


def test_all_schemes_where_none_is_named(checkpoint: Path) -> None:
    assert [scheme.name for scheme in find_schemes([])] == [name for name in QUANT_SCHEMES if name != "unquantized"]
    assert [scheme.name for scheme in find_schemes(["nvfp4", "fp8_t*,nvfp4"])] == [
        "nvfp4",
        *(name for name in QUANT_SCHEMES if name.startswith("fp8_t")),
    ]


def test_real_inputs_set_the_scales_of_activations(call_json: CallJson, checkpoint: Path, tmp_path: Path) -> None:
    hidden_states = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    save_file({"1": 1000 * hidden_states}, tmp_path / "inputs.safetensors")
    line = f"quantize --checkpoint {checkpoint} --quant fp8_tensor_static --tokens 2"
    code, found = call_json(f"{line} --inputs {tmp_path / 'inputs.safetensors'}")
    assert (code, found["inputs"]) == (0, "given")
    # Scales of random inputs would clip these.
    assert found["rows"][0]["output_error"] < 0.1


@pytest.mark.parametrize("name", ["mxfp4", "fp8_block128"])
def test_an_original_that_is_quantized(call_json: CallJson, name: str) -> None:
    path = CHECKPOINTS / name
    code, found = call_json(f"quantize --checkpoint {path} --quant fp8_block128,int4_w4a16_g32 --tokens 2")
    assert (code, found["original"]["quant"]) == (0, "mxfp4_w4a16" if name == "mxfp4" else name)
    first, second = found["rows"]
    if name == "fp8_block128":
        # Blocks that were quantized so before lose nothing but the rounding of their scale.
        assert first["weights_error"] < 0.02
    assert 0.05 < second["weights_error"] < 0.15


def test_a_wrong_backend_is_exit_1(call: Call, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereg.bench.compare.layer_tolerance", lambda *arguments: 0.0)
    code, out, _ = call(f"quantize --checkpoint {checkpoint} --quant int8_w8a16 --tokens 2")
    assert code == 1
    assert "int8_w8a16 on torch at 2 tokens: WRONG" in out


def test_nothing_fits(call: Call, call_json: CallJson, checkpoint: Path) -> None:
    line = f"quantize --checkpoint {checkpoint} --quant int4_w4a16_g32,mxfp8 --require triton --platform cpu"
    code, found = call_json(line)
    assert (code, found["rows"], found["original"]) == (3, [], None)
    assert [one["quant"] for one in found["skipped"]] == ["int4_w4a16_g32", "mxfp8"]
    assert all(one["reasons"] for one in found["skipped"])
    code, out, _ = call(line)
    assert code == 3
    assert "not on this machine: int4_w4a16_g32 (triton: requires platform in " in out
    assert out.splitlines()[-1] == "nothing fits"


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({"one": torch.zeros(2, 64)}, "by the index of their layer"),
        ({"1": torch.zeros(64)}, "hidden states [T,H]"),
        ({"1": torch.zeros(0, 64)}, "hidden states [T,H]"),
        ({"1": torch.full((2, 64), float("nan"))}, "infinity or NaN in '1'"),
        ({"1": torch.zeros(2, 63)}, "hidden_size 64 columns for layer 1"),
    ],
    ids=["name", "rank", "empty", "nan", "columns"],
)
def test_inputs_that_are_no_inputs(
    call: Call, checkpoint: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], expected: str
) -> None:
    save_file(tensors, tmp_path / "inputs.safetensors")
    code, out, err = call(
        f"quantize --checkpoint {checkpoint} --quant int8_w8a16 --inputs {tmp_path / 'inputs.safetensors'}"
    )
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected in err


def test_a_layer_that_is_too_large(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setattr("moereg.cli._quantize.free_memory_bytes", lambda device: 150_000)
    code, _, err = call(f"quantize --checkpoint {checkpoint} --quant int8_w8a16")
    assert code == 2
    assert "comparing schemes of this layer needs up to" in err
    found = re.search(r"--num-local-experts (\d)", err)
    assert found is not None
    assert call(f"quantize --checkpoint {checkpoint} --quant int8_w8a16 --num-local-experts {found[1]}")[0] == 0


def test_the_original_is_timed_beside_each_scheme(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers are compared once."""
    done: list[str] = []
    for name in ("measure", "time_again"):
        monkeypatch.setattr(compare.Comparison, name, _counted(getattr(compare.Comparison, name), done))
    schemes = find_schemes(["int8_w8a16", "int4_w4a16_g32"])
    compare_schemes(ProblemFlags(), checkpoint, 1, schemes, (2,), {}, 0)
    beside = "time_again unquantized"
    assert done == ["measure unquantized", beside, "measure int8_w8a16", beside, "measure int4_w4a16_g32"]


def test_the_original_has_the_times_that_speeds_divide_by(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schemes = find_schemes(["int8_w8a16"])
    found = compare_schemes(ProblemFlags(), checkpoint, 1, schemes, (1,), {}, 0)
    (row,) = found.values["rows"]
    (time,) = row["times"]
    beside = [share * time["time_us"] for share in (0.0131, 2.0)]
    spread = {"p10_us": 0.9 * time["time_us"], "p90_us": 1.15 * time["time_us"]}
    times = [{**time, **spread, "original_us": one, "speedup": one / time["time_us"]} for one in beside]
    found.values["rows"][:] = [{**row, "times": [one]} for one in times]
    found.show()
    out = capsys.readouterr().out
    assert re.search(rf"^original .* {format_us_range(*beside)} *$", out, re.MULTILINE)
    assert re.findall(r"int8_w8a16.* (\S+x) *$", out, re.MULTILINE) == ["0.01x", "2.0x"]
    assert "calls of one scheme differ by up to 25% of their time (p10 to p90)" in out


def _counted(method: Callable[..., Any], done: list[str]) -> Callable[..., Any]:
    def run(self: compare.Comparison, *arguments: object) -> object:
        done.append(f"{method.__name__} {self.problem.quant.name}")
        return method(self, *arguments)

    return run
