"""What ranks of an NCCL group do in tests, one GPU each; as many as there are, from one on."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import torch.distributed as dist

from moereg.experts import ExpertInputs
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.numerics.reference import relative_error
from moereg.prepare_finalize import GroupPrepareFinalize
from moereg.prepare_finalize.wire import CodedWire, PlainWire, as_bytes
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_weights
from tests.groups.cases import experts_of, share_of, tokens_of
from tests.groups.move_cases import ring

MOST_TOKENS = 16
FACTS = {"num_experts": 16, "hidden_size": 512, "intermediate_size": 256, "top_k": 4, "max_num_tokens": MOST_TOKENS}


def layer_of(rank: int, size: int, dispatcher: str, **changes: Any) -> tuple[MoEProblem, MoEKernel, MoEKernel]:
    problem = MoEProblem(**{**FACTS, **changes})
    device = torch.device("cuda", torch.cuda.current_device())
    weights = make_weights(problem, device)
    own = share_of(weights, rank, size)
    kernel = make_kernel(problem, own, group=dist.group.WORLD, prepare_finalize=dispatcher)
    return problem, kernel, make_kernel(dataclasses.replace(problem, graph_capture=False), weights)


def inputs_of(problem: MoEProblem, rank: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_states, topk_weights, topk_ids = tokens_of(problem, rank, num_tokens)
    return hidden_states.cuda(), topk_weights.cuda(), topk_ids.cuda()


def compared(rank: int, size: int, dispatcher: str, **changes: Any) -> dict[str, Any]:
    """Uneven tokens, none on one rank, none on all."""
    problem, kernel, one = layer_of(rank, size, dispatcher, **changes)
    worst = 0.0
    for num_tokens in (MOST_TOKENS, 1 + rank, 0 if rank == 0 else 5, 0):
        inputs = inputs_of(problem, rank, num_tokens)
        found, expected = kernel(*inputs), one(*inputs)
        assert not found.isnan().any()
        if num_tokens:
            worst = max(worst, relative_error(found, expected))
    return {"error": worst, "backend": kernel.selection.backend, "dispatcher": kernel.prepare_finalize.name}


def graph_of(kernel: MoEKernel, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.cuda.CUDAGraph]:
    """What a graph of a call writes, and the graph; nothing in the call waits for the host."""
    out = torch.empty_like(inputs[0])
    for _ in range(3):
        kernel(*inputs, out=out)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel(*inputs, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        kernel(*inputs, out=out)
    return out, graph


def captured(rank: int, size: int, dispatcher: str, **changes: Any) -> dict[str, Any]:
    """Nothing waits for the host, and a graph computes what comes into its inputs later."""
    problem, kernel, one = layer_of(rank, size, dispatcher, graph_capture=True, **changes)
    inputs = inputs_of(problem, rank, MOST_TOKENS)
    out, graph = graph_of(kernel, inputs)
    worst = 0.0
    for turn in range(1, 4):
        for old, new in zip(inputs, inputs_of(problem, rank + 10 * turn, MOST_TOKENS), strict=True):
            old.copy_(new)
        graph.replay()
        worst = max(worst, relative_error(out, one(*inputs)))
    torch.cuda.synchronize()
    del graph
    return {"error": worst}


def experts_that_move(rank: int, size: int) -> dict[str, Any]:
    """A graph that was captured before experts moved goes on with those that came."""
    problem = MoEProblem(**FACTS, graph_capture=True)
    device = torch.device("cuda", torch.cuda.current_device())
    weights = make_weights(problem, device)
    extra = 1 if size > 1 else 0
    before, after = (ring(16, size, shift, extra) for shift in (0, 3))
    own = experts_of(weights, before.experts_of_rank[rank])
    kernel = make_kernel(
        problem, own, group=dist.group.WORLD, prepare_finalize="all_gather", expert_placement=before, own_weights=True
    )
    one = make_kernel(dataclasses.replace(problem, graph_capture=False), weights)
    inputs = inputs_of(problem, rank, MOST_TOKENS)
    out, graph = graph_of(kernel, inputs)
    worst = 0.0
    for placement in (after, before):
        assert kernel.move_experts(placement) == 16 // size + extra
        out.fill_(float("nan"))
        graph.replay()
        worst = max(worst, relative_error(out, one(*inputs)))
    torch.cuda.synchronize()
    del graph
    return {"error": worst}


def codes_as_they_come(rank: int, size: int, dispatcher: str, num_tokens: int) -> dict[str, Any]:
    """Codes that the kernels take as they travelled give the bits of those that they round again, and of 16 bits."""
    sizes = {"num_experts": 8, "intermediate_size": 512, "max_num_tokens": num_tokens}
    problem, kernel, one = layer_of(rank, size, dispatcher, quant="fp8_block128", **sizes)
    moves = kernel.prepare_finalize
    assert isinstance(moves, GroupPrepareFinalize)
    assert kernel.experts.input_form == "quantized"
    inputs = inputs_of(problem, rank, num_tokens)
    scheme = kernel.experts.computes
    found = []
    for wire in (moves.wire, CodedWire(problem, scheme), PlainWire(problem)):
        moves.wire = wire
        found += [kernel(*inputs), kernel(*inputs)]
    assert all(torch.equal(found[0], other) for other in found[1:]), "codes change the result"
    return {"error": relative_error(found[0], one(*inputs)), "backend": kernel.selection.backend}


codes_all_to_all = functools.partial(codes_as_they_come, dispatcher="all_to_all", num_tokens=16)
codes_all_gather = functools.partial(codes_as_they_come, dispatcher="all_gather", num_tokens=4)
# Enough rows an expert for the warp-specialized programs.
codes_in_hopper_tiles = functools.partial(codes_as_they_come, dispatcher="all_gather", num_tokens=512)


def kernels_move_as_torch(rank: int, size: int) -> dict[str, Any]:
    """Triton's kernels give the experts the rows that torch gives them, bit for bit, and sums that are as near."""
    worst = 0.0
    layers: tuple[tuple[str, dict[str, Any]], ...] = (
        ("all_gather", {}),
        ("all_gather", {"quant": "fp8_block128", "activation_format": "batched"}),
    )
    for dispatcher, changes in layers:
        problem, kernel, one = layer_of(rank, size, dispatcher, **changes)
        moves = kernel.prepare_finalize
        assert isinstance(moves, GroupPrepareFinalize)
        for num_tokens in (MOST_TOKENS, 3 + rank):
            inputs, given = inputs_of(problem, rank, num_tokens), []
            for in_triton in (False, None):
                moves.wire.in_triton = in_triton
                assert moves.wire.calls_kernels(inputs[0]) is (in_triton is None)
                given.append(seen_by_experts(moves.prepare(*inputs, moves.experts_problem, kernel.expert_map).inputs))
                worst = max(worst, relative_error(kernel(*inputs), one(*inputs)))
            assert all(torch.equal(*pair) for pair in zip(*given, strict=True)), (dispatcher, changes, num_tokens)
    return {"error": worst}


def seen_by_experts(inputs: ExpertInputs) -> tuple[torch.Tensor, ...]:
    """Rows that count, and what says which."""
    rows = inputs.hidden_states
    if inputs.expert_num_tokens is None:
        scales = () if inputs.hidden_scale is None else (inputs.hidden_scale,)
        return as_bytes(rows), inputs.topk_weights, inputs.topk_ids, *scales
    places = torch.arange(rows.shape[1], device=rows.device)
    return as_bytes(rows[places < inputs.expert_num_tokens.unsqueeze(1)]), inputs.expert_num_tokens


all_to_all = functools.partial(compared, dispatcher="all_to_all")
all_to_all_sums = functools.partial(compared, dispatcher="all_to_all_sums")
all_to_all_sums_fp8 = functools.partial(compared, dispatcher="all_to_all_sums", quant="fp8_block128")
all_gather = functools.partial(compared, dispatcher="all_gather")
all_to_all_fp8 = functools.partial(compared, dispatcher="all_to_all", quant="fp8_block128")
all_gather_fp8 = functools.partial(compared, dispatcher="all_gather", quant="fp8_block128")
all_gather_captured = functools.partial(captured, dispatcher="all_gather")
all_gather_batched_captured = functools.partial(captured, dispatcher="all_gather", activation_format="batched")
all_gather_deterministic_captured = functools.partial(captured, dispatcher="all_gather", deterministic=True)


def all_to_all_refuses_capture(rank: int, size: int) -> dict[str, Any]:
    """One clear error while a graph is captured, on each rank."""
    problem, kernel, _ = layer_of(rank, size, "all_to_all")
    inputs = inputs_of(problem, rank, MOST_TOKENS)
    kernel(*inputs)
    torch.cuda.synchronize()
    text = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            kernel(*inputs)
    except ValueError as error:
        text = str(error)
    return {"error": 0.0, "text": text}
