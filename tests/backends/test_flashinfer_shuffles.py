"""Orders of weights that FlashInfer's kernels read, as their documentation says them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moereg.backends._flashinfer import shuffles
from moereg.backends._flashinfer.scratch import Piece, carved, num_bytes

DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu]


def _numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)


@pytest.mark.parametrize(
    "permute",
    [
        lambda x: shuffles.swapped_halves(x, 2),
        lambda x: shuffles.grouped_halves(x, 64),
        lambda x: x[:, shuffles.gemm1_rows(256, 2)],
        lambda x: x[:, shuffles.gemm1_rows(256, 1)],
        lambda x: x[:, shuffles.gemm2_rows(256)],
        shuffles.swizzled_scales,
        lambda x: shuffles.each_expert(x, shuffles.blocks_of_columns),
    ],
    ids=["halves", "groups", "gated", "plain", "w2", "scales", "blocks"],
)
def test_every_number_stays_once_and_in_its_expert(permute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    before = _numbered(3, 256, 128)
    after = permute(before)
    for expert in range(3):
        assert torch.equal(after[expert].flatten().sort().values, before[expert].flatten())
    assert not torch.equal(after.flatten(), before.flatten())


def test_up_rows_come_first() -> None:
    gate_up = _numbered(2, 8, 1)
    assert shuffles.swapped_halves(gate_up, 2)[0].flatten().tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert shuffles.swapped_halves(gate_up, 1) is gate_up
    assert shuffles.alternated_rows(8).tolist() == [4, 0, 5, 1, 6, 2, 7, 3]
    assert shuffles.grouped_halves(gate_up, 2)[0].flatten().tolist() == [4, 5, 0, 1, 6, 7, 2, 3]


def test_shuffled_rows_go_in_steps_of_four() -> None:
    order = shuffles.gemm2_rows(64)
    assert order[:10].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 1, 5]
    assert order[32:].tolist() == [row + 32 for row in order[:32].tolist()]
    # Alternated first: rows 0 and 4 of the alternated matrix are up rows 0 and 2.
    assert shuffles.gemm1_rows(64, 2)[:3].tolist() == [32, 34, 36]


def test_scales_lie_in_blocks() -> None:
    """Scale (r, g) of a block is at 16 * (r % 32) + 4 * (r // 32) + g; what is missing is zero."""
    scales = (_numbered(1, 130, 6) % 251 + 1).to(torch.uint8)
    blocks = shuffles.swizzled_scales(scales)
    assert blocks.shape == (1, 2, 2, 32, 4, 4)
    flat = blocks.flatten(3)
    for row, group in ((0, 0), (33, 3), (127, 5), (129, 4)):
        place = 16 * (row % 32) + 4 * (row % 128 // 32) + group % 4
        assert flat[0, row // 128, group // 4, place] == scales[0, row, group]
    assert int((blocks == 0).sum()) == blocks.numel() - scales.numel()
    assert shuffles.mma_scales(blocks)[1, 0, 1, 0, 1, 0] == scales[0, 129, 4]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_dtype_is_moved_bit_for_bit(dtype: torch.dtype) -> None:
    source = torch.randint(0, 255, (2, 128, 8 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    swapped = shuffles.swapped_halves(source, 2)
    assert torch.equal(shuffles.swapped_halves(swapped, 2).view(torch.uint8), source.view(torch.uint8))
    turned = shuffles.each_expert(source, torch.t)
    assert torch.equal(turned.transpose(1, 2).contiguous().view(torch.uint8), source.view(torch.uint8))
    assert shuffles.swizzled_scales(source).dtype == dtype


def test_scratch_memory_is_cut_into_pieces_that_do_not_overlap() -> None:
    pieces = {"a": Piece((3, 5), torch.bfloat16), "none": Piece((0,), torch.int32), "b": Piece((7,), torch.float32)}
    memory = torch.zeros(num_bytes(pieces) // 2, dtype=torch.bfloat16)
    tensors = carved(memory, pieces)
    tensors["a"].fill_(1.0)
    tensors["b"].fill_(2.0)
    assert bool((tensors["a"] == 1).all())
    assert tensors["none"].numel() == 0
    assert tensors["b"].data_ptr() - memory.data_ptr() == 256
