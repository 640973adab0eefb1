"""The read that bandwidth is measured with reads every word once: interpreted here, compiled where there is a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton.runtime.errors import OutOfResources

from moereg.bench.roofline import _PIECE_NUMEL
from moereg.kernels import read
from moereg.kernels.read import ReadConfig, num_read_programs, read_words

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def words(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).int().to(DEVICE)


def folded(tensor: torch.Tensor) -> int:
    return int(np.bitwise_xor.reduce(tensor.cpu().numpy(), axis=None))


@pytest.mark.parametrize("blocks", [1, 5, 12])
@pytest.mark.parametrize(
    "config",
    [ReadConfig(256, 4), ReadConfig(256, 4, programs=2), ReadConfig(128, 4, num_stages=3, programs=1)],
    ids=str,
)
def test_every_word_is_read_once(config: ReadConfig, blocks: int) -> None:
    source = words(config.block * blocks)
    num_programs = num_read_programs(source.numel(), config, num_multiprocessors=2)
    out = torch.full((num_programs,), 7, dtype=torch.int32, device=DEVICE)
    read_words(out, source, config)
    # A word that is left out, or read twice, changes the result.
    assert folded(out) == folded(source)
    parts = source.view(blocks, config.block)
    for program in range(num_programs):
        assert int(out[program]) == folded(parts[program::num_programs])


def test_programs_are_as_many_as_the_configuration_says() -> None:
    assert num_read_programs(4096, ReadConfig(256, 4), 132) == 16
    assert num_read_programs(4096, ReadConfig(256, 4, programs=4), 3) == 12
    assert num_read_programs(4096, ReadConfig(256, 4, programs=4), 132) == 16


def test_every_way_that_there_is_room_for_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    small = (ReadConfig(64, 4), ReadConfig(128, 4, programs=2), ReadConfig(256, 4, num_stages=9))
    monkeypatch.setattr(read, "READ_CONFIGS", small)
    real = read.read_words

    def read_if_there_is_room(out: torch.Tensor, source: torch.Tensor, config: ReadConfig) -> None:
        if config.num_stages > 4:
            raise OutOfResources(10**6, 10**5, "shared memory")
        real(out, source, config)

    monkeypatch.setattr(read, "read_words", read_if_there_is_room)
    source = words(512)
    readers = dict(read.word_readers(source, num_multiprocessors=1))
    assert list(readers) == [
        "triton, blocks of 64, 4 warps, 1 stages, a program a block",
        "triton, blocks of 128, 4 warps, 1 stages, 2 programs a multiprocessor",
    ]
    for reader in readers.values():
        out = reader.args[0]  # type: ignore[attr-defined]
        out.fill_(7)
        reader()
        assert folded(out) == folded(source)


def test_configurations_divide_what_is_measured() -> None:
    largest = max(config.block for config in read.READ_CONFIGS)
    assert _PIECE_NUMEL * torch.bfloat16.itemsize % (largest * torch.int32.itemsize) == 0
    assert all(config.block & (config.block - 1) == 0 for config in read.READ_CONFIGS)
