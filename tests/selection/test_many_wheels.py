"""Fifty wheels cost a choice no more than their own imports. Ratios, since other processes disturb what is absolute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.many_wheels import costs_beside, install_wheels


@pytest.mark.slow
def test_fifty_wheels_beside_one(tmp_path: Path) -> None:
    one = costs_beside(install_wheels(tmp_path / "one", 1), rounds=1)
    fifty = costs_beside(install_wheels(tmp_path / "fifty", 50), rounds=1)
    print(f"milliseconds of CPU, one wheel: {one}; fifty: {fifty}")
    # Measured alone: scan 3 and 17, first 70 and 145, later 0.17 and 0.7.
    assert fifty["scan"] < 20 * one["scan"]
    assert fifty["first"] < 6 * one["first"]
    assert fifty["later"] < 20 * one["later"]
