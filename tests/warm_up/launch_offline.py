"""Makes the launches of a layer for a device that is not there, and prints how many kernels Triton compiled for them.

Run as a script, in a process of its own, whose TRITON_CACHE_DIR is the cache that is tried:

    python tests/warm_up/launch_offline.py '{problem as JSON}' cuda:sm90 1,2,17

Shares none of the code that `moereg compile` keeps launches with: Triton runs as it is, up to the launch itself.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton

from moereg.dispatch import select_backend
from moereg.kernels.launch.ahead import counted_compilations
from moereg.layer.backend_calls import make_experts
from moereg.layer.warm_up.dummy import DummyLayer, empty_weights, moving_kernels
from moereg.spec.problem import MoEProblem
from tests.kernels.aot_compile import TARGETS, OfflineDriver, compiling_only


def main() -> None:
    values, platform, counts = sys.argv[1:]
    target, shared_bytes = TARGETS[platform.partition(":")[2].replace("sm", "sm_")]
    driver: Any = OfflineDriver(target, 0)
    driver.utils = types.SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": shared_bytes})
    triton.runtime.driver.set_active(driver)
    facts: Any = types.SimpleNamespace(multi_processor_count=132)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: facts
    selection = select_backend(MoEProblem.from_dict(json.loads(values)), platform=platform, require="triton")
    winner = selection.winner
    assert winner is not None
    experts = make_experts(selection, winner)
    moves = moving_kernels(selection.problem, selection.platform)
    layer = DummyLayer(experts, next(empty_weights(experts)), moves=moves)
    with counted_compilations() as count, compiling_only() as launched, torch.no_grad():
        for num_tokens in map(int, counts.split(",")):
            layer.call(num_tokens)
    print(json.dumps({"compiled": count.compiled, "read": count.read, "launched": len(launched)}))


if __name__ == "__main__":
    main()
