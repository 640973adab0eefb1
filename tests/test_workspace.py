"""Scratch memory: shapes, alignment, reuse, and what other threads see."""

from __future__ import annotations

import threading

import pytest
import torch

from moereg.workspace import WorkspacePool

CPU = torch.device("cpu")


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


def test_contents_are_undefined() -> None:
    # The poisoned torch.empty shows through, so a backend that relies on zeros fails in tests.
    (tensor,) = WorkspacePool().take(((64,),), torch.bfloat16, CPU)
    assert tensor.isnan().all()


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
