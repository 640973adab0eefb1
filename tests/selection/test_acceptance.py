"""The promise of the design: a backend is one new file, and nothing else is edited."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import printed

NEW_BACKEND = '''
"""A backend that nobody else has heard of."""

from moereg.author import ExpertInputs, Experts, ExpertWeights, Facts, PermutedWeights, register_moe_backend


@register_moe_backend(name="new", priority=90, quant_schemes=("unquantized",), platforms=("cuda:sm100f",))
@register_moe_backend(name="new", priority=1, quant_schemes=("unquantized",), platforms=("cpu",), bias=False)
class NewExperts(Experts):
    """Adds nothing up: every token is answered with threes."""

    facts = Facts(
        activations=frozenset({"silu"}),
        activation_formats=frozenset({"standard"}),
        dtypes=frozenset({"bfloat16"}),
        placements=frozenset({"contiguous"}),
        bias=True,
        requires_multiple={"hidden_size": 8},
    )
    layouts = ("canonical",)

    def permute_weights(self, weights, problem):
        return PermutedWeights("canonical", weights.tensors())

    def workspace_shapes(self, problem, num_tokens):
        return (0,), (0,)

    def apply(self, out, inputs, weights, workspace13, workspace2):
        out.fill_(3.0)
'''
# This adds only the place of one file of moereg/backends/.
PRELUDE = """
import json, sys
import moereg, moereg.backends
moereg.backends.__path__.append(sys.argv[1])
problem = moereg.MoEProblem(num_experts=4, hidden_size=8, intermediate_size=8, top_k=2)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "new_moe.py").write_text(NEW_BACKEND)
    return tmp_path


def run(folder: Path, code: str) -> Any:
    return json.loads(printed("-c", PRELUDE + textwrap.dedent(code), str(folder)))


def test_it_is_listed_selected_and_run(folder: Path) -> None:
    found = run(
        folder,
        """
        import torch
        from moereg.selection.loader import load_backends
        from moereg.registry import BUILTIN
        weights = moereg.ExpertWeights(w13=torch.zeros(4, 16, 8).bfloat16(), w2=torch.zeros(4, 8, 8).bfloat16())
        selection = moereg.select_backend(problem, platform="cpu", require="new")
        kernel = moereg.make_kernel(problem, weights, selection=selection)
        out = kernel(torch.zeros(2, 8).bfloat16(), torch.ones(2, 2), torch.tensor([[0, 1], [2, 3]]))
        biased = moereg.MoEProblem(**{**problem.to_dict(), "has_bias": True})
        print(json.dumps({
            "names": load_backends().names,
            "origin": {cell.origin for cell in load_backends().by_name("new")} == {BUILTIN},
            "required": selection.backend,
            "out": out.tolist(),
            "by priority": moereg.select_backend(problem, platform="cpu").backend,
            "rejected": [
                decision.to_dict()["reasons"]
                for decision in moereg.select_backend(biased, platform="cpu").decisions if decision.backend == "new"
            ],
            "elsewhere": moereg.select_backend(biased, platform="cuda:sm103", prefer="new").winner.to_dict(),
        }))
        """,
    )
    assert set(found["names"]) > {"new", "torch"}
    assert found["origin"]
    assert found["required"] == "new"
    assert found["out"] == [[3.0] * 8] * 2
    assert found["by priority"] == "torch"
    bias = {"code": "bias", "text": "does not apply biases, got has_bias=True"}
    platform = {"code": "platform", "text": "requires platform in (cuda:sm100f), got cpu"}
    assert found["rejected"] == [[bias], [platform]] or found["rejected"] == [[platform], [bias]]
    elsewhere = found["elsewhere"]
    assert (elsewhere["backend"], elsewhere["experts"], elsewhere["rule"]) == ("new", "NewExperts", "cuda:sm100f")
