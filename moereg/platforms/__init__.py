"""Platforms as values, rules that match them, and the probe of this machine.

All other code takes a `Platform`, so a laptop can ask what another machine would choose.
"""

from moereg.platforms.claims import current_platform, platform_of, read_platform
from moereg.platforms.devices import is_device_type, torch_device
from moereg.platforms.kinds import KINDS, PlatformKind, register_platform_kind
from moereg.platforms.nvml import gpu_clocks
from moereg.platforms.platform import Platform
from moereg.platforms.probe import installed_versions, probe_cpu, probe_platform, probe_settings
from moereg.platforms.products import PRODUCTS, platform_of_product
from moereg.platforms.rules import PlatformRule

__all__ = [
    "KINDS",
    "PRODUCTS",
    "Platform",
    "PlatformKind",
    "PlatformRule",
    "current_platform",
    "gpu_clocks",
    "installed_versions",
    "is_device_type",
    "platform_of",
    "platform_of_product",
    "probe_cpu",
    "probe_platform",
    "probe_settings",
    "read_platform",
    "register_platform_kind",
    "torch_device",
]
