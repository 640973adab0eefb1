"""Captured layers beside the eager calls that share the workspace pool with them."""

from __future__ import annotations

import math

import pytest
import torch

from moereg.bench.inputs import random_call
from moereg.dispatch import select_backend
from moereg.layer.factory import make_kernel
from moereg.nn.module import MoELayer
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import tolerance
from moereg.runtime.workspace import WORKSPACES
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_weights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROBLEM = MoEProblem(num_experts=8, hidden_size=512, intermediate_size=256, top_k=2)


def test_a_graph_keeps_its_scratch_when_the_pool_gives_its_own_back() -> None:
    """By the time of a replay, a buffer that graph and pool share would be someone else's memory."""
    generator = torch.Generator("cuda").manual_seed(0)
    weights = make_weights(PROBLEM, torch.device("cuda"))
    kernel = make_kernel(PROBLEM, weights, select_backend(PROBLEM, require="triton"))
    call = random_call(PROBLEM, 64, "uniform", generator)
    WORKSPACES.release()
    # Captured on a stream whose scratch the pool holds already, since a new one's would be the graph's in any case.
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        out = kernel(*call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kernel(*call, out=out)
    # The next allocation of that size on that stream gets the pool's memory.
    num_bytes = WORKSPACES.num_bytes
    assert num_bytes > 0
    WORKSPACES.release()
    with torch.cuda.stream(stream):
        others = [torch.full((num_bytes,), 7, dtype=torch.uint8, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    out.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert all((other == 7).all() for other in others), "a replay wrote into memory that is not its own"
    truth = reference_experts(PROBLEM, weights, *call)
    assert relative_error(out, truth) <= tolerance(PROBLEM.quant, PROBLEM.dtype, out.numel())


def test_compiled_code_with_cuda_graphs_runs_a_layer_that_was_never_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel and scratch are made while memory comes from the pool of the graph, in which nothing may stay alive."""
    monkeypatch.undo()  # Inductor traces the poisoned torch.empty and cannot lower it.
    generator = torch.Generator("cuda").manual_seed(0)
    weights = make_weights(PROBLEM, torch.device("cuda"))
    layer, call = MoELayer(PROBLEM, weights), random_call(PROBLEM, 64, "uniform", generator)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            found = compiled(*call).clone()
        truth = reference_experts(PROBLEM, weights, *call)
        assert relative_error(found, truth) <= tolerance(PROBLEM.quant, PROBLEM.dtype, found.numel())
        assert torch.equal(layer(*call), found)
