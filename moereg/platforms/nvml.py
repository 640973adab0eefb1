"""Queries NVML, the driver's C library, about the first visible NVIDIA GPU. Does not initialize CUDA."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any


def gpu_facts() -> tuple[int, int, str, int] | None:
    """Compute capability, the driver's name and bytes of memory; None if NVML is missing or does not answer."""
    found = _ask(
        capability=lambda nvml, gpu: nvml.nvmlDeviceGetCudaComputeCapability(gpu),
        name=lambda nvml, gpu: nvml.nvmlDeviceGetName(gpu),
        memory=lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total,
    )
    return (*found["capability"], found["name"], found["memory"]) if len(found) == 3 else None


def gpu_settings() -> tuple[int, int, bool, str]:
    """Cores, enforced power limit in W, whether MIG divides it, and the driver's version; zeros and "" if unknown."""
    found = _ask(
        cores=lambda nvml, gpu: nvml.nvmlDeviceGetNumGpuCores(gpu),
        power_limit_w=lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) // 1000,
        mig=lambda nvml, gpu: nvml.nvmlDeviceGetMigMode(gpu)[0] == 1,
        driver=lambda nvml, gpu: nvml.nvmlSystemGetDriverVersion(),
    )
    return found.get("cores", 0), found.get("power_limit_w", 0), found.get("mig", False), found.get("driver", "")


def gpu_clocks() -> dict[str, int]:
    """Current clocks and power of the first visible GPU, as far as NVML reports them.

    Returns:
        `sm_mhz`, `max_sm_mhz`, `memory_mhz`, `max_memory_mhz`, `power_w` and `power_limit_w`; empty without NVML.
    """
    return _ask(
        sm_mhz=lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
        max_sm_mhz=lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_SM),
        memory_mhz=lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM),
        max_memory_mhz=lambda nvml, gpu: nvml.nvmlDeviceGetMaxClockInfo(gpu, nvml.NVML_CLOCK_MEM),
        power_w=lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) // 1000,
        power_limit_w=lambda nvml, gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) // 1000,
    )


def _ask(**queries: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """NVML's answers about the first visible GPU, without those that it does not support; empty without NVML."""
    import pynvml  # Takes some 20 ms, which only a machine with a GPU has a use for.

    answers: dict[str, Any] = {}
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
            if visible.isdigit():
                # By default CUDA numbers devices fastest first; with a single model of GPU both orders agree.
                gpu = pynvml.nvmlDeviceGetHandleByIndex(int(visible))
            else:
                gpu = pynvml.nvmlDeviceGetHandleByUUID(visible)
            for name, query in queries.items():
                # An older distribution of the same name lacks some.
                with contextlib.suppress(pynvml.NVMLError, AttributeError):
                    answers[name] = query(pynvml, gpu)
        finally:
            pynvml.nvmlShutdown()
    return answers
