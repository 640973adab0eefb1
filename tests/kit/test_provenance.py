from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from moereg.evidence import provenance as module
from moereg.evidence.provenance import clocks, provenance
from moereg.platforms import Platform

H200 = Platform("cuda", "sm90", "NVIDIA H200", versions={"torch": "2.13.0", "triton": "3.8.0"}, probed=True)


def test_where_a_result_is_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEREG_COMMIT", "0123abc")
    found = provenance(H200, ("triton", "torch", "not-installed"))
    assert list(found) == ["device", "platform", "versions", "commit", "date"]
    assert (found["device"], found["platform"], found["commit"]) == ("NVIDIA H200", "cuda:sm90", "0123abc")
    assert found["versions"] == {"torch": "2.13.0", "triton": "3.8.0"}


def test_clocks_are_said_where_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpu_clocks", lambda: {"sm_mhz": 1755})
    assert clocks(H200) == {"clocks": {"sm_mhz": 1755}}
    assert clocks(Platform("cpu")) == {}
    monkeypatch.setattr(module, "gpu_clocks", dict)
    assert clocks(H200) == {}


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", "-C", str(folder), *settings, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory: a repository that has git run a program, which leaves a file; the file is returned."""
    trace, here = tmp_path / "it-ran", tmp_path / "hostile"
    here.mkdir()
    git(here, "init", "-q")
    program = here / "program"
    program.write_text(f"#!/bin/sh\ntouch {trace}\n")
    program.chmod(0o755)
    git(here, "add", "program")
    git(here, "commit", "-q", "-m", "one")
    git(here, "config", "core.fsmonitor", str(program))
    monkeypatch.chdir(here)
    monkeypatch.delenv("MOEREG_COMMIT", raising=False)
    return trace


def test_nothing_of_the_current_directory_runs(hostile: Path) -> None:
    here = git(Path.cwd(), "rev-parse", "HEAD")
    assert provenance(H200, ())["commit"] != here
    assert not hostile.exists()
    subprocess.run(["git", "status"], capture_output=True, check=True)
    assert hostile.exists()  # The effect that it would have had.


def test_the_commit_is_that_of_the_checkout(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    root.mkdir()
    assert module._commit(root) == ""
    git(root, "init", "-q")
    assert module._commit(root) == ""
    git(root, "commit", "-q", "--allow-empty", "-m", "one")
    first = git(root, "rev-parse", "HEAD")
    assert module._commit(root) == first
    git(root, "pack-refs", "--all")
    assert module._commit(root) == first
    git(root, "worktree", "add", "-q", str(tmp_path / "linked"), "-b", "other")
    git(tmp_path / "linked", "commit", "-q", "--allow-empty", "-m", "two")
    assert module._commit(tmp_path / "linked") == git(root, "rev-parse", "other") != first
    git(root, "checkout", "-q", "--detach", first)
    assert module._commit(root) == first
    (root / ".git" / "HEAD").write_text("ref: ../../secret")
    (tmp_path / "secret").write_text("not a commit")
    assert module._commit(root) == ""
    (root / ".git" / "HEAD").write_bytes(b"\xff")
    assert module._commit(root) == ""
