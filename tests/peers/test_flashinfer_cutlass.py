"""`flashinfer_cutlass` beside the installed FlashInfer: what signatures alone do not say."""

import inspect
import os
import subprocess
import sys
import types

import pytest
import torch

from moereg.backends._flashinfer import cutlass_int4, package
from moereg.backends._flashinfer.cutlass import Rows
from moereg.backends._flashinfer.loading import Library
from moereg.platforms import Platform
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantFormat
from moereg.weights.formats import Quantized, restore
from tests.support.flashinfer_imitation import CLASSES, ActivationType

pytestmark = pytest.mark.peers

# A checkpoint of mxfp8 has the class of mxfp4_mxfp8.
_SCHEMES = [quant for quant in CLASSES if quant != "mxfp8"]
_PACKED = ("mxfp4_w4a16", "int4_w4a8_g128")


@pytest.fixture(scope="module")
def core():
    return pytest.importorskip("flashinfer.fused_moe.core", reason="make test-peers installs flashinfer-python")


class _Built:
    """What the shared object has, as far as Python asks it on a machine without a GPU."""

    def __init__(self):
        self.made = []

    def set_deepgemm_jit_include_dirs(self, folders):
        assert os.path.isdir(folders[0])

    def interleave_moe_weights_for_sm90_mixed_gemm(self, *arguments):
        raise AssertionError("moereg interleaves by itself")

    def init(self, *arguments):
        self.made.append(arguments)
        return types.SimpleNamespace(
            get_gemm1_tactic_count=lambda: 3,
            get_gemm2_tactic_count=lambda: 4,
            get_tactic_occupancy=self.occupancy,
            get_valid_tactics_for_shape=lambda stage, rows, depth: [0, 1, 3, 4, 5],
        )

    @staticmethod
    def occupancy(tactic):
        if tactic == 5:
            raise RuntimeError("was built without these kernels")
        return 0 if tactic == 2 else 1


@pytest.fixture
def runner(core, monkeypatch):
    built = _Built()
    spec = types.SimpleNamespace(build_and_load=lambda: built)
    monkeypatch.setattr(core, "gen_cutlass_fused_moe_sm90_module", lambda use_fast_build: spec)
    make = core.get_cutlass_fused_moe_module.__wrapped__
    return make("90").MoERunner, built


@pytest.mark.parametrize("quant", _SCHEMES)
def test_tactics_are_asked_of_flashinfers_own_runner(runner, quant):
    runner, built = runner
    problem = MoEProblem(num_experts=4, hidden_size=128, intermediate_size=128, top_k=2, quant=quant)
    implementation = CLASSES[quant](problem, Platform.from_name("cuda:sm90")).implementation
    implementation.library = Library(None, None, ActivationType, runner, None)
    ids = torch.zeros(1, 2, dtype=torch.int32)
    first, second = implementation._candidates(Rows(ids, ids, ids, ids))
    assert (first, second) == ([0, 1], [3, 4] if quant in _PACKED else [3, 4, 6])
    (made,) = built.made
    names = ("x_dtype", "weight_dtype", "output_dtype")
    assert made[:3] == tuple(implementation.dtypes[name] for name in names)
    flags = (quant == "fp8_block128", quant in _PACKED, quant == "mxfp4_mxfp8", quant == "int4_w4a8_g128")
    assert made[3:] == (*flags, False, False)


def test_what_4_bit_integers_rely_on(core):
    """Codes in two's complement, low nibble first, in groups of 128, and ones for vectors that FlashInfer needs not."""
    prepare = pytest.importorskip("flashinfer.fused_moe.prepare")
    weights = torch.randn(2, 8, 256, generator=torch.Generator().manual_seed(0))
    packed, scale = prepare._quantize_int4_grouped(weights)
    assert (packed.dtype, scale.dtype, scale.shape) == (torch.uint8, torch.bfloat16, (2, 8, 2))
    ours = QuantFormat("uint4", (1, 128))
    restored = restore(Quantized(packed ^ cutlass_int4._SIGN_BITS, scale.float()), ours, 8, 256)
    assert float((restored - weights).abs().max()) <= 0.51 * float(scale.float().max())
    headers = package.package_folder() / "data/csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/include"
    assert "int4_group_size = 128;" in (headers / "moe_gemm_kernels.h").read_text()
    text = inspect.getsource(prepare.prepare_cutlass_w4a8_weights)
    assert '"fc1_act_scale": ones_h' in text
    assert '"fc2_act_scale": ones_i' in text


def test_what_is_compiled_at_run_time_is_in_the_package(core):
    headers = package.package_folder() / package._DEEPGEMM
    assert (headers / "fp8_gemm.cuh").is_file()
    # Tiles are taken by the number of tokens in steps of 8, as `tokens_of_tiles` says.
    assert "i = 16; i <= 128; i += 8" in (headers / "jit_utils.cuh").read_text()


# Where moereg looks for FlashInfer's downloads, beside where FlashInfer looks.
_FOLDERS = """
from flashinfer.artifacts import ArtifactPath
from flashinfer.jit.env import FLASHINFER_CUBIN_DIR
from moereg.backends._flashinfer import package

assert package.generated_folder() == ArtifactPath.TRTLLM_GEN_BMM.strip("/")
assert package.download_folder() == FLASHINFER_CUBIN_DIR, (package.download_folder(), FLASHINFER_CUBIN_DIR)
print(FLASHINFER_CUBIN_DIR)
"""


def test_downloads_are_looked_for_where_flashinfer_looks(tmp_path):
    # A process of its own, since FlashInfer reads the variables where it is first imported.
    settings = {**os.environ, "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    settings.pop("FLASHINFER_CUBIN_DIR", None)
    found = subprocess.run([sys.executable, "-c", _FOLDERS], env=settings, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1].startswith(str(tmp_path))
