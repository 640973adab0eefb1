"""Diagnoses wrong numbers: compares them with the results of usual mistakes, and names those that match.

Each mistake is the reference with one step done wrong. A match has to be as close to that as a right kernel is to the
truth, so a mistake that is not listed matches nothing. If two mistakes give the same numbers (as they may with one
expert per token), both are named.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import torch

from moereg.numerics.reference import LayerCall, local_expert_of_each, relative_error
from moereg.numerics.tolerances import layer_tolerance
from moereg.quantize import spans_tokens
from moereg.runtime.torch_state import in_plain_torch
from moereg.spec.activations import ACTIVATIONS, Activation
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import MATRICES
from moereg.testing.faults import plant_faults
from moereg.weights.layouts import deinterleave_gate_up, interleave_gate_up

_Edit = Callable[[torch.Tensor], torch.Tensor]

_CAUSE: Final = "; likely cause"
_NUMBER: Final = re.compile(r"\[[\d, ]*\]|\bnan\b|\binf\b|\b\d[\d.]*(e[+-]\d+)?\b")

_MOST_ROWS: Final = 64
_USUAL_ELEMENTS: Final = 1 << 25
_MOST_ELEMENTS: Final = 1 << 29
"""Matrix elements that one mistake may read: rows are limited to the first, and calls above the second skipped.

There are up to about 60 mistakes, and a CPU dequantizes some hundred million elements a second (an estimate).
"""
_MOST_BYTES: Final = 1 << 30
"""Largest weights whose codes and scales are spoiled, since that makes copies."""

_LEAST_ROUNDED: Final = 64
"""Elements of hidden states and of the intermediate below which some rounding may resemble any error by chance."""

_TILES: Final = (16, 32, 64, 128, 256)


@in_plain_torch
def diagnose(right: LayerCall, out: torch.Tensor, truth: torch.Tensor) -> tuple[str, ...]:
    """Names the mistakes that explain a wrong output.

    Args:
        right: The call in fp32.
        out: [T,H], the kernel's output; NaN where it wrote nothing.
        truth: [T,H] fp32, the result of `reference_experts`.

    Returns:
        Clauses such as `gate and up swapped`; none if no mistake matches. Synchronizes the device.
    """
    if not out.numel():
        return ()
    problem = right.problem
    # A kernel that takes a route for one of no local expert does not write its row.
    lost = out.isnan().any(1)
    causes = [
        name
        for name, local_ids in _misplaced(right)
        if lost.any() and ((right.local_ids >= 0) & (local_ids < 0)).any(1).equal(lost)
    ]
    if out.isnan().all():
        return (*causes, "out is NaN, as if it was not written")
    if causes:
        return tuple(causes)
    if _elements(problem) > _MOST_ELEMENTS:
        return ()
    found: tuple[str, ...] = ()
    if out.isfinite().all():
        call = _MistakenCall(**vars(right))
        if spans_tokens(call.scheme):  # A per-call scale depends on every row.
            if _elements(problem) // problem.top_k * problem.num_local_experts <= _MOST_ELEMENTS:
                found = _matching(call, out, truth)
        else:
            kept = _worst_rows(problem, out, truth)
            found = _matching(call.with_rows(kept), out[kept], truth[kept])
    return found or _wrong_tail(out, truth, layer_tolerance(problem, len(out), right.scheme))


def worded(causes: Sequence[str]) -> str:
    """A message's ending such as `; likely cause: gate and up swapped`, or an empty string."""
    if not causes:
        return ""
    return f"{_CAUSE}{'s' * (len(causes) > 1)}: {', or '.join(causes)}"


def split_message(message: str) -> tuple[str, tuple[str, ...]]:
    """A message without the causes that it ends with, and these."""
    text, found, causes = message.rpartition(_CAUSE)
    return (text, tuple(causes.partition(": ")[2].split(", or "))) if found else (message, ())


def causes_in(message: str) -> tuple[str, ...]:
    """The causes that a message ends with, without their numbers; if it names none, what it says of the error."""
    text, causes = split_message(message)
    _, found, rest = text.partition("error ")
    return tuple(_NUMBER.sub("N", cause) for cause in causes or (f"{found}{rest}" if found else text,))


def _matching(call: _MistakenCall, out: torch.Tensor, truth: torch.Tensor) -> tuple[str, ...]:
    error, bound = relative_error(out, truth), layer_tolerance(call.problem, len(out), call.scheme)
    errors = {}
    for name, mistaken in _mistakes(call):
        wrong = mistaken.output()
        if relative_error(wrong, truth) > bound:
            errors[name] = relative_error(out, wrong)
    least = min(errors.values(), default=error)
    if least <= min(bound, error / 2):
        return tuple(name for name, one in errors.items() if one <= min(bound, 1.5 * least))
    return _rounded_through_8_bits(call, out, error)


def _wrong_tail(out: torch.Tensor, truth: torch.Tensor, bound: float) -> tuple[str, ...]:
    """Names the last rows or columns if only they are wrong."""
    difference = (out.double() - truth.double()).nan_to_num(nan=torch.inf)
    for name, dim in (("rows", 0), ("columns", 1)):
        size = out.shape[dim]
        usual = torch.linalg.vector_norm(truth.double()) / size**0.5
        is_wrong = torch.linalg.vector_norm(difference, dim=1 - dim) > 3 * bound * usual
        num_wrong = int(is_wrong.sum())
        if 0 < num_wrong <= size / 2 and is_wrong[size - num_wrong :].all():
            rest = (tensor.narrow(dim, 0, size - num_wrong) for tensor in (out, truth))
            if not relative_error(*rest) <= bound:
                continue
            tail = out.narrow(dim, size - num_wrong, num_wrong)
            verb = "are NaN, as if they were not written" if tail.isnan().all() else "are wrong"
            return (f"the last {num_wrong} of {size} {name} of out {verb}",)
    return ()


def _elements(problem: MoEProblem) -> int:
    """Matrix elements that one token's experts read."""
    rows = problem.activation.num_halves + 1
    return rows * problem.hidden_size * problem.intermediate_size * problem.top_k


def _worst_rows(problem: MoEProblem, out: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Indices of the rows that differ most, few enough to compute for every mistake."""
    count = min(len(out), _MOST_ROWS, max(1, _USUAL_ELEMENTS // _elements(problem)))
    distance = torch.linalg.vector_norm(out.double() - truth.double(), dim=1)
    worst: torch.Tensor = distance.topk(count).indices.sort().values
    return worst


@dataclasses.dataclass(frozen=True)
class _MistakenCall(LayerCall):
    """A call that goes wrong in one place.

    Attributes:
        edits: Edits by name: of one expert's matrix (`w13` or `w2`), its bias (`w13_bias`), or the rows that a matrix
            multiplies (`a13`, `a2`).
        shifts: How many experts further a matrix is read from, by its name.
        scales_bias: Whether routing weights scale the bias of w2 with the rest of the output.
    """

    edits: Mapping[str, _Edit] = dataclasses.field(default_factory=dict)
    shifts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    scales_bias: bool = True

    def with_rows(self, kept: torch.Tensor) -> _MistakenCall:
        of_rows = ("tokens", "topk_weights", "topk_ids", "local_ids")
        return dataclasses.replace(self, **{name: getattr(self, name)[kept] for name in of_rows})

    def with_edits(self, **edits: _Edit) -> _MistakenCall:
        return dataclasses.replace(self, edits=edits)

    def with_activation(self, activation: Activation) -> _MistakenCall:
        return dataclasses.replace(self, problem=dataclasses.replace(self.problem, activation=activation))

    def matrix(self, name: str, expert: int) -> torch.Tensor:
        shifted = (expert + self.shifts.get(name, 0)) % self.problem.num_local_experts
        return self._edited(name, super().matrix(name, shifted))

    def gemm2(self, expert: int, topk_weights: torch.Tensor) -> torch.Tensor:
        if self.scales_bias:
            return super().gemm2(expert, topk_weights)
        return super().gemm2(expert, topk_weights) + (1 - topk_weights).unsqueeze(1) * self.bias("w2", expert)

    def bias(self, name: str, expert: int) -> torch.Tensor:
        return self._edited(f"{name}_bias", super().bias(name, expert))

    def rounded(self, x: torch.Tensor, expert: int, name: str) -> torch.Tensor:
        return self._edited(name, super().rounded(x, expert, name))

    def _edited(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return self.edits[name](tensor) if name in self.edits else tensor


def _mistakes(call: _MistakenCall) -> Iterator[tuple[str, _MistakenCall]]:
    problem, weights = call.problem, call.topk_weights
    if problem.activation.gated:
        for text, edit in (
            ("swapped", _halves_swapped),
            ("rows of w13 read in turn instead of as halves", functools.partial(deinterleave_gate_up, dim=0)),
            ("rows of w13 read as halves of interleaved rows", functools.partial(interleave_gate_up, dim=0)),
        ):
            yield f"gate and up {text}", call.with_edits(w13=edit, w13_bias=edit)
    for text, local_ids in _misplaced(call):
        yield text, dataclasses.replace(call, local_ids=local_ids)
    for name in MATRICES:
        yield f"{name} transposed", call.with_edits(**{name: _transposed})
    yield "both matrices transposed", call.with_edits(w13=_transposed, w2=_transposed)
    if problem.num_local_experts > 1:
        for step, name in ((1, "next"), (-1, "previous")):
            shifted = torch.where(call.local_ids < 0, -1, (call.local_ids + step) % problem.num_local_experts)
            text = f"experts off by one (each has the {name} one's weights)"
            yield text, dataclasses.replace(call, local_ids=shifted)
            for matrix in MATRICES:
                yield f"{matrix} of the {name} expert", dataclasses.replace(call, shifts={matrix: step})

    yield "routing weights omitted", dataclasses.replace(call, topk_weights=torch.ones_like(weights))
    yield "routing weights applied twice", dataclasses.replace(call, topk_weights=weights.square())
    total = weights.sum(1, keepdim=True)
    yield "routing weights normalized to a sum of 1", dataclasses.replace(call, topk_weights=weights / total)
    if problem.top_k > 1:
        yield "routing weights of a token in reverse order", dataclasses.replace(call, topk_weights=weights.flip(1))
    place = "output instead of the input" if call.scales_input else "input instead of the output"
    yield f"routing weights applied to the {place}", dataclasses.replace(call, scales_input=not call.scales_input)

    right = problem.activation
    for other in ACTIVATIONS.values():
        if other.gated == right.gated and other.name != right.name:
            yield f"activation {other} instead of {right}", call.with_activation(other)
    for field, none in (("limit", None), ("beta", 0.0), ("alpha", 1.0), ("up_softcap", None)):
        if getattr(right, field) != none:
            without = dataclasses.replace(right, **{field: none})  # type: ignore[arg-type]
            yield f"{field} of the activation ignored", call.with_activation(without)

    if problem.has_bias:
        for name in MATRICES:
            yield f"bias of {name} forgotten", call.with_edits(**{f"{name}_bias": torch.zeros_like})
        yield "both biases forgotten", call.with_edits(w13_bias=torch.zeros_like, w2_bias=torch.zeros_like)
        if not call.scales_input:
            yield "bias of w2 not scaled by the routing weight", dataclasses.replace(call, scales_bias=False)

    if call.scheme.weight is not None:
        scales = {
            name: torch.ones_like(scale.float()).to(scale.dtype)
            for name, scale in call.weights.tensors("scale").items()
        }
        for names in (*((name,) for name in scales), tuple(scales)):
            text = "all scales of weights" if len(names) > 1 else f"scales of {names[0].removesuffix('_scale')}"
            changed = dataclasses.replace(call.weights, **{name: scales[name] for name in names})  # type: ignore[arg-type]
            yield f"{text} omitted", dataclasses.replace(call, weights=changed)
        for name, spoiled in plant_faults(call.weights) if call.weights.num_bytes <= _MOST_BYTES else ():
            if not name.startswith(("gate and up", "bias")):
                yield name, dataclasses.replace(call, weights=spoiled)
    if call.scheme.activation is not None:
        kept = dataclasses.replace(call.scheme, activation=None)
        yield "activations left at 16 bits", dataclasses.replace(call, scheme=kept)

    # The end of a sum left out: the part after the last whole tile, or the last tile.
    for name, text, size in (
        ("a13", "columns of hidden_states", problem.hidden_size),
        ("a2", "columns of the intermediate", problem.intermediate_size),
    ):
        missing = {1, *(size % tile or tile for tile in _TILES)}
        for count in sorted(one for one in missing if one < size):
            yield f"the last {count} of {size} {text} left out", call.with_edits(**{name: _without_last(count)})


def _misplaced(call: LayerCall) -> Iterator[tuple[str, torch.Tensor]]:
    """Routes taken to other local experts, [T,K]: what ignores `ep_rank` ignores the map that is made of it."""
    problem, ids = call.problem, call.topk_ids
    last = problem.num_local_experts - 1
    yield "expert_map ignored (topk_ids taken for local experts)", local_expert_of_each(problem, ids, None)
    yield "topk_ids taken modulo the number of local experts", ids % problem.num_local_experts
    if call.expert_map is not None:
        in_order = torch.where(call.expert_map < 0, -1, (call.expert_map >= 0).cumsum(0) - 1)
        text = "expert_map read as a mask (local experts numbered in the order of their ids)"
        yield text, local_expert_of_each(problem, ids, in_order)
    for name, expert in (("first", 0), ("last", last)):
        text = f"routes that no local expert serves computed with the {name} one's weights"
        yield text, torch.where(call.local_ids < 0, expert, call.local_ids)


def _rounded_through_8_bits(call: _MistakenCall, out: torch.Tensor, error: float) -> tuple[str, ...]:
    """Rounding of what has 16 bits, where that explains most of a small error of more than a few numbers."""
    num_rounded = min(call.tokens.numel(), call.local_ids.numel() * call.problem.intermediate_size)
    if num_rounded < _LEAST_ROUNDED:
        return ()
    places = {"hidden_states": ("a13",), "the intermediate": ("a2",), "activations": ("a13", "a2")}
    places = places if call.scheme.activation is None else {}
    places |= {"weights": MATRICES} if call.scheme.weight is None else {}
    dtype = call.problem.torch_dtype
    errors = {}
    for rounding, round_to in _ROUNDINGS.items():

        def edit(x: torch.Tensor, round_to: _Edit = round_to) -> torch.Tensor:
            return round_to(x.to(dtype).float())  # A kernel has the intermediate in 16 bits too.

        for place, names in places.items():
            wrong = call.with_edits(**dict.fromkeys(names, edit)).output()
            errors[f"{place} rounded through 8 bits ({rounding})"] = relative_error(out, wrong)
    # An error with another cause would add to the rounding error instead of being explained by it.
    best = min(errors, key=lambda name: errors[name], default=None)
    return () if best is None or not errors[best] < error / 2 else (best,)


def _halves_swapped(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat(rows.chunk(2)[::-1])


def _transposed(matrix: torch.Tensor) -> torch.Tensor:
    """Reads the same memory as the transposed matrix."""
    return matrix.reshape(matrix.shape[1], matrix.shape[0]).T


def _without_last(count: int) -> _Edit:
    def cut(x: torch.Tensor) -> torch.Tensor:
        kept = x.clone()
        kept[:, -count:] = 0
        return kept

    return cut


def _cast(dtype: torch.dtype) -> _Edit:
    largest = torch.finfo(dtype).max
    return lambda x: x.clamp(-largest, largest).to(dtype).to(x.dtype)


def _scaled(round_to: _Edit, largest: float, dim: int | None) -> _Edit:
    def rounded(x: torch.Tensor) -> torch.Tensor:
        amax = x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)
        scale = amax.clamp(min=1e-30) / largest
        return round_to(x / scale) * scale

    return rounded


_E4M3: Final = _cast(torch.float8_e4m3fn)
_ROUNDINGS: Final[Mapping[str, _Edit]] = {
    "float8_e4m3fn without a scale": _E4M3,
    "float8_e5m2 without a scale": _cast(torch.float8_e5m2),
    "float8_e4m3fn, a scale for each row": _scaled(_E4M3, 448.0, 1),
    "float8_e4m3fn, one scale": _scaled(_E4M3, 448.0, None),
    "int8, a scale for each row": _scaled(torch.round, 127.0, 1),
    "int8, one scale": _scaled(torch.round, 127.0, None),
}
