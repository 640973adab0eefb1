"""Live models under torch.compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moereg.integrations.transformers import prepare
from moereg.layer import MoEKernel
from tests.support.live_models import close
from tests.support.no_backward import refuses_backward
from tests.support.tiny_models import tiny_model


@pytest.fixture
def experts() -> Any:
    """Of the first layer of a tiny Mixtral, which asks for moereg."""
    found = tiny_model("mixtral").model.layers[0].mlp.experts
    found.config._experts_implementation = "moereg"
    return found


ROUTES = torch.tensor([[0, 1], [2, 3], [3, 1]])
CALL = (torch.linspace(-2, 2, 96).view(3, 32), ROUTES, torch.linspace(0.2, 0.9, 6).view(3, 2))


class TestCompiled:
    def test_a_prepared_layer_is_one_graph(self, experts: Any) -> None:
        prepare(experts_model := torch.nn.Sequential(Holder(experts)), progress=False)
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            expected = experts(*CALL)
            assert torch.equal(compiled(*CALL), expected)
            experts.down_proj.mul_(2)  # Seen, although nothing is compiled again.
            assert close(compiled(*CALL), 2 * expected)
        assert experts_model[0].experts is experts

    def test_the_first_call_may_be_compiled(self, experts: Any) -> None:
        with torch.no_grad():
            found = torch.compile(experts, backend="aot_eager")(*CALL)
            assert torch.equal(found, experts(*CALL))

    def test_a_first_call_in_one_graph_says_what_to_do(self, experts: Any) -> None:
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
        with (
            torch.no_grad(),
            pytest.raises(Exception, match="moereg makes kernels outside of compiled code: call moereg"),
        ):
            compiled(*(tensor[:1] for tensor in CALL))  # Dynamo keeps code by sizes, from other tests too.

    def test_compiled_experts_train_and_are_fresh_afterwards(
        self, experts: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trained: list[MoEKernel] = []
        right = MoEKernel.run_backward
        monkeypatch.setattr(MoEKernel, "run_backward", lambda self, *args: trained.append(self) or right(self, *args))
        prepare(torch.nn.Sequential(Holder(experts)), progress=False)
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            expected = compiled(*CALL)
        for _ in range(2):  # The second call of compiled code traces nothing.
            out = compiled(CALL[0].clone().requires_grad_(), *CALL[1:])
            assert close(out.detach(), expected)
            (gradient,) = torch.autograd.grad(out.sum(), experts.down_proj)
            assert gradient.any()
            experts.down_proj.data.mul_(2)  # As optimizers that torch does not know may do it.
            expected = 2 * expected
            with torch.no_grad():
                assert close(compiled(*CALL), expected)
        assert len(trained) == 2

    def test_a_backward_pass_of_compiled_code_says_why_not(self, experts: Any) -> None:
        prepare(torch.nn.Sequential(Holder(experts)), free=True, progress=False)
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
        refuses_backward(compiled(CALL[0].clone().requires_grad_(), *CALL[1:]))


class Holder(torch.nn.Module):
    """A block around experts that says how many a token has."""

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.top_k = 2
        self.experts = experts
