"""Orders of weights that FlashInfer's CUTLASS kernels read."""

import pytest
import torch

from moereg.backends._flashinfer.cutlass_int4 import interleave_int4
from moereg.backends._flashinfer.cutlass_layouts import arrange, fold_scales, interleave_fp4, swizzle_scales

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


def test_no_bit_of_a_4_bit_float_is_lost():
    every = torch.ones(16, 32, dtype=torch.uint8)
    places = torch.zeros(16, 32, 8, dtype=torch.bool)
    for bit in range(8):
        moved = interleave_fp4(every << bit)
        places |= torch.stack([moved >> place & 1 for place in range(8)], 2).bool()
    assert places.all()


def test_up_rows_come_first_and_halves_are_padded_apart():
    w13 = torch.arange(1, 13.0).view(1, 4, 3)
    found = arrange(w13, 3, 4, num_halves=2)
    assert found.tolist() == [
        [[7, 8, 9, 0], [10, 11, 12, 0], [0, 0, 0, 0], [1, 2, 3, 0], [4, 5, 6, 0], [0, 0, 0, 0]],
    ]


def test_a_matrix_that_stays_is_shared():
    w2 = torch.randn(2, 8, 8)
    assert arrange(w2, 8, 8).data_ptr() == w2.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint8], ids=str)
def test_elements_of_every_size_are_moved(dtype):
    w13 = torch.randint(1, 100, (1, 4, 2)).float().to(dtype)
    found = arrange(w13, 2, 2, num_halves=2)
    assert found.dtype == dtype
    assert torch.equal(found.float(), w13.float()[:, [2, 3, 0, 1]])


def test_scales_of_64_rows_and_128_columns_lie_together():
    scales = torch.arange(128 * 8).view(1, 128, 8).to(torch.int16).to(torch.uint8)
    found = fold_scales(scales, group=32)
    assert found.shape == (1, 2, 2, 16, 16)
    for row, group in [(0, 0), (17, 1), (63, 3), (64, 4), (127, 7), (100, 5)]:
        block = found[0, row // 64, group // 4]
        inside = row % 64
        assert block[inside % 16, inside // 16 * 4 + group % 4] == scales[0, row, group]


def test_scales_of_blackwell_are_tiles_of_128_rows_and_4_groups():
    scales = _codes(2, 130, 5)
    found = swizzle_scales(scales)
    assert found.shape == (2, 256, 8)
    flat = found.flatten(1)
    for row, group in [(0, 0), (31, 3), (32, 0), (127, 4), (128, 1), (129, 2)]:
        tile = (row // 128 * 2 + group // 4) * 512
        assert flat[1, tile + row % 32 * 16 + row % 128 // 32 * 4 + group % 4] == scales[1, row, group]
    assert int(found.view(torch.uint8).long().sum()) == int(scales.long().sum())


@pytest.mark.peers
@pytest.mark.parametrize(("dtype", "group"), [(torch.uint8, 32), (torch.bfloat16, 128)], ids=["mxfp4", "int4"])
def test_scales_are_folded_as_flashinfer_does(dtype, group):
    fused_moe = pytest.importorskip("flashinfer.fused_moe", reason="make test-peers installs flashinfer-python")
    scales = torch.randint(0, 200, (2, 128, 512 // group)).to(dtype)
    expected = fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(scales, group_size=group)
    assert torch.equal(fold_scales(scales, group), expected)
