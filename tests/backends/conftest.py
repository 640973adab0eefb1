"""Where there is no device, kernels in Triton's language run in its interpreter."""

from __future__ import annotations

import importlib.util

import pytest

from moereg.testing.cases import default_device
from moereg.testing.interpreter import patch_interpreter


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> None:
    if default_device().type == "cpu" and importlib.util.find_spec("triton") is not None:
        patch_interpreter()
