"""The command line's contract: exit codes, one-line errors, and one JSON object on standard output."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

import moereg
from moereg.cli import _progress
from moereg.cli._output import console, print_error
from tests.cli.command import SIZES, Call

BAD_LINES = [
    ("ifno", "did you mean 'info'"),
    ("why", "did you mean 'explain'"),
    ("explain --modell dbrx", "unknown option '--modell', did you mean '--model'?"),
    ("models --platform h100", "see moereg models --help"),
    (
        f"explain {SIZES} --quant fp8",
        "did you mean one of 'fp8_block128', 'fp8_channel_token', 'fp8_tensor_dynamic', 'fp8_tensor_static'?",
    ),
    (f"explain {SIZES} --platform mi3", "'mi300', 'mi300a', 'mi300x', 'mi308', 'mi308x', 'mi325', 'mi325x'"),
    (f"explain {SIZES} extra", "no surplus argument but files of backends (FILE.py), got 'extra'; leave it out"),
    ("explain", "--model NAME"),
    ("run --experts 8 --hidden 64", "missing: --intermediate, --top-k"),
    ("explain --model qwen3-30b-a3c", "did you mean 'qwen3-30b-a3b'"),
    (f"explain {SIZES} --require torhc", "did you mean 'torch'"),
    (f"explain {SIZES} --deny torch --deny nonsense", "unknown backend 'nonsense'"),
    (f"explain {SIZES} --require nvfp5=torch", "did you mean 'nvfp4'"),
    (f"explain {SIZES} --platform cuda", "needs an architecture"),
    (f"explain {SIZES} --activation-format batch", "did you mean 'batched'"),
    (f"explain {SIZES} --swiglu-limit 7 --activation relu2", "not gated"),
    (f"explain {SIZES} --experts 0", "num_experts must be at least 1, got 0"),
    (f"explain {SIZES} --tokens -1", "--tokens"),
    (f"explain {SIZES} --top-k 9", "top_k must be at most num_experts"),
    (f"explain {SIZES} --require torch --deny torch", "both required and denied"),
    (f"run {SIZES} --platform cuda:sm100", "moereg explain --platform cuda:sm100"),
    (f"run {SIZES} --layer 3", "--layer needs --checkpoint"),
    ("run --checkpoint . --model qwen3-30b-a3b", "--model cannot be combined"),
    ("run --checkpoint /nonexistent", "/nonexistent"),
    (f"run {SIZES} --seed -1", "--seed"),
    (f"bench {SIZES} --platform cuda:sm100", "bench needs the machine itself"),
    (f"bench {SIZES} --tokens 0", "at least 1 such as 1,16,64, got '0'"),
    (f"bench {SIZES} --tokens 1,many", "got '1,many'"),
    (f"bench {SIZES} --tokens ,", "at least 1"),
    (f"bench {SIZES} --routing zipff", "did you mean 'zipf'"),
    (f"bench {SIZES} --rounds 0", "--rounds"),
    ("verify", "say what to verify"),
    ("verify torhc --no-isolate", "did you mean 'torch'?"),
    ("verify ./nowhere.py", "no file './nowhere.py'"),
    ("verify --module no_such_module --no-isolate", "'no_such_module' must import and register a backend"),
    ("verify --unquarantine", "--unquarantine takes a backend's name"),
    ("new-backend", "NAME"),
    ("new-backend My-Kernel", "for instance my_kernel"),
    ("new-backend torch", "torch is of builtin; choose another"),
    ("new-backend mine --directory /", "--directory must be new or empty, got '/'"),
    ("new-backend mine --directory /dev/null/mine", "--directory must be writable"),
    (f"explain --ep 3 {SIZES} --platform cpu", "got 8 experts on 3 ranks"),
    (f"explain --ep 2 {SIZES} --platform cpu --dispatcher al_to_all", "al_to_all"),
    (f"explain {SIZES} --platform cpu --dispatcher all_to_all", "--ep how many there are"),
    (f"explain --ep 0 {SIZES} --platform cpu", "--ep"),
    ("run --checkpoint CK --layer 0", "layer 0"),
    ("run --checkpoint CK --layer 9", "got 9"),
    ("run --checkpoint CK --dtype int8", "unknown dtype"),
    ("run --checkpoint CK --quant mxfp8", "--quant cannot be combined"),
    ("explain --checkpoint nowhere", "must hold config.json, got 'nowhere' without one"),
    ("explain --checkpoint CK --top-k 2", "--top-k cannot be combined with --checkpoint, which decides it"),
    ("explain --checkpoint CK --reasons", "--reasons is about one layer of a checkpoint; add --layer N"),
    ("explain --checkpoint CK --ep 2", "--ep is about one layer of a checkpoint; add --layer N"),
    (f"explain {SIZES} --require ,", "must name "),
    (f"explain {SIZES} --activation silu(alpha=None)", "is not a name with scalars"),
    ("quantize", "Missing option '--checkpoint'"),
    ("quantize --checkpoint nowhere", "config.json"),
    ("quantize --checkpoint CK --quant int4", "unknown quant scheme 'int4'"),
    ("quantize --checkpoint CK --quant q*", "'q*' matches no scheme"),
    ("quantize --checkpoint CK --quant unquantized", "names what to quantize to"),
    ("quantize --checkpoint CK --tokens x", "--tokens takes numbers"),
    ("quantize --checkpoint CK --inputs nowhere", "--inputs takes a safetensors file"),
    ("quantize --checkpoint CK --platform cuda:sm90", "quantize needs the machine itself"),
]


@pytest.mark.few
@pytest.mark.parametrize(("line", "expected"), BAD_LINES)
@pytest.mark.parametrize("suffix", ["", " --json"])
def test_bad_input_is_one_line_and_exit_2(call: Call, checkpoint: Path, line: str, expected: str, suffix: str) -> None:
    line = line.replace("CK", str(checkpoint))
    code, out, err = call(line + suffix)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert expected.lower() in err.lower()
    assert "Traceback" not in err


def test_an_environment_that_names_an_absent_wheel_is_noted(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEREG_DENY", "torhc")
    code, out, err = call(f"explain {SIZES}")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "note: MOEREG_DENY is ignored where it names unknown things: unknown backend 'torhc', did you mean" in text


def test_long_work_shows_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress, "SILENT_SECONDS", 0.01)
    shown = ""
    with _progress.phase("permuting weights") as advance:
        advance(1, 2)
        while not shown:
            time.sleep(0.01)
            shown = capsys.readouterr().err
    monkeypatch.setattr(_progress, "SILENT_SECONDS", 1000.0)
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
    assert words("moereg run --activation si") == ["silu", "situ"]


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
    for command in ("info", "models", "schemes", "explain", "run", "bench", "tune", "verify", "new-backend"):
        assert f"  {command} " in out
    assert "--num-local-experts" in call("run --help")[1]
    bench = call("bench --help")[1]
    for option in ("--tokens", "--routing", "--rounds", "--require", "--json"):
        assert f"  {option} " in bench
    assert "Later" not in bench


def test_an_error_of_several_lines_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_error("rule\n\nvalue\ncure")
    assert capsys.readouterr().err == "moereg: rule; value; cure\n"
