"""Where moereg looks for FlashInfer's downloads, beside where FlashInfer looks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.peers

FOLDERS = """
from flashinfer.artifacts import ArtifactPath
from flashinfer.jit.env import FLASHINFER_CUBIN_DIR
from moereg.backends._flashinfer import downloads

assert downloads.generated_folder() == ArtifactPath.TRTLLM_GEN_BMM.strip("/")
assert downloads.download_folder() == FLASHINFER_CUBIN_DIR, (downloads.download_folder(), FLASHINFER_CUBIN_DIR)
print(FLASHINFER_CUBIN_DIR)
"""


def test_the_folder_is_flashinfers(tmp_path: Path) -> None:
    # A process of its own, since FlashInfer reads the variables where it is first imported.
    settings = {**os.environ, "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    settings.pop("FLASHINFER_CUBIN_DIR", None)
    found = subprocess.run([sys.executable, "-c", FOLDERS], env=settings, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1].startswith(str(tmp_path))
