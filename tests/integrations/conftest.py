"""moereg is an experts implementation in every test here."""

from __future__ import annotations

from typing import Any

import pytest

from moereg.integrations.transformers import register
from tests.support.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()


@pytest.fixture
def model() -> Any:
    """A tiny Mixtral, the same in every test."""
    return tiny_model("mixtral")
