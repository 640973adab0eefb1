"""Compiles the Gluon kernels that layers launch on sm_90a, by every shipped rule, without a device; prints JSON rows.

Run as a separate program, since its process becomes one for a device that is not there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch

from moereg.dispatch import select_backend
from moereg.kernels.launch.ahead import Target, Variant, become
from moereg.layer.backend_calls import make_experts
from moereg.layer.warm_up.dummy import DummyLayer, empty_weights
from moereg.spec.problem import MoEProblem
from tests.kernels.aot_compile import cubin_usage, launch_trained

QWEN = {"num_experts": 64, "top_k": 8, "hidden_size": 2048, "intermediate_size": 768}
SHARD = {**QWEN, "intermediate_size": 256}
MIXTRAL = {"num_experts": 8, "top_k": 2, "hidden_size": 4096, "intermediate_size": 14336}
GPT_OSS = {"num_experts": 32, "top_k": 4, "hidden_size": 2880, "intermediate_size": 768}
BATCHED = {**QWEN, "activation_format": "batched"}

# Facts of a layer beside its scheme, and numbers of tokens. Rows an expert choose a rule, and columns and experts do.
LAYERS: tuple[tuple[str, dict[str, Any], tuple[int, ...]], ...] = (
    *(
        ("unquantized", {**sizes, "dtype": dtype}, counts)
        for dtype in ("bfloat16", "float16")
        for sizes, counts in ((MIXTRAL, (256, 4096)), (QWEN, (256,)), (SHARD, (512,)), (GPT_OSS, (2400,)))
    ),
    ("unquantized", BATCHED, (512, 4096)),
    *(("fp8_block128", {**QWEN, "dtype": dtype}, (512, 4096)) for dtype in ("bfloat16", "float16")),
    *((scheme, QWEN, (4096,)) for scheme in ("fp8_channel_token", "fp8_tensor_static", "int8_w8a8")),
    ("int8_w8a8", {**QWEN, "dtype": "float16"}, (4096,)),
    # Tokens by their routes and two halves a consumer; boxes and three consumers.
    ("mxfp4_w4a16", QWEN, (512,)),
    ("int4_w4a16_g128", QWEN, (1024,)),
)


# Of `aot_compile.TRAINED`: with biases, not gated, with an adapter's step.
TRAINED = ("trained_gpt_oss", "trained_not_gated", "trained_adapters")


def trained(take: Callable[[], list[Variant]]) -> Iterator[tuple[str, Variant]]:
    """Hopper's products of a training step, each variant once."""
    for case in TRAINED:
        launch_trained(case, 0, "cuda:sm90")
        hopper = {variant.digest: variant for variant in take() if ".hopper." in variant.name}
        for number, variant in enumerate(hopper.values()):
            if "clear" not in variant.name:
                yield f"{case} {number}", variant


def products(
    take: Callable[[], list[Variant]], layers: tuple[tuple[str, dict[str, Any], tuple[int, ...]], ...]
) -> Iterator[tuple[str, Variant]]:
    """The products on Hopper of every layer and number of tokens, each variant once."""
    seen = set()
    for scheme, facts, counts in layers:
        selection = select_backend(MoEProblem(**facts, quant=scheme), platform="cuda:sm90", require="triton")
        assert selection.winner is not None
        experts = make_experts(selection, selection.winner)
        layer = DummyLayer(experts, next(empty_weights(experts)))
        for count in counts:
            with torch.no_grad():
                layer.call(count)
            hopper = [variant for variant in take() if ".hopper." in variant.name]
            for product, variant in zip(("gate_up", "down"), hopper, strict=True):
                if variant.digest not in seen:
                    seen.add(variant.digest)
                    yield f"{product} {scheme} {count}", variant


def describe(name: str, variant: Variant) -> dict[str, Any]:
    """Its resources and instructions."""
    compiled, _, _ = variant.compile()
    registers, stack_bytes = cubin_usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return {
        "name": name,
        "registers": registers,
        "stack_bytes": stack_bytes,
        "shared_bytes": compiled.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "bulk_tensor": ptx.count("cp.async.bulk.tensor"),
        "saturating": ptx.count("cvt.rn.satfinite.e4m3x2.f32"),
    }


if __name__ == "__main__":
    # A launch of what is compiled already asks for no variant, so all are asked for first.
    target = Target.of("cuda", "sm90")
    assert target is not None
    asked = become(target)
    for found in [*products(asked, LAYERS), *trained(asked)]:
        print(json.dumps(describe(*found)), flush=True)
