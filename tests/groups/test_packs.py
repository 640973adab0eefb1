"""Ranks whose packs differ: one plan on all of them, no error and nobody waiting."""

from __future__ import annotations

import functools
import os
import re
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from moereg.dispatch import select_backend
from moereg.errors import RanksMeasuredWarning
from moereg.layer.factory import make_kernel
from moereg.registry import REGISTRY, register_moe_backend
from moereg.selection.loader import load_backends
from tests.evidence.packs import rows_of, write_here
from tests.groups.cases import numbers_of, problem_of, share_of
from tests.groups.ranks import results_of, value_of
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


UNLIKE = ("other_choices", "one_pack", "given_choices")
"""Cases in which ranks would run other backends."""
ALIKE = {"same_choice": "challenger", "one_pack_that_confirms": "static"}
"""Cases in which other times choose the same backend."""


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return results_of(2, *UNLIKE, *ALIKE, module=__name__)


@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_whose_packs_choose_differently_use_none(two_ranks: list[dict[str, Any]], name: str) -> None:
    for result in two_ranks:
        found = value_of(result, name)
        assert (found["alone"], found["backend"], found["source"]) == ("static", "static", "priority")
        assert found["is_static"]
        *others, unused = found["notices"]
        assert sum("above every built-in backend's" in each for each in others) == 2  # Other notices stay.
        assert unused.startswith("the measured times are not used")
        (text,) = found["warned"]
        assert re.search("backend (challenger|static) on rank 0, (challenger|static) on rank 1", text)


@pytest.mark.parametrize("name", ALIKE)
def test_ranks_whose_packs_choose_alike_use_them(two_ranks: list[dict[str, Any]], name: str) -> None:
    first, second = (value_of(result, name) for result in two_ranks)
    assert first["backend"] == second["backend"] == ALIKE[name]
    assert first["fingerprint"] == second["fingerprint"]
    assert not first["warned"] + second["warned"]
