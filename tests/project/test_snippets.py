"""Every command and every program in the documents runs, as it is written where that is possible."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from moereg import cli
from moereg.bench.roofline import Ceilings
from moereg.bench.timing import time_runs
from moereg.spec import model_shapes as shapes
from tests.project.test_author_pages import blocks_of as files_of
from tests.support.console_blocks import Command, Environment, commands_in
from tests.support.snippets import Block, blocks_of, small_models, write_layers
from tests.support.toml import tomllib

ROOT: Final = Path(__file__).parents[2]
# Of these tests/project/test_author_pages.py runs all blocks, as they are written, in an environment of their own.
AS_WRITTEN: Final = ("backend-authors.md", "platform-authors.md")
PAGES: Final = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS: Final = [block for page in PAGES if page.name not in AS_WRITTEN for block in blocks_of(page)]
# Blocks that hold nothing to run: trees of files, and lists that tests/project/test_architecture.py reads.
NO_PROGRAM: Final = ("text", "layers")

INSTEAD: Final = {
    # Writes into the tree, and measures for minutes.
    "python -m benches.board --json benches/results/board_h200.json --seconds 500": "python -m benches.board --list",
    "python -m benches.board --first-use --json benches/results/board_h200_first_use.json --tokens 64 1024": (
        "python -m benches.board --first-use --list"
    ),
    # Four kernels instead of twenty-four.
    "moereg compile --model qwen3-30b-a3b --quant fp8_block128 --platform cuda:sm90 --cache kernels": (
        "moereg compile --model qwen3-30b-a3b --platform cuda:sm90 --cache kernels --tokens 1"
    ),
    # Needs a GPU with room for 30 billion parameters; tests/benches/test_whole_model.py runs a tiny model.
    "python -m benches.whole_model --model qwen3-30b-a3b --json benches/results/whole_model_qwen3-30b-a3b.json": (
        "python -m benches.whole_model --help"
    ),
    # The folder of the test has no whole model; tests/cli/test_compare.py runs one.
    **dict.fromkeys(
        (
            "moereg compare DIR --batch 1,16 --html gain.html",
            "moereg compare DIR --random-weights --layers 4",
            "moereg compare DIR --html gain.html",
        ),
        "moereg compare --help",
    ),
    # Three samples of a time instead of a second of them.
    "python -m benches.over_ranks --ranks 2 --sizes 8,2,128,64 --tokens 4,16 --routing uniform,zipf --platform cpu": (
        "python -m benches.over_ranks --ranks 2 --sizes 8,2,128,64 --tokens 4,16 --routing uniform,zipf --platform cpu "
        "--rounds 3"
    ),
    # Writes into the tree; tests/benches/test_results.py compares what it would write.
    "python -m benches.report": "python -m benches.report --help",
    # Measures for minutes.
    "moereg tune --model qwen3-30b-a3b": "moereg tune --model qwen3-30b-a3b --dry-run",
    # One check of one backend is a second, all of them a minute.
    "moereg verify NAME --quarantine": "moereg verify torch --check rejections --quarantine",
    # The page for authors runs all of its checks.
    "moereg verify my_kernel.py": "moereg verify my_kernel.py --check workspaces",
    "moereg bench my_kernel.py --model qwen3-30b-a3b": (
        "moereg bench my_kernel.py --experts 8 --hidden 64 --intermediate 32 --top-k 2"
    ),
    "moereg verify NAME --unquarantine": "moereg verify torch --unquarantine",
}
"""What runs in a command's place."""

NOT_RUN: Final = {
    "source .venv/bin/activate": "nothing here made .venv; .ci/run runs `make demo`, and commands of that folder",
    "flashinfer install-jit-cache-wheel --mode minimal": "needs FlashInfer, a GPU and a network",
    'python -c "from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module as module; module().build()"': (
        "needs FlashInfer and CUDA's tools, and compiles for hours"
    ),
    "moereg compile --check --cache kernels --platform cuda:sm90": (
        "reads the folder of the command before it; tests/warm_up/test_compile_ahead.py runs both"
    ),
    "moereg explain fast_kernel.py --experts 16 --hidden 256 --intermediate 128 --top-k 2": (
        "shows what one machine has; tests/cli/test_explain.py runs the command"
    ),
    "moereg tune fast_kernel.py --experts 16 --hidden 256 --intermediate 128 --top-k 2 --tokens 64": (
        "measures for a minute; tests/cli/test_tune.py runs the command"
    ),
    "moereg tune --checkpoint DIR --histogram calls.json": (
        "needs a checkpoint; tests/cli/test_tune.py runs the command"
    ),
    "python -m benches.board --pack moereg/tuning_pack.json "
    "benches/results/{board_h200,session_h200,board_h200_3}.json": (
        "writes over what ships; tests/benches/test_board_pack.py runs the command"
    ),
    "vllm serve Qwen/Qwen3-30B-A3B": "needs vLLM and a model; plugins/vllm-moereg/tests starts engines",
    "export PYTORCH_NO_CUDA_MEMORY_CACHING=1": "belongs to the next",
    "compute-sanitizer --tool memcheck python -m moereg verify NAME --no-isolate --check drawn": (
        "needs a GPU and CUDA's tools"
    ),
}
"""Commands that cannot run here, with the reason."""

SLOW: Final = (
    "bench",
    "compile",
    "verify",
    "quantize",
    "benches.board",
    "benches.over_ranks",
    "benches.report",
)


def _commands() -> list[tuple[str, Command]]:
    found = []
    for block in BLOCKS:
        if block.language == "console":
            found += [(f"{block.name} {command.line}", command) for command in commands_in(block.text)]
    return found


COMMANDS: Final = _commands()


def _needs_environment(command: Command) -> bool:
    """Whether it installs something, or needs what another command installed."""
    return command.line.startswith("pip ") or "my_kernel" in command.line


def _params() -> list[Any]:
    found = []
    for name, command in COMMANDS:
        if command.line not in NOT_RUN and not _needs_environment(command):
            is_slow = bool({*SLOW} & set(command.line.split())) and not command.line.startswith("make")
            found.append(pytest.param(command, id=name, marks=[pytest.mark.slow] if is_slow else []))
    return found


@pytest.fixture(autouse=True)
def _poisoned_empty() -> None:
    """Readers have the real `torch.empty`; inductor also compiles no other."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the checkpoint that the documents name, and models whose layers are small."""
    write_layers(tmp_path / "DIR")
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "checkpoint").symlink_to(tmp_path / "DIR")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOEREG_QUARANTINE", str(tmp_path / "quarantine.json"))
    monkeypatch.setenv("MOEREG_TUNING", str(tmp_path / "tuning.json"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("moereg.cli._bench.measure_ceilings", lambda dtype, device: Ceilings(0.1, 20.0, "nothing"))
    # Three samples instead of a second of them for each kernel and number of tokens: no page's times are compared.
    monkeypatch.setattr("moereg.bench.compare.time_runs", lambda runs, device, *most: time_runs(runs, device, 3, 0.0))
    return tmp_path


@pytest.mark.parametrize("command", _params())
def test_a_command_does_what_it_says(
    command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = INSTEAD.get(command.line, command.line)
    program, *arguments = shlex.split(line)
    if [program, *arguments[:2]] == ["python", "-m", "moereg"]:
        program, arguments = "moereg", arguments[2:]
    if program == "moereg":
        if arguments[0] != "explain":  # Which computes nothing.
            monkeypatch.setattr(shapes, "MODEL_SHAPES", small_models())
        code = cli.main(arguments)
        captured = capsys.readouterr()
        output = captured.out + captured.err
    else:
        known = {"make": ["make", "-n", *arguments], "python": [sys.executable, *arguments]}
        done = subprocess.run(known[program], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
        code, output = done.returncode, done.stdout + done.stderr
    assert code == command.code, output
    plain = " ".join(output.split())
    assert not [text for text in command.expected if text not in plain], output


def _programs() -> list[Any]:
    marks = {"peft": pytest.mark.finetune, r"transformers|torch\.compile": pytest.mark.slow}
    return [
        pytest.param(
            block, id=block.name, marks=[mark for text, mark in marks.items() if re.search(text, block.text)][:1]
        )
        for block in BLOCKS
        if block.language == "python"
    ]


@pytest.mark.parametrize("block", _programs())
def test_a_program_runs_by_itself(block: Block, folder: Path, isolated_registry: object) -> None:
    # Its inductor compiles C++ for half a minute; Dynamo's part of it, which could break the graph, stays.
    text = block.text.replace("@torch.compile(fullgraph=True)", '@torch.compile(fullgraph=True, backend="aot_eager")')
    exec(compile(text, block.name, "exec"), {"__name__": "__main__"})


def test_every_block_is_run_or_holds_nothing_to_run() -> None:
    assert {block.language for block in BLOCKS} <= {"console", "python", *NO_PROGRAM}
    for block in BLOCKS:
        fences = block.page.read_text().count("```")
        assert fences == 2 * len(blocks_of(block.page)), f"{block.page.name} has a fence without a language"
        if block.language in NO_PROGRAM:
            hidden = re.findall(r"^\s*(?:\$ |moereg |pip |make |python ).*", block.text, re.MULTILINE)
            assert not hidden, f"{block.name} hides commands from this test: {hidden}"


def test_the_exceptions_are_still_in_the_documents() -> None:
    lines = {command.line for _, command in COMMANDS}
    assert not {*INSTEAD, *NOT_RUN} - lines
    assert set(AS_WRITTEN) <= {page.name for page in PAGES}


def test_extras_that_are_installed_exist() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = set(tomllib.load(file)["project"]["optional-dependencies"])
    named = {extra for page in PAGES for text in re.findall(r"(?:moereg|\.)\[([\w,]+)\]", page.read_text())
             for extra in text.split(",")}  # fmt: skip
    assert named
    assert named <= extras


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_installed_runs(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "environment")
    # Where a page begins with commands on the author's file, it is the one of the page for authors.
    for file, _, text in files_of("backend-authors.md"):
        if file == "my_kernel.py":
            (tmp_path / file).write_text(text)
    for name, command in COMMANDS:
        if _needs_environment(command):
            command = dataclasses.replace(command, line=INSTEAD.get(command.line, command.line))
            print(f"{name}\n{environment.run(command, tmp_path if 'my' in command.line else ROOT)}")
    assert "my_kernel" in environment.run(Command("moereg info", 0, ()), tmp_path)
