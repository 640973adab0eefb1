"""Experts that vLLM's load balancer moves between two processes, in layers that vLLM made and moereg serves.

vLLM's engine on a CPU refuses --enable-eplb, so that its functions are called here. A process is
`python test_vllm_eplb.py RANK FOLDER`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from test_vllm_weights import ROWS, Made, checkpoints_in, maker, serve
from torch import distributed
from vllm.config import set_current_vllm_config
from vllm.distributed.eplb.eplb_communicator import TorchDistNcclEplbCommunicator
from vllm.distributed.eplb.eplb_state import EplbState
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm_moereg import hook

from moereg import explain_backends
from moereg.numerics.reference import relative_error
from moereg.selection.decide import reading_in_place

pytestmark = pytest.mark.vllm

LEFT: Final = {
    *("fp8_dynamic", "fp8_static", "modelopt_fp8", "ct_fp8_dynamic", "ct_fp8_static"),
    *("modelopt_nvfp4", "modelopt_nvfp4_global", "ct_nvfp4"),
}
"""Rows where one scale is for all activations of a rank."""
NUM_REDUNDANT: Final = 2


def gather(rows: torch.Tensor) -> torch.Tensor:
    """The rows of every physical expert."""
    every = [torch.empty_like(rows) for _ in range(2)]
    distributed.all_gather(every, rows.contiguous())
    return torch.cat(every)


def moved(make: Callable[..., Made], name: str, rank: int) -> dict[str, Any]:
    """Moves the experts of a row's layer; errors of outputs against those before, and of controls."""
    made = make(ROWS[name], ep=2, rank=rank, num_redundant=NUM_REDUNDANT)
    layer, method = made.layer, serve(made)
    served = hook.served_by(method)
    if served is None:
        return {}
    with set_current_vllm_config(made.engine):
        method.process_weights_after_loading(layer)
    rows, generator = layer.get_expert_weights(), torch.Generator().manual_seed(3)
    assert {one.data_ptr() for one in rows} == {one.data_ptr() for one in served.kernel.weights.flat()}
    hidden_states = torch.randn(33, layer.hidden_size, generator=generator).to(made.whole.problem.torch_dtype)
    weights, chosen = made.whole.route(hidden_states)

    def run(placed: torch.Tensor) -> torch.Tensor:
        """The sum of both ranks' outputs; tokens take turns with an expert's replicas, as in vLLM's router."""
        places = [(placed == expert).nonzero().flatten() for expert in range(num_experts)]
        ids = [[places[one][token % len(places[one])] for one in row] for token, row in enumerate(chosen.tolist())]
        out = method.apply(layer, hidden_states, weights, torch.tensor(ids).int(), None, None).float()
        distributed.all_reduce(out)
        return out

    num_experts = layer.moe_config.num_logical_experts
    placed = torch.tensor(EplbState.build_initial_global_physical_to_logical_map(num_experts, NUM_REDUNDANT))
    expected, at_first = run(placed), [gather(one)[:num_experts] for one in rows]
    found: dict[str, Any] = {"size": expected.abs().max().item(), "errors": [], "unmoved": []}
    group, buffer = distributed.group.WORLD, [torch.empty_like(one) for one in rows]
    for _ in range(4):
        before = placed
        while torch.equal(placed, before):
            replicas = torch.randint(num_experts, (NUM_REDUNDANT,), generator=generator)
            every = torch.cat((torch.arange(num_experts), replicas))
            placed = every[torch.randperm(len(every), generator=generator)]
        maps = before.unsqueeze(0), placed.unsqueeze(0)
        rearrange_expert_weights_inplace(*maps, [rows], buffer, group, TorchDistNcclEplbCommunicator(group))
        assert all(torch.equal(first[placed], gather(one)) for first, one in zip(at_first, rows, strict=True))
        found["errors"].append(relative_error(run(placed), expected))
        found["unmoved"].append(relative_error(run(before), expected))
    if rank == 0:
        rows[0][0] = at_first[0][(placed[0] + 1) % num_experts]
    return found | {"wrong row": relative_error(run(placed), expected)}


def main(rank: int, folder: Path) -> None:
    """One of two ranks, which writes what it found."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with pytest.MonkeyPatch.context() as patched:
        # On a CPU other classes may pack weights, where vLLM has no load balancer.
        patched.setattr(hook, "explain_backends", lambda *call: reading_in_place(explain_backends(*call)))
        original = RoutedExperts._get_quant_method

        def get_quant_method(*call: Any) -> Any:
            # In an engine, the hook's class is there before vLLM asks.
            method = original(*call)
            patched.setattr(type(method), "supports_eplb", True)
            return method

        patched.setattr(RoutedExperts, "_get_quant_method", get_quant_method)
        (folder / str(rank)).mkdir()
        make = maker(checkpoints_in(folder / str(rank)), patched)
        found = {name: moved(make, name, rank) for name in ROWS}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("eplb")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, __file__, str(rank), str(folder)] for rank in range(2)]
    ranks = [subprocess.Popen(each, env=environment, stderr=subprocess.PIPE, text=True) for each in commands]
    errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(error[-3000:] for error in errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(660)
@pytest.mark.parametrize("name", ROWS)
def test_experts_that_moved_give_what_they_gave(name: str, found: list[dict[str, Any]]) -> None:
    mine, others = (rank[name] for rank in found)
    assert mine == others, "both have the sum"
    assert (not mine) == (name in LEFT)
    if mine:
        assert mine["size"] > 0
        assert max(mine["errors"]) < 8e-3
        # Controls: routes to where experts were, and one matrix of another expert.
        assert min(*mine["unmoved"], mine["wrong row"]) > 0.1


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
