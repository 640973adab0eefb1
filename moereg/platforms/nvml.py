"""Queries NVML, the driver's C library, about the first visible NVIDIA GPU. Does not initialize CUDA."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any, NamedTuple


class GpuFacts(NamedTuple):
    """The facts of a GPU that selection reads.

    Attributes:
        major, minor: Compute capability.
        name: The driver's name for it.
        memory_bytes: Memory of the device.
    """

    major: int
    minor: int
    name: str
    memory_bytes: int


def gpu_facts() -> GpuFacts | None:
    """Facts about the first visible GPU; None if NVML is missing or does not answer."""
    with _first_visible() as found:
        if found is None:
            return None
        nvml, handle = found
        major, minor = ctypes.c_int(), ctypes.c_int()
        name = ctypes.create_string_buffer(96)
        memory = (ctypes.c_ulonglong * 3)()
        results = (
            nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)),
            nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(96)),
            nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)),
        )
        if any(results):
            return None
        return GpuFacts(major.value, minor.value, name.value.decode(), int(memory[0]))


class GpuSettings(NamedTuple):
    """Facts and settings that decide a GPU's speed.

    Attributes:
        cores: Number of cores, over all multiprocessors; 0 if the driver does not say.
        power_limit_w: The enforced limit, in W; 0 if the driver does not say.
        mig: Whether the GPU is divided into instances.
        driver: Version of the driver.
    """

    cores: int
    power_limit_w: int
    mig: bool
    driver: str


def gpu_settings() -> GpuSettings:
    """Settings of the first visible GPU; zeros and an empty text without NVML."""
    with _first_visible() as found:
        if found is None:
            return GpuSettings(0, 0, False, "")
        nvml, handle = found
        cores, milliwatts, mig, pending = (ctypes.c_uint() for _ in range(4))
        driver = ctypes.create_string_buffer(96)
        # A query that a GPU does not support leaves its value at 0.
        nvml.nvmlDeviceGetNumGpuCores(handle, ctypes.byref(cores))
        nvml.nvmlDeviceGetEnforcedPowerLimit(handle, ctypes.byref(milliwatts))
        nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(mig), ctypes.byref(pending))
        nvml.nvmlSystemGetDriverVersion(driver, ctypes.c_uint(96))
        return GpuSettings(cores.value, milliwatts.value // 1000, mig.value == 1, driver.value.decode())


def gpu_clocks() -> dict[str, int]:
    """Current clocks and power of the first visible GPU, as far as NVML reports them.

    Returns:
        `sm_mhz`, `max_sm_mhz`, `memory_mhz`, `max_memory_mhz`, `power_w` and `power_limit_w`; empty without NVML.
    """
    clocks: dict[str, int] = {}
    with _first_visible() as found:
        if found is None:
            return clocks
        nvml, handle = found
        value = ctypes.c_uint()
        for name, domain in (("sm", 1), ("memory", 2)):  # NVML's numbers for clock domains.
            if nvml.nvmlDeviceGetClockInfo(handle, domain, ctypes.byref(value)) == 0:
                clocks[f"{name}_mhz"] = value.value
            if nvml.nvmlDeviceGetMaxClockInfo(handle, domain, ctypes.byref(value)) == 0:
                clocks[f"max_{name}_mhz"] = value.value
        if nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(value)) == 0:
            clocks["power_w"] = value.value // 1000
        if nvml.nvmlDeviceGetEnforcedPowerLimit(handle, ctypes.byref(value)) == 0:
            clocks["power_limit_w"] = value.value // 1000
    return clocks


@contextlib.contextmanager
def _first_visible() -> Iterator[tuple[Any, Any] | None]:
    """NVML and its handle for the first visible device, or None if either is missing."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        handle = ctypes.c_void_p()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
        if visible.isdigit():
            # By default CUDA numbers devices fastest first; with a single model of GPU both orders agree.
            code = nvml.nvmlDeviceGetHandleByIndex_v2(int(visible), ctypes.byref(handle))
        else:
            code = nvml.nvmlDeviceGetHandleByUUID(visible.encode(), ctypes.byref(handle))
        yield (nvml, handle) if code == 0 else None
    finally:
        nvml.nvmlShutdown()
