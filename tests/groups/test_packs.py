"""Ranks whose packs differ: one plan on all of them, no error and nobody waiting."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.groups.ranks import results_of, value_of

UNLIKE = ("other_choices", "one_pack", "given_choices")
"""Cases in which ranks would run other backends."""
ALIKE = {"same_choice": "challenger", "one_pack_that_confirms": "static"}
"""Cases in which other times choose the same backend."""


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return results_of(2, *UNLIKE, *ALIKE, module="tests.groups.pack_cases")


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
