"""Platforms as values, rules that match them, and the probe of the machine at hand.

Everything else takes a `Platform`, so a laptop can ask what another machine would choose.
"""

from moereg.platforms.kinds import KINDS, PlatformKind, register_platform_kind
from moereg.platforms.nvml import gpu_clocks
from moereg.platforms.platform import Platform
from moereg.platforms.probe import installed_versions, probe_platform
from moereg.platforms.rules import PlatformRule, Specificity

__all__ = [
    "KINDS",
    "Platform",
    "PlatformKind",
    "PlatformRule",
    "Specificity",
    "gpu_clocks",
    "installed_versions",
    "probe_platform",
    "register_platform_kind",
]
