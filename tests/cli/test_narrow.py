"""What commands print at 80 columns: no table breaks a word, and help fits a screen."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from moereg.cli._commands import LayerCommand, app
from moereg.cli._output import Result
from moereg.cli._show import new_table, say, show_selection
from moereg.cli._tune import _show_winners
from moereg.dispatch import explain_backends
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES
from tests.cli.command import SIZES, Call

Shown = Callable[[str], tuple[set[str], set[str]]]
WIDTHS = ("80", "400")
PLATFORMS = ("cpu", "cuda:sm80", "cuda:sm90", "cuda:sm100", "cuda:sm120", "rocm:gfx942")


def words_of(text: str) -> set[str]:
    return {word.strip("();:,") for word in text.replace("─", " ").split()}


@pytest.fixture
def shown(call: Call, monkeypatch: pytest.MonkeyPatch) -> Shown:
    """The words of what a command prints on 80 columns and on many, of one run."""

    def print_twice(self: Result, as_json: bool) -> None:
        for columns in WIDTHS:
            monkeypatch.setenv("COLUMNS", columns)
            self.show()
            print("\f", end="")

    monkeypatch.setattr(Result, "print", print_twice)

    def run(line: str) -> tuple[set[str], set[str]]:
        _, out, _ = call(line)
        narrow, wide, _ = out.split("\f")
        assert max(map(len, narrow.splitlines())) <= 80
        return words_of(narrow), words_of(wide)

    return run


def names_in(value: Any, keys: tuple[str, ...]) -> Iterator[str]:
    """The names of backends, classes, schemes and platforms in a command's JSON."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key in keys:
            yield from [item] if isinstance(item, str) else item
        yield from names_in(item, keys)


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        (f"explain {SIZES} --platform cuda:sm90 --reasons", ("backend", "computes")),
        (f"explain {SIZES} --platform cpu --activation-format batched --reasons", ("backend", "computes")),
        ("info", ("name",)),
        ("info --cells", ("name", "experts", "quant_schemes", "platforms", "dispatcher")),
        ("schemes --platform cuda:sm90", ("name", "backends")),
        ("models", ("name",)),
    ],
)
def test_names_are_whole(shown: Shown, call_json: Any, line: str, keys: tuple[str, ...], monkeypatch: Any) -> None:
    narrow, wide = shown(line)
    assert narrow <= wide
    monkeypatch.undo()
    code, found = call_json(line)
    names = set(names_in(found, keys)) - {None}
    assert code == 0
    assert names
    assert names <= narrow, names - narrow


@pytest.mark.few
@pytest.mark.parametrize("scheme", QUANT_SCHEMES)
def test_no_decision_table_breaks_a_word(
    scheme: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for platform in PLATFORMS:
        for form in ("standard", "batched"):
            layer = {"num_experts": 128, "hidden_size": 2048, "intermediate_size": 768, "top_k": 8}
            selection = explain_backends(MoEProblem(**layer, quant=scheme, activation_format=form), platform)
            words = []
            for columns in WIDTHS:
                monkeypatch.setenv("COLUMNS", columns)
                show_selection(selection, all_reasons=True)
                words.append(words_of(capsys.readouterr().out))
            assert words[0] <= words[1]


@pytest.mark.parametrize(
    "line",
    [
        f"bench {SIZES} --tokens 1,16 --rounds 1",
        f"run {SIZES} --tokens 4",
        "verify torch --check rejections",
        "quantize --checkpoint CK --quant int4_w4a16_g32_zp,fp8_tensor_dynamic --tokens 1,16",
    ],
)
def test_results_of_runs_break_no_word(shown: Shown, line: str, checkpoint: Path, ceilings: object) -> None:
    narrow, wide = shown(line.replace("CK", str(checkpoint)))
    assert narrow
    assert narrow <= wide


def test_tunes_table_breaks_no_word(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    winners = [
        {"tokens": 8192, "backend": "flashinfer_cutlass", "is_default": is_default, "time_us": 6190.0}
        | {"change": -0.125, "sessions": (-0.118, -0.131)}
        for is_default in (True, False)
    ]
    words = []
    for columns in WIDTHS:
        monkeypatch.setenv("COLUMNS", columns)
        _show_winners(winners)
        words.append(words_of(capsys.readouterr().out))
    assert words[0] == words[1]
    assert {"flashinfer_cutlass", "default", "-12.5%", "-13.1%"} <= words[0]


def test_a_table_without_room_is_a_paragraph_per_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    rows = [("flashinfer_cutlass", "unquantized", "12"), None, ("torch", "", "3")]
    say(new_table("backend", "scheme", ">rank", rows=rows))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines == ["flashinfer_cutlass", "  scheme unquantized;", "  rank 12", "torch", "  rank 3"]
    monkeypatch.setenv("COLUMNS", "40")
    say(new_table("backend", "scheme", ">rank", rows=rows))
    assert capsys.readouterr().out.splitlines()[2].split() == ["flashinfer_cutlass", "unquantized", "12"]


@pytest.mark.parametrize("name", [command.callback.__name__.replace("_", "-") for command in app.registered_commands])
def test_help_is_a_screen_in_groups_with_examples_that_parse(
    call: Call, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = call(f"{name} --help")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) <= 40
    assert max(map(len, out.splitlines())) <= 80
    command = typer.main.get_command(app).commands[name]
    if isinstance(command, LayerCommand):
        groups = ["Layer:", "Choice:", "Options:", "Examples:"]
        assert [line for line in out.splitlines() if re.fullmatch(r"\w+:", line)] == groups
    # Whatever can be said is there, and said once.
    words = re.split(r"[\s,]+", out.partition("Examples:")[0])
    assert not [name for one in command.params for name in one.opts if name.startswith("--") and words.count(name) != 1]
    _, _, examples = out.partition("Examples:\n")
    lines = [line.split() for line in examples.splitlines()]
    assert [line[:2] for line in lines] == [["moereg", name]] * 2
    for line in lines:
        command.make_context(name, line[2:])
