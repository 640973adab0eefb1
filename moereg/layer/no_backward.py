"""Joins the output of experts to autograd's graph, where a backward pass raises, unless the layer has gradients."""

from __future__ import annotations

from typing import Any, Final

import torch

from moereg.errors import GradientError


def wants_gradient(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd follows any of these tensors."""
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def joined(out: torch.Tensor, *inputs: torch.Tensor | None) -> torch.Tensor:
    """The output, computed without autograd, as part of its inputs' graph, where a backward pass raises.

    Returns:
        `out` itself where autograd follows none of the inputs, else the same memory in a tensor whose gradient is a
        `GradientError`.
    """
    if not wants_gradient(*inputs):
        return out
    followed = [each for each in inputs if each is not None and each.requires_grad]
    found: torch.Tensor = _NoBackward.apply(out, *followed)  # type: ignore[no-untyped-call]
    return found


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *followed: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [each.shape for each in followed]
        return out.detach()  # A view of an argument could not be written in place, as in `out += shared(x)`.

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # An operator, since compiled code traces this function before anybody calls for a backward pass.
        return None, *(torch.ops.moereg.no_gradient(gradients[0], shape) for shape in ctx.shapes)


_LIBRARY: Final = torch.library.Library("moereg", "FRAGMENT")
_LIBRARY.define("no_gradient(Tensor gradient, SymInt[] shape) -> Tensor")


def _no_gradient(gradient: torch.Tensor, shape: list[int]) -> torch.Tensor:
    raise GradientError(
        f"moereg computes only gradients that MoEProblem(gradients=...) names, got a backward pass to an output of "
        f"{list(gradient.shape)} for another tensor; name it there, infer under torch.no_grad(), or detach the output; "
        "in transformers, moereg.integrations.transformers.restore(model) brings back freed weights, which train"
    )


_LIBRARY.impl("no_gradient", _no_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("moereg::no_gradient", torch.Tensor.new_empty, lib=_LIBRARY)
