"""Prints which kernels `moereg compile` would compile for a layer on an H200, for numbers of tokens; compiles none.

A program of its own, since the process becomes one for a device that is not here:

    python tests/kernels/packed_launches.py '{problem as JSON}' 96,97,160
"""

from __future__ import annotations

import json
import sys

from moereg.dispatch import select_backend
from moereg.kernels.launch.ahead import Target, become
from moereg.layer.backend_calls import make_experts
from moereg.layer.warm_up.dummy import DummyLayer, empty_weights
from moereg.layer.warm_up.worker import _sweep
from moereg.spec.problem import MoEProblem


def main() -> None:
    """Reads the arguments."""
    values, counts = sys.argv[1:]
    selection = select_backend(MoEProblem.from_dict(json.loads(values)), platform="cuda:sm90", require="triton")
    assert selection.winner is not None
    target = Target.of("cuda", "sm90", 227 * 1024)
    assert target is not None
    launches = become(target)
    experts = make_experts(selection, selection.winner)
    layers = [DummyLayer(experts, weights) for weights in empty_weights(experts)]
    found, variants = _sweep(layers, launches, [int(count) for count in counts.split(",")], jobs=1)
    print(json.dumps({"counts": found, "names": [variant.name for variant in variants]}))


if __name__ == "__main__":
    main()
