"""`moereg tune`: what is measured, kept, left out and chosen, and that a run goes on where another ended.

Most tests answer a session's requests in this process, on fakes whose times come from a model. The last ones start real
processes.
"""

from __future__ import annotations

import json
import math
import pickle
import random
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moereg.bench.compare import IN_TURNS
from moereg.bench.points import GUARD, Point
from moereg.bench.timing import ROUNDS, Timing
from moereg.cli import _tuner
from moereg.cli._options import ProblemFlags
from moereg.cli._output import Result
from moereg.cli._tune import parse_routings, parse_tokens, tune_layer
from moereg.cli._tuner import Question
from moereg.dispatch import explain_backends
from moereg.errors import BackendError, MoeregError
from moereg.evidence.on_machine import ADMITTED, QUARANTINE
from moereg.evidence.pack import read_pack
from moereg.registry import register_moe_backend
from moereg.spec.problem import MoEProblem
from moereg.testing.check import Outcome
from moereg.testing.worker import Answer
from tests.checkpoints.tiny_families import FAMILIES
from tests.cli.command import ROOT, Call, run_module
from tests.support.fakes import FakeExperts, WrongExperts

SIZES = "--experts 4 --hidden 32 --intermediate 16 --top-k 2"
FLAGS = ProblemFlags(experts=4, hidden=32, intermediate=16, top_k=2, require=["fake_*"])
Cost = Callable[[int], float]


@pytest.fixture(autouse=True)
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOEREG_QUARANTINE", str(tmp_path / "quarantine.json"))
    monkeypatch.setenv("MOEREG_TUNING", str(tmp_path / "pack.json"))
    return tmp_path / "pack.json"


class World:
    """Fakes, the model of their times, and processes that measure them here.

    Attributes:
        costs: Microseconds by backend and number of tokens.
        noise: Standard deviation of the logarithm of a sample, beside what all have in a round.
        asked: What processes were asked to do, with arguments, in order.
        ends: What happens instead of the nth answer on a point, counted over all processes.
        clocks: Clocks that are read, in turn; the last one from then on.
        num_processes: How many have been begun.
    """

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = {}
        self.noise = 0.001
        self.asked: list[tuple[str, Any]] = []
        self.ends: dict[int, Answer | BaseException] = {}
        self.clocks = [1000]
        self.num_points = 0
        self.num_processes = 0
        self._draw = random.Random(0)

    def add(self, name: str, cost: Cost, base: type[FakeExperts] = FakeExperts) -> None:
        """Registers a backend; those added earlier have the higher priority."""
        priority = 500 - len(self.costs)
        register_moe_backend(name, priority, ("unquantized",), ("cpu",))(type(name.title(), (base,), {}))
        self.costs[name] = cost

    def time_runs(self, runs: Mapping[Any, Sequence[Any]], device: torch.device, rounds: int, seconds: float) -> Any:
        """In place of `moereg.bench.timing.time_runs`."""
        samples: dict[Any, list[float]] = {key: [] for key in runs}
        for number in range(rounds):
            shared = self._draw.gauss(0, 1)  # Whatever slows the machine slows all.
            for key, variants in runs.items():
                num_tokens = len(variants[number % len(variants)].args[0])
                cost = self.costs[key.backend](num_tokens)
                samples[key].append(cost * math.exp(shared + self._draw.gauss(0, self.noise)))
        return {key: Timing(tuple(own)) for key, own in samples.items()}

    def ask(self, function: Any, *arguments: Any, fresh: bool = False, **limits: Any) -> Any:
        """In place of `Worker.ask`, in this process; what is asked and answered is pickled as there."""
        name, arguments = function.__name__, pickle.loads(pickle.dumps(arguments))
        self.asked.append((name, arguments))
        self.num_processes += fresh
        if name == "clocks":
            return Answer({"sm_mhz": self.clocks.pop(0) if len(self.clocks) > 1 else self.clocks[0]})
        if name == "measure" and arguments[-1] == ROUNDS:
            self.num_points += 1
            if (end := self.ends.pop(self.num_points, None)) is not None:
                if isinstance(end, BaseException):
                    raise end
                return end
        return Answer(pickle.loads(pickle.dumps(function(lambda step: None, *arguments))))

    def stop(self) -> None:
        """In place of `Worker.stop`."""
        _tuner._SESSIONS.clear()

    @property
    def points(self) -> list[Point]:
        """The points that were asked for, without those of screening."""
        return [arguments[1] for name, arguments in self.asked if name == "measure" and arguments[2] == ROUNDS]

    def tune(self, most: int = 16, **keywords: Any) -> Result:
        question = Question(FLAGS, parse_tokens(str(most)))
        return tune_layer(question, start=lambda: self, **keywords)  # type: ignore[arg-type, return-value]


def crashed(message: str, step: Any) -> Answer:
    return Answer(outcome=Outcome("crashed", message), step=step)


@pytest.fixture
def world(isolated_registry: object, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr("moereg.bench.compare.time_runs", made.time_runs)
    return made


def selected(result: Result) -> str | None:
    return result.values["selected"] and str(result.values["selected"]["backend"])


def problem_of(result: Result) -> MoEProblem:
    return MoEProblem.from_dict(result.values["problem"])


def flat(cost: float) -> Cost:
    return lambda tokens: cost


def timed(path: Path) -> set[str]:
    """Backends that have times."""
    pack = read_pack(path, is_own=True)
    return {pack.cells[row.cell].backend for layer in pack.layers for row in layer.rows}


def test_what_is_faster_in_both_sessions_is_what_layers_get(world: World, pack: Path) -> None:
    world.add("fake_default", flat(100))
    world.add("fake_fast", flat(80))
    result = world.tune()
    assert (selected(result), result.code) == ("fake_fast", 0)
    assert [one["backend"] for one in result.values["winners"]] == ["fake_fast"] * 5
    assert all(one["change"] == pytest.approx(-0.2, abs=0.01) for one in result.values["winners"])
    assert world.num_processes == 2
    found = read_pack(pack, is_own=True)
    assert len({session.process for session in found.sessions}) == 2
    for number in (1, 2):
        own = {Point(row.routing, row.tokens) for row in found.layers[0].rows if row.session == number}
        assert own == {Point(routing, at) for routing in ("uniform", "zipf", GUARD) for at in (1, 2, 4, 8, 16)}
    assert all(row.rounds == 48 and 0 <= row.error <= 1 for row in found.layers[0].rows)
    selection = explain_backends(problem_of(result), require="fake_*")
    assert (selection.backend, selection.source) == ("fake_fast", "measured")
    assert "fake_fast 20 % less than fake_default" in " ".join(selection.notices)


@pytest.mark.parametrize("cost", [98.5, 100.0, 103.0])
def test_what_is_not_three_percent_faster_changes_nothing(world: World, cost: float) -> None:
    world.add("fake_default", flat(100))
    world.add("fake_near", flat(cost))
    assert selected(world.tune(4)) == "fake_default"


def test_what_is_far_behind_everywhere_is_left_out(world: World, pack: Path) -> None:
    world.add("fake_default", flat(100))
    world.add("fake_behind", flat(140))
    world.add("fake_late", lambda tokens: 200 if tokens < 16 else 90)
    result = world.tune()
    assert timed(pack) == {"fake_default", "fake_late"}
    assert {one["backend"]: one["reason"] for one in result.values["left_out"]} == {
        "fake_behind": "more than 1.3x slower than the fastest at every number of tokens"
    }
    world.asked.clear()
    assert world.tune().code == 0
    assert not world.asked, "nothing is left to measure"


def test_the_default_is_measured_however_far_behind_it_is(world: World, pack: Path) -> None:
    world.add("fake_default", flat(300))
    world.add("fake_fast", flat(100))
    assert selected(world.tune(2)) == "fake_fast"
    assert timed(pack) == {"fake_default", "fake_fast"}


def test_where_the_winner_changes_numbers_of_tokens_between_are_measured(world: World) -> None:
    world.add("fake_default", flat(100))
    world.add("fake_large", lambda tokens: 70 if tokens >= 19 else 110)
    result = world.tune(32)
    counts = [one["tokens"] for one in result.values["winners"]]
    assert counts == [1, 2, 4, 8, 16, 19, 23, 32]
    assert [one["backend"] for one in result.values["winners"]] == ["fake_default"] * 5 + ["fake_large"] * 3
    assert Point(GUARD, 23) not in world.points


class Killed(BaseException):
    """The command was ended."""


@pytest.mark.parametrize("at", [1, 2, 7, 11, 12, 19])
def test_a_run_that_was_ended_goes_on_where_it_was(world: World, pack: Path, at: int) -> None:
    world.add("fake_default", flat(100))
    world.add("fake_large", lambda tokens: 70 if tokens >= 3 else 110)
    world.ends[at] = Killed()
    with pytest.raises(Killed):
        world.tune(4)
    before = read_pack(pack, is_own=True).layers[0].rows if at > 1 else ()
    done = world.points[:-1]
    assert len({(row.session, row.routing, row.tokens) for row in before}) == at - 1 == len(done)
    world.asked.clear()
    assert selected(world.tune(4)) == "fake_large"
    rows = read_pack(pack, is_own=True).layers[0].rows
    assert rows[: len(before)] == before
    assert len(done) + len(world.points) == len({(row.session, row.routing, row.tokens) for row in rows})


def test_time_that_is_over_leaves_what_was_measured(world: World, pack: Path) -> None:
    world.add("fake_default", flat(100))
    world.ends[4] = TimeoutError()
    result = world.tune()
    assert (result.code, result.values["unfinished"]) == (4, "no time is left")
    assert len(read_pack(pack, is_own=True).layers[0].rows) == 3
    assert world.tune().code == 0


def test_wrong_numbers_are_quarantined_and_not_timed(
    world: World, pack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.add("fake_default", flat(100))
    world.add("fake_wrong", flat(10), WrongExperts)
    result = world.tune(2)
    assert (result.code, selected(result)) == (1, "fake_default")
    result.show()
    assert "WRONG: fake_wrong (Fake_Wrong): wrong numbers: error" in " ".join(capsys.readouterr().out.split())
    assert timed(pack) == {"fake_default"}
    (record,) = QUARANTINE.read().records
    assert record.backend == "fake_wrong"
    assert record.failure.startswith("moereg tune: wrong numbers: error ")
    rejected = {one.backend: one for one in explain_backends(problem_of(result)).decisions}["fake_wrong"]
    assert [reason.code for reason in rejected.reasons] == ["quarantined"]
    world.asked.clear()
    again = world.tune(2)
    assert (again.code, world.asked) == (0, [])
    assert [one["backend"] for one in again.values["candidates"]] == ["fake_default"]


def test_a_wrong_default_leaves_its_place_to_the_next(world: World, pack: Path) -> None:
    world.add("fake_wrong", flat(10), WrongExperts)
    world.add("fake_second", flat(100))
    world.add("fake_fast", flat(50))
    result = world.tune(2)
    assert (result.code, selected(result)) == (1, "fake_fast")
    found = read_pack(pack, is_own=True)
    assert [found.cells[layer.default].backend for layer in found.layers if layer.rows] == ["fake_second"]


def test_what_was_right_wherever_it_was_timed_is_admitted(
    world: World, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEREG_ADMISSION", str(pack.with_name("admitted.json")))
    world.add("fake_right", lambda tokens: 100.0 + tokens)
    world.add("fake_wrong", lambda tokens: 50.0, WrongExperts)
    world.tune()
    (record,) = ADMITTED.read().records
    assert (record.backend, record.bound) == ("fake_right", 1.0)
    assert 0 <= record.error <= 1


@pytest.mark.parametrize("end", ["the process died of SIGSEGV", "no end after 300 s in apply of mine.py:31"])
def test_a_crash_or_a_hang_is_its_candidates_and_the_others_are_measured(world: World, pack: Path, end: str) -> None:
    world.add("fake_default", flat(100))
    world.add("fake_crash", flat(90))
    world.add("fake_fast", flat(50))
    key = ("fake_crash", "Fake_Crash", "cpu", "unquantized", "")
    world.ends[5] = crashed(end, (key, "apply"))
    result = world.tune(2)
    assert (result.code, selected(result)) == (1, "fake_fast")
    names = dict(zip(("backend", "experts", "rule", "computes", "facts"), key, strict=True))
    assert result.values["wrong"] == [{**names, "reason": f"{end} (apply)"}]
    assert [record.backend for record in QUARANTINE.read().records] == ["fake_crash"]
    assert world.num_processes == 3
    first = [session for session in read_pack(pack, is_own=True).sessions if session.number == 1]
    assert [session.process.count("+") for session in first] == [1], "two processes measured the first session"


def test_a_crash_of_nobody_in_particular_is_tried_once_more_and_blames_nobody(world: World) -> None:
    world.add("fake_default", flat(100))
    world.add("fake_other", flat(90))
    key = ("fake_other", "Fake_Other", "cpu", "unquantized", "")
    world.ends[3] = crashed("the process died of SIGSEGV", (key, IN_TURNS))
    assert world.tune(2).code == 0
    world.ends |= {world.num_points + more: crashed("no end after 300 s", None) for more in (1, 2)}
    with pytest.raises(BackendError, match="a session ended twice while several of fake_default, fake_other may have"):
        world.tune(2, refresh=True)
    assert not QUARANTINE.read().records


@pytest.mark.parametrize(
    ("clocks", "code", "sessions"),
    [([1000, 1090, 1000], 0, 2), ([1000, 1200, 1000, 1000], 0, 2), ([1000, 1200, 1000, 880, 1000], 4, 0)],
)
def test_a_session_whose_clock_moved_is_measured_once_more(
    world: World, pack: Path, clocks: list[int], code: int, sessions: int
) -> None:
    world.add("fake_default", flat(100))
    world.clocks = clocks
    result = world.tune(2)
    assert result.code == code
    assert len(read_pack(pack, is_own=True).sessions) == sessions
    if code:
        assert "from 1000 to 880 MHz, more than 10%" in result.values["unfinished"]
        assert not read_pack(pack, is_own=True).layers[0].rows


def test_a_new_candidate_is_measured_beside_all_others(world: World, pack: Path) -> None:
    world.add("fake_default", flat(100))
    assert selected(world.tune(2)) == "fake_default"
    world.add("fake_new", flat(50))
    assert selected(world.tune(2)) == "fake_new"
    assert timed(pack) == {"fake_default", "fake_new"}


def test_refreshing_measures_again(world: World, pack: Path) -> None:
    world.add("fake_default", flat(100))
    world.add("fake_other", flat(50))
    world.tune(2)
    before = read_pack(pack, is_own=True)
    world.costs["fake_other"] = flat(120)
    assert selected(world.tune(2)) == "fake_other"
    assert selected(world.tune(2, refresh=True)) == "fake_default"
    after = read_pack(pack, is_own=True)
    assert len(after.layers[0].rows) == len(before.layers[0].rows)
    assert not {one.process for one in after.sessions} & {one.process for one in before.sessions}


class SharingExperts(FakeExperts):
    shared_layouts = ("canonical",)


def test_what_shares_the_layout_runs_where_it_wins(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.add("fake_default", flat(100), SharingExperts)
    world.add("fake_large", lambda tokens: 80 if tokens >= 16 else 110, SharingExperts)
    result = world.tune(32)
    plan = [(15, "fake_default"), (32, "fake_large"), (None, "fake_default")]
    assert [(most, key["backend"]) for most, key in result.values["plan"]] == plan
    selection = explain_backends(problem_of(result), require="fake_*")
    assert [(most, one.backend) for most, one in selection.plan] == plan
    result.show()
    assert "calls of up to 32 tokens get fake_large (Fake_Large)\n" in capsys.readouterr().out


def test_a_histogram_weighs_the_choice(world: World, pack: Path) -> None:
    world.add("fake_default", flat(100))
    world.add("fake_large", lambda tokens: 80 if tokens >= 16 else 110)
    result = world.tune(32, calls={20: 3, 32: 5})
    assert selected(result) == "fake_large"
    assert explain_backends(problem_of(result), require="fake_*").backend == "fake_large"
    assert selected(world.tune(32, calls={1: 900, 32: 5})) == selected(world.tune(32)) == "fake_default"
    with pytest.raises(MoeregError, match="--histogram needs calls of 1 to 32 tokens"):
        world.tune(32, calls={64: 5})


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"a": 1}', '{"0": 1}', '{"-4": 1}', '{"1.5": 1}', '{"1": -1}', '{"1": 1.5}', "{}", '{"1": 0}']
)
def test_bad_histograms(tmp_path: Path, call: Call, text: str) -> None:
    (tmp_path / "calls.json").write_text(text)
    code, out, err = call(f"tune {SIZES} --dry-run --histogram {tmp_path / 'calls.json'}")
    assert (code, out) == (2, "")
    assert err.startswith("moereg: --histogram takes calls by tokens, such as")


def test_a_dry_run_measures_nothing(world: World, pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world.add("fake_default", flat(100))
    result = world.tune(4, dry_run=True)
    result.show()
    assert (result.code, world.asked) == (0, [])
    text = " ".join(capsys.readouterr().out.split())
    assert "would measure: fake_default (Fake_Default)" in text
    assert "at 3 numbers of tokens up to 4 and more where the winner changes, in 2 sessions: 18 points" in text


@pytest.mark.parametrize(
    ("text", "counts"), [("1", (1,)), ("8", (1, 2, 4, 8)), ("4096,1,16", (1, 16, 4096)), ("6", (1, 2, 4, 6))]
)
def test_one_number_of_tokens_means_powers_of_two_up_to_it(text: str, counts: tuple[int, ...]) -> None:
    assert parse_tokens(text) == counts


@pytest.mark.parametrize("text", ["", "one_set", "uniform,one_set", "unifrom"])
def test_only_routings_that_somebody_asks_for_decide(text: str) -> None:
    assert parse_routings("zipf, uniform") == ("zipf", "uniform")
    with pytest.raises(MoeregError, match=r"one_set is always measured|unknown routing 'unifrom'"):
        parse_routings(text)


def test_a_layer_that_nothing_fits_is_its_own_code(call: Call) -> None:
    code, out, _ = call(f"tune {SIZES} --require triton --tokens 1")
    assert code == 3
    assert "nothing fits" in out


def test_packs_that_are_turned_off_cannot_be_written(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEREG_TUNING", "")
    code, out, err = call(f"tune {SIZES} --tokens 1")
    assert (code, out) == (2, "")
    assert "MOEREG_TUNING must name a file" in err


BACKENDS = """
    import os

    from moereg.author import register_moe_backend
    from tests.support.fakes import FakeExperts, WrongExperts


    class CrashExperts(FakeExperts):
        def compute(self, out, inputs, weights):
            os.abort()


    def register(name, base, priority):
        kind = type(f"Mine{base.__name__}", (base,), {"__module__": __name__})
        register_moe_backend(name, priority, ("unquantized",), ("cpu",))(kind)


    register("mine_right", FakeExperts, 900)
    register("mine_other", FakeExperts, 800)
    register("mine_wrong", WrongExperts, 700)
    register("mine_crash", CrashExperts, 600)
"""


@pytest.mark.slow
def test_two_real_sessions_and_what_selection_reads_of_them(tmp_path: Path, pack: Path) -> None:
    file = tmp_path / "alone" / "mine.py"  # JSON files beside a module count as its code, and so would the pack.
    file.parent.mkdir()
    file.write_text(textwrap.dedent(BACKENDS), encoding="utf-8")
    ran = run_module(f"tune {file} {SIZES} --tokens 1 --require mine_*", PYTHONPATH=str(ROOT))
    assert ran.returncode == 1, ran.stderr
    text = " ".join(ran.stdout.split())
    assert "WRONG: mine_wrong (MineWrongExperts): wrong numbers: error" in text
    assert "WRONG: mine_crash (MineCrashExperts): the process died of SIGABRT in " in text
    found = read_pack(pack, is_own=True)
    (layer,) = [layer for layer in found.layers if layer.rows]
    assert {found.cells[row.cell].backend for row in layer.rows} <= {"mine_right", "mine_other"}
    assert len({row.session for row in layer.rows}) == 2
    explained = run_module(f"explain {file} {SIZES} --require mine_*", PYTHONPATH=str(ROOT))
    assert explained.returncode == 0, explained.stderr
    # Beside a busy neighbor a session may leave the other one out, and a choice takes both in two sessions.
    assert re.search(r"measured 2\d{3}|pack unused: ", " ".join(explained.stdout.split()))
    assert "quarantined" in explained.stdout


@pytest.mark.slow
def test_a_layer_of_a_checkpoint_on_disk_is_tuned(tmp_path: Path, pack: Path) -> None:
    FAMILIES["qwen3_moe"].make().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    calls = tmp_path / "calls.json"
    calls.write_text('{"1": 90, "2": 10}', encoding="utf-8")
    options = f"--checkpoint {tmp_path / 'model'}"
    ran = run_module(f"tune {options} --tokens 2 --histogram {calls} --json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["problem"]["num_experts"] == FAMILIES["qwen3_moe"].make().config.num_experts
    (layer,) = read_pack(pack, is_own=True).layers
    assert {(row.session, row.tokens) for row in layer.rows} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert layer.calls == ((1, 90), (2, 10))
