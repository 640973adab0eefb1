"""Recognizing a TPU that is not there: device files, modules and the environment are made up."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import moereg_tpu
import pytest


@pytest.fixture
def tpu_vm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that looks like a TPU VM."""
    (tmp_path / "accel0").touch()
    monkeypatch.setattr(moereg_tpu, "_DEVICE_FILES", (str(tmp_path / "accel[0-9]*"),))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    return tmp_path


@pytest.mark.parametrize(
    ("accelerator", "arch"), [("v5litepod-8", "v5e"), ("v4-8", "v4"), ("v5p-16", "v5p"), ("v6e-1", "v6e")]
)
@pytest.mark.usefixtures("tpu_vm")
def test_a_tpu_is_named_by_its_generation(accelerator: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", accelerator)
    platform = moereg_tpu.probe()
    assert platform is not None
    assert (str(platform), platform.device_type) == (f"tpu:{arch}", "xla")


def test_a_machine_without_chips_libraries_or_a_name_has_no_tpu(tpu_vm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE")
    assert moereg_tpu.probe() is None
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-8")
    assert moereg_tpu.probe() is not None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch_xla" else name)
    assert moereg_tpu.probe() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    (tpu_vm / "accel0").unlink()
    assert moereg_tpu.probe() is None
