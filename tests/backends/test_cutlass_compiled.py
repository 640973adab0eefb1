"""QuACK itself: the copy that CPUs test with means what QuACK means, and its kernels with our epilogues compile."""

from __future__ import annotations

import json
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import moereg
from tests.cli.command import printed, run_python
from tests.support import quack_copy

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).parents[1] / "kernels" / "quack_compile.py"


def test_kernels_compile_and_nothing_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("quack", reason="quack-kernels is not installed; make test-peers installs it")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    instructions = {"sm_90a": "wgmma", "sm_100a": "tcgen05"}
    # Side by side: each takes most of a minute, and the other tests of `make test-peers` not half of one.
    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(lambda arch: printed(str(SCRIPT), arch, timeout=600), instructions))
    for arch, output in zip(instructions, outputs, strict=True):
        found = json.loads(output.splitlines()[-1])
        # Once, and of both products: what tells kernels apart are attributes of QuACK's objects, which no signature
        # shows.
        (announced,) = found["announced"]
        assert "compiling 2 kernels of cutlass" in announced, arch
        assert len(found["kernels"]) == 8, arch
        for kernel in found["kernels"]:
            assert kernel[instructions[arch]] > 0, (arch, kernel)
            assert kernel["stack"] == 0, (arch, kernel)
            assert kernel["registers"] <= 168, (arch, kernel)


_DIGESTS = """
import moereg.kernels.quack as epilogues
made = [epilogues.ActivationConstant(*facts) for facts in (
    ("silu", True, 1.0, 0.0, None),
    ("silu", True, 1.0, 0.0, 7.0),
    ("gelu", True, 1.0, 0.0, None),
    ("gelu_tanh", True, 1.0, 0.0, None),
    ("swigluoai", True, 1.702, 1.0, 7.0),
)]
print(epilogues.__file__, *(epilogues.gate_up_epilogue(function, False, False).semantic_digest for function in made))
"""


def test_an_installed_moereg_has_a_kernel_for_each_activation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """QuACK looks into functions of a checkout, but takes those of site-packages by their names."""
    pytest.importorskip("quack", reason="quack-kernels is not installed")
    installed = tmp_path / "site-packages"
    package = Path(moereg.__file__).parent
    shutil.copytree(package, installed / "moereg", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    environment = {"CUTE_DSL_ARCH": "sm_90a", "QUACK_ARCH": "sm_90", "QUACK_CACHE_ENABLED": "0"}
    paths = os.pathsep.join(filter(None, [str(installed), *sys.path]))
    run = run_python("-c", _DIGESTS, env={**os.environ, **environment, "PYTHONPATH": paths}, cwd=tmp_path, timeout=600)
    assert run.returncode == 0, run.stderr
    where, *digests = run.stdout.split()
    assert Path(where).is_relative_to(installed)
    assert len(set(digests)) == len(digests) == 5


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_copy_means_what_quack_means(has_bias: bool) -> None:
    interface = pytest.importorskip("quack.gemm_interface", reason="quack-kernels is not installed")
    generator = torch.Generator().manual_seed(0)
    rows, matrices, bias = (torch.randn(shape, generator=generator) for shape in ((6, 16), (4, 24, 16), (4, 24)))
    # An expert without rows, and a row in front of the first expert's end that is gathered twice.
    offsets = torch.tensor([0, 3, 3, 6, 8], dtype=torch.int32)
    source = torch.tensor([0, 5, 1, 2, 2, 4, 3, 0], dtype=torch.int32)
    named = {"bias": bias} if has_bias else {}
    _, expected = interface.gemm_act_ref(
        rows, matrices.mT, activation="swiglu", cu_seqlens_m=offsets, A_idx=source, **named
    )

    def swiglu(acc: quack_copy.Pair, **operands: quack_copy.Pair) -> dict[str, torch.Tensor]:
        gate, up = quack_copy.unpack(acc + operands["bias"] if operands else acc)
        return {"intermediate": torch.nn.functional.silu(gate) * up}

    def with_bias(acc: quack_copy.Pair, bias: quack_copy.Pair) -> dict[str, torch.Tensor]:
        return swiglu(acc, bias=bias)

    def without(acc: quack_copy.Pair) -> dict[str, torch.Tensor]:
        return swiglu(acc)

    operands = {"bias": quack_copy.RowVecLoad("bias")} if has_bias else {}
    product = quack_copy.gemm_epilogue(("intermediate",), operands, "acc_pair")(with_bias if has_bias else without)
    found = torch.full((8, 12), float("nan"))
    config = quack_copy.GemmConfig(128, 192, True, False, 2, 9)
    product(
        rows,
        matrices.transpose(1, 2),
        out={"intermediate": found},
        store_d=False,
        config=config,
        tuned=False,
        cu_seqlens_m=offsets,
        A_idx=source,
        **named,
    )
    torch.testing.assert_close(found, expected)
