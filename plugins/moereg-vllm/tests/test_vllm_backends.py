"""Selection and layouts of vLLM's backends: what can be checked without a GPU and without vllm."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from moereg_vllm import _marlin_layout as layout
from moereg_vllm import _routes, marlin

from moereg.author import (
    BackendCell,
    ExpertInputs,
    ExpertWeights,
    MoEProblem,
    Platform,
    QuantScheme,
    dequantize_weights,
    explain_backends,
    list_cells,
    local_expert_ids,
    quantize_weights,
)
from moereg.testing.ledger import Verification, evidence_of, merge_ledger

NAMES = ("deepgemm", "marlin", "triton_kernels", "vllm_cutlass", "vllm_triton")
LAYER = {"num_experts": 8, "hidden_size": 1024, "intermediate_size": 256, "top_k": 2}
H200 = "cuda:sm90"


def accepted(problem: MoEProblem, platform: str | Platform = H200) -> dict[str, str]:
    """The backends of this wheel that can serve a problem, each with what it computes."""
    decisions = explain_backends(problem, platform=platform).decisions
    return {found.backend: found.computes for found in decisions if found.accepted and found.backend in NAMES}


def reasons(problem: MoEProblem, name: str, platform: str | Platform = H200) -> str:
    """Everything that is said against a backend, cell by cell."""
    decisions = explain_backends(problem, platform=platform).decisions
    return "\n".join(reason.text for found in decisions if found.backend == name for reason in found.reasons)


SERVED = {
    "unquantized": {"vllm_triton"},
    "fp8_tensor_static": {"marlin"},
    "fp8_tensor_dynamic": {"marlin"},
    "fp8_channel_token": {"marlin", "vllm_cutlass", "vllm_triton"},
    "fp8_block128": {"deepgemm", "marlin", "vllm_triton"},
    "nvfp4": {"marlin"},
    "nvfp4_w4a16": {"marlin"},
    "mxfp4_w4a16": {"marlin", "triton_kernels"},
    "int8_w8a8": {"marlin", "vllm_triton"},
    "int8_w8a16": {"marlin"},
    "int4_w4a16_g32": {"marlin"},
    "int4_w4a16_g128_zp": {"marlin"},
    "int4_w4a16_gall": {"marlin"},
    "mxfp8": set(),
}


@pytest.mark.parametrize(("quant", "names"), SERVED.items())
def test_which_backends_serve_a_scheme(quant: str, names: set[str]) -> None:
    assert set(accepted(MoEProblem(**LAYER, quant=quant))) == names


def test_marlin_says_that_it_leaves_activations_at_16_bits() -> None:
    assert accepted(MoEProblem(**LAYER, quant="fp8_channel_token"))["marlin"] == "fp8_channel_w8a16"
    exact = MoEProblem(**LAYER, quant="fp8_channel_token", exact_activations=True)
    assert set(accepted(exact)) == {"vllm_cutlass", "vllm_triton"}


REJECTED = [
    ({"hidden_size": 1000}, "marlin", "int4_w4a16_g32", "hidden_size % 64 == 0, got 1000"),
    ({"intermediate_size": 192}, "marlin", "int4_w4a16_g128", "intermediate_size % 128 == 0, got 192"),
    ({"hidden_size": 1536}, "deepgemm", "fp8_block128", "hidden_size % 1024 == 0, got 1536"),
    ({"dtype": "float16"}, "deepgemm", "fp8_block128", "dtype in (bfloat16), got float16"),
    ({"dtype": "float16"}, "marlin", "mxfp4_w4a16", "dtype in (bfloat16), got float16"),
    ({"has_bias": True}, "vllm_cutlass", "fp8_channel_token", "does not apply biases"),
    ({"activation": "swigluoai"}, "vllm_cutlass", "fp8_channel_token", "requires activation in"),
    ({"activation": "silu(limit=3.0)"}, "vllm_cutlass", "fp8_channel_token", "does not apply the swiglu clamp"),
    ({"hidden_size": 128}, "triton_kernels", "mxfp4_w4a16", "requires hidden_size > 128, got 128"),
    ({"intermediate_size": 64}, "triton_kernels", "mxfp4_w4a16", "requires intermediate_size > 64, got 64"),
    ({"activation": "relu2"}, "triton_kernels", "mxfp4_w4a16", "got relu2"),
    ({"num_experts": 1024, "num_local_experts": 64}, "vllm_triton", "unquantized", "num_experts <= 991, got 1024"),
    ({"deterministic": True}, "vllm_triton", "unquantized", "does not give the same bits each time"),
    ({"activation_format": "batched"}, "marlin", "nvfp4_w4a16", "got batched"),
    ({"dtype": "float32"}, "vllm_triton", "unquantized", "got float32"),
]


@pytest.mark.parametrize(("changes", "name", "quant", "text"), REJECTED)
def test_what_is_rejected_says_why(changes: dict[str, object], name: str, quant: str, text: str) -> None:
    problem = MoEProblem(**{**LAYER, "quant": quant, **changes})  # type: ignore[arg-type]
    assert name not in accepted(problem)
    assert text in reasons(problem, name)


def test_architectures() -> None:
    block = MoEProblem(**LAYER, quant="fp8_block128")
    assert set(accepted(block, "cuda:sm80")) == {"marlin"}
    assert set(accepted(block, "cuda:sm89")) == {"marlin", "vllm_triton"}
    assert set(accepted(block, "cuda:sm100")) == {"marlin", "vllm_triton"}
    assert accepted(block, "rocm:gfx942") == {}


@pytest.mark.parametrize(
    ("versions", "text"),
    [
        ({}, "requires vllm"),
        ({"vllm": "0.25.1"}, "0.25.1"),
        ({"vllm": "0.27.0"}, "0.27.0"),
        ({"vllm": "0.26.0"}, ""),
    ],
)
def test_the_version_of_vllm(versions: dict[str, str], text: str) -> None:
    platform = Platform("cuda", "sm90", versions=versions, probed=True)
    problem = MoEProblem(**LAYER)
    assert ("vllm_triton" in accepted(problem, platform)) == (not text)
    assert text in reasons(problem, "vllm_triton", platform)


def test_deciding_imports_no_kernel_library() -> None:
    code = (
        "import sys, moereg\n"
        f"from moereg_vllm import {', '.join(NAMES)}\n"
        f"problem = moereg.MoEProblem(**{LAYER})\n"
        f"assert moereg.select_backend(problem, platform={H200!r}, require='vllm_triton').backend == 'vllm_triton'\n"
        "assert not {'vllm', 'triton', 'deep_gemm', 'triton_kernels'} & set(sys.modules)\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert process.returncode == 0, process.stderr


# Layouts. A tensor that Marlin reads is put back in order by the definition of the order, and the numbers compared.


def undealt(values: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Values whose place p of each run came from `places[p]`, in their old order."""
    runs = values.reshape(-1, len(places))
    back = torch.empty_like(runs)
    for place, source in enumerate(places):
        back[:, source] = runs[:, place]
    return back.reshape(values.shape)


def column_order(groups: int) -> list[int]:
    """Which column's scale lies at each place: those that a thread of `mma.m16n8k16` multiplies lie together."""
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
        for hidden, intermediate in ((256, 128), (192, 96), (192, 64)):
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


# Routes.


def call_of(ids: list[list[int]], expert_map: torch.Tensor | None) -> ExpertInputs:
    topk_ids = torch.tensor(ids, dtype=torch.int32)
    return ExpertInputs(torch.ones(len(ids), 4), torch.full(topk_ids.shape, 0.5), topk_ids, expert_map=expert_map)


def test_routes_without_a_local_expert() -> None:
    problem = MoEProblem(num_experts=4, num_local_experts=2, hidden_size=4, intermediate_size=4, top_k=2)
    table = _routes.expert_table(problem, torch.device("cpu"))
    assert table.tolist() == [0, 1, -1, -1]
    inputs = call_of([[0, 3], [1, -1], [2, 9]], torch.tensor([-1, 1, -1, 0], dtype=torch.int32))
    mapped = _routes.mapped_routes(inputs, problem, table)
    assert mapped.topk_ids.tolist() == [[2, 0], [1, 2], [2, 2]]
    assert mapped.topk_weights.tolist() == [[0, 0.5], [0.5, 0], [0, 0]]
    assert mapped.expert_map is table
    assert mapped.num_experts == 4
    local = _routes.local_routes(inputs, problem)
    assert local.topk_ids.tolist() == local_expert_ids(inputs.topk_ids, 2, inputs.expert_map).tolist()
    everything = MoEProblem(num_experts=4, hidden_size=4, intermediate_size=4, top_k=2)
    unmapped = _routes.mapped_routes(call_of([[0, 3], [1, -1], [2, 9]], None), everything, table)
    assert unmapped.topk_ids.tolist() == [[0, 3], [1, 0], [2, 0]]
    assert unmapped.topk_weights.tolist() == [[0.5, 0.5], [0.5, 0], [0.5, 0]]
    assert unmapped.expert_map is None
    assert len(_routes.expert_table(everything, torch.device("cpu"))) == 5


@pytest.mark.parametrize("expert_map", [None, torch.tensor([-1, 1, -1, 0], dtype=torch.int32)])
def test_biases_that_are_added_last(expert_map: torch.Tensor | None) -> None:
    local = 4 if expert_map is None else 2
    problem = MoEProblem(num_experts=4, num_local_experts=local, hidden_size=4, intermediate_size=4, top_k=2)
    inputs = call_of([[0, 3], [1, -1], [2, 9]], expert_map)
    routes = _routes.mapped_routes(inputs, problem, _routes.expert_table(problem, torch.device("cpu")))
    bias = torch.arange(1.0, 1 + 4 * local).view(local, 4)
    out = torch.ones(3, 4)
    _routes.add_routed_bias(out, bias, routes)
    experts = local_expert_ids(inputs.topk_ids, local, expert_map).tolist()
    expected = [sum((0.5 * bias[expert] for expert in row if expert >= 0), torch.ones(4)) for row in experts]
    assert torch.equal(out, torch.stack(expected))


def test_routing_weights_on_the_input() -> None:
    problem = MoEProblem(num_experts=2, hidden_size=4, intermediate_size=4, top_k=1, apply_router_weight_on_input=True)
    routes = _routes.mapped_routes(
        call_of([[1], [5]], None), problem, _routes.expert_table(problem, torch.device("cpu"))
    )
    assert routes.hidden_states.tolist() == [[0.5] * 4, [0.0] * 4]
    assert routes.topk_weights.tolist() == [[1.0], [0.0]]
    assert routes.topk_ids.tolist() == [[1], [0]]


def test_the_wheel_names_what_it_registers() -> None:
    cells = [cell for cell in list_cells() if cell.experts.__module__.startswith("moereg_vllm.")]
    assert {cell.name for cell in cells} == set(NAMES)
    assert all(cell.requires == ("vllm<0.27,>=0.26",) for cell in cells)
    assert Path(marlin.__file__).with_name("py.typed").exists()
    points = {point.name for point in importlib.metadata.entry_points(group="moereg.backends")}
    assert set(NAMES) <= points


def own_cells() -> list[BackendCell]:
    return [cell for cell in list_cells() if cell.name in NAMES]


def test_the_ledger_is_of_this_code() -> None:
    ledger = Path(marlin.__file__).with_name("moereg_ledger.json")
    if not ledger.exists():
        pytest.skip("this wheel ships no ledger; it takes a Hopper GPU and vllm to record one")
    evidence = [evidence_of(cell) for cell in own_cells()]
    assert sum(len(found.current) for found in evidence) == len(json.loads(ledger.read_text())["records"]) > 0
    assert not any(found.stale for found in evidence)


def test_a_ledger_of_other_code_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moereg.testing.ledger.module_file", lambda module: tmp_path / "__init__.py")
    cells = own_cells()
    records = [Verification.of(cell, Platform.from_name(H200), 1) for cell in cells]
    merge_ledger(tmp_path / "moereg_ledger.json", records)
    assert all(len(evidence_of(cell).current) == 1 and not evidence_of(cell).stale for cell in cells)
    merge_ledger(tmp_path / "moereg_ledger.json", [dataclasses.replace(one, digest="0" * 64) for one in records])
    assert all(len(evidence_of(cell).stale) == 1 and not evidence_of(cell).current for cell in cells)


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


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("expert_map", [None, torch.tensor([-1, 1, -1, 0], dtype=torch.int32)])
def test_sums_over_choices_round_once(
    expert_map: torch.Tensor | None, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = 4 if expert_map is None else 2
    problem = MoEProblem(num_experts=4, num_local_experts=local, hidden_size=4, intermediate_size=4, top_k=2)
    inputs = call_of([[0, 3], [1, -1], [2, 9]], expert_map)
    routes = _routes.mapped_routes(inputs, problem, _routes.expert_table(problem, torch.device("cpu")))
    routes = dataclasses.replace(routes, topk_weights=routes.topk_weights * torch.tensor([[1.0, 0.7]]))
    rows = torch.randn((3, 2, 1030), generator=torch.Generator().manual_seed(0)).half()
    expected = (rows.float() * routes.topk_weights.unsqueeze(-1)).sum(1).half()
    rows[routes.topk_ids >= local] = float("nan")
    out = torch.full((3, 1030), float("nan"), dtype=torch.float16)
    if on_device:
        pytest.importorskip("triton", reason="the kernel is Triton's")
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.delitem(sys.modules, "moereg_vllm._localize", raising=False)
        kernel = importlib.import_module("moereg_vllm._localize").weighted_sum
        monkeypatch.delitem(sys.modules, "moereg_vllm._localize")
        kernel[(3, 2)](rows, routes.topk_weights, routes.topk_ids, out, local, 1030, 2, BLOCK=1024)
    else:
        _routes.sum_routes(out, rows, routes, local)
    assert torch.equal(out, expected)
