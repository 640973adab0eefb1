"""The JAX backend against moereg's reference; public names of moereg alone."""

from __future__ import annotations

import subprocess
import sys

import moereg_jax
import pytest
import torch
from jax import export
from moereg_jax import _layer, _torch

import moereg
from moereg.author import ExpertWeights, MoEProblem, Platform, layer_tolerance, reference_experts, relative_error

SIZES = {"num_experts": 6, "hidden_size": 40, "intermediate_size": 24, "top_k": 3}
ACTIVATIONS = ["silu", "gelu", "gelu_tanh", "swigluoai", "relu2", "silu(alpha=1.3, beta=0.5, limit=0.4)"]
CASES = [*((name, "bfloat16") for name in ACTIVATIONS), ("swigluoai", "float32")]


def make_weights(problem: MoEProblem) -> ExpertWeights:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul(0.3).to(problem.torch_dtype)

    experts, rows = problem.num_local_experts, problem.activation.num_halves * problem.intermediate_size
    biases = {"w13_bias": draw(experts, rows), "w2_bias": draw(experts, problem.hidden_size)}
    return ExpertWeights(
        w13=draw(experts, rows, problem.hidden_size),
        w2=draw(experts, problem.hidden_size, problem.intermediate_size),
        **(biases if problem.has_bias else {}),
    )


def make_call(problem: MoEProblem, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden_states = torch.randn(num_tokens, problem.hidden_size, generator=generator).to(problem.torch_dtype)
    scores = torch.rand(num_tokens, problem.num_experts, generator=generator)
    topk_weights, topk_ids = scores.topk(problem.top_k)
    topk_ids = topk_ids.to(torch.int32)
    topk_ids[1::3, 0] = problem.num_experts + 7  # Out of range: adds nothing.
    return hidden_states, topk_weights, topk_ids


def error_of(problem: MoEProblem, num_tokens: int, expert_map: torch.Tensor | None = None) -> float:
    weights, call = make_weights(problem), make_call(problem, num_tokens)
    kernel = moereg.make_kernel(problem, weights, moereg.select_backend(problem, require="jax"), expert_map=expert_map)
    expected = reference_experts(problem, weights, *call, expert_map=expert_map)
    return relative_error(kernel(*call), expected) / layer_tolerance(problem, num_tokens)


@pytest.mark.parametrize(("activation", "dtype"), CASES)
def test_activations_with_biases(activation: str, dtype: str) -> None:
    problem = MoEProblem(**SIZES, activation=activation, dtype=dtype, has_bias=True)
    assert error_of(problem, 13) < 1


def test_ids_that_are_not_mapped_add_nothing() -> None:
    problem = MoEProblem(**SIZES, num_local_experts=2, placement="map", dtype="float32")
    expert_map = torch.tensor([-1, 1, -1, 0, -1, -1], dtype=torch.int32)
    assert error_of(problem, 9, expert_map) < 1


def test_weights_that_scale_the_input() -> None:
    problem = MoEProblem(**{**SIZES, "top_k": 1}, apply_router_weight_on_input=True)
    assert error_of(problem, 9) < 1


def test_no_token_gives_no_row() -> None:
    problem = MoEProblem(**SIZES)
    kernel = moereg.make_kernel(problem, make_weights(problem), moereg.select_backend(problem, require="jax"))
    assert kernel(*make_call(problem, 0)).shape == (0, problem.hidden_size)


def test_nan_where_no_expert_reads() -> None:
    problem = MoEProblem(**SIZES, dtype="float32")
    kernel = moereg.make_kernel(problem, make_weights(problem), moereg.select_backend(problem, require="jax"))
    hidden_states, topk_weights, topk_ids = make_call(problem, 8)
    topk_ids[2] = -1
    expected = kernel(hidden_states, topk_weights, topk_ids)
    hidden_states[2] = float("nan")
    assert torch.equal(kernel(hidden_states, topk_weights, topk_ids), expected)


def test_many_tokens_run_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = MoEProblem(**SIZES, dtype="float32")
    monkeypatch.setattr(moereg_jax.JaxRaggedExperts, "piece_tokens", 8)
    assert error_of(problem, 21) < 1


def test_pieces_bound_the_temporaries_of_large_layers() -> None:
    large = MoEProblem(num_experts=128, hidden_size=2048, intermediate_size=768, top_k=8)
    experts = moereg_jax.JaxRaggedExperts(large, Platform("cpu", "x86_64"))
    tokens = experts.piece_tokens
    assert tokens * 8 * 128 * 2048 * 2 <= 256 << 20 < 2 * tokens * 8 * 128 * 2048 * 2
    assert experts.workspace_shapes(large, 3) == ((4, 2048), (0,))
    assert experts.workspace_shapes(large, 10**6) == ((tokens, 2048), (0,))


def test_a_bucket_compiles_once() -> None:
    problem = MoEProblem(**{**SIZES, "hidden_size": 56})
    kernel = moereg.make_kernel(problem, make_weights(problem), moereg.select_backend(problem, require="jax"))
    before = _layer.run_layer._cache_size()
    for num_tokens in (9, 10, 16, 13):
        kernel(*make_call(problem, num_tokens))
    assert _layer.run_layer._cache_size() == before + 1


def test_reloaded_weights_are_read() -> None:
    problem = MoEProblem(**SIZES, dtype="float32")
    weights, call = make_weights(problem), make_call(problem, 4)
    kernel = moereg.make_kernel(problem, weights, moereg.select_backend(problem, require="jax"))
    before = kernel(*call)
    kernel.reload(ExpertWeights(w13=weights.w13, w2=weights.w2 * 2))
    assert relative_error(kernel(*call), before * 2) < 1e-5


def test_tensors_cross_without_a_copy() -> None:
    tensor = torch.randn(8, 64, requires_grad=True)
    array = _torch._to_jax(tensor)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert torch.from_dlpack(array).data_ptr() == tensor.data_ptr()
    ids = torch.arange(64)
    assert _torch._to_jax(ids).dtype == "int32", "if JAX ever keeps int64, ids need no narrowing"


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize(("activation", "dtype"), CASES)
def test_the_layer_lowers_for_devices_that_are_not_here(activation: str, dtype: str, platform: str) -> None:
    problem = MoEProblem(**SIZES, activation=activation, dtype=dtype, has_bias=True)
    kernel = moereg.make_kernel(problem, make_weights(problem), moereg.select_backend(problem, require="jax"))
    hidden_states, topk_weights, topk_ids = make_call(problem, 8)
    tensors = (hidden_states, topk_weights, topk_ids, *(kernel.weights[name] for name in _torch._WEIGHTS))
    arrays = [_torch._to_jax(tensor) for tensor in tensors]
    exported = export.export(_layer.run_layer, platforms=[platform])(*arrays, **_torch._keywords(problem))
    assert exported.platforms == (platform,)
    assert exported.out_avals[0].shape == (8, problem.hidden_size)
    if platform == "tpu":
        # A matmul of its own, where other devices may multiply every row by every expert.
        assert exported.mlir_module().count('"chlo.ragged_dot"') == 2


@pytest.mark.parametrize(
    ("platform", "allowed", "found"),
    [
        (Platform("cpu", "x86_64"), "", None),
        (Platform("cpu", "x86_64"), "cuda, cpu", None),
        (Platform("cpu", "x86_64"), "cuda", "requires cpu in JAX_PLATFORMS, got cuda"),
        (Platform("cuda", "sm90", versions={"jax-cuda13-plugin": "0.10.2"}), "gpu", None),
        (
            Platform("cuda", "sm90", versions={"jax": "0.10.2"}),
            "",
            "requires jax-cuda12-plugin or jax-cuda13-plugin, without which JAX sees no cuda device; install it",
        ),
        (
            Platform("tpu", "v5e", versions={"jax": "0.10.2"}),
            "",
            "requires libtpu, without which JAX sees no tpu device; install it",
        ),
    ],
)
def test_where_jax_sees_the_device(
    platform: Platform, allowed: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", allowed)
    assert moereg_jax.jax_sees_device(platform) == found


def test_selecting_imports_no_jax() -> None:
    code = (
        "import sys, moereg; p = moereg.MoEProblem(num_experts=4, hidden_size=8, intermediate_size=8, top_k=2);"
        "assert moereg.select_backend(p, require='jax').backend == 'jax'; print('jax' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert process.stdout == "False\n", process.stderr
