"""A platform's torch device, if this torch has it."""

from __future__ import annotations

import torch

from moereg.errors import UnknownPlatformError, described, is_lack_of_memory
from moereg.platforms.platform import Platform


def torch_device(platform: Platform, device_type: str | None = None, *, touch: bool = True) -> torch.device:
    """The device for a platform's layers here.

    Args:
        platform: The platform.
        device_type: torch's device type, if a backend reads tensors of another than the platform's.
        touch: Whether to try the device, which initializes it. Otherwise, such as before a fork, only checks its name.

    Raises:
        UnknownPlatformError: This torch has no such device. Some kinds need an extension of torch, which brings it.
    """
    wanted = device_type or platform.device_type
    try:
        device = torch.device(wanted)
        if touch:
            torch.empty(0, device=device)
    except Exception as error:  # By device type Runtime-, Assertion- or NotImplementedError.
        if is_lack_of_memory(error):
            raise
        raise UnknownPlatformError(
            f"layers of platform {platform} live on torch's device type {wanted!r}, which torch {torch.__version__} "
            f"cannot use here: {described(error)}; {_cure(platform, wanted)}"
        ) from error
    return device


def is_device_type(name: str) -> bool:
    """Whether torch knows a device type of that name, with or without such a device."""
    try:
        return torch.device(name).type == name
    except RuntimeError:
        return False


def _cure(platform: Platform, device_type: str) -> str:
    if not is_device_type(device_type):
        cure = "import the extension of torch that brings it, or name another platform such as cpu"
    elif platform.claimed_by:
        cure = "name another platform such as cpu"
    else:
        cure = "use a build of torch that can, or name another platform such as cpu"
    if platform.claimed_by:
        cure += (
            f"; {platform.claimed_by} claims that this machine is {platform}: where it is not, do without platform "
            "plugins by MOEREG_PLUGINS=platforms:"
        )
    return cure
