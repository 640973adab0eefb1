"""`flashinfer_cutile` beside the package: FlashInfer's own functions run on a CPU up to each launch of a kernel."""

from __future__ import annotations

import collections
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moereg.author import ExpertInputs, ExpertWeights, MoEProblem, PermutedWeights, quantize_weights
from moereg.backends import flashinfer_moe as page
from moereg.backends._flashinfer import claims, cutile
from moereg.backends._loaded import Call
from moereg.experts import Experts
from moereg.platforms import Platform
from moereg.spec.quant_schemes import QuantScheme

pytestmark = pytest.mark.peers

H200 = Platform.from_name("cuda:sm90")
E, H, I, K = 8, 256, 128, 2  # noqa: E741
Launched = list[tuple[str, tuple[Any, ...]]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """The launches of a call, each with its kernel's name and arguments; nothing runs."""
    import cuda.tile

    found: Launched = []

    def launch(stream: None, grid: tuple[int, ...], kernel: Any, arguments: tuple[Any, ...], **_: Any) -> None:
        function = kernel._annotated_function.pyfunc
        inspect.signature(function).bind(*arguments)
        assert all(size > 0 for size in grid), function.__name__
        found.append((function.__name__, arguments))

    properties = collections.namedtuple("properties", "multi_processor_count")
    monkeypatch.setattr(cuda.tile, "launch", launch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties(132))
    return found


def _run(cls: type[Experts], problem: MoEProblem, tokens: int, computes: QuantScheme | None) -> torch.Tensor:
    torch.manual_seed(0)
    rows = problem.activation.num_halves * I
    weights = ExpertWeights(w13=torch.randn(E, rows, H).bfloat16(), w2=torch.randn(E, H, I).bfloat16())
    if problem.quant.weight is not None:
        weights = quantize_weights(weights, problem.quant)
    experts = cls(problem, H200, computes or problem.quant)
    permuted = experts.permute_weights(weights=weights.contiguous(), problem=problem)
    first, second = (
        torch.empty(shape, dtype=torch.bfloat16)
        for shape in experts.workspace_shapes(problem=problem, num_tokens=tokens)
    )
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(tokens)]).int()
    ids[0] = E
    inputs = ExpertInputs(torch.randn(tokens, H).bfloat16(), torch.rand(tokens, K), ids)
    out = torch.full((tokens, H), 7.0, dtype=torch.bfloat16)
    experts.apply(out=out, inputs=inputs, weights=permuted, workspace13=first, workspace2=second)
    return out


CASES = [
    (page.FlashInferCuTileExperts, "unquantized", None, "silu"),
    (page.FlashInferCuTileExperts, "unquantized", None, "relu2"),
    (page.FlashInferCuTileExperts, "unquantized", None, "gelu_tanh"),
    (page.FlashInferCuTileFloat8Experts, "fp8_tensor_dynamic", None, "silu"),
    (page.FlashInferCuTileFloat8Experts, "fp8_tensor_dynamic", claims.FP8_TENSOR_W8A16, "silu"),
    (page.FlashInferCuTileFloat8Experts, "mxfp8", claims.MXFP8_W8A16, "silu"),
    (page.FlashInferCuTileFloat4Experts, "mxfp4_w4a16", None, "swigluoai"),
    (page.FlashInferCuTileFloat4Experts, "nvfp4_w4a16", None, "silu"),
]


@pytest.mark.parametrize(
    ("cls", "quant", "computes", "activation"),
    CASES,
    ids=[
        f"{quant}-{computes.name if computes else 'as_stored'}-{activation}" for _, quant, computes, activation in CASES
    ],
)
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_call_goes_through_to_every_kernel(
    cls: type[Experts], quant: str, computes: QuantScheme | None, activation: str, tokens: int, launched: Launched
) -> None:
    problem = MoEProblem(num_experts=E, hidden_size=H, intermediate_size=I, top_k=K, quant=quant, activation=activation)
    out = _run(cls, problem, tokens, computes)
    names = [name for name, _ in launched]
    assert names[0] == ("_permute_small" if tokens * K <= 24 else "_permute_chunk_rank")
    assert names[-1] == "_combine"
    # Token 0 has no expert: its row is cleared after the kernels, which here wrote nothing.
    assert not bool(out[0].any())
    assert bool((out[1:] == 7.0).all())
    combined = launched[-1][1]
    assert combined[2].data_ptr() == out.data_ptr()
    # Tokens without experts have weight 0, and an expert that exists.
    assert not bool(combined[1][:K].any())
    assert launched[0][1][0][:K].tolist() == [0, 0]


def test_more_tokens_never_need_less_memory() -> None:
    problem = MoEProblem(num_experts=128, hidden_size=512, intermediate_size=256, top_k=8)
    for cls, quant in (
        (page.FlashInferCuTileExperts, "unquantized"),
        (page.FlashInferCuTileFloat4Experts, "mxfp4_w4a16"),
    ):
        layer = MoEProblem(**{**problem.to_dict(), "quant": quant})
        experts = cls(layer, H200)
        sizes = [experts.workspace_shapes(problem=layer, num_tokens=tokens) for tokens in range(1, 130)]
        assert sizes == sorted(sizes)


@pytest.mark.parametrize(("cls", "quant"), [CASES[0][:2], CASES[3][:2], CASES[6][:2]], ids=["bf16", "fp8", "fp4"])
def test_calls_of_one_kind_compile_nothing_anew(
    cls: type[Experts], quant: str, launched: Launched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What FlashInfer's kernels are specialized by, constants and lengths that 16 divides, follows from the kind."""
    for name in ("own_routes", "copy_live_rows", "clear_dead_rows"):
        monkeypatch.setattr(cutile, name, lambda *_: None)
    problem = MoEProblem(num_experts=16, hidden_size=H, intermediate_size=I, top_k=K, quant=quant)
    layer = cls(problem, H200).implementation
    matrix = torch.empty(16, H, 2 * I, dtype=torch.bfloat16)
    weights = PermutedWeights(layer.layouts[0], dict.fromkeys(layer.weight_names, matrix))
    kinds: dict[Any, set[tuple[Any, ...]]] = {}
    for tokens in (*range(1, 24), *range(29, 36), 40, 44, 62, 64, 65, 70, 127, 128, 129, 256, 257, 260, 300):
        launched.clear()
        ids = torch.zeros(tokens, K, dtype=torch.int32)
        x = torch.empty(tokens, H, dtype=torch.bfloat16)
        memory = [torch.empty(shape, dtype=torch.bfloat16) for shape in layer.workspace_shapes(tokens)]
        layer.run(Call(x, ExpertInputs(x, torch.empty(tokens, K), ids), weights, *memory))
        kinds.setdefault(layer._sizes(tokens)[1], set()).add(_specialized(launched))
    assert len(kinds) > 10
    assert {len(found) for found in kinds.values()} == {1}


def _specialized(launched: Launched) -> tuple[Any, ...]:
    from flashinfer.fused_moe.cutile import activation, fp4, fp8, moe

    modules, found = (moe, activation, fp8, fp4), []
    for name, arguments in launched:
        kernel = next(getattr(module, name) for module in modules if hasattr(module, name))
        parameters = inspect.signature(kernel._annotated_function.pyfunc).parameters.values()
        for argument, parameter in zip(arguments, parameters, strict=True):
            if isinstance(argument, torch.Tensor):
                found.append((name, *(length % 16 == 0 for length in argument.shape)))
            elif "Const" in str(parameter.annotation):
                found.append((name, argument))
    return tuple(found)


# Tiles beside those that FlashInfer's untuned runners take.
SIZES = (
    (8, 64, 64),
    (8, 128, 64),
    (8, 64, 128),
    (8, 4096, 14336),
    (128, 2048, 768),
    (32, 2880, 2880),
    (256, 7168, 2048),
)

RUNNERS = {
    "bf16": ("CuTileBf16Runner", page.FlashInferCuTileExperts, "unquantized", None),
    "fp8": ("CuTileFp8PerTensorRunner", page.FlashInferCuTileFloat8Experts, "fp8_tensor_dynamic", None),
    "fp8-a16": (
        "CuTileFp8PerTensorBf16Runner",
        page.FlashInferCuTileFloat8Experts,
        "fp8_tensor_dynamic",
        claims.FP8_TENSOR_W8A16,
    ),
    "mxfp8-a16": ("CuTileMxfp8Bf16Runner", page.FlashInferCuTileFloat8Experts, "mxfp8", claims.MXFP8_W8A16),
    "nvfp4-a16": ("CuTileNvfp4Bf16Runner", page.FlashInferCuTileFloat4Experts, "nvfp4_w4a16", None),
    "mxfp4-a16": ("CuTileMxfp4Bf16Runner", page.FlashInferCuTileFloat4Experts, "mxfp4_w4a16", None),
}


def _theirs(runner: Any, num_tokens: int, problem: MoEProblem) -> tuple[int, ...]:
    """Rows of a tile, then columns, reduced columns and programs of both products."""
    x = torch.empty(num_tokens, problem.hidden_size, device="meta")
    ids = torch.empty(num_tokens, problem.top_k, device="meta")
    if hasattr(runner, "_fp4_fallback_tactic"):
        rows, _, *tiles = runner._fp4_fallback_tactic([x, x, ids])
    else:
        rows, *tiles = runner._fallback_tactic([x, x, ids])
    return (rows, *tiles)


@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize(("name", "cls", "quant", "computes"), RUNNERS.values(), ids=RUNNERS)
def test_tiles_are_flashinfers_untuned_ones(
    name: str, cls: type[Experts], quant: str, computes: QuantScheme | None, activation: str
) -> None:
    import flashinfer.fused_moe.runners as library

    runner = object.__new__(getattr(library, name))
    runner._device_arch, runner._num_sms = 90, 132
    for experts, hidden, intermediate in SIZES:
        problem = MoEProblem(
            num_experts=experts,
            hidden_size=hidden,
            intermediate_size=intermediate,
            top_k=4,
            quant=quant,
            activation=activation,
        )
        runner.config = SimpleNamespace(
            activation=SimpleNamespace(is_gated=problem.activation.gated),
            routing=SimpleNamespace(num_experts=experts, top_k=4),
            experts=SimpleNamespace(intermediate_size=intermediate),
        )
        layer: Any = cls(problem, H200, computes or problem.quant).implementation  # type: ignore[attr-defined]
        for num_tokens in (1, 2, 3, 16, 64, 100, 256, 512, 1000, 1024, 2048, 4096, 8192, 16384, 40000):
            rows, first, second = layer.tiles(num_tokens * 4)
            found = (rows, *first, *second)
            assert found == _theirs(runner, num_tokens, problem), (experts, num_tokens)
            assert rows in layer.block_rows
