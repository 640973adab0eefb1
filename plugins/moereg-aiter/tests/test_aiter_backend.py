"""`aiter` on an imitation of AITER: order of weights, gfx942's float, routes, whole layers; and what it refuses."""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import aiter_imitation
import pytest
import torch
from moereg_aiter import layer, package, weights
from moereg_aiter.backend import AiterExperts, AiterFp8Experts

from moereg import BackendError, MoEKernel, UnsupportedProblemError, make_kernel, select_backend
from moereg.author import (
    ExpertInputs,
    Experts,
    ExpertWeights,
    MoEProblem,
    Platform,
    explain_backends,
    layer_tolerance,
    quantize_weights,
    reference_experts,
    relative_error,
)
from moereg.errors import LayoutNotInvertibleError
from moereg.layer.checks import resolve_expert_map

SIZES = {"num_experts": 4, "hidden_size": 256, "intermediate_size": 128, "top_k": 2}
PLATFORMS = ("rocm:gfx942", "rocm:gfx950")
FP8_CELLS = [
    ("fp8_tensor_static", "rocm:gfx942"),
    ("fp8_tensor_static", "rocm:gfx950"),
    ("fp8_channel_token", "rocm:gfx950"),
    ("fp8_block128", "rocm:gfx950"),
]


@pytest.fixture
def aiter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The imitation on the path, as pip would install it; its compiled modules go to a folder of the test."""
    aiter_imitation.install(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("AITER_JIT_DIR", raising=False)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def call_of(problem: MoEProblem, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_states = torch.randn(num_tokens, problem.hidden_size, generator=generator(7)).to(problem.torch_dtype)
    scores = torch.rand(num_tokens, problem.num_experts, generator=generator(8))
    topk_weights, topk_ids = scores.topk(problem.top_k)
    topk_ids = topk_ids.int()
    topk_ids[1::3, 0] = problem.num_experts + 3
    # Beside the first expert, which a careless stand-in for no expert would be.
    topk_ids[2::3] = torch.tensor([0, -1], dtype=torch.int32)
    return hidden_states, topk_weights, topk_ids


def weights_of(problem: MoEProblem) -> ExpertWeights:
    experts, size = problem.num_local_experts, problem.intermediate_size
    w13 = torch.randn(experts, 2 * size, problem.hidden_size, generator=generator(3)) * 0.1
    w13[:, :size] *= 2
    w2 = torch.randn(experts, problem.hidden_size, size, generator=generator(4)) * 0.1
    dtype = problem.torch_dtype
    plain = ExpertWeights(w13=w13.to(dtype), w2=w2.to(dtype))
    if problem.quant.weight is None:
        return plain
    # Static scales of activations: one for all experts, as AITER needs it.
    is_static = problem.quant.activation is not None and problem.quant.activation.static
    scales = {name: torch.tensor(0.02) for name in ("a13_scale", "a2_scale")} if is_static else {}
    return quantize_weights(plain, problem.quant, **scales)


def error_of(
    problem: MoEProblem,
    platform: str,
    kind: type[Experts],
    ep_rank: int = 0,
    num_tokens: int = 9,
    own_map: torch.Tensor | None = None,
) -> float:
    given, call = weights_of(problem), call_of(problem, num_tokens)
    before = [tensor.clone() for tensor in given.tensors().values()]
    experts = kind(problem, Platform.from_name(platform))
    permuted = experts.permute_weights(given, problem)
    assert all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8)) if one.dim() else one == other
        for one, other in zip(before, given.tensors().values(), strict=True)
    )
    assert permuted.layout in experts.layouts
    expert_map = resolve_expert_map(problem, ep_rank, own_map, torch.device("cpu"))
    shapes = experts.workspace_shapes(problem, num_tokens)
    out = torch.full_like(call[0], float("nan"))
    experts.apply(out, ExpertInputs(*call, expert_map=expert_map), permuted, *map(torch.empty, shapes))
    expected = reference_experts(problem, given, *call, expert_map=expert_map, computes=problem.quant)
    return relative_error(out, expected) / layer_tolerance(problem, num_tokens, problem.quant)


@pytest.mark.usefixtures("aiter")
@pytest.mark.parametrize("platform", PLATFORMS)
def test_layers_of_16_bits(platform: str) -> None:
    assert error_of(MoEProblem(**SIZES), platform, AiterExperts) < 1


@pytest.mark.usefixtures("aiter")
@pytest.mark.parametrize(("scheme", "platform"), FP8_CELLS)
def test_layers_of_8_bits(scheme: str, platform: str) -> None:
    assert error_of(MoEProblem(**SIZES, quant=scheme), platform, AiterFp8Experts) < 1


@pytest.mark.usefixtures("aiter")
def test_dynamic_scales_of_gfx942_miss_the_bound() -> None:
    """Why its page leaves them out there."""
    assert 1 < error_of(MoEProblem(**SIZES, quant="fp8_channel_token"), "rocm:gfx942", AiterFp8Experts) < 1.5


@pytest.mark.usefixtures("aiter")
@pytest.mark.parametrize("ep_rank", [0, 1])
def test_experts_of_one_rank(ep_rank: int) -> None:
    problem = MoEProblem(**SIZES, num_local_experts=2)
    assert error_of(problem, "rocm:gfx942", AiterExperts, ep_rank) < 1


@pytest.mark.usefixtures("aiter")
@pytest.mark.parametrize(
    ("scheme", "own_map"),
    [
        ("unquantized", [1, -1, 0, 1]),
        ("fp8_channel_token", [0, 0, -1, -1]),
        ("unquantized", [3, 1, 0, 2]),
        ("fp8_block128", [3, 1, 1, 2]),
    ],
    ids=["some", "some-fp8", "all", "all-blocks"],
)
def test_a_map_in_any_order(scheme: str, own_map: list[int]) -> None:
    """Two experts of the layer may be one here, and a token may choose both."""
    num_local_experts = 4 if 3 in own_map else 2
    problem = MoEProblem(**SIZES, quant=scheme, num_local_experts=num_local_experts, placement="map")
    kind = AiterExperts if scheme == "unquantized" else AiterFp8Experts
    assert error_of(problem, "rocm:gfx950", kind, own_map=torch.tensor(own_map, dtype=torch.int32), num_tokens=33) < 1


@pytest.mark.usefixtures("aiter")
def test_kernels_that_sort_no_routes_read_ids_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """AITER tunes few tokens of some sizes to kernels that index weights by the ids as given, and ignore the mask."""
    monkeypatch.setattr(aiter_imitation, "flat_rows", {(256, 128, 4, 2)})
    assert error_of(MoEProblem(**SIZES, quant="fp8_block128"), "rocm:gfx950", AiterFp8Experts) < 1


def test_routes_to_nowhere_go_where_their_token_does_not() -> None:
    ids = torch.tensor([[0, -1, 2, 9], [7, 9, -1, 6], [-1, 5, 1, 0], [3, 2, 1, 0], [-1, -1, 8, 9]], dtype=torch.int32)
    given = torch.rand(ids.shape, generator=generator(0)) + 0.1
    expert_ids, expert_weights = layer._routes_of_all(ids, given, 8)
    is_route = (ids >= 0) & (ids < 8)
    assert expert_ids.dtype == torch.int32
    assert torch.equal(expert_ids[is_route], ids[is_route])
    assert torch.equal(expert_weights, given * is_route)
    assert ((expert_ids >= 0) & (expert_ids < 8)).all()
    assert all(len(set(row)) == 4 for row in expert_ids.tolist())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz], ids=str)
def test_the_order_of_weights_is_a_permutation_of_each_expert(dtype: torch.dtype) -> None:
    given = torch.randn(2, 48, 96, generator=generator(0)).to(dtype)
    shuffled = weights.shuffled(given)
    bits = torch.int16 if given.element_size() == 2 else torch.int8
    assert torch.equal(aiter_imitation.restored(shuffled).view(bits), given.view(bits))
    assert torch.equal(weights.shuffled(given[1:]).view(bits), shuffled[1:].view(bits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_order_is_the_one_that_aiter_documents(dtype: torch.dtype) -> None:
    """AITER's own steps: views of 16 rows and two lanes of 16 bytes, whose axes change places."""
    given = torch.arange(2 * 32 * 64).remainder(120).view(2, 32, 64).to(torch.float32).to(dtype)
    lane = 16 // given.element_size()
    bits = torch.int16 if given.element_size() == 2 else torch.int8
    steps = given.view(bits).view(-1, 2, 16, 2, 32 // lane, lane).permute(0, 1, 3, 4, 2, 5).reshape(given.shape)
    assert torch.equal(weights.shuffled(given).view(bits), steps)


def test_the_float_of_gfx942_means_the_same_numbers() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers, scale = codes.float() * 0.375, torch.tensor(0.375)
    other, doubled = weights.as_fnuz(codes.clone(), scale)
    assert other.dtype == torch.float8_e4m3fnuz
    torch.testing.assert_close(other.float() * doubled, numbers, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("aiter")
def test_two_scales_that_differ_are_refused() -> None:
    problem = MoEProblem(**SIZES, quant="fp8_tensor_static")
    experts = AiterFp8Experts(problem, Platform.from_name("rocm:gfx942"))
    given = weights_of(problem)
    assert given.w13_scale is not None
    halves = given.w13_scale[:, None].repeat(1, 2)
    same = dataclasses.replace(given, w13_scale=halves)
    assert torch.equal(experts.permute_weights(same, problem)["w13_scale"], 2 * given.w13_scale)
    halves[2, 1] *= 2
    with pytest.raises(ValueError, match=r"aiter requires one scale for gate and up .* deny it for this layer"):
        experts.permute_weights(same, problem)
    apart = dataclasses.replace(given, a2_scale=torch.tensor([1.0, 1.0, 2.0, 1.0]))
    with pytest.raises(ValueError, match=r"one scale of activations for all experts, got a2_scale .* deny it"):
        experts.permute_weights(apart, problem)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation": "gelu"}, "requires activation in (silu), got gelu"),
        ({"activation": "silu(limit=7.0)"}, "does not apply the swiglu clamp"),
        ({"has_bias": True}, "does not apply biases"),
        ({"dtype": "float32"}, "requires dtype in (bfloat16, float16), got float32"),
        ({"intermediate_size": 192}, "requires intermediate_size % 128 == 0, got 192"),
        ({"deterministic": True}, "does not give the same bits each time"),
        ({"activation_format": "batched"}, "requires activation format in (standard), got batched"),
    ],
)
def test_refused_problems(change: dict[str, object], reason: str) -> None:
    selection = explain_backends(MoEProblem(**{**SIZES, **change}), platform="rocm:gfx942", require="aiter")
    texts = [text.text for decision in selection.decisions if decision.backend == "aiter" for text in decision.reasons]
    assert any(reason in text for text in texts), texts


def test_blocks_of_8_bits_want_every_expert() -> None:
    """Tuned kernels of that scheme read no mask; those of the others do."""
    gfx950 = Platform.from_name("rocm:gfx950")
    parts = {**SIZES, "num_local_experts": 2}
    for scheme in ("unquantized", "fp8_tensor_static", "fp8_channel_token"):
        problem = MoEProblem(**parts, quant=scheme)
        assert select_backend(problem, platform=gfx950, require="aiter").backend == "aiter"
    selection = explain_backends(MoEProblem(**parts, quant="fp8_block128"), platform=gfx950, require="aiter")
    texts = [text.text for decision in selection.decisions if decision.backend == "aiter" for text in decision.reasons]
    assert "requires experts held by this rank in (all), got some" in texts


@pytest.mark.parametrize(("version", "is_accepted"), [
    ("0.1.15.post3", False), ("0.1.16", True), ("0.1.20.post1+rocm7.0", True), ("0.1.21.dev3", False), ("0.1.21", False)
])  # fmt: skip
def test_releases_whose_source_was_read(version: str, is_accepted: bool) -> None:
    machine = Platform("rocm", "gfx942", "GPU", 2**37, {"amd-aiter": version}, probed=True)
    selection = explain_backends(MoEProblem(**SIZES), platform=machine, require="aiter")
    codes = {text.code for decision in selection.decisions if decision.backend == "aiter" for text in decision.reasons}
    assert ("package" not in codes) == is_accepted


def test_a_machine_without_it_hears_where_it_comes_from() -> None:
    """`pip install amd-aiter` leads nowhere: it is on no package index."""
    machine = Platform("rocm", "gfx942", "GPU", 2**37, {}, probed=True)
    with pytest.raises(UnsupportedProblemError) as raised:
        select_backend(MoEProblem(**SIZES), platform=machine, require="aiter")
    # Versions of `packaging` space it otherwise.
    pattern = r"aiter .*: requires amd-aiter ?@ git\+https://github.com/ROCm/aiter@v0\.1\.20, which is not installed"
    assert re.search(pattern, str(raised.value)), str(raised.value)


@pytest.mark.parametrize(("scheme", "platform"), [*(("unquantized", name) for name in PLATFORMS), *FP8_CELLS])
def test_it_is_nobodys_default(scheme: str, platform: str) -> None:
    problem = MoEProblem(**SIZES, quant=scheme)
    assert explain_backends(problem, platform=platform).backend != "aiter"
    assert select_backend(problem, platform=platform, prefer=("aiter",)).backend == "aiter"


# What is wrong with an installed AITER, by files alone.


def test_an_installed_aiter_can_be_imported(aiter: Path) -> None:
    platform = Platform.from_name("rocm:gfx942")
    assert package.can_be_imported(platform) is None
    assert package.jit_folder() == aiter / "aiter" / "jit"


def test_without_aiter_it_says_where_to_get_it() -> None:
    reason = package.can_be_imported(Platform.from_name("rocm:gfx942"))
    where = "pip install 'amd-aiter @ git+https://github.com/ROCm/aiter@v0.1.20'"
    assert reason == f"requires the package aiter, found none; {where}"


def test_another_package_of_that_name_is_told_apart(aiter: Path) -> None:
    (aiter / "aiter" / "fused_moe.py").unlink()
    reason = package.can_be_imported(Platform.from_name("rocm:gfx942"))
    assert reason is not None
    assert reason.startswith("requires AMD's aiter, found another package of that name in ")


def test_a_folder_for_kernels_that_cannot_be_written(aiter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file where the folder should be: root may write into any folder.
    monkeypatch.setenv("AITER_JIT_DIR", str(aiter / "aiter" / "fused_moe.py"))
    reason = package.can_be_imported(Platform.from_name("rocm:gfx942"))
    assert reason is not None
    assert reason.startswith("requires a folder for compiled kernels, cannot write to ")
    assert reason.endswith("; set AITER_JIT_DIR to one")


def test_kernels_of_another_gpu(aiter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(aiter))
    monkeypatch.setenv("ROCM_PATH", str(aiter))
    gfx942, gfx950 = map(Platform.from_name, PLATFORMS)
    reason = package.can_load_kernels(gfx942)
    assert reason is not None
    assert reason.startswith("requires hipcc to compile kernels at their first call, or a wheel that holds them")
    (aiter / "aiter" / "jit" / "module_moe_ck2stages.so").write_bytes(b"\x7fELF..hip-amdgcn-amd-amdhsa--gfx950\0")
    assert package.can_load_kernels(gfx950) is None
    reason = package.can_load_kernels(gfx942)
    assert reason is not None
    assert "requires kernels for gfx942, found modules for gfx950 and no hipcc; build the wheel with" in reason
    (aiter / "bin").mkdir()
    (aiter / "bin" / "hipcc").write_text("")
    assert package.can_load_kernels(gfx942) is None


def test_compiling_is_announced(aiter: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="moereg"):
        error_of(MoEProblem(**SIZES), "rocm:gfx942", AiterExperts)
    assert f"keeps them in {aiter / 'aiter' / 'jit'}; to avoid that, build its wheel with" in caplog.text
    caplog.clear()
    (aiter / "aiter" / "jit" / "module_moe_asm.so").write_bytes(b"")
    with caplog.at_level(logging.WARNING, logger="moereg"):
        error_of(MoEProblem(**SIZES), "rocm:gfx942", AiterExperts)
    assert not caplog.text


# A kernel of an installed AITER, whose tensors stay on the CPU.


def machine(aiter: Path, version: str = "0.1.20") -> Platform:
    # A probe's answer is kept for each machine, so each test imitates one of its own.
    return Platform("rocm", "gfx942", f"GPU of {aiter}", 2**37, {"amd-aiter": version, "triton": "3.8.0"}, probed=True)


def kernel_on(aiter: Path, monkeypatch: pytest.MonkeyPatch, quant: str = "unquantized") -> MoEKernel:
    (aiter / "aiter" / "jit" / "module_moe_asm.so").write_bytes(b"amdhsa--gfx942")
    monkeypatch.setattr(AiterExperts, "device_types", classmethod(lambda cls, platform: ("cpu",)))
    problem = MoEProblem(**SIZES, quant=quant)
    return make_kernel(problem, weights_of(problem), select_backend(problem, machine(aiter), require="aiter"))


def test_a_kernel_computes(aiter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_on(aiter, monkeypatch)
    call = call_of(kernel.problem, 9)
    expected = reference_experts(kernel.problem, weights_of(kernel.problem), *call)
    assert relative_error(kernel(*call), expected) < layer_tolerance(kernel.problem, 9)


def test_an_import_that_fails_names_backend_cure_and_what_would_do(
    aiter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe imports nothing, so a library that is missing behind it shows at the first call."""
    (aiter / "aiter" / "fused_moe.py").write_text("raise ImportError('libamdhip64.so.7: cannot open it')\n")
    kernel = kernel_on(aiter, monkeypatch)
    with pytest.raises(BackendError) as raised:
        kernel(*call_of(kernel.problem, 9))
    text = str(raised.value)
    assert "raised in AiterExperts.apply: ImportError: libamdhip64.so.7: cannot open it (layer.py:" in text
    assert text.endswith("; triton or torch would do instead")


def test_one_expert_is_read_back_where_nothing_was_computed(aiter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = kernel_on(aiter, monkeypatch)
    found = kernel.weights.to_canonical(2)
    assert torch.equal(found.w13, weights_of(kernel.problem).w13[2:3])
    # One scale of activations for all experts.
    with pytest.raises(LayoutNotInvertibleError, match="keep the canonical weights"):
        kernel_on(aiter, monkeypatch, "fp8_tensor_static").weights.to_canonical(2)
