"""The command line where standard output or standard error is closed, full or left: no noise, and the right code."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moereg import cli
from moereg.cli import _output
from tests.cli.command import ROOT, run_code, run_module
from tests.support.wheels import install

SIZES = "--experts 4 --hidden 16 --intermediate 8 --top-k 2 --platform cpu"
# A line, and the code that it ends with where both streams are well.
LINES = {
    "explain json": (f"explain {SIZES} --json", _output.OK),
    "bad input": (f"explain {SIZES} --hidden 0", _output.BAD_INPUT),
    "help": ("--help", _output.OK),
}
STREAMS = ("well", "closed", "full", "left")
# Every stream that is not well by itself, and both alike.
PAIRS = [pair for pair in itertools.product(STREAMS, STREAMS) if "well" in pair or pair[0] == pair[1]]

# Importing takes seconds, so one process does it and forks for each case, with the streams as a shell hands them over.
FORKS = """
import json, os, sys, tempfile
from moereg.cli import main
from moereg.selection.loader import load_backends

load_backends()
main(["info", "--json"])  # Evidence is read once in a process.
sys.stdout.flush()

def hand_over(descriptor, state, path):
    name = {1: "stdout", 2: "stderr"}[descriptor]
    if state == "closed":
        os.close(descriptor)
        setattr(sys, name, None)
        setattr(sys, f"__{name}__", None)
        return
    if state == "left":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full" if state == "full" else path, os.O_WRONLY | os.O_CREAT)
    os.dup2(writer, descriptor)
    os.close(writer)

folder = tempfile.mkdtemp()
found = {}
for key, (line, out, err) in json.load(sys.stdin).items():
    paths = [os.path.join(folder, f"{len(found)}.{name}") for name in ("out", "err")]
    child = os.fork()
    if child == 0:
        hand_over(1, out, paths[0])
        hand_over(2, err, paths[1])
        code = main(line.split())
        try:
            # What the interpreter does when it ends, without the seconds that torch takes to go.
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
        except Exception:
            code = 120
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found[key] = [code, *(open(path).read() if os.path.exists(path) else None for path in paths)]
print(json.dumps(found))
"""


def test_streams_that_are_not_well() -> None:
    cases = {f"{name}/{out}/{err}": (LINES[name][0], out, err) for name in LINES for out, err in PAIRS}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = run_code(FORKS, input=json.dumps(cases), env=environment)
    assert process.returncode == 0, process.stderr
    ends = json.loads(process.stdout.splitlines()[-1])  # By case: the code and the text that arrived.
    assert len(ends) == 30
    for key, (code, out, err) in ends.items():
        name, out_state, _ = key.split("/")
        line, usual = LINES[name]
        # An error is written to standard error alone, so that standard output loses nothing.
        lost = {"full": _output.OUTPUT_LOST, "left": _output.BROKEN_PIPE}.get(out_state, usual)
        assert code == (usual if usual == _output.BAD_INPUT else lost), key
        if out is not None:
            assert bool(out) is (usual != _output.BAD_INPUT), key
            assert "moereg:" not in out, key
            assert not out or "--json" not in line or json.loads(out)["schema"] == 1, key
        if err is not None:
            assert "Traceback" not in err, key
            assert "please report" not in err, key
            assert err.count("\n") == int(code in (_output.BAD_INPUT, _output.OUTPUT_LOST)), key
            assert code != _output.OUTPUT_LOST or "standard output was lost: No space left on device" in err, key


LEAVING = """
import contextlib, os, sys
from moereg import cli

def run(arguments):
    with contextlib.suppress(OSError):
        print("waiting", file=sys.stderr)
    return FOUND

os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
cli._run = run
code = cli.main(["info"])
sys.stderr.flush()
print(code)
"""


@pytest.mark.parametrize(("found", "code"), [("0", 0), ("BrokenPipeError(32, 'gone')", _output.BROKEN_PIPE)])
def test_what_found_no_room_on_standard_error_is_dropped(found: str, code: int) -> None:
    """As a line about waiting on a busy machine; Python would end with 120 for it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    process = run_code(LEAVING.replace("FOUND", found), env={**environment, "PYTHONPATH": str(ROOT)})
    assert (process.returncode, process.stdout) == (0, f"{code}\n")


@pytest.mark.parametrize("redirection", ["2>&-", pytest.param(">&- 2>&- <&-", marks=pytest.mark.slow)])
def test_as_a_shell_hands_them_over(redirection: str) -> None:
    line = f"{sys.executable} -m moereg nonsense {redirection}"
    process = subprocess.run(line, shell=True, capture_output=True, text=True, check=False, timeout=240, cwd=ROOT)
    assert (process.returncode, process.stdout, process.stderr) == (_output.BAD_INPUT, "", "")


PRINTING = """
import ctypes, os
from moereg.author import PermutedWeights, register_moe_backend
from tests.support.fakes import FakeExperts

moereg_api = "1"

def shout(where):
    print("python", where)
    os.system(f"echo process {where}")
    os.write(1, f"descriptor {where}\\n".encode())
    ctypes.CDLL(None).puts(f"library {where}".encode())

shout("import")

@register_moe_backend(name="loud", priority=9999, quant_schemes=("unquantized",), platforms=("*",), probes=(
    lambda platform: shout("probe"),
))
class LoudExperts(FakeExperts):
    @classmethod
    def unsupported_reasons(cls, problem, platform):
        shout("predicate")
        return []

    def permute_weights(self, weights, problem):
        shout("permute")
        return PermutedWeights("canonical", weights.tensors())

    def compute(self, out, inputs, weights):
        shout("apply")
        out.fill_(7.0)
"""


def test_what_plugins_print_is_not_the_result(tmp_path: Path) -> None:
    install(tmp_path, "moereg-loud", {"loud": "moereg_loud"}, {"moereg_loud.py": PRINTING})
    process = run_module(f"run {SIZES} --tokens 2 --json", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert process.returncode == 1, process.stderr
    found: dict[str, Any] = json.loads(process.stdout)
    assert (found["backend"], found["passed"]) == ("loud", False)
    for who in ("python", "process", "descriptor", "library"):
        for where in ("import", "probe", "predicate", "permute", "apply"):
            assert f"{who} {where}" in process.stderr


def test_what_a_signal_or_lack_of_memory_ends_with(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(error: BaseException) -> int:
        def collect() -> None:
            raise error

        monkeypatch.setattr("moereg.cli._info.collect_info", collect)
        return cli.main(["info", "--json"])

    assert (raising(KeyboardInterrupt()), *capsys.readouterr()) == (_output.INTERRUPTED, "", "")
    for error in (MemoryError("of 3 GB"), torch.OutOfMemoryError("of 3 GB\non a device")):
        assert raising(error) == _output.BAD_INPUT
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("moereg: not enough memory: of 3 GB")
    for bug in (KeyError("ours\x1b[31m\nof two lines"), SystemExit(0), BrokenPipeError(errno.EPIPE, "not of stdout")):
        assert raising(bug) == _output.INTERNAL_ERROR
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), "\x1b" in err) == ("", 1, False)
        assert "internal error, please report it" in err


def test_what_the_encoding_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr("moereg.cli._commands.__version__", "H200 \u00e9 \udcff")
    assert cli.main(["--version"]) == 0
    assert raw.getvalue() == b"moereg H200 \\xe9 \\udcff\n"


IN_PROCESS = """
import os
from moereg.cli import main
saved = os.dup(1)
full = os.open("/dev/full", os.O_WRONLY)
os.dup2(full, 1)
code = main(["--version"])
assert os.fstat(1).st_rdev == os.fstat(full).st_rdev, "standard output is another file"
os.dup2(saved, 1)
print(code)
"""


def test_a_program_that_calls_it_keeps_its_standard_output() -> None:
    """A full stream works too: moereg's lost output is gone, and the program's later output arrives."""
    process = run_code(IN_PROCESS)
    assert (process.returncode, process.stdout) == (0, f"{_output.OUTPUT_LOST}\n"), process.stderr
