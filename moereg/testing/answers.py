"""Answers to the requests of a report, in whichever process they are asked.

pytest leaves the messages of its assertions as they are: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moereg.ambient import AmbientState
from moereg.errors import BackendError, MoeregError, described, one_line
from moereg.testing.check import CellName, Check
from moereg.testing.listing import draw_check, list_suite, simpler_checks

__all__ = ["answer", "run_here"]


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request, of strings, numbers and lists.

    Args:
        request: `op` is `list`, `draw`, `simpler` or `run`, and the rest its arguments.

    Raises:
        MoeregError: Anything that the user can cure.
    """
    op = request["op"]
    if op == "list":
        return list_suite(request["name"], request["platform"], request["modules"]).to_dict()
    if op == "draw":
        cell = CellName.from_dict(request["cell"])
        check = draw_check(cell, request["seed"], request["number"], request["platform"], request["modules"])
        return {"checks": [] if check is None else [check.to_dict()]}
    check = Check.from_dict(request["check"])
    if op == "simpler":
        return {"checks": [simpler.to_dict() for simpler in simpler_checks(check)]}
    assert op == "run", op
    return run_here(check)


def run_here(check: Check) -> dict[str, Any]:
    """Runs a check in this process.

    Returns:
        `status` (`passed` or `failed`), `message`, and `spoiled`: whether the process should not run another check.
    """
    state = AmbientState.now()
    try:
        try:
            check.run()
        finally:
            changed = state.restore()
        assert not changed, f"it changed torch's state for everybody ({', '.join(changed)})"
    except AssertionError as error:
        cause = error.__cause__
        message = one_line(str(cause if isinstance(cause, BackendError) else error))
        message = message.partition("; do without it")[0]
        # After some errors of a device nothing runs in the process any more.
        return {"status": "failed", "message": message or "an assertion without a message", "spoiled": True}
    except MoeregError as error:
        return {"status": "failed", "message": described(error), "spoiled": True}
    return {"status": "passed", "message": "", "spoiled": False}
