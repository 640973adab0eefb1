"""Layers over an NCCL group of all GPUs that there are, one or more: numbers, no wait for the host, graphs."""

from __future__ import annotations

import functools
from typing import Any, Final

import pytest
import torch

from tests.groups.ranks import results_of, value_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="requires a GPU with NCCL")]

CASES: Final = (
    *("all_to_all", "all_to_all_sums", "all_gather", "experts_that_move"),
    *("all_to_all_fp8", "all_to_all_sums_fp8", "all_gather_fp8", "kernels_move_as_torch"),
    *("codes_all_to_all", "codes_all_gather", "codes_in_hopper_tiles", "all_to_all_refuses_capture"),
    *("all_gather_captured", "all_gather_batched_captured", "all_gather_deterministic_captured"),
)


@functools.cache
def results(name: str) -> list[dict[str, Any]]:
    # A process group that is left while a graph of it hangs takes its process along: a process for each case.
    return results_of(torch.cuda.device_count(), name, module="tests.groups.gpu_cases", backend="nccl")


@pytest.mark.parametrize("name", CASES)
def test_a_group_computes_what_one_gpu_does(name: str) -> None:
    for rank, result in enumerate(results(name)):
        assert name in result, f"rank {rank} ended early"
        # A rounding to bfloat16 of each rank's part or of each route.
        assert value_of(result, name)["error"] < 8e-3, value_of(result, name)


def test_a_way_that_waits_refuses_to_be_captured() -> None:
    for result in results("all_to_all_refuses_capture"):
        text = value_of(result, "all_to_all_refuses_capture")["text"]
        assert "waits for counts; say graph_capture=True in the problem" in text, text
