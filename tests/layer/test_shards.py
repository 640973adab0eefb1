"""`shard_experts`: the ranks' parts together are the layer, for any size, scheme and number of ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from moereg import ArgumentError, ExpertWeights, MoEProblem, QuantScheme, shard_experts
from moereg.numerics.reference import reference_experts, relative_error
from moereg.numerics.tolerances import layer_tolerance
from moereg.quantize import dequantize_weights
from moereg.spec.quant_schemes import QUANT_SCHEMES, QuantFormat
from moereg.testing.inputs import Inputs, make_inputs, make_weights
from moereg.weights.shards import pad_intermediate

CPU = torch.device("cpu")
OTHERS = (
    QuantScheme("uint4_blocks_zp", QuantFormat("uint4", (48, 32), symmetric=False)),
    QuantScheme("uint8_blocks_zp", QuantFormat("uint8", (24, 16), symmetric=False)),
    QuantScheme("int8_rows_of_blocks", QuantFormat("int8", (64, -1))),
)
NESTED = tuple(one for one in QUANT_SCHEMES.values() if one.weight is not None and one.weight.nested)
SCHEMES = (*(one for one in QUANT_SCHEMES.values() if one not in NESTED), *OTHERS)


def has_clear_halves(problem: MoEProblem) -> bool:
    """Whether weights show if they are gated: two rows of w13 and one byte of w2 would be a layer of either kind."""
    return problem.activation.gated or problem.quant.weight is None or problem.quant.weight.bits == 8


layers = st.builds(
    MoEProblem,
    num_experts=st.integers(1, 3),
    hidden_size=st.integers(1, 90),
    intermediate_size=st.integers(1, 400),
    top_k=st.just(1),
    dtype=st.just("float32"),
    quant=st.sampled_from(SCHEMES),
    activation=st.sampled_from(["silu", "swigluoai", "relu2"]),
    has_bias=st.booleans(),
).filter(has_clear_halves)
few = settings(max_examples=60, deadline=None)


def restored(weights: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """w13 [E,halves,I,H] and w2 [E,H,I] in fp32."""
    w13, w2 = dequantize_weights(weights, torch.float32)
    return w13.unflatten(1, (weights.num_halves, -1)), w2


def checked(weights: ExpertWeights) -> ExpertWeights:
    """The same weights, checked like those of a caller."""
    return ExpertWeights(**weights.tensors(), quant=weights.quant)  # type: ignore[arg-type]


@few
@given(layers, st.integers(1, 9))
def test_the_parts_are_the_whole(problem: MoEProblem, size: int) -> None:
    """Each rank's rows and columns, exact, between zeros; the first of them at the rank's place within its block."""
    weights = make_weights(problem, CPU)
    w13, w2 = restored(weights)
    parts = [checked(shard_experts(weights, rank, size)) for rank in range(size)]
    whole = problem.intermediate_size
    assert len({part.intermediate_size for part in parts}) == 1, "ranks have different problems"
    fmt = problem.quant.weight
    # Rows and columns of a block both begin at multiples of this.
    block = 1 if fmt is None or size == 1 else math.lcm(*(max(extent, 1) for extent in fmt.group))
    for rank, part in enumerate(parts):
        first, last = whole * rank // size, whole * (rank + 1) // size
        front = first % block
        own = slice(front, front + last - first)
        own_w13, own_w2 = restored(part)
        assert torch.equal(own_w13[:, :, own], w13[:, :, first:last])
        assert torch.equal(own_w2[:, :, own], w2[:, :, first:last])
        for found, dim in ((own_w13, 2), (own_w2, 2)):
            padding = found.index_fill(dim, torch.arange(own.start, own.stop), 0)
            assert not padding.any(), "padding is not zero"
    biases = [part.w2_bias for part in parts if part.w2_bias is not None]
    assert not biases or torch.equal(sum(biases), weights.w2_bias)


def sum_of_ranks(problem: MoEProblem, weights: ExpertWeights, size: int, inputs: Inputs, **options: Any) -> Any:
    total = torch.zeros(inputs.hidden_states.shape, dtype=torch.float64)
    for rank in range(size):
        part = shard_experts(weights, rank, size)
        of_rank = dataclasses.replace(problem, intermediate_size=part.intermediate_size)
        total += reference_experts(of_rank, part, *inputs.call, **options)
    return total


@few
@given(layers, st.integers(1, 5))
def test_the_outputs_add_up(problem: MoEProblem, size: int) -> None:
    weights, inputs = make_weights(problem, CPU), make_inputs(problem, 5, "uniform", CPU)
    options: dict[str, Any] = {"computes": problem.quant.weight_only}
    truth = reference_experts(problem, weights, *inputs.call, **options, dtype=torch.float64)
    total = sum_of_ranks(problem, weights, size, inputs, **options, dtype=torch.float64)
    torch.testing.assert_close(total, truth, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("intermediate", "size"), [(384, 2), (768, 4), (200, 3)])
@pytest.mark.parametrize("quant", [scheme for scheme in QUANT_SCHEMES.values() if scheme.activation], ids=str)
def test_the_outputs_of_rounded_activations_add_up(quant: QuantScheme, intermediate: int, size: int) -> None:
    """Each rank rounds by scales of its own intermediate."""
    problem = MoEProblem(num_experts=4, hidden_size=200, intermediate_size=intermediate, top_k=2, quant=quant)
    weights, inputs = make_weights(problem, CPU), make_inputs(problem, 33, "uniform", CPU)
    truth = reference_experts(problem, weights, *inputs.call)
    assert relative_error(sum_of_ranks(problem, weights, size, inputs), truth) < layer_tolerance(problem, 33)


@few
@given(layers, st.sampled_from([1, 8, 128]))
def test_padding_changes_no_output(problem: MoEProblem, multiple: int) -> None:
    weights = make_weights(problem, CPU)
    padded = checked(pad_intermediate(weights, multiple))
    assert padded.intermediate_size % multiple == 0
    assert (padded is not weights) or problem.intermediate_size % multiple == 0
    w13, w2 = restored(weights)
    found = restored(padded)
    assert torch.equal(found[0][:, :, : problem.intermediate_size], w13)
    assert torch.equal(found[1][:, :, : problem.intermediate_size], w2)
    assert not found[0][:, :, problem.intermediate_size :].any()
    assert not found[1][:, :, problem.intermediate_size :].any()


@pytest.mark.parametrize(
    ("quant", "intermediate", "size", "expected"),
    [
        ("fp8_block128", 1536, 8, 256),  # MiniMax-M2 and Qwen3-235B
        ("fp8_block128", 512, 8, 128),  # Qwen3.6-35B
        ("fp8_block128", 384, 2, 256),
        ("fp8_block128", 2048, 8, 256),
        ("mxfp4_w4a16", 2880, 4, 736),  # gpt-oss
        ("mxfp4_w4a16", 2880, 8, 384),
        ("unquantized", 2880, 8, 360),
        ("int8_w8a8", 2880, 8, 360),
        ("int4_w4a16_g128", 768, 4, 256),
    ],
)
def test_sizes_of_parts(quant: str, intermediate: int, size: int, expected: int) -> None:
    problem = MoEProblem(num_experts=1, hidden_size=2, intermediate_size=intermediate, top_k=1, quant=quant)
    weights = make_weights(problem, CPU)
    assert shard_experts(weights, size - 1, size).intermediate_size == expected


class DtypesMade(TorchDispatchMode):
    """Collects the dtypes of all tensors that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found |= {one.dtype for one in torch.utils._pytree.tree_leaves(out) if isinstance(one, torch.Tensor)}
        return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_no_matrix_is_made_in_another_dtype(dtype: str) -> None:
    """It would take twice the memory of a layer of 16 bits."""
    problem = MoEProblem(
        num_experts=2, hidden_size=8, intermediate_size=24, top_k=1, dtype=dtype, has_bias=True, activation="silu"
    )
    weights = make_weights(problem, CPU)
    with DtypesMade() as made:
        shard_experts(weights, 1, 3)
        pad_intermediate(weights, 16)
    assert made.found == {getattr(torch, dtype)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 0), "size must be at least 1, got 0"),
        ((2, 2), "rank must be below size, got rank 2 of 2"),
        ((-1, 2), "rank must be at least 0, got -1"),
    ],
)
def test_refused(arguments: Any, words: str) -> None:
    problem = MoEProblem(num_experts=1, hidden_size=2, intermediate_size=2, top_k=1)
    with pytest.raises(ArgumentError, match=words):
        shard_experts(make_weights(problem, CPU), *arguments)


@pytest.mark.parametrize("quant", NESTED, ids=str)
def test_quantized_scales_are_not_cut(quant: QuantScheme) -> None:
    problem = MoEProblem(num_experts=1, hidden_size=2, intermediate_size=64, top_k=1, quant=quant)
    with pytest.raises(ArgumentError, match=rf"cannot be cut, got scheme {quant.name}; quantize to one with float32"):
        shard_experts(make_weights(problem, CPU), 0, 2)
