"""The differentiable torch op by which layers train: opaque to compiled code, with a backward op of its own.

What no layer trains is joined to autograd's graph too, where a backward pass raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from moereg.errors import GradientError
from moereg.experts import SavedShapes
from moereg.kernels.sizes import GUARD_ROWS
from moereg.runtime.graph_pools import in_compiled_code
from moereg.runtime.torch_op import layer_of
from moereg.spec.problem import MoEProblem
from moereg.weights.adapters import ADAPTER_TENSORS, ExpertAdapters

WEIGHTS: Final = ("w13", "w2", "w13_bias", "w2_bias")
"""Tensors that train as `weights`."""

_TENSORS: Final = (*WEIGHTS, *ADAPTER_TENSORS)
_INPUTS: Final = ("hidden_states", "topk_weights", "topk_ids", *_TENSORS)
_DIFFERENTIABLE: Final = ("hidden_states", "topk_weights", *_TENSORS)
_NUM_OTHERS: Final = 4
"""Arguments after the tensors: the handle, two scalings, and the saved bytes."""
_ALIGNMENT: Final = 256
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)

_LIBRARY: Final = torch.library.Library("moereg", "FRAGMENT")
_ARGUMENTS: Final = (
    f"Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, {', '.join(f'Tensor? {name}' for name in _TENSORS)}, "
    "Tensor handle, float w13_scaling, float w2_scaling"
)
_LIBRARY.define(
    f"moe_train({_ARGUMENTS}, SymInt saved_bytes) -> (Tensor out, Tensor saved)",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_LIBRARY.define(
    f"moe_train_backward(Tensor grad_out, Tensor saved, {_ARGUMENTS}, bool[] wanted) "
    f"-> ({', '.join(f'Tensor {name}_grad' for name in _DIFFERENTIABLE)})",
    tags=(torch.Tag.needs_fixed_stride_order,),
)


def trains(
    problem: MoEProblem,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    weights: Mapping[str, torch.Tensor | None],
    adapters: ExpertAdapters | None = None,
) -> bool:
    """Whether autograd follows tensors of a call, and the problem names all that it follows."""
    if not problem.gradients or not torch.is_grad_enabled():
        return False
    follows = {
        "hidden_states": hidden_states.requires_grad,
        "topk_weights": topk_weights.requires_grad,
        "weights": any(each is not None and each.requires_grad for each in weights.values()),
        "adapters": adapters is not None and any(each.requires_grad for each in adapters.tensors().values()),
    }
    return any(follows.values()) and all(
        name in problem.gradients for name, is_followed in follows.items() if is_followed
    )


def run_training(
    problem: MoEProblem,
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    weights: Mapping[str, torch.Tensor | None],
    handle: torch.Tensor,
    adapters: ExpertAdapters | None = None,
) -> torch.Tensor:
    """Runs a layer on its owner's tensors, so that a backward pass to its output computes what autograd follows.

    Args:
        problem, hidden_states, topk_weights, topk_ids: As in `MoEKernel`, checked.
        weights: Canonical tensors to read, and to train if they require it, by name; none if the kernel has its own.
        handle: From `new_handle`, of a layer whose `training_kernel` gives its kernel.
        adapters: Of the experts, in the problem's dtype, contiguous; they may be read without gradients too.
    """
    adapters = adapters or ExpertAdapters()
    tensors = {**weights, **adapters.tensors()}
    call = hidden_states, topk_weights, topk_ids, *(tensors.get(name) for name in _TENSORS)
    scalings, saved_bytes = (adapters.w13_scaling, adapters.w2_scaling), 0
    if adapters.tensors() or trains(problem, hidden_states, topk_weights, weights):
        saved_bytes = most_saved_bytes(problem, len(hidden_states))
    out: torch.Tensor
    if _needs_op(call):
        out = torch.ops.moereg.moe_train(*call, handle, *scalings, saved_bytes)[0]
    else:
        out = _Train.apply(*call, handle, *map(float, scalings), saved_bytes)[0]  # type: ignore[no-untyped-call]
    if out.requires_grad and not torch.compiler.is_compiling():
        # The graph keeps the layer: a caller may drop it before the backward pass.
        out.grad_fn.moereg_layer = layer_of(handle)  # type: ignore[union-attr]
    return out


def most_saved_bytes(problem: MoEProblem, num_tokens: int) -> int:
    """Bytes that a forward pass may keep: a bound by sizes alone, since compiled code does not know the kernel yet."""
    columns = problem.activation.num_halves * problem.intermediate_size + 2 * problem.adapter_rank
    row = columns * problem.torch_dtype.itemsize
    num_routes = num_tokens * problem.top_k
    guard = min(num_routes, GUARD_ROWS) * row
    return num_routes * (row + 24) + guard + problem.num_local_experts * 32 + 16 * _ALIGNMENT


def cut_saved(saved: torch.Tensor, shapes: SavedShapes) -> dict[str, torch.Tensor]:
    """The tensors inside of the bytes that a forward pass keeps, by name; empty if there is not enough room."""
    tensors, start = {}, 0
    for name, (shape, dtype) in shapes.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        if start + num_bytes > saved.numel():
            return {}
        tensors[name] = saved[start : start + num_bytes].view(dtype).view(shape)
        start += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    return tensors


class Tokens(NamedTuple):
    """The arguments of a call, which travel together."""

    hidden_states: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor


class CallTensors(NamedTuple):
    """Canonical tensors by name, none for the kernel's own, and adapters; a call reads them, and may train them."""

    weights: dict[str, torch.Tensor]
    adapters: ExpertAdapters | None

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor | None], w13_scaling: float, w2_scaling: float) -> CallTensors:
        """Those of an op's arguments."""
        held = {name: each for name, each in zip(_TENSORS, tensors, strict=True) if each is not None}
        factors: dict[str, Any] = {name: held.pop(name) for name in ADAPTER_TENSORS if name in held}
        adapters = ExpertAdapters(**factors, w13_scaling=w13_scaling, w2_scaling=w2_scaling) if factors else None
        return cls(held, adapters)


def _needs_op(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether torch has to dispatch a call: a compiler, mode or transform looks on, or a tensor is no plain one."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or not all(each is None or (type(each) in _PLAIN and torch._C._has_storage(each)) for each in tensors)
    )


def _apart(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """The tensors, with copies of those that lie where an earlier one does, as in `layer(x).backward(x)`.

    Kernels' launches are recorded by address, and later tensors of the same shapes may lie apart.
    """
    seen: set[int] = set()
    found = []
    for tensor in tensors:
        if tensor is not None and tensor.numel():
            address = tensor.data_ptr()
            tensor = tensor.clone() if address in seen else tensor
            seen.add(address)
        found.append(tensor)
    return found


def _moe_train(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *tensors, handle, w13_scaling, w2_scaling, saved_bytes = arguments
    hidden_states, topk_weights, topk_ids, *tensors = _apart(tensors)
    with in_compiled_code():
        kernel = layer_of(handle).training_kernel()
        saved = torch.empty(saved_bytes, dtype=torch.uint8, device=hidden_states.device)
        parameters = CallTensors.of(tensors, w13_scaling, w2_scaling)
        return kernel.run_saving(Tokens(hidden_states, topk_weights, topk_ids), parameters, saved), saved


def _moe_train_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    grad_out, *tensors, handle, w13_scaling, w2_scaling, wanted = arguments
    grad_out, saved, hidden_states, topk_weights, topk_ids, *tensors = _apart((grad_out.contiguous(), *tensors))
    targets = _targets(hidden_states, topk_weights, tensors, wanted)
    with in_compiled_code():
        kernel = layer_of(handle).training_kernel()
        _check_not_converted(kernel.problem.torch_dtype, hidden_states, tensors)
        kernel.run_backward(
            {
                name: tensor
                for name, tensor, is_wanted in zip(_DIFFERENTIABLE, targets, wanted, strict=True)
                if is_wanted
            },
            grad_out,
            saved,
            Tokens(hidden_states, topk_weights, topk_ids),
            CallTensors.of(tensors, w13_scaling, w2_scaling),
        )
    return targets


def _check_not_converted(
    dtype: torch.dtype, hidden_states: torch.Tensor, tensors: Sequence[torch.Tensor | None]
) -> None:
    place = hidden_states.dtype, hidden_states.device
    for now in ((dtype, place[1]), *((each.dtype, each.device) for each in tensors if each is not None)):
        if now != place:
            raise GradientError(
                "a backward pass reads the parameters of its forward pass, which ran in "
                f"{str(place[0]).removeprefix('torch.')} on {place[1]}, got parameters that were converted since to "
                f"{str(now[0]).removeprefix('torch.')} on {now[1]}; convert a layer before its forward pass or after "
                "its backward pass"
            )


def _targets(
    hidden_states: torch.Tensor, topk_weights: torch.Tensor, tensors: Any, wanted: list[bool]
) -> tuple[torch.Tensor, ...]:
    likes = (hidden_states, topk_weights, *tensors)
    return tuple(
        torch.empty_like(like, memory_format=torch.contiguous_format) if is_wanted else hidden_states.new_empty(0)
        for like, is_wanted in zip(likes, wanted, strict=True)
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, w13_scaling, w2_scaling, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.scaling = (w13_scaling, w2_scaling)
    ctx.save_for_backward(output[1], *tensors)


def _differentiate(ctx: Any, grad_out: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, ...]:
    if grad_out is None:
        return (None,) * (len(_INPUTS) + _NUM_OTHERS)
    needs = dict(zip(_INPUTS, ctx.needs_input_grad, strict=False))
    wanted = [needs[name] for name in _DIFFERENTIABLE]
    saved = ctx.saved_tensors  # Checkpointing allows reading them once.
    # With gradients enabled, somebody may differentiate this pass, and only the op can refuse it.
    is_op = torch.is_grad_enabled() or _needs_op((grad_out, *saved))
    backward = torch.ops.moereg.moe_train_backward if is_op else _moe_train_backward
    found = backward(grad_out, *saved, *ctx.scaling, wanted)
    gradients = {name: each for name, each in zip(_DIFFERENTIABLE, found, strict=True) if needs[name]}
    return *(gradients.get(name) for name in _INPUTS), *(None,) * _NUM_OTHERS


def _refuse(ctx: Any, *gradients: torch.Tensor | None) -> None:
    raise GradientError(
        "moereg computes first gradients only, got a backward pass through a backward pass; call backward without "
        "create_graph=True"
    )


class _Train(torch.autograd.Function):
    """`moe_train` without torch's dispatcher, which is slow for so many arguments."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # A `setup_context` would have torch inspect signatures in each call.
        found = _moe_train(*arguments)
        _keep(ctx, arguments, found)
        return found

    backward = staticmethod(_differentiate)


def _fake_train(hidden_states: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    saved = torch.empty(others[-1], dtype=torch.uint8, device=hidden_states.device)
    return torch.empty_like(hidden_states), saved


def _fake_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    _, _, hidden_states, topk_weights, _, *tensors, _, _, _, wanted = arguments
    return _targets(hidden_states, topk_weights, tensors, wanted)


for _name, _run, _fake in (
    ("moe_train", _moe_train, _fake_train),
    ("moe_train_backward", _moe_train_backward, _fake_backward),
):
    _LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moereg::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd("moereg::moe_train", _differentiate, setup_context=_keep, lib=_LIBRARY)
torch.library.register_autograd("moereg::moe_train_backward", _refuse, lib=_LIBRARY)


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


def reshaped(out: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """An output that nobody else holds, in another shape but as no view, of which FSDP2 warns in results of modules."""
    found: torch.Tensor = torch.ops.aten._unsafe_view.default(out, shape) if out.requires_grad else out.view(shape)
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


_LIBRARY.define("no_gradient(Tensor gradient, SymInt[] shape) -> Tensor")


def _no_gradient(gradient: torch.Tensor, shape: list[int]) -> torch.Tensor:
    raise GradientError(
        f"moereg computes only gradients that MoEProblem(gradients=...) names, got a backward pass to an output of "
        f"{list(gradient.shape)} for another tensor; name it there, infer under torch.no_grad(), or detach the output; "
        "in transformers, moereg.integrations.transformers.restore(model) brings back freed weights, which train"
    )


_LIBRARY.impl("no_gradient", _no_gradient, "CompositeExplicitAutograd")
torch.library.register_fake("moereg::no_gradient", torch.Tensor.new_empty, lib=_LIBRARY)
