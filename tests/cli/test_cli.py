"""The command line's contract: exit codes, one-line errors, and one JSON object on standard output."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import moereg
from moereg.cli import _progress
from moereg.cli._output import console
from tests.cli.command import SIZES, Call, check_run, run_module, strict_json

BAD_LINES = {
    "unknown command": ("ifno", "did you mean 'info'"),
    "beginning of a command": ("exp", "did you mean 'explain'"),
    "another's word for a command": ("why", "did you mean 'explain'"),
    "mistyped option": ("explain --modle dbrx", "unknown option '--modle', did you mean '--model'?"),
    "option of another command": ("models --platform h100", "see moereg models --help"),
    "beginning of schemes": (
        f"explain {SIZES} --quant fp8",
        "did you mean one of 'fp8_block128', 'fp8_channel_token', 'fp8_tensor_dynamic', 'fp8_tensor_static', "
        "'fp8_tensor_w8a16'?",
    ),
    "a checkpoint's word for a scheme": (f"explain {SIZES} --quant mxfp4", "did you mean 'mxfp4_w4a16'?"),
    "part of a model": ("explain --model oss-120b", "did you mean 'gpt-oss-120b'?"),
    "beginning of a product": (f"explain {SIZES} --platform mi3", "'mi300a', 'mi300x', 'mi325x'"),
    "unknown option": (f"explain {SIZES} --expert 3", "--expert"),
    "surplus argument": (
        f"explain {SIZES} extra",
        "no surplus argument, got 'extra'; leave it out; see moereg explain",
    ),
    "no layer": ("explain", "--model NAME"),
    "no layer to run": ("run", "--checkpoint DIR"),
    "missing sizes": ("run --experts 8 --hidden 64", "missing: --intermediate, --top-k"),
    "unknown model": ("explain --model qwen3-30b-a3c", "did you mean 'qwen3-30b-a3b'"),
    "unknown scheme": (f"explain {SIZES} --quant fp8_blok128", "did you mean 'fp8_block128'"),
    "unknown required": (f"explain {SIZES} --require torhc", "did you mean 'torch'"),
    "unknown preferred": (f"run {SIZES} --prefer torch,trition", "did you mean 'triton'"),
    "unknown denied": (f"explain {SIZES} --deny torch --deny nonsense", "unknown backend 'nonsense'"),
    "unknown scheme of a request": (f"explain {SIZES} --require nvfp5=torch", "did you mean 'nvfp4'"),
    "unknown platform": (f"explain {SIZES} --platform cuad:sm90", "did you mean 'cuda:sm90'"),
    "unknown arch": (f"explain {SIZES} --platform cuda:90", "sm"),
    "no arch": (f"explain {SIZES} --platform cuda", "needs an architecture"),
    "unknown dtype": (f"explain {SIZES} --dtype bfloat17", "did you mean 'bfloat16'"),
    "unknown activation": (f"explain {SIZES} --activation siluu", "did you mean 'silu'"),
    "unknown format": (f"explain {SIZES} --activation-format batch", "did you mean 'batched'"),
    "limit": (f"explain {SIZES} --swiglu-limit -1", "swiglu_limit must be a positive"),
    "limit without gate": (f"explain {SIZES} --swiglu-limit 7 --activation relu2", "not gated"),
    "no experts": (f"explain {SIZES} --experts 0", "num_experts must be at least 1, got 0"),
    "no hidden": (f"run {SIZES} --hidden 0", "hidden_size must be at least 1"),
    "no intermediate": (f"run {SIZES} --intermediate -4", "intermediate_size must be at least 1"),
    "no top-k": (f"explain {SIZES} --top-k 0", "top_k must be at least 1"),
    "no local experts": (f"explain {SIZES} --num-local-experts 0", "num_local_experts must be at least 1"),
    "negative tokens": (f"explain {SIZES} --tokens -1", "--tokens"),
    "negative tokens to run": (f"run {SIZES} --tokens -1", "--tokens"),
    "tokens that are no number": (f"run {SIZES} --tokens many", "--tokens"),
    "top-k above experts": (f"explain {SIZES} --top-k 9", "top_k must be at most num_experts"),
    "local above experts": (f"run {SIZES} --num-local-experts 9", "num_local_experts must be at most num_experts"),
    "weight on input": (f"explain {SIZES} --router-weight-on-input", "requires top_k = 1"),
    "model with other top-k": ("explain --model llama-4-scout --top-k 2", "requires top_k = 1"),
    "required and denied": (f"explain {SIZES} --require torch --deny torch", "both required and denied"),
    "run elsewhere": (f"run {SIZES} --platform cuda:sm100", "moereg explain --platform cuda:sm100"),
    "layer of nothing": (f"run {SIZES} --layer 3", "--layer needs --checkpoint"),
    "explain a checkpoint and a model": ("explain --checkpoint . --model dbrx", "--model cannot be combined"),
    "explain a checkpoint that is not there": ("explain --checkpoint /nonexistent", "/nonexistent"),
    "bench a layer of nothing": ("bench --layer 3", "--layer needs --checkpoint"),
    "checkpoint and model": ("run --checkpoint . --model qwen3-30b-a3b", "--model cannot be combined"),
    "checkpoint and sizes": ("run --checkpoint . --top-k 2", "--top-k cannot be combined"),
    "no checkpoint": ("run --checkpoint /nonexistent", "/nonexistent"),
    "negative seed": (f"run {SIZES} --seed -1", "--seed"),
    "bench without a layer": ("bench", "--model NAME"),
    "bench elsewhere": (f"bench {SIZES} --platform cuda:sm100", "bench needs the machine itself"),
    "bench with no tokens": (f"bench {SIZES} --tokens 0", "at least 1 such as 1,16,64, got '0'"),
    "bench with negative tokens": (f"bench {SIZES} --tokens=-1", "at least 1"),
    "bench with tokens that are no numbers": (f"bench {SIZES} --tokens 1,many", "got '1,many'"),
    "bench with an empty list": (f"bench {SIZES} --tokens ,", "at least 1"),
    "unknown routing": (f"bench {SIZES} --routing zipff", "did you mean 'zipf'"),
    "no rounds": (f"bench {SIZES} --rounds 0", "--rounds"),
    "no such folder": (f"bench {SIZES} --plot /nonexistent/bench.png", "make /nonexistent first"),
    "unknown kind of plot": (f"bench {SIZES} --plot bench.docx", "a file such as bench.png"),
    "bench of a denied backend": (f"bench {SIZES} --require torch --deny torch", "both required and denied"),
    "tune": ("tune", "tune comes in a later release"),
    "verify of nothing": ("verify", "say what to verify"),
    "verify of an unknown backend": ("verify torhc --no-isolate", "did you mean 'torch'?"),
    "verify of a file that is not there": ("verify ./nowhere.py", "no file './nowhere.py'"),
    "verify of a module that is not there": (
        "verify --module no_such_module --no-isolate",
        "'no_such_module' must import and register a backend",
    ),
    "verify of an unknown platform": ("verify torch --platform cuda:sm0 --no-isolate", "cuda:sm90"),
    "verify of an unknown check": ("verify torch --no-isolate --check nothing", "unknown check 'nothing'"),
    "verify into a folder that is not there": ("verify torch --ledger /nowhere/l.json", "/nowhere"),
    "new-backend without a name": ("new-backend", "NAME"),
    "new-backend with a name of words": ("new-backend My-Kernel", "for instance my_kernel"),
    "new-backend with another's name": ("new-backend torch", "torch is of builtin; choose another"),
    "new-backend into a folder in use": ("new-backend mine --directory /", "--directory must be new or empty, got '/'"),
    "new-backend into a file": ("new-backend mine --directory /dev/null/mine", "--directory must be writable"),
}


@pytest.mark.few
@pytest.mark.parametrize("name", BAD_LINES)
@pytest.mark.parametrize("suffix", ["", " --json"])
def test_bad_input_is_one_line_and_exit_2(call: Call, name: str, suffix: str) -> None:
    line, expected = BAD_LINES[name]
    code, out, err = call(line + suffix if line else line)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1, err
    assert expected.lower() in err.lower()
    assert "Traceback" not in err


def test_a_bad_environment_is_bad_input(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEREG_REQUIRE", "torhc")
    code, out, err = call(f"explain {SIZES}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "'torhc'" in err


def test_an_environment_that_names_an_absent_wheel_is_noted(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEREG_DENY", "torhc")
    code, out, err = call(f"explain {SIZES}")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "note: MOEREG_DENY is ignored where it names unknown things: unknown backend 'torhc', did you mean" in text


def test_long_work_shows_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress, "_SILENT_SECONDS", 0.01)
    shown = ""
    with _progress.phase("permuting weights") as advance:
        advance(1, 2)
        while not shown:
            time.sleep(0.01)
            shown = capsys.readouterr().err
    monkeypatch.setattr(_progress, "_SILENT_SECONDS", 1000.0)
    with _progress.phase("quick"):
        pass
    assert shown + capsys.readouterr().err == "permuting weights ...\n"


def test_no_colors_without_a_terminal(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    for line in ("info", f"explain {SIZES}", f"run {SIZES}", "explain --help", "nonsense"):
        _, out, err = call(line)
        assert "\x1b" not in out + err
    assert console(sys.stdout).color_system is None


def test_help_is_asked_for_in_any_way(call: Call) -> None:
    shown = call("--help")
    assert shown[0] == 0
    assert call("") == call("-h") == shown
    assert call("explain -h") == call("explain --help")


def test_the_tab_key(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def words(line: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        code, out, err = call("")
        assert (code, err) == (0, "")
        return out.split()

    monkeypatch.setenv("_MOEREG_COMPLETE", "complete_bash")
    assert words("moereg ex") == ["explain"]
    assert words("moereg explain --num") == ["--num-local-experts"]
    assert words("moereg explain --model gpt-oss-1") == ["gpt-oss-120b"]
    assert words("moereg schemes --platform h1") == ["h100"]
    assert words("moereg run --quant int8_") == ["int8_w8a8", "int8_w8a16"]
    assert words("moereg bench --routing z") == ["zipf"]
    assert words("moereg run --require torch,tri") == ["torch,triton"]
    assert words("moereg verify tor") == ["torch"]
    assert words("moereg quantize --quant mxfp8,nvfp4_") == ["mxfp8,nvfp4_w4a16"]
    assert words("moereg run --dtype fl") == ["float16", "float32"]
    assert words("moereg run --activation si") == ["silu"]


def test_the_shells_script(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: "bash")
    code, out, err = call("--show-completion")
    assert (code, err) == (0, "")
    assert "_MOEREG_COMPLETE=complete_bash" in out


def test_version_and_help(call: Call) -> None:
    assert call("--version") == (0, f"moereg {moereg.__version__}\n", "")
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    assert not re.search(r"\w\.\.\.", out)
    for command in ("info", "models", "schemes", "explain", "run", "bench", "verify", "new-backend"):
        assert f"  {command} " in out
    assert "--num-local-experts" in call("run --help")[1]
    bench = call("bench --help")[1]
    for option in ("--tokens", "--routing", "--rounds", "--plot", "--require", "--json"):
        assert f"  {option} " in bench
    assert "Later" not in bench


def test_the_module_is_the_command() -> None:
    done = run_module(f"explain {SIZES} --platform cuda:sm90 --json")
    assert (done.returncode, done.stderr) == (0, "")
    assert strict_json(done.stdout)["selected"] == "triton"
    done = run_module(f"explain {SIZES} --require triton", FORCE_COLOR="1", CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stderr) == (3, "")
    assert "\x1b" not in done.stdout
    done = run_module(f"run {SIZES} --top-k 9")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_run_as_a_command_writes_one_object() -> None:
    done = run_module(f"run {SIZES} --json")
    assert done.returncode == 0
    check_run(strict_json(done.stdout))
    assert "Traceback" not in done.stderr


def test_showing_imports_no_kernel_library_and_initializes_no_device() -> None:
    script = """
        import sys
        import torch

        def refuse(*args, **kwargs):
            raise AssertionError("initialized CUDA")

        torch.cuda._lazy_init = refuse
        for name in ("triton", "flashinfer", "cutlass"):
            sys.modules.setdefault(name, None)
        from moereg.cli import main
        assert main(["info", "--json"]) == 0
        assert main(["explain", "--model", "qwen3-30b-a3b", "--json"]) == 0
        assert main(["explain", "--model", "qwen3-30b-a3b", "--platform", "cuda:sm90"]) == 0
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_a_reader_that_leaves_is_no_wrong_number() -> None:
    process = subprocess.run(
        f"set -o pipefail; {sys.executable} -m moereg info --json | true",
        shell=True,
        executable="/bin/bash",
        check=False,
    )
    assert process.returncode in (0, 141)
