"""Names that a backend or wheel may not have: moereg's own, and what no table could show."""

from __future__ import annotations

import pytest

from moereg.errors import RegistrationError
from moereg.registry import BackendRegistry, register_moe_backend
from moereg.selection.plugin_status import scan
from tests.support.fakes import FakeExperts
from tests.support.wheels import Wheels, backend

pytestmark = pytest.mark.filterwarnings("ignore::moereg.errors.PluginWarning")


@pytest.mark.parametrize("name", ["builtin", "moereg", "a" * 101])
def test_a_backend_has_a_name_of_its_own(isolated_registry: BackendRegistry, name: str) -> None:
    with pytest.raises(RegistrationError):
        register_moe_backend(name, 1, ("unquantized",), ("*",))(FakeExperts)
    assert name not in isolated_registry.names


def test_names_are_safe_to_print(wheels: Wheels) -> None:
    wheels.install("red\x1b[31m", {"fine": "fine_wheel"}, {"fine_wheel.py": backend("fine")})
    wheels.install("long", {"n" * 500: "long_wheel"}, {"long_wheel.py": ""})
    points, broken = scan()
    (point,) = [point for point in points if point.name == "fine"]
    assert point.owner.origin == "red\\x1b[31m"
    (status,) = [status for status in broken if status.distribution == "long 1.2"]
    assert len(status.name) == 100
    assert str(status.error).endswith("an entry point's name is at most 100 printable characters; choose another")


def test_two_wheels_with_one_module(wheels: Wheels) -> None:
    wheels.install("one", {"aa": "same_wheel"}, {"same_wheel.py": backend("aa")})
    wheels.install("two", {"bb": "same_wheel"}, {"same_wheel.py": backend("aa")})
    assert wheels.load() == {
        "aa": "loaded",
        "bb": "RegistrationError: entry point 'bb' must register a backend of that name and no other, got none; "
        "same_wheel is of one 1.2 too, uninstall one",
    }
