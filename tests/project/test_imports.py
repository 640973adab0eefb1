"""Importing and selecting need no kernel library and touch no device; each test runs in a separate interpreter."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import moereg

PACKAGE = Path(moereg.__file__).parent
HEAVY = ("triton", "flashinfer", "cutlass", "quack", "aiter", "jax", "transformers")
PLATFORMS = ("cpu", "cuda:sm80", "cuda:sm90", "cuda:sm100", "cuda:sm120", "rocm:gfx942", "tpu:v5e")

SELECT = f"""
import json, sys
import moereg
loaded = [name for name in {HEAVY!r} if sys.modules.get(name)]
problem = moereg.MoEProblem(num_experts=8, hidden_size=64, intermediate_size=64, top_k=2)
winners = {{name: moereg.select_backend(problem, platform=name).backend for name in {PLATFORMS!r}}}
winners["here"] = moereg.select_backend(problem).backend
from moereg.quant import QUANT_SCHEMES
for scheme in QUANT_SCHEMES:
    for name in {PLATFORMS!r}:
        problem = moereg.MoEProblem(num_experts=8, hidden_size=256, intermediate_size=256, top_k=2, quant=scheme)
        winners[f"{{scheme}} on {{name}}"] = moereg.explain_backends(problem, platform=name).backend or "none"
loaded += [name for name in {HEAVY!r} if sys.modules.get(name)]
import torch
print(json.dumps([winners, loaded, torch.cuda.is_initialized()]))
"""


def run(code: str, **environment: str) -> Any:
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


def test_selecting_imports_no_kernel_library() -> None:
    winners, loaded, initialized = run(SELECT)
    assert loaded == []
    assert not initialized
    assert all(winners.values())


def test_selecting_needs_no_kernel_library() -> None:
    block = f"import sys\nfor name in {HEAVY!r}: sys.modules[name] = None\n"
    winners, loaded, _ = run(block + SELECT)
    assert loaded == []
    # A named platform is assumed to meet requirements; here the installed packages do meet them.
    assert winners == run(SELECT)[0]


def test_selecting_does_not_initialize_cuda() -> None:
    refuse = """
        import torch
        def refuse(*args, **kwargs):
            raise AssertionError("CUDA was initialized")
        torch.cuda._lazy_init = refuse
        torch.cuda.current_device = refuse
        torch.cuda.get_device_capability = refuse
    """
    assert all(run(textwrap.dedent(refuse) + SELECT)[0].values())


def test_importing_moereg_registers_nothing() -> None:
    code = """
        import json, sys
        import moereg
        from moereg.registry import REGISTRY
        backends = [name for name in sys.modules if name.startswith("moereg.backends")]
        print(json.dumps([len(REGISTRY.cells), backends]))
    """
    assert run(code) == [0, []]


def test_the_version_and_the_names_of_the_kit_need_no_torch() -> None:
    code = """
        import contextlib, io, json, sys
        sys.modules["torch"] = None
        import moereg.testing
        assert not {"triton", "hypothesis", "pytest"} & set(sys.modules)
        from moereg.__main__ import main
        sys.argv = ["moereg", "--version"]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            code = main()
        import moereg
        print(json.dumps([code, out.getvalue(), hasattr(moereg, "nobody"), moereg.errors.__name__]))
    """
    assert run(code) == [0, f"moereg {moereg.__version__}\n", False, "moereg.errors"]


def test_names_of_the_front_door_are_where_it_says() -> None:
    assert {name for names in moereg._HOMES.values() for name in names} | {"__version__"} == set(moereg.__all__)
    assert set(moereg.__all__) <= set(dir(moereg))


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path, anywhere: bool) -> set[str]:
    """Names that a file imports, at its top level or anywhere."""
    tree = ast.parse(path.read_text())
    nodes = ast.walk(tree) if anywhere else iter(tree.body)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_backend_is_named(path: Path) -> None:
    place = path.relative_to(PACKAGE).parts
    if place[0] in ("backends", "discovery.py"):
        return
    assert not {name for name in imports_of(path, anywhere=True) if name.startswith("moereg.backends")}


BACKENDS = sorted((PACKAGE / "backends").rglob("*.py"))
each_backend_file = pytest.mark.parametrize("path", BACKENDS, ids=lambda path: str(path.relative_to(PACKAGE)))
# Device code imports its language at its top. These packages need no library but torch.
LIGHT_KERNELS = ("moereg.kernels.plain", "moereg.kernels.sizes")


@each_backend_file
def test_backends_import_nothing_heavy(path: Path) -> None:
    roots = {name.partition(".")[0] for name in imports_of(path, anywhere=False)}
    assert not roots & set(HEAVY)


def _loads(path: Path) -> list[ast.AST]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "name", "") == "_load"]


@pytest.mark.parametrize(
    "path", [path for path in BACKENDS if path.name.endswith("_moe.py")], ids=lambda path: path.name
)
def test_claims_import_no_kernels(path: Path) -> None:
    """Selecting imports the pages of claims. The code that runs is imported when a layer first needs it."""
    names = imports_of(path, anywhere=False)
    assert not {name for name in names if name.startswith("moereg.kernels.") and not name.startswith(LIGHT_KERNELS)}
    # An import statement, and not a string: the digest of a class's code follows it.
    for load in _loads(path):
        (imported,) = (node for node in ast.walk(load) if isinstance(node, (ast.Import, ast.ImportFrom)))
        assert isinstance(imported, ast.ImportFrom)
        assert (imported.module or "").startswith("moereg.backends._")


@pytest.mark.parametrize("name", ["torch_moe.py", "triton_moe.py"])
def test_what_runs_is_not_in_the_claims(name: str) -> None:
    """A backend of one file may hold its own code; these are too long for that."""
    assert _loads(PACKAGE / "backends" / name)


@pytest.mark.parametrize(
    "path", [path for path in BACKENDS if path.parent.name.startswith("_")], ids=lambda path: str(path.name)
)
def test_what_runs_imports_its_kernels_once(path: Path) -> None:
    """At its top, when a layer first needs it, and not at every call.

    Other people's libraries are imported in functions: weights are permuted, and probes asked, without them.
    """
    inside = {
        ast.unparse(node)
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        if (getattr(node, "module", None) or node.names[0].name).partition(".")[0] not in HEAVY
    }
    assert not inside


def test_public_names() -> None:
    assert set(moereg.__all__) >= {
        "Activation",
        "ExpertWeights",
        "MoEProblem",
        "Platform",
        "QuantScheme",
        "make_kernel",
        "register_moe_backend",
        "select_backend",
    }
    assert all(hasattr(moereg, name) for name in moereg.__all__)
    assert (PACKAGE / "py.typed").exists()
