"""Importing and selecting need no kernel library and touch no device; each test runs in a separate interpreter."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import moereg
from tests.cli.command import printed

HEAVY = ("triton", "flashinfer", "cutlass", "quack", "aiter", "jax", "transformers")
PLATFORMS = ("cpu", "cuda:sm80", "cuda:sm90", "cuda:sm100", "cuda:sm120", "rocm:gfx942", "tpu:v5e")

SELECT = f"""
import json, sys
import moereg
loaded = [name for name in {HEAVY!r} if sys.modules.get(name)]
problem = moereg.MoEProblem(num_experts=8, hidden_size=64, intermediate_size=64, top_k=2)
winners = {{name: moereg.select_backend(problem, platform=name).backend for name in {PLATFORMS!r}}}
winners["here"] = moereg.select_backend(problem).backend
from moereg.spec.quant_schemes import QUANT_SCHEMES
for scheme in QUANT_SCHEMES:
    for name in {PLATFORMS!r}:
        problem = moereg.MoEProblem(num_experts=8, hidden_size=256, intermediate_size=256, top_k=2, quant=scheme)
        winners[f"{{scheme}} on {{name}}"] = moereg.explain_backends(problem, platform=name).backend or "none"
loaded += [name for name in {HEAVY!r} if sys.modules.get(name)]
import torch
print(json.dumps([winners, loaded, torch.cuda.is_initialized()]))
"""


def run(code: str) -> Any:
    return json.loads(printed("-c", textwrap.dedent(code)).splitlines()[-1])


def test_selecting_imports_no_kernel_library() -> None:
    winners, loaded, initialized = run(SELECT)
    assert loaded == []
    assert not initialized
    assert all(winners.values())


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
    rooms = {name for name in dir(moereg) if not hasattr(getattr(moereg, name), "__module__")} - {"__version__"}
    assert (
        set(dir(moereg)) - set(moereg.__all__) == rooms == {"author", "integrations", "quantize", "routing", "testing"}
    )
