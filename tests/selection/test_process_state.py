"""What importing a wheel changes for the whole process is put back and told, and what it raises is its own."""

from __future__ import annotations

import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moereg.process_state import ProcessState, libraries_since
from moereg.registry import BackendRegistry
from tests.support.signals import ctrl_c_handled_by
from tests.support.wheels import Wheels, backend, fresh_wheels

CHANGES = {
    "recursion limit 900": "import sys\nsys.setrecursionlimit(900)",
    "current folder /": "import os\nos.chdir('/')",
    "filters of all warnings": "import warnings\nwarnings.simplefilter('error')",
    "filters of all warnings, gone": "import warnings\nwarnings.resetwarnings()",
    "default dtype torch.float64": "import torch\ntorch.set_default_dtype(torch.float64)",
    "grad enabled False": "import torch\ntorch.set_grad_enabled(False)",
}


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isolated_registry: BackendRegistry) -> Iterator[Wheels]:
    yield from fresh_wheels(tmp_path, monkeypatch, isolated_registry)


@pytest.fixture
def ambient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    limit, folder, dtype = sys.getrecursionlimit(), os.getcwd(), torch.get_default_dtype()
    with warnings.catch_warnings():
        yield
    sys.setrecursionlimit(limit)
    os.chdir(folder)
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("change", CHANGES)
def test_an_import_changes_nothing_for_others(
    wheels: Wheels, ambient: None, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    wheels.install("global", {"own": "own_wheel"}, {"own_wheel.py": f"{CHANGES[change]}\n{backend('own')}"})
    before = ProcessState.now()
    assert wheels.load() == {"own": "loaded"}
    after = ProcessState.now()
    # Torch imports libraries when a dtype is set, and they add filters for warnings of their own.
    assert after == before._replace(filters=before.filters if change.startswith("filters") else after.filters)
    assert f"importing own_wheel of global 1.2 changed {change.partition(',')[0]} for the whole process" in caplog.text


def test_neither_does_one_that_fails(wheels: Wheels, ambient: None) -> None:
    source = "import sys, os\nsys.setrecursionlimit(900)\nos.chdir('/')\nraise ValueError('late')\n"
    wheels.install("global", {"own": "own_wheel"}, {"own_wheel.py": source})
    before = ProcessState.now()
    with pytest.warns(UserWarning, match="late"):
        assert wheels.load() == {"own": "ValueError: late"}
    assert ProcessState.now() == before


def test_a_filter_for_warnings_of_its_own_stays(
    wheels: Wheels, ambient: None, caplog: pytest.LogCaptureFixture
) -> None:
    source = "import warnings\nwarnings.filterwarnings('ignore', 'mine alone')\n"
    wheels.install("quiet", {"own": "own_wheel"}, {"own_wheel.py": source + backend("own")})
    assert wheels.load() == {"own": "loaded"}
    assert warnings.filters[0][0] == "ignore"
    assert "changed" not in caplog.text


def test_a_thread_that_keeps_the_process_is_told(wheels: Wheels, caplog: pytest.LogCaptureFixture) -> None:
    source = (
        "import threading\ngo = threading.Event()\ndef work():\n    go.wait(60)\n"
        "threading.Thread(target=work, name='mine').start()\n"
        "threading.Thread(target=work, name='daemon', daemon=True).start()\n"
    )
    wheels.install("busy", {"own": "own_wheel"}, {"own_wheel.py": source + backend("own")})
    try:
        assert wheels.load() == {"own": "loaded"}
    finally:
        sys.modules["own_wheel"].go.set()
    told = "importing own_wheel of busy 1.2 started thread 'mine' of own_wheel, which is no daemon"
    assert [told in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN], ids=("terminal", "background"))
def test_a_keyboard_interrupt_of_its_own_is_its_error(wheels: Wheels, handler: Any) -> None:
    wheels.install("bad", {"own": "own_wheel"}, {"own_wheel.py": "raise KeyboardInterrupt('of its own')\n"})
    with ctrl_c_handled_by(handler):
        with pytest.warns(UserWarning, match="'own' of bad 1.2 did not load: KeyboardInterrupt: of its own"):
            assert wheels.load() == {"own": "KeyboardInterrupt: of its own"}
        assert signal.getsignal(signal.SIGINT) == handler


def test_ctrl_c_is_not(wheels: Wheels, caplog: pytest.LogCaptureFixture) -> None:
    source = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    wheels.install("slow", {"own": "own_wheel"}, {"own_wheel.py": source})
    with ctrl_c_handled_by(signal.default_int_handler):
        with pytest.raises(KeyboardInterrupt):
            wheels.load()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert caplog.messages == ["interrupted while own_wheel of slow 1.2 was imported"]


def test_an_import_is_logged_before_it_begins(wheels: Wheels, caplog: pytest.LogCaptureFixture) -> None:
    source = "import logging\nlogging.getLogger('moereg').error('it begins')\n"
    wheels.install("first", {"own": "own_wheel"}, {"own_wheel.py": source + backend("own")})
    with caplog.at_level(logging.DEBUG, "moereg"):
        assert wheels.load() == {"own": "loaded"}
    assert caplog.messages == ["importing own_wheel of first 1.2", "it begins", "imported own_wheel of first 1.2"]


def test_libraries_are_packages_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(sys.modules)
    for name in ("mine.part", "mine", "other", "other.part", "this"):
        monkeypatch.setitem(sys.modules, name, sys)
    assert libraries_since(before, "mine.backend") == ["other"]
