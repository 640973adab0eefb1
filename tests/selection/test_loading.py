"""Loading plugins, in this process: what a module registers becomes visible when it has loaded, or not at all."""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from moereg.dispatch import select_backend
from moereg.errors import MoeregWarning, PluginError, PluginWarning, RegistrationError
from moereg.prepare_finalize import DISPATCHERS
from moereg.registry import BackendRegistry, register_moe_backend
from moereg.selection import loader as discovery
from moereg.selection.loader import _Loader
from moereg.selection.plugin_status import BACKEND_GROUP, PluginStatus, scan, unknown_names
from moereg.spec.problem import MoEProblem
from tests.support.fakes import FakeExperts
from tests.support.wheels import HEAD, Wheels, backend, cell, summary


@contextlib.contextmanager
def ctrl_c_handled_by(handler: Any = signal.default_int_handler) -> Iterator[None]:
    """Handles SIGINT like that. A shell without job control starts `command &` with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


PROBLEM = MoEProblem(num_experts=4, hidden_size=8, intermediate_size=8, top_k=2)


quiet = pytest.mark.filterwarnings("ignore::moereg.errors.PluginWarning")


def test_a_wheel_may_subclass_the_class_of_another(wheels: Wheels) -> None:
    child = "from zbase.experts import Mine as Base\n" + backend("child", base="Base")
    wheels.install("moereg-child", {"child": "child_wheel"}, {"child_wheel.py": child})
    files = {
        "zbase/__init__.py": "from zbase.experts import *\nmoereg_api = '1'\n",
        "zbase/experts.py": backend("zbase"),
    }
    wheels.install("moereg-zbase", {"zbase": "zbase"}, files, version="3.4")
    assert wheels.load() == {"child": "loaded", "zbase": "loaded"}
    assert wheels.origins("child", "zbase") == {"child": "moereg-child 1.2", "zbase": "moereg-zbase 3.4"}


@quiet
def test_a_wheel_whose_base_fails_after_registering(wheels: Wheels) -> None:
    # The child's import works without the base's last line, and must not bring the base in.
    child = "try:\n    import zbase\nexcept ValueError:\n    pass\n" + backend("child")
    wheels.install("moereg-child", {"child": "child_wheel"}, {"child_wheel.py": child})
    wheels.install("moereg-zbase", {"zbase": "zbase"}, {"zbase.py": backend("zbase") + "raise ValueError('late')\n"})
    assert wheels.load() == {"child": "loaded", "zbase": "ValueError: late"}
    assert wheels.origins("child", "zbase") == {"child": "moereg-child 1.2"}


def test_a_module_that_fails_at_first_brings_its_cells_once(wheels: Wheels, monkeypatch: pytest.MonkeyPatch) -> None:
    child = "try:\n    import zbase\nexcept KeyError:\n    pass\n" + backend("child")
    wheels.install("moereg-child", {"child": "child_wheel"}, {"child_wheel.py": child})
    fails = "import os\nif 'FAILS_ONCE' in os.environ:\n    raise KeyError(os.environ.pop('FAILS_ONCE'))\n"
    wheels.install("moereg-zbase", {"zbase": "zbase"}, {"zbase.py": backend("zbase") + fails})
    monkeypatch.setenv("FAILS_ONCE", "late")
    assert wheels.load() == {"child": "loaded", "zbase": "loaded"}
    assert len(wheels.cells("zbase")) == 1


@quiet
def test_the_base_stands_where_the_child_fails(wheels: Wheels) -> None:
    child = "from zbase import Mine as Base\n" + backend("child", base="Base") + "raise ValueError('late')\n"
    wheels.install("moereg-child", {"child": "child_wheel"}, {"child_wheel.py": child})
    wheels.install("moereg-zbase", {"zbase": "zbase"}, {"zbase.py": backend("zbase")})
    assert wheels.load() == {"child": "ValueError: late", "zbase": "loaded"}
    assert wheels.origins("child", "zbase") == {"zbase": "moereg-zbase 1.2"}


@pytest.mark.parametrize("fails", [False, True])
@quiet
def test_two_modules_of_one_wheel_import_each_other(wheels: Wheels, fails: bool) -> None:
    first = "from pair.bb import Mine as Base\n" + backend("aa", base="Base") + ("1 / 0\n" if fails else "")
    files = {"pair/__init__.py": "", "pair/aa.py": first, "pair/bb.py": backend("bb")}
    wheels.install("pair", {"aa": "pair.aa", "bb": "pair.bb"}, files)
    assert wheels.load() == {"aa": "ZeroDivisionError: division by zero" if fails else "loaded", "bb": "loaded"}
    assert wheels.origins("aa", "bb") == ({} if fails else {"aa": "pair 1.2"}) | {"bb": "pair 1.2"}


def test_two_backends_of_one_module(wheels: Wheels) -> None:
    both = backend("aa") + cell("bb", kind="Other")
    wheels.install("pair", {"aa": "pair.aa", "bb": "pair.bb"}, {
        "pair/__init__.py": "", "pair/both.py": both, "pair/aa.py": "from pair.both import *\nmoereg_api = '1'\n",
        "pair/bb.py": "from pair.both import *\nmoereg_api = '1'\n",
    })  # fmt: skip
    assert wheels.load() == {"aa": "loaded", "bb": "loaded"}
    assert [cell.class_name for cell in wheels.cells("aa", "bb")] == ["Mine", "Other"]


def test_wheels_that_share_a_namespace(wheels: Wheels) -> None:
    for name in ("aa", "bb"):
        wheels.install(f"acme-{name}", {name: f"acme.{name}"}, {f"acme/{name}.py": backend(name)})
    # The second imports the first, which has been published by then, and a part of its own beside its entry point.
    (wheels.folder / "acme/bb.py").write_text("import acme.aa, acme.more\nmoereg_api = '1'\n")
    (wheels.folder / "acme/more.py").write_text(backend("bb"))
    assert wheels.load() == {"aa": "loaded", "bb": "loaded"}
    assert wheels.origins("aa", "bb") == {"aa": "acme-aa 1.2", "bb": "acme-bb 1.2"}


def test_a_class_of_another_registered_by_a_helper(wheels: Wheels) -> None:
    # A rectangle for somebody else's class, and a class that a library made, are of the wheel that registers them.
    makes = HEAD + "def make(name):\n    class Made(FakeExperts): pass\n    return register(name, Made)\n"
    makes += "def register(name, kind):\n    return register_moe_backend(name, 1, ('unquantized',), ('*',))(kind)\n"
    wheels.install("helper", {"helper": "helper"}, {"helper.py": makes + cell("helper")})
    wheels.install("maker", {"amade": "amade"}, {"amade.py": "import helper\nmoereg_api = '1'\nhelper.make('amade')\n"})
    extends = (
        "import helper\nfrom moereg.backends.torch_moe import TorchDenseExperts as TorchExperts\nmoereg_api = '1'\n"
    )
    extends += "helper.register('wider', TorchExperts)\n"
    wheels.install("wider", {"wider": "wider"}, {"wider.py": extends})
    assert wheels.load() == {"amade": "loaded", "helper": "loaded", "wider": "loaded"}
    assert wheels.origins("amade", "helper", "wider") == {
        "amade": "maker 1.2", "helper": "helper 1.2", "wider": "wider 1.2",
    }  # fmt: skip


@quiet
def test_a_name_belongs_to_the_distribution_that_comes_first(wheels: Wheels) -> None:
    # By name and module, in whichever order the folder lists them.
    for letter in "dbeac":
        wheels.install(f"moereg-{letter}", {"same": f"wheel_{letter}"}, {f"wheel_{letter}.py": backend("same")})
    statuses = _Loader(wheels.registry).load()
    assert [status.status for status in statuses] == ["loaded", *["failed"] * 4]
    assert [status.value for status in statuses] == [f"wheel_{letter}" for letter in "abcde"]
    assert statuses[1].error == (
        "RegistrationError: backend name 'same' belongs to moereg-a (Mine); Mine of moereg-b needs another name"
    )
    assert wheels.origins("same") == {"same": "moereg-a 1.2"}


def test_plugins_can_be_limited(wheels: Wheels, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels.install("moereg-one", {"one": "one_wheel"}, {"one_wheel.py": backend("one")})
    wheels.install("moereg-two", {"two": "two_wheel"}, {"two_wheel.py": "raise RuntimeError('must not be imported')"})
    monkeypatch.setattr(discovery, "_LOADER", _Loader(wheels.registry))
    monkeypatch.setenv("MOEREG_PLUGINS", " one , other ")
    with (
        pytest.warns(PluginWarning, match=r"^MOEREG_PLUGINS must name .*\(installed: one, two\), got 'other'; leave"),
        pytest.raises(PluginError, match=r"^backend 'two' of moereg-two 1\.2 is not in MOEREG_PLUGINS; add it there$"),
    ):
        select_backend(PROBLEM, require="two")
    assert summary(discovery.plugin_statuses()) == {"one": "loaded", "two": "skipped"}
    assert select_backend(PROBLEM, require="one").backend == "one"
    monkeypatch.setenv("MOEREG_PLUGINS", "")
    assert wheels.load() == {"one": "skipped", "two": "skipped"}


@pytest.mark.parametrize(
    ("text", "unknown"),
    [
        (None, None),
        ("", None),
        (" one ,,two", None),
        ("backends:one,platforms:", None),
        ("moereg.backends : one", None),
        ("bogus", "'bogus'"),
        ("one,platforms:one,bogus", "'platforms:one', 'bogus'"),
    ],
)
def test_what_moereg_plugins_names_has_to_be_installed(text: str | None, unknown: str | None) -> None:
    statuses = [PluginStatus(BACKEND_GROUP, name, "", "", "skipped") for name in ("one", "two")]
    assert unknown_names(text, statuses) == (
        unknown
        and "MOEREG_PLUGINS must name installed plugins (installed: one, two), "
        f"got {unknown}; leave it out or correct it"
    )


def test_what_an_uninstall_left_behind_stops_nobody(wheels: Wheels) -> None:
    wheels.install("left", {"left": "left_wheel"}, {"left_wheel.py": backend("left")})
    (wheels.folder / "left-1.2.dist-info" / "METADATA").unlink()
    assert wheels.load() == {"left": "loaded"}
    assert wheels.origins("left") == {"left": "unknown distribution of left_wheel unknown"}


@quiet
def test_all_cells_of_an_entry_point_or_none(wheels: Wheels) -> None:
    twice = backend("twice") + 'register_moe_backend("twice", 2, ("unquantized",), ("*",))(Mine)\n'
    wheels.install("twice", {"twice": "twice"}, {"twice.py": twice})
    wheels.install("torch-again", {"again": "again"}, {"again.py": backend("again") + cell("torch", kind="Other")})
    found = wheels.load()
    assert found["twice"].startswith("RegistrationError: Mine of twice registers 'twice' twice for scheme unquantized")
    assert found["again"].endswith("must register a backend of that name and no other, got again, torch")
    assert not wheels.origins("twice", "again")


@quiet
def test_a_direct_import_before_loading(wheels: Wheels) -> None:
    wheels.install("early", {"early": "early.point"}, {
        "early/__init__.py": "", "early/point.py": "import early.kernels\nmoereg_api = '1'\n",
        "early/kernels.py": backend("early") + cell("early", "cuda", "Two") + cell("early", "rocm", "Three"),
    })  # fmt: skip
    wheels.install("unfit", {"unfit": "unfit"}, {"unfit.py": backend("unfit").replace('"1"', '"2"')})
    import early.kernels  # type: ignore[import-not-found]
    import unfit  # type: ignore[import-not-found]

    assert wheels.origins("early", "unfit") == {"early": "early.kernels ", "unfit": "unfit "}
    found = wheels.load()
    assert found["early"] == "loaded"
    assert found["unfit"].endswith("got '2'")
    assert {(cell.origin, cell.origin_version) for cell in wheels.cells("early", "unfit")} == {("early", "1.2")}
    classes = [cell.class_name for cell in wheels.cells("early")]
    assert sorted(classes) == ["Mine", "Three", "Two"]
    assert early.kernels.Three in [cell.experts for cell in wheels.cells("early")]
    # What such a module registers later is of the same distribution.
    exec(cell("early", kind="Later"), vars(early.kernels))
    assert {cell.origin for cell in wheels.cells("early")} == {"early"}
    assert sorted(cell.class_name for cell in wheels.cells("early")) == ["Later", *sorted(classes)]
    assert unfit.Mine


@quiet
@pytest.mark.parametrize("last", ["", "raise RuntimeError('no library')"], ids=["", "fails"])
def test_what_a_user_registers_is_not_taken_over_by_a_wheel_of_that_name(wheels: Wheels, last: str) -> None:
    wheels.install("moereg-other", {"same": "other"}, {"other.py": backend("same") + last})
    (wheels.folder / "mine.py").write_text(backend("same"))
    import mine  # type: ignore[import-not-found]

    assert "loaded" not in wheels.load()["same"]
    assert wheels.origins("same") == {"same": "mine "}
    assert [cell.experts for cell in wheels.cells("same")] == [mine.Mine]


def test_a_skipped_wheel_stays_out_when_another_imports_it(wheels: Wheels, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels.install("child", {"child": "child"}, {"child.py": "import zbase\n" + backend("child")})
    wheels.install("zbase", {"zbase": "zbase"}, {"zbase.py": backend("zbase")})
    monkeypatch.setenv("MOEREG_PLUGINS", "child")
    assert wheels.load() == {"child": "loaded", "zbase": "skipped"}
    assert set(wheels.origins("child", "zbase")) == {"child"}


def test_interrupted_loading_goes_on(wheels: Wheels) -> None:
    wheels.install("aa", {"aa": "aa"}, {"aa.py": backend("aa")})
    stops = "import os, signal, sys\nif not hasattr(sys, 'stopped_once'):\n    sys.stopped_once = 1\n"
    stops += "    os.kill(os.getpid(), signal.SIGINT)\n    os.getpid()\n"
    wheels.install("bb", {"bb": "bb"}, {"bb.py": backend("bb") + stops})
    loader = _Loader(wheels.registry)
    try:
        with ctrl_c_handled_by(signal.default_int_handler), pytest.raises(KeyboardInterrupt):
            loader.load()
        assert summary(loader.load()) == {"aa": "loaded", "bb": "loaded"}
    finally:
        del sys.stopped_once  # type: ignore[attr-defined]
    assert [cell.name for cell in wheels.cells("aa", "bb")] == ["aa", "bb"]


def test_a_distribution_in_a_folder_of_another_name_is_found(wheels: Wheels) -> None:
    wheels.install("aa", {"aa": "aa"}, {"aa.py": backend("aa")})
    (wheels.folder / "aa-1.2.dist-info").rename(wheels.folder / "other-1.2.dist-info")
    assert summary(_Loader(wheels.registry).load()) == {"aa": "loaded"}


def test_a_plugin_that_selects_while_it_is_imported(wheels: Wheels) -> None:
    wheels.install("hasty", {"hasty": "hasty"}, {"hasty.py": "import loader_of_the_test\nloader_of_the_test.load()\n"})
    loader: Any = _Loader(wheels.registry)
    sys.modules["loader_of_the_test"] = loader
    with pytest.warns(MoeregWarning, match="hasty of hasty 1.2 asked for backends while it was imported; a plugin may"):
        loader.load()


def test_a_failed_plugin_is_warned_of_once(wheels: Wheels) -> None:
    wheels.install("bad", {"bad": "bad_wheel"}, {"bad_wheel.py": "raise OSError('no such\\nlibrary')"})
    loader = _Loader(wheels.registry)
    text = (
        r"^backend 'bad' of bad 1\.2 did not load: OSError: no such library; repair or uninstall that distribution, "
        r"or leave it out of MOEREG_PLUGINS$"
    )
    with pytest.warns(MoeregWarning, match=text) as caught:
        loader.load()
    loader.load()
    assert [warning.filename for warning in caught] == [__file__]
    # A filter that makes it an error is obeyed, once: everything else is loaded.
    loader = _Loader(wheels.registry)
    with pytest.raises(MoeregWarning, match="no such library"):
        loader.load()
    assert summary(loader.load()) == {"bad": "OSError: no such library"}


@quiet
@pytest.mark.parametrize(("api", "fits"), [("1", True), ("1.0", True), ("1.37", True), ("2", False), ("1x", False)])
def test_a_minor_version_breaks_no_wheel(wheels: Wheels, api: str, fits: bool) -> None:
    wheels.install("minor", {"minor": "minor"}, {"minor.py": backend("minor").replace('"1"', f'"{api}"')})
    found = wheels.load()["minor"]
    assert (found == "loaded") is fits
    assert fits or found == (
        "RegistrationError: minor must say moereg_api = '1', the version of moereg.author it was written for, got "
        f"{api!r}"
    )


@quiet
def test_unreadable_entry_points_stop_nobody(wheels: Wheels) -> None:
    wheels.install("good", {"good": "good"}, {"good.py": backend("good")})
    wheels.install("dashed", {"dashed": "not-a-module"}, {})
    for name, content in (("latin", b"[moereg.backends]\nm\xfcde = muede\n"), ("lines", b"[moereg.backends]\nalone\n")):
        wheels.install(name, {}, {})
        (wheels.folder / f"{name}-1.2.dist-info" / "entry_points.txt").write_bytes(content)
    found = wheels.load()
    assert found["good"] == "loaded"
    assert found["latin"].startswith("UnicodeDecodeError: 'utf-8' codec can't decode byte 0xfc")
    assert found["dashed"] == "ValueError: 'not-a-module' names no module; write moereg_mine or moereg_mine:provide"
    assert found["lines"]


def test_an_older_copy_further_down_the_path_is_not_seen(wheels: Wheels, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels.install("copied", {"copied": "copied"}, {"copied.py": backend("copied")}, version="1.0")
    newer = Wheels(wheels.folder / "newer", wheels.registry)
    newer.folder.mkdir()
    newer.install("copied", {"copied": "copied"}, {"copied.py": backend("copied")}, version="2.0")
    monkeypatch.syspath_prepend(newer.folder)
    assert wheels.load() == {"copied": "loaded"}
    assert wheels.origins("copied") == {"copied": "copied 2.0"}


def test_a_class_that_is_defined_again_takes_the_place_of_the_first(wheels: Wheels) -> None:
    # A notebook's cell that runs twice, and a module that its author reloads.
    source = backend("again", rule="cpu").replace(
        "@register", '@register_moe_backend("again", 9, ("mxfp8",), ("*",))\n@register'
    )
    (wheels.folder / "notebook.py").write_text(source)
    notebook = importlib.import_module("notebook")
    first = notebook.Mine
    assert [cell.experts for cell in wheels.cells("again")] == [first, first]
    importlib.reload(notebook)
    assert [cell.experts for cell in wheels.cells("again")] == [notebook.Mine, notebook.Mine]
    assert notebook.Mine is not first
    # One that cannot be registered takes nobody's place.
    (wheels.folder / "notebook.py").write_text(source.replace("'cpu'", "'gpux'"))
    with pytest.raises(RegistrationError, match="unknown platform kind 'gpux'"):
        importlib.reload(notebook)
    assert len(wheels.cells("again")) == 2


def test_a_slow_import_is_logged_with_its_distribution(
    wheels: Wheels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(discovery, "_SLOW_SECONDS", 0)
    wheels.install("slow", {"slow": "slow_wheel"}, {"slow_wheel.py": backend("slow")})
    with caplog.at_level(logging.DEBUG, "moereg"):
        wheels.load()
    # The first line is there before the import: a wheel that hangs or ends the process leaves no other trace.
    first, second = (record for record in caplog.records if "slow_wheel" in record.getMessage())
    assert (first.levelname, first.getMessage()) == ("DEBUG", "importing slow_wheel of slow 1.2")
    assert second.levelname == "INFO"
    assert re.fullmatch(r"importing slow_wheel of slow 1\.2 took \d\.\d s", second.getMessage())


@quiet
@pytest.mark.parametrize(
    ("group", "what"), [("backends", "a backend of that name and no other"), ("platforms", "no backend")]
)
def test_what_no_entry_point_names_is_the_fault_of_the_plugin_that_brings_it(
    wheels: Wheels, group: str, what: str
) -> None:
    wheels.install("library", {}, {"library.py": backend("stray")})
    user = "import library\nfrom moereg.author import Platform\nmoereg_api = '1'\ndef provide(): return None\n"
    value = "user_wheel:provide"
    wheels.install("user", {"user": value}, {"user_wheel.py": user}, group=group)
    assert wheels.load() == {"user": f"RegistrationError: entry point 'user' must register {what}, got stray"}
    assert not wheels.cells("stray")


def test_one_module_brings_a_backend_and_a_way(wheels: Wheels) -> None:
    dispatcher = (
        "from moereg.author import register_prepare_finalize\nfrom tests.selection.test_dispatcher import Moving\n"
        "@register_prepare_finalize('both', 1, ('standard',), ('cuda',))\nclass Way(Moving): pass\n"
    )
    wheels.install("both", {"both": "both_wheel"}, {"both_wheel.py": backend("both") + dispatcher})
    points = wheels.folder / "both-1.2.dist-info" / "entry_points.txt"
    points.write_text("[moereg.prepare_finalize]\nboth = both_wheel\n" + points.read_text())
    assert wheels.load() == {"both": "loaded"}
    assert wheels.origins("both") == {"both": "both 1.2"}
    assert [cell.provider for cell in DISPATCHERS.by_name("both")] == ["both 1.2"]


def test_threads_that_select_at_once_see_the_same(wheels: Wheels, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels.install(
        "late", {"late": "late_wheel"}, {"late_wheel.py": "import time\ntime.sleep(0.3)\n" + backend("late")}
    )
    monkeypatch.setattr(discovery, "_LOADER", _Loader(wheels.registry))
    barrier = threading.Barrier(12)

    def select(_: int) -> set[str]:
        barrier.wait()
        return {decision.backend for decision in select_backend(PROBLEM, require="late").decisions}

    with ThreadPoolExecutor(12) as pool:
        seen = list(pool.map(select, range(12)))
    assert all(names == seen[0] and "late" in names for names in seen)
    assert len(wheels.cells("late")) == 1


def test_what_is_registered_while_a_plugin_loads_stays(wheels: Wheels) -> None:
    wait = "import threading\nentered, go = threading.Event(), threading.Event()\n"
    slow = wait + backend("slow") + "entered.set()\nassert go.wait(60)\nraise ValueError('late')\n"
    wheels.install("slow", {"slow": "slow_wheel"}, {"slow_wheel.py": slow})
    found: list[Any] = []

    def load() -> None:
        with pytest.warns(MoeregWarning, match="late"):
            found.append(wheels.load())

    thread = threading.Thread(target=load)
    thread.start()
    while not hasattr(module := sys.modules.get("slow_wheel"), "go") and thread.is_alive():
        pass
    assert module is not None
    assert module.entered.wait(60)
    # Nothing of the plugin shows, and a notebook's class shows at once.
    assert wheels.origins("slow") == {}
    register_moe_backend("at_once", 1, ("unquantized",), ("*",))(FakeExperts)
    assert wheels.origins("at_once") == {"at_once": "tests.support.fakes "}
    module.go.set()
    thread.join(60)
    assert found == [{"slow": "ValueError: late"}]
    assert wheels.origins("slow", "at_once") == {"at_once": "tests.support.fakes "}


def test_threads_that_register_at_once_lose_nothing() -> None:
    registry = BackendRegistry()
    barrier = threading.Barrier(8)

    def register(number: int) -> None:
        barrier.wait()
        for step in range(25):
            kind = type(f"Experts{number}", (FakeExperts,), {})
            register_moe_backend(f"own_{number}", step, ("unquantized",), ("*",), registry=registry)(kind)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(register, range(8)))
    assert len(registry.cells) == 200


@pytest.mark.parametrize("name", ["builtin", "moereg", "a" * 101])
def test_a_backend_has_a_name_of_its_own(isolated_registry: BackendRegistry, name: str) -> None:
    with pytest.raises(RegistrationError):
        register_moe_backend(name, 1, ("unquantized",), ("*",))(FakeExperts)
    assert name not in isolated_registry.names


@quiet
def test_names_are_safe_to_print(wheels: Wheels) -> None:
    wheels.install("red\x1b[31m", {"fine": "fine_wheel"}, {"fine_wheel.py": backend("fine")})
    wheels.install("long", {"n" * 500: "long_wheel"}, {"long_wheel.py": ""})
    points, broken = scan()
    (point,) = [point for point in points if point.name == "fine"]
    assert point.owner.origin == "red\\x1b[31m"
    (status,) = [status for status in broken if status.distribution == "long 1.2"]
    assert len(status.name) == 100
    assert str(status.error).endswith("an entry point's name is at most 100 printable characters; choose another")


@quiet
def test_two_wheels_with_one_module(wheels: Wheels) -> None:
    wheels.install("one", {"aa": "same_wheel"}, {"same_wheel.py": backend("aa")})
    wheels.install("two", {"bb": "same_wheel"}, {"same_wheel.py": backend("aa")})
    assert wheels.load() == {
        "aa": "loaded",
        "bb": "RegistrationError: entry point 'bb' must register a backend of that name and no other, got none; "
        "same_wheel is of one 1.2 too, uninstall one",
    }
