"""What a model holds, and giving back the canonical weights of experts whose kernels hold them in their own layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from moereg.errors import MoeregError
from moereg.integrations._experts.serving import NAMES, ServedExperts, served
from moereg.weights import PermutedWeights

__all__ = ["give_back", "held_bytes", "release"]


def held_bytes(model: torch.nn.Module) -> int:
    """Bytes of parameters, buffers and kernels' weights together; what is shared counts once."""
    storages: dict[object, int] = {}
    for tensor in _tensors(model):
        if tensor.layout != torch.strided:  # Opaque tensors have no storage that torch shows.
            storages[id(tensor)] = tensor.numel() * tensor.element_size()
        elif not tensor.is_meta:
            storage = tensor.untyped_storage()
            storages[(str(tensor.device), storage.data_ptr())] = storage.nbytes()
    return sum(storages.values())


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        found = served(module)
        for kernel in found.kernels.values() if found is not None else ():
            yield from _flat(kernel.weights)


def _flat(weights: PermutedWeights) -> Iterator[torch.Tensor]:
    for value in (*weights.per_expert.values(), *weights.shared.values()):
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from value


def release(found: ServedExperts) -> str | None:
    """Frees the parameters of a module whose kernel holds their values.

    Its `state_dict` then has them all the same, out of the kernel, and so has another experts function.

    Returns:
        Why they are kept; None if they are freed.
    """
    module, live = found.module, found.live
    if found.released:
        return None
    if live.stored is None:
        return "they are quantized in a layout that is not written back"
    if len(found.kernels) > 1:
        return "several kernels hold them"
    try:
        stored = live.stored(found.restored())
    except MoeregError as error:
        return str(error)
    for name, value in stored.items():
        owner, attribute = _owner(module, name)
        parameter = owner._parameters[attribute]
        # Bits, not numbers: NaN is not equal to itself.
        if parameter is None or not _same_bits(parameter.detach(), value):
            return f"{name} does not come back from the kernel's layout bit for bit"
    for name in stored:
        owner, attribute = _owner(module, name)
        parameter = owner._parameters[attribute]
        assert parameter is not None
        found.released[name] = torch.nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        owner._parameters[attribute] = None
    if not getattr(module, _HOOKED, False):
        setattr(module, _HOOKED, True)
        module.register_state_dict_post_hook(_save)
        module.register_load_state_dict_pre_hook(_before_load)
        module.register_forward_pre_hook(_before_forward)
    return None


def give_back(found: ServedExperts) -> None:
    """Puts freed parameters back, with the values that the kernel has."""
    if not found.released:
        return
    module, live = found.module, found.live
    assert live.stored is not None
    for name, value in live.stored(found.restored()).items():
        owner, attribute = _owner(module, name)
        owner._parameters[attribute] = torch.nn.Parameter(
            value.contiguous(), requires_grad=found.released[name].requires_grad
        )
    found.released = {}
    found.follow()


_HOOKED: Final = "_moereg_hooked"


def _owner(module: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
    return torch.equal(one.contiguous().view(integers), other.contiguous().view(integers))


def _save(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    found = served(module)
    if found is None or not found.released:
        return
    assert found.live.stored is not None
    for name, value in found.live.stored(found.restored()).items():
        state_dict[prefix + name] = value


def _before_load(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    found = served(module)
    if found is not None and any(prefix + name in state_dict for name in found.released):
        give_back(found)


def _before_forward(module: torch.nn.Module, _: Any) -> None:
    found = served(module)
    if found is None or not found.released:
        return
    config = getattr(module, "config", None)
    if config is not None and getattr(config, "_experts_implementation", None) not in NAMES:
        give_back(found)
