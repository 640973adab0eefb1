"""Choosing a backend: what is loaded, the machine at hand and the environment are read here, once a selection.

`moereg.selection.decide` does the rest, out of arguments alone.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import warnings
from collections.abc import Hashable, Iterator
from typing import Final

from moereg.errors import ArgumentError, EmulationWarning, UnsupportedProblemError, shown
from moereg.evidence.measured import read_tuning
from moereg.evidence.on_machine import ADMITTED, QUARANTINE
from moereg.platforms import Platform, read_platform
from moereg.registry import BackendCell
from moereg.selection.decide import decide, evaluate, requirement_reasons
from moereg.selection.loader import load_backends, missing_backend
from moereg.selection.request import Names, Request
from moereg.selection.result import Decision, Selection
from moereg.selection.ways_out import ways_out
from moereg.spec.problem import MoEProblem
from moereg.spec.reasons import Reason

__all__ = [
    "Decision",
    "Names",
    "Selection",
    "evaluate",
    "explain_backends",
    "machine_reasons",
    "select_backend",
]

logger: Final = logging.getLogger("moereg")


@functools.lru_cache(maxsize=1024)
def _log_counts(key: Hashable) -> Iterator[int]:
    """Counts from 0 for each of the latest keys: process-wide, since a model has many layers of one shape."""
    return itertools.count()


def explain_backends(
    problem: MoEProblem,
    platform: Platform | str | None = None,
    require: Names = None,
    prefer: Names = None,
    deny: Names = None,
) -> Selection:
    """As `select_backend`, errors too, but if nothing fits its selection has None for a `winner`.

    Args:
        problem, platform, require, prefer, deny: As in `select_backend`.

    Example:
        >>> problem = moereg.MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2)
        >>> selection = moereg.explain_backends(problem, platform="cuda:sm70", require="triton")
        >>> print(selection.winner)
        None
        >>> [reason.text for reason in selection.decisions[0].reasons]
        ['requires platform in (cuda:sm80+, rocm:gfx942), got cuda:sm70']
    """
    if not isinstance(problem, MoEProblem):
        raise ArgumentError(f"problem must be a MoEProblem, got {shown(problem)}; make one with MoEProblem(...)")
    cells = load_backends().cells  # First: plugins may bring the kind of machine that the platform's name says.
    platform = read_platform(platform)
    request = Request.resolve(
        problem.quant.name, require, prefer, deny, environ=os.environ, cells=cells, missing=missing_backend
    )
    return decide(
        problem,
        platform,
        request,
        cells,
        quarantine=QUARANTINE.read(),
        admitted=ADMITTED.read(),
        tuning=read_tuning(platform),
    )


def machine_reasons(cell: BackendCell, platform: Platform) -> list[Reason]:
    """Why a cell cannot run on a platform for any problem; a named platform is assumed to meet packages and probes."""
    return requirement_reasons(cell, cell.rule_for(platform), platform)


def select_backend(
    problem: MoEProblem,
    platform: Platform | str | None = None,
    require: Names = None,
    prefer: Names = None,
    deny: Names = None,
) -> Selection:
    """Chooses the backend for a problem. Imports no kernel library and initializes no device; thread-safe.

    Args:
        problem: The layer.
        platform: A value, a name such as `cuda:sm100`, or None for the machine at hand.
        require: One of these backends, tried in this order, or an error. MOEREG_REQUIRE means the same. In each of the
            three `*` in a name stands for any characters; `auto` in this one or the next is no wish.
        prefer: These go first. MOEREG_PREFER means the same.
        deny: None of these. MOEREG_DENY adds to it.

    Returns:
        The selection, with a winner.

    Raises:
        UnsupportedProblemError: Nothing fits; carries the selection and says every backend's reasons.
        ArgumentError: The problem or the platform is something else.
        RequestError: A name is both required and denied, or something is not a name.
        UnknownNameError: A backend, scheme or platform is not known.

    Example:
        >>> problem = moereg.MoEProblem(num_experts=8, hidden_size=2048, intermediate_size=768, top_k=2)
        >>> selection = moereg.select_backend(problem, platform="cuda:sm90", deny="torch")
        >>> selection.backend, selection.source
        ('triton', 'priority')
        >>> print(selection.table())
        problem   E8 H2048 I768 k2 bfloat16 unquantized silu
        platform  cuda:sm90
        chosen    triton ...
        >>> moereg.Selection.from_json(selection.to_json()).fingerprint == selection.fingerprint
        True
    """
    selection = explain_backends(problem, platform, require, prefer, deny)
    winner = selection.winner
    if winner is None:
        text = "\n".join((selection.refusal, *(f"way out: {way}" for way in ways_out(selection))))
        raise UnsupportedProblemError(text, selection)
    if winner.tier == "emulation":
        warnings.warn(
            f"only an emulation fits {problem} on {selection.platform}: {winner.backend}; "
            "its numbers are right, its speed is not the scheme's",
            EmulationWarning,
            stacklevel=2,
        )
    for notice in selection.request.notices:
        if next(_log_counts(notice)) == 0:
            logger.warning("%s", notice)
    key = (selection.problem, str(selection.platform), winner.backend)
    if next(_log_counts(key)) == 0:
        chosen, *others = (one.label for one in selection.decisions if one.accepted)
        new = [f"; {notice}" for notice in selection.notices if notice not in selection.request.notices]
        by = f"computes {winner.computes}, by {selection.source}"
        next_ = f"{', '.join(others) or 'none'}{''.join(new)}"
        logger.info("MoE %s on %s: %s, %s; next: %s", selection.problem, selection.platform, chosen, by, next_)
    return selection
