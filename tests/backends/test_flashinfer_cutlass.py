"""`flashinfer_cutlass` against the reference, with FlashInfer's function imitated in torch by its contract."""

import dataclasses
import logging

import pytest
import torch

from moereg.activations import Activation
from moereg.backends import flashinfer_moe
from moereg.experts import ExpertInputs
from moereg.placement import resolve_expert_map
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.quantize import quantize_weights
from moereg.reference import reference_experts, relative_error
from moereg.testing.inputs import make_inputs, make_plain_weights, make_weights
from moereg.tolerances import layer_tolerance
from tests.support.flashinfer_imitation import Imitation

_CPU = torch.device("cpu")
_CLASSES = {
    "unquantized": flashinfer_moe.FlashInferCutlassExperts,
    "fp8_tensor_static": flashinfer_moe.FlashInferCutlassFp8Experts,
    "fp8_block128": flashinfer_moe.FlashInferCutlassBlockExperts,
    "mxfp4_w4a16": flashinfer_moe.FlashInferCutlassPackedExperts,
    "mxfp4_mxfp8": flashinfer_moe.FlashInferCutlassMxfp8Experts,
    "mxfp8": flashinfer_moe.FlashInferCutlassMxfp8Experts,
    "nvfp4": flashinfer_moe.FlashInferCutlassNvfp4Experts,
}


class _Fixed:
    """A tuner that timed everything already."""

    def pair(self, num_tokens, candidates, timer, is_capturing):
        return (3, 47)


def _problem(quant="unquantized", **changes):
    sizes = {"num_experts": 3, "hidden_size": 128, "intermediate_size": 128, "top_k": 2}
    return MoEProblem(**{**sizes, "quant": quant, **changes})


def _run(problem, weights=None, num_tokens=5, routing="unmapped", ep_rank=0):
    """Relative error of a call, its bound, and what was called."""
    weights = make_weights(problem, _CPU) if weights is None else weights
    inputs = make_inputs(problem, num_tokens, routing, _CPU)
    expert_map = resolve_expert_map(problem, ep_rank, None, _CPU)
    experts = _CLASSES[problem.quant.name](problem, Platform.from_name("cuda:sm90"))
    imitation = Imitation()
    experts.implementation.library = imitation.library
    experts.implementation._tuner = _Fixed()
    permuted = experts.permute_weights(weights.contiguous(), problem)
    assert permuted.layout in experts.layouts
    scratch = [
        torch.full(shape, float("nan"), dtype=problem.torch_dtype)
        for shape in experts.workspace_shapes(problem, num_tokens)
    ]
    out = torch.full((num_tokens, problem.hidden_size), float("nan"), dtype=problem.torch_dtype)
    call = ExpertInputs(inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, expert_map=expert_map)
    experts.apply(out, call, permuted, *scratch)
    expected = reference_experts(
        problem, weights, inputs.hidden_states, inputs.topk_weights, inputs.topk_ids, expert_map=expert_map
    )
    return relative_error(out, expected), layer_tolerance(problem, num_tokens), imitation


@pytest.mark.parametrize("quant", _CLASSES)
def test_numbers_of_each_scheme(quant):
    error, bound, imitation = _run(_problem(quant))
    assert error <= bound
    assert imitation.pairs == [[-1, -1] if quant == "fp8_block128" else [3, 47]]


_OTHERS = [("unquantized", name) for name in ("swigluoai", "gelu", "gelu_tanh", "relu2")]
_OTHERS += [(name, "swigluoai") for name in _CLASSES if name not in ("unquantized", "mxfp8")]
_OTHERS += [("fp8_tensor_static", "relu2"), ("mxfp4_w4a16", "relu2")]


@pytest.mark.parametrize(("quant", "activation"), _OTHERS)
def test_numbers_of_other_activations_with_biases(quant, activation):
    error, bound, _ = _run(_problem(quant, activation=activation, has_bias=True), num_tokens=3)
    assert error <= bound


@pytest.mark.parametrize("quant", ["unquantized", "fp8_tensor_static", "mxfp4_w4a16", "nvfp4"])
def test_sizes_that_the_kernels_do_not_take_are_padded(quant):
    error, bound, imitation = _run(_problem(quant, hidden_size=68, intermediate_size=36, has_bias=True))
    assert error <= bound
    multiple = {"unquantized": 8, "fp8_tensor_static": 16}.get(quant, 128)
    assert imitation.calls[0]["input"].shape[1] % multiple == 0


def test_a_part_of_the_experts():
    for rank in (0, 1):
        error, bound, imitation = _run(_problem(num_experts=8, num_local_experts=4), ep_rank=rank)
        assert error <= bound
        ids = imitation.calls[0]["ids"]
        assert ids.dtype == torch.int32
        assert int(ids.max()) < 4


def test_clamp_and_scalars_of_silu():
    activation = Activation("silu", alpha=1.3, beta=0.5, limit=0.7)
    error, bound, _ = _run(_problem(activation=activation))
    assert error <= bound


def _fp8_weights(problem, **changes):
    plain = make_plain_weights(dataclasses.replace(problem, quant="unquantized"), _CPU)
    scales = {"a13_scale": torch.tensor(0.02), "a2_scale": torch.tensor(0.03)}
    return quantize_weights(plain, problem.quant, **{**scales, **changes})


def test_compiling_at_run_time_is_announced(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(tmp_path))
    problem = _problem("fp8_block128")
    with caplog.at_level(logging.INFO, "moereg"):
        _run(problem)
        for name in ("gemm_swapAB_256_128_16", "gemm_128_128_16"):
            (tmp_path / "cache" / name).mkdir(parents=True)
        _run(problem)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert caplog.messages[0] == (
        "compiling FlashInfer's fp8 block kernels for 4 to 7 tokens with nvcc takes about 20 s; once for each layer "
        f"shape, kept in {tmp_path}/cache"
    )


def test_one_scale_for_the_tokens_makes_one_row_a_token():
    problem = _problem("fp8_tensor_static")
    error, bound, imitation = _run(problem, _fp8_weights(problem))
    assert error <= bound
    assert imitation.calls[0]["ids"].shape == (5, 2)


def test_a_scale_for_each_expert_makes_one_row_a_route():
    problem = _problem("fp8_tensor_static")
    scales = torch.tensor([0.01, 0.02, 0.03])
    error, bound, imitation = _run(problem, _fp8_weights(problem, a13_scale=scales))
    assert error <= bound
    assert imitation.calls[0]["ids"].shape == (10, 1)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("quant", ["fp8_tensor_static", "nvfp4"])
def test_scales_of_gate_and_up_that_differ(quant, has_bias):
    problem = _problem(quant, has_bias=has_bias)
    error, bound, _ = _run(problem, _fp8_weights(problem, separate_halves=True))
    assert error <= bound


def test_scales_that_differ_do_not_go_with_a_clamp():
    problem = _problem("fp8_tensor_static", activation="swigluoai")
    with pytest.raises(ValueError, match=r"^FlashInfer's kernels take one scale for gate and up rows where the activ"):
        _run(problem, _fp8_weights(problem, separate_halves=True))


def test_nvfp4_takes_static_scales_alone():
    problem = _problem("nvfp4")
    weights = dataclasses.replace(make_weights(problem, _CPU), a13_scale=None, a2_scale=None)
    with pytest.raises(ValueError, match=r"^flashinfer_cutlass takes nvfp4 activations with static global scales, got"):
        _run(problem, weights)


def test_weights_that_need_no_change_are_shared_and_inputs_stay():
    problem = _problem()
    weights = make_weights(problem, _CPU)
    before = weights.w13.clone()
    experts = flashinfer_moe.FlashInferCutlassExperts(problem, Platform.from_name("cuda:sm90"))
    permuted = experts.permute_weights(weights.contiguous(), problem)
    assert permuted["w2"].data_ptr() == weights.w2.data_ptr()
    assert torch.equal(weights.w13, before)
    assert torch.equal(permuted["w13"][:, :128], before[:, 128:])


def test_rows_that_begin_anywhere():
    """FlashInfer refuses rows that do not begin at 16 bytes."""
    problem = _problem()
    weights = make_weights(problem, _CPU)
    experts = flashinfer_moe.FlashInferCutlassExperts(problem, Platform.from_name("cuda:sm90"))
    experts.implementation.library, experts.implementation._tuner = Imitation().library, _Fixed()
    inputs = make_inputs(problem, 3, "uniform", _CPU)
    odd = [torch.empty(3 * 128 + 1, dtype=problem.torch_dtype)[1:].view(3, 128) for _ in range(2)]
    odd[0].copy_(inputs.hidden_states)
    scratch = [torch.empty(shape, dtype=problem.torch_dtype) for shape in experts.workspace_shapes(problem, 3)]
    call = ExpertInputs(odd[0], inputs.topk_weights, inputs.topk_ids)
    experts.apply(odd[1], call, experts.permute_weights(weights.contiguous(), problem), *scratch)
    expected = reference_experts(problem, weights, inputs.hidden_states, inputs.topk_weights, inputs.topk_ids)
    assert relative_error(odd[1], expected) <= layer_tolerance(problem, 3)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"activation": Activation("gelu", limit=3.0)},
            "applies limit and beta to silu and swigluoai alone, got gelu(limit=3.0)",
        ),
        ({"placement": "map"}, "requires placement in (contiguous), got map"),
        ({"dtype": "float32"}, "requires dtype in (bfloat16), got float32"),
    ],
    ids=["gelu-clamp", "map", "float32"],
)
def test_reasons(changes, text):
    from moereg import explain_backends

    selection = explain_backends(_problem(**changes), "cuda:sm90", require="flashinfer_cutlass")
    assert text in [reason.text for decision in selection.decisions for reason in decision.reasons]
