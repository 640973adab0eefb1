"""What ranks of a group do in tests: each case is a function of rank and size, and returns what JSON can hold."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import os
import signal
import tempfile
import threading
import time
import warnings
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import moereg
from moereg.dispatch import select_backend
from moereg.evidence.on_machine import ADMITTED, QUARANTINE
from moereg.experts import ExpertInputs
from moereg.layer import admission
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.numerics.reference import reference_experts, relative_error
from moereg.prepare_finalize import Group, GroupPrepareFinalize, moving
from moereg.registry import REGISTRY, register_moe_backend
from moereg.selection.loader import load_backends
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_weights
from moereg.weights.permuted import ExpertWeights, PermutedWeights
from tests.support.fakes import FakeExperts

CPU = torch.device("cpu")
MOST_TOKENS = 8


def problem_of(**changes: Any) -> MoEProblem:
    facts = {"num_experts": 12, "hidden_size": 128, "intermediate_size": 32, "top_k": 3, "dtype": "float32"}
    facts = {**facts, "max_num_tokens": MOST_TOKENS, **changes}
    # See `numbers_of`.
    facts.setdefault("activation", "relu2" if facts["dtype"] == "float32" else "silu")
    return MoEProblem(**facts)


def numbers_of(problem: MoEProblem) -> ExpertWeights:
    """Weights of all experts. In fp32 integers, as tokens are: every sum is exact, so its order changes no bit."""
    weights = make_weights(problem, CPU)
    if problem.dtype != "float32":
        return weights
    return ExpertWeights(w13=weights.w13.sign(), w2=weights.w2.sign())


def experts_of(weights: ExpertWeights, experts: tuple[int, ...] | range) -> ExpertWeights:
    rows = {name: tensor[list(experts)] if tensor.dim() else tensor for name, tensor in weights.tensors().items()}
    return ExpertWeights.unchecked(rows, weights.scheme)


def share_of(weights: ExpertWeights, rank: int, size: int) -> ExpertWeights:
    num_experts = weights.w13.shape[0]
    return experts_of(weights, range(rank * num_experts // size, (rank + 1) * num_experts // size))


def tokens_of(problem: MoEProblem, rank: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states and routing of a rank; one route in eight goes nowhere."""
    generator = torch.Generator().manual_seed(100 * rank + num_tokens)
    hidden_states = torch.randn(num_tokens, problem.hidden_size, generator=generator).to(problem.torch_dtype)
    logits = torch.randn(num_tokens, problem.num_experts, generator=generator)
    topk_weights, topk_ids = moereg.routing.softmax_topk(logits, top_k=problem.top_k, renormalize=True)
    if problem.dtype == "float32":
        hidden_states = hidden_states.round().clamp(-2, 2)
        topk_weights = 2.0 ** -torch.randint(4, topk_weights.shape, generator=generator).float()
    nowhere = torch.rand(topk_ids.shape, generator=generator) < 1 / 8
    return hidden_states, topk_weights, torch.where(nowhere, -1, topk_ids)


def numbers_of_tokens(rank: int, size: int) -> tuple[int, ...]:
    """Of the calls of a case: uneven over ranks, none on one or on all of them, and one less than there may be."""
    return (1 + rank, 0 if rank == size - 1 else MOST_TOKENS, MOST_TOKENS if rank == 0 else MOST_TOKENS - 1, 0)


def errors_of(kernel: MoEKernel, one: MoEKernel, problem: MoEProblem, rank: int, size: int) -> dict[str, Any]:
    """How far calls over the group are from the same layer on one rank."""
    equal, worst = True, 0.0
    for num_tokens in numbers_of_tokens(rank, size):
        inputs = tokens_of(problem, rank, num_tokens)
        found, expected = kernel(*inputs), one(*inputs)
        assert found.shape == expected.shape
        assert not found.isnan().any()
        equal = equal and torch.equal(found, expected)
        if num_tokens:
            difference = (found.double() - expected.double()).norm() / expected.double().norm()
            worst = max(worst, float(difference))
    moving = kernel.prepare_finalize
    assert isinstance(moving, GroupPrepareFinalize)
    return {
        "equal": equal,
        "error": worst,
        "dispatcher": kernel.prepare_finalize.name,
        "wire": moving.wire.name,
        "backend": kernel.selection.backend,
        "format": kernel.selection.problem.activation_format,
    }


def compared(rank: int, size: int, dispatcher: str | None = None, **changes: Any) -> dict[str, Any]:
    problem = problem_of(**changes)
    weights = numbers_of(problem)
    one = make_kernel(dataclasses.replace(problem, activation_format="standard"), weights)
    own = share_of(weights, rank, size)
    kernel = make_kernel(problem, own, group=dist.group.WORLD, prepare_finalize=dispatcher)
    return errors_of(kernel, one, problem, rank, size)


FP8 = {"dtype": "bfloat16", "quant": "fp8_block128", "intermediate_size": 128}
ON_INPUT = {"top_k": 1, "apply_router_weight_on_input": True}
chosen_without_a_word = compared
all_to_all = functools.partial(compared, dispatcher="all_to_all")
all_gather = functools.partial(compared, dispatcher="all_gather")
all_gather_deterministic = functools.partial(compared, dispatcher="all_gather", deterministic=True)
all_to_all_batched = functools.partial(compared, dispatcher="all_to_all", activation_format="batched")
all_to_all_sums = functools.partial(compared, dispatcher="all_to_all_sums")
all_to_all_sums_batched = functools.partial(compared, dispatcher="all_to_all_sums", activation_format="batched")
all_gather_batched = functools.partial(compared, dispatcher="all_gather", activation_format="batched")
all_to_all_fp8 = functools.partial(compared, dispatcher="all_to_all", **FP8)
all_gather_fp8 = functools.partial(compared, dispatcher="all_gather", **FP8)
weights_on_inputs = functools.partial(compared, dispatcher="all_to_all", **ON_INPUT)
weights_on_summed_inputs = functools.partial(compared, dispatcher="all_to_all_sums", **ON_INPUT)
all_to_all_sums_fp8 = functools.partial(compared, dispatcher="all_to_all_sums", **FP8)
weights_on_gathered_inputs = functools.partial(compared, dispatcher="all_gather", **ON_INPUT)


class CodedExperts(FakeExperts):
    """Takes tokens as codes with scales, and nothing else."""

    input_form = "quantized"

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        codes, scales = inputs.hidden_states, inputs.hidden_scale
        assert codes.dtype == torch.float8_e4m3fn
        assert scales is not None
        assert (scales.dtype, scales.shape) == (torch.float32, (codes.shape[0], 1))
        restored = (codes.float() * scales).bfloat16()
        canonical = ExpertWeights.unchecked({name: weights[name] for name in weights.per_expert}, self.problem.quant)
        routing = inputs.topk_weights, inputs.topk_ids, inputs.expert_map
        out.copy_(reference_experts(self.problem, canonical, restored, *routing))


def codes_as_they_come_fp8(rank: int, size: int) -> dict[str, Any]:
    """Experts that say so are given the codes that travelled."""
    before = load_backends().cells
    register_moe_backend("coded", 10**5, ("fp8_block128",), ("*",))(CodedExperts)
    try:
        problem = problem_of(**FP8)
        weights = numbers_of(problem)
        one = make_kernel(problem, weights, moereg.select_backend(problem, "cpu", deny="coded"))
        own = share_of(weights, rank, size)
        kernel = make_kernel(problem, own, group=dist.group.WORLD, prepare_finalize="all_to_all")
        assert kernel.selection.backend == "coded"
        return errors_of(kernel, one, problem, rank, size)
    finally:
        REGISTRY.restore(before)


def float16_beyond_its_range(rank: int, size: int) -> dict[str, float]:
    """By dispatcher, the error of results beyond 65,504 or with few digits unweighted, or of ranks' sums of such."""
    errors: dict[str, float] = {}
    for dispatcher, scale in itertools.product(("all_to_all", "all_to_all_sums", "all_gather"), (1e5, 1e-5)):
        problem = problem_of(dtype="float16")
        weights = make_weights(problem, CPU)
        weights = dataclasses.replace(weights, w2=(weights.w2.float() * scale).clamp(-6e4, 6e4).half())
        kernel = make_kernel(
            problem, share_of(weights, rank, size), group=dist.group.WORLD, prepare_finalize=dispatcher
        )
        for num_tokens in (5 * rank, MOST_TOKENS):
            hidden_states, topk_weights, topk_ids = tokens_of(problem, rank, num_tokens)
            call = 10 * hidden_states, topk_weights * 10 / scale, topk_ids
            errors[f"{dispatcher}, {scale}, {num_tokens}"] = relative_error(
                kernel(*call), reference_experts(problem, weights, *call, None)
            )
    return errors


def placed(rank: int, size: int, dispatcher: str) -> dict[str, Any]:
    """Experts anywhere, some of them on two ranks."""
    problem = problem_of()
    weights = numbers_of(problem)
    order = [7, 2, 9, 0, 4, 11, 1, 3, 10, 5, 8, 6]
    held = [order[each::size] for each in range(size)]
    held[0] += [expert for expert in held[1][:2]]
    placement = moereg.ExpertPlacement(problem.num_experts, tuple(map(tuple, held)))
    own = experts_of(weights, placement.experts_of_rank[rank])
    kernel = make_kernel(problem, own, group=dist.group.WORLD, prepare_finalize=dispatcher, expert_placement=placement)
    return errors_of(kernel, make_kernel(problem, weights), problem, rank, size)


replicas_all_to_all = functools.partial(placed, dispatcher="all_to_all")
replicas_all_to_all_sums = functools.partial(placed, dispatcher="all_to_all_sums")
replicas_all_gather = functools.partial(placed, dispatcher="all_gather")


def maps_of_ranks(rank: int, size: int) -> dict[str, Any]:
    """Each rank says only what it holds, and they find the whole together."""
    problem = problem_of()
    weights = numbers_of(problem)
    experts = tuple(range(rank, problem.num_experts, size))[::-1]
    expert_map = torch.full((problem.num_experts,), -1, dtype=torch.int32)
    expert_map[list(experts)] = torch.arange(len(experts), dtype=torch.int32)
    mine = dataclasses.replace(problem, placement="map", num_local_experts=len(experts))
    kernel = make_kernel(mine, experts_of(weights, experts), group=dist.group.WORLD, expert_map=expert_map)
    return errors_of(kernel, make_kernel(problem, weights), problem, rank, size)


def fault(rank: int, size: int, signal_number: int, dispatcher: str) -> dict[str, Any]:
    """The last rank gets a signal after a call; what the others say, and after when."""
    problem = problem_of()
    own = share_of(numbers_of(problem), rank, size)
    inputs = tokens_of(problem, rank, 4)
    start, text = time.monotonic(), "nothing"
    try:
        kernel = make_kernel(problem, own, group=dist.group.WORLD, prepare_finalize=dispatcher)
        kernel(*inputs)
        start = time.monotonic()
        if rank == size - 1:
            os.kill(os.getpid(), signal_number)
        kernel(*inputs)
    except moereg.GroupError as error:
        text = str(error)
    return {"text": text, "seconds": time.monotonic() - start}


killed_all_to_all = functools.partial(fault, signal_number=signal.SIGKILL, dispatcher="all_to_all")
stalled_all_gather = functools.partial(fault, signal_number=signal.SIGSTOP, dispatcher="all_gather")


def error_of_making(rank: int, size: int, problem: MoEProblem, **arguments: Any) -> str:
    try:
        weights = share_of(numbers_of(problem_of()), rank, size)
        make_kernel(problem, weights, group=dist.group.WORLD, **arguments)
    except (ValueError, moereg.MoeregError) as error:
        return f"{type(error).__name__}: {error}"
    return "made"


def refusals(rank: int, size: int) -> dict[str, str]:
    """What ranks say that cannot make a layer together, or of which the first cannot."""
    asked: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "other_problems": ({"top_k": 2 + rank % 2}, {}),
        "other_dispatchers": ({}, {"prepare_finalize": "all_to_all" if rank else "all_gather"}),
        "other_rooms": ({"max_num_tokens": MOST_TOKENS + rank}, {"prepare_finalize": "all_gather"}),
        "experts_that_do_not_divide": ({"num_experts": 13}, {}),
        "capture_with_counts": ({"graph_capture": True}, {"prepare_finalize": "all_to_all"}),
        # The weights of rank 0 are not those of its problem.
        "one_cannot": ({"intermediate_size": 32 if rank else 64}, {}),
        "one_finds_no_dispatcher": ({}, {"prepare_finalize": "all_gather" if rank else "no_such_dispatcher"}),
    }
    return {name: error_of_making(rank, size, problem_of(**facts), **rest) for name, (facts, rest) in asked.items()}


class WrongOnOneRankExperts(FakeExperts):
    """Off by a factor on rank 1."""

    def compute(self, out: torch.Tensor, inputs: ExpertInputs, weights: PermutedWeights) -> None:
        super().compute(out, inputs, weights)
        out *= 1.0 + 0.5 * dist.get_rank()


def first_checks(rank: int, size: int, quarantine: str, is_known: bool) -> dict[str, Any]:
    """Three layers of a backend that is wrong on rank 1, whose ranks keep records of their own, as on two hosts.

    Args:
        rank, size: Of the group.
        quarantine: Name of the file; empty to turn it off.
        is_known: Whether the backend has passed on the other ranks before.
    """
    before = REGISTRY.cells
    register_moe_backend("wrong_on_one", 1001, ("unquantized",), ("cpu",))(WrongOnOneRankExperts)
    register_moe_backend("right", 1000, ("unquantized",), ("cpu",))(type("RightExperts", (FakeExperts,), {}))
    problem, own = problem_of(), share_of(numbers_of(problem_of()), rank, size)
    found: dict[str, Any] = {"backends": [], "warnings": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ),
        mock.patch.dict(admission._HERE),
    ):
        os.environ["MOEREG_ADMISSION"] = f"{folder}/admitted.json"
        os.environ["MOEREG_QUARANTINE"] = f"{folder}/{quarantine}" if quarantine else ""
        if is_known and not rank:
            make_kernel(dataclasses.replace(problem, num_local_experts=len(own.w13)), own)
        for width in (64, 32, 32):
            problem = problem_of(intermediate_size=width)
            own = share_of(numbers_of(problem), rank, size)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                kernel = make_kernel(problem, own, group=dist.group.WORLD)
            found["backends"].append(kernel.selection.backend)
            found["warnings"] += [str(each.message) for each in warned if each.category is admission.AdmissionWarning]
        found["admitted"] = sorted(record.backend for record in ADMITTED.read().records)
        found["quarantined"] = [record.failure for record in QUARANTINE.read().records]
        found["required"] = error_of_making(rank, size, problem, selection=required_of(kernel, "wrong_on_one"))
    REGISTRY.restore(before)
    return found


def required_of(kernel: MoEKernel, backend: str) -> Selection:
    with mock.patch.dict(os.environ, {"MOEREG_QUARANTINE": ""}):
        return select_backend(kernel.selection.problem, require=backend)


first_check_fails = functools.partial(first_checks, quarantine="quarantine.json", is_known=False)
first_check_fails_unquarantined = functools.partial(first_checks, quarantine="", is_known=False)
first_check_fails_elsewhere = functools.partial(first_checks, quarantine="quarantine.json", is_known=True)


def error_of_calling(kernel: MoEKernel, rank: int) -> str:
    try:
        kernel(*tokens_of(kernel.problem, rank, 3))
    except moereg.GroupError as error:
        return str(error)
    return "called"


def layers_of(rank: int, size: int, *widths: int) -> list[MoEKernel]:
    """Layers over the group whose experts differ, of some widths."""
    layers = []
    for place, width in enumerate(widths):
        weights = numbers_of(problem_of(intermediate_size=width))
        others = ExpertWeights(w13=weights.w13.roll(place, 0), w2=weights.w2)
        own = share_of(others, rank, size)
        problem = problem_of(intermediate_size=width)
        layers.append(make_kernel(problem, own, group=dist.group.WORLD, prepare_finalize="all_gather"))
    return layers


def layers_in_other_order(rank: int, size: int) -> list[str]:
    """The first rank calls another layer than the others, of the same sizes and of others, or makes one meanwhile."""
    if rank:
        # A layer that the others gave up counts here.
        Group(dist.group.WORLD, CPU).add_layer(4, "given up")
    first, same, wider = layers_of(rank, size, 32, 32, 64)
    texts = [error_of_calling(first if rank else other, rank) for other in (same, wider, copy.deepcopy(first))]
    with torch.device("meta"):
        assert first.prepare_finalize.group.gather_numbers(rank, "numbers") == list(range(size))
    texts.append(error_of_calling(first, rank) if rank else error_of_making(rank, size, problem_of()))
    return [*texts, *(error_of_calling(layer, rank) for layer in (wider, first))]


def two_threads(rank: int, size: int) -> list[str]:
    """A layer is called while another thread multiplies for another one."""
    first, second = layers_of(rank, size, 32, 32)
    inside, go_on = threading.Event(), threading.Event()
    apply = first.experts.apply

    def slowly(**arguments: Any) -> None:
        inside.set()
        assert go_on.wait(30)
        apply(**arguments)

    first.experts.apply = slowly  # type: ignore[method-assign]
    texts = []
    thread = threading.Thread(target=lambda: texts.append(error_of_calling(first, rank)))
    thread.start()
    assert inside.wait(30)
    texts += [error_of_calling(second, rank), error_of_making(rank, size, problem_of())]
    go_on.set()
    thread.join()
    # The other ranks may have called what was refused here.
    texts.append(error_of_calling(second if rank else first, rank))
    return [*texts, error_of_calling(second, rank)]


def layers_in_other_order_by_counts(rank: int, size: int) -> list[str]:
    """As where nothing but the counts of a call tells which layer it is."""
    problem, texts = problem_of(), []
    own = share_of(numbers_of(problem), rank, size)
    layers = [make_kernel(problem, own, group=dist.group.WORLD, prepare_finalize="all_to_all") for _ in range(1 + size)]
    for layer in (layers[rank], layers[size]):
        moves = layer.prepare_finalize
        try:
            moves.prepare(*tokens_of(problem, rank, rank), layer.selection.problem, layer.expert_map)
            texts.append("prepared")
        except moereg.GroupError as error:
            texts.append(str(error))
    return texts


def as_on_a_gpu(rank: int, size: int) -> dict[str, Any]:
    """Only a layer's first call is checked, and over the group's store, as where hosts do not wait for each other."""
    layers = layers_of(rank, size, 32, 32)
    for layer in layers:
        moves = layer.prepare_finalize
        assert isinstance(moves, GroupPrepareFinalize)
        moves.group.device = torch.device("cuda")
    store = dist.group.WORLD.get_group_store()
    with (
        mock.patch.object(moving, "checks_values", return_value=False),
        mock.patch.object(Group, "gather_numbers", autospec=True, side_effect=Group.gather_numbers) as gathered,
    ):
        texts = [error_of_calling(layers[rank], rank)]
        texts += [error_of_calling(layer, rank) for layer in (*layers, *layers)]
    dist.barrier()
    keys = [store.check([f"moereg/{place}/{rank}"]) for place in range(4)]
    return {"texts": texts, "checked": gathered.call_count, "keys": keys}
