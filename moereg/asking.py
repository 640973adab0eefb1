"""Asks backends' own code while deciding: the predicate of each class, and probes of the machine.

Built-in code runs where it is called. Code of other distributions runs in a thread, where it can be given up: one that
does not return within the limit is a reason against its backend, for the rest of the process. One that is slow or
imports a library is logged once under the name of its backend. A call that holds Python's lock cannot be given up.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import inspect
import itertools
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Final

from moereg.candidates import Candidate
from moereg.errors import ArgumentError, described, shown, stops_the_process
from moereg.experts import Experts
from moereg.machine import PROBES, Probes, clause, private_copy, probe_name
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.process_state import libraries_since
from moereg.reasons import Reason
from moereg.registration import Probe
from moereg.registry import BUILTIN, BackendCell

__all__ = ["PREDICATE_SECONDS", "SECONDS_VARIABLE", "ask_predicates", "ask_probes", "own_reasons", "patience"]

PREDICATE_SECONDS: Final = 5.0
"""Seconds in which a predicate or probe of another distribution has to return. A predicate takes microseconds."""

SECONDS_VARIABLE: Final = "MOEREG_PREDICATE_SECONDS"
"""The environment variable that sets another limit."""

_SLOW_SECONDS: Final = 0.25
"""A call that takes longer is logged once."""

_SLICE_SECONDS: Final = 0.05
"""Whoever waits wakes up so often, and counts no more than that each time: while another thread holds Python's lock,
nobody can answer, nor wake up to see it."""

_PREDICATE: Final = "predicate"

_MOST_REASONS: Final = 100
"""The most that one predicate may give: it may be a generator without an end."""

_IN_HELPER: Final = contextvars.ContextVar("moereg_in_helper", default=False)

logger: Final = logging.getLogger("moereg")


def patience(environ: Mapping[str, str]) -> float:
    """The limit that an environment sets, in seconds.

    Raises:
        ArgumentError: It is no positive number.
    """
    text = environ.get(SECONDS_VARIABLE, "").strip()
    if not text:
        return PREDICATE_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise ArgumentError(
            f"{SECONDS_VARIABLE} must be a number of seconds above 0, got {shown(text)}; leave it out for "
            f"{PREDICATE_SECONDS:g}"
        )
    return seconds


def own_reasons(cell: BackendCell, problem: MoEProblem, platform: Platform) -> list[Reason]:
    """The reasons that a class's own predicate gives, asked right here."""
    reasons: list[Reason] = []
    try:
        texts: object = cell.experts.unsupported_reasons(problem=problem, platform=platform)
        if not isinstance(texts, Iterable) or isinstance(texts, (str, bytes, Mapping)):
            raise TypeError(f"it has to return a list of texts, got {shown(texts)}")
        for text in itertools.islice(texts, _MOST_REASONS):
            if not isinstance(text, str):
                raise TypeError(f"it has to return a list of texts, got one with {shown(text)}")
            reasons.append(Reason("backend", clause(text)))
    except BaseException as error:  # A predicate that raises is a bug of that backend, not of the dispatcher.
        if stops_the_process(error):
            raise
        reasons.append(Reason("predicate_error", f"its predicate raised {described(error)}"))
    return reasons


def ask_predicates(
    candidates: Mapping[int, Candidate],
    problem: MoEProblem,
    platform: Platform,
    probes: Probes = PROBES,
    seconds: float = PREDICATE_SECONDS,
) -> dict[int, Sequence[Reason]]:
    """Asks the predicates of other distributions, all in one thread; their probes have answers from then on.

    Args:
        candidates: By place.
        problem: The layer.
        platform: What it is to run on.
        probes: Keeps the answers of probes.
        seconds: Limit of each predicate and probe.

    Returns:
        The reasons of each by its place. Those of built-in backends are missing: `own_reasons` asks them.
    """
    questions: list[_Question] = []
    places: dict[int, int] = {}
    found: dict[int, Sequence[Reason]] = {}
    for place, candidate in candidates.items():
        cell = candidate.cell
        if cell.origin == BUILTIN:
            continue
        if platform.probed and candidate.rule is not None:
            questions += _of_probes(cell, platform, probes)
        if _inherits_predicate(cell.experts):
            found[place] = []
        else:
            places[place] = len(questions)
            ask = functools.partial(_reasons_of_stranger, cell, problem, platform)
            questions.append(_Question(cell, _PREDICATE, cell.experts, ask))
    answers = _HELPERS.ask(questions, seconds)
    return {**found, **{place: answers[number] for place, number in places.items()}}


def ask_probes(
    cell: BackendCell, platform: Platform, probes: Probes = PROBES, seconds: float = PREDICATE_SECONDS
) -> None:
    """Asks the probes of a cell of another distribution that have no answer yet; `probes` keeps the answers."""
    if cell.origin != BUILTIN and platform.probed and cell.rule_for(platform) is not None:
        _HELPERS.ask(_of_probes(cell, platform, probes), seconds)


def _inherits_predicate(experts: type[Experts]) -> bool:
    """Whether a class gives no reasons of its own: nothing of a stranger runs then."""
    found: object = inspect.getattr_static(experts, "unsupported_reasons", None)
    return found is vars(Experts)["unsupported_reasons"]


def _of_probes(cell: BackendCell, platform: Platform, probes: Probes) -> list[_Question]:
    return [
        _Question(
            cell,
            probe_name(probe),
            (probe, platform),
            functools.partial(_reasons_of, probe, platform, probes),
            functools.partial(probes.keep, probe, platform),
        )
        for probe in cell.probes
        if not probes.has_answer(probe, platform)
    ]


def _reasons_of_stranger(cell: BackendCell, problem: MoEProblem, platform: Platform) -> list[Reason]:
    return own_reasons(cell, private_copy(problem), private_copy(platform))


def _reasons_of(probe: Probe, platform: Platform, probes: Probes) -> list[Reason]:
    reason = probes.reason(probe, platform)
    return [] if reason is None else [reason]


@dataclasses.dataclass(frozen=True)
class _Question:
    """One call of a backend's own code.

    Attributes:
        cell: Whose code.
        what: What to call it: `predicate`, or a probe with its name.
        key: Remembered where it is given up.
        ask: The call.
        give_up: Takes the reason that stands for the answer where it is given up.
    """

    cell: BackendCell
    what: str
    key: Hashable
    ask: Callable[[], list[Reason]]
    give_up: Callable[[Reason], None] = lambda reason: None

    def __str__(self) -> str:
        return f"the {self.what} of backend {self.cell.name!r} of {self.cell.provider}"


class _GivenUp(SystemExit):
    """Raised in a thread that nobody waits for any more. A thread ends by SystemExit without a word."""


class _Batch:
    """Questions that one thread asks in turn, until it is left alone with one that does not return."""

    def __init__(self, questions: Sequence[_Question], note: Callable[[_Question, float, int], None]) -> None:
        self.questions = questions
        self.answers: list[list[Reason]] = []
        self.raised: BaseException | None = None
        self._note = note
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._is_left = False
        self._began = time.perf_counter()
        self._context = contextvars.copy_context()

    def run(self) -> bool:
        """Asks them, in the thread that calls; whether somebody waits until the end."""
        return self._context.run(self._ask_all)

    def _ask_all(self) -> bool:
        _IN_HELPER.set(True)
        self._began = time.perf_counter()
        for question in self.questions:
            num_modules = len(sys.modules)
            try:
                answer = question.ask()
            except BaseException as error:  # What stops the process is for the thread that waits.
                with self._lock:
                    self.raised = error
                break
            with self._lock:
                if self._is_left:
                    return False
                now = time.perf_counter()
                seconds, self._began = now - self._began, now
                self.answers.append(answer)
            self._note(question, seconds, num_modules)
        self._done.set()
        return True

    def wait(self, helper: threading.Thread, seconds: float) -> bool:
        """Waits until all questions are answered, or leaves their thread once one takes longer than the limit."""
        waited, num_answers = 0.0, 0
        slice_seconds = min(_SLICE_SECONDS, seconds / 8)
        while not self._done.wait(slice_seconds):
            with self._lock:
                waited += slice_seconds
                if num_answers != len(self.answers):
                    waited, num_answers = 0.0, len(self.answers)
                if waited >= seconds and self.raised is None and num_answers < len(self.questions):
                    self._is_left = True
                    # A loop in Python ends by this; a call that waits outside Python goes on. The thread needs the
                    # lock before it can end, so its number is not that of another one.
                    _raise_in(helper, _GivenUp)
                    return False
        return True


def _raise_in(thread: threading.Thread, kind: type[BaseException]) -> None:
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(kind))


class _Helper(threading.Thread):
    """A thread that asks one batch after the other, since starting one takes longer than most predicates."""

    def __init__(self) -> None:
        super().__init__(name="moereg-predicates", daemon=True)
        self.batches: queue.SimpleQueue[_Batch] = queue.SimpleQueue()

    def run(self) -> None:
        while self.batches.get().run():
            pass


class _Helpers:
    """Threads that ask, and what is remembered for the process. Thread-safe."""

    def __init__(self) -> None:
        self._idle: list[_Helper] = []
        self._given_up: dict[Hashable, Reason] = {}
        self._noted: set[tuple[Hashable, str]] = set()
        self._lock = threading.Lock()

    def ask(self, questions: Sequence[_Question], seconds: float) -> list[list[Reason]]:
        """The answers, in order; the reason why there is none where a question is given up.

        Raises:
            BaseException: Something stops the process.
        """
        if _IN_HELPER.get():  # A predicate that selects in turn has this thread already, and its limit.
            return [
                question.ask() if (reason := self._given_up.get(question.key)) is None else [reason]
                for question in questions
            ]
        answers: list[list[Reason]] = []
        while len(answers) < len(questions):
            rest = questions[len(answers) :]
            if reason := self._given_up.get(rest[0].key):
                answers.append([reason])
                continue
            live = list(itertools.takewhile(lambda question: question.key not in self._given_up, rest))
            batch, helper = _Batch(live, self._note), self._helper()
            helper.batches.put(batch)
            is_done = batch.wait(helper, seconds)
            if is_done:
                self._idle.append(helper)
            if batch.raised is not None:
                raise batch.raised
            answers += batch.answers
            if not is_done:
                answers.append([self._give_up(live[len(batch.answers)], seconds)])
        return answers

    def _helper(self) -> _Helper:
        while self._idle:
            with contextlib.suppress(IndexError):  # Another thread may be faster.
                helper = self._idle.pop()
                if helper.is_alive():  # None is after a fork.
                    return helper
        helper = _Helper()
        helper.start()
        return helper

    def _give_up(self, question: _Question, seconds: float) -> Reason:
        text = (
            f"its {question.what} did not return within {seconds:g} s, nor will it be asked again (backend "
            f"{question.cell.name!r} of {question.cell.provider}); report it to its authors or allow more seconds in "
            f"{SECONDS_VARIABLE}"
        )
        reason = Reason("predicate_error", text)
        with self._lock:
            is_new = question.key not in self._given_up
            self._given_up[question.key] = reason
        question.give_up(reason)
        if not is_new:  # Another thread waited for it too.
            return reason
        logger.warning(
            "%s did not return within %g s and is given up for this process; report it to its authors, do without it "
            "(--deny %s), or allow more seconds in %s",
            question,
            seconds,
            question.cell.name,
            SECONDS_VARIABLE,
        )
        return reason

    def _note(self, question: _Question, seconds: float, num_modules: int) -> None:
        """Logs what a call cost, once: its time, and the libraries that it imported."""
        if seconds >= _SLOW_SECONDS and self._is_new(question, "time"):
            # A probe runs once and may look at a machine; a predicate is asked for every layer.
            level = logging.WARNING if question.what == _PREDICATE else logging.INFO
            logger.log(level, "%s took %.2g s; report it to its authors if it is in your way", question, seconds)
        if len(sys.modules) > num_modules:
            libraries = sorted(libraries_since(num_modules, question.cell.experts.__module__))
            if libraries and self._is_new(question, "import"):
                logger.warning(
                    "%s imported %s; choosing has to import no library: read versions from platform.versions, and "
                    "import in permute_weights or apply",
                    question,
                    ", ".join(libraries),
                )

    def _is_new(self, question: _Question, what: str) -> bool:
        with self._lock:
            key = (question.key, what)
            is_new = key not in self._noted
            self._noted.add(key)
        return is_new


_HELPERS: Final = _Helpers()
