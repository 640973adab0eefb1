"""QuACK's products of a layer's backward pass: whether they are right, and how fast.

    python -m benches.h200.quack_backward [--tokens 4096 16384] [--json FILE]

The layer is Qwen3-30B-A3B's in bf16 with uniform routing, the four products those of all its gradients:

    d_pre  gradients of tokens by w2, gathered, through SwiGLU; also the weighted activations and the weights' gradients
    d_x    d_pre by w13
    d_w13  tokens, gathered, by d_pre, summed over each expert's rows
    d_w2   gradients of tokens, gathered, by the weighted activations, likewise

Each product with each of a few tiles is compared with torch in fp32 on the experts with the fewest and the most rows
before it is timed; what raises or is wrong is told and not timed. A time is the median of seven, each of one call that
the host launches ahead. The exit code is 1 if no tile of some product was right.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from moereg.evidence.provenance import clocks, provenance
from moereg.platforms import probe_platform
from moereg.spec.model_shapes import get_shape

MODEL: Final = "qwen3-30b-a3b"
ROUNDS: Final = 7
LARGEST_ERROR: Final = 0.01
"""Relative, in the Frobenius norm: twice what rounding to bf16 costs."""
AHEAD_CYCLES: Final = 2_000_000
"""The device sleeps so long, a millisecond, while the host launches a call."""
# Rows and columns, whether two warpgroups take turns, and CTAs that share a tile of the other operand.
TILES: Final = ((128, 192, True, 1), (128, 128, True, 2), (128, 256, False, 2), (256, 128, False, 2))

PRODUCTS: Final = ("d_pre", "d_x", "d_w13", "d_w2")

Tensors = Mapping[str, torch.Tensor]


def make_inputs(num_tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
    """A call's saved tensors. N = T * K rows are sorted by their experts.

    Returns:
        `x` and `d_out` [T, H], `w13` [E, 2I, H] and `pre` [N, 2I] with gate and up alternating, `w2` [E, H, I],
        `weight` [N] fp32, `source` [N] int32 (each row's token) and `offsets` [E + 1] int32.
    """
    sizes = get_shape(MODEL).problem_keywords()
    num_experts, top_k = sizes["num_experts"], sizes["top_k"]
    hidden, intermediate = sizes["hidden_size"], sizes["intermediate_size"]
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).mul_(scale)

    topk_ids = torch.rand(num_tokens, num_experts, generator=generator, device=device).topk(top_k).indices
    order = topk_ids.flatten().argsort(stable=True)  # [N]
    counts = topk_ids.flatten().bincount(minlength=num_experts)
    return {
        "x": randn(num_tokens, hidden),
        "d_out": randn(num_tokens, hidden),
        "w13": randn(num_experts, 2 * intermediate, hidden, scale=hidden**-0.5),
        "w2": randn(num_experts, hidden, intermediate, scale=intermediate**-0.5),
        "pre": randn(len(order), 2 * intermediate),
        "weight": torch.rand(len(order), generator=generator, device=device),
        "source": (order // top_k).int(),
        "offsets": torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
    }


def products(given: Tensors) -> dict[str, Callable[[Any], dict[str, torch.Tensor]]]:
    """Products by name: functions of a tile's configuration that return outputs by name. Needs `d_pre` and `act` too.

    Weights' gradients are [E, H, 2I], as a view of [E, 2I, H], and [E, H, I].
    """
    from quack.gemm_interface import gemm_dgated, gemm_tuned

    source, offsets, d_pre = given["source"], given["offsets"], given["d_pre"]
    # A kernel that leaves an element out must not find the last one's result there.
    d_x = torch.full((len(source), given["x"].shape[1]), torch.nan, dtype=d_pre.dtype, device=d_pre.device)
    new_pre, new_act, d_w13, d_w2 = (
        torch.full_like(given[name], torch.nan, memory_format=torch.contiguous_format)
        for name in ("pre", "act", "w13", "w2")
    )

    def through_activation(config: Any) -> dict[str, torch.Tensor]:
        found = gemm_dgated(
            given["d_out"],
            given["w2"],
            given["pre"],
            "swiglu",
            dx_out=new_pre,
            postact_out=new_act,
            colvec_scale=given["weight"],
            colvec_reduce=True,
            cu_seqlens_m=offsets,
            A_idx=source,
            dynamic_scheduler=False,
            config=config,
        )
        return dict(zip(("d_pre", "act", "d_weight"), found, strict=True))

    def product(name: str, out: torch.Tensor, *operands: torch.Tensor, **rows: torch.Tensor) -> Any:
        def run(config: Any) -> dict[str, torch.Tensor]:
            # `gemm` takes no configuration; this is what it calls.
            gemm_tuned.fn(*operands, out, config=config, **rows)
            return {name: out}

        return run

    gathered = {"cu_seqlens_k": offsets, "A_idx": source}
    return {
        "d_pre": through_activation,
        "d_x": product("d_x", d_x, d_pre, given["w13"], cu_seqlens_m=offsets),
        "d_w13": product("d_w13", d_w13.transpose(1, 2), given["x"].T, d_pre, **gathered),
        "d_w2": product("d_w2", d_w2, given["d_out"].T, given["act"], **gathered),
    }


def reference(given: Tensors, expert: int) -> dict[str, torch.Tensor]:
    """The same outputs of one expert in fp32 by torch: its rows, or its matrix."""
    rows = slice(*given["offsets"][expert : expert + 2].tolist())
    x, d_out = (given[name][given["source"][rows]].float() for name in ("x", "d_out"))
    weight, w13, w2 = given["weight"][rows], given["w13"][expert].float(), given["w2"][expert].float()
    pre = given["pre"][rows].float().requires_grad_()
    act = torch.nn.functional.silu(pre[:, ::2]) * pre[:, 1::2]
    d_act = d_out @ w2
    (d_pre,) = torch.autograd.grad(act, pre, d_act * weight[:, None])
    act = act.detach()
    # What reads these reads what a kernel has rounded.
    read_pre, read_act = given["d_pre"][rows].float(), given["act"][rows].float()
    return {
        "d_pre": d_pre,
        "act": act * weight[:, None],
        "d_weight": (act * d_act).sum(1),
        "d_x": read_pre @ w13,
        "d_w13": x.T @ read_pre,
        "d_w2": d_out.T @ read_act,
    }


def errors(given: Tensors, outputs: Tensors, expert: int) -> dict[str, float]:
    """Relative error of each output on one expert."""
    rows = slice(*given["offsets"][expert : expert + 2].tolist())
    truth = reference(given, expert)
    own = {name: out[expert if out.ndim == 3 else rows].float() for name, out in outputs.items()}
    return {name: float((out - truth[name]).norm() / truth[name].norm()) for name, out in own.items()}


def microseconds(run: Callable[[], object]) -> float:
    """Median time of a call on the device."""
    times: list[float] = []
    for _ in range(ROUNDS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times[2:])


def measure(given: dict[str, torch.Tensor], name: str, tile: tuple[int, int, bool, int]) -> dict[str, Any]:
    """One product with one tile: its largest error, and its time if it is right."""
    from quack.gemm_config import GemmConfig

    tile_m, tile_n, pingpong, cluster_m = tile
    config = GemmConfig(
        tile_m=tile_m, tile_n=tile_n, pingpong=pingpong, cluster_m=cluster_m, is_dynamic_persistent=False
    )
    run = products(given)[name]
    row: dict[str, Any] = {"product": name, "tile": f"{tile_m}x{tile_n}{' pingpong' if pingpong else ''}/{cluster_m}"}
    try:
        outputs = run(config)
        torch.cuda.synchronize()
    except Exception as error:  # A tile that this kernel does not have.
        return {**row, "failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    counts = given["offsets"].diff()
    found = [errors(given, outputs, int(expert)) for expert in (counts.argmin(), counts.argmax())]
    row["error"] = max(value for one in found for value in one.values())
    if not row["error"] <= LARGEST_ERROR:
        return {**row, "failed": f"wrong: {found}"}
    if name == "d_pre":
        given.update(outputs)
    row["us"] = microseconds(lambda: run(config))
    width = given["w2"].shape[2] * (1 if name in ("d_pre", "d_w2") else 2)
    row["tflops"] = 2 * len(given["source"]) * given["x"].shape[1] * width / row["us"] / 1e6
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    platform = probe_platform()
    document = {
        "schema": 1,
        **provenance(platform, {"moereg", "quack-kernels", "nvidia-cutlass-dsl", "torch"}),
        **clocks(platform),
    }
    rows: list[dict[str, Any]] = []
    for num_tokens in options.tokens:
        given = make_inputs(num_tokens, torch.device("cuda"))
        given |= {"d_pre": torch.randn_like(given["pre"]), "act": torch.randn_like(given["pre"][:, ::2].contiguous())}
        # One that ends the process leaves the rows of the tiles before it.
        for tile in TILES:
            for name in PRODUCTS:
                rows.append({"tokens": num_tokens, **measure(given, name, tile)})
                shown = (f"{value:.4g}" if isinstance(value, float) else value for value in rows[-1].values())
                print(*shown, flush=True)
                if options.json:
                    options.json.write_text(json.dumps({**document, "rows": rows}, indent=1) + "\n")
    right = {(row["tokens"], row["product"]) for row in rows if "us" in row}
    return 0 if len(right) == len(options.tokens) * len(PRODUCTS) else 1


if __name__ == "__main__":
    sys.exit(main())
