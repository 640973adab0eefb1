"""Orders of weights that FlashInfer's kernels read, as their documentation says them."""

from collections.abc import Callable

import pytest
import torch

from moereg.backends._flashinfer import layouts
from moereg.backends._flashinfer.cutlass_int4 import interleave_int4
from moereg.backends._flashinfer.layouts import arrange, fold_scales, interleave_fp4, swizzled_rows
from moereg.backends._workspace import Piece, bytes_of, cut

# Where the bits of a word of 8 floats come from and go to: mask, and shift to the left.
_MOVES = [
    *[(0x80, 24), (0x70, 18), (0x8, 12), (0x7, 6)],
    *[(0x8000, 13), (0x7000, 7), (0x800, 1), (0x700, -5)],
    *[(0x800000, 2), (0x700000, -4), (0x80000, -10), (0x70000, -16)],
    *[(0x80000000, -1), (0x10000000, 1), (0x60000000, -3)],
    *[(0x8000000, -13), (0x1000000, -11), (0x6000000, -15)],
]


def _interleaved_by_hand(matrix: torch.Tensor) -> torch.Tensor:
    """The words of a matrix, one after the other, as the threads of FlashInfer's kernel move them."""
    rows, width = matrix.shape
    found = matrix.clone()
    for row in (row for row in range(rows) if row % 16 < 8):
        for start in range(0, width, 32):
            for lane in range(16):
                column = start + lane // 4 * 8 + lane % 4
                taken = [matrix[row + 8 * h, column + 4 * j] for j in (0, 1) for h in (0, 1)]
                word = sum(int(byte) << 8 * place for place, byte in enumerate(taken))
                moved = sum((word & mask) << by if by > 0 else (word & mask) >> -by for mask, by in _MOVES)
                target = start + lane // 8 * 16 + lane % 4 * 4
                for place in range(4):
                    found[row + lane // 4 % 2 * 8, target + place] = moved >> 8 * place & 255
    return found


def _codes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def test_every_word_of_4_bit_floats_lies_where_the_kernel_puts_it():
    codes = _codes(32, 64)
    assert torch.equal(interleave_fp4(codes), _interleaved_by_hand(codes))


def _int4_by_hand(matrix: torch.Tensor) -> torch.Tensor:
    """Pairs of bytes, one after the other, as the threads of FlashInfer's kernel move them."""
    pairs, found = matrix.view(torch.int16), torch.zeros_like(matrix).view(torch.int16)
    for row in (row for row in range(matrix.shape[0]) if row % 16 < 8):
        for start in range(0, pairs.shape[1], 16):
            for lane in range(16):
                target = start + lane // 8 * 8 + lane % 4 * 2
                for tall in (0, 1):
                    found[row + lane % 8 // 4 * 8, target + tall] = pairs[row + 8 * tall, start + lane]
    return found.view(torch.uint8)


def test_every_4_bit_integer_lies_where_the_kernel_puts_it():
    codes = _codes(48, 96)
    assert torch.equal(interleave_int4(codes), _int4_by_hand(codes))


def test_up_rows_come_first_and_halves_are_padded_apart():
    w13 = torch.arange(1, 13.0).view(1, 4, 3)
    found = arrange(w13, 3, 4, num_halves=2)
    assert found.tolist() == [
        [[7, 8, 9, 0], [10, 11, 12, 0], [0, 0, 0, 0], [1, 2, 3, 0], [4, 5, 6, 0], [0, 0, 0, 0]],
    ]
    assert arrange(w13, 2, 3, num_halves=2).tolist() == [[[7, 8, 9], [10, 11, 12], [1, 2, 3], [4, 5, 6]]]
    assert arrange(w13, 4, 3).data_ptr() == w13.data_ptr()


def test_scales_of_64_rows_and_128_columns_lie_together():
    scales = torch.arange(128 * 8).view(1, 128, 8).to(torch.int16).to(torch.uint8)
    found = fold_scales(scales, group=32)
    assert found.shape == (1, 2, 2, 16, 16)
    for row, group in [(0, 0), (17, 1), (63, 3), (64, 4), (127, 7), (100, 5)]:
        block = found[0, row // 64, group // 4]
        inside = row % 64
        assert block[inside % 16, inside // 16 * 4 + group % 4] == scales[0, row, group]


@pytest.mark.peers
@pytest.mark.parametrize(("dtype", "group"), [(torch.uint8, 32), (torch.bfloat16, 128)], ids=["mxfp4", "int4"])
def test_scales_are_folded_as_flashinfer_does(dtype, group):
    fused_moe = pytest.importorskip("flashinfer.fused_moe", reason="make test-peers installs flashinfer-python")
    scales = torch.randint(0, 200, (2, 128, 512 // group)).to(dtype)
    expected = fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(scales, group_size=group)
    assert torch.equal(fold_scales(scales, group), expected)


# Orders of TensorRT-LLM's and CuTe DSL's kernels.
DTYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu]


def _numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)


@pytest.mark.parametrize(
    "permute",
    [
        lambda x: layouts.arrange(x, 128, 128, 2),
        lambda x: layouts.grouped_halves(x, 64),
        lambda x: x[:, layouts.gemm1_rows(256, 2)],
        lambda x: x[:, layouts.gemm1_rows(256, 1)],
        lambda x: x[:, layouts.shuffled_rows(256)],
        layouts.swizzled_scales,
        lambda x: layouts.each_expert(x, layouts.blocks_of_columns),
    ],
    ids=["halves", "groups", "gated", "plain", "w2", "scales", "blocks"],
)
def test_every_number_stays_once_and_in_its_expert(permute: Callable[[torch.Tensor], torch.Tensor]) -> None:
    before = _numbered(3, 256, 128)
    after = permute(before)
    for expert in range(3):
        assert torch.equal(after[expert].flatten().sort().values, before[expert].flatten())
    assert not torch.equal(after.flatten(), before.flatten())


def test_up_rows_alternate() -> None:
    gate_up = _numbered(2, 8, 1)
    assert layouts.alternated_rows(8).tolist() == [4, 0, 5, 1, 6, 2, 7, 3]
    assert layouts.grouped_halves(gate_up, 2)[0].flatten().tolist() == [4, 5, 0, 1, 6, 7, 2, 3]


def test_shuffled_rows_go_in_steps_of_four() -> None:
    order = layouts.shuffled_rows(64)
    assert order[:10].tolist() == [0, 4, 8, 12, 16, 20, 24, 28, 1, 5]
    assert order[32:].tolist() == [row + 32 for row in order[:32].tolist()]
    # Alternated first: rows 0 and 4 of the alternated matrix are up rows 0 and 2.
    assert layouts.gemm1_rows(64, 2)[:3].tolist() == [32, 34, 36]


def test_scales_lie_in_blocks() -> None:
    """Scale (r, g) of a block is at 16 * (r % 32) + 4 * (r // 32) + g; what is missing is zero."""
    scales = (_numbered(1, 130, 6) % 251 + 1).to(torch.uint8)
    blocks = layouts.swizzled_scales(scales)
    assert blocks.shape == (1, 2, 2, 32, 4, 4)
    flat = blocks.flatten(3)
    for row, group in ((0, 0), (33, 3), (127, 5), (129, 4)):
        place = 16 * (row % 32) + 4 * (row % 128 // 32) + group % 4
        assert flat[0, row // 128, group // 4, place] == scales[0, row, group]
    assert int((blocks == 0).sum()) == blocks.numel() - scales.numel()
    assert layouts.mma_scales(blocks)[1, 0, 1, 0, 1, 0] == scales[0, 129, 4]
    assert torch.equal(swizzled_rows(scales).flatten(), blocks.flatten())
    assert swizzled_rows(scales).shape == (1, 256, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_dtype_is_moved_bit_for_bit(dtype: torch.dtype) -> None:
    source = torch.randint(0, 255, (2, 128, 8 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    swapped = layouts.arrange(source, 64, 8, 2)
    assert torch.equal(layouts.arrange(swapped, 64, 8, 2).view(torch.uint8), source.view(torch.uint8))
    turned = layouts.each_expert(source, torch.t)
    assert torch.equal(turned.transpose(1, 2).contiguous().view(torch.uint8), source.view(torch.uint8))
    assert layouts.swizzled_scales(source).dtype == dtype


def test_scratch_memory_is_cut_into_pieces_that_do_not_overlap() -> None:
    pieces = (Piece((3, 5), torch.bfloat16), Piece((0,), torch.int32), Piece((7,), torch.float32))
    memory = torch.zeros(bytes_of(pieces), dtype=torch.uint8)
    first, none, second = cut(memory, *pieces)
    first.fill_(1.0)
    second.fill_(2.0)
    assert bool((first == 1).all())
    assert none.numel() == 0
    assert second.data_ptr() - memory.data_ptr() == 256
