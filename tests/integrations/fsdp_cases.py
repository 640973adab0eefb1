"""Cases of `test_fsdp`: models that FSDP2 shards, on each rank of a group; run by `tests.groups.ranks`."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from moereg.errors import ArgumentError
from moereg.integrations.transformers import quantize_experts, register
from tests.integrations.test_transformers_adapters import by_peft
from tests.integrations.test_transformers_packed import loaded, saved
from tests.support.live_models import kernel_steps
from tests.support.tiny_models import tiny_model

NUM_STEPS: Final = 4
POLICY: Final = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(model: Any, mesh: DeviceMesh, are_experts_apart: bool) -> Any:
    """Recomputed layers, each sharded; quantized experts stay whole on each rank, as docs/training.md says."""
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    quantized = {each for name, each in model.named_parameters() if ".experts." in name and not each.requires_grad}
    shared: dict[str, Any] = {"mesh": mesh, "mp_policy": POLICY, "ignored_params": quantized}
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in inner.model.layers:
        if are_experts_apart:
            fully_shard(layer.mlp.experts, **shared)
        fully_shard(layer, **shared)
    return fully_shard(model, **shared)


def losses_of(model: Any, batches: list[torch.Tensor]) -> list[float]:
    """Of each step, the mean over the batches of all ranks: one of this rank's, or all of them on one rank."""
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    found = []
    for _ in range(NUM_STEPS):
        losses = []
        for batch in batches:
            loss = model(batch, labels=batch, use_cache=False).loss / len(batches)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(torch.stack(losses).sum()))
    return found


def compared(make: Callable[[], Any], rank: int, num_ranks: int, are_experts_apart: bool = False) -> dict[str, Any]:
    """Losses of all ranks together, of each rank alone on the same batches, and of all ranks on eager."""
    register()
    # The warning of a module that returns a view: what writes into it skips the gathering of its weights.
    warnings.filterwarnings("error", message="FSDP2-wrapped module")
    torch.manual_seed(0)
    batches = list(torch.randint(1, 60, (num_ranks, 2, 12)))
    grid = init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("all", "alone"))
    found: dict[str, Any] = {}
    for name, implementation in (("together", "moereg"), ("alone", "moereg"), ("eager", "eager")):
        model = make()
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        inner.set_experts_implementation(implementation)
        model = sharded(model, grid["alone" if name == "alone" else "all"], are_experts_apart)
        with pytest.MonkeyPatch.context() as patch:
            steps = kernel_steps(patch)
            losses = torch.tensor(losses_of(model, batches if name == "alone" else [batches[rank]]))
        if name != "alone":
            torch.distributed.all_reduce(losses)
            losses /= num_ranks
        found[name] = losses.tolist()
        found[f"{name} steps"] = sorted(set(steps))
    return found


def all_weights(rank: int, num_ranks: int) -> dict[str, Any]:
    return compared(lambda: tiny_model("qwen3_moe"), rank, num_ranks, are_experts_apart=True)


def adapters_on_quantized_experts(rank: int, num_ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        torch.distributed.broadcast_object_list(folder, 0)
        saved(tiny_model("qwen3_moe", torch.bfloat16), Path(folder[0]))  # By rank 0, since transformers knows of ranks.
        torch.distributed.barrier()

        def make() -> Any:
            model = loaded(Path(folder[0]), "nf4", dtype=torch.bfloat16)
            return by_peft(model, r=4, target_modules=["q_proj", "v_proj"])

        found = compared(make, rank, num_ranks)
        torch.distributed.barrier()
        return found


def quantized_experts_are_not_sharded(rank: int, num_ranks: int) -> str:
    model = tiny_model("qwen3_moe")
    quantize_experts(model, "nf4")
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)))
    except ArgumentError as error:
        return str(error)
    return "was sharded"
