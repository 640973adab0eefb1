"""Scratch memory: shapes, alignment, reuse, and what other threads see."""

from __future__ import annotations

import threading

import pytest
import torch

from moereg.runtime import workspace
from moereg.runtime.workspace import WorkspacePool
from tests.layer.small_layers import CPU, Cuda


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_are_aligned_and_apart(dtype: torch.dtype) -> None:
    shapes = ((3, 5), (0,), (7,), (2, 129))
    tensors = WorkspacePool().take(shapes, dtype, CPU)
    assert [tuple(tensor.shape) for tensor in tensors] == list(shapes)
    assert {tensor.dtype for tensor in tensors} == {dtype}
    for place, tensor in enumerate(tensors):
        assert tensor.is_contiguous()
        assert tensor.numel() == 0 or tensor.data_ptr() % 256 == 0
        tensor.fill_(place)
    for place, tensor in enumerate(tensors):
        assert (tensor == place).all()


def test_one_buffer_grows_to_the_largest_need() -> None:
    pool = WorkspacePool()
    (small,) = pool.take(((16,),), torch.float32, CPU)
    assert pool.num_bytes == 256
    (large,) = pool.take(((1000,),), torch.float32, CPU)
    assert pool.num_bytes == 4096
    (again,) = pool.take(((16,),), torch.float32, CPU)
    assert again.data_ptr() == large.data_ptr() != small.data_ptr()
    assert pool.num_bytes == 4096
    pool.release()
    assert pool.num_bytes == 0
    pool.take(((16,),), torch.float32, CPU)
    assert pool.num_bytes == 256


def test_dtypes_have_views_of_their_own() -> None:
    pool = WorkspacePool()
    (wide,) = pool.take(((64,),), torch.float32, CPU)
    (narrow,) = pool.take(((64,),), torch.bfloat16, CPU)
    assert (wide.dtype, narrow.dtype) == (torch.float32, torch.bfloat16)
    assert narrow.data_ptr() == wide.data_ptr()


def test_devices_have_buffers_of_their_own() -> None:
    """Covers devices other than CUDA ones, such as another vendor's."""
    pool = WorkspacePool()
    devices = [CPU, torch.device("meta"), CPU]
    assert [pool.take(((64,),), torch.float32, device)[0].device for device in devices] == devices
    assert pool.num_bytes == 2 * 256


def test_what_inference_mode_took_is_written_outside_it() -> None:
    pool = WorkspacePool()
    with torch.inference_mode():
        pool.take(((64,),), torch.float32, CPU)
    (tensor,) = pool.take(((64,),), torch.float32, CPU)
    assert tensor.zero_().sum() == 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    monkeypatch.setattr(workspace, "_allocate", lambda num_bytes, device: torch.empty(num_bytes, dtype=torch.uint8))
    return Cuda(monkeypatch)


def test_streams_do_not_share(cuda: Cuda) -> None:
    pool = WorkspacePool()
    found = []
    for device, stream in (("cuda:0", 7), ("cuda:0", 8), ("cuda:1", 7), ("cuda:0", 7)):
        cuda.cuda_stream = stream
        found.append(pool.take(((64,),), torch.float32, torch.device(device))[0].data_ptr())
    assert found[0] == found[3]
    assert len(set(found)) == 3


def test_a_captured_graph_has_scratch_of_its_own(cuda: Cuda) -> None:
    """Replays write to it at any time, also after the shared buffer has grown and its memory serves others."""
    pool = WorkspacePool()
    device = torch.device("cuda:0")
    (eager,) = pool.take(((64,),), torch.float32, device)
    cuda.is_capturing = True
    captured = [pool.take(((64,),), torch.float32, device)[0] for _ in range(2)]
    assert len({tensor.data_ptr() for tensor in (eager, *captured)}) == 3
    assert pool.num_bytes == 256
    cuda.is_capturing = False
    assert pool.take(((64,),), torch.float32, device)[0].data_ptr() == eager.data_ptr()


def test_nothing_is_needed() -> None:
    pool = WorkspacePool()
    tensors = pool.take(((0,), (0, 4)), torch.bfloat16, CPU)
    assert [tensor.numel() for tensor in tensors] == [0, 0]
    assert pool.num_bytes == 0


def test_threads_do_not_share() -> None:
    pool = WorkspacePool()
    barrier = threading.Barrier(4)
    pointers: list[int] = []

    def take() -> None:
        (tensor,) = pool.take(((64,),), torch.float32, CPU)
        pointers.append(tensor.data_ptr())
        barrier.wait(timeout=30)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(pointers)) == 4
