"""What libraries write at their import goes to a folder of the test run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _library_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """FlashInfer and QuACK keep what they compile; FlashInfer cannot be imported where it cannot write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path_factory.mktemp("flashinfer")))
        yield
