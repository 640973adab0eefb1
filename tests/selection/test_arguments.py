"""Arguments and fields of wrong types and values: one line of moereg's own that says rule, value and cure."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moereg import routing
from moereg.dispatch import explain_backends, select_backend
from moereg.errors import ArgumentError, MoeregError, RequestError, UnknownNameError, shown
from moereg.layer.factory import make_kernel
from moereg.platforms import Platform, PlatformKind, PlatformRule
from moereg.quantize import quantize_weights
from moereg.runtime.json_types import Text, convert
from moereg.selection.result import Selection
from moereg.spec.activations import Activation
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantFormat, QuantScheme, get_scheme
from moereg.weights.permuted import ExpertWeights

SIZES: dict[str, Any] = {"num_experts": 4, "hidden_size": 16, "intermediate_size": 8, "top_k": 2}
PROBLEM = MoEProblem(**SIZES)
WEIGHTS = ExpertWeights(w13=torch.ones(4, 16, 16).bfloat16(), w2=torch.ones(4, 16, 8).bfloat16())
LOGITS = torch.ones(3, 4)


class Hostile:
    """Cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def call(hidden_states: torch.Tensor) -> torch.Tensor:
    routes = torch.ones(3, 2), torch.tensor([[0, 1]] * 3, dtype=torch.int32)
    return make_kernel(PROBLEM, WEIGHTS, on_cpu())(hidden_states, *routes)


def on_cpu() -> Selection:
    return select_backend(PROBLEM, "cpu")


BAD: dict[type[MoeregError], list[tuple[Callable[[], object], str]]] = {
    ArgumentError: [
        (lambda: MoEProblem(**{**SIZES, "hidden_size": 10**5000}), "size of a tensor, got <an integer of 16610 bits>"),
        (lambda: MoEProblem(**SIZES, dtype=3), "dtype must be a torch dtype or its name, got 3"),
        (lambda: MoEProblem(**SIZES, quant=3), "quant must be a scheme's name or a QuantScheme, got 3"),
        (lambda: MoEProblem(**SIZES, placement=torch.ones(2)), "a text, one of contiguous, map, got tensor([1., 1.])"),
        (lambda: MoEProblem(**SIZES, has_bias=Hostile()), "has_bias must be True or False, got <Hostile inst"),
        (lambda: MoEProblem.from_dict([]), "a problem must be an object, got []"),
        (lambda: MoEProblem.from_dict({"top_k": 2}), "num_experts is required, got an object with ['top_k'"),
        (lambda: MoEProblem.from_dict({**SIZES, "quant": {}}), "name of a QuantScheme is required, got"),
        (
            lambda: MoEProblem.from_dict(
                {**SIZES, "quant": {"name": "x", "weight": {"dtype": "int8", "group": [1, "8"]}}}
            ),
            "weight: group of a QuantFormat must be (rows, columns), each an integer of at least 1",
        ),
        (lambda: Activation("silu", gated=math.nan), "activation gated must be True or False, got nan"),
        (lambda: Activation("silu", alpha="1"), "activation alpha must be a finite number, got '1'"),
        (lambda: Activation("silu", limit=True), "swiglu_limit must be a positive finite number or None, got T"),
        (lambda: Activation("silu", limit=10**400), "swiglu_limit must be a positive finite number or None"),
        (lambda: Activation(["silu"]), "activation must be a text, one of silu, "),
        (lambda: Activation.from_name("silu(limit=1,limit=2)"), "activation 'silu(limit=1,limit=2)' is not a"),
        (lambda: Activation.from_name(None), "activation must be a name, got None"),
        (lambda: Activation("silu")(torch.ones(2, 3)), "activation 'silu' takes gate and up halves, got a row"),
        (lambda: Activation("silu")([1.0]), "an activation takes a dense tensor of floats of 16 bits or more"),
        (lambda: QuantFormat("int8", (1, 8), symmetric=0), "symmetric of a QuantFormat must be True or False"),
        (lambda: QuantFormat(["int8"], (1, 8)), "dtype of a QuantFormat must be one of uint4, "),
        (lambda: QuantScheme("two\nlines"), "name of a QuantScheme must be printable on one line"),
        (lambda: QuantScheme(""), "name of a QuantScheme must not be empty"),
        (lambda: QuantScheme("mine", "int8"), "weight of a QuantScheme must be a QuantFormat or None, got 'int8'"),
        (lambda: get_scheme(b"nvfp4"), "quant must be a scheme's name or a QuantScheme, got b'nvfp4'"),
        (lambda: Platform.from_name(90), "platform must be a name such as 'cuda:sm90', got 90"),
        (lambda: Platform("cuda", "sm90", versions={"torch": 2}), "versions of a platform must be texts, got 2"),
        (lambda: Platform("cuda", "sm90", memory_bytes=-1), "memory_bytes of a platform must be at least 0, got"),
        (lambda: PlatformRule(None), "a platform rule must be a text, got None"),
        (lambda: PlatformKind("mine", "cpu", "("), "arch_pattern of a PlatformKind must be a regular expression"),
        (lambda: select_backend("silu"), "problem must be a MoEProblem, got 'silu'; make one with MoEProblem("),
        (lambda: select_backend(PROBLEM, 90), "platform must be a Platform or a name such as 'cuda:sm90', got"),
        (lambda: explain_backends(PROBLEM, "cpu", prefer={3: "torch"}), "prefer must have names for keys, got 3"),
        (lambda: make_kernel("E4", WEIGHTS), "problem must be a MoEProblem, got 'E4'; make one with MoEProblem("),
        (lambda: make_kernel(PROBLEM, {"w13": 1}), "weights must be an ExpertWeights, got {'w13': 1}; make them"),
        (lambda: make_kernel(PROBLEM, WEIGHTS, "torch"), "selection must be a Selection, got 'torch'; make one"),
        (lambda: make_kernel(PROBLEM, WEIGHTS, on_cpu(), ep_rank=0.0), "ep_rank must be an integer, got 0.0"),
        (lambda: make_kernel(PROBLEM, WEIGHTS, on_cpu(), group="all"), "group must be a ProcessGroup, got 'all'"),
        (lambda: make_kernel(PROBLEM, WEIGHTS, on_cpu(), 1), "prepare_finalize must be a PrepareFinalize"),
        (lambda: make_kernel(PROBLEM, WEIGHTS, on_cpu()).reload(None), "weights must be an ExpertWeights, got None"),
        (lambda: WEIGHTS.to("nowhere"), "device must be one that torch knows, such as cpu or cuda:0, got 'nowhere'"),
        (lambda: WEIGHTS.check_against(None), "problem must be a MoEProblem, got None; make one with MoEProblem("),
        (lambda: routing.softmax_topk([1.0], 2, True), "router_logits must be a Tensor, got [1.0]; pass scores"),
        (lambda: routing.softmax_topk(LOGITS, 1.5, True), "top_k must be an integer, got 1.5"),
        (lambda: routing.softmax_topk(LOGITS, 2, "no"), "renormalize must be True or False, got 'no'"),
        (lambda: routing.grouped_softmax_topk(LOGITS, 2, 1, 1, math.nan), "must be a finite number, got nan"),
        (lambda: routing.RouterSpec(kind=[], num_experts=4, top_k=2), "router kind must be a text, one of"),
        (lambda: call(torch.ones(3, 15).bfloat16()), "hidden_states must have shape [3, 16], got [3, 15]"),
        (lambda: call(torch.ones(3, 16)), "hidden_states must be bfloat16, got float32; convert it"),
        (lambda: routing.softmax_topk(LOGITS, 9, True), "top_k must be in 1..num_experts, got top_k=9 with 4 experts"),
        (lambda: routing.softmax_topk(LOGITS[0], 2, True), "router_logits must be [num_tokens, num_experts], got [4]"),
        (lambda: ExpertWeights(w13=WEIGHTS.w13, w2=WEIGHTS.w2[1:]), "w13 and w2 must hold the same experts, got 4 and"),
        (
            lambda: quantize_weights(WEIGHTS, get_scheme("unquantized")),
            "quantize_weights needs a scheme with",
        ),
        (lambda: Selection.from_json(3), "a selection's JSON must be readable JSON, got TypeError: "),
        (lambda: Selection.from_json("[" * 100_000), "a selection's JSON must be readable JSON, got RecursionError: "),
        (lambda: Selection.from_json("1" * 5_000), "a selection's JSON must be readable JSON, got ValidationError: "),
        (lambda: Selection.from_json(b"\xff{}"), "a selection's JSON must be readable JSON, got DecodeError: "),
    ],
    UnknownNameError: [
        (lambda: MoEProblem.from_dict({**SIZES, "topk": 2}), "field of a problem 'topk', did you mean 'top_k'?"),
    ],
    RequestError: [
        (lambda: explain_backends(PROBLEM, "cpu", require=3), "require must be a name or a tuple of names, got 3"),
        (lambda: explain_backends(PROBLEM, "cpu", deny=["torch", 3]), "deny must hold names of backends, got 3"),
        (lambda: explain_backends(PROBLEM, "cpu", prefer={"nvfp4": 3}), "must be a name or a tuple of names, got 3"),
        (lambda: explain_backends(PROBLEM, "cpu", deny="auto"), "or prefer and means no wish, got ('auto',) in deny"),
        (lambda: explain_backends(PROBLEM, "cpu", require="torch,auto"), "no wish, got ('torch', 'auto') in require"),
    ],
}
CASES = [(call, kind, text) for kind, rows in BAD.items() for call, text in rows]


@pytest.mark.parametrize(("call", "kind", "text"), CASES, ids=[text[:40] for *_, text in CASES])
def test_wrong_types_and_values(call: Callable[[], object], kind: type[MoeregError], text: str) -> None:
    with pytest.raises(kind) as raised:
        call()
    assert text in str(raised.value)
    assert str(raised.value).isprintable()
    assert isinstance(raised.value, ValueError)


def test_sparse_inputs_are_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match=r"^hidden_states must be a dense tensor, got layout torch.sparse_coo; "):
        call(torch.ones(3, 16).bfloat16().to_sparse())


# Fields of a selection's JSON: the path, the new value (a function of the old), and the error's words.
REMOVED: Any = object()
FIELDS: list[tuple[str, Any, str]] = [
    ("schema", 2, "schema must be 1, got 2"),
    ("schema", True, "schema must be 1, got True"),
    ("schema", REMOVED, "schema must be 1, got None"),
    ("problem", [], "problem must be an object, got []"),
    ("problem.top_k", "2", "problem: top_k must be an integer, got '2'"),
    ("problem.top_k", REMOVED, "problem: top_k is required, got an object with ['activation', 'activation_format', "),
    ("problem.quant", "nvfp5", "problem: unknown quant scheme 'nvfp5', did you mean 'nvfp4'?"),
    ("problem.more", 1, "problem: unknown field of a problem 'more'"),
    ("platform", 90, "platform must be a text, got 90"),
    ("platform", "gpux:1", "platform: unknown platform 'gpux:1'"),
    ("platform_device", [], "platform_device must be an object, got []"),
    ("platform_device.memory_bytes", -1, "platform_device: memory_bytes of a platform must be at least 0, got -1"),
    ("platform_device.device_name", 1, "platform_device: device_name of a platform must be a str, got 1"),
    ("platform_source", "guessed", "unknown platform_source 'guessed' (known: named, probed)"),
    ("request", None, "request must be an object, got None"),
    ("request.deny", REMOVED, "request.deny is required, got an object with ['require', 'prefer']"),
    ("request.deny", "torch", "request.deny must be a list, got 'torch'"),
    ("request.deny", ["torch", 3], "request.deny[1] must be a text, got 3"),
    ("request.avoid", [], "request has no field avoid, got {'avoid': []"),
    ("selected", "nonsense", "selected must be the first accepted decision's backend, 'torch', got 'nonsense'"),
    ("selected", None, "selected must be the first accepted decision's backend, 'torch', got None"),
    ("source", None, "source must be set if and only if the first decision is accepted, got None with 'torch'"),
    ("source", "luck", "unknown source 'luck' (known: measured, preferred, priority, required)"),
    ("decisions", {}, "decisions must be a list, got {}"),
    ("decisions.0", "torch", "decisions[0] must be an object, got 'torch'"),
    ("decisions.0.priority", 1.5, "decisions[0].priority must be an integer, got 1.5"),
    ("decisions.0.backend", None, "decisions[0].backend must be a text, got None"),
    ("decisions.0.accepted", False, "decisions[0].accepted must be True with 0 reasons, got False"),
    ("decisions.1.tier", "slow", "unknown decisions[1].tier 'slow' (known: emulation, kernel)"),
    ("decisions.2.assumes", [None], "decisions[2].assumes[0] must be a text, got None"),
    ("decisions.-1.rule", "a\x1b[31m", r"decisions[{last}].rule must be printable on one line, got 'a\x1b[31m'"),
    ("decisions.-1.reasons.0", [], "decisions[{last}].reasons[0] must be an object, got []"),
    ("decisions.-1.reasons.0.code", "bad", "decisions[{last}].reasons[0]: unknown code 'bad'"),
    ("decisions.-1.reasons.0.text", REMOVED, "reasons[0].text is required, got an object with ['code'"),
    ("decisions.-1.reasons", [], "decisions[{last}].accepted must be True with 0 reasons, got False"),
]


# Processes that share the tests must name them alike, so no address may be part of a name.
@pytest.mark.parametrize(
    ("path", "value", "text"),
    FIELDS,
    ids=[f"{path}={'removed' if value is REMOVED else repr(value)}"[:40] for path, value, _ in FIELDS],
)
def test_every_field_of_a_selection_is_checked(path: str, value: Any, text: str) -> None:
    selection = explain_backends(PROBLEM, "cpu")
    assert selection.backend == "torch"
    values = copy.deepcopy(selection.to_dict())
    assert Selection.from_dict(json.loads(json.dumps(values))) == selection
    *steps, last = (int(step) if step.lstrip("-").isdigit() else step for step in path.split("."))
    place: Any = values
    for step in steps:
        place = place[step]
    if value is REMOVED:
        del place[last]
    else:
        place[last] = value
    for read in (lambda: Selection.from_dict(values), lambda: Selection.from_json(json.dumps(values))):
        with pytest.raises((ArgumentError, UnknownNameError)) as raised:
            read()
        assert text.replace("{last}", str(len(values["decisions"]) - 1)) in str(raised.value)
        assert str(raised.value).isprintable()


@pytest.mark.parametrize("request_", [{}, {"require": "triton"}, {"prefer": "torch", "deny": "triton"}], ids=str)
def test_a_selection_comes_back_from_json(request_: dict[str, str]) -> None:
    for platform in (Platform("cpu"), Platform("cuda", "sm90", "A\x1b[2J\nGPU", 2**50, {"torch": "2.13.0"}, True)):
        selection = explain_backends(MoEProblem(**SIZES, activation="silu(limit=7.0)"), platform, **request_)
        again = Selection.from_json(selection.to_json())
        assert (again, again.fingerprint, again.to_json()) == (selection, selection.fingerprint, selection.to_json())
        # Two cells of a class may be rejected alike.
        pairs = zip(again.decisions, selection.decisions, strict=True)
        assert all(one.cell == other.cell for one, other in pairs if other.accepted)
        if selection.winner is not None:
            assert dataclasses.replace(selection, ranges=((None, selection.winner),)) == selection


def test_a_device_is_of_the_platform() -> None:
    values = explain_backends(PROBLEM, "cuda:sm90").to_dict()
    values["platform_device"]["arch"] = "sm80"
    with pytest.raises(ArgumentError, match=r"platform_device.arch must be that of cuda:sm90, got 'sm80'"):
        Selection.from_dict(values)


def test_texts_of_json_have_no_characters_that_do_not_print() -> None:
    every = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    printable = "".join(one for one in every if one.isprintable())
    assert convert(printable, Text, "a text") == printable
    # Another version of Python may know characters that this one does not; of private ones the first and last do.
    others = [one for one in every if not one.isprintable() and unicodedata.category(one) not in ("Cn", "Co")]
    for one in (*others, "\ue000", "\uf8ff", "\U000f0000", "\U0010fffd"):
        with pytest.raises(ArgumentError, match="a text must be printable on one line"):
            convert(one, Text, "a text")


def test_fields_of_later_versions_are_left_alone() -> None:
    selection = explain_backends(PROBLEM, "cpu")
    values = selection.to_dict()
    values["notes"] = values["decisions"][0]["verified"] = ["sm90"]
    assert Selection.from_dict(values) == selection == Selection.from_json(selection.to_json())


@pytest.mark.parametrize(
    "value",
    [Hostile(), [Hostile()], 10**5000, "x" * 10**6, {"deep": [[[[[[[[1]]]]]]]]}, b"\x1b" * 500],
    ids=["hostile", "list", "int", "text", "deep", "bytes"],
)
def test_what_is_shown_of_a_value_is_short(value: object) -> None:
    text = shown(value)
    assert text.isprintable()
    assert len(text) < 1000
    assert not re.search(r"x{300}", text)
