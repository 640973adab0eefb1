"""`moereg explain`: choices for other machines, its requests, its evidence."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from moereg.dispatch import explain_backends
from moereg.evidence import ledger
from moereg.evidence.ledger import Verification
from moereg.evidence.on_machine import ADMITTED, AdmissionRecord
from moereg.platforms import current_platform
from moereg.registry import register_moe_backend
from moereg.selection.loader import list_cells
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem
from tests.cli.command import SIZES, Call, CallJson
from tests.evidence.packs import rows_of, write_here
from tests.support.fakes import FakeExperts


@pytest.mark.parametrize("platform", ["cuda:sm90", "cuda:sm100", "rocm:gfx942", "cpu"])
def test_what_another_machine_would_choose(call_json: CallJson, platform: str) -> None:
    code, found = call_json(f"explain --model qwen3-30b-a3b --platform {platform}")
    assert code == 0
    assert (found["platform"], found["platform_source"]) == (platform, "named")
    expected = {"cpu": "torch", "cuda:sm100": "flashinfer_trtllm"}.get(platform, "triton")
    assert found["selected"] == found["decisions"][0]["backend"] == expected
    keywords = get_shape("qwen3-30b-a3b").problem_keywords()
    assert found["problem"] == MoEProblem(**keywords).to_dict()
    assert all(isinstance(value, (str, int, type(None))) for value in found["problem"].values())


def test_explain_json_has_what_fits_first_with_its_evidence(call_json: CallJson) -> None:
    code, found = call_json(f"explain {SIZES}")
    assert code == 0
    assert (found["schema"], found["source"], found["platform_source"]) == (1, "priority", "probed")
    assert all((decision["verified_on_platform"] is None) != decision["accepted"] for decision in found["decisions"])
    accepted = [decision["accepted"] for decision in found["decisions"]]
    assert accepted == sorted(accepted, reverse=True)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("--require triton --platform cpu", "platform"),
        ("--deny torch,triton --platform cuda:sm80", "denied"),
        ("--require triton --platform cuda:sm75", "platform"),
        ("--quant mxfp8 --platform cuda:sm80", "platform"),
    ],
)
def test_nothing_fits_is_exit_3_with_every_reason(call: Call, call_json: CallJson, line: str, code: str) -> None:
    exit_code, found = call_json(f"explain {SIZES} {line}")
    assert exit_code == 3
    assert (found["selected"], found["source"]) == (None, None)
    assert all(decision["reasons"] for decision in found["decisions"])
    assert code in {reason["code"] for decision in found["decisions"] for reason in decision["reasons"]}
    exit_code, out, err = call(f"explain {SIZES} {line}")
    assert (exit_code, err) == (3, "")
    for text in ("nothing fits", f"[{code}]", "torch"):
        assert text in out


def test_requests_reach_the_dispatcher(call_json: CallJson) -> None:
    line = f"explain {SIZES} --platform cuda:sm90"
    assert call_json(f"{line} --require torch")[1]["source"] == "required"
    assert call_json(f"{line} --prefer unquantized=torch,nvfp4=triton")[1]["selected"] == "torch"
    assert call_json(f"{line} --prefer torch")[1]["source"] == "preferred"
    found = call_json(f"{line} --deny triton --require unquantized=torch")[1]
    assert found["request"] == {"require": ["torch"], "prefer": [], "deny": ["triton"]}


def test_options_override_the_model(call_json: CallJson) -> None:
    line = (
        "explain --model gpt-oss-20b --hidden 128 --dtype fp16 --no-bias --swiglu-limit 3.5 --num-local-experts 4 "
        "--activation-format batched --graph-capture --deterministic --batch-invariant --exact-activations "
        "--tokens 17 --platform cpu"
    )
    problem = call_json(line)[1]["problem"]
    expected = MoEProblem(
        num_experts=32,
        hidden_size=128,
        intermediate_size=2880,
        top_k=4,
        dtype="float16",
        activation="swigluoai(limit=3.5)",
        num_local_experts=4,
        activation_format="batched",
        graph_capture=True,
        deterministic=True,
        batch_invariant=True,
        exact_activations=True,
        max_num_tokens=17,
    )
    assert problem == expected.to_dict()
    assert call_json("explain --model gpt-oss-20b --platform cpu")[1]["problem"]["has_bias"] is True
    scout = call_json("explain --model llama-4-scout --platform cpu --tokens 0")[1]["problem"]
    assert scout["apply_router_weight_on_input"] is True
    assert scout.get("max_num_tokens") is None


def test_explain_for_people(call: Call) -> None:
    code, out, err = call("explain --model qwen3-30b-a3b --platform cuda:sm90")
    assert (code, err) == (0, "")
    for text in ("qwen3-30b-a3b", "E128 H2048 I768 k8", "cuda:sm90 (named", "TritonExperts", "cuda:sm80+"):
        assert text in out
    assert "assumed of cuda:sm90: triton>=3.6" in out
    assert "\ntriton (TritonExperts): chosen by priority" in out
    assert out.index("TritonExperts") < out.index("TorchDenseExperts")
    shared = "flashinfer_trtllm, flashinfer_cutedsl, flashinfer_b12x: requires another platform than cuda:sm90"
    assert f"rejected: {shared} [platform]\n" in out
    static = call("explain --model qwen3-30b-a3b --quant fp8_tensor_static --platform cuda:sm90")[1]
    assert "rejected: flashinfer_cutlass: is opt-in: name it in require or prefer [opt_in]\n" in static


def test_a_backend_whose_cells_read_other_schemes_is_named_once(call: Call) -> None:
    out = call("explain --model deepseek-v3 --quant fp8_block128 --platform b200")[1]
    expected = (
        "rejected: flashinfer_cutedsl, cutlass: requires weights in another scheme than fp8_block128 [quant_scheme]"
    )
    assert [line for line in out.splitlines() if "cutlass:" in line and "rejected" in line] == [expected]


@pytest.mark.parametrize("option", ["--reasons", "-v"])
def test_all_reasons_where_they_are_asked_for(call: Call, option: str) -> None:
    line = "explain --model gpt-oss-120b --platform cpu"
    short, full = call(line)[1], call(f"{line} {option}")[1]
    assert short.count("[activation]") == 0 < full.count("[activation]")
    assert "requires platform in (cuda:sm100f), got cpu [platform]" in full


def test_what_was_required_answers_alone(call: Call) -> None:
    out = call(f"explain {SIZES} --platform cpu --require flashinfer_trtllm,triton")[1].splitlines()
    assert [line for line in out if "does not fit" in line] == [
        "triton does not fit:",
        "flashinfer_trtllm does not fit:",
    ]
    assert out[3] == "  - requires platform in (cuda:sm80+, rocm:gfx942), got cpu [platform]"
    assert "rejected" not in "".join(out)
    assert out[-1] == "nothing fits; without the request, torch would do"


def test_what_is_missing_on_this_platform_comes_before_what_another_one_has(call: Call) -> None:
    out = call(f"explain {SIZES} --platform cpu --quant fp8_block128 --graph-capture")[1].splitlines()
    capture = "  - cannot be captured in a CUDA graph, got graph_capture=True [graph_capture]"
    assert out[2:4] == ["torch does not fit:", capture]
    assert out[4].startswith("rejected: triton, ")
    assert out[-1] == "nothing fits"


def test_a_platform_by_its_product(call: Call, call_json: CallJson) -> None:
    found = call_json("explain --model dbrx --platform H100")[1]
    assert (found["platform"], found["platform_source"]) == ("cuda:sm90", "named")
    assert found["notices"] == ["--platform H100 is cuda:sm90"]
    assert call_json("explain --model dbrx --platform cuda:sm90")[1]["notices"] == []
    out = call("explain --model dbrx --platform b200")[1]
    assert "on cuda:sm100 (named, not this machine)" in out
    assert "note: --platform b200 is cuda:sm100" in out


def test_sixteen_bits_of_a_model_that_is_released_quantized(call_json: CallJson) -> None:
    (notice,) = call_json("explain --model gpt-oss-120b --platform cuda:sm90")[1]["notices"]
    assert notice.startswith("gpt-oss-120b is released in mxfp4_w4a16, and --model alone means 16-bit weights")
    for line in (
        "--model gpt-oss-120b --quant mxfp4_w4a16",
        "--model gpt-oss-120b --quant unquantized",
        "--model dbrx",
    ):
        assert call_json(f"explain {line} --platform cuda:sm90")[1]["notices"] == []


def vouch(monkeypatch: pytest.MonkeyPatch, **cell: Any) -> None:
    """Makes one record of a class of triton on an H200 all that any cell has."""
    record = {"backend": "triton", "platform": "cuda:sm90", "device": "NVIDIA H200", "commit": "", "date": "2026-11-22"}
    record |= {"versions": {"torch": "2.11.0", "triton": "3.6.0"}, "cases": 3, "digest": "of the code"}
    made = Verification(**record, **cell)  # type: ignore[arg-type]
    monkeypatch.setattr(ledger, "_own_records", lambda of: (made,))
    monkeypatch.setattr(ledger, "class_digest", lambda experts: "of the code")


def test_a_platform_without_a_record_is_said_once(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    vouch(monkeypatch, experts="TritonExperts", schemes=("unquantized",), rule="cuda:sm80+", tier="kernel")
    out = " ".join(call("explain --model qwen3-30b-a3b --platform rocm:gfx942")[1].split())
    verified = "verified on H200 with torch 2.11, triton 3.6 (sm90, 2026-11-22)"
    ending = "checked at first use there triton (TritonExperts): chosen by priority"
    assert out.endswith(f"not verified on gfx942; {verified}; {ending}")


def test_explain_says_whether_its_choice_was_verified(
    call: Call, call_json: CallJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "explain --model qwen3-30b-a3b --quant mxfp8"
    code, out, _ = call(f"{line} --platform cuda:sm100")
    assert (code, out.splitlines()[-2]) == (0, "not verified on sm100; checked at first use there")
    assert call_json(f"{line} --platform cuda:sm100")[1]["verification"] == {
        "verified": [],
        "not_verified": ["cuda:sm100"],
        "verified_on_platform": False,
        "checked_at_first_use": True,
    }
    vouch(monkeypatch, experts="TritonQuantizedExperts", schemes=("mxfp8",), rule="cuda:sm90", tier="emulation")
    line += " --platform cuda:sm90 --require triton"
    verdict = "triton (TritonQuantizedExperts): required by the request"
    machine = "H200 with torch 2.11, triton 3.6"
    elsewhere = "checked at first use on other devices and versions"
    assert call(line)[1].splitlines()[-2:] == [f"verified on {machine} (sm90, 2026-11-22); {elsewhere}", verdict]
    found = call_json(line)[1]["verification"]
    assert (found["verified_on_platform"], found["checked_at_first_use"]) == (True, False)
    assert found["verified"][0]["stale"] is False
    monkeypatch.setattr(ledger, "class_digest", lambda experts: "of other code")
    changed = f"not verified on sm90; verified before its code changed on {machine} (sm90, 2026-11-22)"
    out = call(line)[1]
    assert out.splitlines()[-2] == f"{changed}; checked at first use there"
    assert " code changed" in out
    assert call_json(line)[1]["verification"]["verified_on_platform"] is False
    assert call_json(f"explain {SIZES} --require triton --platform cpu")[1]["verification"] is None


def test_explain_says_with_what_its_choice_was_verified(
    call: Call, call_json: CallJson, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOEREG_ADMISSION", str(tmp_path / "admitted.json"))
    here = current_platform()
    line = f"explain {SIZES} --require torch"
    winner = explain_backends(MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2)).winner
    assert winner is not None
    assert winner.cell is not None
    made = dataclasses.replace(Verification.of(winner.cell, here, 3), date="2026-11-22", device="A CPU")
    torch_here = ".".join(here.versions["torch"].split(".")[:2])
    for versions, said, is_checked in (
        (dict(made.versions), f"verified on A CPU with torch {torch_here} (cpu, 2026-11-22)", False),
        ({"torch": "2.9.1"}, "verified on A CPU with torch 2.9 (cpu, 2026-11-22); checked at first use here", True),
    ):
        record = dataclasses.replace(made, versions=versions)
        monkeypatch.setattr(ledger, "_own_records", lambda cell, found=record: (found,))
        out = call(line)[1].splitlines()
        assert out[-2] == said
        (row,) = (row for row in out if " chosen " in f" {row} ")
        assert f" {'on A CPU' if is_checked else 'yes (A CPU)'} " in f"{row} "
        verification = call_json(line)[1]["verification"]
        assert (verification["verified_on_platform"], verification["checked_at_first_use"]) == (
            not is_checked,
            is_checked,
        )


def test_what_packs_say_of_a_layer(
    isolated_registry: object, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("fake_first", "fake_second")
    for place, name in enumerate(names):
        kind = type(name.title(), (FakeExperts,), {"shared_layouts": ("canonical",)})
        register_moe_backend(name, 500 - place, ("unquantized",), ("cpu",))(kind)
    selection = explain_backends(MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2))
    logs = {1: {1: 0.1, 256: -0.117, 1024: -0.117, 4096: 0.2}}
    write_here(tmp_path / "tuning.json", selection, names, rows_of(logs, grid=(1, 256, 1024, 4096)))
    monkeypatch.setenv("MOEREG_TUNING", str(tmp_path / "tuning.json"))
    code, out, _ = call(f"explain {SIZES}")
    assert code == 0
    assert "note: measured 2026-11-28: fake_second 11 % less than fake_first at 256-1024, two sessions\n" in out
    plan = "fake_first to 255 tokens, fake_second to 1024, fake_first above"
    assert f": chosen by measurement; {plan}\n" in out
    code, out, _ = call(f"explain {SIZES} --deterministic")
    assert code == 0
    assert "note: untuned: the nearest measured layer has deterministic False, here True\n" in out


def test_explain_and_info_say_what_is_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call, call_json: CallJson
) -> None:
    monkeypatch.setattr(ledger, "_own_records", lambda cell: ())
    line = f"explain {SIZES} --require torch"
    assert call(line)[1].splitlines()[-2] == "not verified on cpu", "turned off, nothing is checked"
    assert call_json(line)[1]["verification"]["checked_at_first_use"] is False
    monkeypatch.setenv("MOEREG_ADMISSION", str(tmp_path / "admitted.json"))
    assert call(line)[1].splitlines()[-2] == "not verified on cpu; checked at first use here"
    found = call_json(line)[1]
    assert (found["decisions"][0]["evidence"], found["verification"]["checked_at_first_use"]) == ("", True)
    here = current_platform()
    cell = next(cell for cell in list_cells("torch") if cell.class_name == found["decisions"][0]["experts"])
    record = AdmissionRecord.of(cell, cell.schemes[0], here, error=0.004, bound=0.008)
    record = dataclasses.replace(record, date="2026-11-28")
    ADMITTED.change([record])
    said = call(line)[1].splitlines()
    assert said[-2] == "not verified on cpu; admitted 2026-11-28: off by 0.004, bound 0.008"
    (row,) = (row for row in said if f"({cell.class_name}) " in row and " chosen " in f" {row} ")
    assert row.split()[-2:] == ["admitted", "2026-11-28"]
    found = call_json(line)[1]
    assert (found["decisions"][0]["evidence"], found["verification"]["checked_at_first_use"]) == ("admitted", False)
    # Another machine of this name may be one that never checked it.
    assert call(f"{line} --platform cpu")[1].splitlines()[-2] == "not verified on cpu; checked at first use there"
    for options in ("info", "info --cells"):
        out = " ".join(call(options)[1].split())
        assert f"admitted here, in {tmp_path / 'admitted.json'}: - torch ({cell.class_name}), " in out
        assert f"{record.scheme}: 2026-11-28" in out
    shown = [entry for backend in call_json("info")[1]["backends"] for entry in backend["cells"] if entry["admitted"]]
    assert [entry["experts"] for entry in shown] == [cell.class_name]
    passed = {"scheme": record.scheme, "trains": False, "date": "2026-11-28", "error": 0.004, "bound": 0.008}
    assert shown[0]["admitted"] == [passed]


def test_explain_shows_ways_and_then_backends(call: Call, call_json: CallJson) -> None:
    line = "explain --ep 8 --model deepseek-v3 --quant fp8_block128 --tokens 64 --platform cuda:sm90"
    code, found = call_json(line)
    assert code == 0
    assert found["ranks"] == 8
    assert found["dispatcher"]["selected"] in {
        one["dispatcher"] for one in found["dispatcher"]["decisions"] if one["accepted"]
    }
    assert found["problem"]["num_local_experts"] == 32
    code, out, _ = call(f"{line} --dispatcher all_to_all")
    assert code == 0
    assert "8 ranks over nccl on cuda" in out
    assert "chosen    all_to_all" in out
    assert "requires a dispatcher in (all_to_all)" in out
    # A dispatcher has one line, whatever number of rectangles it was registered with, and says what its rank is worth.
    _, out, _ = call("explain --ep 2 --model qwen3-30b-a3b --tokens 64 --platform cuda:sm90")
    (line,) = (line for line in out.splitlines() if " all_gather (" in line)
    assert line.startswith("chosen    all_gather (standard or batched, *, predicted priority 60)")
    code, out, _ = call("explain --ep 8 --model deepseek-v3 --platform cuda:sm90 --dispatcher all_gather")
    assert code == 3
    assert "requires max_num_tokens" in out
