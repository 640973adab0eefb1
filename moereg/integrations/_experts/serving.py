"""Serves a live experts module: makes its kernels, keeps them up to date with its parameters, and runs them."""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.nn.utils import parametrize

from moereg.dispatch import Names, select_backend
from moereg.errors import ArgumentError, CompiledCodeError, MoeregError, PicklingError, described
from moereg.integrations._experts.adapters import parameter_of
from moereg.integrations._experts.layouts import LiveExperts, read_experts
from moereg.integrations._experts.packed import stored_in
from moereg.layer.checks import check_call
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.layer.in_place import check_in_place, say_gain
from moereg.layer.one_expert import read_all
from moereg.layer.ranges import Reads
from moereg.layer.train_op import WEIGHTS
from moereg.platforms import platform_of
from moereg.runtime.graph_pools import outside_pools
from moereg.runtime.torch_op import new_handle
from moereg.selection.decide import reading_in_place
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights, PermutedWeights
from moereg.weights.versions import TensorState, are_elsewhere, check_counted, states_of

NAME: Final = "moereg"
"""The name that moereg registers by default."""

NAMES: Final[set[str]] = set()
"""Names under which transformers knows `call`."""

NOT_IN_COMPILED_CODE: Final = (
    "moereg makes kernels outside of compiled code: call moereg.integrations.transformers.prepare(model), or the model "
    "once, before torch.compile(fullgraph=True)"
)

ATTRIBUTE: Final = "_moereg"
"""A plain attribute of the module: no parameter, no buffer, nothing in `state_dict`."""


def refused(module: torch.nn.Module, why: object, name: str = "") -> ArgumentError:
    """The error for a module that is not served: rule, value and cure."""
    place = f" ({name})" if name else ""
    # Patched classes do not check which implementation is set.
    cure = "set_experts_implementation('eager')" if has_interface(module) else f"{_HERE}.restore(model)"
    return ArgumentError(f"moereg does not serve {type(module).__name__}{place}: {why}; {cure} runs it without moereg")


_HERE: Final = "moereg.integrations.transformers"


def has_interface(module: torch.nn.Module) -> bool:
    """Whether transformers' experts interface selects this module's function."""
    # `use_experts_implementation` sets both on every instance.
    return "is_concatenated" in vars(module) and "is_transposed" in vars(module)


def check_servable(module: torch.nn.Module, live: LiveExperts) -> torch.device:
    """Checks the weights and returns their device."""
    hook = getattr(module, "_hf_hook", None)
    for each in getattr(hook, "hooks", (hook,)):
        if getattr(each, "offload", False):
            raise ArgumentError(
                "its weights are offloaded and come and go with each call; load the model with a device_map that keeps "
                "the experts on one device"
            )
    tensors: dict[str, torch.Tensor] = {name: parameter_of(module, name) for name in live.parameters}
    if any(tensor.is_meta for tensor in tensors.values()):
        raise ArgumentError("its weights are on meta, where they have no values; load them first")
    devices = sorted({str(tensor.device) for tensor in tensors.values()})
    if len(devices) > 1:
        raise ArgumentError(f"its weights are on several devices ({', '.join(devices)}); put each layer on one")
    return next(iter(tensors.values())).device


def kinds_of(module: torch.nn.Module) -> tuple[Any, ...]:
    """Values that a plan for a module depends on: its parameters may be converted, moved and replaced."""
    return tuple(
        (type(each), each.dtype, each.device, tuple(each.shape), each.stride()) for each in module.parameters()
    )


def problem_of(
    module: torch.nn.Module, live: LiveExperts, top_k: int, dtype: torch.dtype, batch_invariant: bool
) -> MoEProblem:
    """A module's problem for a call with this top_k and dtype."""
    if not getattr(module, "_is_expert_parallel", False):  # transformers 5.17 has no such flag.
        return live.problem(top_k, dtype, batch_invariant=batch_invariant)
    # Ids from `num_experts` on belong to other ranks, and their number does not matter. But a token may name more
    # experts than this rank has.
    all_experts = max(live.num_experts + 1, top_k)
    return live.problem(top_k, dtype, all_experts=all_experts, batch_invariant=batch_invariant)


def owner_of(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    """The module that has a parameter, and its name there."""
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def _tensor(module: torch.nn.Module, name: str) -> torch.Tensor:
    value: Any = functools.reduce(getattr, name.split("."), module)
    assert isinstance(value, torch.Tensor)
    return value


class ServedExperts:
    """The kernels of one module. Lives in the module; never pickled, since its layouts are for one machine.

    Attributes:
        request: Keywords of `select_backend`.
        batch_invariant: As in `MoEProblem`.
        is_prepared: Whether `prepare` was called, which may copy weights into a kernel's own layout.
        kernels: Kernels by top_k and dtype of hidden states; usually one.
        released: The module's freed parameters, as shapes and dtypes on meta.
        trainers: How it trains, or why it does not, by what that depends on; see `training`.
        declined: Why no kernel reads its weights in place, by top_k, dtype and `kinds_of` the parameters.
    """

    def __init__(
        self, module: torch.nn.Module, request: Mapping[str, Names] | None = None, batch_invariant: bool = False
    ) -> None:
        self.request = dict(request or {})
        self.batch_invariant = batch_invariant
        self.is_prepared = False
        self.kernels: dict[tuple[int, torch.dtype], MoEKernel] = {}
        self.released: dict[str, torch.nn.Parameter] = {}
        self.trainers: dict[tuple[Any, ...], Any] = {}
        self.declined: dict[tuple[Any, ...], str] = {}
        self._module = weakref.ref(module)
        self._live: LiveExperts | None = None
        self._states: tuple[TensorState, ...] = ()
        self._is_stale = False
        self.handle = new_handle(self)

    @property
    def module(self) -> torch.nn.Module:
        """The module that it serves."""
        module = self._module()
        if module is None:
            raise CompiledCodeError("the experts module of compiled code is gone; keep a reference to the model")
        return module

    @property
    def live(self) -> LiveExperts:
        """The meaning of the module's parameters, read once."""
        if self._live is None:
            try:
                self._live = read_experts(self.module)
            except ArgumentError as error:
                raise refused(self.module, error) from error
        return self._live

    def kernel(self, top_k: int, dtype: torch.dtype, selection: Selection | None = None) -> MoEKernel:
        """The kernel for such calls, made from the current parameters if missing.

        The selection decides how to make it; if None, the request.
        """
        key = (top_k, dtype)
        kernel = self.kernels.get(key)
        if kernel is None:
            # The kernel may share tensors that are made here, such as w13 joined from its halves.
            made = functools.partial(self._made, top_k, dtype, selection)
            kernel = self.kernels[key] = outside_pools(made, self._device)
        return kernel

    @property
    def _device(self) -> torch.device:
        if self.released:
            return next(iter(self.kernels.values())).weights.device
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    def check_in_place(self, top_k: int, dtype: torch.dtype) -> None:
        """Makes the kernel of a model that is not prepared, if it is missing."""
        if self.is_prepared or self.released:
            return
        if parametrize.is_parametrized(self.module):
            raise CopiesError("what computes its weights is not one adapter of PEFT's LoRA")
        if (top_k, dtype) in self.kernels:
            return
        key = (top_k, dtype, *kinds_of(self.module))
        if key in self.declined:
            raise CopiesError(self.declined[key])
        try:
            if self.live.dtype and self.live.moved:
                raise CopiesError(self.live.moved)
            self.kernel(top_k, dtype)
        except CopiesError as error:
            self.declined[key] = str(error)
            raise

    def _made(self, top_k: int, dtype: torch.dtype, selection: Selection | None) -> MoEKernel:
        weights = self._weights()
        problem = problem_of(self.module, self.live, top_k, dtype, self.batch_invariant)
        can_be_read = self.live.dtype is not None and self.live.moved is None
        with torch.no_grad():
            if selection is None:
                selection = best = select_backend(problem, platform_of(weights.w13.device), **self.request)
                if can_be_read and not self.is_prepared:
                    selection = reading_in_place(best)
                    say_gain(best, selection, weights, f"{_HERE}.prepare(model)")
                    if selection.winner is None:
                        raise CopiesError("no kernel here reads its weights in place")
            can_be_read = can_be_read and reading_in_place(selection).winner is selection.winner
            if can_be_read:
                try:
                    check_in_place(self._by_field())
                except ArgumentError as error:
                    raise CopiesError(str(error)) from error
            kernel = make_kernel(problem, weights if can_be_read else weights.contiguous(), selection)
        kernel.held.leave_to_owner()  # `follow_parameters` reloads it.
        # If the first choice fails its first check, the next one may have a layout of its own.
        if can_be_read and kernel.held.reads_in_place:
            kernel.held.read_from(functools.partial(_read_by, self._module, self.live.parameters))
        elif not self.is_prepared and kernel.weights.copied_from(weights):
            raise CopiesError("no kernel here reads its weights in place")
        return kernel

    def dtype_of(self, hidden_states: torch.Tensor) -> torch.dtype:
        """The dtype that hidden states are computed in."""
        return getattr(torch, self.live.dtype) if self.live.dtype else hidden_states.dtype

    def tensors(self) -> list[torch.Tensor]:
        """The tensors with the module's parameters, in the order of its meaning of them."""
        return [each for name in self.live.parameters for each in stored_in(_tensor(self.module, name))]

    def _by_field(self) -> dict[str, torch.Tensor]:
        """The same, where they are canonical."""
        return dict(zip(WEIGHTS, self.tensors(), strict=False))

    def forget(self) -> None:
        """Makes the next call read all parameters again, whether they changed or not."""
        self._is_stale = True

    def _weights(self) -> ExpertWeights:
        if self.released:
            return self.canonical_weights()
        try:
            check_servable(self.module, self.live)
            return self.live.canonical(self.module)
        except MoeregError as error:
            raise refused(self.module, error) from error

    def follow_parameters(self) -> None:
        """Drops kernels whose parameters moved, and reloads those whose parameters were written."""
        module = self.module
        self.settle()
        if self.released:
            return
        names = self.live.parameters  # Raises a clear error for unusual tensors.
        in_place = [kernel for kernel in self.kernels.values() if kernel.held.is_borrowed]
        if in_place:
            if not in_place[0].held.fits(self._by_field()):
                self._live = None  # Sizes and dtypes may have changed.
                self.kernels.clear()
            if len(in_place) == len(self.kernels) or not self.kernels:
                return
        _follow_writers()
        try:
            states = states_of(each for name in names for each in stored_in(_tensor(module, name)))
        except (AttributeError, AssertionError, RuntimeError) as error:
            raise refused(module, f"its parameters changed ({described(error)})") from error
        before = self._states
        # The same check as `parametrize.is_parametrized`, in a tenth of its time.
        if any("parametrizations" in owner_of(module, name)[0]._modules for name in names):
            self._is_stale = True  # Each read computes a new tensor, maybe at an old one's address.
        if not self._is_stale:
            check_counted(before, states, f"call {_HERE}.refresh(model) after such writes")
        if states == before and not self._is_stale:
            return
        if before and are_elsewhere(before, states):
            self._live = None  # Sizes and dtypes may have changed.
            self.kernels.clear()
        elif self.kernels:
            # In place, so that CUDA graphs see the new weights. Tensors shared with the parameters are up to date.
            weights = self._weights()
            for kernel in self.kernels.values():
                kernel.reload(weights, write_shared=True)
        # Set only now, so that refused weights are refused at every call.
        self._states, self._is_stale = states, False

    def settle(self) -> None:
        """If freed parameters were set again, takes those and restores the layer's others."""
        if any(_held(self.module, name) is not None for name in self.released):
            self.give_back()
            self._live = None
            self.kernels.clear()

    @torch.inference_mode(False)  # They may train later.
    def give_back(self) -> None:
        """Restores freed parameters from the kernel; ones that were set in the meantime stay."""
        if not self.released:
            return
        module, live = self.module, self.live
        assert live.stored is not None
        for name, value in live.stored(self.canonical_weights()).items():
            if _held(module, name) is None:
                owner, attribute = owner_of(module, name)
                owner._parameters[attribute] = torch.nn.Parameter(
                    value.contiguous(), requires_grad=self.released[name].requires_grad
                )
        vars(module).pop("_apply", None)  # See `memory.release`.
        self.released = {}
        self._states = states_of(_tensor(module, name) for name in live.parameters)

    def canonical_weights(self) -> ExpertWeights:
        """Reads canonical weights back from a kernel, after the module's own were freed."""
        return read_all(next(iter(self.kernels.values())).weights)

    def run(
        self,
        hidden_states: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        tensors: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """Runs the module on [..., H] and [T,K] of any float dtype; ids outside of its experts add nothing.

        In compiled code, `tensors` are the parameters of this call, which a kernel that reads in place takes.
        """
        self.follow_parameters()
        live = self.live
        dtype = self.dtype_of(hidden_states)
        self.check_in_place(topk_ids.shape[-1], dtype)
        kernel = self.kernel(topk_ids.shape[-1], dtype)
        rows = hidden_states.detach().reshape(-1, hidden_states.shape[-1]).to(dtype).contiguous()
        ids = topk_ids.reshape(rows.shape[0], topk_ids.shape[-1])
        if kernel.problem.is_expert_parallel:
            ids = torch.where(ids < live.num_experts, ids, -1)
        # A router's ids fit int32, so converting here saves the kernel's launch to clamp them.
        ids = ids.to(torch.int32)
        weights = topk_weights.detach().reshape(ids.shape).to(torch.float32).contiguous()
        ids = ids.contiguous()
        if tensors and kernel.held.is_borrowed:
            check_call(kernel.problem, rows.device, rows, weights, ids, None)
            reads = Reads(PermutedWeights.in_place(dict(zip(WEIGHTS, tensors, strict=False))), kernel.expert_map)
            out = torch.empty_like(rows)
            if len(rows):
                kernel.check_and_run(rows, weights, ids, out, True, reads)
        else:
            out = kernel(rows, weights, ids)
        return out.reshape(hidden_states.shape).to(hidden_states.dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> ServedExperts | None:
        module = memo.get(id(self._module()))
        if module is None:
            return None  # Only the attribute was copied, not the module.
        served = ServedExperts(module, self.request, self.batch_invariant)
        served.is_prepared = self.is_prepared
        if self.released:  # Otherwise its first call makes kernels from the copied parameters.
            served.released, served._live = dict(self.released), self._live
            served.kernels = copy.deepcopy(self.kernels, memo)
        return served

    def __reduce__(self) -> tuple[Any, ...]:
        if self.released:
            raise PicklingError(
                "the weights of these experts are only in the layout of this machine's kernel; "
                "call moereg.integrations.transformers.restore(model) first, or save model.state_dict()"
            )
        return (_nothing, ())


_WRITERS: Final = (
    ("peft.tuners.lora.layer", "ParamWrapper", "merge"),
    ("peft.tuners.lora.layer", "ParamWrapper", "unmerge"),
    ("trl.trainer.callbacks", "SyncRefModelCallback", "_sync_target_model"),
)
"""Functions of other libraries that write parameters through `.data`, by module, class and name."""


def _follow_writers() -> None:
    """Makes the functions that are imported mark the experts of models that they are given."""
    for module, kind, name in _WRITERS:
        owner = getattr(sys.modules.get(module), kind, None)
        write = vars(owner).get(name) if isinstance(owner, type) else None
        function = getattr(write, "__func__", write)
        if function is None or hasattr(function, "_is_moereg"):
            continue
        marking = _marking(function)
        setattr(owner, name, staticmethod(marking) if isinstance(write, staticmethod) else marking)


def _marking(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def written(*arguments: Any, **named: Any) -> Any:
        try:
            return write(*arguments, **named)
        finally:
            for model in arguments:
                for each in model.modules() if isinstance(model, torch.nn.Module) else ():
                    if (found := served(each)) is not None:
                        found.forget()

    written._is_moereg = True  # type: ignore[attr-defined]
    return written


class CopiesError(ArgumentError):
    """A kernel would copy weights that nobody asked it to copy; the text is a clause."""


def _read_by(module: weakref.ref[torch.nn.Module], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The tensors that a kernel in place reads: a module's parameters as they are at a call."""
    found = module()
    assert found is not None, "its kernel lives in the module"
    return {name: _tensor(found, parameter) for name, parameter in zip(WEIGHTS, names, strict=False)}


def _nothing() -> None:
    """Replaces the kernels in a pickled module."""


def served(module: torch.nn.Module) -> ServedExperts | None:
    """The kernels of a module, if it has any."""
    found: ServedExperts | None = getattr(module, ATTRIBUTE, None)
    return found


def attach(module: torch.nn.Module, made: ServedExperts | None = None) -> ServedExperts:
    """Attaches kernels to a module; if `made` is None, existing ones stay."""
    found = served(module)
    if made is not None or found is None:
        found = ServedExperts(module) if made is None else made
        setattr(module, ATTRIBUTE, found)
        if not getattr(module, _HOOKED, False):
            setattr(module, _HOOKED, True)
            module.register_load_state_dict_post_hook(_after_load)
    return found


_HOOKED: Final = "_moereg_follows_load"


def _after_load(module: torch.nn.Module, _: Any) -> None:
    # Tensors made in inference mode do not record writes.
    found = served(module)
    if found is not None:
        found.forget()


def _held(module: torch.nn.Module, name: str) -> torch.nn.Parameter | None:
    owner, attribute = owner_of(module, name)
    return owner._parameters.get(attribute)


def detach(module: torch.nn.Module) -> None:
    """Drops a module's kernels and all of our hooks, so that its pickles do not need moereg."""
    if served(module) is None:
        return
    for hooks in (
        module._forward_pre_hooks,
        module._state_dict_hooks,
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
    ):
        for key, hook in list(hooks.items()):
            # torch wraps some hooks, and copies of the wrapper have no `__module__`.
            if getattr(getattr(hook, "hook", hook), "__module__", "").startswith("moereg."):
                del hooks[key]
    for name in [name for name in vars(module) if name.startswith(ATTRIBUTE)]:
        delattr(module, name)
