"""State of a MoELayer: parameters, the router's tensors, and experts read back from its kernel."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from typing_extensions import Self

from moereg.arguments import check_count, check_instance
from moereg.checkpoints._models import MODEL_TYPES
from moereg.errors import ArgumentError
from moereg.layer.factory import MoEKernel
from moereg.layer.one_expert import read_all
from moereg.layer.train_op import WEIGHTS
from moereg.routing import RouterSpec, language_config
from moereg.runtime.torch_op import new_handle
from moereg.spec.problem import DTYPES, MoEProblem
from moereg.spec.quant_schemes import TENSOR_ROLES
from moereg.weights.adapters import ADAPTER_TENSORS, ExpertAdapters
from moereg.weights.permuted import ExpertWeights
from moereg.weights.versions import TensorState, check_counted, states_of


class CanonicalModule(torch.nn.Module):
    """A module whose parameters are canonical weights; if freed, its kernel holds them.

    Attributes:
        problem: The layer, in its parameters' current dtype.
    """

    problem: MoEProblem
    _handle: torch.Tensor
    _adapter_scaling: tuple[float, float]
    # _seen: State of the parameters that the kernel copied; None if it is out of date.
    # _is_prepared: Whether `prepare` was asked for the best kernel, in whichever layout.
    # _freed: Freed parameters by name, on meta.

    def __init__(self) -> None:
        """Starts without parameters."""
        super().__init__()
        self._kernel: MoEKernel | None = None
        self._seen: tuple[TensorState, ...] | None = None
        self._is_prepared = False
        self._freed: dict[str, torch.Tensor] = {}

    @property
    def weights(self) -> ExpertWeights:
        """Canonical weights: views of the parameters, or read back from the kernel if freed."""
        if self._is_freed:
            assert self._kernel is not None
            return read_all(self._kernel.weights)
        held = {name: value.detach() for name, value in self._held.items()}
        return ExpertWeights.unchecked(held, self.problem.quant)

    def _checked_weights(self) -> ExpertWeights:
        """The same, with values checked where that is cheap, since parameters may have changed arbitrarily."""
        weights = self.weights
        return ExpertWeights(**weights.tensors(), quant=weights.scheme)

    def __delattr__(self, name: str) -> None:
        """Like torch's, but keeps parameters, which `torch.nn.utils.parametrize` would replace."""
        if name in self._parameters:
            raise _taken(name)
        super().__delattr__(name)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Like torch's, but refuses `w13_orig` and the like, with which `torch.nn.utils.prune` begins."""
        if name.endswith("_orig") and name.removesuffix("_orig") in self._parameters:
            raise _taken(name.removesuffix("_orig"))
        super().register_parameter(name, param)

    @property
    def adapters(self) -> ExpertAdapters | None:
        """The experts' adapters, whose tensors are the parameters; None if the layer has none."""
        tensors: dict[str, Any] = {name: self._parameters[name] for name in ADAPTER_TENSORS}
        if all(tensor is None for tensor in tensors.values()):
            return None
        w13_scaling, w2_scaling = self._adapter_scaling
        return ExpertAdapters(**tensors, w13_scaling=w13_scaling, w2_scaling=w2_scaling)

    def _set(self, name: str, tensor: torch.Tensor | None) -> None:
        parameter = None if tensor is None else _as_parameter(tensor)
        if parameter is not None and _TRAINS_AS.get(name) in self.problem.gradients:
            parameter.requires_grad_()
        self.register_parameter(name, parameter)

    @property
    def _held(self) -> dict[str, torch.Tensor]:
        """The canonical parameters, frozen ones included; empty once they are freed."""
        return {name: tensor for name in TENSOR_ROLES if (tensor := self._parameters[name]) is not None}

    @property
    def _in_place(self) -> dict[str, torch.Tensor]:
        """Those that a kernel can read where they are; of quantized or transposed ones it holds a copy."""
        return self._held if self.problem.quant.weight is None and not self._is_copied else {}

    @property
    def _is_copied(self) -> bool:
        # Training them raises and says so.
        return "weights" not in self.problem.gradients and not all(one.is_contiguous() for one in self._held.values())

    @property
    def _untrained(self) -> list[torch.Tensor | None]:
        """The experts' parameters if they are not trained: a gradient that they require is an error."""
        return [] if "weights" in self.problem.gradients else [self._parameters[name] for name in WEIGHTS]

    def _count_writes(self) -> None:
        """Replaces parameters made in inference mode by ordinary ones, which count writes, in the same memory."""
        self._seen = None  # Earlier writes were not counted.
        for name in (*TENSOR_ROLES, *ADAPTER_TENSORS):
            tensor = self._parameters[name]
            if tensor is not None and tensor.is_inference():
                self._set(name, tensor)

    @property
    def _is_freed(self) -> bool:
        return self._parameters["w13"] is None

    def _free(self) -> None:
        """Frees the parameters' memory; from now on the kernel holds the experts."""
        for name, tensor in self.weights.tensors().items():
            self._freed[name] = torch.empty_like(tensor, device="meta")
            self._set(name, None)

    def _state(self, checks: bool = False) -> tuple[TensorState, ...]:
        state = states_of(self._held.values())
        if checks and self._seen is not None:
            check_counted(self._seen, state, "call layer.refresh() after such writes")
        return state

    def _thaw(self) -> None:
        """Restores freed parameters, and drops the kernel that held them."""
        if self._is_freed:
            for name, tensor in self.weights.tensors().items():
                self._set(name, tensor)
            self._freed = {}
        self._kernel = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        dtype = fn(torch.empty(0, dtype=self.problem.torch_dtype, device=self._device)).dtype
        if str(dtype).removeprefix("torch.") not in DTYPES:
            raise ArgumentError(f"a MoELayer computes in {', '.join(DTYPES)}, got {dtype}")
        self._thaw()
        is_plain = self.problem.quant.weight is None
        keep = {
            id(tensor)
            for name, tensor in self._parameters.items()
            if name == "correction_bias" or (name in TENSOR_ROLES and not (is_plain or TENSOR_ROLES[name] == "bias"))
        }

        def apply(tensor: torch.Tensor) -> torch.Tensor:
            return _as_bytes(fn, tensor) if id(tensor) in keep else fn(tensor)

        super()._apply(apply, recurse)  # type: ignore[no-untyped-call]
        self._count_writes()
        self.problem = dataclasses.replace(self.problem, dtype=str(dtype).removeprefix("torch."))
        return self

    @property
    def _device(self) -> torch.device:
        if self._is_freed:
            assert self._kernel is not None
            return self._kernel.weights.device
        w13 = self._parameters["w13"]
        assert w13 is not None
        return w13.device

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._is_freed:
            destination.update({prefix + name: tensor for name, tensor in self.weights.tensors().items()})

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        _, strict, missing_keys, _, error_msgs = others
        if self._is_freed:
            given = {name: state_dict[prefix + name] for name in self._freed if prefix + name in state_dict}
            missing_keys += [prefix + name for name in self._freed if strict and name not in given]
            try:
                self._load_freed(given, prefix)
            except ValueError as error:
                error_msgs.append(str(error))
            taken = {prefix + name for name in given}
            state_dict = {key: value for key, value in state_dict.items() if key not in taken}
        super()._load_from_state_dict(state_dict, prefix, *others)
        self._count_writes()

    def _load_freed(self, given: Mapping[str, torch.Tensor], prefix: str) -> None:
        """Loads freed experts into their kernel, like torch loads parameters: dtypes may differ."""
        for name, value in given.items():
            wanted = self._freed[name].shape
            if value.shape != wanted:
                raise ArgumentError(f"{prefix}{name} must be {list(wanted)}, got {list(value.shape)}")
        if given:
            assert self._kernel is not None
            device = self._device
            tensors = {name: value.detach().to(device, self._freed[name].dtype) for name, value in given.items()}
            if len(tensors) < len(self._freed):
                tensors = {**self.weights.tensors(), **tensors}
            # In place, so that captured graphs see it; the kernel's memory was the parameters'.
            self._kernel.reload(ExpertWeights(**tensors, quant=self.problem.quant), write_shared=True)

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles: canonical tensors without the kernel, which belongs to this machine."""
        state = {**self.__dict__, "_kernel": None, "_seen": None, "_freed": {}}
        del state["_handle"]
        if self._is_freed:
            read = {name: _as_parameter(tensor) for name, tensor in self.weights.tensors().items()}
            state["_parameters"] = {**self._parameters, **read}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._handle = new_handle(self)


def router_tensors(
    problem: MoEProblem,
    router: RouterSpec | None,
    given: Mapping[str, torch.Tensor | None],
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """The router's tensors by name, on the device; zeros for missing ones."""
    held = {name: tensor for name, tensor in given.items() if tensor is not None}
    if router is None:
        if held:
            raise ArgumentError(f"{sorted(held)[0]} needs router=..., which says how it is used")
        return {}
    check_instance("router", router, RouterSpec, "make one with RouterSpec(...), or take load_experts(...).router")
    sizes = (problem.num_experts, problem.top_k, problem.apply_router_weight_on_input)
    if (router.num_experts, router.top_k, router.apply_router_weight_on_input) != sizes:
        raise ArgumentError(f"router must be of the problem, {problem}, got {router}")
    if router.has_expert_scale:
        raise ArgumentError("a MoELayer's router takes no expert_scale; leave router out, and name experts in calls")
    needs_correction = {"correction_bias"} if router.has_correction_bias else set()
    if "correction_bias" in held and not needs_correction:
        raise ArgumentError("this router takes no correction_bias; leave it out, or say has_correction_bias=True")
    rows = {
        "router_weight": (
            (problem.num_experts, problem.hidden_size),
            torch.float32 if router.fp32_logits else problem.torch_dtype,
        ),
        "router_bias": ((problem.num_experts,), problem.torch_dtype),
        "correction_bias": ((problem.num_experts,), torch.float32),
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in rows.items():
        if name in held:
            check_instance(name, held[name], torch.Tensor, f"pass {list(shape)}")
            if (tuple(held[name].shape), held[name].dtype) != (shape, dtype):
                found = f"{list(held[name].shape)} {held[name].dtype}"
                raise ArgumentError(f"{name} must be {list(shape)} {dtype}, got {found}; convert it")
            tensors[name] = held[name].to(device)
        elif name in {"router_weight"} | needs_correction:
            tensors[name] = torch.zeros(shape, dtype=dtype, device=device)
    return tensors


def _taken(name: str) -> ArgumentError:
    return ArgumentError(
        f"a MoELayer keeps its own parameters, got one that takes {name} away, as pruning and parametrizations do; "
        f"write the numbers into {name}, whose writes the kernel follows"
    )


def _as_parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    """The same memory as a parameter that needs no gradient and counts writes."""
    if tensor.is_inference():
        with torch.inference_mode(False):
            place = tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            tensor = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*place)
    return torch.nn.Parameter(tensor.detach(), requires_grad=False)


_TRAINS_AS: Final = {
    **dict.fromkeys(WEIGHTS, "weights"),
    **dict.fromkeys(("router_weight", "router_bias"), "topk_weights"),
    **dict.fromkeys(ADAPTER_TENSORS, "adapters"),
}
"""Names in a problem's `gradients` by parameter."""
_SHARED: Final = re.compile(r"(^|\.)shared_(experts?|mlp)$")
"""transformers' names for shared experts."""


def has_shared_experts(module: torch.nn.Module) -> bool:
    """Whether a live module of transformers also holds experts that take every token."""
    return any(_SHARED.search(name) for name, _ in module.named_modules())


def experts_of(
    module: torch.nn.Module, top_k: int | None, dtype: torch.dtype | None
) -> tuple[MoEProblem, ExpertWeights, dict[str, Any]]:
    """Problem and canonical weights of a live module of transformers, and keywords of its router.

    Tensors are views where nothing moves. Arguments and errors are those of `MoELayer.from_module`.
    """
    from moereg.integrations._experts.blocks import find_experts
    from moereg.integrations._experts.serving import check_servable, served

    check_instance("module", module, torch.nn.Module, "pass one such as model.model.layers[3].mlp")
    if top_k is not None:
        check_count("top_k", top_k)
    name = type(module).__name__
    found = find_experts(module)
    if len(found) != 1:
        raise ArgumentError(
            f"from_module takes a module with the experts of one layer, got {name} with {len(found)}; pass one layer's"
        )
    each = found[0]
    top_k = top_k or each.top_k
    try:
        if each.live is None:
            raise ArgumentError(str(each.refusal))
        if each.block is not None and each.block is not each.module:
            raise ArgumentError(f"{type(each.block).__name__} does more with its experts than call them")
        if (known := served(each.module)) is not None and known.released:
            raise ArgumentError(
                "its weights were freed; moereg.integrations.transformers.restore(model) brings them back"
            )
        check_servable(each.module, each.live)
        if top_k is None:
            raise ArgumentError("nothing says how many experts a token has; pass top_k")
    except ArgumentError as error:
        raise ArgumentError(f"no MoELayer can be made of {name}: {error}") from error
    problem = each.live.problem(top_k, dtype or torch.bfloat16)
    return problem, each.live.canonical(each.module), _router_of(module, each.name, problem)


def _router_of(module: torch.nn.Module, experts: str, problem: MoEProblem) -> dict[str, Any]:
    """Keywords of `MoELayer` for the router beside the experts; none where no config says how it routes."""
    prefix = experts.rpartition(".")[0]
    block = module.get_submodule(prefix)
    configs: list[Any] = [getattr(each, "config", None) for each in (module.get_submodule(experts), block, module)]
    to_dict = next((each.to_dict for each in configs if callable(getattr(each, "to_dict", None))), dict)
    values = language_config(to_dict())
    model = MODEL_TYPES.get(values.get("model_type", ""))
    tensors = {**dict(block.named_parameters()), **dict(block.named_buffers())}
    found = [] if model is None else [f"{name}." for name in model.routers if f"{name}.weight" in tensors]
    if model is None or model.routing or not found:
        return {}
    try:
        router = RouterSpec.from_config(values)
    except ValueError:  # Settings that routing functions do not have.
        return {}
    sizes = (problem.num_experts, problem.top_k, problem.apply_router_weight_on_input)
    biases = [tensors[name] for name in model.correction_biases if name in tensors and router.has_correction_bias]
    if (
        (router.num_experts, router.top_k, router.apply_router_weight_on_input) != sizes
        or tensors[f"{found[0]}weight"].shape != (problem.num_experts, problem.hidden_size)
        or len(biases) != router.has_correction_bias
    ):
        return {}
    bias = tensors.get(f"{found[0]}bias")
    dtype = torch.float32 if router.fp32_logits else problem.torch_dtype
    return {
        "router": router,
        "router_weight": tensors[f"{found[0]}weight"].detach().to(dtype),
        "router_bias": None if bias is None else bias.detach().to(problem.torch_dtype),
        "correction_bias": biases[0].detach().float().reshape(-1) if biases else None,
    }


def zeros_for(problem: MoEProblem, device: torch.device) -> dict[str, torch.Tensor]:
    """Canonical tensors of experts that output zeros; static activation scales are 1, since 0 is invalid."""
    rows = problem.quant.tensor_rows(
        problem.num_local_experts,
        problem.hidden_size,
        problem.intermediate_size,
        problem.activation.num_halves,
        problem.has_bias,
    )
    tensors: dict[str, torch.Tensor] = {}
    for row in rows:
        dtype = problem.torch_dtype if row.dtype is None else row.dtype
        if row.required:
            make = torch.ones if row.role == "activation_scale" else torch.zeros
            tensors[row.name] = make(row.shapes[0], dtype=dtype, device=device)
    return tensors


def _as_bytes(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Applies a function of `nn.Module._apply` to a tensor whose dtype must stay, since torch may convert floats."""
    return fn(tensor.detach().reshape(-1).view(torch.uint8)).view(tensor.dtype).view(tensor.shape)
