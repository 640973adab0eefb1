"""How tensors that vLLM's methods hold become canonical, by stand-ins for methods and layers; without vLLM."""

from __future__ import annotations

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from vllm_moereg.weights import READERS, Form, Stored, give_back, places_of, read_form, rows_of_experts, take_weights

from moereg import ExpertWeights, MoEProblem, explain_backends, make_kernel, select_backend, shard_experts
from moereg.layer.backend_calls import make_experts
from moereg.platforms import Platform
from moereg.quantize import dequantize_weights, quantize_weights
from moereg.selection.decide import reading_in_place
from moereg.spec.quant_schemes import QUANT_SCHEMES
from moereg.testing.inputs import make_weights
from moereg.weights.elements import pack_nibbles
from moereg.weights.permuted import PermutedWeights


def method_of(name: str, **fields: Any) -> Any:
    return type(name, (), fields)()


def by_strategy(strategy: Any, **fields: Any) -> Any:
    weight_quant = SimpleNamespace(strategy=strategy)
    return method_of("CompressedTensorsW8A8Fp8MoEMethod", block_quant=False, weight_quant=weight_quant, **fields)


def by_scheme(activation_scheme: str) -> Any:
    config = SimpleNamespace(activation_scheme=activation_scheme)
    return method_of("Fp8MoEMethod", block_quant=False, quant_config=config)


def int4(symmetric: bool, group_size: int | None = 32, name: str = "WNA16", order: Any = None, **fields: Any) -> Any:
    quant = SimpleNamespace(symmetric=symmetric, actorder=order)
    held = {"num_bits": 4, "group_size": group_size, "weight_quant": quant, **fields}
    return method_of(f"CompressedTensors{name}MoEMethod", **held)


def by_words(name: str, **config: Any) -> Any:
    return method_of(name, quant_config=SimpleNamespace(**config))


blocks = functools.partial(method_of, block_quant=True, weight_block_size=[128, 128])
modelopt_nvfp4 = functools.partial(method_of, "ModelOptNvFp4FusedMoE", use_global_sf=False)
ct_nvfp4 = functools.partial(method_of, "CompressedTensorsW4A4Nvfp4MoEMethod", use_a16=False)
gptq = by_words(
    "AutoGPTQMoEMethod", quant_type=SimpleNamespace(size_bits=4), is_sym=True, desc_act=False, group_size=64
)
awq = by_words("AutoAWQMoEMethod", zero_point=True, group_size=-1)

SCALED: Final = {"weight": "_weight", "scale": "_weight_scale"}
STATIC: Final = {**SCALED, "activation_scale": "_input_scale"}
TWO_SCALES: Final = {**SCALED, "scale_2": "_weight_scale_2"}
PACKED: Final = {"weight": "_weight_packed", "scale": "_weight_scale"}
DIVIDED: Final = {**PACKED, "scale_2": "_weight_global_scale"}
ZEROS: Final = {**PACKED, "zero_point": "_weight_zero_point"}
FORMS: Final[list[tuple[Any, str, dict[str, str]]]] = [
    (method_of("UnquantizedFusedMoEMethod"), "unquantized", {"weight": "_weight"}),
    (blocks("Fp8MoEMethod"), "fp8_block128", {"weight": "_weight", "scale": "_weight_scale_inv"}),
    (by_scheme("static"), "fp8_tensor_static", STATIC),
    (by_scheme("dynamic"), "fp8_tensor_dynamic", SCALED),
    (method_of("ModelOptFp8MoEMethod"), "fp8_tensor_static", STATIC),
    (blocks("CompressedTensorsW8A8Fp8MoEMethod"), "fp8_block128", SCALED),
    (by_strategy("channel"), "fp8_channel_token", SCALED),
    (by_strategy(SimpleNamespace(value="channel")), "fp8_channel_token", SCALED),
    (by_strategy("tensor", static_input_scales=True), "fp8_tensor_static", STATIC),
    (by_strategy("tensor", static_input_scales=False), "fp8_tensor_dynamic", SCALED),
    (method_of("CompressedTensorsW8A8Int8MoEMethod"), "int8_w8a8", SCALED),
    (method_of("ModelOptMxFp8FusedMoE"), "mxfp8", SCALED),
    (method_of("CompressedTensorsW8A8Mxfp8MoEMethod"), "mxfp8", SCALED),
    (method_of("GptOssMxfp4MoEMethod"), "mxfp4_w4a16", SCALED),
    (method_of("CompressedTensorsW4A4Mxfp4MoEMethod"), "mxfp4_w4a16", PACKED),
    (modelopt_nvfp4(use_a16=True), "nvfp4_w4a16", TWO_SCALES),
    (modelopt_nvfp4(use_a16=False), "nvfp4", {**TWO_SCALES, "activation_scale": "_input_scale"}),
    (ct_nvfp4(use_a16=True), "nvfp4_w4a16", DIVIDED),
    (ct_nvfp4(), "nvfp4", {**DIVIDED, "activation_scale": "_input_global_scale"}),
    (int4(True), "int4_w4a16_g32", PACKED),
    (int4(True, -1), "int4_w4a16_gall", PACKED),
    (int4(True, None), "int4_w4a16_gall", PACKED),
    (int4(True, 64, "WNA16Marlin", order="static"), "int4_w4a16_g64", PACKED),
    (int4(False), "int4_w4a16_g32_zp", ZEROS),
    (gptq, "int4_w4a16_g64", {"weight": "_qweight", "scale": "_scales"}),
    (awq, "int4_w4a16_gall_zp", {"weight": "_qweight", "scale": "_scales", "zero_point": "_qzeros"}),
]


@pytest.mark.parametrize(("method", "scheme", "suffixes"), FORMS)
def test_a_method_says_its_scheme_and_where_its_tensors_are(method: Any, scheme: str, suffixes: dict[str, str]) -> None:
    form = read_form(method)
    assert form.scheme == scheme
    assert {role: stored.suffix for role, stored in form.tensors.items()} == suffixes
    interleaving = ("UnquantizedFusedMoEMethod", "GptOssMxfp4MoEMethod")
    assert form.may_interleave is (type(method).__name__ in interleaving)


def test_every_reader_is_tested() -> None:
    assert {type(method).__name__ for method, _, _ in FORMS} == set(READERS)


PAIRS: Final = torch.tensor([[1.0, 4.0], [8.0, 2.0], [0.5, 0.25]])
LARGER: Final = torch.tensor([4.0, 8.0, 0.5])
SCALES: Final[dict[str, tuple[Any, str, torch.Tensor, Any]]] = {
    "static fp8": (by_scheme("static"), "activation_scale", LARGER, torch.amax),
    "static fp8 of ModelOpt": (method_of("ModelOptFp8MoEMethod"), "activation_scale", LARGER, torch.amax),
    "fp8 of halves": (by_scheme("dynamic"), "scale", PAIRS, PAIRS),
    "fp8 of no halves": (by_scheme("dynamic"), "scale", PAIRS[:, :1], PAIRS[:, 0]),
    "fp8 of w2": (by_scheme("dynamic"), "scale", LARGER, LARGER),
    "nvfp4 of experts": (modelopt_nvfp4(use_a16=False), "activation_scale", PAIRS, LARGER),
    "nvfp4 of experts, w2": (modelopt_nvfp4(use_a16=False), "activation_scale", LARGER, LARGER),
    "nvfp4 of all": (modelopt_nvfp4(use_a16=False, use_global_sf=True), "activation_scale", PAIRS, torch.amax),
    "nvfp4 of halves": (modelopt_nvfp4(use_a16=True), "scale_2", PAIRS, PAIRS),
    "nvfp4 divided": (ct_nvfp4(), "activation_scale", 1 / PAIRS, LARGER),
    "nvfp4 divided, w2": (ct_nvfp4(), "activation_scale", 1 / LARGER, LARGER),
    "nvfp4 of divided halves": (ct_nvfp4(), "scale_2", 1 / PAIRS, PAIRS),
    "nvfp4 divided, no halves": (ct_nvfp4(), "scale_2", 1 / PAIRS[:, :1], PAIRS[:, 0]),
}


@pytest.mark.parametrize("num_experts", [1, 2, 3])
@pytest.mark.parametrize("name", SCALES)
def test_scales_of_experts(name: str, num_experts: int) -> None:
    method, role, stored, expected = SCALES[name]
    stored = stored[:num_experts].bfloat16()
    found = read_form(method).tensors[role].decode(stored)  # type: ignore[index]
    assert found.dtype == torch.float32
    assert torch.equal(found, expected(stored).float() if callable(expected) else expected[:num_experts])


@pytest.mark.parametrize("method", ["ModelOptMxFp8FusedMoE", "GptOssMxfp4MoEMethod"])
def test_exponents_are_the_same_bytes(method: str) -> None:
    stored = torch.tensor([[126, 127, 128]], dtype=torch.uint8)
    found = read_form(method_of(method)).tensors["scale"].decode(stored)
    assert found.data_ptr() == stored.data_ptr()
    assert found.float().tolist() == [[0.5, 1.0, 2.0]]


AWQ_ORDER: Final = [0, 2, 4, 6, 1, 3, 5, 7]
GENERATOR: Final = torch.Generator().manual_seed(0)
CODES: Final = torch.randint(16, (3, 16, 64), generator=GENERATOR, dtype=torch.uint8)  # [E,N,K]
POINTS: Final = torch.randint(16, (3, 16, 3), generator=GENERATOR, dtype=torch.uint8)  # [E,N,g]
STEPS: Final = torch.rand(3, 16, 3, generator=GENERATOR).bfloat16()  # [E,N,g]


def words_of(codes: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
    """int32 words of eight neighbors along the last dimension, the first of them in the lowest bits."""
    eight = codes.long().unflatten(-1, (-1, 8))[..., order or list(range(8))]
    return (eight << 4 * torch.arange(8)).sum(-1).int()


K_FIRST: Final = {
    "weight": (words_of(CODES).mT, CODES),
    "scale": (STEPS.mT, STEPS),
    "zero_point": (words_of(POINTS.mT), POINTS),
}
K_LAST: Final = {
    "weight": (words_of(CODES), CODES),
    "scale": (STEPS, STEPS),
    "zero_point": (words_of(POINTS.mT).mT, POINTS),
}
AWQ: Final = {
    "weight": (words_of(CODES.mT, AWQ_ORDER), CODES),
    "scale": (STEPS.mT, STEPS),
    "zero_point": (words_of(POINTS.mT, AWQ_ORDER), POINTS),
}
WORDS: Final[dict[str, tuple[Any, dict[str, tuple[torch.Tensor, torch.Tensor]]]]] = {
    "gptq": (gptq, {name: pair for name, pair in K_FIRST.items() if name != "zero_point"}),
    "awq": (awq, AWQ),
    # What says that K comes first: 0.26's Marlin and Triton classes, 0.27 to 0.30, and later ones.
    "ct": (int4(False), K_FIRST),
    "ct, marlin": (int4(False, wna16_backend=SimpleNamespace(name="MARLIN")), K_FIRST),
    "ct, trtllm": (int4(False, wna16_backend=SimpleNamespace(name="FLASHINFER_TRTLLM")), K_LAST),
    "ct, transposed": (int4(False, is_transposed=True), K_FIRST),
    "ct, not transposed": (int4(False, is_transposed=False), K_LAST),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_of_four_bits(name: str) -> None:
    method, held = WORDS[name]
    form = read_form(method)
    assert form.tensors.keys() == held.keys()
    for role, (stored, values) in held.items():
        found = form.tensors[role].decode(stored.contiguous())  # type: ignore[index]
        assert found.is_contiguous()
        if role == "scale":
            assert torch.equal(found, values.float())
        else:
            assert torch.equal(found, pack_nibbles(values))


@pytest.mark.parametrize(("whole", "num_ranks", "hidden"), [(1536, 8, 192), (512, 8, 256), (768, 8, 96), (384, 2, 320)])
def test_refined_blocks_of_a_rank_are_those_of_its_shard(whole: int, num_ranks: int, hidden: int) -> None:
    """Scales are repeated for parts of blocks and cut like weights, as vLLM's loader does."""
    w13, w2 = torch.randn(2, 2, whole, hidden), torch.randn(2, hidden, whole)
    weights = quantize_weights(ExpertWeights(w13=w13.flatten(1, 2), w2=w2), "fp8_block128")
    size = whole // num_ranks
    part = math.gcd(128, size, hidden)
    assert weights.w13_scale is not None
    assert weights.w2_scale is not None

    def of_rank(tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
        halves = tensor.unflatten(dim, (2 if dim == 1 else 1, -1))
        return halves.chunk(num_ranks, dim + 1)[rank].flatten(dim, dim + 1)

    for rank in range(num_ranks):
        held = {"w13_weight": of_rank(weights.w13, 1, rank), "w2_weight": of_rank(weights.w2, 2, rank)}
        for name, scale, dim in (("w13", weights.w13_scale, 1), ("w2", weights.w2_scale, 2)):
            refined = scale.repeat_interleave(128 // part, 1).repeat_interleave(128 // part, 2)
            used = refined.narrow(3 - dim, 0, -(-hidden // part))
            held[f"{name}_weight_scale_inv"] = of_rank(used, dim, rank)
        expected = shard_experts(weights, rank, num_ranks)
        form = read_form(blocks("Fp8MoEMethod", weight_scale_refine=(128 // part, 128 // part)))
        form = dataclasses.replace(form, front=size * rank % 128)
        sizes = {"hidden_size": hidden, "intermediate_size": expected.intermediate_size}
        problem = MoEProblem(num_experts=2, top_k=1, quant="fp8_block128", **sizes)
        parameters = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in held.items()}
        found = take_weights(SimpleNamespace(local_num_experts=2, _parameters=parameters), form, problem, False)
        found.check_against(problem)
        for name in ("w13", "w2"):
            assert torch.equal(found.tensors()[name].view(torch.uint8), expected.tensors()[name].view(torch.uint8))
        # Blocks of padding alone may have any scale.
        for one, other in zip(dequantize_weights(found), dequantize_weights(expected), strict=True):
            assert torch.equal(one, other)


PROBLEM: Final = MoEProblem(num_experts=3, hidden_size=16, intermediate_size=8, top_k=2, has_bias=True)
PLAIN: Final = Form("unquantized", {"weight": Stored("_weight")})


def layer_of(bias_dtype: torch.dtype = torch.bfloat16, **others: torch.Tensor | None) -> Any:
    """A layer's parameters, with one more of experts that nothing reads, and others that are not of experts."""
    shapes = {"w13_weight": (3, 16, 16), "w2_weight": (3, 16, 8), "w13_bias": (3, 16), "w2_bias": (3, 16)}
    shapes |= {"w13_qzeros": (3, 4), "router_weight": (3, 16), "w13s": (2,)}
    tensors = {name: torch.rand(shape, generator=GENERATOR) for name, shape in shapes.items()}
    held = {name: one.to(bias_dtype if "bias" in name else torch.bfloat16) for name, one in tensors.items()}
    parameters = {name: torch.nn.Parameter(one, requires_grad=False) for name, one in held.items()}
    return SimpleNamespace(local_num_experts=3, _parameters={**parameters, "w2_qzeros": None, **others})


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_parameters_of_experts_are_taken_and_left_empty(is_interleaved: bool) -> None:
    layer = layer_of()
    before = {name: one.detach().clone() for name, one in layer._parameters.items() if one is not None}
    found = take_weights(layer, PLAIN, PROBLEM, is_interleaved).tensors()
    assert sorted(found) == ["w13", "w13_bias", "w2", "w2_bias"]
    for name, tensor in found.items():
        expected = before[name if "bias" in name else f"{name}_weight"]
        if is_interleaved and name.startswith("w13"):
            expected = torch.cat([expected[:, 0::2], expected[:, 1::2]], 1)
        assert torch.equal(tensor, expected)
    left = {name for name, one in layer._parameters.items() if one is not None and one.numel()}
    assert left == {"router_weight", "w13s"}
    assert all(len(one) == 3 for name, one in layer._parameters.items() if one is not None and name != "w13s")


@pytest.mark.parametrize("missing", ["w13_weight", "w2_weight", "w13_bias", "w2_bias"])
def test_a_parameter_that_is_missing_is_named_and_nothing_is_taken(missing: str) -> None:
    layer = layer_of(**{missing: None})
    with pytest.raises(ValueError, match=f"the layer must have the parameter {missing}, got w13_weight, w2_weight"):
        take_weights(layer, PLAIN, PROBLEM, False)
    assert all(one is None or one.numel() for one in layer._parameters.values())


@pytest.mark.parametrize(
    ("stored", "taken"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float32),
    ],
)
def test_biases_are_of_a_dtype_that_kernels_read(stored: torch.dtype, taken: torch.dtype) -> None:
    found = take_weights(layer_of(stored), PLAIN, PROBLEM, False).tensors()
    assert (found["w13_bias"].dtype, found["w2_bias"].dtype) == (taken, taken)


@pytest.mark.parametrize("copied", ["", "w13", "w2", "w13_bias", "w2_bias", "w13 w2_bias", "w13 w2 w13_bias w2_bias"])
def test_parameters_get_back_what_a_kernel_reads_where_it_was(copied: str) -> None:
    layer = layer_of()
    places = places_of(layer)
    assert sorted(places) == ["w13_bias", "w13_qzeros", "w13_weight", "w2_bias", "w2_weight"]
    before = {name: one.data_ptr() for name, one in layer._parameters.items() if one is not None}
    tensors = take_weights(layer, PLAIN, PROBLEM, False).tensors()
    tensors |= {name: tensors[name].clone() for name in copied.split()}
    kernel = make_kernel(PROBLEM, ExpertWeights(**tensors), reading_in_place(select_backend(PROBLEM, "cpu")))
    give_back(layer, places, kernel)
    names = {name: name if "bias" in name else f"{name}_weight" for name in tensors}
    for name, parameter in names.items():
        one = layer._parameters[parameter]
        if name in copied.split():
            assert not one.numel()
        else:
            assert one.data_ptr() == before[parameter] == kernel.weights[name].data_ptr()
            assert one.shape == kernel.weights[name].shape
    assert not layer._parameters["w13_qzeros"].numel()


def moved_rows(per_expert: dict[str, Any]) -> list[torch.Tensor]:
    kernel = SimpleNamespace(weights=PermutedWeights("some", per_expert), selection=SimpleNamespace(backend="mine"))
    return rows_of_experts(kernel)  # type: ignore[arg-type]


# No kernel of a GPU computes on nf4, which trains alone.
@pytest.mark.parametrize("scheme", [name for name in QUANT_SCHEMES if not name.startswith("nf4")])
def test_an_expert_that_moves_takes_along_all_that_a_kernel_reads_of_it(scheme: str) -> None:
    problem = MoEProblem(num_experts=3, hidden_size=256, intermediate_size=128, top_k=2, quant=scheme, has_bias=True)
    selection = explain_backends(problem, Platform.from_name("cuda:sm90"))
    fitting = [one for one in selection.decisions if one.accepted and one.backend in ("triton", "torch")]
    assert fitting
    before, order = make_weights(problem, torch.device("cpu")), [2, 0, 1]
    after = ExpertWeights(**{name: one[order] for name, one in before.tensors().items()}, quant=scheme)
    for decision in fitting:
        experts = make_experts(selection, decision)
        found, expected = (experts.permute_weights(weights, problem) for weights in (before, after))
        both = moved_rows(found.per_expert), moved_rows(expected.per_expert)
        for name, mine, theirs in zip(found.per_expert, *both, strict=True):
            assert not torch.equal(mine, theirs), name
            assert torch.equal(mine[order], theirs), name


def test_rows_of_experts_are_views_of_what_a_kernel_reads() -> None:
    tensor, scale = torch.rand(3, 5, 4), torch.rand(3)
    for one in (tensor, tensor.mT, tensor[:1].mT, tensor.view(3, 2, 2, 5).permute(0, 3, 1, 2), scale):
        (rows,) = moved_rows({"w13": one})
        assert (rows.dtype, rows.data_ptr(), rows.shape) == (torch.uint8, one.data_ptr(), (len(one), one[0].nbytes))
    for wrong in (tensor.transpose(0, 1), tensor[:, ::2], scale[0].expand(3), [tensor[0], tensor[1]]):
        with pytest.raises(ValueError, match="must have each expert's w2 in one piece, got another layout of mine"):
            moved_rows({"w2": wrong})
