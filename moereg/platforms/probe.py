"""Probes this machine's platform and installed packages."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import os
import pathlib
import platform as host
import re
import runpy
import sys
from typing import Final

import importlib_metadata
import torch
from packaging.utils import canonicalize_name

from moereg.platforms.nvml import gpu_facts, gpu_settings
from moereg.platforms.platform import Platform
from moereg.runtime.python_process import num_cores

_NAME: Final = re.compile(r"^name:[ \t]*(\S+)", re.IGNORECASE | re.MULTILINE)
_VERSION: Final = re.compile(r"^version:[ \t]*(\S+)", re.IGNORECASE | re.MULTILINE)

# Names of Triton in PyTorch's builds for AMD GPUs and its nightly builds.
_TRITON: Final = ("triton-rocm", "pytorch-triton-rocm", "pytorch-triton")


@functools.lru_cache(maxsize=1)
def probe_platform() -> Platform:
    """The platform of this machine, probed once per process. Initializes no device if NVML exists.

    Reports an accelerator if this torch build can use it. NVML describes a CUDA device, or torch if NVML is missing.
    CUDA_VISIBLE_DEVICES is respected.
    """
    cuda, hip = _torch_built_for()
    if hip and torch.cuda.device_count() > 0:
        properties = torch.cuda.get_device_properties(0)
        arch, memory = properties.gcnArchName.split(":")[0], properties.total_memory
        return Platform("rocm", arch, properties.name, memory, installed_versions(), probed=True)
    if cuda and torch.cuda.device_count() > 0:
        facts = gpu_facts()
        if facts is None:
            # Without NVML only the CUDA runtime can tell, which initializes CUDA.
            properties = torch.cuda.get_device_properties(0)
            facts = properties.major, properties.minor, properties.name, properties.total_memory
        major, minor, name, memory = facts
        return Platform("cuda", f"sm{major}{minor}", name, memory, installed_versions(), probed=True)
    return probe_cpu()


def _torch_built_for() -> tuple[str | None, str | None]:
    """Versions of CUDA and ROCm that torch was built for, without loading torch if its version file has them."""
    if "torch.version" not in sys.modules:
        with contextlib.suppress(Exception):  # An unusual installation, so ask torch itself.
            found = importlib.machinery.PathFinder.find_spec("torch")
            assert found is not None and found.origin is not None
            values = runpy.run_path(str(pathlib.Path(found.origin).with_name("version.py")))
            return values["cuda"], values["hip"]
    return torch.version.cuda, torch.version.hip


@functools.lru_cache(maxsize=1)
def probe_cpu() -> Platform:
    """This machine without its accelerators, probed once per process."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Platform("cpu", host.machine().lower(), _cpu_name(), memory, installed_versions(), probed=True)


def probe_settings(platform: Platform) -> tuple[int, int, bool, str]:
    """As `gpu_settings` gives them, of a probed platform's device; of a CPU the processors this process may use."""
    if platform.kind == "cuda":
        return gpu_settings()
    return num_cores() if platform.kind == "cpu" else 0, 0, False, ""


def installed_versions() -> dict[str, str]:
    """Versions of installed distributions by canonical name; as for imports, the first on the path counts.

    Includes `triton` installed under another name.
    """
    found: dict[str, str] = {}
    for distribution in importlib_metadata.distributions():
        try:
            # Read two header lines, since parsing the metadata of some 200 distributions takes a tenth of a second.
            text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
        except (OSError, UnicodeDecodeError):
            continue  # An interrupted uninstall leaves no metadata, a damaged disk unreadable metadata.
        header = text.partition("\n\n")[0]
        name, version = _NAME.search(header), _VERSION.search(header)
        if name and version:
            found.setdefault(canonicalize_name(name[1]), version[1])
    for other in filter(found.__contains__, _TRITON):
        found.setdefault("triton", found[other])
    return found


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return host.processor() or host.machine()
