"""Counts a model's memory, and frees canonical weights that kernels hold in their own layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from types import MethodType
from typing import Any, Final

import torch
from torch.nn.utils import parametrize

from moereg.errors import ArgumentError, MoeregError
from moereg.integrations._experts.packed import stored_in
from moereg.integrations._experts.serving import NAMES, ServedExperts, owner_of, served
from moereg.weights.unpermute import same_bits


def held_bytes(model: torch.nn.Module, with_kernels: bool = True) -> int:
    """Bytes of parameters, buffers and, unless left out, kernels' weights, counting shared memory once."""
    holders = [found for module in model.modules() if (found := served(module))] if with_kernels else []
    kernels = [kernel for found in holders for kernel in found.kernels.values()]
    of_kernels = (tensor for kernel in kernels for tensor in kernel.weights.flat())
    storages: dict[object, int] = {}
    of_model = (each for tensor in (*model.parameters(), *model.buffers()) for each in stored_in(tensor))
    for tensor in (*of_model, *of_kernels):
        if tensor.layout != torch.strided:  # torch does not expose the storage of opaque tensors.
            storages[id(tensor)] = tensor.numel() * tensor.element_size()
        elif not tensor.is_meta:
            storage = tensor.untyped_storage()
            storages[(str(tensor.device), storage.data_ptr())] = storage.nbytes()
    return sum(storages.values())


def check_can_free(module: torch.nn.Module, name: str) -> None:
    """Checks that nothing else computes with the parameters of the module of that dotted name."""
    is_wrapped = name.rpartition(".")[2] == "base_layer"  # PEFT parametrizes what it wraps during each call.
    if is_wrapped or any(parametrize.is_parametrized(each) for each in module.modules()):
        how = "which an adapter wraps" if is_wrapped else "whose weights are parametrized"
        raise ArgumentError(
            f"free=True needs experts without adapters, got {name or type(module).__name__}, {how}; leave free out, or "
            "merge the adapter first"
        )


def shared_addresses(model: torch.nn.Module) -> frozenset[int]:
    """Addresses of tensors that a model holds more than once, in tied modules."""
    tensors = (each for module in model.modules() for each in (*module._parameters.values(), *module._buffers.values()))
    held = Counter(each.data_ptr() for each in tensors if each is not None and each.layout == torch.strided)
    return frozenset(address for address, count in held.items() if address and count > 1)


def release(found: ServedExperts, shared: Collection[int]) -> str | None:
    """Frees the parameters of a module whose kernel holds their values, and says why it did not.

    `state_dict` and other experts functions then still get them, from the kernel. Operations that change them, such as
    `.to(dtype)` or `load_state_dict`, bring them back as parameters. Those in `shared`, the model's `shared_addresses`,
    are kept: freeing one frees no memory, and it would come back untied.
    """
    module, live = found.module, found.live
    if found.released:
        return None
    if all(kernel.held.reads_in_place for kernel in found.kernels.values()) and live.moved is None:
        return "its kernel reads them in place"
    if live.stored is None:
        return "they are quantized in a layout that is not written back"
    if len(found.kernels) > 1:
        return "several kernels hold them"
    try:
        stored = live.stored(found.canonical_weights())
    except MoeregError as error:
        return str(error)
    for name, value in stored.items():
        owner, attribute = owner_of(module, name)
        parameter = owner._parameters[attribute]
        # Compared as bits, since NaN is not equal to itself.
        if parameter is not None and parameter.data_ptr() in shared:
            return f"the model holds {name} in more than one place"
        if parameter is None or not same_bits(parameter.detach(), value):
            return f"{name} does not come back from the kernel's layout bit for bit"
    for name in stored:
        owner, attribute = owner_of(module, name)
        parameter = owner._parameters[attribute]
        assert parameter is not None
        found.released[name] = torch.nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        owner._parameters[attribute] = None
    # On this instance; `give_back` removes it.
    module._apply = MethodType(_apply, module)  # type: ignore[method-assign]
    if not getattr(module, _HOOKED, False):
        setattr(module, _HOOKED, True)
        module.register_state_dict_post_hook(_save)
        module.register_load_state_dict_pre_hook(_before_load)
        module.register_forward_pre_hook(_before_forward)
    return None


_HOOKED: Final = "_moereg_hooked"


def _apply(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
    """Replaces `nn.Module._apply`, which `.to()` and others call, to bring freed parameters back for conversion."""
    found = served(self)
    if found is not None and found.released:
        device = next(iter(found.kernels.values())).weights.device
        dtypes = {parameter.dtype for parameter in found.released.values()}
        probes = [torch.empty(0, dtype=dtype, device=device) for dtype in dtypes]
        if any(fn(probe) is not probe for probe in probes):
            found.give_back()
            found.kernels.clear()
    applied: torch.nn.Module = type(self)._apply(self, fn, recurse)
    return applied


def _save(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    found = served(module)
    if found is None or not found.released:
        return
    assert found.live.stored is not None
    for name, value in found.live.stored(found.canonical_weights()).items():
        state_dict.setdefault(prefix + name, value)  # A parameter set in the meantime is there already.


def _before_load(
    module: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    strict: bool,
    missing_keys: list[str],
    *_: Any,
) -> None:
    found = served(module)
    if found is None:
        return
    if any(prefix + name in state_dict for name in found.released):
        found.give_back()
    elif strict:
        # torch does not report a parameter that is None as missing.
        missing_keys.extend(prefix + name for name in found.released)


def _before_forward(module: torch.nn.Module, _: Any) -> None:
    found = served(module)
    if found is None or not found.released:
        return
    config = getattr(module, "config", None)
    if config is not None and getattr(config, "_experts_implementation", None) not in NAMES:
        found.give_back()
