"""The documents against the tree: layers, paths, links, names, commands and their options are as they say."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer.main

from moereg.cli._bench import result_of_bench, result_of_run
from moereg.cli._commands import app
from moereg.cli._explain import selection_with_evidence
from moereg.cli._info import collect_info, list_models, list_schemes
from moereg.cli._new_backend import write_wheel
from moereg.cli._options import ProblemFlags
from moereg.cli._quantize import compare_schemes, find_schemes
from moereg.cli._tune import tune_layer
from moereg.cli._tuner import Question
from moereg.dispatch import explain_backends
from moereg.evidence.measured import ENTRY_POINTS
from moereg.evidence.provenance import provenance
from moereg.platforms import Platform
from moereg.selection.plugin_status import PluginStatus
from moereg.spec.problem import MoEProblem
from moereg.testing import CellName, Check, Outcome, Report, Result
from tests.support.snippets import write_layers
from tests.support.toml import tomllib

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "architecture.md"
COMMANDS: Final = ROOT / "docs" / "commands.md"
WHEELS: Final = tuple(sorted((ROOT / "plugins").glob("*/README.md")))
RESULTS: Final = tuple(sorted((ROOT / "benches" / "results").glob("*.md")))
DOCUMENTS: Final = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *WHEELS,
    *RESULTS,
)
_SUFFIXES: Final = (".py", ".md", ".json", ".toml", ".txt", ".svg")
_COMMANDS: Final[dict[str, Any]] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def contract_layers(container: str) -> list[set[str]]:
    """The layers of import-linter's contract on a package."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (found,) = (contract for contract in contracts if contract.get("containers") == [container])
    return [{name.strip() for name in layer.split("|")} for layer in found["layers"]]


def page_layers(text: str, container: str) -> list[set[str]]:
    """The layers of the block that begins with "layers" and the package's name: names up to two spaces."""
    (block,) = re.findall(rf"^```layers {re.escape(container)}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [{name.strip() for name in line.split("  ")[0].split("|")} for line in block.splitlines()]


def code(text: str) -> Iterator[str]:
    """Code spans, and the lines of console blocks without their prompts and comments."""
    for block in re.findall(r"^ *```console\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        yield from (line.strip().removeprefix("$ ").partition("  #")[0].strip() for line in block.splitlines())
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", without_blocks(text)))


def without_blocks(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)


@functools.cache
def tracked() -> tuple[str, ...]:
    """Files and folders of the tree, folders with a slash at the end, each with a slash in front."""
    folders = ("moereg", "tests", "benches", "docs", "plugins", ".ci")
    paths = [*ROOT.iterdir(), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    return tuple(f"/{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}" for path in paths)


def is_path(span: str) -> bool:
    return re.fullmatch(r"[\w./-]+", span) is not None and (span.endswith((*_SUFFIXES, "/")))


def missing_paths(text: str) -> list[str]:
    spans = {span for span in code(text) if is_path(span)}
    return sorted(span for span in spans if not any(path.endswith(f"/{span}") for path in tracked()))


def missing_modules(text: str) -> list[str]:
    names = {name for span in code(text) for name in re.findall(r"(?<![\w./])moereg(?:\.[a-z_]\w*)+(?![\w/])", span)}
    names |= {name for span in code(text) for name in re.findall(r"\bpython -m (benches[\w.]*)", span)}
    # A group of entry points, which has a module's form but outlives the module's name.
    return sorted(name for name in names - {ENTRY_POINTS} if not _resolves(name))


def _resolves(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        return importlib.util.find_spec(name) is not None or hasattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        return hasattr(importlib.import_module(module), attribute)


def wrong_commands(text: str) -> list[str]:
    """Commands that neither moereg nor the Makefile has, and options that a command does not know."""
    targets = re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wrong = []
    for span in code(text):
        program, *arguments = span.split() or [""]
        if program == "make" and arguments and arguments[0] not in targets:
            wrong.append(span)
        if program != "moereg" or not arguments or arguments[0].startswith("-"):
            continue
        options = {name for found in _COMMANDS.values() for option in found.params for name in option.opts}
        if (command := _COMMANDS.get(arguments[0])) is not None:
            options = {name for option in command.params for name in option.opts} | {"--help"}
        if command is None or {argument for argument in arguments if argument.startswith("--")} - options:
            wrong.append(span)
    return wrong


def broken_links(text: str, folder: Path) -> list[str]:
    broken = []
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", without_blocks(text)):
        path, _, anchor = target.partition("#")
        exists = not path or (folder / path).exists()
        if not exists or (anchor and anchor not in _anchors((folder / path).read_text() if path else text)):
            broken.append(target)
    return broken


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("container", ["moereg", "moereg.kernels"])
def test_layers_are_those_of_the_contracts(container: str) -> None:
    assert page_layers(PAGE.read_text(), container) == contract_layers(container)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_documents_name_exists(document: Path) -> None:
    text = document.read_text()
    assert not missing_paths(text)
    assert not missing_modules(text)
    assert not wrong_commands(text)
    assert not broken_links(text, document.parent)


def test_the_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert "docs/index.md" in (ROOT / "README.md").read_text()


def test_fields_of_the_json_are_those_that_are_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ProblemFlags(experts=4, hidden=8, intermediate=8, top_k=2, platform="cpu")
    write_layers(checkpoint := tmp_path / "checkpoint", 0, 1, num_experts=4, hidden_size=64, intermediate_size=32)
    selection = explain_backends(MoEProblem(num_experts=4, hidden_size=8, intermediate_size=8, top_k=2), "cpu")
    info = collect_info()
    check = Check(CellName("a", "B", ("unquantized",), ("cpu",)), "permute")
    verified = Report("a", "cpu", "", {}, 0, (Result(check, Outcome("failed")),), {}).to_dict()
    where = provenance(Platform("cpu"), ["torch"])
    monkeypatch.setenv("MOEREG_TUNING", str(tmp_path / "tuning.json"))
    quantized = compare_schemes(ProblemFlags(), checkpoint, None, find_schemes(["int8_w8a16"]), (1,), {}, 0).values
    printed = {
        "explain": selection_with_evidence(selection),
        "info": info,
        "run": result_of_run("", selection, 1).values,
        "bench": result_of_bench("", selection, "uniform", where).values,
        "quantize": quantized,
        "a compared scheme": quantized["original"],
        "new-backend": write_wheel("a_name", Path(tempfile.mkdtemp())),
        "models": list_models(),
        "a model": list_models()["models"][0],
        "schemes": (schemes := list_schemes("cpu")[0]),
        "a scheme": schemes["schemes"][0],
        "a decision": selection.decisions[0].to_dict(),
        "a backend": info["backends"][0],
        "a cell": info["backends"][0]["cells"][0],
        "verify": verified,
        "a verified cell": verified["cells"][0],
        "a result": verified["results"][0],
        "a dispatcher": info["dispatchers"][0],
        "a rectangle of it": info["dispatchers"][0]["cells"][0],
        "a plugin": PluginStatus("", "", "", "", "loaded").to_dict(),
    }
    printed["tune"] = tune_layer(Question(dataclasses.replace(flags, require=["triton"]), (1,))).values
    text = " ".join(COMMANDS.read_text().split())
    for name, values in printed.items():
        (fields,) = re.findall(rf"(?:- `{name}`:|{name} is) `([^`]+)`", text)
        assert re.sub(r" \([^)]*\)", "", fields).split(", ") == list(values), name
