"""Where moereg looks for FlashInfer's downloads, beside where FlashInfer looks."""

from __future__ import annotations

import pytest

from moereg.backends._flashinfer import downloads

pytestmark = pytest.mark.peers


def test_the_folder_is_flashinfers() -> None:
    from flashinfer.artifacts import ArtifactPath
    from flashinfer.jit.env import FLASHINFER_CUBIN_DIR

    assert downloads.generated_folder() == ArtifactPath.TRTLLM_GEN_BMM.strip("/")
    assert downloads.download_folder() == FLASHINFER_CUBIN_DIR
