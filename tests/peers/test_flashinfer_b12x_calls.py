"""`flashinfer_b12x` beside the package: what its launcher is handed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from moereg.author import ExpertInputs, MoEProblem, PermutedWeights
from moereg.backends import flashinfer_moe as page
from moereg.platforms import Platform
from moereg.testing.interpreter import patch_interpreter
from tests.support.tensors import unaligned

pytestmark = pytest.mark.peers

patch_interpreter()

T, E, H, I, K = 5, 4, 256, 256, 2  # noqa: E741


def test_b12x_writes_whole_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    import flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_dispatch as library

    problem = MoEProblem(num_experts=E, hidden_size=H, intermediate_size=I, top_k=K, quant="nvfp4_w4a16")
    signature = inspect.signature(library.launch_sm120_moe)

    def launch(**given: Any) -> None:
        out = signature.bind(**given).arguments["scatter_output"]
        assert out.data_ptr() % 16 == 0
        out.fill_(3.0)

    monkeypatch.setattr(library, "launch_sm120_moe", launch)
    experts = page.FlashInferB12xExperts(problem, Platform.from_name("cuda:sm120"))
    names = ("w13", "w13_scale", "w13_global_scale", "w2", "w2_scale", "w2_global_scale", "workspace")
    weights = PermutedWeights(experts.layouts[0], {}, dict.fromkeys(names, torch.zeros(1)))
    first, second = (torch.empty(shape, dtype=torch.bfloat16) for shape in experts.workspace_shapes(problem, T))
    ids = torch.arange(T * K, dtype=torch.int32).view(T, K) % E
    inputs = ExpertInputs(torch.randn(T, H).bfloat16(), torch.rand(T, K), ids)
    out = unaligned(T, H)
    experts.apply(out=out, inputs=inputs, weights=weights, workspace13=first, workspace2=second)
    assert bool((out == 3.0).all())
