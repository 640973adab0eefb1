"""Reading a checkpoint: which tensors, for which rank, and how much of it fits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from moereg.checkpoints import _load, load_experts, moe_layers, read_problem
from moereg.errors import ArgumentError, CheckpointError, RequestError, TooLargeError, index_ranges
from moereg.runtime.memory import free_memory_bytes
from tests.checkpoints.small_checkpoint import CONFIG, EXPERTS, ROUTER, small_tensors, write_checkpoint


def test_only_the_layers_shards_are_opened_once_each(sharded: Path, opened: list[str]) -> None:
    (sharded / "rest.safetensors").unlink()
    layer = load_experts(sharded, 1)
    assert sorted(opened) == ["experts0.safetensors", "experts1.safetensors", "router.safetensors"]
    assert torch.equal(layer.weights.w2[3], small_tensors()[f"{EXPERTS}.3.down_proj.weight"])


def test_a_rank_reads_only_its_own_experts(sharded: Path, opened: list[str]) -> None:
    whole = load_experts(sharded, 1)
    opened.clear()
    (sharded / "experts0.safetensors").unlink()
    progress: list[tuple[int, int]] = []
    rank = load_experts(sharded, 1, num_local_experts=2, ep_rank=1, progress=lambda *done: progress.append(done))
    assert sorted(opened) == ["experts1.safetensors", "router.safetensors"]
    assert progress == [(1, 2), (2, 2)]
    assert (rank.problem.num_experts, rank.problem.num_local_experts, rank.ep_rank) == (4, 2, 1)
    assert torch.equal(rank.weights.w13, whole.weights.w13[2:])
    assert torch.equal(rank.router_weight, whole.router_weight)
    rank.weights.check_against(rank.problem)
    hidden_states = torch.randn(5, 8, dtype=torch.bfloat16)
    for mine, all_experts in zip(rank.route(hidden_states), whole.route(hidden_states), strict=True):
        assert torch.equal(mine, all_experts)


def test_loaded_tensors_outlive_the_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    layer = load_experts(tmp_path, 1)
    before = layer.router_weight.clone()
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes((tmp_path / "model.safetensors").stat().st_size))
    assert torch.equal(layer.router_weight, before)


VISION = {"model_type": "some_vision_model", "text_config": CONFIG}
OMNI_TEXT = {**CONFIG, "model_type": "qwen3_omni_moe_text"}
OMNI = {
    "model_type": "qwen3_omni_moe",
    "thinker_config": {"model_type": "qwen3_omni_moe_thinker", "text_config": OMNI_TEXT},
    "talker_config": {"text_config": {**OMNI_TEXT, "num_experts": 2}},
}


@pytest.mark.parametrize(
    ("prefix", "config"),
    [
        *((prefix, VISION) for prefix in ("", "model.language_model.", "language_model.model.", "language_model.")),
        ("thinker.model.", OMNI),
    ],
)
def test_multimodal_and_headless_checkpoints(tmp_path: Path, prefix: str, config: dict[str, Any]) -> None:
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in small_tensors().items()}
    write_checkpoint(tmp_path, config, tensors)
    assert moe_layers(tmp_path) == (1, 2)
    layer = load_experts(tmp_path, 1)
    assert layer.problem.num_experts == CONFIG["num_experts"]
    assert torch.equal(layer.router_weight, small_tensors()[ROUTER])


def test_read_problem_reads_no_data(sharded: Path, reads: list[tuple[str, int | None]]) -> None:
    problem = read_problem(sharded, 1, num_local_experts=2, dtype="float16", max_num_tokens=64)
    assert not reads
    assert str(problem) == "E4 H8 I6 k2 float16 unquantized silu, 2 local experts"
    assert problem.max_num_tokens == 64
    assert read_problem(sharded, 1) == load_experts(sharded, 1).problem


def test_read_problem_refuses_what_the_checkpoint_decides(sharded: Path) -> None:
    with pytest.raises(RequestError, match=r"hidden_size=16: the checkpoint decides it.*leave it out.*max_num_tokens"):
        read_problem(sharded, 1, hidden_size=16)
    with pytest.raises(ValueError, match="num_local_experts=5"):
        read_problem(sharded, 1, num_local_experts=5)


def test_route_checks_its_input_and_takes_no_tokens(sharded: Path) -> None:
    layer = load_experts(sharded, 1)
    for wrong in (torch.zeros(3, 9).bfloat16(), torch.zeros(3, 8), torch.zeros(1, 3, 8).bfloat16()):
        with pytest.raises(ValueError, match=r"must be \[T,8\] torch.bfloat16 on cpu, got \["):
            layer.route(wrong)
    topk_weights, topk_ids = layer.route(torch.zeros(0, 8, dtype=torch.bfloat16))
    assert topk_weights.shape == topk_ids.shape == (0, 2)


# 3 matrices of 6 x 8 in bf16 make 288 bytes an expert; 4 experts and one more while reading are 1440.
@pytest.mark.parametrize(
    ("free_bytes", "dtype", "expected"),
    [
        (2399, None, "needs 1.4 kB (4 experts of 288 bytes in bfloat16, and one more while reading), over 60% of the"),
        (2400, "float32", "(4 experts of 576 bytes in float32, and one more while reading), over 60% of the 2.4 kB fr"),
        (500, None, "over 60% of the 500 bytes free on cpu; free memory on it or use another machine"),
    ],
)
def test_a_layer_that_does_not_fit_is_refused(
    sharded: Path,
    reads: list[tuple[str, int | None]],
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: int,
    dtype: str | None,
    expected: str,
) -> None:
    monkeypatch.setattr(_load, "free_memory_bytes", lambda device: free_bytes)
    with pytest.raises(TooLargeError, match=re.escape(expected)) as error:
        load_experts(sharded, 1, dtype=dtype)
    assert str(error.value).startswith(f"layer 1 of {str(sharded)!r} needs ")
    assert not reads, "refused before reading"


def test_what_the_refusal_suggests_fits(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_load, "free_memory_bytes", lambda device: 2400)
    assert load_experts(sharded, 1).problem.num_local_experts == 4
    monkeypatch.setattr(_load, "free_memory_bytes", lambda device: 2399)
    assert load_experts(sharded, 1, num_local_experts=3).problem.num_local_experts == 3
    monkeypatch.setattr(_load, "free_memory_bytes", lambda device: None)
    assert load_experts(sharded, 1).problem.num_local_experts == 4


def test_free_memory_is_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert free_memory_bytes(torch.device("cuda", 0)) == 123
    cpu_bytes = free_memory_bytes(torch.device("cpu"))
    assert cpu_bytes is None or cpu_bytes > 2**20
    assert free_memory_bytes(torch.device("meta")) is None


@pytest.mark.parametrize("has_gpu", [False, True])
@pytest.mark.parametrize(("device", "needs_gpu"), [("cpu", False), ("cuda", True), ("cuda:1", True)])
def test_a_device_that_is_there_is_taken(
    device: str, needs_gpu: bool, has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    error = ArgumentError if needs_gpu and not has_gpu else CheckpointError
    with pytest.raises(error, match="needs a GPU" if error is ArgumentError else "nothing is downloaded"):
        load_experts(tmp_path / "nothing", 0, device=device)


@pytest.mark.parametrize(
    ("indices", "text"),
    [((), "none"), ((1,), "1"), ((1, 2), "1-2"), ((1, 3), "1, 3"), ((0, 1, 2, 5), "0-2, 5"), ((1, 3, 4), "1, 3-4")],
)
def test_layers_are_shown_as_ranges(indices: tuple[int, ...], text: str) -> None:
    assert (", ".join(index_ranges(indices)) or "none") == text
