"""vLLM's adapters on experts that moereg serves: its layers and its classes for LoRA, on a CPU.

vLLM's kernels for adapters and moereg's products by route need a GPU; torch stands in for both, with their arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM; make test-vllm installs it")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.config.lora import LoRAConfig
from vllm.distributed import parallel_state
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm_moereg import hook

from moereg import ExpertWeights, MoEKernel
from moereg.numerics.reference import reference_experts, relative_error

pytestmark = pytest.mark.vllm

NUM_EXPERTS: Final = 4
HIDDEN: Final = 64
INNER: Final = 32
RANK: Final = 8
TOKENS: Final = 24


class Products:
    """`RouteProducts` in torch."""

    def __init__(self, kernel: MoEKernel, topk_ids: torch.Tensor) -> None:
        self.experts = (topk_ids if kernel.expert_map is None else kernel.expert_map[topk_ids.long()]).long()
        self.weights = kernel.weights

    def gate_up(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.unsqueeze(1).expand(-1, self.experts.shape[1], -1)
        return self._product(rows, "w13") * (self.experts >= 0).unsqueeze(2)

    def down(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        found = self._product(rows.view(*self.experts.shape, -1), "w2")
        return found * (weights * (self.experts >= 0)).unsqueeze(2)

    def _product(self, rows: torch.Tensor, name: str) -> torch.Tensor:
        return torch.einsum("tkd,tknd->tkn", rows, self.weights[name][self.experts.clamp(min=0)])


class Punica:
    """vLLM's wrapper of kernels for adapters, in torch: adds what each token's adapter gives for each local expert."""

    def __init__(self, adapters: torch.Tensor) -> None:
        self.adapters = adapters  # [T], -1 for none

    def _routes(self, experts: torch.Tensor) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        for token, adapter in enumerate(self.adapters.tolist()):
            for place, expert in enumerate(experts[token].tolist()):
                if min(adapter, expert) >= 0:
                    yield (token, place), (adapter, expert)

    def add_lora_w13(self, y: Any, x: Any, a: Any, b: Any, ids: Any, weights: Any, *rest: Any, **named: Any) -> Any:
        placed, w1, w2, *sizes = rest
        assert (w1.shape[1:], w2.shape[1:]) == ((2 * INNER, HIDDEN), (HIDDEN, INNER))
        assert tuple(sizes[:2]) == y.shape[:2] == (len(x), ids.shape[1])
        experts = ids if placed is None else placed[ids.long()]
        for at, which in self._routes(experts):
            y[at] += torch.cat([b[half][which] @ (a[half][which] @ x[at[0]]) for half in range(2)])
        return experts, *(f"{name} of w13" for name in ("ids", "padded", "mapping"))

    def add_lora_w2(self, y: Any, x: Any, a: Any, b: Any, weights: Any, experts: Any, *rest: Any, **named: Any) -> None:
        assert rest[:3] == ("ids of w13", "padded of w13", "mapping of w13")
        rows = x.view(*y.shape[:2], -1)
        for at, which in self._routes(experts):
            y[at] += weights[at] * (b[0][which] @ (a[0][which] @ rows[at]))


@pytest.mark.parametrize("ep", [1, 2])
def test_adapters_are_added_to_both_products(ep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm_moereg.products", SimpleNamespace(RouteProducts=Products))
    monkeypatch.setattr(hook, "_APART", "torch")
    monkeypatch.setenv("MOEREG_PREFER", "torch")
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=ep, rank_in_group=ep - 1))
    engine, adapters = VllmConfig(), LoRAConfig(max_lora_rank=RANK, max_loras=2, lora_dtype=torch.float32)
    engine.parallel_config.enable_expert_parallel = ep > 1
    engine.lora_config = adapters
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    with set_current_vllm_config(engine):
        runner = FusedMoEFactory(
            **{"num_experts": NUM_EXPERTS, "top_k": 2, "hidden_size": HIDDEN, "intermediate_size": INNER},
            **{"params_dtype": torch.float32, "tp_size": ep, "dp_size": 1, "pcp_size": 1, "prefix": "mlp.experts"},
        )
        layer = runner.routed_experts
        engine.model_config = SimpleNamespace(enforce_eager=True, enable_sleep_mode=False)
        hook._serve(layer, "mlp.experts", layer.quant_method, layer.moe_config)
        served = hook.served_by(layer.quant_method)
        assert served is not None
        for parameter in layer.parameters():
            parameter.data.copy_(random(*parameter.shape))
        layer.quant_method.process_weights_after_loading(layer)
        adapted = FusedMoEWithLoRA(runner)
        adapted.create_lora_weights(2, adapters)
    local, matrices = layer.local_num_experts, []
    for adapter in range(2):
        a = [random(local, RANK, columns) for columns in (HIDDEN, INNER, HIDDEN)]  # Of w1, w2 and w3.
        matrices.append((a, [random(local, rows, RANK) for rows in (INNER, HIDDEN, INNER)]))
        adapted.set_lora(adapter, *matrices[-1])
    mapping = torch.randint(-1, 2, (TOKENS,), generator=generator)
    adapted.punica_wrapper = Punica(mapping)
    ids = torch.rand(TOKENS, NUM_EXPERTS, generator=generator).argsort(1)[:, :2].int()
    call = torch.randn(TOKENS, HIDDEN, generator=generator), torch.rand(TOKENS, 2, generator=generator), ids

    def run() -> torch.Tensor:
        with set_current_vllm_config(engine):
            return layer.quant_method.apply(layer, *call, None, None)

    plain = run()
    layer.quant_method.moe_kernel.fused_experts.set_lora_context(adapted._build_lora_context())
    found = run()
    for adapter in (-1, 0, 1):
        w13, w2 = layer.w13_weight.data, layer.w2_weight.data
        if adapter >= 0:
            (a1, a2, a3), (b1, b2, b3) = matrices[adapter]
            w13, w2 = w13 + torch.cat([b1 @ a1, b3 @ a3], 1), w2 + b2 @ a2
        weights = ExpertWeights(w13=w13, w2=w2)
        expected = reference_experts(served.kernel.problem, weights, *call, layer._expert_map)
        mine = mapping == adapter
        assert mine.any()
        assert relative_error(found[mine], expected[mine]) < 1e-5
        # Without adapters it is the kernel's own; with them it is something else.
        assert (relative_error(plain[mine], expected[mine]) < 1e-5) == (adapter < 0)
