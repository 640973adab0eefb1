"""Small layers that train, and their gradients by torch's autograd."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

import moereg
from moereg.weights.adapters import ADAPTER_TENSORS, adapter_shapes

ALL = frozenset({"hidden_states", "topk_weights", "weights"})
ADAPTED: dict[str, Any] = {"gradients": ALL | {"adapters"}, "adapter_rank": 4}
SCALINGS = {"w13": 0.75, "w2": 1.25}
SIZES: dict[str, Any] = {"num_experts": 6, "hidden_size": 24, "intermediate_size": 10, "top_k": 2}


def trained_problem(**changes: Any) -> moereg.MoEProblem:
    """A layer of 6 experts in fp32 with all gradients."""
    return moereg.MoEProblem(**{**SIZES, "dtype": "float32", "gradients": ALL, **changes})


class Call(NamedTuple):
    """Leaves that require gradients, and a gradient of the output."""

    tensors: dict[str, torch.Tensor]
    topk_ids: torch.Tensor
    grad_out: torch.Tensor

    @property
    def weights(self) -> moereg.ExpertWeights:
        """The layer's parameters."""
        names = ("w13", "w2", "w13_bias", "w2_bias")
        held: dict[str, Any] = {name: self.tensors[name] for name in names if name in self.tensors}
        return moereg.ExpertWeights(**held)

    @property
    def adapters(self) -> moereg.ExpertAdapters | None:
        """Those of the experts, if there are any."""
        held: dict[str, Any] = {name: self.tensors[name] for name in ADAPTER_TENSORS if name in self.tensors}
        scalings = {f"{name}_scaling": scaling for name, scaling in SCALINGS.items()}
        return moereg.ExpertAdapters(**held, **scalings) if held else None

    def run(self, layer: Any) -> torch.Tensor:
        """The output of a kernel or layer, after a backward pass to it; a layer has its own adapters."""
        call = self.tensors["hidden_states"], self.tensors["topk_weights"], self.topk_ids
        keywords = {"adapters": self.adapters} if isinstance(layer, moereg.MoEKernel) else {}
        out: torch.Tensor = layer(*call, **keywords)
        out.backward(self.grad_out)
        return out

    def gradients(self) -> dict[str, torch.Tensor]:
        """What the backward pass left, taken away from the leaves."""
        found = {name: tensor.grad for name, tensor in self.tensors.items() if tensor.grad is not None}
        for tensor in self.tensors.values():
            tensor.grad = None
        return found


def drawn_call(problem: moereg.MoEProblem, num_tokens: int = 13, seed: int = 0) -> Call:
    """A random layer and call. Gate rows are larger than up rows, so that a swap cannot pass."""
    generator = torch.Generator().manual_seed(seed)
    num_experts, size, inner = problem.num_local_experts, problem.hidden_size, problem.intermediate_size
    dtype, halves = problem.torch_dtype, problem.activation.num_halves

    def drawn(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    w13 = drawn(num_experts, halves * inner, size, scale=size**-0.5)
    w13[:, :inner] *= 1.5
    tensors = {"w13": w13, "w2": drawn(num_experts, size, inner, scale=inner**-0.5)}
    if problem.has_bias:
        tensors |= {"w13_bias": drawn(num_experts, halves * inner), "w2_bias": drawn(num_experts, size)}
    tensors["hidden_states"] = drawn(num_tokens, size)
    if rank := problem.adapter_rank:
        shapes = {
            **adapter_shapes(problem, rank),
            **{n: s for n, s in adapter_shapes(problem, rank - 1).items() if "w2" in n},
        }
        tensors |= {name: drawn(*shape, scale=shape[-1] ** -0.5) for name, shape in shapes.items()}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors["topk_weights"] = torch.rand(num_tokens, problem.top_k, generator=generator) + 0.1
    scores = torch.rand(num_tokens, problem.num_experts, generator=generator)
    leaves = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
    return Call(leaves, scores.topk(problem.top_k).indices.int(), drawn(num_tokens, size).to(dtype))


def drawn_kernel(**changes: Any) -> tuple[moereg.MoEProblem, Call, moereg.MoEKernel]:
    """A random layer's problem, a call of it, and its kernel."""
    problem = trained_problem(**changes)
    call = drawn_call(problem)
    return problem, call, moereg.make_kernel(problem, call.weights)


def drawn_module(**changes: Any) -> tuple[moereg.MoEProblem, Call, moereg.MoELayer]:
    """The same as a module, whose parameters are the call's leaves."""
    problem = trained_problem(**changes)
    call = drawn_call(problem)
    layer = moereg.MoELayer(problem, call.weights, adapters=call.adapters)
    return problem, call._replace(tensors=call.tensors | dict(layer.named_parameters())), layer


def plain_layer(
    problem: moereg.MoEProblem,
    tensors: dict[str, torch.Tensor],
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer in plain torch, one route at a time, for autograd."""
    hidden_states, topk_weights = tensors["hidden_states"], tensors["topk_weights"]
    rows = []
    for token, ids in enumerate(topk_ids.tolist()):
        row = torch.zeros_like(hidden_states[token])
        for slot, expert in enumerate(ids):
            is_known = 0 <= expert < problem.num_experts
            local = expert if expert_map is None or not is_known else int(expert_map[expert])
            if not is_known or not 0 <= local < problem.num_local_experts:
                continue
            pre = _product(tensors, "w13", local, hidden_states[token])
            pre = pre + tensors["w13_bias"][local] if problem.has_bias else pre
            result = _product(tensors, "w2", local, problem.activation(pre))
            result = result + tensors["w2_bias"][local] if problem.has_bias else result
            row = row + topk_weights[token, slot] * result
        rows.append(row)
    return torch.stack(rows) if rows else hidden_states * 1.0


def _product(tensors: dict[str, torch.Tensor], name: str, local: int, row: torch.Tensor) -> torch.Tensor:
    product = tensors[name][local] @ row
    if f"{name}_a" in tensors:
        product = product + SCALINGS[name] * (tensors[f"{name}_b"][local] @ (tensors[f"{name}_a"][local] @ row))
    return product


def expected(
    problem: moereg.MoEProblem, call: Call, expert_map: torch.Tensor | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Output and gradients by autograd in fp64."""
    tensors = {name: tensor.detach().double().requires_grad_() for name, tensor in call.tensors.items()}
    out = plain_layer(problem, tensors, call.topk_ids, expert_map)
    found = torch.autograd.grad(out, list(tensors.values()), call.grad_out.double(), allow_unused=True)
    zeros = (torch.zeros_like(tensor) for tensor in tensors.values())
    filled = (zero if each is None else each for each, zero in zip(found, zeros, strict=True))
    return out.detach(), dict(zip(tensors, filled, strict=True))


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Norm of the difference over the norm of the truth."""
    return float((found.detach().double() - truth).norm() / truth.norm().clamp(min=1e-30))
