from __future__ import annotations

import sys

from benches import which_backend
from moereg.registry import REGISTRY
from moereg.selection.loader import load_backends
from moereg.selection.ways_out import PLUGINS


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


def test_what_the_package_knows_of_plugins_is_what_they_register() -> None:
    assert PLUGINS.read_text() == which_backend.plugins_file(), "run python -m benches.report"
    assert '["moereg-vllm", "marlin", false, {"cuda:sm80+": ["fp8_block128",' in PLUGINS.read_text()
