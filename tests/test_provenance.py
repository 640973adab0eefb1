from __future__ import annotations

import pytest

from moereg.platforms import Platform
from moereg.testing import provenance as module
from moereg.testing.provenance import clocks, provenance

H200 = Platform("cuda", "sm90", "NVIDIA H200", versions={"torch": "2.13.0", "triton": "3.8.0"}, probed=True)


def test_where_a_result_is_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEREG_COMMIT", "0123abc")
    found = provenance(H200, ("triton", "torch", "not-installed"))
    assert list(found) == ["device", "platform", "versions", "commit", "date"]
    assert (found["device"], found["platform"], found["commit"]) == ("NVIDIA H200", "cuda:sm90", "0123abc")
    assert found["versions"] == {"torch": "2.13.0", "triton": "3.8.0"}


def test_clocks_are_said_where_they_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpu_clocks", lambda: {"sm_mhz": 1755})
    assert clocks(H200) == {"clocks": {"sm_mhz": 1755}}
    assert clocks(Platform("cpu")) == {}
    monkeypatch.setattr(module, "gpu_clocks", dict)
    assert clocks(H200) == {}
