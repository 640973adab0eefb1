"""moereg is an experts implementation in every test here."""

from __future__ import annotations

import pytest

from moereg.integrations.transformers import register


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()
