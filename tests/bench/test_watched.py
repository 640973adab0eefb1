"""Watched tensors show each byte that changes."""

from __future__ import annotations

import math

import pytest
import torch

from moereg.bench.compare import WatchedTensors
from moereg.weights import versions
from moereg.weights.unpermute import same_bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.float32])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 8)])
def test_each_byte_is_watched(dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    # Several pieces of a few bytes.
    monkeypatch.setattr("moereg.weights.versions._factors", lambda device: torch.tensor([3, -5, 7, 9]))
    base = torch.arange(2000, dtype=torch.int16).to(torch.uint8)
    tensor = base[8 : 8 + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
    watched = WatchedTensors({"it": tensor, "other": torch.zeros(3)})
    assert watched.written() == ()
    seen = tensor.detach().data.view(-1).view(torch.uint8)
    for place in range(len(seen)):
        seen[place] ^= 0x80
        assert watched.written() == ("it",)
        seen[place] ^= 0x80
    base.data[:8] = 99
    watched.renew()
    assert watched.written() == ()


def test_what_changes_places_is_seen_and_put_back() -> None:
    tensor = torch.arange(64.0).reshape(8, 8)
    pristine = tensor.clone()
    watched = WatchedTensors({"it": tensor})
    view = tensor[1:]
    tensor.data.copy_(tensor.flip(0))
    assert watched.written() == ("it",)
    watched.restore({"it": pristine})
    assert torch.equal(view, pristine[1:])
    assert watched.written() == ()
    tensor.untyped_storage().resize_(0)
    assert watched.written() == ("it",)
    watched.restore({"it": pristine})
    assert torch.equal(view, pristine[1:])


def test_bytes_are_compared_as_bytes() -> None:
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_checksums_are_the_same_under_another_default_device() -> None:
    tensor = torch.arange(64)
    versions._factors.cache_clear()
    with torch.device("meta"):
        found = versions.checksums(tensor)
    assert found == versions.checksums(tensor)
