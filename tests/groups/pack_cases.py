"""Layers over a group whose ranks have packs of their own; cases as in `cases`."""

from __future__ import annotations

import functools
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from moereg.dispatch import select_backend
from moereg.errors import RanksMeasuredWarning
from moereg.layer.factory import make_kernel
from moereg.registry import REGISTRY, register_moe_backend
from moereg.selection.loader import load_backends
from tests.evidence.packs import rows_of, write_here
from tests.groups.cases import numbers_of, problem_of, share_of
from tests.support.fakes import FakeExperts

NAMES = ("static", "challenger")


def by_own_packs(rank: int, size: int, logs: tuple[float | None, ...], is_given: bool = False) -> dict[str, Any]:
    """Makes a layer twice.

    Args:
        rank, size: Of the group.
        logs: What each rank's pack says of the second backend's time; None for a rank without one.
        is_given: Whether each rank selects by itself and gives its selection.
    """
    before = load_backends().cells
    for place, name in enumerate(NAMES):
        kind = type(name.title(), (FakeExperts,), {})
        register_moe_backend(name, 10**5 - place, ("unquantized",), ("cpu",))(kind)
    problem = problem_of()
    parts: dict[str, Any] = {"group": dist.group.WORLD, "prepare_finalize": "all_gather"}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"MOEREG_TUNING": ""}):
        own = share_of(numbers_of(problem), rank, size)
        alone = make_kernel(problem, own, **parts).selection
        log_ratio = logs[rank]
        if log_ratio is not None:
            path = Path(folder, "pack.json")
            write_here(path, alone, NAMES, rows_of({1: log_ratio}))
            os.environ["MOEREG_TUNING"] = str(path)
        if is_given:
            parts["selection"] = alone if log_ratio is None else select_backend(alone.problem)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            selection = make_kernel(problem, own, **parts).selection
    REGISTRY.restore(before)
    return {
        "alone": alone.backend,
        "backend": selection.backend,
        "source": selection.source,
        "fingerprint": selection.fingerprint,
        "is_static": selection.fingerprint == alone.fingerprint,
        "notices": selection.notices,
        "warned": [str(each.message) for each in warned if each.category is RanksMeasuredWarning],
    }


FASTER, MUCH_FASTER, SLOWER = -0.2, -0.4, 0.2
same_choice = functools.partial(by_own_packs, logs=(FASTER, MUCH_FASTER))
other_choices = functools.partial(by_own_packs, logs=(FASTER, SLOWER))
one_pack = functools.partial(by_own_packs, logs=(None, FASTER))
one_pack_that_confirms = functools.partial(by_own_packs, logs=(None, SLOWER))
given_choices = functools.partial(by_own_packs, logs=(FASTER, SLOWER), is_given=True)
