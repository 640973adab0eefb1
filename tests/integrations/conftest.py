"""moereg is an experts implementation in every test here."""

from __future__ import annotations

from typing import Any

import pytest

from moereg.integrations.transformers import register
from moereg.layer.in_place import say_once
from tests.support.live_models import kernel_steps
from tests.support.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def _registered() -> None:
    """Nothing was said yet, either."""
    register()
    say_once.cache_clear()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return kernel_steps(monkeypatch)


@pytest.fixture
def model() -> Any:
    """A tiny Mixtral, the same in every test."""
    return tiny_model("mixtral")
