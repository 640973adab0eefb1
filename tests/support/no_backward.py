"""The one error of a backward pass to experts that moereg ran."""

from __future__ import annotations

import re

import pytest
import torch

from moereg.errors import GradientError


def refuses_backward(out: torch.Tensor) -> None:
    """Checks that autograd follows an output, and that a backward pass to it raises the one error with all its text."""
    assert out.requires_grad
    text = (
        re.escape(
            "moereg computes only gradients that MoEProblem(gradients=...) names, got a backward pass to an output "
        )
        + r"of \[\d+, \d+\] for another tensor; "
        + re.escape("name it there, infer under torch.no_grad(), or detach the output; in transformers, ")
        + re.escape("moereg.integrations.transformers.restore(model) brings back freed weights, which train")
    )
    with pytest.raises(GradientError, match=f"^{text}$"):
        out.sum().backward()
