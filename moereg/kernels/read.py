"""Reads memory, in Triton, to measure a device's read bandwidth; writes next to nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources


@dataclass(frozen=True, slots=True)
class ReadConfig:
    """Launch configuration of the read."""

    block: int  # words that a program reads at a time; a power of two
    num_warps: int  # warps per program
    num_stages: int = 1  # blocks in flight through shared memory; 1 loads straight to registers
    programs: int = 0  # programs per multiprocessor, each reading block after block; 0: one program per block


# Devices differ in which is fastest, so all are tried. The last three take 192 KB of shared memory a multiprocessor.
READ_CONFIGS = (
    ReadConfig(block=2048, num_warps=4),
    ReadConfig(block=4096, num_warps=8),
    ReadConfig(block=8192, num_warps=8),
    ReadConfig(block=4096, num_warps=4, programs=8),
    ReadConfig(block=8192, num_warps=8, programs=4),
    ReadConfig(block=2048, num_warps=4, num_stages=4, programs=8),
    ReadConfig(block=4096, num_warps=8, num_stages=5, programs=3),
    ReadConfig(block=8192, num_warps=8, num_stages=4, programs=2),
)


@triton.jit
def _xor_words_kernel(out, words, num_words, BLOCK: tl.constexpr, NUM_STAGES: tl.constexpr):
    program = tl.program_id(0)
    first = program.to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    offsets = tl.arange(0, BLOCK)
    # XOR is exact and one instruction per word, and the compiler can drop no load from it.
    folded = tl.zeros([BLOCK], dtype=tl.int32)
    for start in tl.range(first, num_words, step, num_stages=NUM_STAGES):
        folded ^= tl.load(words + start + offsets)
    tl.store(out + program, tl.xor_sum(folded, 0))


def num_read_programs(num_words: int, config: ReadConfig, num_multiprocessors: int) -> int:
    """Number of programs of `read_words`."""
    num_blocks = num_words // config.block
    return min(num_blocks, config.programs * num_multiprocessors) if config.programs else num_blocks


def read_words(out: torch.Tensor, words: torch.Tensor, config: ReadConfig) -> None:
    """Reads every word, [n] int32, contiguous, n a multiple of the block, and writes the XOR of each program's words.

    `out` is [programs] int32, as many as `num_read_programs` says.
    """
    assert words.dtype == out.dtype == torch.int32 and words.is_contiguous()
    assert words.numel() % config.block == 0
    _xor_words_kernel[(out.numel(),)](
        out, words, words.numel(), BLOCK=config.block, NUM_STAGES=config.num_stages, num_warps=config.num_warps
    )


def word_readers(words: torch.Tensor, num_multiprocessors: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the readers that this device has enough shared memory for, compiled, each with its name.

    Args:
        words: [n] int32, contiguous; n is a multiple of every block.
        num_multiprocessors: of the device.
    """
    for config in READ_CONFIGS:
        num_programs = num_read_programs(words.numel(), config, num_multiprocessors)
        read = functools.partial(read_words, words.new_empty(num_programs), words, config)
        try:
            read()
        except OutOfResources:  # The device has less shared memory than the stages take.
            continue
        shape = f"{config.programs} programs a multiprocessor" if config.programs else "a program a block"
        yield f"triton, blocks of {config.block}, {config.num_warps} warps, {config.num_stages} stages, {shape}", read
