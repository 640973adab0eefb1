"""Sweeps layers as `warm_up` does, for a device that is not there, and prints what each number of tokens launches.

Run as a script, in a process of its own:

    python tests/warm_up/sweep_offline.py '[[{problem as JSON}, [tokens, ...]], ...]' cuda:sm90
"""

from __future__ import annotations

import json
import os
import sys

os.environ.pop("TRITON_INTERPRET", None)

from moereg.dispatch import select_backend
from moereg.kernels.launch.ahead import Target, become
from moereg.layer.backend_calls import make_experts
from moereg.layer.warm_up.dummy import DummyLayer, empty_weights
from moereg.layer.warm_up.worker import _sweep
from moereg.platforms import Platform
from moereg.spec.problem import MoEProblem


def main() -> None:
    layers, name = json.loads(sys.argv[1]), sys.argv[2]
    platform = Platform.from_name(name)
    target = Target.of(platform.kind, platform.arch)
    assert target is not None
    take = become(target)
    for values, counts in layers:
        selection = select_backend(MoEProblem.from_dict(values), platform=name, require="triton")
        assert selection.winner is not None
        experts = make_experts(selection, selection.winner)
        layer = DummyLayer(experts, next(empty_weights(experts)))
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
    main()
