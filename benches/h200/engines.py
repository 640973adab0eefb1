"""Random weights and comparisons with fp32 for the processes of a served engine that hold its model."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

# Root mean squares of formats' values under equally likely codes.
_E2M1_RMS: Final = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
_INT4_RMS: Final = math.sqrt(sum(v * v for v in range(-8, 8)) / 16)


def _filled_part(leaf: str, data: Any, config: Mapping[str, Any], shards: int) -> Any:
    """The part of an expert parameter that a checkpoint fills: vLLM pads those of mxfp4 for some kernels."""
    if config.get("quantization_config", {}).get("quant_method") != "mxfp4" or not leaf.startswith(("w13_", "w2_")):
        return data
    hidden, inner = config["hidden_size"], config["intermediate_size"] // shards
    rows, depth = (2 * inner, hidden) if leaf.startswith("w13_") else (hidden, inner)
    if leaf.endswith("bias"):
        return data[:, :rows]
    return data[:, :rows, : depth // (32 if leaf.endswith("scale") else 2)]


def _values(leaf: str, like: Any, generator: Any, is_embedding: bool) -> Any:
    """Random values for a parameter, or None to leave it as it is; dequantized weights have deviation K**-0.5."""
    shape, dtype, options = tuple(like.shape), like.dtype, {"generator": generator, "device": like.device}
    if any(word in leaf for word in ("g_idx", "sort_indices", "weight_shape", "zero_point")):
        return torch.zeros(shape, dtype=dtype, device=like.device)
    if leaf in ("q_scale", "k_scale", "v_scale", "prob_scale") or leaf.endswith("input_scale"):
        return None
    if dtype == torch.uint8 and leaf.endswith("scale"):
        power = round(math.log2((shape[-1] * 32) ** -0.5 / _E2M1_RMS))
        return torch.randint(126 + power, 129 + power, shape, dtype=dtype, **options)
    if dtype in (torch.uint8, torch.int8, torch.int32):
        size = like.element_size()
        codes = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, **options)
        return codes.view(dtype)
    if not dtype.is_floating_point:
        raise ValueError(f"no rule for {leaf} of {dtype} {shape}")
    if "scale" in leaf:
        is_fp8 = leaf.endswith("scale_inv")  # else int4: experts [E,K/128,N], linear layers [N,K/128]
        depth = 128 * (shape[1] if len(shape) == 3 and not is_fp8 else shape[-1])
        spread = 0.75 + 0.5 * torch.rand(shape, dtype=torch.float32, **options)
        return spread * depth**-0.5 / (1.0 if is_fp8 else _INT4_RMS)
    if leaf.endswith("bias"):
        return torch.randn(shape, dtype=torch.float32, **options) * 0.1
    if len(shape) < 2:
        return torch.ones(shape, dtype=dtype, device=like.device)
    if dtype.itemsize == 1:
        return torch.randn(shape, dtype=torch.bfloat16, **options)
    # Embeddings of size 1: with smaller ones greedy decoding repeats one token.
    std = 1.0 if is_embedding else shape[-1] ** -0.5
    return torch.randn(shape, dtype=dtype, **options).mul_(std)


def fill(model: Any, config: Mapping[str, Any], shards: int, zero_experts: bool) -> None:
    """Fills every parameter, by its name and its unpadded shape alone, experts by rank too.

    Experts' columns are in `shards` parts, one on each rank.
    """
    start, num_bytes, rank = time.perf_counter(), 0, torch.distributed.get_rank()
    for name, parameter in model.named_parameters():
        leaf, data = name.rpartition(".")[2], parameter.data
        part = _filled_part(leaf, data, config, shards)
        seed = zlib.crc32(name.replace(".routed_experts.", ".").encode())
        seed += rank if leaf.startswith(("w13_", "w2_")) else 0
        generator = torch.Generator(data.device).manual_seed(seed)
        values = _values(leaf, part, generator, "embed_tokens" in name or ".embedding." in name)
        if values is None:
            continue
        if part is not data:
            data.zero_()
        if zero_experts and leaf.startswith("w2_") and "scale" not in leaf:
            is_int4 = values.dtype == torch.int32  # Its zero is 8.
            values = values.view(torch.uint8).fill_(0x88).view(torch.int32) if is_int4 else torch.zeros_like(values)
        part.copy_(values)
        num_bytes += data.numel() * data.element_size()
    print(f"filled {num_bytes / 2**30:.1f} GiB in {time.perf_counter() - start:.1f} s", flush=True)


class Compared:
    """Compares every call of the experts of a served engine with fp32 on canonical weights, which it keeps.

    Attributes:
        worst: The largest relative error over its bound, by layer.
        calls: Calls of experts.
    """

    def __init__(self, hook: Any, inputs_of: Callable[..., tuple[Any, Any, Any]]) -> None:
        """Patches the hook of a plugin.

        Args:
            hook: Module with `take_weights` and `_apply`.
            inputs_of: From the arguments of `_apply` after the layer to hidden states, routing weights and ids.
        """
        self.worst: dict[str, float] = {}
        self.errors: dict[str, float] = {}
        self.calls = 0
        self._weights: dict[int, Any] = {}
        take, run = hook.take_weights, hook._apply

        def take_weights(layer: Any, *rest: Any) -> Any:
            weights = take(layer, *rest)
            kept = {name: tensor.clone() for name, tensor in weights.tensors().items()}
            self._weights[id(layer)] = type(weights).unchecked(kept, weights.scheme)
            return weights

        def apply(method: Any, layer: Any, *args: Any, **named: Any) -> Any:
            out = run(method, layer, *args, **named)
            inputs = inputs_of(*args, **named)
            self._compare(method.moereg, self._weights[id(layer)], *inputs, getattr(out, "hidden_states", out))
            return out

        hook.take_weights, hook._apply = take_weights, apply

    def found(self) -> dict[str, Any]:
        """The number of calls, and the largest relative errors, over their bounds and as such."""
        return {"calls": self.calls, "worst": max(self.worst.values()), "error": max(self.errors.values())}

    def _compare(self, ours: Any, weights: Any, x: Any, topk_weights: Any, topk_ids: Any, out: Any) -> None:
        from moereg.numerics.reference import reference_experts, relative_error
        from moereg.numerics.tolerances import layer_tolerance

        self.calls += 1
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        problem, computes = ours.kernel.problem, ours.selection.winner.scheme
        routes = topk_weights, topk_ids, ours.kernel.expert_map
        expected = reference_experts(problem, weights, x, *routes, computes=computes)
        error = relative_error(out, expected)
        bound = layer_tolerance(problem, x.shape[0], computes)
        self.errors[ours.name] = max(self.errors.get(ours.name, 0.0), error)
        self.worst[ours.name] = max(self.worst.get(ours.name, 0.0), error / bound)
