"""The machine that a command runs layers on."""

from __future__ import annotations

import contextlib

import torch

from moereg.backend_calls import device_types
from moereg.cli._options import UsageError
from moereg.discovery import current_platform, load_backends
from moereg.platforms import Platform, probe_cpu, torch_device
from moereg.selection import Selection

__all__ = ["layer_device", "platform_at_hand"]


def platform_at_hand(command: str, name: str | None) -> Platform:
    """This machine as a platform; a named platform must be this machine or its CPU.

    Args:
        command: Which asks, for the message.
        name: What `--platform` says.

    Raises:
        UsageError: The name is another machine's.
        UnknownPlatformError: No machine has that name.
    """
    load_backends()  # A plugin's kind of platform is known once it is loaded.
    named = None if name is None else Platform.from_name(name)
    # The CPU is there whichever accelerator this machine has, and whoever claims to know.
    here = probe_cpu() if named is not None and named.kind == "cpu" else current_platform()
    if named is None or (named.kind == here.kind and named.arch in ("", here.arch)):
        return here
    raise UsageError(
        f"{command} needs the machine itself, and this one is {here.kind}:{here.arch}, not {name}; "
        f"moereg explain --platform {name} answers what would be chosen there"
    )


def layer_device(selection: Selection) -> torch.device:
    """The device on which a command builds the layer that was selected.

    Raises:
        UnknownPlatformError: This torch has no such device.
    """
    platform, winner = selection.platform, selection.winner
    types: tuple[str, ...] = ()
    if winner is not None and winner.cell is not None:
        with contextlib.suppress(Exception):  # It fails again, under the backend's name, once the layer is built.
            types = device_types(selection, winner.cell.experts)
    # A backend may read another device's tensors, as with DLPack.
    return torch_device(platform, None if not types or platform.device_type in types else types[0])
