"""`python -m moereg.cli._tune_session`: the fresh process of one session of `moereg tune`.

It reads lines of JSON from standard input: first the layer, then what to measure. For each it writes one line to
standard output with the answer, after lines that say whose code runs, since a crash leaves no other trace.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from moereg.cli._bench import build_layer, check_run_fits, layer_device, platform_at_hand
from moereg.cli._options import ProblemFlags, find_subject
from moereg.errors import MoeregError, TooLargeError
from moereg.plugins.modules import import_modules
from moereg.selection.result import Decision
from moereg.tuning.compare import Measurement
from moereg.tuning.inputs import num_calls
from moereg.tuning.points import Point
from moereg.tuning.session import Entrants, Key, LayerSession, entrants, key_of, row_values


class _Server:
    """Answers requests about one layer."""

    def __init__(self, answers: Any) -> None:
        self._answers: Final = answers
        self._session: LayerSession | None = None
        self._default: Decision | None = None
        self._platform: Any = None

    def tell(self, **values: Any) -> None:
        """Writes a line to the asking process, and ends this one if that has gone."""
        try:
            print(json.dumps(values), file=self._answers, flush=True)
        except OSError:
            os._exit(1)

    def start(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Makes the layer and its candidates."""
        import_modules(request["modules"])
        flags = ProblemFlags(**request["flags"])
        checkpoint = request["checkpoint"] and Path(request["checkpoint"])
        subject = find_subject(flags, checkpoint, request["layer"])
        self._platform = platform_at_hand("tune", flags.platform)
        found = entrants(subject.problem, self._platform, **flags.request()).only(map(tuple, request["cells"]))
        device = layer_device(found.selection)
        found, left_out = self._fitting(found, request["tokens"], device)
        self._default = found.default
        seed = request["seed"]
        self._session = LayerSession(
            found.selection,
            lambda: build_layer(subject, seed, device).weights,
            device,
            seed,
            watch=lambda decision, step: self.tell(runs=self._key(decision), step=step),
        )
        return {"left_out": [self._key(decision) for decision in left_out]}

    def _fitting(self, found: Entrants, tokens: int, device: Any) -> tuple[Entrants, list[Decision]]:
        """The candidates whose weights fit beside each other, the default first, and the others."""
        kept, left_out = list(found.decisions), list[Decision]()
        while True:
            try:
                check_run_fits(found.selection.problem, tokens, device, len(kept), (1 + len(kept)) * num_calls(tokens))
            except TooLargeError:
                if len(kept) < 3:
                    raise
                left_out.insert(0, kept.pop())
            else:
                return found.only(map(self._key, kept)), left_out

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answers one request: screen, point or clocks."""
        session = self._session
        assert session is not None
        found: dict[str, Any]
        if "screen" in request:
            behind, failed = session.screen(request["screen"])
            behind -= {self._default}
            for decision in behind:
                session.comparison.leave_out(decision)
            found = {"behind": [self._key(decision) for decision in behind]}
        elif "point" in request:
            rows = session.measure(Point(*request["point"]))
            failed = session.leave_out_failed(rows)
            found = {"rows": self._rows(rows, session)}
        else:
            return {"clocks": session.clocks(self._platform)}
        wrong = [
            {
                "cell": self._key(row.decision),
                "reason": f"{row.reason}, at {row.num_tokens} tokens",
                "is_broken": not row.lacks_memory,
            }
            for row in failed
        ]
        return {**found, "wrong": wrong, "stopped": str(session.comparison.stopped or "")}

    def _rows(self, measured: list[Measurement], session: LayerSession) -> list[dict[str, Any]]:
        default = next((row for row in measured if row.decision == self._default), None)
        values = {self._key(row.decision): row_values(row, default, session.comparison) for row in measured}
        return [{"cell": key, **found} for key, found in values.items() if found is not None]

    def _key(self, decision: Decision) -> Key:
        return key_of(decision, self._platform)


def main() -> None:
    """Answers until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Backends may print.
    server = _Server(answers)
    for number, line in enumerate(sys.stdin):
        try:
            found = server.answer(json.loads(line)) if number else server.start(json.loads(line))
        except MoeregError as error:
            server.tell(error=type(error).__name__, message=str(error))
        else:
            server.tell(answer=found)


if __name__ == "__main__":
    main()
