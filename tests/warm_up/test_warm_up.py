"""Warming up, as far as it needs no compiler: what is asked for, what is called, what is refused."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from moereg.author import ExpertInputs, PermutedWeights
from moereg.bench.inputs import random_weights
from moereg.cli import main
from moereg.dispatch import select_backend
from moereg.errors import ArgumentError, BackendError
from moereg.kernels.launch import cache
from moereg.layer.backend_calls import make_experts
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.layer.warm_up import ahead, check_token_counts, here, shipped
from moereg.layer.warm_up.ahead import Ahead
from moereg.layer.warm_up.dummy import DummyLayer, described, empty_weights, undescribed
from moereg.layer.warm_up.result import CompiledVariant, shown_counts
from moereg.layer.warm_up.worker import fan_out
from moereg.platforms import Platform
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from tests.layer.small_layers import kernel_of, problem_of
from tests.support.fakes import FakeExperts

PROBLEM = problem_of()
SM90 = Platform("cuda", "sm90")
SIZES = ("--experts", "8", "--hidden", "64", "--intermediate", "64", "--top-k", "2")


class NotingExperts(FakeExperts):
    called: list[int]

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        if len(inputs.hidden_states) == 13:
            raise RuntimeError("unlucky")
        self.called.append(len(inputs.hidden_states))
        out.zero_()


@pytest.fixture
def kernel() -> MoEKernel:
    NotingExperts.called = []
    return kernel_of(PROBLEM, NotingExperts, name="noting")


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for a device that kernels are compiled for."""
    monkeypatch.setattr(here, "_HOSTS", ())
    monkeypatch.setattr(here, "_DONE", {})


def test_numbers_of_tokens() -> None:
    assert check_token_counts(None)[-1] == 16384
    assert check_token_counts(None, 5) == (1, 2, 3, 4, 5)
    assert check_token_counts([64, 0, 1, 64]) == (1, 64)
    assert check_token_counts(range(1, 4), 2) == (1, 2, 3)
    assert here._powers_of_two(3, 17) == (3, 4, 8, 16, 17)
    assert [shown_counts(counts) for counts in ((1,), (7,), (1, 2, 3), (1, 3))] == [
        "1 token", "7 tokens", "1 to 3 tokens", "2 numbers of tokens from 1 to 3"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([1, -4], "a number of token_counts must be at least 0, got -4"),
        ([True], "must be an integer, got True"),
        ([2.0], "must be an integer, got 2.0"),
        ("64", "token_counts must be numbers of tokens such as"),
        (64, "token_counts must be numbers of tokens such as"),
        ([], "must have a number of at least 1"),
        ([0], "must have a number of at least 1"),
    ],
)
def test_numbers_of_tokens_that_are_none(kernel: MoEKernel, counts: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        kernel.warm_up(counts)


def test_nothing_is_compiled_or_run_on_a_cpu(kernel: MoEKernel) -> None:
    done = kernel.warm_up()
    assert NotingExperts.called == []
    assert (done.num_compiled, done.num_run, done.cache) == (0, 0, None)
    text = r"noting compiled nothing ahead for 1 to 16384 tokens, \d+\.\d s\nbackend 'noting' compiles nothing on cpu"
    assert re.fullmatch(text, str(done))
    with pytest.raises(ArgumentError, match="jobs must be at least 1, got 0"):
        kernel.warm_up(jobs=0)


@pytest.mark.usefixtures("on_a_device")
def test_what_cannot_be_compiled_ahead_runs(kernel: MoEKernel) -> None:
    done = kernel.warm_up([5, 1, 3])
    assert NotingExperts.called == [5, 3, 1]
    assert done.num_run == 3
    assert "so it ran instead" in done.notes[0]
    NotingExperts.called.clear()
    kernel.warm_up()
    assert NotingExperts.called == [2**n for n in range(14, -1, -1)]
    with pytest.raises(
        BackendError, match=r"backend 'noting' .* raised in NotingExperts\.apply: RuntimeError: unlucky"
    ):
        kernel.warm_up([13])


@pytest.mark.usefixtures("on_a_device")
def test_calls_load_what_was_compiled(kernel: MoEKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Ahead((CompiledVariant("kernel", 1.5, False), CompiledVariant("other", 0.1, True)), (1, 17), None, {})
    monkeypatch.setattr(here, "_ahead", lambda *arguments: found)
    done = kernel.warm_up()
    # One for each list of launches; the largest first.
    assert NotingExperts.called == [17, 1]
    assert str(done).startswith(
        "2 kernels of noting for 1 to 16384 tokens: 1 compiled, 1 were in the cache, 2 calls ma"
    )
    NotingExperts.called.clear()
    kernel.warm_up([4, 2])
    assert NotingExperts.called == [17, 4, 2, 1]  # Those that were named are recorded, too.
    NotingExperts.called.clear()
    kernel.warm_up(range(1, 200))
    assert NotingExperts.called == [17, 1]


@pytest.mark.usefixtures("on_a_device")
def test_a_process_compiles_for_a_kind_of_layer_once(
    kernel: MoEKernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    asked = []

    def ask(selection: Selection, counts: tuple[int, ...], jobs: int, **facts: Any) -> Ahead:
        asked.append((counts, facts["has_map"], facts["weights"]["per_expert"]["w13"]["shape"]))
        return Ahead((CompiledVariant("kernel", 1.0, False),), (1,), None, {})

    monkeypatch.setattr(here, "ask", ask)
    object.__setattr__(kernel.selection, "platform", SM90)
    counts = [1, 2]
    assert [kernel.warm_up(counts).num_compiled for _ in range(2)] == [1, 0]
    assert kernel.warm_up([1, 4]).num_compiled == 1
    assert [one[0] for one in asked] == [(1, 2), (1, 4)]
    monkeypatch.setenv("TRITON_CACHE_DIR", "/dev/null/no")
    with pytest.raises(
        ArgumentError, match=r"a folder that can be written, got /dev/null/no \(Not a directory\); set "
    ):
        kernel.warm_up([1, 2])


@pytest.mark.parametrize("activation_format", ["standard", "batched"])
@pytest.mark.parametrize("num_local_experts", [8, 4])
def test_dummy_calls_are_calls(activation_format: str, num_local_experts: int) -> None:
    problem = problem_of(activation_format=activation_format, num_local_experts=num_local_experts)
    weights = random_weights(problem, torch.Generator().manual_seed(0), torch.device("cpu"))
    kernel = make_kernel(problem, weights, select_backend(problem, platform="cpu"))
    for num_tokens in (1, 5):
        DummyLayer(kernel.experts, kernel.weights, kernel.expert_map).call(num_tokens)


@pytest.mark.parametrize(("quant", "num_kinds"), [("unquantized", 1), ("fp8_block128", 1), ("fp8_tensor_static", 2)])
def test_weights_that_a_checkpoint_may_have(quant: str, num_kinds: int) -> None:
    problem = MoEProblem(num_experts=4, hidden_size=128, intermediate_size=128, top_k=2, quant=quant)
    selection = select_backend(problem, platform="cuda:sm90", require="triton")
    assert selection.winner is not None
    kinds = list(empty_weights(make_experts(selection, selection.winner)))
    assert len(kinds) == num_kinds
    for kind in kinds:
        assert kind.device.type == "meta"
        found = described(kind)
        assert found is not None
        assert described(undescribed(json.loads(json.dumps(found)))) == found


def test_described_weights_keep_their_strides() -> None:
    whole = torch.empty(4, 8, 16, dtype=torch.uint8, device="meta")
    views = {"whole": whole, "turned": whole.mT, "cut": whole[..., :8], "one": whole[:1].expand(4, -1, -1)}
    weights = PermutedWeights("any", views, {"scale": torch.empty(2, 6, device="meta").mT})
    again = undescribed(json.loads(json.dumps(described(weights))))
    assert [each.stride() for each in again.flat()] == [each.stride() for each in weights.flat()]


def test_work_is_spread_over_forks() -> None:
    def work(number: int) -> int:
        if number == 3:
            os._exit(1)
        return number * number

    found = dict(fan_out(8, work, 3))
    assert found == {number: None if number == 3 else number * number for number in range(8)}
    assert dict(fan_out(0, work, 2)) == {}
    # Nobody is left to do the rest.
    assert dict(fan_out(3, lambda number: os._exit(1), 2)) == dict.fromkeys(range(3))


def children() -> set[str]:
    """This process's children, zombies too."""
    found = (path.read_text().split() for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"))
    return {child for each in found for child in each}


def test_a_caller_that_stops_listening_leaves_no_forks() -> None:
    before = children()
    answers = fan_out(100, lambda number: number, 2)
    next(answers)
    assert len(children() - before) == 2
    answers.close()
    assert children() == before


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one kernel for sm90, as `moereg compile` fills it."""
    monkeypatch.setattr(cache, "triton_key", lambda: "3.8.0-files")
    selection = select_backend(PROBLEM, platform=SM90, require="triton")
    made = tmp_path / "made"
    with shipped.use_folder(SM90, made) as place:
        assert cache.cache_folder() == made == place
        target = cache.Target.of("cuda", "sm90")
        assert target is not None
        shipped.note_layer(made, selection, (1, 2), cache.compiler_facts(target), 1)
        (made / "KEY").mkdir()
        paths = {"kernel.cubin": str(made / "KEY" / "kernel.cubin")}
        (made / "KEY" / "__grp__kernel.json").write_text(json.dumps({"child_paths": paths}))
    assert cache.cache_folder() != made
    return made


def test_a_folder_that_was_moved_serves_there(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = folder.rename(folder.parent / "there")
    assert main(["compile", "--check", "--cache", str(there), "--platform", "cuda:sm90"]) == 0
    assert capsys.readouterr().out == f"{there} serves cuda:sm90: 1 layers, 1 kernels\n"
    paths = json.loads((there / "KEY" / "__grp__kernel.json").read_text())["child_paths"]
    assert paths == {"kernel.cubin": str(there / "KEY" / "kernel.cubin")}
    # Again, where it is now; and as an engine says it.
    monkeypatch.setenv("MOEREG_KERNEL_CACHE", str(there))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    shipped.use_shipped_kernels(Platform("cpu"))
    assert os.environ["TRITON_CACHE_DIR"] == ""
    shipped.use_shipped_kernels(SM90)
    assert os.environ["TRITON_CACHE_DIR"] == str(there)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("triton", "3.6.0", "by Triton 3.6.0, and here is "),
        ("python", "cpython-39 on s390x", "by Triton for cpython-39 on s390x, and here is "),
        ("build", "0", "by another build of Triton "),
        ("settings", "TRITON_X=1", "by Triton with the settings TRITON_X=1, and here are of an empty environment"),
        ("options", "0", "by Triton with other options or another assembler"),
        ("kernels", "0", "by another version of moereg's kernels"),
    ],
    ids=["triton", "python", "build", "settings", "options", "kernels"],
)
def test_a_folder_of_another_compiler_is_refused(
    folder: Path, name: str, value: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note = json.loads((folder / cache.NOTE).read_text())
    note["layers"][0]["facts"][name] = value
    (folder / cache.NOTE).write_text(json.dumps(note))
    with pytest.raises(ArgumentError, match=f"were compiled {re.escape(text)}.*would compile them all again; compile"):
        shipped.check_shipped(folder, SM90)
    monkeypatch.setenv("MOEREG_KERNEL_CACHE", str(folder))
    with pytest.raises(ArgumentError, match="would compile them all again"):
        shipped.use_shipped_kernels(SM90)
    # Nothing is mixed into it either.
    code = main(["compile", *SIZES, "--tokens", "1", "--platform", "cuda:sm90", "--cache", str(folder)])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_folder_for_another_platform_is_refused(folder: Path) -> None:
    with pytest.raises(ArgumentError, match=r"are for cuda:sm90, and this is cuda:sm80; compile them with --platform"):
        shipped.check_shipped(folder, Platform("cuda", "sm80"))
    with pytest.raises(ArgumentError, match=r"kernels can be compiled for cuda:sm80, .*, got tpu"):
        shipped.check_shipped(folder, Platform("tpu"))


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}', '{"schema": 1, "root": 1, "layers": []}'])
def test_a_note_that_nobody_wrote(folder: Path, text: str) -> None:
    (folder / cache.NOTE).write_text(text)
    with pytest.raises(ArgumentError, match=r"must be what `moereg compile` writes, got .*; compile again"):
        shipped.check_shipped(folder, SM90)


def test_a_folder_without_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shipped.check_shipped(tmp_path, SM90) is None
    assert shipped.check_shipped(tmp_path / "absent", SM90) is None
    monkeypatch.setenv("MOEREG_KERNEL_CACHE", str(tmp_path))
    with pytest.raises(ArgumentError, match=r"MOEREG_KERNEL_CACHE must name a folder that `moereg compile --cache`"):
        shipped.use_shipped_kernels(SM90)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--platform", "cpu"), 2, "kernels can be compiled for cuda:sm80, "),
        (("--platform", "cuda:sm75"), 2, "kernels can be compiled for cuda:sm80, "),
        (("--platform", "cuda:sm90", "--tokens", "8-1"), 2, "--tokens takes ranges of at most 2**20 numbers that asc"),
        (("--platform", "cuda:sm90", "--tokens", "-3"), 2, "--tokens takes numbers of at least 1 and ranges such as"),
        (("--platform", "cuda:sm90", "--tokens", "1,,2"), 2, "--tokens takes numbers of at least 1 and ranges such a"),
        (("--platform", "cuda:sm90", "--cache", "/dev/null/no"), 2, "kernels are compiled into a folder that can be w"),
        (("--platform", "cuda:sm90", "--check"), 2, "--check needs --cache, the folder to check"),
        (("--platform", "cuda:sm90", "--check", "--cache", "/dev/null"), 2, "--check takes a folder that moereg compi"),
        (("--platform", "cuda:sm70", "--require", "triton"), 3, "no backend fits "),
    ],
)
def test_what_the_command_refuses(
    arguments: tuple[str, ...], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", *SIZES, *arguments]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"moereg: {text}")
    assert err.count("\n") == 1


def test_kernels_that_do_not_compile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failed = [{"name": "one", "error": "PassError: no\nroom"}, {"name": "two", "error": "x"}]
    good = {"name": "three", "seconds": 1.0, "was_there": False}
    answer = {"kernels": [good, *failed], "counts": [1], "fault": None}
    monkeypatch.setattr(ahead, "_run", lambda request, what, jobs: answer)
    assert main(["compile", *SIZES, "--platform", "cuda:sm90"]) == 1
    err = capsys.readouterr().err
    assert "one did not compile for cuda:sm90 (and 1 more): PassError: no room; do without it (--deny triton)" in err
    assert err.count("\n") == 1


def test_a_process_that_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert main(["compile", *SIZES, "--platform", "cuda:sm90", "--tokens", "1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("moereg: the process that compiles ended with 1: it said nothing; look at the memory")


def test_other_platforms_have_no_target_whatever_their_memory() -> None:
    assert cache.Target.of("xpu", "pvc", 2**17) is None
