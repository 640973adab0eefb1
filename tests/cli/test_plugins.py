"""The command line beside wheels of other authors: what they print, how they fail, schemes of their own."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moereg import cli
from moereg.cli._output import warnings_on_one_line
from moereg.errors import MoeregWarning, PluginWarning
from moereg.registry import BackendRegistry
from moereg.selection import loader as discovery
from tests.cli.command import SIZES, Call, CallJson, strict_json
from tests.support.wheels import HEAD, Wheels, backend, fresh_wheels

OWN = """
import torch
from moereg.author import ExpertWeights, QuantFormat, QuantScheme, reference_experts

scheme = QuantScheme("int4_own", QuantFormat("uint4", (1, 16)), QuantFormat("float8_e4m3fn", (1, -1)))

@register_moe_backend("own", 10**6, (scheme,), ("cpu",))
class Own(FakeExperts):
    def apply(self, out, inputs, weights, workspace13, workspace2):
        canonical = ExpertWeights(**weights.per_expert, quant=self.problem.quant)
        call = inputs.hidden_states, inputs.topk_weights, inputs.topk_ids
        out.copy_(reference_experts(self.problem, canonical, *call, computes=self.computes))
"""
LOUD = """
import os, subprocess
print("hello of Python")
os.write(1, b"hello of C")
subprocess.run(["echo", "hello of a process"], check=True)
"""


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolated_registry: BackendRegistry) -> Iterator[Wheels]:
    monkeypatch.setattr(discovery, "_LOADER", discovery._Loader(isolated_registry))
    yield from fresh_wheels(tmp_path, monkeypatch, isolated_registry)


@pytest.fixture
def warnings_shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Warnings on standard error, as outside of pytest."""

    def show(message: Warning | str, category: type[Warning], filename: str, line: int, *_: Any, **__: Any) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, line))

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        monkeypatch.setattr(warnings, "showwarning", show)
        yield


@pytest.mark.filterwarnings("ignore::moereg.errors.PluginWarning")
def test_broken_and_loud_wheels_beside_a_good_one(wheels: Wheels, capfd: pytest.CaptureFixture[str]) -> None:
    wheels.install("loud", {"loud": "loud_wheel"}, {"loud_wheel.py": LOUD + backend("loud")})
    for name, head in (("latin", "# -*- coding: latin-1 -*-\n"), ("undeclared", "")):
        wheels.install(name, {name: f"{name}_wheel"}, {f"{name}_wheel.py": ""})
        source = f"{head}NAME = 'K\xe4se'\n" + backend(name)
        (wheels.folder / f"{name}_wheel.py").write_bytes(source.encode("latin-1"))
    wheels.install("syntax", {"syntax": "syntax_wheel"}, {"syntax_wheel.py": "def f(:\n"})
    wheels.install("stops", {"stops": "stops_wheel"}, {"stops_wheel.py": "raise type('Stop', (BaseException,), {})"})
    assert cli.main(["info", "--json"]) == 0
    out, err = capfd.readouterr()
    found = {plugin["name"]: plugin["error"] for plugin in strict_json(out)["plugins"]}
    assert (found.pop("loud"), found.pop("latin")) == (None, None)
    assert found.pop("undeclared").startswith("SyntaxError: (unicode error) 'utf-8' codec can't decode byte 0xe4")
    assert found.pop("syntax").startswith("SyntaxError: invalid syntax (syntax_wheel.py, line 1)")
    assert found == {"stops": "Stop: no message"}
    assert {"hello of Python", "hello of Chello of a process"} <= set(err.splitlines())
    for command in ("info", f"explain {SIZES} --require latin"):
        assert cli.main(command.split()) == 0
    assert cli.main(f"run {SIZES} --require undeclared".split()) == 2
    assert (
        "backend 'undeclared' of undeclared 1.2 failed to load: SyntaxError: (unicode error)" in capfd.readouterr().err
    )


def test_a_stream_that_a_wheel_closes(wheels: Wheels, warnings_shown: None, capfd: pytest.CaptureFixture[str]) -> None:
    spoils = "import sys\nsys.stdout.close()\nsys.stdout = None\n"
    wheels.install("spoils", {"spoils": "spoils_wheel"}, {"spoils_wheel.py": spoils + backend("spoils")})
    huge = backend("wrong").replace('"1"', "'9' * 10**6")
    wheels.install("wrong", {"wrong": "wrong_wheel"}, {"wrong_wheel.py": huge})
    assert cli.main(["info"]) == 0
    (failed,) = capfd.readouterr().err.splitlines()
    start = "moereg: warning: backend 'wrong' of wrong 1.2 did not load: RegistrationError: wrong_wheel must say "
    assert (failed.startswith(start), len(failed) < 600) == (True, True)
    assert cli.main(["info", "--json"]) == 0
    assert {plugin["name"]: plugin["status"] for plugin in strict_json(capfd.readouterr().out)["plugins"]} == {
        "spoils": "loaded", "wrong": "failed",
    }  # fmt: skip


def test_a_scheme_of_a_wheel(wheels: Wheels, call: Call, call_json: CallJson) -> None:
    wheels.install("own", {"own": "own_wheel"}, {"own_wheel.py": LOUD + HEAD + OWN})
    code, found = call_json(f"explain {SIZES} --quant int4_own")
    assert (code, found["selected"], found["problem"]["quant"]["name"]) == (0, "own", "int4_own")
    code, found = call_json(f"run {SIZES} --quant int4_own --tokens 4")
    assert (code, found["passed"], found["backend"]) == (0, True, "own")
    code, out, err = call(f"run {SIZES} --quant int4_onw")
    assert (code, out) == (2, "")
    assert "moereg: unknown quant scheme 'int4_onw', did you mean 'int4_own'? (known: fp8_block128, " in err


def test_a_warning_is_one_line_of_the_command_line() -> None:
    before = warnings.formatwarning
    with warnings_on_one_line():
        text = warnings.formatwarning(PluginWarning("a\nb \x1b"), PluginWarning, "moereg/selection/loader.py", 3)
        other = warnings.formatwarning("theirs", UserWarning, "theirs.py", 3, "")
    assert text == "moereg: warning: a b \\x1b\n"
    assert other == before("theirs", UserWarning, "theirs.py", 3, "")
    assert warnings.formatwarning is before
    assert issubclass(PluginWarning, MoeregWarning)


def test_a_wheel_that_ends_the_process_was_named_before(wheels: Wheels, capfd: pytest.CaptureFixture[str]) -> None:
    # What ends an interpreter is stopped here by an exception that nothing contains.
    ends = "import os\nos.write(2, b'the end\\n')\n"
    wheels.install("ends", {"ends": "ends_wheel"}, {"ends_wheel.py": ends + backend("ends")})
    assert cli.main(["info", "-v", "--json"]) == 0
    lines = capfd.readouterr().err.splitlines()
    assert lines.index("DEBUG moereg: importing ends_wheel of ends 1.2") == lines.index("the end") - 1


def test_a_ledger_that_is_read_while_results_are_shown(
    wheels: Wheels, warnings_shown: None, capfd: pytest.CaptureFixture[str]
) -> None:
    files = {"own_wheel/__init__.py": backend("own", rule="cpu"), "own_wheel/moereg_ledger.json": "{}"}
    wheels.install("own", {"own": "own_wheel"}, files)
    assert cli.main(f"explain {SIZES} --require own --platform cpu".split()) == 0
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "ledger" in line]
    assert line.startswith("moereg: warning: the ledger of own, ")
    assert line.endswith("; reinstall own, or remove the ledger")
