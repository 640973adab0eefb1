from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

import moereg
from benches import which_backend
from moereg.evidence.ledger import LEDGER_NAME, Evidence, read_ledger
from moereg.platforms import Platform
from moereg.registry import REGISTRY
from moereg.selection.loader import load_backends


def test_every_wheel_of_the_tree_is_there_and_the_process_is_as_before() -> None:
    which_backend.world.cache_clear()
    # Another test may have imported the page of one backend, or a wheel.
    load_backends()
    before, modules = REGISTRY.cells, set(sys.modules)
    found, projects, words = which_backend.world()
    assert REGISTRY.cells == before
    assert {"moereg-aiter", "moereg-humming", "moereg-jax", "moereg-sonic", "moereg-vllm"} <= {
        project["name"] for project in projects.values()
    }
    assert not {name.partition(".")[0] for name in set(sys.modules) - modules} & set(projects)
    names = {cell.name for cell in found.cells}
    assert {"torch", "triton", "marlin", "sonic", "jax", "humming"} <= names
    assert set(words) == names
    assert all(words.values())


@pytest.fixture
def verified_on_sm90() -> which_backend.World:
    """The page's cells, `triton`'s with a record of sm90 whatever the ledger has."""
    real, _, _ = which_backend.world()
    found = which_backend.World(real.cells)
    record = next(iter(read_ledger(Path(moereg.__file__).parent / LEDGER_NAME)))
    evidence = Evidence((dataclasses.replace(record, platform="cuda:sm90"),), (), ())
    found.evidence.update(real.evidence)
    found.evidence.update({id(cell): evidence for cell in found.cells if cell.name == "triton"})
    return found


def test_a_tick_is_for_that_kind_of_machine_alone(verified_on_sm90: which_backend.World) -> None:
    found = verified_on_sm90
    marks = {}
    for name in ("cuda:sm90", "cuda:sm80"):
        platform = Platform.from_name(name)
        fits = found.fits("unquantized", platform, "standard")
        marks[name] = {fit.decision.backend: fit.text(platform) for fit in fits}
    assert marks["cuda:sm90"]["triton"] == "**triton** ✓"
    assert marks["cuda:sm80"]["triton"] == "**triton**"
    assert marks["cuda:sm90"]["vllm_triton"] == "vllm_triton ✓ (wheel)"


def test_an_emulation_is_chosen_after_every_kernel(verified_on_sm90: which_backend.World) -> None:
    found = verified_on_sm90
    sm90 = Platform.from_name("cuda:sm90")
    texts = [fit.text(sm90) for fit in found.fits("mxfp8", sm90, "standard")]
    assert texts[-1] == "**triton** ✓ (emulated)"
    assert len(texts) > 1
