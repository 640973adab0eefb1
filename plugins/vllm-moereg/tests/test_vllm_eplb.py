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
NUM_MOVES: Final = 4


class Moves:
    """One rank's layer, whose experts move.

    Attributes:
        num_experts: Logical experts; with the replicas there are as many physical ones as `placed` says.
        placed: The logical expert of each physical one, [P].
    """

    def __init__(self, made: Made, rank: int, generator: torch.Generator) -> None:
        self.layer, self.rank, self.generator = made.layer, rank, generator
        self.num_experts = made.layer.moe_config.num_logical_experts
        num_redundant = made.layer.global_num_experts - self.num_experts
        self.placed = torch.tensor(
            EplbState.build_initial_global_physical_to_logical_map(self.num_experts, num_redundant)
        )
        self.rows = list(made.layer.get_expert_weights())
        dtype = made.whole.problem.torch_dtype
        self.hidden_states = torch.randn(33, made.layer.hidden_size, generator=generator).to(dtype)
        self.topk_weights, self.topk_ids = made.whole.route(self.hidden_states)

    def run(self) -> torch.Tensor:
        """The sum of both ranks' outputs; tokens take turns with an expert's replicas, as in vLLM's router."""
        ids = self.topk_ids.clone()
        for token, chosen in enumerate(self.topk_ids.tolist()):
            for place, expert in enumerate(chosen):
                replicas = (self.placed == expert).nonzero().flatten()
                ids[token, place] = replicas[token % len(replicas)]
        call = self.hidden_states, self.topk_weights, ids, None, None
        out: torch.Tensor = self.layer.quant_method.apply(self.layer, *call).float()
        distributed.all_reduce(out)
        return out

    def gather(self) -> list[torch.Tensor]:
        """The rows of every physical expert."""
        found = []
        for rows in self.rows:
            every = [torch.empty_like(rows) for _ in range(2)]
            distributed.all_gather(every, rows.contiguous())
            found.append(torch.cat(every))
        return found

    def move(self) -> torch.Tensor:
        """Moves experts as vLLM does, and returns where they were."""
        before, num_redundant = self.placed, len(self.placed) - self.num_experts
        while torch.equal(self.placed, before):
            replicas = torch.randint(self.num_experts, (num_redundant,), generator=self.generator)
            every = torch.cat((torch.arange(self.num_experts), replicas))
            self.placed = every[torch.randperm(len(every), generator=self.generator)]
        group = distributed.group.WORLD
        buffer = [torch.empty_like(rows) for rows in self.rows]
        communicator = TorchDistNcclEplbCommunicator(group)
        maps = before.unsqueeze(0), self.placed.unsqueeze(0)
        rearrange_expert_weights_inplace(*maps, [self.rows], buffer, group, communicator)
        return before


def moved(make: Callable[..., Made], name: str, rank: int) -> dict[str, Any]:
    """Moves the experts of a row's layer; errors of outputs against those before, and of two controls."""
    made = make(ROWS[name], ep=2, rank=rank, num_redundant=2)
    method = serve(made)
    served = hook.served_by(method)
    if served is None:
        return {}
    with set_current_vllm_config(made.engine):
        method.process_weights_after_loading(made.layer)
    assert served.kernel is not None
    layer = Moves(made, rank, torch.Generator().manual_seed(3))
    held = {one.data_ptr() for one in served.kernel.weights.flat()}
    assert {rows.data_ptr() for rows in layer.rows} == held
    expected, at_first = layer.run(), [rows[: layer.num_experts] for rows in layer.gather()]
    found: dict[str, Any] = {"size": expected.abs().max().item(), "errors": [], "unmoved": []}
    for _ in range(NUM_MOVES):
        before = layer.move()
        after = layer.placed
        found["errors"].append(relative_error(layer.run(), expected))
        for first, rows in zip(at_first, layer.gather(), strict=True):
            assert torch.equal(first[after], rows)
        layer.placed = before
        found["unmoved"].append(relative_error(layer.run(), expected))
        layer.placed = after
    if rank == 0:
        layer.rows[0][0] = at_first[0][(layer.placed[0] + 1) % layer.num_experts]
    found["wrong row"] = relative_error(layer.run(), expected)
    return found


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
        make = maker(checkpoints_in(folder / str(rank)), patched)
        found = {name: moved(make, name, rank) for name in ROWS}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("eplb")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    for rank in range(2):
        (folder / str(rank)).mkdir()
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=600)[1] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(error[-3000:] for error in errors)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.timeout(660)
@pytest.mark.parametrize("name", ROWS)
def test_experts_that_moved_give_what_they_gave(name: str, found: list[dict[str, Any]]) -> None:
    mine, others = (rank[name] for rank in found)
    assert (not mine) == (name in LEFT)
    if not mine:
        return
    assert mine == others, "both have the sum"
    assert mine["size"] > 0
    assert len(mine["errors"]) == NUM_MOVES
    assert max(mine["errors"]) < 8e-3
    # Controls: routes to where experts were, and one matrix of another expert.
    assert min(*mine["unmoved"], mine["wrong row"]) > 0.1


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
