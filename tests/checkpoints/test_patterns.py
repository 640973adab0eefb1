"""Patterns of config files: their meaning, and that none takes longer than its limit."""

from __future__ import annotations

from typing import Any

import pytest

from moereg.checkpoints import _patterns
from moereg.checkpoints._patterns import Patterns
from moereg.checkpoints._quantization import METHODS
from moereg.errors import CheckpointError
from tests.support.quantized_checkpoints import BLOCK, CHECKPOINTS, config_of

MODULE = f"{BLOCK}.experts.0.gate_proj"

# Python's engine takes longer for it than anybody waits, and the other one until it is stopped.
SLOW = r"(?:.|.)*(?!)"
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "modules_to_not_convert": ("fp8", {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
    "ignored_layers": ("fp8", {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
    "mxfp4": ("mxfp4", {}),
    "awq": ("awq", {"bits": 4, "group_size": 32}),
    "dynamic": ("gptq", {"bits": 4, "group_size": 32}),
    "ignore": ("compressed-tensors", config_of(CHECKPOINTS / "ct_int8")["quantization_config"]),
    "targets": ("compressed-tensors", {}),
}


def _with_pattern(name: str, pattern: str) -> Any:
    method, config = FORMATS[name]
    prefixed = f"re:{pattern}"
    changes: dict[str, Any] = {
        "ignored_layers": {"ignored_layers": [pattern]},
        "dynamic": {"dynamic": {f"-:{pattern}": {}}},
        "ignore": {"ignore": [prefixed]},
        "targets": {"config_groups": {"group_0": {"targets": [prefixed]}}},
    }.get(name, {"modules_to_not_convert": [pattern]})
    return METHODS[method]({**config, **changes})


@pytest.mark.parametrize("name", FORMATS)
def test_a_pattern_that_backtracks_without_end_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_patterns, "_BUDGET_S", 0.05)
    with pytest.raises(
        CheckpointError, match=r"must hold patterns that together match in 0.05 s, got '.*\(\?:\.\|\.\)"
    ):
        _with_pattern(name, SLOW)(MODULE)


def test_matches_that_are_short_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_patterns, "_BUDGET_S", 0.05)
    matches = Patterns("ignore").expression(SLOW, SLOW)
    with pytest.raises(CheckpointError, match=r"ignore must hold patterns that together match in 0.05 s"):  # noqa: PT012
        for _ in range(1_000_000):
            assert not matches("mlp")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("pattern", ["(" * 500 + ")" * 500, "(", "a{99999999999999999999}", r"(?P<a>x)(?P=b)"])
def test_what_is_no_pattern_is_named(name: str, pattern: str) -> None:
    with pytest.raises(CheckpointError, match="must hold names or regular expressions, got") as error:
        _with_pattern(name, pattern)(MODULE)
    assert len(str(error.value)) < 500


# A target asks for a format instead of leaving the module out.
@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"targets"}))
def test_look_aheads_and_back_references_mean_what_they_do(name: str) -> None:
    for pattern in (r"model\.layers\.0\.mlp(?!.*shared)", rf"{BLOCK}\.experts\.(\d)(?!\1)"):
        assert _with_pattern(name, pattern)(MODULE) is None
    assert _with_pattern(name, r"model\.layers\.(\d)\1\.mlp")(MODULE) is not None


def test_patterns_that_only_a_join_would_break_are_read() -> None:
    matches = Patterns("ignore").components([r"(?P<n>\d)\.up", r"(?P<n>\d)\.gate_proj", "(?i)LM_HEAD"])
    assert matches(MODULE)
    assert matches("lm_head")
    assert not matches("model.layers.0.mlp.experts.0.down_proj")


@pytest.mark.parametrize("pattern", ["mlp.gate", r"mlp\.gate", "mlp.(?:gate|up)", "m[l]p.gate", "mlp[.]gate|no|no"])
def test_a_pattern_means_whole_components(pattern: str) -> None:
    matches = Patterns("ignore").components([pattern])
    for module in ("mlp.gate", "model.mlp.gate", "mlp.gate.weight", "model.layers.0.mlp.gate.a.b"):
        assert matches(module), module
    for module in ("mlp.gate_proj", "xmlp.gate", "model.xmlp.gate", "model.mlp.gates.a", "mlp", "gate"):
        assert not matches(module), module


@pytest.mark.parametrize(
    "pattern", ["model.mlp*", "model.*gate", "model.mlp.gate", "model.mlp", "mod?l.mlp", "[m]odel"]
)
def test_a_name_with_stars_means_the_start(pattern: str) -> None:
    matches = Patterns("ignore").wildcards([pattern])
    assert matches("model.mlp.gate")
    assert matches("model.mlp.gate.a")
    for module in ("vision.model.mlp.gate", "models.mlp.gate", "mode.mlp.gate", "xmodel.mlp.gate"):
        assert not matches(module), module


def test_too_many_and_too_long_patterns() -> None:
    for patterns in ([f"a+{number}" for number in range(3000)], ["a+" * 3000]):
        with pytest.raises(CheckpointError, match="at most 2000 regular expressions of up to 4096 characters"):
            Patterns("ignore").components(patterns)
    assert Patterns("ignore").components([f"model.layers.{number}" for number in range(50_000)])("model.layers.7.mlp")
