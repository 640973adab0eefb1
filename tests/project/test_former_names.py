"""Modules under the names that they had before they moved: installed plugins and exported programs import these."""

from __future__ import annotations

import importlib
import pickle

import pytest

from moereg._aliases import FORMER_NAMES
from moereg.spec.problem import MoEProblem
from tests.cli.command import run_python


@pytest.mark.parametrize(("former", "present"), FORMER_NAMES.items())
def test_both_names_are_one_module(former: str, present: str) -> None:
    module = importlib.import_module(present)
    assert importlib.import_module(former) is module
    assert module.__name__ == present
    assert module.__spec__ is not None
    assert module.__spec__.name == present


def test_submodules_and_names_of_a_former_package() -> None:
    code = (
        "from moereg.warm_up.ahead import __name__ as name; from moereg import weights, layer, selection, plugins;"
        "print(name, weights.PermutedWeights, layer.make_kernel, selection.Selection, plugins.PluginStatus)"
    )
    assert run_python("-c", code).stdout.startswith("moereg.layer.warm_up.ahead ")


def test_what_was_pickled_under_a_former_name_is_read() -> None:
    problem = MoEProblem(num_experts=4, hidden_size=8, intermediate_size=8, top_k=2)
    old = pickle.dumps(problem, protocol=0).replace(b"moereg.spec.problem", b"moereg.problem")
    assert b"moereg.problem" in old
    assert pickle.loads(old) == problem


def test_a_former_name_runs_as_a_module() -> None:
    done = run_python("-m", "moereg.python_process")
    assert done.returncode == 0, done.stderr


def test_a_name_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("moereg.no_such_module")
