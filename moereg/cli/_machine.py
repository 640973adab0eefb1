"""The machine that a command runs layers on."""

from __future__ import annotations

import dataclasses

from moereg.cli._options import UsageError
from moereg.discovery import current_platform, load_backends
from moereg.platforms import Platform

__all__ = ["platform_at_hand"]


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
    here = current_platform()
    if name is None:
        return here
    named = Platform.from_name(name)
    if named.kind == here.kind and named.arch in ("", here.arch):
        return here
    if named.kind == "cpu":
        return dataclasses.replace(named, versions=here.versions, probed=True)
    raise UsageError(
        f"{command} needs the machine itself, and this one is {here}, not {named}; "
        f"moereg explain --platform {named} answers what would be chosen there"
    )
