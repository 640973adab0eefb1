"""Plugins as a stranger installs them: dist-info on the path, a fresh interpreter, real entry points."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import moereg
from moereg.errors import ArgumentError
from moereg.plugins import is_allowed

ROOT = Path(__file__).parents[2]

BACKEND = """
from moereg.author import Experts, Facts, PermutedWeights, register_moe_backend

{api}

@register_moe_backend(name={name!r}, priority=1, quant_schemes=("unquantized",), platforms=("*",))
class StrangersExperts(Experts):
    facts = Facts(
        activations=frozenset({{"silu"}}),
        activation_formats=frozenset({{"standard"}}),
        dtypes=frozenset({{"bfloat16"}}),
        placements=frozenset({{"contiguous"}}),
    )
    layouts = ("canonical",)

    def permute_weights(self, weights, problem):
        return PermutedWeights("canonical", weights.tensors())

    def workspace_shapes(self, problem, num_tokens):
        return (0,), (0,)

    def apply(self, out, inputs, weights, workspace13, workspace2):
        out.fill_(7.0)
"""
API = 'moereg_api = "1"'
NAMES = ("one", "two")
PLATFORM = """
import moereg
moereg_api = "1"
def provide():
    {body}
"""
# Code that every subprocess may use.
PRELUDE = """
import json, sys, warnings
import moereg
from moereg.discovery import current_platform, load_backends, plugin_statuses
from moereg.errors import MoeregError

problem = moereg.MoEProblem(num_experts=4, hidden_size=8, intermediate_size=8, top_k=2)

def statuses():
    return {f"{status.group.removeprefix('moereg.')}:{status.name}": status.status for status in plugin_statuses()}

def errors():
    return {status.name: status.to_dict()["error"] for status in plugin_statuses() if status.failure}

def ask(name):
    try:
        return moereg.select_backend(problem, require=name).backend
    except MoeregError as error:
        return f"{type(error).__name__}: {error}", type(error.__cause__).__name__
"""


class Site:
    """A folder of distributions, and interpreters that have it on their path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self, distribution: str, modules: dict[str, str], entry_points: dict[str, dict[str, str]], version: str = "1.2"
    ) -> None:
        for module, source in modules.items():
            (self.folder / f"{module}.py").write_text(textwrap.dedent(source))
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [
            line
            for group, points in entry_points.items()
            for line in (f"[moereg.{group}]", *(f"{name} = {value}" for name, value in points.items()))
        ]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")

    def install_backend(self, name: str, source: str | None = None, distribution: str | None = None) -> None:
        module = f"moereg_{name}"
        text = BACKEND.format(name=name, api=API) if source is None else source
        self.install(distribution or f"moereg-{name}", {module: text}, {"backends": {name: module}})

    def run(self, code: str, **environment: str) -> Any:
        """The JSON that the last expression printed."""
        paths = os.pathsep.join((str(self.folder), str(ROOT)))
        process = subprocess.run(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": paths, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert process.returncode == 0, process.stderr
        return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_good_and_bad_plugins_side_by_side(site: Site) -> None:
    site.install_backend("good")
    site.install_backend("raises", "raise RuntimeError('no such\\ndevice\\n\\nadvice of another paragraph')")
    site.install_backend("exits", "import sys\nsys.exit(3)")
    site.install_backend("stops", "class Stop(BaseException): pass\nraise Stop")
    site.install_backend("mute", "class Mute(Exception):\n    def __str__(self): raise self\nraise Mute")
    site.install_backend("no_api", BACKEND.format(name="no_api", api=""))
    site.install_backend("old_api", BACKEND.format(name="old_api", api='moereg_api = "0"'))
    site.install_backend("torch", BACKEND.format(name="torch", api=API), distribution="moereg-torch-again")
    site.install_backend("renamed", BACKEND.format(name="something_else", api=API))
    site.install_backend("invalid", BACKEND.format(name="invalid", api=API).replace('("*",)', '("gpux",)'))
    site.install_backend("silent", API)
    site.install_backend("half", BACKEND.format(name="half", api=API) + "\nraise KeyError('late')\n")
    site.install("moereg-missing", {}, {"backends": {"missing": "moereg_missing_module"}})
    found = site.run(
        """
        names = load_backends().names
        print(json.dumps({
            "names": names, "statuses": statuses(), "errors": errors(),
            "winner": moereg.select_backend(problem).backend,
            "origin": {cell.name: f"{cell.origin} {cell.origin_version}" for cell in load_backends().cells},
            "distribution": {status.name: status.distribution for status in plugin_statuses()},
            "asked": {name: ask(name) for name in ("good", "torch", "raises", "exits", "half", "something_else")},
        }))
        """
    )
    assert set(found["names"]) >= {"good", "torch"}
    assert not set(found["names"]) & {
        "raises", "exits", "stops", "mute", "no_api", "old_api", "renamed", "something_else", "invalid", "silent",
        "half", "missing",
    }  # fmt: skip
    assert found["origin"]["good"] == "moereg-good 1.2"
    assert found["origin"]["torch"] == f"builtin {moereg.__version__}"
    assert found["winner"] == "torch"
    good = found["statuses"].pop("backends:good")
    assert good == "loaded"
    assert set(found["statuses"].values()) == {"failed"}
    assert found["distribution"]["torch"] == "moereg-torch-again 1.2"
    errors = found["errors"]
    assert errors["raises"] == "RuntimeError: no such device"
    assert errors["exits"] == "SystemExit: 3"
    assert errors["stops"] == "Stop: no message"
    assert errors["mute"] == "Mute: a message that cannot be shown"
    api = "must say moereg_api = '1', the version of moereg.author it was written for, got"
    assert errors["no_api"] == f"RegistrationError: moereg_no_api {api} None"
    assert errors["old_api"] == f"RegistrationError: moereg_old_api {api} '0'"
    assert errors["torch"].startswith("RegistrationError: backend name 'torch' belongs to builtin (")
    assert errors["torch"].endswith("StrangersExperts of moereg-torch-again needs another name")
    rule = "must register a backend of that name and no other, got"
    assert errors["renamed"] == f"RegistrationError: entry point 'renamed' {rule} something_else"
    assert errors["silent"] == f"RegistrationError: entry point 'silent' {rule} none"
    assert "unknown platform kind 'gpux'" in errors["invalid"]
    assert errors["missing"].startswith("ModuleNotFoundError: ")
    asked = found["asked"]
    assert asked["good"] == "good"
    assert asked["torch"] == "torch"
    assert asked["raises"] == [
        "PluginError: backend 'raises' of moereg-raises 1.2 failed to load: RuntimeError: no such device; "
        "repair or uninstall that distribution",
        "RuntimeError",
    ]
    assert asked["exits"][1] == "SystemExit"
    assert asked["half"][1] == "KeyError"
    assert asked["something_else"][0].startswith("UnknownBackendError: unknown backend 'something_else'")


ALLOWED: dict[str | None, set[str]] = {
    None: {"backends:one", "backends:two", "platforms:one", "platforms:two"},
    "": set(),
    "one": {"backends:one", "platforms:one"},
    "platforms:one": {"backends:one", "backends:two", "platforms:one"},
    " moereg.platforms : two , backends:one": {"backends:one", "platforms:two"},
    "platforms:": {"backends:one", "backends:two"},
    "platforms:one,two": {"backends:two", "platforms:one", "platforms:two"},
}


@pytest.mark.parametrize("text", ALLOWED)
def test_a_group_is_limited_alone(text: str | None) -> None:
    plugins = {f"{group}:{name}": (f"moereg.{group}", name) for group in ("backends", "platforms") for name in NAMES}
    assert {known for known, plugin in plugins.items() if is_allowed(text, *plugin)} == ALLOWED[text]


def test_a_group_that_is_not_there_is_refused() -> None:
    with pytest.raises(ArgumentError, match="group backends, platforms or prepare_finalize, got 'platfroms:one'"):
        is_allowed("platfroms:one", "moereg.platforms", "one")


def test_a_platform_plugin_beats_the_probe(site: Site) -> None:
    body = "return moereg.Platform('cuda', 'sm100', 'Simulated B200')"
    site.install("moereg-sim", {"sim": PLATFORM.format(body=body)}, {"platforms": {"sim": "sim:provide"}})
    site.install("moereg-none", {"none": PLATFORM.format(body="return None")}, {"platforms": {"none": "none:provide"}})
    site.install(
        "moereg-bad",
        {"bad": PLATFORM.format(body="raise OSError('broken bus')")},
        {"platforms": {"bad": "bad:provide"}},
    )
    site.install(
        "moereg-odd", {"odd": PLATFORM.format(body="return 'cuda:sm90'")}, {"platforms": {"odd": "odd:provide"}}
    )
    found = site.run(
        """
        selection = moereg.select_backend(problem)
        platform = current_platform()
        print(json.dumps([
            str(selection.platform), platform.device_name, platform.probed, "torch" in platform.versions,
            selection.winner.assumes, statuses(), errors(),
        ]))
        """
    )
    assert found[:5] == ["cuda:sm100", "Simulated B200", True, True, []]
    assert found[5] == {
        "platforms:bad": "failed",
        "platforms:none": "loaded",
        "platforms:odd": "failed",
        "platforms:sim": "loaded",
    }
    assert found[6] == {
        "bad": "OSError: broken bus",
        "odd": "TypeError: odd:provide must return a Platform or None, got str",
    }


def test_two_platform_plugins_are_an_error(site: Site) -> None:
    for name in ("one", "two"):
        body = "return moereg.Platform('cuda', 'sm90')"
        site.install(
            f"moereg-{name}", {f"p_{name}": PLATFORM.format(body=body)}, {"platforms": {name: f"p_{name}:provide"}}
        )
    code = """
        try:
            found = str(moereg.select_backend(problem).platform)
        except MoeregError as error:
            found = f"{type(error).__name__}: {error}"
        print(json.dumps([found, moereg.select_backend(problem, platform="cpu").backend]))
        """
    assert site.run(code) == [
        "PluginError: one platform plugin may claim this machine, got 2: one of moereg-one 1.2, two of moereg-two 1.2; "
        "choose one by MOEREG_PLUGINS=platforms:one or uninstall the others",
        "torch",
    ]
    assert site.run(code, MOEREG_PLUGINS="two") == ["cuda:sm90", "torch"]


def test_nothing_is_loaded_by_importing_moereg(site: Site) -> None:
    site.install_backend("lazy")
    before, after = site.run(
        """
        before = [name in sys.modules for name in ("moereg_lazy", "moereg.backends")]
        moereg.select_backend(problem)
        print(json.dumps([before, [name in sys.modules for name in ("moereg_lazy", "moereg.backends")]]))
        """
    )
    assert before == [False, False]
    assert after == [True, True]
