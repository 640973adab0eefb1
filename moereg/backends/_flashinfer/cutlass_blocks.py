"""FlashInfer's GEMMs of 8-bit floats in blocks of 128 x 128, compiled with nvcc at run time."""

from __future__ import annotations

import logging
from typing import ClassVar, Final

import torch

from moereg.backends._flashinfer import package
from moereg.backends._flashinfer.cutlass import Cutlass
from moereg.backends._flashinfer.layouts import arrange
from moereg.backends._loaded import Call
from moereg.runtime.progress import long_wait
from moereg.weights.permuted import ExpertWeights, PermutedWeights

logger: Final = logging.getLogger("moereg")

# Not measured: two GEMMs at about 10 s of nvcc each. Kernels compiled for other numbers of tokens may serve.
_FIRST_SECONDS: Final = 20.0
_AGAIN_SECONDS: Final = 2.0

_SMALLEST_SCALE: Final = 1e-10
"""Hopper's kernels give NaN for block scales near 1e-23."""

# Numbers of tokens at which the tiles change.
_LIMITS: Final = (32, 64, 1024)

_CALLED: Final[set[tuple[object, ...]]] = set()
"""Keys of GEMMs whose kernels this process has loaded: device, sizes and tile parameters."""


def tokens_of_tiles(num_tokens: int) -> tuple[int, int]:
    """The smallest and the largest number of tokens that share their kernels with this one.

    The kernel depends on the number of tiles. Below 32 tokens (64 on a device with 78 multiprocessors) tokens are the
    tile's columns, 16 to 128 in steps of 8; above, they are its rows, 64 up to 64 tokens and 128 for more. From 1,024
    on, two multiprocessors share the loads of an expert's tiles.
    """
    step = 8 if num_tokens <= 64 else 128
    first = (num_tokens - 1) // step * step + 1
    last = first + step - 1
    first = max(first, 65) if step == 128 else first
    if last in _LIMITS:
        return (last, last) if num_tokens == last else (first, last - 1)
    return first, last


def lifted(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Raises block scales below the smallest that the kernels take, and lowers their codes to match.

    Scale and codes move by the same power of two, so values stay the same, except that codes below the format's range
    are rounded, by at most 2e-13 of a weight. Other blocks keep their codes. Raising the scales alone would turn some
    weights of 1e-22 into 1e-9. Returns the given tensors if no scale is that small.

    Args:
        codes: [E,R,C] e4m3.
        scale: [E,R / 128,C / 128] fp32, rounded up.
    """
    is_small = scale < _SMALLEST_SCALE
    if not is_small.any():
        return codes, scale
    # Codes lowered by 30 powers of two are 0, which is right for a scale of 0 too.
    steps = (_SMALLEST_SCALE / scale).log2().ceil().clamp(0, 30)
    found, (rows, columns) = codes.clone(), codes.shape[1:]
    for expert in is_small.flatten(1).any(1).nonzero().view(-1).tolist():
        factor = (-steps[expert]).exp2()  # 1 if a scale is large enough, which changes no code.
        of_codes = factor.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        found[expert] = (codes[expert].float() * of_codes).to(codes.dtype)
    return found, (scale * steps.exp2()).clamp(min=_SMALLEST_SCALE)


class Fp8Block(Cutlass):
    """e4m3 weights in blocks of 128 x 128; FlashInfer quantizes tokens in groups of 128.

    nvcc compiles the GEMMs at run time for each shape and range of tokens; they are cached on disk.
    """

    multiple = 128
    flags: ClassVar[dict[str, bool]] = {"use_deepseek_fp8_block_scale": True}
    has_tactics = False

    def permuted(self, weights: ExpertWeights) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Scales ordered up first, like their weights."""
        assert weights.w13_scale is not None and weights.w2_scale is not None
        rows, columns = self.hidden // 128, self.intermediate // 128
        matrices = self.matrices(weights)
        w13, w13_scale = lifted(matrices["w13"], arrange(weights.w13_scale, columns, rows, self.num_halves))
        w2, w2_scale = lifted(matrices["w2"], arrange(weights.w2_scale, rows, columns))
        return {"w13": w13, "w2": w2, "w13_scale": w13_scale, "w2_scale": w2_scale}, {}

    def quant_scales(self, weights: PermutedWeights) -> list[torch.Tensor]:
        return [weights["w13_scale"], weights["w2_scale"]]

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {**super().dtypes, "weight_dtype": torch.float8_e4m3fn}

    # FlashInfer has one block runner per process, and even a small call asks for as much memory as the largest call of
    # any layer needed. No size known before a call is safe, so FlashInfer allocates its own memory through torch,
    # during capture from the graph's pool.

    def _library_bytes(self, num_tokens: int) -> int:
        return 0

    def buffer(self, call: Call) -> torch.Tensor | None:
        return None

    def run(self, call: Call) -> None:
        num_tokens = call.inputs.hidden_states.shape[0]
        least, most = tokens_of_tiles(num_tokens)
        # The total number of tiles depends on the number of experts too.
        key = (call.out.device, self.problem.num_local_experts, *self._sizes, least)
        if key in _CALLED:
            super().run(call)
            return
        folder = package.deepgemm_folder() / "cache"
        tokens = f"{least} to {most}" if most > least else f"{least}"
        if is_capturing(call.out):
            logger.warning(
                "FlashInfer's fp8 block kernels for %s tokens are looked for, and where they are missing compiled with "
                "nvcc, while a CUDA graph is captured, which may fail; call the layer with %d tokens once before",
                tokens, num_tokens,
            )  # fmt: skip
        has_some = all(any(folder.glob(f"gemm_*{rows}_{depth}_*")) for rows, depth in self._sizes)
        what = (
            f"loading FlashInfer's fp8 block kernels for {tokens} tokens, with about 10 s of nvcc for a missing one,"
            if has_some
            else f"compiling FlashInfer's fp8 block kernels for {tokens} tokens with nvcc"
        )
        with long_wait(what, _AGAIN_SECONDS if has_some else _FIRST_SECONDS, f"kept in {folder} for each layer shape"):
            super().run(call)
        _CALLED.add(key)

    @property
    def _sizes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """N and K of both GEMMs."""
        return (self.num_halves * self.intermediate, self.hidden), (self.hidden, self.intermediate)


def is_capturing(tensor: torch.Tensor) -> bool:
    """Whether a CUDA graph is being captured on the current stream of a tensor's device."""
    with torch.cuda.device_of(tensor):
        return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
