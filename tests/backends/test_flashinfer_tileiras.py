"""What selection says of a machine that cannot compile cuTile kernels."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest

from moereg.backends._flashinfer import claims, tileiras
from moereg.platforms import Platform
from moereg.spec.problem import MoEProblem

H200 = Platform.from_name("cuda:sm90")
Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a tileiras on the path that knows some architectures; no Python package has one."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setattr(tileiras, "_packaged", lambda: None)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    tileiras._help.cache_clear()

    def put(*lines: str, exits: int = 0, folder: str = "bin") -> Path:
        path = tmp_path / folder / "tileiras"
        path.parent.mkdir(exist_ok=True)
        said = "".join(f"echo '    ={line} -'\n" for line in lines)
        path.write_text(f"#!/bin/sh\n{said}exit {exits}\n")
        path.chmod(0o755)
        return path

    return put


def test_no_compiler_is_a_reason_with_its_cure(install: Install) -> None:
    reason = tileiras.can_compile_tiles(H200)
    assert reason.startswith(
        "requires the compiler tileiras, since cuTile kernels are compiled at first use, found none"
    )
    assert "nvidia-cuda-tileiras>=13.4" in reason


def test_a_compiler_from_before_the_machine_is_a_reason(install: Install) -> None:
    path = install("sm_100", "sm_120")
    assert f"compiles for sm_90, got {path}, which does not" in str(tileiras.can_compile_tiles(H200))
    # sm_90 is the beginning of another name's text only where that ends there.
    path.write_text(path.read_text().replace("sm_100", "sm_90a"))
    tileiras._help.cache_clear()
    assert tileiras.can_compile_tiles(H200) is not None


def test_a_compiler_that_does_not_start_is_a_reason(install: Install) -> None:
    path = install()
    path.write_bytes(b"\x7fELF\x02\x01\x01 of another processor")
    assert "requires a tileiras that runs" in str(tileiras.can_compile_tiles(H200))


def test_a_compiler_is_found_where_cuda_tile_looks(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_path = install("sm_90")
    assert tileiras.find_tileiras() == on_path
    assert tileiras.can_compile_tiles(H200) is None
    on_path.unlink()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert tileiras.find_tileiras() is None
    again = install("sm_90")
    monkeypatch.setenv("PATH", "")
    assert tileiras.find_tileiras() == again


@pytest.mark.parametrize(
    "versions", [("13.4.92", "13.4.92", "13.2.1"), ("13.4.92", "13.4.92", None)], ids=["older", "missing"]
)
def test_packages_of_several_releases_are_passed_over(
    versions: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = dict(zip(tileiras._PACKAGES, versions, strict=True))

    def version(name: str) -> str:
        if known[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return str(known[name])

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "files", lambda name: pytest.fail("looked into a package"))
    assert tileiras._packaged() is None


def test_sizes_and_scalars_that_kernels_have_no_place_for() -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256}
    layer = MoEProblem(num_experts=4096, top_k=64, activation="gelu(beta=1.0, limit=2.0)", **sizes)
    assert claims.trtllm_reasons(layer) == ["requires num_experts <= 2048, got 4096", "requires top_k <= 32, got 64"]
    assert len(claims.scalar_reasons(layer)) == 2
    assert claims.scalar_reasons(MoEProblem(num_experts=4, top_k=2, activation="swigluoai", **sizes)) == []
