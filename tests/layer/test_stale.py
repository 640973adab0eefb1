"""Parameters are never read stale, in whichever way they are written: in place, and by kernels with a copy.

Every replaced parameter lies where the one before lay: two tensors of one buffer have storages of their own, and no
version tells them apart. The copy is one that a class makes at any size and on any CPU.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch

import moereg
from moereg.layer.in_place import say_once
from moereg.registry import register_moe_backend
from moereg.testing.inputs import make_weights
from moereg.weights.permuted import PermutedWeights
from tests.layer.small_plans import turning
from tests.support.fakes import FakeExperts
from tests.support.live_models import logits_of
from tests.support.tiny_models import tiny_model

PROBLEM: Final = moereg.MoEProblem(num_experts=4, hidden_size=64, intermediate_size=32, top_k=2, dtype="float32")
NUM_WRITES: Final = 3


class Room:
    """Memory in which one tensor after the other lies, each in a storage of its own."""

    def __init__(self, like: torch.Tensor) -> None:
        self._memory, self._like = bytearray(like.nbytes), like.detach().clone()

    def tensor(self, seed: int) -> torch.Tensor:
        """Other numbers at the same address."""
        found = torch.frombuffer(self._memory, dtype=self._like.dtype).view(self._like.shape)
        found.copy_(self._like * torch.rand(self._like.shape, generator=torch.Generator().manual_seed(seed)))
        return found


class Shelf:
    """Memory in which tensors lie side by side, in one storage that is written once."""

    def __init__(self, like: torch.Tensor) -> None:
        seeds = [torch.Generator().manual_seed(seed) for seed in range(NUM_WRITES)]
        self._tensors = torch.stack([like.detach() * torch.rand(like.shape, generator=seed) for seed in seeds])

    def tensor(self, seed: int) -> torch.Tensor:
        """Other numbers at another place."""
        return self._tensors[seed]


Write = Callable[[torch.nn.Module, str, torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor]
"""Writes a module's parameter of a name with what a tensor holds, and returns what a call gives."""


def functional_call(module: Any, name: str, value: torch.Tensor, run: Callable[..., torch.Tensor]) -> torch.Tensor:
    with torch.nn.utils.stateless._reparametrize_module(module, {name: value}):
        return run()


def deleted_and_set(module: Any, name: str, value: torch.Tensor, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    setattr(module, name, None)
    setattr(module, name, torch.nn.Parameter(value, requires_grad=False))
    return run()


def data_twice(module: Any, name: str, value: torch.Tensor, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    parameter = module._parameters[name]
    parameter.data = torch.empty(0)
    parameter.data = value
    return run()


def data_copied(module: Any, name: str, value: torch.Tensor, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    module._parameters[name].data.copy_(value)
    return run()


def data_mixed(module: Any, name: str, value: torch.Tensor, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """As TRL mixes a policy into its reference."""
    module._parameters[name].data.mul_(0.0).add_(value, alpha=1.0)
    return run()


def foreach_data(module: Any, name: str, value: torch.Tensor, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch._foreach_copy_([module._parameters[name].data], [value])
    return run()


REPLACED: Final = (functional_call, deleted_and_set, data_twice)
UNCOUNTED: Final = (data_copied, data_mixed, foreach_data)


@pytest.fixture
def turned(isolated_registry: Any) -> Iterator[str]:
    """A backend whose class has a layout of its own, so that it copies all weights."""
    register_moe_backend("turned", 5, ("unquantized",), ("cpu",))(turning(1.0))
    return "turned"  # type: ignore[return-value]


def fresh(weights: dict[str, torch.Tensor]) -> Any:
    return fresh_of(PROBLEM, weights)


def fresh_of(problem: moereg.MoEProblem, weights: dict[str, torch.Tensor]) -> Any:
    return moereg.MoELayer(
        problem, moereg.ExpertWeights(**{name: one.detach().clone() for name, one in weights.items()})
    )


def layer_and_call(**keywords: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    weights = moereg.ExpertWeights(w13=torch.randn(4, 64, 64) / 8, w2=torch.randn(4, 64, 32) / 6)
    call = torch.randn(3, 64), torch.rand(3, 2), torch.tensor([[0, 1], [1, 2], [3, 0]])
    return moereg.MoELayer(PROBLEM, weights, **keywords), call


@pytest.mark.parametrize("name", ["w13", "w2"])
@pytest.mark.parametrize("write", [*REPLACED, *UNCOUNTED], ids=lambda write: write.__name__)
def test_a_layer_in_place_reads_what_is_there(write: Write, name: str) -> None:
    layer, call = layer_and_call()
    layer.refresh()  # There is nothing to read yet.
    layer(*call)
    kernel, room = layer._kernel, Room(getattr(layer, name))
    for seed in range(NUM_WRITES):
        value = room.tensor(seed)
        found = write(layer, name, value, lambda: layer(*call))
        assert torch.equal(found, fresh({**layer._held, name: value})(*call))
    assert layer._kernel is kernel


@pytest.mark.parametrize("name", ["w13", "w2"])
@pytest.mark.parametrize(
    ("write", "place"),
    [*((write, Room) for write in (*REPLACED, *UNCOUNTED)), *((write, Shelf) for write in REPLACED)],
    ids=lambda value: value.__name__,
)
def test_a_prepared_layer_follows_what_torch_sees(write: Write, place: Any, name: str, turned: str) -> None:
    layer, call = layer_and_call(require=turned)
    kernel = layer.prepare()
    assert kernel.weights.copied_from(layer.weights)
    room = place(getattr(layer, name))
    for seed in range(NUM_WRITES):
        value = room.tensor(seed)

        def run() -> torch.Tensor:
            if write in UNCOUNTED:
                layer.refresh()
            return layer(*call)  # type: ignore[no-any-return]

        found = write(layer, name, value, run)
        torch.testing.assert_close(found, fresh({**layer._held, name: value})(*call))
    assert write not in UNCOUNTED or layer.prepare() is kernel


@pytest.mark.parametrize("write", [functional_call, deleted_and_set, data_twice, data_copied], ids=lambda w: w.__name__)
def test_an_exported_program_reads_what_is_there(write: Write) -> None:
    layer, call = layer_and_call()
    program: Any = torch.export.export(layer, call).module()
    room = Room(layer.w13)
    for seed in range(NUM_WRITES):
        value = room.tensor(seed)
        found = write(program, "w13", value, lambda: program(*call))
        assert torch.equal(found, fresh({"w13": value, "w2": layer.w2})(*call))


def test_a_kernel_in_place_keeps_no_memory() -> None:
    layer, call = layer_and_call()
    layer(*call)
    old = weakref.ref(layer.w13.untyped_storage())
    layer.w13 = torch.nn.Parameter(torch.randn(4, 64, 64), requires_grad=False)
    gc.collect()
    assert old() is None
    assert layer.prepare().weights["w2"].data_ptr() == layer.w2.data_ptr()


@pytest.mark.parametrize("replaces", [False, True])
def test_a_backward_pass_reads_what_its_forward_pass_read(replaces: bool) -> None:
    """Of frozen experts too, whose gradient of hidden states needs them."""
    problem = dataclasses.replace(PROBLEM, gradients=frozenset({"hidden_states"}))
    plain, (x, *routing) = layer_and_call()
    other = torch.randn(4, 64, 64) / 8
    layer = moereg.MoELayer(problem, plain.weights)
    wanted = torch.autograd.grad(
        fresh_of(problem, {"w13": other, "w2": plain.w2})(x.requires_grad_(), *routing).sum(), x
    )
    if replaces:
        layer.w13 = torch.nn.Parameter(other, requires_grad=False)
        out = layer(x, *routing)
        layer.w13 = torch.nn.Parameter(torch.zeros_like(other), requires_grad=False)
    else:
        out = torch.func.functional_call(layer, {"w13": other}, (x, *routing))
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], wanted[0])


@pytest.mark.parametrize("quant", ["int8_w8a16", "int4_w4a16_g128"])
def test_replaced_codes_leave_the_tensors_before_alone(quant: str) -> None:
    problem = moereg.MoEProblem(num_experts=4, hidden_size=128, intermediate_size=128, top_k=2, quant=quant)
    weights = [make_weights(problem, torch.device("cpu"), seed=seed) for seed in (0, 1)]
    call = torch.randn(3, 128, dtype=torch.bfloat16), torch.rand(3, 2), torch.tensor([[0, 1], [1, 2], [3, 0]])
    layer, other = (moereg.MoELayer(problem, one) for one in weights)
    layer(*call)
    kernel, before = layer._kernel, weights[0].w13.clone()
    layer.refresh()
    assert layer._kernel is kernel
    layer.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(layer(*call), other(*call))
    assert torch.equal(weights[0].w13.view(torch.uint8), before.view(torch.uint8))
    assert layer._kernel.weights["w13"].data_ptr() == layer.w13.data_ptr()


def test_a_class_with_tensors_of_its_own_does_not_read_in_place(isolated_registry: Any) -> None:
    def permute_weights(self: Any, weights: moereg.ExpertWeights, problem: Any) -> PermutedWeights:
        return PermutedWeights("canonical", weights.tensors(), {"table": torch.ones(1)})

    def compute(self: Any, out: torch.Tensor, inputs: Any, weights: PermutedWeights) -> None:
        FakeExperts.compute(self, out, inputs, weights)
        out.mul_(weights["table"])

    kind = type("Tabled", (FakeExperts,), {"permute_weights": permute_weights, "compute": compute})
    register_moe_backend("tabled", 5, ("unquantized",), ("cpu",))(kind)
    layer, call = layer_and_call(require="tabled")
    torch.testing.assert_close(layer(*call), fresh(layer._held)(*call))


@pytest.fixture
def experts_and_logits() -> tuple[Any, Callable[[], torch.Tensor]]:
    """The experts of a tiny model's first layer, and what a call of the model gives."""
    integration = pytest.importorskip("moereg.integrations.transformers", reason="the extra `transformers`")
    integration.register()
    model: Any = tiny_model("mixtral")
    model.set_experts_implementation("moereg")
    return model.model.layers[0].mlp.experts, lambda: logits_of(model)


def eager(module: Any, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What transformers' own code gives."""
    module.config._experts_implementation = "eager"
    try:
        return run()
    finally:
        module.config._experts_implementation = "moereg"


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("write", [*REPLACED, *UNCOUNTED], ids=lambda write: write.__name__)
def test_a_model_reads_what_is_there(
    write: Write, is_prepared: bool, turned: str, experts_and_logits: tuple[Any, Callable[[], torch.Tensor]]
) -> None:
    module, run = experts_and_logits
    from moereg.integrations._experts.serving import served
    from moereg.integrations.transformers import prepare, refresh

    refresh(module)  # There is nothing to read yet.
    if is_prepared:
        prepare(module, require=turned, progress=False)
    run()
    for name in ("gate_up_proj", "down_proj"):
        room = Room(getattr(module, name))
        for seed in range(NUM_WRITES):

            def both() -> tuple[torch.Tensor, torch.Tensor]:
                if is_prepared and write in UNCOUNTED:
                    refresh(module)
                return run(), eager(module, run)

            found, expected = write(module, name, room.tensor(seed), both)  # type: ignore[arg-type]
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            if is_prepared:  # As requested, also where it was made anew.
                assert {each.selection.backend for each in served(module).kernels.values()} == {turned}  # type: ignore[union-attr]


def test_writers_of_other_libraries_mark_what_they_wrote(
    turned: str, experts_and_logits: tuple[Any, Callable[[], torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PEFT merges adapters and TRL mixes a policy into its reference: through `.data`."""
    module, run = experts_and_logits
    import sys
    from types import SimpleNamespace

    from moereg.integrations.transformers import prepare

    class ParamWrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = module

        def merge(self) -> None:
            module.down_proj.data.mul_(3.0)

        def unmerge(self) -> None:
            module.down_proj.data.div_(3.0)

    class SyncRefModelCallback:
        @staticmethod
        def _sync_target_model(model: Any, target: Any, alpha: float) -> None:
            target.down_proj.data.mul_(alpha)

    layer = SimpleNamespace(ParamWrapper=ParamWrapper)
    monkeypatch.setitem(sys.modules, "peft.tuners.lora.layer", layer)  # type: ignore[arg-type]
    callbacks = SimpleNamespace(SyncRefModelCallback=SyncRefModelCallback)
    monkeypatch.setitem(sys.modules, "trl.trainer.callbacks", callbacks)  # type: ignore[arg-type]
    prepare(module, require=turned, progress=False)
    wrapper, before = ParamWrapper(), run()
    for write in (wrapper.merge, wrapper.unmerge, lambda: SyncRefModelCallback._sync_target_model(None, module, 0.5)):
        write()
        found = run()
        assert not torch.allclose(found, before)
        torch.testing.assert_close(found, eager(module, run), rtol=1e-4, atol=1e-5)
        before = found


@pytest.mark.gpu
@pytest.mark.parametrize("is_prepared", [False, True])
def test_addresses_that_a_gpu_gives_again(is_prepared: bool, turned_on_gpu: str) -> None:
    """torch's allocator gives a freed tensor's address to the next one of its size, every time."""
    problem = moereg.MoEProblem(num_experts=4, hidden_size=1024, intermediate_size=512, top_k=2)
    wishes = {"require": turned_on_gpu} if is_prepared else {}
    layer: Any = moereg.MoELayer(problem, device="cuda", **wishes)
    layer.w2 = torch.nn.Parameter(torch.full((4, 1024, 512), 0.01, dtype=torch.bfloat16, device="cuda"), False)
    call = torch.randn(3, 1024, dtype=torch.bfloat16, device="cuda"), torch.rand(3, 2, device="cuda"), None
    ids = torch.tensor([[0, 1], [1, 2], [3, 0]], device="cuda")
    if is_prepared:
        layer.prepare()
    addresses, norms = set(), []
    for scale in (0.01, 0.02, 0.03, 0.04):
        layer.w13 = None
        layer.w13 = torch.nn.Parameter(torch.full((4, 1024, 1024), scale, dtype=torch.bfloat16, device="cuda"), False)
        addresses.add(layer.w13.data_ptr())
        norms.append(float(layer(*call[:2], ids).norm()))
    assert len(addresses) == 1
    assert norms == sorted(set(norms))


@pytest.fixture
def turned_on_gpu(isolated_registry: Any) -> str:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    register_moe_backend("turned", 5, ("unquantized",), ("cuda:sm80+",))(turning(1.0))
    return "turned"


def test_transposed_weights_are_copied_and_followed(caplog: pytest.LogCaptureFixture) -> None:
    problem = moereg.MoEProblem(num_experts=4, hidden_size=64, intermediate_size=32, top_k=2, dtype="float32")
    weights = make_weights(problem, torch.device("cpu"))
    turned = dataclasses.replace(weights, w13=weights.w13.mT.contiguous().mT)
    call = torch.randn(3, 64), torch.rand(3, 2), torch.tensor([[0, 1], [1, 2], [3, 0]])
    say_once.cache_clear()
    layer, other = moereg.MoELayer(problem, turned), moereg.MoELayer(problem, weights)
    compiled = torch.compile(layer, backend="eager")
    exported = torch.export.export(layer, call).module()
    for _ in range(2):
        for each in (layer, compiled, exported):
            torch.testing.assert_close(each(*call), other(*call), rtol=1e-5, atol=1e-6)
        with torch.no_grad():
            for each in (layer, other):  # The exported program holds the layer's parameters.
                each.w13.mul_(0.5)
    assert "a copy of weights that are not contiguous, got strides {'w13': [4096, 1, 64]}" in caplog.text
