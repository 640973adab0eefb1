"""Weights as vLLM's kernels read them, without a GPU and without vllm.

A tensor that Marlin reads is put back in order by the definition of the order, and the numbers compared.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from moereg_vllm import _marlin_layout as layout
from moereg_vllm import marlin

from moereg.author import (
    ExpertWeights,
    MoEProblem,
    Platform,
    QuantScheme,
    dequantize_weights,
    list_cells,
    quantize_weights,
)

H200 = "cuda:sm90"


def undealt(values: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Values whose place p of each run came from `places[p]`, in their old order."""
    runs = values.reshape(-1, len(places))
    back = torch.empty_like(runs)
    for place, source in enumerate(places):
        back[:, source] = runs[:, place]
    return back.reshape(values.shape)


def column_order(groups: int) -> list[int]:
    """Column of the scale at each place: those that a thread of `mma.m16n8k16` multiplies lie together."""
    if groups > 1:
        return [8 * (place % 8) + place // 8 for place in range(64)]
    return [8 * (place % 8 // 2) + 2 * (place // 8) + place % 2 for place in range(32)]


def codes_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [N,K] of words [K / codes of a word, N], the first in the lowest bits."""
    shifts = torch.arange(0, 32, bits)
    codes = (words.T.unsqueeze(-1).long() >> shifts) & (2**bits - 1)
    return codes.flatten(1)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def restored(tensors: dict[str, torch.Tensor], matrix: str, scheme: QuantScheme, dtype: str) -> torch.Tensor:
    """[E,N,K] fp32 of what Marlin reads, by what its kernels do with codes, scales and zero points."""
    fmt = scheme.weight
    assert fmt is not None
    found = []
    for expert, words in enumerate(tensors[matrix]):
        codes = codes_of(words, fmt.bits)
        scale = tensors[f"{matrix}_scale"][expert]
        order, pairs = column_order(len(scale)), [0, 2, 1, 3]
        if fmt.scale_dtype == "float8_e8m0fnu":
            scale = undealt(undealt(scale.view(torch.uint8), pairs), order).view(torch.float8_e8m0fnu).float()
        elif fmt.global_scale:
            byte = undealt(undealt(scale.view(torch.uint8), pairs), order).long()
            # Five bits of exponent with bias 15, three of mantissa, no sign.
            scale = torch.where(byte > 0, 2.0 ** ((byte >> 3) - 15) * (1 + (byte & 7) / 8), 0.0)
            scale = scale * tensors[f"{matrix}_global_scale"][expert] / 2.0 ** (126 if dtype == "bfloat16" else 14)
        else:
            scale = undealt(scale, order).float()
        if fmt.dtype == "float4_e2m1fn":
            values = E2M1[codes & 7] * torch.where(codes & 8 > 0, -1.0, 1.0)
        elif fmt.dtype == "float8_e4m3fn":
            values = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
            scale = scale / 2.0 ** (120 if dtype == "bfloat16" else 8)
        else:
            zero: torch.Tensor | int = 8 if fmt.bits == 4 else 128
            if not fmt.symmetric:
                eights = codes_of(tensors[f"{matrix}_zero_point"][expert].T, 4)
                zero = undealt(undealt(eights, [0, 2, 4, 6, 1, 3, 5, 7]), column_order(2))
                zero = zero.T.repeat_interleave(codes.shape[1] // len(zero), dim=1)
            values = codes - zero
        found.append(values * scale.T.repeat_interleave(codes.shape[1] // len(scale), dim=1))
    return torch.stack(found)


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the tiles of codes, which vLLM's own kernel makes."""
    monkeypatch.setattr(marlin, "_repacked", lambda weight, bits: layout.packed_rows(weight))


def marlin_layers() -> Iterator[MoEProblem]:
    """A layer of each scheme and dtype that fills Marlin's tiles, and those that it pads."""
    for cell in list_cells("marlin"):
        steps = cell.facts.requires_multiple
        for hidden, intermediate in ((256, 128), (256, 200), (192, 96), (192, 64)):
            if hidden % steps["hidden_size"] or intermediate % steps["intermediate_size"]:
                continue
            for scheme, dtype in itertools.product(cell.schemes, sorted(cell.facts.dtypes)):
                yield MoEProblem(
                    num_experts=3,
                    top_k=2,
                    hidden_size=hidden,
                    intermediate_size=intermediate,
                    quant=scheme,
                    dtype=dtype,
                )


def marlin_weights(problem: MoEProblem) -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        rows = torch.linspace(0.2, 2, shape[1]).view(1, -1, 1) if len(shape) > 2 else torch.ones(1)
        return (torch.randn(shape, generator=generator) * rows).to(problem.torch_dtype)

    experts, hidden, intermediate = problem.num_local_experts, problem.hidden_size, problem.intermediate_size
    plain = ExpertWeights(
        w13=draw(experts, problem.activation.num_halves * intermediate, hidden), w2=draw(experts, hidden, intermediate)
    )
    return quantize_weights(plain, problem.quant)


@pytest.mark.parametrize("problem", list(marlin_layers()), ids=str)
@pytest.mark.usefixtures("unpacked")
def test_what_marlin_reads(problem: MoEProblem) -> None:
    scheme, dtype = problem.quant, problem.dtype
    assert isinstance(scheme, QuantScheme)
    assert scheme.weight is not None
    weights = marlin_weights(problem)
    permuted = marlin.MarlinExperts(problem, Platform.from_name(H200)).permute_weights(weights, problem)
    plain = dequantize_weights(weights, dtype=torch.float32)
    padded = permuted["w2"].shape[1] * (32 // scheme.weight.bits)
    assert padded % (64 if problem.hidden_size % 128 == 0 else 128) == 0
    tensors = dict(permuted.per_expert)
    for matrix, expected in zip(("w13", "w2"), plain, strict=True):
        found = restored(tensors, matrix, scheme, dtype)  # type: ignore[arg-type]
        if matrix == "w13":
            halves = found.unflatten(1, (2, -1))
            assert not halves[:, :, problem.intermediate_size :].any()
            found = halves[:, :, : problem.intermediate_size].flatten(1, 2)
        else:
            found = found[:, :, : problem.intermediate_size]
        # Scales become 16-bit numbers; powers of two and e4m3 scales are exact.
        step = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
        assert (found - expected).abs().max() <= step * expected.abs().max()
        torch.testing.assert_close(found, expected, rtol=2 * step, atol=1e-6)


@pytest.mark.usefixtures("unpacked")
def test_marlin_refuses_global_scales_that_differ() -> None:
    problem = MoEProblem(num_experts=2, top_k=1, hidden_size=128, intermediate_size=64, quant="nvfp4_w4a16")
    weights = marlin_weights(problem)
    assert weights.w13_scale_2 is not None
    uneven = torch.stack((weights.w13_scale_2.flatten()[:2], 2 * weights.w13_scale_2.flatten()[:2]), dim=1)
    tensors = {name: tensor for name, tensor in weights.tensors().items() if name != "w13_scale_2"}
    weights = ExpertWeights(**tensors, w13_scale_2=uneven, quant=problem.quant)
    with pytest.raises(ValueError, match="one global scale for gate and up"):
        marlin.MarlinExperts(problem, Platform.from_name(H200)).permute_weights(weights, problem)


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("quant", ["nvfp4_w4a16", "mxfp4_w4a16"])
def test_marlin_reads_biases_in_its_order_unless_they_are_added_after_it(quant: str) -> None:
    problem = MoEProblem(
        num_experts=2, top_k=1, hidden_size=128, intermediate_size=64, quant=quant, dtype="bfloat16", has_bias=True
    )
    tensors = marlin_weights(problem).tensors()
    biases = {"w13_bias": torch.randn(2, 128).bfloat16(), "w2_bias": torch.randn(2, 128).bfloat16()}
    weights = ExpertWeights(**tensors, **biases, quant=problem.quant)
    permuted = marlin.MarlinExperts(problem, Platform.from_name(H200)).permute_weights(weights, problem)
    assert torch.equal(permuted["w13_bias"], layout.marlin_bias(biases["w13_bias"]))
    is_plain = quant == "nvfp4_w4a16"
    assert torch.equal(permuted["w2_bias"], biases["w2_bias"]) == is_plain
    assert torch.equal(permuted["w2_bias"], layout.marlin_bias(biases["w2_bias"])) != is_plain


# Weights of a checkpoint begin anywhere.


def at_an_odd_place(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, three elements behind an aligned place."""
    padded = torch.empty(tensor.numel() + 3, dtype=tensor.dtype)
    return padded[3:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_marlin_packs_codes_that_begin_anywhere(dtype: torch.dtype) -> None:
    weight = torch.arange(128).view(16, 8).to(dtype)
    assert torch.equal(layout.packed_rows(at_an_odd_place(weight)), layout.packed_rows(weight))


@pytest.mark.parametrize(("name", "quant"), [("deepgemm", "fp8_block128"), ("vllm_cutlass", "fp8_channel_token")])
def test_kernels_that_read_whole_words_get_weights_that_begin_at_them(name: str, quant: str) -> None:
    problem = MoEProblem(num_experts=2, hidden_size=1024, intermediate_size=128, top_k=1, quant=quant)
    weights = marlin_weights(problem)
    (cell,) = list_cells(name)
    experts = cell.experts(problem, Platform.from_name(H200), problem.quant)
    for given in (
        weights,
        dataclasses.replace(weights, **{k: at_an_odd_place(v) for k, v in weights.tensors().items()}),
    ):
        permuted = experts.permute_weights(weights=given, problem=problem)
        for key, tensor in weights.tensors().items():
            assert permuted[key].data_ptr() % 16 == 0
            assert torch.equal(permuted[key].view(torch.uint8), tensor.view(torch.uint8))
            assert given is not weights or permuted[key] is tensor, "weights that are aligned are not copied"
