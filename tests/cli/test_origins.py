"""Tables and JSON say which wheel a backend comes from, and that one goes before every built-in backend."""

from __future__ import annotations

import pytest

from moereg import __version__
from moereg.registry import BackendRegistry, register_moe_backend, registering_origin
from tests.cli.command import SIZES, Call, CallJson
from tests.support.fakes import FakeExperts

NOTE = (
    "note: backend 'fake_acme' of acme-moe 1.2 has priority 500, above every built-in backend's (at most 120): it goes "
    "first wherever it fits; --deny fake_acme does without it"
)


@pytest.fixture(autouse=True)
def acme(isolated_registry: BackendRegistry, ceilings: object) -> None:
    """A wheel with a backend of the highest priority."""
    with registering_origin("acme-moe", "1.2"):
        register_moe_backend("fake_acme", 500, ("unquantized",), ("cpu",))(type("AcmeExperts", (FakeExperts,), {}))


def words(text: str) -> str:
    return " ".join(text.split())


def test_explain(call: Call, call_json: CallJson) -> None:
    code, out, _ = call(f"explain {SIZES} --platform cpu")
    text = words(out)
    assert code == 0
    assert "chosen fake_acme (AcmeExperts) of acme-moe 1.2 cpu unquantized 500 no fits torch (Torch" in text
    assert "fake_acme (AcmeExperts) of acme-moe 1.2: chosen by priority" in text
    assert NOTE in text
    found = call_json(f"explain {SIZES} --platform cpu")[1]
    assert [(one["origin"], one["origin_version"]) for one in found["decisions"][:2]] == [
        ("acme-moe", "1.2"),
        ("builtin", __version__),
    ]
    assert found["notices"] == [NOTE.removeprefix("note: ")]
    assert call(f"explain {SIZES} --platform cpu --deny fake_acme")[1].count("note:") == 0


def test_run(call: Call) -> None:
    code, out, _ = call(f"run {SIZES} --tokens 3")
    text = words(out)
    assert code == 0
    assert "backend fake_acme (AcmeExperts) of acme-moe 1.2, chosen by priority" in text
    assert NOTE in text
    assert "not chosen: fake_acme (AcmeExperts) of acme-moe 1.2: fits, priority 500" in words(
        call(f"run {SIZES} --tokens 3 --prefer torch")[1]
    )


def test_bench(call: Call, call_json: CallJson) -> None:
    line = f"bench {SIZES} --rounds 1 --tokens 3"
    code, out, _ = call(line)
    text = words(out)
    assert code == 0
    assert "a layer gets fake_acme (AcmeExperts) of acme-moe 1.2: chosen by priority" in text
    assert NOTE in text
    rows = call_json(line)[1]["rows"]
    assert {(row["backend"], row["origin"], row["origin_version"]) for row in rows} == {
        ("fake_acme", "acme-moe", "1.2"),
        ("torch", "builtin", __version__),
    }
