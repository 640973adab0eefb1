"""Wheels that bring a kind of machine, as a stranger installs them."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from moereg.errors import RegistrationError, UnknownPlatformError
from moereg.platforms import Platform, kinds
from moereg.platforms.kinds import miss_kinds_of
from moereg.registry import BackendRegistry
from moereg.selection.plugin_status import PluginStatus, failure_text, unusable
from tests.cli.command import ROOT, printed
from tests.support.wheels import Wheels, backend

KIND = """
from moereg.author import Platform, PlatformKind

moereg_api = "1"
PROBED = []

def number(arch):
    if arch == "{kind}9":
        raise RuntimeError("no such generation")
    return int(arch.removeprefix("{kind}"))

def probe():
    PROBED.append("{kind}")
    {probe}

KIND = PlatformKind("{kind}", "{kind}", r"{kind}\\d+", number, example="{kind}2", probe=probe)
"""

# Code that every interpreter may use; the command line in the same process: its exit code, output and errors.
PRELUDE = """
import contextlib, io, json, sys, warnings
import moereg
from moereg.cli import main
from moereg.platforms import Platform, current_platform
from moereg.selection.loader import plugin_statuses

problem = moereg.MoEProblem(num_experts=4, hidden_size=8, intermediate_size=8, top_k=2)
SIZES = "--experts 4 --hidden 16 --intermediate 8 --top-k 2"

def call(line):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line.split())
    return code, out.getvalue(), err.getvalue()

def statuses():
    return {f"{status.group.removeprefix('moereg.')}:{status.name}": status.status for status in plugin_statuses()}

def errors():
    return {status.name: status.to_dict()["error"] for status in plugin_statuses() if status.failure}
"""


def run(site: Wheels, code: str, **environment: str) -> Any:
    """The JSON that a fresh interpreter printed last, with the wheels on its path."""
    paths = os.pathsep.join((str(site.folder), str(ROOT)))
    out = printed("-c", PRELUDE + textwrap.dedent(code), PYTHONPATH=paths, **environment)
    return json.loads(out.splitlines()[-1])


@pytest.fixture
def site(tmp_path: Path) -> Wheels:
    return Wheels(tmp_path, BackendRegistry())


def install_kind(site: Wheels, kind: str, probe: str = "return None", extra: str = "") -> None:
    source = KIND.format(kind=kind, probe=probe) + extra
    site.install(f"moereg-{kind}", {kind: f"{kind}_kind:KIND"}, {f"{kind}_kind.py": source}, group="platforms")


def install_backend(site: Wheels, name: str, rule: str) -> None:
    source = backend(name, rule=rule).replace("priority=1,", f"priority={1 if rule == '*' else 999},")
    site.install(f"moereg-{name}", {name: f"moereg_{name}"}, {f"moereg_{name}.py": source})


def test_another_wheels_backend_names_the_kind_of_a_plugin(site: Wheels) -> None:
    install_kind(site, "lava")
    install_backend(site, "other", "lava:lava2+,!lava4")
    install_kind(site, "stone", extra="raise OSError('no driver')")
    install_backend(site, "lost", "stone:stone1")
    site.install("moereg-odd", {"odd": "odd"}, {"odd.py": "moereg_api = '1'"}, group="platforms")
    found = run(
        site,
        """
        # Naming a machine loads platform plugins, and no backend.
        named = str(Platform.from_name("lava:lava3"))
        loaded = ["lava_kind" in sys.modules, "moereg_other" in sys.modules, "moereg.backends" in sys.modules]
        chosen = [moereg.explain_backends(problem, name).backend for name in ("lava:lava3", "lava:lava4")]
        names = ("lava", "lava:lava9", "lava:x", "lawa:lava3", "stone:stone1", "ston:stone1")
        failing = [call(f"explain {SIZES} --platform {name}") for name in names]
        running = call(f"run {SIZES} --platform cpu --json")[0]
        from lava_kind import PROBED
        before = len(PROBED)
        here = current_platform().kind, current_platform().kind
        print(json.dumps([named, loaded, chosen, failing, running, before, here[0], PROBED, statuses(), errors()]))
        """,
    )
    named, loaded, chosen, failing, running, before, here, probed, statuses, errors = found
    assert (named, loaded, chosen) == ("lava:lava3", [True, False, False], ["other", "torch"])
    assert (running, before, probed) == (0, 0, ["lava"])
    assert here in ("cpu", "cuda", "rocm")
    assert statuses == {
        "backends:lost": "failed",
        "backends:other": "loaded",
        "platforms:lava": "loaded",
        "platforms:odd": "failed",
        "platforms:stone": "failed",
    }
    cause = (
        "platform plugin 'stone' of moereg-stone 1.2 failed to load: OSError: no driver; repair or uninstall that "
        "distribution"
    )
    assert [(code, out) for code, out, _ in failing] == [(2, "")] * 6
    for (_, _, err), words in zip(
        failing,
        (
            "platform 'lava' needs an architecture, for instance 'lava:lava2'",
            "arch_number of platform kind 'lava' must return an integer for 'lava9', and it raised RuntimeError: no "
            "such generation; name another architecture, for instance 'lava:lava2' and report it to the authors of "
            "moereg-lava",
            r"unknown platform arch 'x': lava architectures match 'lava\\d+', for instance 'lava:lava2'",
            "unknown platform 'lawa:lava3', did you mean 'lava:lava2'?",
            f"unknown platform 'stone:stone1' (known: cpu, cuda, cuda:sm90, lava, lava:lava2, npu, rocm, rocm:gfx942, "
            f"tpu, tpu:v5e, xpu); {cause}",
            # Any of those that failed may be the one that was meant.
            f"; {cause}",
        ),
        strict=True,
    ):
        assert words in err
    assert "plugin 'odd'" not in failing[4][2].splitlines()[-1]
    assert "plugin 'odd'" in failing[5][2].splitlines()[-1]
    assert errors["lost"].endswith(cause)
    assert errors["odd"] == (
        "TypeError: odd must name a PlatformKind, or a function that returns a Platform or None, and it is the module; "
        "name one of its values: odd:KIND"
    )


@pytest.mark.slow
def test_a_selection_of_another_process_is_the_first_to_name_the_kind(site: Wheels) -> None:
    install_kind(site, "lava")
    install_backend(site, "other", "lava:lava2+")
    code = "print(json.dumps(moereg.explain_backends(problem, 'lava:lava3').to_json()))"
    text = run(site, code)
    again = run(
        site,
        f"""
        selection = moereg.Selection.from_json({text!r})
        print(json.dumps([str(selection.platform), selection.backend, selection.winner.cell is not None]))
        """,
    )
    assert again == ["lava:lava3", "other", True]


@pytest.mark.slow
def test_a_machine_that_two_claim_and_one_without_its_device(site: Wheels) -> None:
    install_kind(site, "lava", "return Platform('lava', 'lava3')")
    install_kind(site, "ember", "return Platform('ember', 'ember2')")
    install_kind(site, "ash", "raise OSError('broken bus')")
    install_backend(site, "other", "*")
    code = """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            info = call("info --json")
        lines = ("explain", "run", "run --platform cpu", "bench --platform lava:lava3")
        results = [call(f"{line} {SIZES}") for line in lines]
        import ash_kind
        print(json.dumps([json.loads(info[1]), call("info")[0], results, [str(one.message) for one in caught],
                          statuses(), ash_kind.PROBED]))
        """
    info, shown, (explained, ran, on_cpu, bench), warned, statuses, probed = run(site, code)
    error = (
        "one platform plugin may claim this machine, got 2: ember of moereg-ember 1.2, lava of moereg-lava 1.2; choose "
        "one by MOEREG_PLUGINS=platforms:ember or uninstall the others"
    )
    assert (info["platform_error"], shown) == (error, 0)
    assert [result[0] for result in (explained, ran, on_cpu, bench)] == [2, 2, 0, 2]
    assert all(error in result[2] for result in (explained, ran, bench))
    assert statuses["platforms:ash"] == "failed"
    assert probed == ["ash"]
    (ash,) = [text for text in warned if "ash" in text]
    assert ash == (
        "platform 'ash' of moereg-ash 1.2 could not say whether this machine is its own, and moereg goes on without "
        "it: OSError: broken bus; repair or uninstall that distribution, or leave it out of MOEREG_PLUGINS"
    )
    # The cure leaves backends alone; and torch has no such device here.
    info, shown, (explained, ran, on_cpu, bench), _, statuses, _ = run(site, code, MOEREG_PLUGINS="platforms:lava")
    assert (info["platform"], info["platform_error"], shown) == ("lava:lava3", None, 0)
    assert {name for name, status in statuses.items() if status == "loaded"} == {"backends:other", "platforms:lava"}
    assert [result[0] for result in (explained, ran, on_cpu, bench)] == [0, 2, 0, 2]
    for _, _, err in (ran, bench):
        assert "layers of platform lava:lava3 live on torch's device type 'lava', which torch" in err
        assert "import the extension of torch that brings it, or name another platform such as cpu" in err
        assert "; platform plugin 'lava' of moereg-lava 1.2 claims that this machine is lava:lava3: where " in err
    claim = "platform plugin 'lava' of moereg-lava 1.2"
    assert (info["platform_claimed_by"], f", as {claim} claims" in " ".join(explained[1].split())) == (claim, True)


def test_a_plugin_that_is_left_out_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_MISSED", {})
    miss_kinds_of("lava", "platform plugin 'lava' of moereg-lava 1.2 is not in MOEREG_PLUGINS; add it there")
    with pytest.raises(UnknownPlatformError) as raised:
        Platform.from_name("lava:lava3")
    assert str(raised.value).endswith(
        "; platform plugin 'lava' of moereg-lava 1.2 is not in MOEREG_PLUGINS; add it there"
    )


def test_one_cure_where_another_plugin_is_missing() -> None:
    other = "platform plugin 'lava' of moereg-lava 1.2 is not in MOEREG_PLUGINS; add it there"
    error = RegistrationError(f"unknown platform kind 'lava'; {other}")
    status = PluginStatus("moereg.backends", "x", "x_wheel", "moereg-x 1.2", "failed", error)
    for text in (failure_text(status), str(unusable(status))):
        assert text.endswith(other)
        assert "repair" not in text
