"""Calls public functions with arguments that nobody should pass: each call works, or says in one line what is wrong."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

import moereg
from moereg import routing
from moereg.dispatch import explain_backends
from moereg.errors import MoeregError, UnsupportedProblemError
from moereg.layer.factory import make_kernel
from moereg.platforms import Platform, PlatformKind, PlatformRule
from moereg.registry import BackendRegistry, register_moe_backend
from moereg.selection.loader import load_backends
from moereg.selection.request import Request
from moereg.selection.result import Selection
from moereg.spec.activations import Activation
from moereg.spec.model_shapes import get_shape
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantFormat, QuantScheme, get_scheme
from moereg.weights.adapters import ExpertAdapters
from moereg.weights.permuted import ExpertWeights
from tests.fuzz.area import Area, Case
from tests.support.fakes import FakeExperts

_PACKAGE: Final = str(Path(moereg.__file__).parent)
_LONGEST: Final = 5_000

NOTHING: Final = object()
"""The result of `breach_of` for a call that was refused as it should be."""


def breach_of(call: Callable[[], Any]) -> tuple[str | None, Any]:
    """Makes a call.

    Returns:
        How the contract is broken, or None where it holds; and what the call returned, or `NOTHING`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return None, call()
    except MoeregError as error:
        return _breach_in(error), NOTHING
    except Exception as error:
        return f"raised {_place(error)}", NOTHING


def _breach_in(error: MoeregError) -> str | None:
    text = str(error)
    # Its first line is followed by one for each backend.
    lines = text.splitlines() if isinstance(error, UnsupportedProblemError) else [text]
    if not text or not all(line.isprintable() for line in lines) or len(max(lines, key=len)) > _LONGEST:
        return f"is not one printable line: {_place(error)}"
    return None


def _place(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_PACKAGE)]
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    try:
        text = ascii(str(error))[:300]
    except Exception:
        text = "without a text"
    return f"{type(error).__name__}{where}: {text}"


class _Hostile:
    """Nothing about it can be asked."""

    def _raise(self, *arguments: object) -> Any:
        raise RuntimeError("ask nothing")

    __repr__ = __str__ = __bool__ = __len__ = __iter__ = __eq__ = __hash__ = __index__ = _raise  # type: ignore[assignment]


# Possible values of an argument, by a tag that a stored case can hold.


def _problem() -> MoEProblem:
    return MoEProblem(num_experts=4, hidden_size=8, intermediate_size=8, top_k=2, dtype="float32")


def _weights() -> ExpertWeights:
    return ExpertWeights(w13=torch.ones(4, 16, 8), w2=torch.ones(4, 8, 8))


@functools.cache
def _selection() -> Selection:
    return explain_backends(_problem(), "cpu", require="torch")


_VALUES: Final[Mapping[str, Callable[[], Any]]] = {
    "problem": _problem,
    "weights": _weights,
    "selection": _selection,
    "decision": lambda: _selection().decisions[0],
    "platform": lambda: Platform.from_name("cuda:sm90"),
    "format": lambda: QuantFormat("int8", (1, 32)),
    "scheme": lambda: get_scheme("nvfp4"),
    "activation": lambda: Activation("silu"),
    "kernel": lambda: make_kernel(_problem(), _weights(), _selection()),
    "registry": BackendRegistry,
    "experts": lambda: type("Fuzzed", (FakeExperts,), {}),
    "dtype": lambda: torch.float32,
    "device": lambda: torch.device("meta"),
    "object": object,
    "hostile": _Hostile,
    "class": lambda: int,
    "function": lambda: lambda *arguments: None,
    "generator": lambda: iter("ab"),
    "bytes": lambda: b"torch",
    "set": lambda: {"torch", 3},
    "complex": lambda: 1j,
    "large": lambda: 10**400,
    "digits": lambda: 10**5000,
    "long": lambda: "x" * 100_000,
    "deep": lambda: functools.reduce(lambda inner, _: [inner], range(5_000), []),
    "cycle": lambda: [cycle := [], cycle.append(cycle)][0],
    "sparse": lambda: torch.eye(4).to_sparse(),
    "bare array": lambda: torch.ones(3, 4).numpy(),
}
_LITERALS: Final = [
    None, True, False, 0, 1, 2, 3, 8, -1, -(2**63), 2**31, 2**63, 0.5, 1.0, -0.0, 1e308, float("nan"), float("inf"),
    "", " ", "torch", "triton", "nonsense", "silu", "silu(limit=3)", "silu(limit=--)", "silu(alpha=1e999)",
    "silu(limit=1,limit=2)", "swigluoai(", "nvfp4", "unquantized", "int8", "uint4", "float8_e4m3fn", "bfloat16",
    "half", "cuda:sm90", "cuda", "cuda:", "cuda:sm", "cpu", "*", "cuda:+", "cuda:f", "cuda:sm90+f", "tpu:v5e+", "meta",
    "batched", "map", "a\nb", "\x1b[31m", "\ud800", "\u202e", "nvfp4=torch", "=", "=torch", "nvfp5=torch", ",",
    "torch>=1", "(", [], [1], ["torch"], ["torch", None], [[]], {}, {"nvfp4": "torch"}, {"nvfp4": 3}, {"": "torch"},
    {"name": "mine"},
]  # fmt: skip
_DTYPES: Final = ["float32", "bfloat16", "float64", "int32", "int64", "bool", "complex64", "uint8", "float8_e4m3fn"]
_SHAPES: Final = [[], [0], [4], [0, 2], [0, 8], [3, 2], [3, 4], [3, 8], [4, 16, 8], [4, 8, 8], [4, 0, 8], [2, 3, 4, 5]]


def _tagged(name: str) -> dict[str, Any]:
    return {"$": name}


def _tensor(shape: list[int], dtype: str = "float32") -> dict[str, Any]:
    return {"$": "tensor", "shape": shape, "dtype": dtype}


_LOGITS: Final = [_tensor([3, 8]), _tensor([0, 8], "bfloat16")]
_GROUPS: Final = {"num_groups": [1, 2], "topk_groups": [1, 2]}
_PROBLEM: Final = {
    "num_experts": [8],
    "hidden_size": [64],
    "intermediate_size": [32],
    "top_k": [1, 2],
    "dtype": ["bfloat16", _tagged("dtype")],
    "quant": ["unquantized", "nvfp4", _tagged("scheme")],
    "activation": ["silu", _tagged("activation")],
    "has_bias": [False],
    "activation_format": ["batched"],
    "num_local_experts": [4],
    "placement": ["map"],
    "apply_router_weight_on_input": [False],
    "graph_capture": [True],
    "deterministic": [True],
    "exact_activations": [True],
    "max_num_tokens": [None, 16],
}
_REQUEST: Final = {"require": [None, "torch"], "prefer": [None, ["triton"]], "deny": [None, {"nvfp4": "triton"}]}
_RULE: Final = {"text": ["cuda:sm90+", "*", "cpu", "cuda:sm90+,!sm120", "rocm:gfx9*,!gfx90a", "*,!cpu"]}


def _register(experts: Any, **keywords: Any) -> Any:
    keywords.setdefault("registry", BackendRegistry())
    return register_moe_backend(**keywords)(experts)


def _replaced(**keywords: Any) -> Any:
    return MoEProblem.from_dict(keywords)


# By name: the callable, and good values of each argument, the first of which are always passed.
_CALLS: Final[Mapping[str, tuple[Callable[..., Any], int, Mapping[str, list[Any]]]]] = {
    "MoEProblem": (MoEProblem, 4, _PROBLEM),
    "MoEProblem.from_dict": (_replaced, 4, {**_PROBLEM, "surplus": [1]}),
    "MoEProblem.from_dict of anything": (MoEProblem.from_dict, 1, {"values": [{}]}),
    "Activation": (
        Activation, 1,
        {"name": ["silu", "swigluoai", "relu2"], "gated": [True], "alpha": [1.0], "beta": [0.0], "limit": [None, 7.0]},
    ),
    "Activation.from_name": (Activation.from_name, 1, {"text": ["silu", "silu(limit=10.0)"], "limit": [None, 2]}),
    "an activation": (lambda gemm1: Activation("silu")(gemm1), 1, {"gemm1": [_tensor([3, 8])]}),
    "QuantFormat": (
        QuantFormat, 2,
        {"dtype": ["int8", "uint4"], "group": [_tagged("tuple"), [1, 32]], "scale_dtype": ["float32"],
         "global_scale": [True], "symmetric": [False], "static": [True]},
    ),
    "QuantScheme": (
        QuantScheme, 1, {"name": ["mine"], "weight": [None, _tagged("format")], "activation": [None, _tagged("format")]}
    ),
    "QuantScheme.from_dict": (
        QuantScheme.from_dict, 1, {"values": [{"name": "mine", "weight": {"dtype": "int8", "group": [1, 32]}}]}
    ),
    "get_scheme": (get_scheme, 1, {"name": ["nvfp4"]}),
    "Platform": (
        Platform, 1,
        {"kind": ["cuda", "cpu"], "arch": ["sm90"], "device_name": ["H100"], "memory_bytes": [0],
         "versions": [{"torch": "2.13"}], "probed": [True]},
    ),
    "Platform.from_name": (Platform.from_name, 1, {"name": ["cuda:sm90", "cpu"]}),
    "PlatformRule": (PlatformRule, 1, _RULE),
    "PlatformRule.matches": (
        lambda text, name: PlatformRule(text).matches(Platform.from_name(name)), 2, {**_RULE, "name": ["cuda:sm100"]}
    ),
    "PlatformRule.overlaps": (
        lambda text, other: PlatformRule(text).overlaps(PlatformRule(other)), 2, {**_RULE, "other": ["cuda:sm100f"]}
    ),
    "PlatformKind": (
        PlatformKind, 3,
        {"name": ["mine"], "device_type": ["cpu"], "arch_pattern": [r"a\d+"], "family_size": [0],
         "arch_number": [None, _tagged("function")], "example": ["", "a1"], "probe": [None, _tagged("function")]},
    ),
    "ExpertWeights": (
        ExpertWeights, 2,
        {"w13": [_tensor([4, 16, 8])], "w2": [_tensor([4, 8, 8])], "w13_bias": [None, _tensor([4, 16])],
         "w2_bias": [None, _tensor([4, 8])], "w13_scale": [None, _tensor([4])], "a13_scale": [None, _tensor([])],
         "w2_zero_point": [None], "quant": ["unquantized", "int8_w8a16", "fp8_tensor_static"]},
    ),
    "ExpertAdapters": (
        ExpertAdapters, 2,
        {"w13_a": [_tensor([4, 2, 8])], "w13_b": [_tensor([4, 16, 2])], "w2_a": [None, _tensor([4, 2, 8])],
         "w2_b": [None, _tensor([4, 8, 2])], "w13_scaling": [0.5], "w2_scaling": [2]},
    ),
    "ExpertAdapters.initial": (
        ExpertAdapters.initial, 2,
        {"problem": [_tagged("problem")], "alpha": [8], "targets": [_tagged("tuple")], "rank_stabilized": [True]},
    ),
    "ExpertWeights.to": (lambda device: _weights().to(device), 1, {"device": ["cpu", _tagged("device")]}),
    "check_against": (lambda problem: _weights().check_against(problem), 1, {"problem": [_tagged("problem")]}),
    "select_backend": (
        moereg.select_backend, 2, {"problem": [_tagged("problem")], "platform": ["cpu", "cuda:sm90"], **_REQUEST}
    ),
    "explain_backends": (
        explain_backends, 2, {"problem": [_tagged("problem")], "platform": [_tagged("platform"), "cpu"], **_REQUEST}
    ),
    "Request.resolve": (
        lambda **keywords: Request.resolve(**{"environ": {}, "cells": load_backends().cells, **keywords}), 1,
        {"scheme": ["nvfp4"], **_REQUEST, "environ": [{}, {"MOEREG_DENY": "torch"}]},
    ),
    "make_kernel": (
        make_kernel, 3,
        {"problem": [_tagged("problem")], "weights": [_tagged("weights")], "selection": [_tagged("selection")],
         "prepare_finalize": [None], "ep_rank": [0], "expert_map": [None], "group": [None]},
    ),
    "a kernel": (
        lambda **keywords: _VALUES["kernel"]()(**keywords), 3,
        {"hidden_states": [_tensor([3, 8])], "topk_weights": [_tensor([3, 2])],
         "topk_ids": [{"$": "ids", "shape": [3, 2]}], "out": [None, _tensor([3, 8])],
         "adapters": [None, {}]},
    ),
    "MoEKernel.reload": (lambda weights: _VALUES["kernel"]().reload(weights), 1, {"weights": [_tagged("weights")]}),
    "softmax_topk": (routing.softmax_topk, 3, {"router_logits": _LOGITS, "top_k": [2], "renormalize": [True]}),
    "topk_softmax": (routing.topk_softmax, 2, {"router_logits": _LOGITS, "top_k": [2]}),
    "llama4_topk": (routing.llama4_topk, 2, {"router_logits": _LOGITS, "top_k": [1]}),
    "grouped_sigmoid_topk": (
        routing.grouped_sigmoid_topk, 7,
        {"router_logits": _LOGITS, "top_k": [2], **_GROUPS, "correction_bias": [None, _tensor([8])],
         "renormalize": [True], "scaling_factor": [2.5]},
    ),
    "grouped_softmax_topk": (
        routing.grouped_softmax_topk, 5, {"router_logits": _LOGITS, "top_k": [2], **_GROUPS, "scaling_factor": [2.5]}
    ),
    "RouterSpec": (
        routing.RouterSpec, 3,
        {"kind": ["grouped_sigmoid_topk", "softmax_topk"], "num_experts": [8], "top_k": [2], "renormalize": [True],
         "num_groups": [2], "topk_groups": [1], "scaling_factor": [2.0], "has_correction_bias": [True],
         "fp32_logits": [True]},
    ),
    "RouterSpec.route": (
        lambda **keywords: routing.RouterSpec(kind="softmax_topk", num_experts=8, top_k=2).route(**keywords), 1,
        {"router_logits": _LOGITS, "correction_bias": [None]},
    ),
    "RouterSpec.from_config": (
        routing.RouterSpec.from_config, 1,
        {"config": [{"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}]},
    ),
    "register_moe_backend": (
        _register, 5,
        {"experts": [_tagged("experts")], "name": ["mine"], "priority": [3], "quant_schemes": [["nvfp4"]],
         "platforms": [["cuda:sm90"]], "requires": [["torch>=2"]], "probes": [[_tagged("function")]], "opt_in": [True],
         "tier": ["kernel"], "registry": [_tagged("registry")], "bias": [False], "activations": [["silu"]],
         "requires_multiple": [{"hidden_size": 8}], "max_experts": [8], "nonsense": [1]},
    ),
    "Selection.from_dict": (Selection.from_dict, 1, {"values": [{}]}),
    "Selection.from_json": (Selection.from_json, 1, {"text": ["{}"]}),
    "get_shape": (get_shape, 1, {"name": ["qwen3-30b-a3b"]}),
    "load_experts": (
        moereg.load_experts, 2,
        {"path": ["/nonexistent"], "layer": [0], "dtype": [None, "float32"], "device": ["cpu"],
         "max_memory_fraction": [0.5], "num_local_experts": [None, 4], "ep_rank": [0]},
    ),
}  # fmt: skip


def _draw(draw: random.Random) -> Case:
    name = draw.choice(sorted(_CALLS))
    _, num_required, known = _CALLS[name]
    arguments: dict[str, Any] = {}
    for place, (argument, good) in enumerate(known.items()):
        if place < num_required or draw.random() < 0.3:
            arguments[argument] = draw.choice(good)
    # Mostly one at a time, since the first that is wrong hides the others.
    for _ in range(draw.choice([0, 1, 1, 1, 1, 2, 3])):
        arguments[draw.choice(sorted(known))] = _bad(draw)
    return {"call": name, "arguments": arguments}


def _bad(draw: random.Random) -> Any:
    kind = draw.randrange(8)
    if kind < 3:
        return draw.choice(_LITERALS)
    if kind == 3:
        return _tensor(draw.choice(_SHAPES), draw.choice(_DTYPES))
    if kind == 4:
        return [_bad(draw) for _ in range(draw.randrange(3))]
    if kind == 5:
        return {draw.choice(["name", "weight", "nvfp4", "", "a\nb", "hidden_size"]): _bad(draw)}
    return _tagged(draw.choice(sorted(_VALUES)))


def _check(case: Case) -> str | None:
    load_backends()
    call, _, _ = _CALLS[case["call"]]
    arguments = {name: _value(value) for name, value in case["arguments"].items()}
    if case["call"] in ("select_backend", "explain_backends") and arguments.get("platform") is None:
        arguments["platform"] = "cpu"  # Machines differ.
    breach, found = breach_of(lambda: call(**arguments))
    if breach is not None or found is NOTHING:
        return None if breach is None else f"{case['call']} {breach}"
    return _breach_of_result(found)


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(item) for item in value]
    if not isinstance(value, dict) or "$" not in value:
        return {key: _value(item) for key, item in value.items()} if isinstance(value, dict) else value
    if value["$"] == "tuple":
        return (1, 32)
    if value["$"] == "ids":
        return torch.arange(6, dtype=torch.int32).reshape(value["shape"]) % 2
    if value["$"] == "tensor":
        return torch.ones(value["shape"]).to(getattr(torch, value["dtype"]))
    return _VALUES[value["$"]]()


def _breach_of_result(found: Any) -> str | None:
    """An accepted value must be usable: shown, compared, hashed, and written so that it can be read back."""
    if isinstance(found, MoEProblem):
        if MoEProblem.from_dict(json.loads(json.dumps(found.to_dict()))) != found:
            return f"{found} does not survive JSON"
    elif isinstance(found, QuantScheme):
        if QuantScheme.from_dict(json.loads(json.dumps(dataclasses.asdict(found)))) != found:
            return f"{found} does not survive JSON"
    elif isinstance(found, Activation):
        if Activation.from_name(str(found)) != found:
            return f"{found} does not survive its text"
    elif isinstance(found, Selection) and Selection.from_json(found.to_json()).to_dict() != found.to_dict():
        return "a selection does not survive JSON"
    if isinstance(found, (MoEProblem, QuantFormat, QuantScheme, Activation, Platform, PlatformRule)):
        hash(found)
        if not (str(found).isprintable() and repr(found)):
            return f"{type(found).__name__} of what cannot be printed"
    return None


AREA: Final = Area("api", _draw, _check)
