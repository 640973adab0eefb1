"""Every branch of the two functions of vLLM that choose a backend for unquantized and for nvfp4 layers.

`tests/oracle_parity/oracles.py` takes them, and a test says which of them no row of the tables takes.
"""

from __future__ import annotations

from typing import Final

__all__ = ["BRANCHES"]

UNQUANTIZED: Final = {
    "cpu": "a CPU has one backend, before anything else is read",
    "tpu": "a TPU has one backend, before anything else is read",
    "out_of_tree": "a platform of a plugin has one backend, before anything else is read",
    "order_cuda": "the order on CUDA",
    "order_rocm": "the order on ROCm",
    "order_xpu": "the order on XPU",
    "order_sm90": "on Hopper both of FlashInfer go last",
    "order_data_parallel": "under data parallelism FlashInfer's CUTLASS goes last",
    "order_swigluoai": "for gpt-oss's activation both of FlashInfer go last",
    "format_standard": "tokens stay in place",
    "format_batched": "tokens are laid out by expert",
    "explicit": "a backend is asked for by name",
    "explicit_unknown": "the name asked for is none of this scheme's",
    "explicit_triton_batched": "Triton asked for in the batched format means its batched variant",
    "explicit_as_named": "any other name asked for is taken as it stands",
    "explicit_supported": "the backend asked for supports the layer",
    "explicit_unsupported": "the backend asked for does not: an error that may say why",
    "auto": "no backend is asked for",
    "flashinfer_unset": "the variable of FlashInfer is not set",
    "flashinfer_off": "FlashInfer is forced off",
    "flashinfer_off_trtllm_present": "its TensorRT-LLM kernels leave the order",
    "flashinfer_off_trtllm_absent": "its TensorRT-LLM kernels are not in this platform's order",
    "flashinfer_off_cutlass_present": "its CUTLASS kernels leave the order",
    "flashinfer_off_cutlass_absent": "its CUTLASS kernels are not in this platform's order",
    "flashinfer_pinned": "FlashInfer is forced on and one of it is named",
    "flashinfer_pinned_cutlass": "CUTLASS is the one",
    "flashinfer_pinned_trtllm": "TensorRT-LLM is the one",
    "flashinfer_pinned_other": "the one named has no such kernels: an error",
    "flashinfer_pinned_supported": "the one named supports the layer",
    "flashinfer_pinned_unsupported": "the one named does not: an error",
    "flashinfer_forced": "FlashInfer is forced on and none of it is named",
    "flashinfer_forced_supported": "the first that supports the layer is taken",
    "flashinfer_forced_skipped": "one that does not is passed over",
    "flashinfer_forced_none": "none of FlashInfer supports the layer: an error",
    "aiter_unset": "neither variable of AITER is set",
    "aiter_off": "a variable of AITER says no",
    "aiter_off_present": "AITER leaves the order",
    "aiter_off_absent": "AITER is not in this platform's order",
    "aiter_forced": "both variables of AITER say yes",
    "aiter_forced_supported": "AITER supports the layer",
    "aiter_forced_unsupported": "AITER does not: an error",
    "loop_supported": "the first of the order that supports the layer is taken",
    "loop_skipped": "one of the order that does not is passed over",
    "none": "nothing in the order supports the layer: an error",
}

NVFP4: Final = {
    "order": "one order for all platforms, without b12x, emulation last",
    "clamp_filters": "a clamp leaves those in the order that are known to apply it",
    "no_clamp": "without a clamp all of the order stay",
    "format_standard": "tokens stay in place",
    "format_batched": "tokens are laid out by expert",
    "explicit": "a backend is asked for by name",
    "explicit_unknown": "the name asked for is none of this scheme's",
    "explicit_cutedsl_batched": "CuTe DSL asked for in the batched format means its batched variant",
    "explicit_as_named": "any other name asked for is taken as it stands",
    "explicit_clamp_refused": "the layer has a clamp and the backend asked for is not known to apply it: an error",
    "explicit_clamp_applied": "the layer has a clamp and the backend asked for is known to apply it",
    "explicit_supported": "a class of the backend asked for supports the layer",
    "explicit_unsupported": "no class of the backend asked for does: an error that may say why",
    "auto": "no backend is asked for",
    "flashinfer_unset": "the variable of FlashInfer is not set",
    "flashinfer_off": "FlashInfer is forced off",
    "flashinfer_off_present": "one of FlashInfer leaves the order",
    "flashinfer_off_absent": "one of FlashInfer is not in the order: b12x, or one that left for the clamp",
    "flashinfer_pinned": "FlashInfer is forced on and one of it is named",
    "flashinfer_pinned_clamp_refused": "the layer has a clamp and the one named is not known to apply it: an error",
    "flashinfer_pinned_supported": "the one named supports the layer",
    "flashinfer_pinned_unsupported": "the one named does not: an error",
    "flashinfer_forced": "FlashInfer is forced on and none of it is named",
    "flashinfer_forced_clamp": "a clamp leaves those of FlashInfer that are known to apply it",
    "flashinfer_forced_supported": "the first that supports the layer is taken",
    "flashinfer_forced_skipped": "one that does not is passed over",
    "flashinfer_forced_none": "none of FlashInfer supports the layer: an error",
    "marlin_unforced": "Marlin is not forced",
    "marlin_forced": "Marlin is forced, whatever the clamp",
    "marlin_forced_supported": "Marlin supports the layer",
    "marlin_forced_unsupported": "Marlin does not: an error",
    "loop_supported": "the first of the order that supports the layer is taken",
    "loop_skipped": "one of the order that does not is passed over",
    "none": "nothing in the order supports the layer: an error",
}

BRANCHES: Final = {
    **{f"unquantized/{name}": text for name, text in UNQUANTIZED.items()},
    **{f"nvfp4/{name}": text for name, text in NVFP4.items()},
}
"""Each branch by its name, with what happens in it."""
