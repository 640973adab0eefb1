"""FlashInfer's other backends than `flashinfer_cutlass`: what they refuse, need, and say before they wait."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from moereg.backends import flashinfer_moe as page
from moereg.backends._flashinfer import calls, package
from moereg.platforms import Platform
from moereg.quantize import dequantize_weights
from moereg.spec.problem import MoEProblem
from moereg.testing.inputs import make_weights
from tests.support.tensors import unaligned

B200 = Platform("cuda", "sm100", probed=True)
PROBLEM = MoEProblem(num_experts=8, hidden_size=256, intermediate_size=256, top_k=2)
FOLDER = "0f/batched_gemm-1"


def _reasons(quant: str, num_experts: int, top_k: int) -> list[str]:
    problem = MoEProblem(
        num_experts=num_experts, hidden_size=256, intermediate_size=256, top_k=top_k, quant=quant, activation="silu"
    )
    return page.FlashInferTrtLlmFloat8BlockExperts.unsupported_reasons(problem, B200)


@pytest.mark.parametrize(
    ("quant", "is_strict"),
    [
        *(("fp8_block128", True), ("mxfp8", True), ("unquantized", False), ("fp8_tensor_static", False)),
        *(("nvfp4", False), ("int4_w4a16_g32", False)),
    ],
)
def test_one_launcher_wants_four_experts_at_a_time_and_more_than_are_chosen(quant: str, is_strict: bool) -> None:
    assert _reasons(quant, 8, 2) == []
    assert _reasons(quant, 6, 2) == (["requires num_experts % 4 == 0, got 6"] if is_strict else [])
    assert _reasons(quant, 4, 4) == (["requires top_k < num_experts, got 4 of 4"] if is_strict else [])


def test_blocks_that_do_not_divide_are_padded_in_each_half() -> None:
    problem = MoEProblem(num_experts=8, hidden_size=256, intermediate_size=192, top_k=2, quant="fp8_block128")
    weights = make_weights(problem, torch.device("cpu"))
    permuted = page.FlashInferTrtLlmFloat8BlockExperts(problem, B200).permute_weights(weights, problem)
    expected = [matrix.unflatten(dim, (-1, 192)) for dim, matrix in enumerate(dequantize_weights(weights), start=1)]
    padded = [(8, 512, 256), (8, 256, 256)]
    for dim, (name, shape, matrix) in enumerate(zip(("w13", "w2"), padded, expected, strict=True), start=1):
        assert permuted[name].shape == shape
        scale = permuted[f"{name}_scale"].repeat_interleave(128, 1).repeat_interleave(128, 2)
        found = (permuted[name].float() * scale).bfloat16().unflatten(dim, (-1, 256))
        assert torch.equal(found.flip(1).narrow(dim + 1, 0, 192) if name == "w13" else found[..., :192], matrix)
        assert not found.narrow(dim + 1, 192, 64).any()


def test_who_can_be_captured() -> None:
    names = {name for name in page.__all__ if "Cutlass" not in name}
    refused = {"FlashInferB12xExperts", "FlashInferCuTeDslBatchedExperts", "FlashInferCuTeDslExperts"}
    assert {name for name in names if not getattr(page, name).facts.graph_capture} == refused


def test_a_result_that_begins_anywhere_is_written_through_one_that_does_not() -> None:
    out, whole = unaligned(3, 5), torch.empty(3, 5)
    with calls.first_call("some", PROBLEM, 20.0, "they are kept", out) as written:
        assert written.data_ptr() % 16 == 0
        written.fill_(2.0)
    assert bool((out == 2.0).all())
    with calls.first_call("some", PROBLEM, 20.0, "they are kept", whole) as written:
        assert written is whole


def test_each_backend_is_announced_until_a_call_has_succeeded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class OnDevice(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    def call(backend: str, out: torch.Tensor, error: type[Exception] | None = None) -> None:
        with calls.first_call(backend, PROBLEM, 20.0, "they are kept", out) as written:
            assert written.data_ptr() % 16 == 0
            if error is not None:
                raise error("no network")

    monkeypatch.setattr(calls, "_DONE", set())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    caplog.set_level(logging.INFO, logger="moereg")
    with pytest.raises(RuntimeError, match="no network"):
        call("some", torch.empty(3, 8), RuntimeError)
    for backend in ("some", "some", "other", "some"):
        call(backend, torch.empty(3, 8))
    assert [text.endswith(" takes about 20 s; they are kept") for text in caplog.messages] == [True] * 3
    caplog.clear()
    for _ in range(2):
        call("captured", torch.empty(3, 8).as_subclass(OnDevice))
    assert len(caplog.messages) == 2
    assert caplog.messages[0].endswith(" while a CUDA graph is captured, which may fail; call the layer once before")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for downloads, of a machine with compilers, modules that are not built, and FlashInfer's pins."""
    site = tmp_path / "flashinfer"
    site.mkdir()
    (site / "artifacts.py").write_text(
        f'class ArtifactPath:\n    TRTLLM_GEN_BMM: str = (\n        "{FOLDER}/"\n    )\n'
    )
    monkeypatch.setattr(package, "package_folder", lambda: site)
    monkeypatch.setattr(package, "installed_version", lambda: "0.7.2")
    monkeypatch.setattr(page, "built_module", lambda module, target: None)
    monkeypatch.setattr(page, "has_compiler", lambda platform: None)
    folder = tmp_path / "downloads"
    monkeypatch.setenv("FLASHINFER_CUBIN_DIR", str(folder))
    (folder / FOLDER / "include" / "trtllmGen_bmm_export").mkdir(parents=True)
    return folder


def test_what_would_have_to_be_downloaded_is_a_reason(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cure = "run flashinfer download-cubin where there is a network, or name a folder that has them in "
    where = f"which FlashInfer downloads, found none in {machine / FOLDER}; {cure}FLASHINFER_CUBIN_DIR"
    assert page._has_launcher(B200) == f"requires headers of TensorRT-LLM's kernels, {where}"
    assert page._has_sort(B200) == f"requires headers of TensorRT-LLM's kernels, {where}"
    (machine / FOLDER / "include" / "trtllmGen_bmm_export" / "Enums.h").touch()
    assert page._has_sort(B200) is None
    assert page._has_launcher(B200) == f"requires TensorRT-LLM's kernels, {where}"
    (machine / FOLDER / "one.cubin").touch()
    assert page._has_launcher(B200) is None
    # A package that does not say what it downloads is no reason.
    (machine / FOLDER / "one.cubin").unlink()
    monkeypatch.setattr(package, "package_folder", lambda: machine)
    assert page._has_launcher(B200) is None


def test_rows_of_each_expert_need_a_module_of_their_own_and_no_download(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(page, "has_compiler", lambda platform: "requires nvcc")
    monkeypatch.setattr(page, "built_module", lambda module, target: asked.append((module, target)))
    assert page._has_quantizer(B200) == "requires nvcc"
    assert page._has_launcher(B200) == "requires nvcc"
    assert asked == [("fp4_quantization_100", "100a"), ("fused_moe_trtllm_sm100", "100a")]


def test_downloads_are_looked_for_where_flashinfer_looks(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert package.download_folder() == machine
    monkeypatch.delenv("FLASHINFER_CUBIN_DIR")
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    cache = tmp_path / ".cache" / "flashinfer" / "cubins"
    assert package.download_folder() == cache
    for version, is_taken in (("0.6.13", False), ("0.7.2", True)):
        wheel = tmp_path / version
        (wheel / "flashinfer_cubin").mkdir(parents=True)
        (wheel / "flashinfer_cubin" / "__init__.py").touch()
        metadata = wheel / f"flashinfer_cubin-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flashinfer-cubin\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(wheel))
        assert package.download_folder() == (wheel / "flashinfer_cubin" / "cubins" if is_taken else cache)
