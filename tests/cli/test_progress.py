"""Long waits: how they are announced and shown."""

import logging
from contextlib import nullcontext

from moereg.runtime.progress import duration, long_wait, waits_shown_by


def test_a_wait_is_announced_and_shown(caplog):
    shown = []

    def show(what):
        shown.append(what)
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
