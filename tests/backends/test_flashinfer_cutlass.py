"""`flashinfer_cutlass` against the reference, with FlashInfer's function imitated in torch by its contract."""

import contextlib
import dataclasses
import logging
from pathlib import Path

import pytest
import torch

from moereg.backends import flashinfer_moe
from moereg.backends._flashinfer import cutlass, cutlass_blocks
from moereg.backends._flashinfer.tactics import UNTUNED, layer_key
from moereg.experts import ExpertInputs
from moereg.layer.checks import resolve_expert_map
from moereg.numerics.reference import relative_error
from moereg.numerics.tolerances import layer_tolerance
from moereg.platforms import Platform
from moereg.quantize import quantize_weights
from moereg.spec.activations import Activation
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_inputs, make_plain_weights, make_weights
from tests.support.experts_run import apply_experts, truth_of
from tests.support.flashinfer_imitation import CLASSES, Fixed, Imitation

_CPU = torch.device("cpu")


def _problem(quant="unquantized", **changes):
    sizes = {"num_experts": 3, "hidden_size": 128, "intermediate_size": 128, "top_k": 2}
    return MoEProblem(**{**sizes, "quant": quant, **changes})


def _run(problem, weights=None, num_tokens=5, routing="unmapped", ep_rank=0):
    """Relative error of a call, its bound, and what was called."""
    weights = make_weights(problem, _CPU) if weights is None else weights
    inputs = make_inputs(problem, num_tokens, routing, _CPU)
    expert_map = resolve_expert_map(problem, ep_rank, None, _CPU)
    experts = CLASSES[problem.quant.name](problem, Platform.from_name("cuda:sm90"))
    imitation = Imitation()
    experts.implementation.library = imitation.library
    experts.implementation._tuner = Fixed()
    permuted = experts.permute_weights(weights.contiguous(), problem)
    assert permuted.layout in experts.layouts
    out = apply_experts(experts, ExpertInputs(*inputs.call, expert_map=expert_map), permuted)
    expected = truth_of(problem, weights, inputs, expert_map)
    return relative_error(out, expected), layer_tolerance(problem, num_tokens), imitation


@pytest.mark.parametrize("quant", CLASSES)
def test_numbers_of_each_scheme(quant):
    error, bound, imitation = _run(_problem(quant))
    assert error <= bound
    assert imitation.pairs == [[-1, -1] if quant == "fp8_block128" else [3, 47]]


@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize(("hidden", "intermediate"), [(128, 192), (200, 100), (130, 320), (256, 1)])
def test_blocks_that_do_not_divide(hidden, intermediate, activation):
    problem = _problem("fp8_block128", hidden_size=hidden, intermediate_size=intermediate, activation=activation)
    weights = make_weights(problem, _CPU)
    weights.w13_scale[0] *= 1e-9  # Too small for the kernels, about 1e-12.
    error, bound, _ = _run(problem, weights)
    assert error <= bound


def _fp8_weights(problem, **changes):
    plain = make_plain_weights(dataclasses.replace(problem, quant="unquantized"), _CPU)
    scales = {"a13_scale": torch.tensor(0.02), "a2_scale": torch.tensor(0.03)}
    return quantize_weights(plain, problem.quant, **{**scales, **changes})


_SMALL = {"hidden_size": 68, "intermediate_size": 36, "has_bias": True}
_OTHERS = [("unquantized", name) for name in ("swigluoai", "gelu", "gelu_tanh", "relu2")]
_OTHERS += [(name, "swigluoai") for name in CLASSES if name not in ("unquantized", "mxfp8", "int4_w4a8_g128")]
_OTHERS += [("fp8_tensor_static", "relu2"), ("mxfp4_w4a16", "relu2")]
_OTHERS += [("int4_w4a8_g128", name) for name in ("silu", "gelu_tanh", "relu2")]
_LAYERS = {
    **{f"{quant}-{name}": (quant, {"activation": name, "has_bias": True}) for quant, name in _OTHERS},
    **{
        f"{quant}-padded": (quant, _SMALL)
        for quant in ("unquantized", "fp8_tensor_static", "mxfp4_w4a16", "nvfp4", "int4_w4a8_g128")
    },
    "clamped": ("unquantized", {"activation": Activation("silu", alpha=1.3, beta=0.5, limit=0.7)}),
}


@pytest.mark.parametrize("name", _LAYERS)
def test_numbers_of_other_layers(name):
    """Sizes that the kernels do not take are padded."""
    quant, changes = _LAYERS[name]
    error, bound, imitation = _run(_problem(quant, **changes), num_tokens=3)
    assert error <= bound
    assert imitation.calls[0]["input"].shape[1] % {"unquantized": 8, "fp8_tensor_static": 16}.get(quant, 128) == 0


@pytest.mark.parametrize(
    ("a13_scale", "shape"),
    [(torch.tensor(0.02), (5, 2)), (torch.tensor([0.01, 0.02, 0.03]), (10, 1))],
    ids=["tokens", "routes"],
)
def test_a_scale_for_each_expert_makes_one_row_a_route(a13_scale, shape):
    problem = _problem("fp8_tensor_static")
    error, bound, imitation = _run(problem, _fp8_weights(problem, a13_scale=a13_scale))
    assert error <= bound
    assert imitation.calls[0]["ids"].shape == shape


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("quant", ["fp8_tensor_static", "nvfp4"])
@pytest.mark.parametrize("has_zeros", [False, True], ids=["differ", "zero"])
def test_scales_of_gate_and_up_that_differ(quant, has_bias, has_zeros):
    """Rows of a half whose scale is zero are 0, and FlashInfer's one scale is the other half's."""
    problem = _problem(quant, has_bias=has_bias)
    weights = _fp8_weights(problem, separate_halves=True)
    scale = weights.w13_scale if weights.w13_scale_2 is None else weights.w13_scale_2
    if has_zeros:
        scale[0, 1], scale[1, 0], scale[2] = 0.0, 0.0, 0.0
    before = weights.w13.view(torch.uint8).clone()
    error, bound, _ = _run(problem, weights, num_tokens=8)
    assert error <= bound
    assert torch.equal(weights.w13.view(torch.uint8), before)


def test_a_part_of_the_experts():
    for rank in (0, 1):
        error, bound, imitation = _run(_problem(num_experts=8, num_local_experts=4), ep_rank=rank)
        assert error <= bound
        ids = imitation.calls[0]["ids"]
        assert ids.dtype == torch.int32
        assert int(ids.max()) < 4


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """The folder of kernels that are compiled at run time, in a process that has called none."""
    monkeypatch.setenv("TRTLLM_DG_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cutlass_blocks, "_CALLED", set())
    return tmp_path / "cache"


def test_compiling_at_run_time_is_announced_once_for_all_layers_of_a_size(compiled, caplog):
    problem = _problem("fp8_block128")
    with caplog.at_level(logging.INFO, "moereg"):
        _run(problem)
        _run(problem, num_tokens=8)
        assert caplog.messages == [
            "compiling FlashInfer's fp8 block kernels for 1 to 8 tokens with nvcc takes about 20 s; kept in "
            f"{compiled} for each layer shape"
        ]
        for name in ("gemm_swapAB_256_128_16", "gemm_128_128_16"):
            (compiled / name).mkdir(parents=True)
        _run(problem, num_tokens=9)
        _run(_problem("fp8_block128", num_experts=4), num_tokens=9)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO"]
    assert caplog.messages[1].startswith(
        "loading FlashInfer's fp8 block kernels for 9 to 16 tokens, with about 10 s of nvcc for a missing one, takes"
    )


def test_compiling_in_a_capture_is_warned_of(compiled, monkeypatch, caplog):
    monkeypatch.setattr(cutlass_blocks, "is_capturing", lambda tensor: True)
    _run(_problem("fp8_block128"), num_tokens=6)
    assert "while a CUDA graph is captured, which may fail; call the layer with 6 tokens once before" in caplog.text


def test_tokens_that_share_their_kernels():
    """FlashInfer's tiles have 16 to 128 tokens in steps of 8, then 128 rows, and change at 32, 64 and 1,024 tokens."""
    ranges = [cutlass_blocks.tokens_of_tiles(tokens) for tokens in range(1, 1300)]
    for tokens, (least, most) in enumerate(ranges, start=1):
        assert least <= tokens <= most
        assert ranges[least - 1] == ranges[most - 1 if most < 1300 else tokens - 1] == (least, most)
    assert [ranges[tokens - 1] for tokens in (16, 24, 31, 32, 63, 64, 65, 200, 1023, 1024, 1025)] == [
        *[(9, 16), (17, 24), (25, 31), (32, 32), (57, 63), (64, 64), (65, 128), (129, 256), (897, 1023)],
        *[(1024, 1024), (1025, 1152)],
    ]


def test_few_tokens_after_many_of_any_layer():
    """FlashInfer's runner then asks for the memory of the largest call, which no earlier answer has."""
    problem = _problem("fp8_block128")
    experts = flashinfer_moe.FlashInferCutlassBlockExperts(problem, Platform.from_name("cuda:sm90"))
    experts.implementation.library = Imitation().library
    weights = experts.permute_weights(make_weights(problem, _CPU).contiguous(), problem)
    shapes = {tokens: experts.workspace_shapes(problem, tokens) for tokens in (2, 40)}
    assert 0 <= 2 * shapes[40][0][0] - experts.implementation._library_bytes(40) < 2
    for tokens in (2, 40, 2):
        inputs = make_inputs(problem, tokens, "uniform", _CPU)
        out = torch.empty(tokens, 128, dtype=problem.torch_dtype)
        scratch = [torch.empty(shape, dtype=problem.torch_dtype) for shape in shapes[tokens]]
        experts.apply(out, ExpertInputs(*inputs.call), weights, *scratch)
        assert out.isfinite().all()


def test_block_scales_that_are_too_small_for_the_kernels_go_into_the_codes():
    problem = _problem("fp8_block128", hidden_size=192, intermediate_size=256)
    weights = make_weights(problem, _CPU)
    for scale in (weights.w13_scale, weights.w2_scale):
        scale[0] *= 1e-9  # About 1e-12.
        scale[1, 0, 0], scale[1, 1, 1] = 0.0, 1e-23
    codes, scale = cutlass_blocks.lifted(weights.w13, weights.w13_scale)
    before, after = (
        pair[0].double() * pair[1].double().repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :, :192]
        for pair in ((weights.w13, weights.w13_scale), (codes, scale))
    )
    assert float((after - before).abs().max()) <= 2e-13
    assert torch.equal(codes[2].view(torch.uint8), weights.w13[2].view(torch.uint8))
    assert cutlass_blocks.lifted(weights.w13[2:], weights.w13_scale[2:])[0].data_ptr() == weights.w13[2].data_ptr()
    error, bound, _ = _run(problem, weights)
    assert error <= bound


@pytest.mark.parametrize("has_own", [False, True], ids=["one", "own"])
def test_4_bit_integers_take_codes_as_numbers(has_own):
    """The numbers of their codes, which FlashInfer's own rounding leaves alone; rows as for fp8."""
    problem = _problem("int4_w4a8_g128")
    scale = torch.tensor([0.01, 0.02, 0.03]) if has_own else torch.tensor(0.02)
    weights = _fp8_weights(problem, a13_scale=scale, a2_scale=torch.tensor([0.03, 0.1, 0.2]))
    error, bound, imitation = _run(problem, weights)
    assert error <= bound
    (call,) = imitation.calls
    assert call["ids"].shape == ((10, 1) if has_own else (5, 2))
    assert torch.equal(call["input"], call["input"].to(torch.float8_e4m3fn).bfloat16())
    assert float(call["input"].abs().max()) > 50


def test_biases_of_layers_without_a_gate_stay_as_they_are():
    problem = _problem("int4_w4a8_g128", activation="relu2", has_bias=True)
    weights = make_weights(problem, _CPU)
    before = weights.w13_bias.clone()
    error, bound, _ = _run(problem, weights)
    assert error <= bound
    assert torch.equal(weights.w13_bias, before)


@pytest.mark.parametrize("quant", ["fp8_tensor_static", "int4_w4a8_g128"])
def test_workspaces_hold_the_rows_that_the_weights_need(quant):
    """Before the weights say which, rows of tokens or of routes: whichever of the two needs more."""
    problem = _problem(quant)
    library = Imitation().library
    for key in (lambda rows, top_k: 256 * rows, lambda rows, top_k: 4096 * top_k):
        experts = CLASSES[quant](problem, Platform.from_name("cuda:sm90"))
        experts.implementation.library = library._replace(
            workspace_bytes=lambda rows, hidden, inner, experts, top_k, key=key, **flags: key(rows, top_k)
        )
        unknown = experts.workspace_shapes(problem, 8)
        assert unknown[0][0] * 2 >= max(key(8, 2), key(16, 1))
    experts.permute_weights(_fp8_weights(problem).contiguous(), problem)
    of_tokens = experts.workspace_shapes(problem, 8)
    experts.permute_weights(_fp8_weights(problem, a13_scale=torch.tensor([0.01, 0.02, 0.03])).contiguous(), problem)
    of_routes = experts.workspace_shapes(problem, 8)
    assert unknown == of_routes
    row_bytes = 128 * (3 if quant == "fp8_tensor_static" else 5)
    assert (of_tokens[1][0], of_routes[1][0]) == (8 * row_bytes // 2, 16 * row_bytes // 2)


@pytest.mark.parametrize(("factor", "fits"), [(0.1, True), (1e-4, False), (1e4, False)], ids=["near", "less", "more"])
def test_scales_that_differ_much_do_not_go_with_float16(factor, fits):
    problem = _problem("fp8_tensor_static", dtype="float16")
    weights = _fp8_weights(problem, separate_halves=True)
    weights.w13_scale[1, 1] = weights.w13_scale[1, 0] * factor
    text = r"which leaves float16 where they differ by more than 32, got .*; quantize bo"
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match=text):
        error, bound, _ = _run(problem, weights)
        assert error <= bound


def test_weights_without_a_place_in_the_kernels_are_refused():
    problem = _problem("fp8_tensor_static", activation="swigluoai")
    with pytest.raises(ValueError, match=r"^FlashInfer's kernels take one scale for gate and up rows where the activ"):
        _run(problem, _fp8_weights(problem, separate_halves=True))
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
    experts.implementation.library, experts.implementation._tuner = Imitation().library, Fixed()
    inputs = make_inputs(problem, 3, "uniform", _CPU)
    odd = [torch.empty(3 * 128 + 1, dtype=problem.torch_dtype)[1:].view(3, 128) for _ in range(2)]
    odd[0].copy_(inputs.hidden_states)
    scratch = [torch.empty(shape, dtype=problem.torch_dtype) for shape in experts.workspace_shapes(problem, 3)]
    call = ExpertInputs(odd[0], inputs.topk_weights, inputs.topk_ids)
    experts.apply(odd[1], call, experts.permute_weights(weights.contiguous(), problem), *scratch)
    assert relative_error(odd[1], truth_of(problem, weights, inputs)) <= layer_tolerance(problem, 3)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"activation": Activation("gelu", limit=3.0)},
            "applies limit and beta to silu and swigluoai alone, got gelu(limit=3.0)",
        ),
        ({"placement": "map"}, "requires placement in (contiguous), got map"),
        ({"dtype": "float32"}, "requires dtype in (bfloat16), got float32"),
        (
            {"activation": Activation("silu", limit=7.0), "quant": "int4_w4a8_g128"},
            "requires no clamp and beta=0, since scales of the intermediate go into up rows, got silu(limit=7.0)",
        ),
        ({"dtype": "float16", "quant": "int4_w4a8_g128"}, "requires dtype in (bfloat16), got float16"),
    ],
    ids=["gelu-clamp", "map", "float32", "int4-clamp", "int4-float16"],
)
def test_reasons(changes, text):
    from moereg import explain_backends

    selection = explain_backends(_problem(**changes), "cuda:sm90", require="flashinfer_cutlass")
    assert text in [reason.text for decision in selection.decisions for reason in decision.reasons]


class _Asking:
    """A tuner that asks for everything, as one that has found nothing yet."""

    def pair(self, num_tokens, candidates, timer, is_capturing):
        timer()(UNTUNED)
        return (3, 47)


@pytest.mark.parametrize("quant", ["unquantized", "mxfp4_mxfp8"])
def test_tactics_are_timed_on_drawn_rows(quant, monkeypatch):
    """The first call may be a warm-up of zeros or of anything, and what is found is kept."""
    monkeypatch.setattr(cutlass, "CallTimer", lambda call, out: call)
    monkeypatch.setattr(Fixed, "pair", _Asking.pair)
    error, bound, imitation = _run(_problem(quant, num_experts=6), num_tokens=12)
    assert error <= bound
    drawn, own = imitation.calls
    assert imitation.pairs == [[-1, -1], [3, 47]]
    assert drawn["input"].dtype == own["input"].dtype
    assert drawn["input"].float().isfinite().all()
    assert not torch.equal(drawn["input"].float(), own["input"].float())
    assert all(len(set(row)) == 2 for row in drawn["ids"].tolist())
    assert 0 <= int(drawn["ids"].min()) < int(drawn["ids"].max()) < 6


class _Device:
    """The current device of a process with two, as `torch.cuda` has it."""

    current = 0

    @contextlib.contextmanager
    def of(self, tensor):
        before, self.current = self.current, 1
        yield
        self.current = before


def test_everything_is_timed_on_the_device_of_the_call(monkeypatch):
    device, seen = _Device(), []

    class Recording:
        def pair(self, num_tokens, candidates, timer, is_capturing):
            seen.append(device.current)
            return (3, 47)

    monkeypatch.setattr(torch.cuda, "device_of", device.of)
    monkeypatch.setattr(Fixed, "pair", Recording().pair.__func__)
    _run(_problem())
    assert seen == [1]
    assert device.current == 0


def test_workspaces_are_asked_for_on_the_device_of_the_weights():
    implementation = flashinfer_moe.FlashInferCutlassExperts(_problem(), Platform.from_name("cuda:sm90")).implementation
    asked = []
    library = Imitation().library
    implementation.library = library._replace(workspace_bytes=lambda *sizes, **flags: asked.append(flags) or 16)
    implementation._device = torch.device("cuda", 1)
    implementation.workspace_shapes(3)
    assert [flags["device"] for flags in asked] == [torch.device("cuda", 1)]


def test_tactics_are_kept_by_all_that_times_depend_on(tmp_path):
    (tmp_path / "fused_moe_90.so").write_bytes(b"kernels")
    platform = Platform("cuda", "sm90", device_name="a device")
    whole = _problem(num_experts=8)
    keys = [
        layer_key(problem, problem.quant, platform, Path(tmp_path / "fused_moe_90.so"), choices)
        for problem, choices in (
            (whole, 2),
            (whole, 1),
            (dataclasses.replace(whole, num_local_experts=4), 2),
            (_problem(num_experts=4), 2),
            (dataclasses.replace(whole, activation=Activation("silu", limit=7.0)), 2),
        )
    ]
    assert len(set(keys)) == len(keys)
