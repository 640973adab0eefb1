"""Plugins as a stranger installs them: good and bad ones side by side, in this process or a fresh one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import moereg
from moereg.dispatch import select_backend
from moereg.errors import ArgumentError, MoeregError, PluginError
from moereg.platforms import current_platform
from moereg.registry import BackendRegistry
from moereg.selection import loader as discovery
from moereg.selection.loader import _Loader
from moereg.selection.plugin_status import is_allowed
from moereg.spec.problem import MoEProblem
from tests.cli.command import ROOT, printed
from tests.support.wheels import Wheels, backend, fresh_wheels, summary

PROBLEM = MoEProblem(num_experts=4, hidden_size=8, intermediate_size=8, top_k=2)
NAMES = ("one", "two")

quiet = pytest.mark.filterwarnings("ignore::moereg.errors.PluginWarning")


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolated_registry: BackendRegistry) -> Iterator[Wheels]:
    monkeypatch.setattr(discovery, "_LOADER", _Loader(isolated_registry))
    yield from fresh_wheels(tmp_path, monkeypatch, isolated_registry)


def api(name: str, line: str) -> str:
    return backend(name).replace('moereg_api = "1"', line)


ASKED = "must say moereg_api = '1', the version of moereg.author it was written for, got"
RULE = "must register a backend of that name and no other, got"
# Name of the entry point, its module, and the error.
BROKEN = {
    "raises": ("raise RuntimeError('no such\\ndevice\\n\\nadvice of another')", "RuntimeError: no such device"),
    "exits": ("import sys\nsys.exit(3)", "SystemExit: 3"),
    "stops": ("class Stop(BaseException): pass\nraise Stop", "Stop: no message"),
    "mute": (
        "class Mute(Exception):\n    def __str__(self): raise self\nraise Mute",
        "Mute: a message that cannot be shown",
    ),
    "no_api": (api("no_api", ""), f"RegistrationError: wheel_no_api {ASKED} None"),
    "old_api": (api("old_api", "moereg_api = '0'"), f"RegistrationError: wheel_old_api {ASKED} '0'"),
    "torch": (backend("torch"), "RegistrationError: backend name 'torch' belongs to builtin ("),
    "renamed": (backend("something_else"), f"RegistrationError: entry point 'renamed' {RULE} something_else"),
    "silent": ('moereg_api = "1"', f"RegistrationError: entry point 'silent' {RULE} none"),
    "invalid": (
        backend("invalid", rule="gpux"),
        "RegistrationError: backend 'invalid' (Mine of of-invalid): unknown platform",
    ),
    "half": (backend("half") + "\nraise KeyError('late')\n", "KeyError: 'late'"),
    "missing": (None, "ModuleNotFoundError: "),
}


@quiet
def test_good_and_bad_plugins_side_by_side(wheels: Wheels) -> None:
    for name, (source, _) in {"good": (backend("good"), ""), **BROKEN}.items():
        files = {} if source is None else {f"wheel_{name}.py": source}
        wheels.install(f"of-{name}", {name: f"wheel_{name}"}, files)
    statuses = {status.name: status for status in discovery.plugin_statuses()}
    assert statuses.pop("good").status == "loaded"
    assert statuses["torch"].distribution == "of-torch 1.2"
    errors = summary(tuple(statuses.values()))
    assert {name for name, (_, error) in BROKEN.items() if not errors[name].startswith(error)} == set()
    assert errors["torch"].endswith("Mine of of-torch needs another name")
    assert {cell.name for cell in wheels.registry.cells} & {"good", "something_else", *BROKEN} == {"good", "torch"}
    assert wheels.origins("good", "torch") == {"good": "of-good 1.2", "torch": f"builtin {moereg.__version__}"}
    assert select_backend(PROBLEM, "cpu").backend == "torch"
    for name, said, cause in (
        ("raises", "of-raises 1.2 failed to load: RuntimeError: no such device; repair or uninstall", RuntimeError),
        ("exits", "of-exits 1.2 failed to load: SystemExit: 3; repair", SystemExit),
        ("half", "of-half 1.2 failed to load: KeyError: ", KeyError),
    ):
        with pytest.raises(PluginError, match=f"^backend '{name}' of {said}") as error:
            select_backend(PROBLEM, require=name)
        assert isinstance(error.value.__cause__, cause)
    with pytest.raises(MoeregError, match=r"^unknown backend 'something_else'"):
        select_backend(PROBLEM, require="something_else")


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


def claim(wheels: Wheels, name: str, body: str) -> None:
    source = f"import moereg\nmoereg_api = '1'\ndef provide():\n    {body}\n"
    wheels.install(f"moereg-{name}", {name: f"plugin_{name}:provide"}, {f"plugin_{name}.py": source}, group="platforms")


@quiet
def test_a_platform_plugin_beats_the_probe(wheels: Wheels) -> None:
    claim(wheels, "sim", "return moereg.Platform('cuda', 'sm100', 'Simulated B200')")
    claim(wheels, "none", "return None")
    claim(wheels, "bad", "raise OSError('broken bus')")
    claim(wheels, "odd", "return 'cuda:sm90'")
    winner = select_backend(PROBLEM).winner
    platform = current_platform()
    assert winner is not None
    assert (str(platform), platform.device_name, platform.probed) == ("cuda:sm100", "Simulated B200", True)
    assert ("torch" in platform.versions, winner.assumes) == (True, ())
    assert summary(discovery.plugin_statuses()) == {
        "bad": "OSError: broken bus", "none": "loaded", "sim": "loaded",
        "odd": "TypeError: plugin_odd:provide must return a Platform or None, got str",
    }  # fmt: skip


def test_nothing_is_loaded_by_importing_moereg(wheels: Wheels) -> None:
    wheels.install("moereg-lazy", {"lazy": "moereg_lazy"}, {"moereg_lazy.py": backend("lazy")})
    code = (
        "import json, sys, moereg\n"
        "here = lambda: [name in sys.modules for name in ('moereg_lazy', 'moereg.backends')]\n"
        "before = here()\nmoereg.list_backends()\nprint(json.dumps([before, here()]))"
    )
    paths = os.pathsep.join((str(wheels.folder), str(ROOT)))
    assert json.loads(printed("-c", code, PYTHONPATH=paths).splitlines()[-1]) == [[False, False], [True, True]]
