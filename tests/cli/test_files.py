"""Files that register a backend, with every command: those of the page for authors."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moereg.errors import ArgumentError
from moereg.registry import REGISTRY
from moereg.selection.loader import load_backends
from moereg.selection.modules import import_modules, own_modules
from tests.cli.command import SIZES, Call, CallJson, run_module, run_python, strict_json
from tests.project.test_author_pages import blocks_of

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted where there is no GPU")
pytestmark = pytest.mark.usefixtures("one_thread", "ceilings")

(NAME, _, SOURCE), (TRITON_NAME, _, TRITON_SOURCE) = [
    block for block in blocks_of("backend-authors.md") if block[0].endswith(".py")
]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """The page's file; what it registers is gone after the test."""
    load_backends()
    before, modules = REGISTRY.cells, set(sys.modules)
    path = tmp_path / NAME
    path.write_text(SOURCE)
    yield path
    REGISTRY.restore(before)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_explain_shows_it_among_the_others(file: Path, call: Call, call_json: CallJson) -> None:
    code, out, _ = call(f"explain {file} {SIZES} --platform cpu --prefer my_kernel")
    assert code == 0
    assert "my_kernel (MyKernelExperts) of my_kernel.py: preferred by the request" in out
    for option in (str(file), f"--module {file}"):
        code, found = call_json(f"explain {option} {SIZES} --platform cpu")
        origins = {decision["backend"]: decision["origin"] for decision in found["decisions"]}
        assert (code, origins["my_kernel"], origins["torch"]) == (0, "my_kernel.py", "builtin")


def test_run_and_bench_compare_it_with_the_others(file: Path, call_json: CallJson) -> None:
    code, found = call_json(f"run {file} {SIZES} --tokens 4 --platform cpu --require my_kernel")
    assert (code, found["backend"], found["passed"]) == (0, "my_kernel", True)
    code, found = call_json(f"bench {file} {SIZES} --tokens 2 --rounds 1 --platform cpu --require my_kernel,torch")
    assert code == 0
    assert {(row["backend"], row["origin"]) for row in found["rows"]} == {
        ("my_kernel", "my_kernel.py"),
        ("torch", "builtin"),
    }


def test_other_commands_know_it(file: Path, call: Call, call_json: CallJson) -> None:
    _, found = call_json(f"info {file}")
    assert "my_kernel" in {backend["name"] for backend in found["backends"]}
    _, found = call_json(f"schemes --module {file} --platform cpu")
    assert "my_kernel" in next(row["backends"] for row in found["schemes"] if row["name"] == "unquantized")


@pytest.fixture
def triton_file(file: Path) -> Path:
    """The page's file in Triton, which is imported at its top."""
    path = file.with_name(TRITON_NAME)
    path.write_text(TRITON_SOURCE)
    return path


@without_gpu
def test_commands_take_a_file_that_imports_triton(
    triton_file: Path, call: Call, call_json: CallJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOEREG_TUNING", str(triton_file.with_name("tuning.json")))
    code, out, _ = call(f"explain {triton_file} {SIZES} --platform h100 --prefer my_triton")
    assert code == 0
    assert "my_triton (MyTritonExperts) of my_triton.py: preferred by the request" in out
    _, found = call_json(f"info {triton_file}")
    assert "my_triton" in {backend["name"] for backend in found["backends"]}
    code, out, err = call(f"tune {triton_file} {SIZES} --platform cpu --dry-run")
    assert (code, "my_triton of my_triton.py" in " ".join((out + err).split())) == (0, True), err
    code, found = call_json(f"run {triton_file} {SIZES} --tokens 4 --platform cpu")
    reasons = {each["backend"]: each["reasons"] for each in found["selection"]["decisions"]}
    assert (code, found["passed"]) == (0, True)
    assert "requires platform in (cuda:sm80+), got cpu" in json.dumps(reasons["my_triton"])


FIRST = "numbers/MyTritonExperts/cuda:sm80+/unquantized/E6-H128"
ODD = "numbers/MyTritonExperts/cuda:sm80+/unquantized/E6-H72"


@without_gpu
def test_verify_interprets_a_file_in_triton_and_says_what_that_shows(triton_file: Path, call: Call) -> None:
    code, out, err = call(f"verify {triton_file} --check deciding --check permute --check {ODD}")
    assert code == 0, out + err
    plain = " ".join(out.split())
    assert "imitated: this shows numbers, not hardware; Triton's interpreter, for one, compiles nothing" in plain
    assert "my_triton: 3 checks passed" in plain
    assert f"to ship it: moereg new-backend my_triton --from {triton_file}" in out.replace("\n", "")
    assert plain.endswith("moereg_api = '1', and imports of kernel libraries inside functions alone")


@without_gpu
def test_verify_interprets_in_one_process_too(triton_file: Path) -> None:
    """Where nobody has set TRITON_INTERPRET, listing the checks imports Triton before the first check runs."""
    line = f"-m moereg verify {triton_file} --no-isolate --check {ODD}"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = run_python(*line.split(), env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "my_triton: 1 check passed" in done.stdout


WRONG = {
    "swapped": ("total * tl.sigmoid(total) * up", "up * tl.sigmoid(up) * total", FIRST, "gate and up swapped"),
    "off by one": ("expert * (2 if GATED else 1)", "(expert + 1) % 6 * (2 if GATED else 1)", FIRST, "off by one"),
    "tail": (
        " & (k[None, :] < K), other",
        ", other",
        ODD,
        "grouped_product: load of 2 bytes at byte 144 of 'x'",
    ),
    "no name": ("* up\n", "* missing\n", ODD, "NameError(\"name 'missing' is not defined\") (my_triton.py:37)"),
    "store": ("(route >= 0) & (column < N))", "route >= 0)", ODD, "bytes (lane 8 in my_triton.py:38)"),
}


@without_gpu
@pytest.mark.parametrize(("right", "wrong", "check", "message"), WRONG.values(), ids=WRONG)
def test_usual_mistakes_in_triton_are_named(
    triton_file: Path, call: Call, right: str, wrong: str, check: str, message: str
) -> None:
    assert right in TRITON_SOURCE
    triton_file.write_text(TRITON_SOURCE.replace(right, wrong))
    code, out, _ = call(f"verify {triton_file} --no-isolate --check {check}")
    assert code == 1
    assert message in " ".join(out.split())
    assert "to ship it" not in out


@pytest.mark.slow
def test_a_configuration_that_no_gpu_of_the_kind_holds_is_named(triton_file: Path, call: Call) -> None:
    first, second = '"BLOCK_N": 128, "BLOCK_K": 64}', '"BLOCK_N": 256, "BLOCK_K": 256}'
    assert first in TRITON_SOURCE
    triton_file.write_text(TRITON_SOURCE.replace(first, second))
    code, out, _ = call(
        f"compile {triton_file} {SIZES} --dtype bfloat16 --platform h100 --tokens 4 --require my_triton"
    )
    assert code == 0
    assert re.search(r"requires at most 232,448 bytes of shared memory, got [\d,]+ in my_triton:grouped_product", out)


@without_gpu
def test_what_cannot_run_here_has_a_reason_and_a_name(file: Path, call_json: CallJson) -> None:
    file.write_text(SOURCE.replace('("cpu", "cuda:sm80+")', '("cuda:sm80+",)'))
    for options in ("", "--platform cuda:sm90"):
        code, report = call_json(f"verify {file} {options} --no-isolate --check permute")
        assert (code, report["passed"], report["backend"]) == (3, None, "my_kernel")
        assert report["cells"][0]["reason"] == "requires platform in (cuda:sm80+), got cpu"


@pytest.mark.slow
def test_a_module_may_not_import_what_a_file_may(triton_file: Path) -> None:
    """Every process that chooses imports a plugin's module; it takes a process that has not imported Triton yet."""
    package = triton_file.parent / "site"
    package.mkdir()
    (package / "as_module.py").write_text(TRITON_SOURCE)
    paths = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH"))))
    done = run_module("verify --module as_module --check deciding", PYTHONPATH=paths)
    assert done.returncode == 1
    message = "choosing a backend imports triton; import it in permute_weights and apply alone, for every process"
    assert message in " ".join(done.stdout.split())
    assert run_module(f"verify {triton_file} --check deciding").returncode in (0, 3)


def test_two_files_and_a_module_go_together(file: Path, call_json: CallJson, monkeypatch: pytest.MonkeyPatch) -> None:
    other, package = file.with_name("other_kernel.py"), file.parent / "site"
    other.write_text(SOURCE.replace("my_kernel", "other_kernel"))
    package.mkdir()
    (package / "third_kernel.py").write_text(SOURCE.replace("my_kernel", "third_kernel"))
    monkeypatch.syspath_prepend(str(package))
    _, found = call_json(f"explain {file} {other} --module third_kernel {SIZES} --platform cpu")
    origins = {decision["backend"]: decision["origin"] for decision in found["decisions"]}
    assert origins["my_kernel"] == "my_kernel.py"
    assert origins["other_kernel"] == "other_kernel.py"
    assert origins["third_kernel"] == "third_kernel"


def test_its_folder_is_no_place_to_import_from(file: Path, call: Call) -> None:
    (file.parent / "beside.py").write_text("raise SystemExit('it ran')\n")
    file.write_text(f"import beside\n{SOURCE}")
    before = list(sys.path)
    code, out, err = call(f"explain {file} {SIZES}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "No module named 'beside': a file is imported alone; make both a package and install it" in err
    assert sys.path == before


REFUSED = [
    ("json.py", "", f"the name json is taken by {json.__file__}; rename the file"),
    ("wave.py", "", f"the name wave is taken by {Path(os.__file__).with_name('wave.py')}; rename"),  # Not imported yet.
    ("sys.py", "", "the name sys is taken by a built-in module; rename the file"),
    ("my-kernel.py", SOURCE, "letters, digits and underscores"),
    ("my.kernel.py", SOURCE, "letters, digits and underscores"),
    ("empty_one.py", "", "must register a backend, got none"),
    ("torch_two.py", SOURCE.replace('"my_kernel"', '"torch"'), "belongs to builtin"),
    ("broken_one.py", "1 / 0", "ZeroDivisionError: division by zero"),
    ("absent.py", None, "no file"),
    ("no_file", None, "no surplus argument but files of backends"),
]


@pytest.mark.parametrize(("name", "text", "message"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_what_is_no_file_of_a_backend(file: Path, call: Call, name: str, text: str | None, message: str) -> None:
    path = file.with_name(name)
    if text is not None:
        path.write_text(text)
    code, out, err = call(f"explain {path} {SIZES}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_what_a_file_imports_keeps_its_origin(file: Path) -> None:
    """A file may import another backend's class before anything else did, for instance to subclass it."""
    file.write_text(f"from moereg.backends.torch_moe import TorchDenseExperts\n{SOURCE}")
    done = run_module(f"explain {NAME} {SIZES} --platform cpu --json", file.parent)
    origins = {found["backend"]: found["origin"] for found in strict_json(done.stdout)["decisions"]}
    assert (origins["torch"], origins["my_kernel"]) == ("builtin", "my_kernel.py")


def test_what_another_process_has_to_import(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_modules([str(file)])
    assert own_modules() == own_modules("my_kernel") == (str(file),)
    assert own_modules("torch") == ()
    package, link = file.parent / "my_package", file.with_name("link")
    package.mkdir()
    (package / "__init__.py").write_text("from .inner import KERNEL\n" + SOURCE.replace("my_kernel", "packaged"))
    (package / "inner.py").write_text("KERNEL = 1\n")
    (file.parent / "linked").mkdir()
    (file.parent / "linked" / "behind_a_link.py").write_text(SOURCE.replace("my_kernel", "linked"))
    link.symlink_to("linked")
    for folder in (link, file.parent):
        monkeypatch.syspath_prepend(str(folder))
    import_modules(["my_package", "behind_a_link"])
    assert own_modules("packaged") == ("my_package",)
    assert own_modules("linked") == (str(link / "behind_a_link.py"),)
    before = REGISTRY.cells
    import_modules(own_modules())
    assert REGISTRY.cells == before


def test_a_file_that_fails_leaves_nothing(file: Path) -> None:
    before = REGISTRY.cells
    file.write_text(f"{SOURCE}1 / 0\n")
    with pytest.raises(ArgumentError, match="division by zero"):
        import_modules([str(file)])
    assert REGISTRY.cells == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        pytest.param("verify FILE --check permute", id="checks"),
        pytest.param("verify my_kernel --module FILE --check permute", id="checks-of-one"),
    ],
)
def test_processes_that_a_command_starts_know_it(file: Path, line: str) -> None:
    done = run_module(line.replace("FILE", NAME), file.parent, MOEREG_REQUIRE="my_kernel")
    assert done.returncode == 0, done.stderr
    assert "my_kernel" in done.stdout


@pytest.mark.slow
def test_every_configuration_of_an_autotuner_is_compiled_ahead(triton_file: Path) -> None:
    line = f"compile {TRITON_NAME} {SIZES} --platform cuda:sm90 --tokens 1,64 --jobs 1 --require my_triton --json"
    done = run_module(line, triton_file.parent, TRITON_CACHE_DIR=str(triton_file.parent / "cache"))
    assert done.returncode == 0, done.stderr
    kernels = strict_json(done.stdout)["kernels"]
    assert [kernel["name"] for kernel in kernels] == ["my_triton:grouped_product"] * 4
