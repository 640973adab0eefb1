"""The wheel that `make build-cpu` made of plugins/moereg-cpu, as a user who installs it meets it."""

from __future__ import annotations

import email
import platform
import zipfile
from pathlib import Path

import pytest

from tests.plugins.installing import ROOT, Site, ask

BUILT = ROOT / "build/moereg-cpu"
SOURCE = ROOT / "plugins/moereg-cpu/src"
WHEELS = sorted((BUILT / "wheel").glob("*.whl"))
LAYER = "explain --experts 16 --hidden 1024 --intermediate 256 --top-k 4 --json"
SCHEMES = ("unquantized", "int8_w8a16", "int4_w4a16_g32_zp", "mxfp4_w4a16", "nvfp4", "fp8_block128")

needs_wheel = pytest.mark.skipif(not WHEELS, reason="requires the wheel of moereg-cpu, which `make build-cpu` makes")


@needs_wheel
def test_the_wheel_serves_every_python_and_torch() -> None:
    (wheel,) = WHEELS
    assert wheel.name == f"moereg_cpu-0.1.0-py3-none-linux_{platform.machine()}.whl"
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.getinfo(name) for name in archive.namelist()}
        (metadata,) = (archive.read(name).decode() for name in files if name.endswith(".dist-info/METADATA"))
    own = {name.removeprefix("moereg_cpu/") for name in files if name.startswith("moereg_cpu/")}
    sources = [path.relative_to(SOURCE / "moereg_cpu") for path in (SOURCE / "moereg_cpu").rglob("*.*")]
    sources = [path for path in sources if "__pycache__" not in path.parts]
    assert own == {path.as_posix() for path in sources} | {"libmoereg_cpu.so"}
    assert all(name in own or ".dist-info/" in name for name in {name.removeprefix("moereg_cpu/") for name in files})
    said = email.message_from_string(metadata)
    assert said["License-Expression"] == "Apache-2.0"
    assert said.get_all("Requires-Dist") == ["moereg", "torch>=2.11"]
    assert wheel.stat().st_size < 4e6


@needs_wheel
def test_the_library_needs_the_c_library_alone() -> None:
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"
    maps = Site(BUILT / "site").python("-S", "-c", code, str(BUILT / "site/moereg_cpu/libmoereg_cpu.so")).stdout
    assert "libmoereg_cpu.so" in maps
    assert not [name for name in ("libgomp", "libomp", "libiomp", "libstdc++", "libtorch") if name in maps]


@needs_wheel
def test_the_installed_wheel_is_chosen_on_a_cpu() -> None:
    lines = [f"{LAYER} --quant {quant}" for quant in SCHEMES]
    there = f"{LAYER} --platform cuda:sm90"
    *here, elsewhere, info = ask(Site(BUILT / "site"), [line.split() for line in (*lines, there, "info --json")])
    assert [answer.json["selected"] for answer in here] == ["cpu"] * len(SCHEMES)
    assert {each["origin"] for each in here[0].json["decisions"] if each["backend"] == "cpu"} == {"moereg-cpu"}
    reasons = [each["reasons"] for each in elsewhere.json["decisions"] if each["backend"] == "cpu"]
    assert reasons
    assert all("platform" in {reason["code"] for reason in each} for each in reasons)
    assert {plugin["status"] for plugin in info.json["plugins"]} == {"loaded"}
    (listed,) = (each for each in info.json["backends"] if each["name"] == "cpu")
    assert listed["available"]


def test_without_its_library_it_says_so_and_torch_runs(tmp_path: Path) -> None:
    """As from a source tree, where nobody has compiled it."""
    package = tmp_path / "moereg_cpu"
    package.mkdir()
    for path in (SOURCE / "moereg_cpu").glob("*.py"):
        (package / path.name).write_bytes(path.read_bytes())
    about = tmp_path / "moereg_cpu-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.4\nName: moereg-cpu\nVersion: 0.1.0\n")
    (about / "entry_points.txt").write_text("[moereg.backends]\ncpu = moereg_cpu.backend\n")
    explained, info = ask(Site(tmp_path), [LAYER.split(), ["info", "--json"]])
    assert explained.json["selected"] == "torch"
    texts = [[r["text"] for r in each["reasons"]] for each in explained.json["decisions"] if each["backend"] == "cpu"]
    assert texts
    assert all(any("requires the compiled library of moereg-cpu, got none" in text for text in each) for each in texts)
    assert {plugin["status"] for plugin in info.json["plugins"]} == {"loaded"}
