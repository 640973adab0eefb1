"""Reference gradients of a layer in fp64, and the bounds that a kernel's own are held to.

torch's autograd runs backward through the reference's own steps. Gradients of weights and biases are judged expert by
expert: an error in one with few rows would not show in the norm of all.

**16-bit roundings.** Operands are given in 16 bits and sums are fp32. In between a 16-bit backend rounds at most seven
times on the way to one gradient: gate and up as they are saved, the intermediate's gradient, that or the intermediate
times the routing weight, the pre-activation's gradient, a route's row, and the sum over routes (for weights: what was
accumulated before). As `moereg.numerics.tolerances` derives, that is sqrt(7) * 1.5e-3 = 4.0e-3 in bfloat16 and 4.8e-4
in float16; the bounds are those of seven roundings there, 9.5e-3 and 1.2e-3. In float32 a gradient is three sums deep:
sqrt(3) * 8e-6 = 1.4e-5, bound 2e-5. Below 64 independent elements bounds are 8 / sqrt(n) times larger, as for outputs.
An expert's gradients have at most as many as its rows of the intermediate, since its input is exact, and an adapter's
as many as its rows of R. An adapter adds at most four roundings to the seven, low-rank rows in both directions and two
products that a class rounds before it adds the adapter's part, and two sums to the three: sqrt(11) * 1.5e-3 = 5.0e-3 in
bfloat16, 6.0e-4 in float16 and sqrt(5) * 8e-6 = 1.8e-5 in float32, which the same bounds hold.

**Cancellation.** A routing weight's gradient is one sum of I products (and H with a bias), which may cancel: one in a
hundred is a hundredth of its usual size. So its error is relative to the root of the sum of their squares. The other
gradients have H elements or more.

**Clamps.** An element that rounding moves across the clamp L of an activation has a wrong slope, which costs all of its
gradient. If s is the share of elements within half a unit in the last place of L, that costs sqrt(s): about 2e-2 in
bfloat16 with gates spread over 3.6, and any amount if there are few. So the bound adds how far gradients move with a
clamp that far to either side. Kernels that clamp saved 16-bit values and kernels that clamp before are then both right.
With adapters it is twice as far, since a class may round a product, and then its sum with the adapter's part.

**Restored weights.** The reference dequantizes weights exactly, and a layer that trains multiplies with weights rounded
to its dtype once. That moves a weight by at most half a unit in the last place, 2^-8 of it in bfloat16 and 2^-11 in
float16, and nothing at all for a code of up to 4 bits of mantissa times a power of two (mxfp4, mxfp8). If scales spread
over their binade, the root mean square is the 1.5e-3 and 1.8e-4 of other roundings, and a gradient of the hidden states
depends on four such products, gate, up and both backward: sqrt(4) * 1.5e-3 = 3.0e-3. But one scale may serve a whole
matrix and round all of its 8 mantissas badly, and what reaches a gradient also depends on clamps. Every kernel rounds
these weights alike, though, so the bound adds what that costs the call at hand: if g is exact and r the reference with
rounded weights, |found - g| <= |found - r| + |r - g|, where the bounds above hold for the first and the second is
computed. In float32 it is 1e-7.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from moereg.numerics.reference import LayerCall
from moereg.numerics.tolerances import FEW_ELEMENTS, LARGEST_BOUND
from moereg.runtime.torch_state import plain_torch
from moereg.spec.problem import MoEProblem
from moereg.weights.adapters import ADAPTER_TENSORS, ExpertAdapters
from moereg.weights.permuted import ExpertWeights

GRADIENT_BOUNDS: Final[dict[str, float]] = {"bfloat16": 9.5e-3, "float16": 1.2e-3, "float32": 2e-5}
"""Bounds by the problem's dtype, for gradients of many elements."""

_OF_EXPERTS: Final = ("w13", "w2", "w13_bias", "w2_bias", *ADAPTER_TENSORS)
# Gradients that depend on the activation's slope.
_OF_SLOPES: Final = frozenset({"hidden_states", "w13", "w13_bias", "w13_a", "w13_b"})
# Relative to the clamp: half a unit in the last place, or the error of fp32 sums.
_NEAR_CLAMP: Final[dict[str, float]] = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-16}


class Comparison(NamedTuple):
    """The relative error of a gradient or, by a name such as `w13 of expert 3`, of a part; NaN where it has one."""

    name: str
    error: float
    bound: float


@dataclasses.dataclass(frozen=True)
class ReferenceGradients:
    """The gradients of one call, in fp64.

    Attributes:
        problem: The layer.
        output: [T,H], the layer's output.
        tensors: `hidden_states` [T,H], `topk_weights` [T,K], `w13` [E,2I,H] and `w2` [E,H,I] unless they are quantized,
            and biases and adapters if there are any.
        local_ids: [T,K] int64, each route's local expert or -1.
        sizes: Norms that errors are relative to, by name: [E], or [1] for the first two.
        moved: Likewise, norms of what rounding moves: across the activation's clamp, and by restored weights.
    """

    problem: MoEProblem
    output: torch.Tensor
    tensors: dict[str, torch.Tensor]
    local_ids: torch.Tensor
    sizes: dict[str, torch.Tensor]
    moved: dict[str, torch.Tensor]

    def compare(self, found: Mapping[str, torch.Tensor]) -> list[Comparison]:
        """Compares a kernel's gradients, those that there are, each with its bound. Synchronizes the device."""
        return [each for name, tensor in found.items() for each in self._compare(name, tensor)]

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> ReferenceGradients:
        """Other gradients of the same call, such as those of a mistake."""
        sizes = {name: _norms(name, tensor) for name, tensor in tensors.items() if name != "topk_weights"}
        return dataclasses.replace(self, tensors=dict(tensors), sizes={**self.sizes, **sizes})

    def _compare(self, name: str, found: torch.Tensor) -> Iterator[Comparison]:
        is_routed = self.local_ids >= 0
        if name in _OF_EXPERTS:
            is_routed = torch.stack([self.local_ids == expert for expert in range(self.problem.num_local_experts)])
        num_routes = is_routed.sum((-2, -1)).reshape(-1)
        differences = _norms(name, found.double() - self.tensors[name])
        numbers = (tensor.tolist() for tensor in (num_routes, differences, self.sizes[name], self.moved[name]))
        for expert, (count, difference, size, moved) in enumerate(zip(*numbers, strict=True)):
            part = f"{name} of expert {expert}" if name in _OF_EXPERTS else name
            if scale := size or moved:  # What a clamp cuts off altogether may be all that there is.
                yield Comparison(part, difference / scale, self._bound(name, count) + moved / scale)
            else:
                yield Comparison(part, difference and math.inf, 0.0)

    def _bound(self, name: str, num_routes: int) -> float:
        outputs = self.problem.intermediate_size if name == "w13_bias" else self.problem.hidden_size
        if name in ADAPTER_TENSORS:
            count = num_routes * min(self.tensors[name].shape[1:])
        else:
            count = num_routes if name == "topk_weights" else min(num_routes * self.problem.intermediate_size, outputs)
        few = math.sqrt(FEW_ELEMENTS / min(max(count, 1), FEW_ELEMENTS))
        return min(GRADIENT_BOUNDS[self.problem.dtype] * few, LARGEST_BOUND)


def reference_gradients(
    problem: MoEProblem,
    weights: ExpertWeights,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    grad_out: torch.Tensor,
    expert_map: torch.Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> ReferenceGradients:
    """Runs the reference forward and backward, and synchronizes the device.

    Args:
        problem, weights, hidden_states, topk_weights, topk_ids, expert_map: As in `reference_experts`. Quantized
            weights are constants, and activations are not quantized.
        grad_out: [T,H], the output's gradient.
        adapters: Of the experts; their products are added to the weights.
    """
    arguments = (weights, hidden_states, topk_weights, topk_ids, expert_map, torch.float64, problem.quant.weight_only)
    with torch.inference_mode(False), plain_torch():
        call = _LeafCall(**vars(LayerCall.of(problem, *arguments)), adapters=adapters)
        output, tensors = call.gradients(grad_out.double())
        moved = {name: torch.zeros_like(_norms(name, tensor)) for name, tensor in tensors.items()}
        limit, share = problem.activation.limit, _NEAR_CLAMP[problem.dtype] * (1 if adapters is None else 2)
        for bound in () if limit is None else (limit * (1 - share), limit * (1 + share)):
            clamped = dataclasses.replace(problem.activation, limit=bound)
            near = dataclasses.replace(call, problem=dataclasses.replace(problem, activation=clamped))
            found = near.gradients(grad_out.double())[1]
            for name in _OF_SLOPES & found.keys():
                moved[name] += _norms(name, found[name] - tensors[name])
        if weights.scheme.weight is not None:
            found = dataclasses.replace(call, rounds_weights=True).gradients(grad_out.double())[1]
            for name, tensor in tensors.items():
                moved[name] += _norms(name, found[name] - tensor)
        sizes = {name: _norms(name, tensor) for name, tensor in tensors.items()}
        sizes["topk_weights"] = call.terms(grad_out.double()).view(1)
    return ReferenceGradients(problem, output, tensors, call.local_ids, sizes, moved)


@dataclasses.dataclass(frozen=True)
class _LeafCall(LayerCall):
    """A call whose tensors are leaves of autograd's graph, except quantized weights."""

    adapters: ExpertAdapters | None = None
    rounds_weights: bool = False
    leaves: dict[str, tuple[torch.Tensor, ...]] = dataclasses.field(default_factory=dict)

    def gradients(self, grad_out: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The output, and the gradients of all of the call's tensors, zero where nothing depends on one."""
        given = {"hidden_states": self.tokens, "topk_weights": self.topk_weights}
        given |= self.weights.tensors() if self.weights.scheme.weight is None else self.weights.tensors("bias")
        given |= {} if self.adapters is None else self.adapters.tensors()
        leaves = {name: tensor.detach().double().requires_grad_() for name, tensor in given.items()}
        with torch.enable_grad():
            # One node for all experts: that of an index would be as large as all of them for each.
            experts = {name: leaf.unbind() for name, leaf in leaves.items() if name in _OF_EXPERTS}
            tokens, routing = leaves["hidden_states"], leaves["topk_weights"]
            out = dataclasses.replace(self, tokens=tokens, topk_weights=routing, leaves=experts).output()
            if not out.requires_grad:
                return out, {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
            found = torch.autograd.grad(out, list(leaves.values()), grad_out, materialize_grads=True)
        return out.detach(), dict(zip(leaves, found, strict=True))

    def terms(self, grad_out: torch.Tensor) -> torch.Tensor:
        """The root of the sum of squares of all products that the routing weights' gradients sum."""
        total = grad_out.new_zeros(())
        for expert in range(self.problem.num_local_experts):
            rows = grad_out[self.routes(expert)[0]]
            total += ((rows @ self.matrix("w2", expert)) * self.intermediate(expert)).square().sum()
            if self.weights.w2_bias is not None:
                total += (rows * self.bias("w2", expert)).square().sum()
        return total.sqrt()

    def matrix(self, name: str, expert: int) -> torch.Tensor:
        """One expert's w13 or w2, with its adapter."""
        matrix = self.leaves[name][expert] if name in self.leaves else super().matrix(name, expert)
        if self.rounds_weights:
            matrix = matrix.to(self.problem.torch_dtype).to(matrix.dtype)
        if self.adapters is None or getattr(self.adapters, f"{name}_a") is None:
            return matrix
        held: Any = self.leaves or {key: each.double() for key, each in self.adapters.tensors().items()}
        scaling = getattr(self.adapters, f"{name}_scaling")
        return torch.addmm(matrix, held[f"{name}_b"][expert], held[f"{name}_a"][expert], alpha=scaling)

    def bias(self, name: str, expert: int) -> torch.Tensor:
        """One expert's bias of w13 or w2."""
        return self.leaves[f"{name}_bias"][expert] if self.leaves else super().bias(name, expert)


def _norms(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """[E] norms of an experts' tensor's parts, or the [1] norm of another."""
    rows = tensor.flatten(1) if name in _OF_EXPERTS else tensor.flatten().unsqueeze(0)
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms
