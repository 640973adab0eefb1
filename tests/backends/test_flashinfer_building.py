"""Which kernels of FlashInfer are built, what is known of built ones, and why some cannot be loaded."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from moereg.backends._flashinfer import building, kernel_sets, loading, manifest, package
from moereg.backends._flashinfer.manifest import Manifest
from moereg.errors import ArgumentError
from moereg.platforms import Platform
from moereg.spec.quant_schemes import get_scheme

_HOPPER = Platform.from_name("cuda:sm90")

_DENSE = """
        INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(Sm90, {a}, {b}, {a},
        void, EpilogueOpDefault, NONE,
"""
_SOURCES = {
    "kernels/moe_gemm_kernels_bf16_bf16.cu": "",
    "kernels/moe_gemm_kernels_bf16_fp8.cu": "",
    "kernels/moe_gemm_kernels_fp8_fp8.cu": "",
    "kernels/moe_gemm_kernels_fp32_fp32.cu": "",
    "kernels/moe_gemm_tma_warp_specialized_input.cu": "",
    "common/logger.cpp": "",
    "grouped/90/bf16.generated.cu": _DENSE.format(a="__nv_bfloat16", b="__nv_bfloat16"),
    "grouped/90/fp8.generated.cu": _DENSE.format(a="__nv_fp8_e4m3", b="__nv_fp8_e4m3"),
    "grouped/90/float.generated.cu": _DENSE.format(a="float", b="float"),
    "grouped/90/mixed.generated.cu": (
        "template void sm90_generic_mixed_moe_gemm_kernelLauncher<__nv_bfloat16, SafeFP4, __nv_bfloat16,"
    ),
    "kernels/moe_gemm_kernels_fp8_uint4.cu": "",
    "grouped/90/int4.generated.cu": (
        "template void sm90_generic_mixed_moe_gemm_kernelLauncher<__nv_fp8_e4m3,\n cutlass::uint4b_t, __nv_bfloat16,\n"
    ),
    "grouped/90/int4_float16.generated.cu": (
        "template void sm90_generic_mixed_moe_gemm_kernelLauncher<__nv_fp8_e4m3, cutlass::uint4b_t, half,\nA>"
    ),
    "gemm/90/dead.generated.cu": "template void sm90_generic_mixed_gemm_kernelLauncher<__nv_bfloat16, uint8_t,",
    "grouped/80/ampere.generated.cu": (
        "template void sm80_generic_fused_moe_gemm_kernelLauncher<cutlass::bfloat16_t, cutlass::bfloat16_t, 16,"
    ),
}


@pytest.fixture
def sources(tmp_path):
    paths = []
    for name, text in _SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        paths.append(path)
    return paths


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["bfloat16"], ["moe_gemm_kernels_bf16_bf16.cu", "bf16.generated.cu"]),
        (["fp8_block128"], ["moe_gemm_kernels_bf16_fp8.cu"]),
        (["fp8"], ["moe_gemm_kernels_fp8_fp8.cu", "fp8.generated.cu"]),
        (["mxfp4_w4a16"], ["mixed.generated.cu"]),
        (["bfloat16_ampere"], ["moe_gemm_kernels_bf16_bf16.cu", "ampere.generated.cu"]),
        (["int4_w4a8_g128"], ["moe_gemm_kernels_fp8_uint4.cu", "int4.generated.cu"]),
        (
            ["int4_w4a8_g128", "mxfp4_w4a16"],
            ["moe_gemm_kernels_fp8_uint4.cu", "int4.generated.cu", "mixed.generated.cu"],
        ),
    ],
    ids=["bfloat16", "fp8_block128", "fp8", "mxfp4_w4a16", "ampere", "int4", "int4-and-fp4"],
)
def test_a_set_takes_its_own_sources_and_what_all_need(sources, names, expected):
    chosen = {path.name for path in kernel_sets.select_sources(sources, names)}
    assert chosen == {"moe_gemm_tma_warp_specialized_input.cu", "logger.cpp", *expected}


def test_estimates_grow_with_what_is_asked_for(sources):
    few, more = (kernel_sets.select_sources(sources, names) for names in (["bfloat16"], ["bfloat16", "fp8"]))
    assert 100 < kernel_sets.cpu_seconds(few) < kernel_sets.cpu_seconds(more)
    assert building.cpu_seconds(few) == kernel_sets.cpu_seconds(few)
    int4 = building.with_own(kernel_sets.select_sources(sources, ["int4_w4a8_g128"]), sources[0].parent)
    assert 420 < building.cpu_seconds(int4) < 520


def test_the_choice_among_int4_tiles_is_compiled_for_bfloat16_alone(sources, tmp_path):
    chosen = building.with_own(kernel_sets.select_sources(sources, ["int4_w4a8_g128"]), tmp_path)
    own = tmp_path / "moereg_fp8_uint4_bfloat16.cu"
    assert own in chosen
    assert not any(path.stem == "moe_gemm_kernels_fp8_uint4" for path in chosen)
    building.write_own(sources)
    assert not own.exists()
    building.write_own(chosen)
    assert own.read_text().count("template class") == 1
    os.utime(own, ns=(1, 1))
    building.write_own(chosen)
    assert own.stat().st_mtime_ns == 1, "what was compiled of it would be compiled again"


@pytest.fixture
def tools(monkeypatch, tmp_path):
    """A machine that could build."""
    for header in building._HEADERS:
        (tmp_path / header).write_text("")
    monkeypatch.setenv("CPATH", str(tmp_path))
    monkeypatch.setattr(package, "package_folder", lambda: tmp_path)
    monkeypatch.setattr(package, "lacking_compiler", list)


def _plan(platform=_HOPPER, quant=(), dtypes=(), parts=()):
    schemes = [get_scheme(name) for name in quant]
    return building.CutlassBuilder().plan(platform, schemes, dtypes, parts, None)


def test_what_has_no_kernels_is_an_error_before_anything_is_built(tools):
    with pytest.raises(ArgumentError, match=r"^FlashInfer has no CUTLASS kernels of scheme int8_w8a8 in bfloat16 f"):
        _plan(quant=["int8_w8a8"])
    with pytest.raises(ArgumentError, match=r"^FlashInfer has no CUTLASS kernels of scheme unquantized in float32 for"):
        _plan(quant=["unquantized"], dtypes=["float32"])
    with pytest.raises(ArgumentError, match=r"^FlashInfer has CUTLASS kernels for sm90, sm100, sm103, sm120 and sm12"):
        _plan(Platform.from_name("cuda:sm80"))
    with pytest.raises(ArgumentError, match=r"^unknown set of CUTLASS kernels for cuda:sm90 'bfloat', did you mean"):
        _plan(quant=["unquantized"], parts=["bfloat"])


def test_tools_that_are_missing_are_named(monkeypatch, tools):
    monkeypatch.setattr(package, "lacking_compiler", lambda: ["nvcc", "ninja"])
    with pytest.raises(ArgumentError, match=r"^building needs nvcc, ninja and a C\+\+ compiler, found no nvcc and no"):
        _plan()
    monkeypatch.setattr(package, "lacking_compiler", list)
    monkeypatch.setenv("CPATH", "")
    monkeypatch.setattr(building, "_includes", list)
    with pytest.raises(ArgumentError, match=r"^building needs headers of the CUDA toolkit, found no cuda_runtime.h, c"):
        _plan()


def test_memory_bounds_the_number_of_compilers():
    plan = building.BuildPlan((), (), 1, 1.0, bytes_per_job=8 * 2**30, target=Path("x"))
    assert plan.num_jobs(16, 64 * 2**30) == 8
    assert plan.num_jobs(4, 64 * 2**30) == 4
    assert plan.num_jobs(16, 2**30) == 1
    assert plan.num_jobs(16, None) == 16


@pytest.mark.skipif(not (shutil.which("c++") and shutil.which("nm")), reason="needs a C++ compiler and binutils")
def test_a_kernel_that_was_not_built_throws_instead_of_ending_the_process(tmp_path):
    (tmp_path / "one.cpp").write_text(
        "namespace tensorrt_llm { struct Gemm { Gemm(int); int run() const; }; int built() { return 7; } }\n"
        'extern "C" int works() { return tensorrt_llm::built(); }\n'
        'extern "C" const char* fails() {\n'
        '  static char text[400] = "";\n'
        '  try { tensorrt_llm::Gemm gemm(3); return gemm.run() ? "ran" : ""; }\n'
        "  catch (const std::exception& error) {\n"
        "    for (int i = 0; i < 399 && error.what()[i]; ++i) text[i] = error.what()[i];\n"
        "    return text;\n"
        "  }\n"
        "}\n"
    )
    source, object_file, library = (tmp_path / name for name in ("one.cpp", "one.o", "one.so"))
    source.write_text("#include <exception>\n" + source.read_text())
    subprocess.run(["c++", "-fPIC", "-c", str(source), "-o", str(object_file)], check=True)
    missing = building.missing_symbols([str(object_file)])
    assert missing == ["_ZN12tensorrt_llm4GemmC1Ei", "_ZNK12tensorrt_llm4Gemm3runEv"]
    stubs = tmp_path / "stubs.cpp"
    stubs.write_text(building.stub_source(missing, Path("/cache/fused_moe_90.so")))
    subprocess.run(["c++", "-shared", "-fPIC", str(object_file), str(stubs), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.fails.restype = ctypes.c_char_p
    assert loaded.works() == 7
    assert loaded.fails().decode() == (
        "fused_moe_90.so was built without these kernels; build them with moereg build-kernels "
        "flashinfer_cutlass, or remove the file"
    )


@pytest.fixture
def built(tmp_path, monkeypatch):
    """A shared object in its place, by its manifest one of two sets."""
    path = tmp_path / "aot" / "fused_moe_90.so"
    path.parent.mkdir()
    path.write_bytes(b"\x7fELF" + bytes(14) + (0x3E).to_bytes(2, "little") + bytes(80))
    monkeypatch.setattr(package.python_platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(package, "built_module", lambda module, target: path if path.exists() else None)
    monkeypatch.setattr(package, "aot_path", lambda module: path)
    monkeypatch.setattr(package, "installed_version", lambda: "0.7.2")
    Manifest("fused_moe_90", "0.7.2", "90a", ("bfloat16", "fp8_block128"), path.stat().st_size).write(path)
    return path


def _reason(name="bfloat16"):
    return loading.reason_not_built("sm90", name, "--quant unquantized")


def test_kernels_are_of_this_version_and_of_architectures_that_have_them(built, monkeypatch):
    assert _reason() is None
    assert manifest.read_manifest(built).sets == ("bfloat16", "fp8_block128")
    assert loading.reason_not_built("sm107", "bfloat16", "").endswith("builds these kernels for, got sm107")
    monkeypatch.setattr(package, "installed_version", lambda: "0.7.3")
    assert _reason().startswith(f"requires kernels of FlashInfer 0.7.3, got {built} of 0.7.2; run moereg build-kernels")


def test_kernels_that_are_not_in_it(built):
    assert _reason("fp8") == (
        f"requires the kernels fp8, got {built} with bfloat16, fp8_block128; "
        "run moereg build-kernels flashinfer_cutlass --quant unquantized"
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda values: values.update(num_bytes=1), "speaks of 1 bytes, and fused_moe_90.so has 100"),
        (lambda values: values.update(schema=2), "has another schema than 1"),
        (lambda values: values.pop("sets"), "lacks a field"),
    ],
    ids=["size", "schema", "field"],
)
def test_a_manifest_of_another_file(built, change, text):
    path = manifest.manifest_path(built)
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    assert f"requires to know what {built} holds, but its manifest {text}" in _reason()


def test_a_shared_object_that_nobody_describes(built, monkeypatch):
    """Where FlashInfer puts none, and a missing kernel would end the process; a whole build in its cache has none."""
    manifest.manifest_path(built).unlink()
    assert _reason().startswith(f"requires to know what {built} holds, which has no manifest; run moereg build-kernels")
    monkeypatch.setattr(package, "aot_path", lambda module: built.with_name("elsewhere.so"))
    assert _reason() is None


def test_a_file_that_the_loader_refuses_says_why(built, monkeypatch, caplog):
    """FlashInfer logs the reason, and raises that it may not compile."""

    class MissingJITCacheError(RuntimeError):
        pass

    def refuse(capability):
        raise MissingJITCacheError("JIT compilation is disabled via FLASHINFER_DISABLE_JIT")

    for name in ("flashinfer", "flashinfer.fused_moe", "flashinfer.fused_moe.core"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(get_cutlass_fused_moe_module=refuse))
    with pytest.raises(RuntimeError, match=r"^[^\n]*$") as raised:
        loading.load("sm90")
    assert str(raised.value).startswith(f"{built} cannot be loaded (")
    assert "DISABLE_JIT" not in str(raised.value)
    assert str(raised.value).endswith(
        "; mend that, or remove the file and run moereg build-kernels flashinfer_cutlass on this machine"
    )
    assert package.JIT_DISABLED not in os.environ


@pytest.fixture
def imported(monkeypatch):
    """The targets of a FlashInfer that was imported for sm90."""
    monkeypatch.delenv(building._TARGETS, raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(building, "_toolkit", lambda: Path("/toolkit"))
    context = types.SimpleNamespace(TARGET_CUDA_ARCHS={(9, "0a")})

    def refresh():
        context.TARGET_CUDA_ARCHS.clear()
        context.TARGET_CUDA_ARCHS.add(os.environ[building._TARGETS])

    core = types.SimpleNamespace(current_compilation_context=context, refresh_current_compilation_context=refresh)
    for name, module in (("flashinfer", core), ("flashinfer.jit", core), ("flashinfer.jit.core", core)):
        monkeypatch.setitem(sys.modules, name, module)
    return context.TARGET_CUDA_ARCHS


def test_a_plan_for_another_target_changes_nothing_for_the_process(imported):
    for capability in ("10.0a", "12.0f"):
        with building._target(capability):
            assert imported == {capability}
            assert os.environ["CUDA_HOME"] == "/toolkit"
        assert imported == {(9, "0a")}
        assert building._TARGETS not in os.environ
        assert "CUDA_HOME" not in os.environ


def test_objects_of_two_targets_lie_apart():
    """sm120 and sm121 share FlashInfer's name of the module, and the folder is that of the first target."""
    spec = types.SimpleNamespace(build_dir=Path("/cache/0.7.2/120f/cached_ops/fused_moe_120"))
    folders = [building._build_folder(spec, capability).name for capability in ("12.0f", "12.1a")]
    assert folders == ["moereg_fused_moe_120", "moereg_fused_moe_120_121a"]
