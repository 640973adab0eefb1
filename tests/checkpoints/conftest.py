"""Checkpoints to read, and records of the files that are opened and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moereg.checkpoints import _files
from tests.checkpoints.small_checkpoint import shard_of, write_checkpoint


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that were opened, in order."""
    names: list[str] = []
    real = _files.safe_open

    def counting(path: Path, **options: str) -> Any:
        names.append(Path(path).name)
        return real(path, **options)

    monkeypatch.setattr(_files, "safe_open", counting)
    return names


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    """Tensors whose data was read, and which row of them."""
    calls: list[tuple[str, int | None]] = []
    real = _files.CheckpointFiles.read

    def recording(self: Any, name: str, row: int | None = None, num_rows: int | None = None) -> torch.Tensor:
        calls.append((name, row))
        return real(self, name, row, num_rows)

    monkeypatch.setattr(_files.CheckpointFiles, "read", recording)
    return calls


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, shard_of=shard_of)
    return tmp_path
