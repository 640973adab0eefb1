"""Selection with its reasons, routes, and a whole layer on an imitation of what it calls in SonicMoE."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
import types
from enum import Enum
from typing import Any

import moereg_sonic.backend as backend
import pytest
import torch

from moereg.author import (
    ExpertInputs,
    ExpertWeights,
    MoEProblem,
    Platform,
    explain_backends,
    layer_tolerance,
    local_expert_ids,
    reference_experts,
    relative_error,
)

SIZES = {"num_experts": 6, "hidden_size": 512, "intermediate_size": 128, "top_k": 2}
VERSIONS = {
    "sonic-moe": "0.1.2.post1",
    "quack-kernels": "0.4.1",
    "nvidia-cutlass-dsl": "4.4.2",
    "triton": "3.6.0",
}


def machine(versions: dict[str, str]) -> Platform:
    # A probe's answer is kept for each machine, so each test imitates one of its own.
    return Platform("cuda", "sm90", f"imitation {len(versions)} {id(versions)}", versions=versions, probed=True)


def reasons(problem: MoEProblem, platform: Platform | str) -> list[str]:
    decision = next(each for each in explain_backends(problem, platform).decisions if each.backend == "sonic")
    return [reason.text for reason in decision.reasons]


def test_accepted_where_everything_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert reasons(MoEProblem(**SIZES), machine(dict(VERSIONS))) == []


def test_a_missing_package_is_an_ordinary_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sonicmoe" else object())
    found = reasons(MoEProblem(**SIZES), machine(dict(VERSIONS)))
    assert len(found) == 1
    assert "found no sonicmoe; install SonicMoE without its requirements" in found[0]


def test_another_version_of_the_language_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    found = reasons(MoEProblem(**SIZES), machine({**VERSIONS, "nvidia-cutlass-dsl": "4.8.1"}))
    assert len(found) == 1
    assert "4.8.1" in found[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 520}, "requires hidden_size % 64 == 0, got 520"),
        ({"intermediate_size": 160}, "requires intermediate_size % 64 == 0, got 160"),
        ({"activation": "relu2"}, "requires activation in (gelu_tanh, silu), got relu2"),
        ({"has_bias": True}, "does not apply biases"),
        ({"dtype": "float16"}, "requires dtype in (bfloat16), got float16"),
        ({"deterministic": True}, "does not give the same bits each time"),
    ],
)
def test_refused_problems(change: dict[str, Any], reason: str) -> None:
    assert any(reason in text for text in reasons(MoEProblem(**{**SIZES, **change}), "cuda:sm90"))


def test_other_architectures_are_refused() -> None:
    assert "requires platform in (cuda:sm90), got cuda:sm100" in reasons(MoEProblem(**SIZES), "cuda:sm100")


def test_deciding_imports_no_kernel_library() -> None:
    code = (
        "import sys, moereg_sonic.backend; from moereg.author import MoEProblem, explain_backends;"
        f"explain_backends(MoEProblem(**{SIZES!r}), 'cuda:sm90');"
        "found = [name for name in ('sonicmoe', 'quack', 'cutlass', 'triton') if name in sys.modules];"
        "sys.exit(', '.join(found) or 0)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


class _Activation(Enum):
    SWIGLU = "swiglu"
    GEGLU = "geglu"


def _sort(
    ids: torch.Tensor, num_groups: int, counts: torch.Tensor, offsets: torch.Tensor, *indices: torch.Tensor
) -> None:
    """Routes by group, all of which are in range: their tokens, numbers and places."""
    tokens, routes, place = indices
    groups, order = ids.flatten().sort(stable=True)
    assert 0 <= groups[0] <= groups[-1] < num_groups
    counts.copy_(groups.bincount(minlength=num_groups))
    offsets.copy_(torch.searchsorted(groups, torch.arange(num_groups + 1)))
    tokens.copy_(order // ids.shape[1])
    routes.copy_(order)
    place[order] = torch.arange(len(order), dtype=torch.int32)


def _up(**given: Any) -> None:
    """The first product: rows gathered by route, gate and up interleaved, rows of no expert left alone."""
    weight, offsets = given["w1"].permute(2, 0, 1), given["expert_frequency_offset"].tolist()
    assert weight.is_contiguous()
    assert given["h"] is None
    assert given["is_inference_mode_enabled"]
    for expert, (begin, end) in enumerate(itertools.pairwise(offsets)):
        product = given["x"][given["x_gather_idx"][begin:end]].float() @ weight[expert].float().T
        gate, up = product[:, 0::2], product[:, 1::2]
        is_silu = given["activation_type"] == "swiglu"
        value = torch.nn.functional.silu(gate) if is_silu else torch.nn.functional.gelu(gate, approximate="tanh")
        given["a"][begin:end] = (value * up).to(given["a"].dtype)


def _down(**given: Any) -> None:
    weight, offsets = given["w2"].permute(2, 0, 1), given["expert_frequency_offset"].tolist()
    for expert, (begin, end) in enumerate(itertools.pairwise(offsets)):
        given["y"][begin:end] = (given["a"][begin:end].float() @ weight[expert].float().T).to(given["y"].dtype)


@pytest.fixture
def _imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    """SonicMoE's sorting and its two products in torch, on a CPU."""
    if torch.cuda.is_available():
        pytest.skip("imitates SonicMoE on a CPU; on a GPU, `moereg verify sonic` runs the library itself")
    pytest.importorskip("triton", reason="the sum of routes is in Triton")
    members = {
        "sonicmoe": {},
        "sonicmoe.enums": {"ActivationType": _Activation},
        "sonicmoe.functional": {},
        "sonicmoe.functional.forward": {"_up_projection_forward": _up, "_down_projection_forward": _down},
        "sonicmoe.functional.triton_kernels": {"TC_topk_router_metadata_triton": _sort},
    }
    for name, values in members.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("layer", "routes"):
        monkeypatch.delitem(sys.modules, f"moereg_sonic.{name}", raising=False)


@pytest.mark.usefixtures("_imitated")
@pytest.mark.parametrize("is_mapped", [True, False])
def test_routes_are_sorted_by_expert(is_mapped: bool) -> None:
    from moereg_sonic.routes import sort_routes

    topk_ids = torch.randint(-1, 8, (50, 3), generator=torch.Generator().manual_seed(0)).int()
    expert_map = torch.tensor([2, -1, 0, 1, -1, 3, -1], dtype=torch.int32) if is_mapped else None
    routes = sort_routes(topk_ids, 4, expert_map)
    local = local_expert_ids(topk_ids, 4, expert_map).flatten()
    for expert in range(4):
        own = torch.nonzero(local == expert).flatten()
        begin, end = routes.offsets[expert], routes.offsets[expert + 1]
        assert routes.tokens[begin:end].tolist() == (own // 3).tolist()
        assert routes.place[own].tolist() == list(range(begin, end))
    assert (routes.place[local < 0] >= routes.offsets[4]).all()
    assert routes.offsets.dtype == routes.tokens.dtype == routes.place.dtype == torch.int32


@pytest.mark.usefixtures("_imitated")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_layer(activation: str) -> None:
    problem = MoEProblem(**SIZES, activation=activation, num_local_experts=3, placement="map")
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).bfloat16()

    w13 = draw(3, 256, 512, std=0.05)
    w13[:, :128] *= 3
    weights = ExpertWeights(w13=w13, w2=draw(3, 512, 128, std=0.1))
    hidden_states = draw(9, 512, std=1.0)
    topk_weights, topk_ids = torch.rand(9, 6, generator=generator).topk(2)
    topk_ids = topk_ids.int()
    topk_ids[1, 0] = 77
    expert_map = torch.tensor([1, -1, 2, -1, 0, -1], dtype=torch.int32)
    experts = backend.SonicExperts(problem, Platform.from_name("cuda:sm90"))
    permuted = experts.permute_weights(weights, problem)
    nan = [torch.full(shape, float("nan"), dtype=torch.bfloat16) for shape in experts.workspace_shapes(problem, 9)]
    out = torch.full_like(hidden_states, float("nan"))
    experts.apply(out, ExpertInputs(hidden_states, topk_weights, topk_ids, expert_map=expert_map), permuted, *nan)
    expected = reference_experts(problem, weights, hidden_states, topk_weights, topk_ids, expert_map=expert_map)
    assert relative_error(out, expected) < layer_tolerance(problem, 9)


def test_named_platform_assumes_its_packages() -> None:
    assert reasons(MoEProblem(**SIZES), "cuda:sm90") == []
