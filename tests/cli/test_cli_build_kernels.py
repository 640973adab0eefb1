"""`moereg build-kernels`, with a builder that compiles nothing."""

import json
import logging
from pathlib import Path

import pytest

from moereg.cli import main
from moereg.errors import ArgumentError
from moereg.experts import BuildPlan, KernelBuilder
from moereg.registry import register_moe_backend
from moereg.runtime.progress import duration, long_wait, waits_shown_by
from tests.support.fakes import FakeExperts


class _Builder(KernelBuilder):
    def __init__(self):
        self.asked = []
        self.jobs = []
        self.built = ()

    def plan(self, platform, schemes, dtypes, parts, folder):
        self.asked.append((str(platform), [scheme.name for scheme in schemes], dtypes, parts, folder))
        if platform.kind != "cuda":
            raise ArgumentError(f"these kernels are for cuda, got {platform}; name one with --platform cuda:sm90")
        names = tuple(name for name in ("one", "two") if name not in self.built)
        return BuildPlan(names, self.built, 3, 600.0, 2**30, (folder or Path("/somewhere")) / "kernels.so")

    def build(self, plan, jobs, advance):
        self.jobs.append(jobs)
        advance(3, 3)


@pytest.fixture
def builder(isolated_registry):
    found = _Builder()

    class Built(FakeExperts):
        @classmethod
        def kernel_builder(cls):
            return found

    register_moe_backend("built", 1, ("unquantized",), ("cuda:sm90",))(Built)
    return found


def _run(capsys, *argv):
    code = main(["build-kernels", *argv])
    return code, *capsys.readouterr()


def test_what_it_would_do(builder, capsys):
    code, out, err = _run(
        capsys, "built", "--platform", "cuda:sm90", "--quant", "fp8_block128", "--jobs", "4", "--dry-run"
    )
    assert (code, err) == (0, "")
    assert out == "3 steps, about 10 min of one core and 2 min with 4 jobs: one, two, into /somewhere/kernels.so\n"
    assert builder.asked == [("cuda:sm90", ["fp8_block128"], [], [], None)]
    assert builder.jobs == []


def test_it_builds(builder, capsys, tmp_path):
    argv = ["--dtype", "float16", "--part", "two", "--out", str(tmp_path), "--jobs", "2", "--json"]
    code, out, _ = _run(capsys, "built", "--platform", "cuda:sm90", *argv)
    assert code == 0
    found = json.loads(out)
    assert found.pop("seconds") >= 0
    assert found == {
        "schema": 1,
        "backend": "built",
        "platform": "cuda:sm90",
        "parts": ["one", "two"],
        "built": [],
        "num_steps": 3,
        "cpu_seconds": 600.0,
        "jobs": 2,
        "target": f"{tmp_path}/kernels.so",
    }
    assert builder.asked == [("cuda:sm90", [], ["float16"], ["two"], tmp_path)]
    assert builder.jobs == [2]


def test_what_is_built_already(builder, capsys):
    builder.built = ("one", "two")
    code, out, _ = _run(capsys, "built", "--platform", "cuda:sm90")
    assert (code, out) == (0, "/somewhere/kernels.so holds one, two already\n")
    assert builder.jobs == []


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["built", "--platform", "cpu"], "moereg: these kernels are for cuda, got cpu"),
        (["other", "--platform", "cuda:sm90"], "moereg: unknown backend 'other'"),
        (["built", "--platform", "cuda:sm90", "--quant", "fp9"], "moereg: unknown quant scheme 'fp9'"),
        (["built", "--jobs", "0"], "moereg: Invalid value for '--jobs'"),
    ],
    ids=["platform", "backend", "scheme", "jobs"],
)
def test_bad_input(builder, capsys, argv, text):
    code, out, err = _run(capsys, *argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(text)


def test_a_backend_with_nothing_to_build(builder, capsys):
    register_moe_backend("plain", 1, ("unquantized",), ("cpu",))(type("Plain", (FakeExperts,), {}))
    code, _, err = _run(capsys, "plain", "--platform", "cuda:sm90")
    assert code == 2
    assert err.startswith("moereg: backend 'plain' has no kernels that are built ahead of time; those that have: ")
    assert "built" in err


def test_a_wait_is_announced_and_shown(caplog):
    shown = []

    def show(what):
        shown.append(what)
        from contextlib import nullcontext

        return nullcontext(lambda done, total: shown.append((done, total)))

    with caplog.at_level(logging.INFO, "moereg"), waits_shown_by(show):
        with long_wait("compiling", 90, "once") as advance:
            assert caplog.messages == ["compiling takes about 90 s; once"]
            advance(1, 2)
        with long_wait("timing", 1, "once"):
            pass
    assert shown == ["compiling (about 90 s)", (1, 2), "timing (about 1 s)"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    with long_wait("alone", None, "once") as advance:
        advance(1, 1)


def test_durations_as_people_say_them():
    assert [duration(seconds) for seconds in (0.2, 45, 600, 31_500)] == ["1 s", "45 s", "10 min", "8.8 h"]
