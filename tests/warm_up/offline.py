"""Makes the launches of layers for a device that is not there. A script for a process of its own, which prints JSON:

    python tests/warm_up/offline.py launch '[[{problem}, [tokens, ...]], ...]' cuda:sm90
    python tests/warm_up/offline.py sweep '[[{problem}, [tokens, ...]], ...]' cuda:sm90

`launch` says how many kernels Triton compiled for each layer, with TRITON_CACHE_DIR as the cache that is tried. It
shares none of the code that `moereg compile` keeps launches with: Triton runs as it is, up to the launch itself.
`sweep` goes through layers as `warm_up` does, and says what each number of tokens launches.
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
from moereg.kernels.launch.ahead import Target, become, counted_compilations
from moereg.layer.backend_calls import make_experts
from moereg.layer.warm_up.dummy import DummyLayer, empty_weights, moving_kernels
from moereg.layer.warm_up.worker import _sweep
from moereg.platforms import Platform
from moereg.spec.problem import MoEProblem
from tests.kernels.aot_compile import TARGETS, OfflineDriver, compiling_only


def _layer(values: dict[str, Any], platform: str, with_moves: bool) -> DummyLayer:
    selection = select_backend(MoEProblem.from_dict(values), platform=platform, require="triton")
    assert selection.winner is not None
    experts = make_experts(selection, selection.winner)
    moves = {"moves": moving_kernels(selection.problem, selection.platform)} if with_moves else {}
    return DummyLayer(experts, next(empty_weights(experts)), **moves)


def launch(layers: list[tuple[dict[str, Any], list[int]]], platform: str) -> None:
    target, shared_bytes = TARGETS[platform.partition(":")[2].replace("sm", "sm_")]
    driver: Any = OfflineDriver(target, 0)
    driver.utils = types.SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": shared_bytes})
    triton.runtime.driver.set_active(driver)
    facts: Any = types.SimpleNamespace(multi_processor_count=132)
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: facts
    for values, counts in layers:
        layer = _layer(values, platform, with_moves=True)
        with counted_compilations() as count, compiling_only() as launched, torch.no_grad():
            for num_tokens in counts:
                layer.call(num_tokens)
        print(json.dumps({"compiled": count.compiled, "read": count.read, "launched": len(launched)}))


def sweep(layers: list[tuple[dict[str, Any], list[int]]], platform: str) -> None:
    named = Platform.from_name(platform)
    target = Target.of(named.kind, named.arch)
    assert target is not None
    take = become(target)
    for values, counts in layers:
        layer = _layer(values, platform, with_moves=False)
        found, variants_found = _sweep([layer], take, counts, jobs=1)
        digests = {variant.digest for variant in variants_found}
        launched = []
        for count in counts:
            layer.call(count)
            variants = take()
            assert {variant.digest for variant in variants} <= digests, count
            launched.append([variant.name.rpartition(":")[2] for variant in variants])
        print(json.dumps({"counts": found, "launched": launched, "num_variants": len(digests)}))


if __name__ == "__main__":
    {"launch": launch, "sweep": sweep}[sys.argv[1]](json.loads(sys.argv[2]), sys.argv[3])
