"""Platforms as values, rules that match them, and the only code that looks at a device.

Everything else takes a `Platform`, so a laptop can ask what another machine would choose.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import platform as host
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import importlib_metadata
from packaging.utils import canonicalize_name

from moereg.arguments import check_count, check_flag, check_instance, check_mapping, check_text
from moereg.errors import ArgumentError, UnknownPlatformError, shown, unknown_name_message

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


@dataclasses.dataclass(frozen=True)
class PlatformKind:
    """A family of machines whose architectures can be compared.

    Attributes:
        name: `cuda`, `rocm`, `cpu`, ... or a plugin's.
        device_type: Torch's name for its devices.
        arch_pattern: Regular expression that an architecture has to match.
        arch_number: Orders architectures; None where `+` and family rules mean nothing.
        family_size: Architectures with the same `arch_number // family_size` are one family; 0 for none.
    """

    name: str
    device_type: str
    arch_pattern: str
    arch_number: Callable[[str], int] | None = None
    family_size: int = 0

    def __post_init__(self) -> None:
        for field in ("name", "device_type", "arch_pattern"):
            check_text(f"{field} of a PlatformKind", getattr(self, field))
        try:
            re.compile(self.arch_pattern)
        except re.error as error:
            raise ArgumentError(
                f"arch_pattern of a PlatformKind must be a regular expression, got {shown(self.arch_pattern)}: {error}"
            ) from None
        if self.arch_number is not None and not callable(self.arch_number):
            raise ArgumentError(
                f"arch_number of a PlatformKind must be a function or None, got {shown(self.arch_number)}"
            )
        check_count("family_size of a PlatformKind", self.family_size, minimum=0)


@functools.cache
def _digits(arch: str) -> int:
    return int("".join(character for character in arch if character.isdigit()))


KINDS: Final[dict[str, PlatformKind]] = {
    kind.name: kind
    for kind in (
        PlatformKind("cuda", "cuda", r"sm\d{2,3}", _digits, family_size=10),
        PlatformKind("rocm", "cuda", r"gfx[0-9a-f]{3,4}"),
        PlatformKind("cpu", "cpu", r"[a-z0-9_]+"),
        PlatformKind("tpu", "xla", r"v\d+[a-z]*"),
        PlatformKind("npu", "npu", r"[a-z0-9_]+"),
        PlatformKind("xpu", "xpu", r"[a-z0-9_]+"),
    )
}


def register_platform_kind(kind: PlatformKind) -> None:
    """Adds a plugin's kind of machine; a kind that is there already is left as it is.

    Raises:
        ArgumentError: Another kind has that name.
    """
    check_instance("kind", kind, PlatformKind, "make one")
    known = KINDS.setdefault(kind.name, kind)
    if known != kind:
        raise ArgumentError(f"platform kind {kind.name!r} is already registered as {known}; choose another name")


@dataclasses.dataclass(frozen=True)
class Platform:
    """What a machine is.

    Attributes:
        kind: `cuda`, `rocm`, `cpu`, `tpu`, `npu`, `xpu`, or a plugin's.
        arch: `sm90`, `gfx942`, `x86_64`; empty where the kind has no names for it or it was not said.
        device_name: As the driver says it; empty for a named platform.
        memory_bytes: Of one device; 0 where unknown.
        versions: Installed distributions by name (empty for a named platform).
        probed: Whether this describes the machine at hand; False for a named one.
    """

    kind: str
    arch: str = ""
    device_name: str = ""
    memory_bytes: int = 0
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False, compare=False, repr=False)
    probed: bool = False

    def __post_init__(self) -> None:
        for field in ("kind", "arch"):
            check_text(f"{field} of a platform", getattr(self, field))
        # What a driver says is not refused for its letters.
        check_instance("device_name of a platform", self.device_name, str, "as the driver says it")
        check_count("memory_bytes of a platform", self.memory_bytes, minimum=0)
        check_flag("probed of a platform", self.probed)
        for name, version in check_mapping("versions of a platform", self.versions).items():
            if not isinstance(version, str):
                raise ArgumentError(f"versions of a platform must be texts, got {shown(version)} for {shown(name)}")
        if self.kind not in KINDS:
            raise UnknownPlatformError(unknown_name_message("platform kind", self.kind, KINDS))
        pattern = KINDS[self.kind].arch_pattern
        if self.arch and not re.fullmatch(pattern, self.arch):
            raise UnknownPlatformError(
                f"unknown platform arch {shown(self.arch)}: {self.kind} architectures match {pattern!r}, "
                f"for instance {_EXAMPLES.get(self.kind, self.kind)!r}"
            )

    @classmethod
    def from_name(cls, name: str) -> Platform:
        """The platform of a string such as `cuda:sm90`, `rocm:gfx942` or `cpu`.

        Raises:
            ArgumentError: It is no text.
            UnknownPlatformError: The kind is not known or the architecture does not belong to it.
        """
        if not isinstance(name, str):
            raise ArgumentError(f"platform must be a name such as 'cuda:sm90', got {shown(name)}")
        kind, _, arch = name.strip().partition(":")
        if kind not in KINDS:
            near = unknown_name_message("platform", name, {*_EXAMPLES.values(), *KINDS})
            raise UnknownPlatformError(near)
        if not arch and KINDS[kind].arch_number is not None:
            raise UnknownPlatformError(
                f"platform {shown(name)} needs an architecture, for instance {_EXAMPLES[kind]!r}"
            )
        return cls(kind, arch)

    @property
    def device_type(self) -> str:
        """Torch's name for this platform's devices."""
        return KINDS[self.kind].device_type

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}" if self.arch and self.kind != "cpu" else self.kind


_EXAMPLES: Final = {"cuda": "cuda:sm90", "rocm": "rocm:gfx942", "cpu": "cpu", "tpu": "tpu:v5e"}


class Specificity:
    """How closely a rule names a platform; of several rules of one class that match, the greatest stands."""

    ANY: Final = 0
    KIND: Final = 1
    AT_LEAST: Final = 2
    FAMILY: Final = 3
    EXACT: Final = 4


@dataclasses.dataclass(frozen=True)
class PlatformRule:
    """A string that matches platforms: `cuda:sm90` exact, `cuda:sm100f` family, `cuda:sm80+` at least, `cpu`, `*`.

    A number of one kind is never compared with another kind's.

    Raises:
        ArgumentError: It is no text.
        UnknownPlatformError: The text is not a rule.
    """

    text: str

    def __post_init__(self) -> None:
        check_text("a platform rule", self.text)
        if self.text == "*":
            return
        kind, colon, _ = self.text.partition(":")
        if kind not in KINDS:
            raise UnknownPlatformError(unknown_name_message("platform kind", kind, {*KINDS, "*"}))
        _, arch, suffix = self._parts()
        if colon and not re.fullmatch(KINDS[kind].arch_pattern, arch):
            raise UnknownPlatformError(
                f"platform rule {shown(self.text)}: {kind} architectures match {KINDS[kind].arch_pattern!r}, "
                f"got {shown(arch)}"
            )
        if suffix and KINDS[kind].arch_number is None:
            raise UnknownPlatformError(
                f"platform rule {shown(self.text)}: {kind} architectures have no order; name each one exactly"
            )

    @functools.cache  # noqa: B019  (rules are few, frozen and live as long as the process)
    def _parts(self) -> tuple[str, str, str]:
        kind, _, rest = self.text.partition(":")
        has_families = KINDS[kind].arch_number is not None and KINDS[kind].family_size > 0
        suffix = rest[-1] if rest.endswith("+") or (rest.endswith("f") and has_families) else ""
        return kind, rest.removesuffix(suffix) if suffix else rest, suffix

    @property
    def specificity(self) -> int:
        """A `Specificity`."""
        if self.text == "*":
            return Specificity.ANY
        _, arch, suffix = self._parts()
        if not arch:
            return Specificity.KIND
        return {"+": Specificity.AT_LEAST, "f": Specificity.FAMILY, "": Specificity.EXACT}[suffix]

    def overlaps(self, other: PlatformRule) -> bool:
        """Whether both are equally specific and some platform matches both, so that neither could stand."""
        if self.specificity != other.specificity:
            return False
        if self.specificity in (Specificity.ANY, Specificity.KIND, Specificity.EXACT):
            return self.text == other.text
        (kind, arch, suffix), (other_kind, other_arch, _) = self._parts(), other._parts()
        if kind != other_kind:
            return False
        described = KINDS[kind]
        assert described.arch_number is not None
        families = {described.arch_number(name) // described.family_size for name in (arch, other_arch)}
        return suffix == "+" or len(families) == 1

    def matches(self, platform: Platform) -> bool:
        """Whether the platform is one of those that the rule names."""
        if self.text == "*":
            return True
        kind, arch, suffix = self._parts()
        if kind != platform.kind:
            return False
        if not arch:
            return True
        if not platform.arch:
            return False
        if not suffix:
            return arch == platform.arch
        described = KINDS[kind]
        assert described.arch_number is not None
        wanted, found = described.arch_number(arch), described.arch_number(platform.arch)
        if suffix == "+":
            return found >= wanted
        # A family shares its architecture-specific instructions: sm100f is sm100 and sm103, later members only.
        return found // described.family_size == wanted // described.family_size and found >= wanted

    def __str__(self) -> str:
        return self.text


@functools.lru_cache(maxsize=1)
def probe_platform() -> Platform:
    """The platform of this machine, asked once per process. Initializes no device.

    An accelerator is reported where this torch build can use it; CUDA facts come from NVML where it is there.
    CUDA_VISIBLE_DEVICES is honored.
    """
    import torch

    versions = installed_versions()
    if torch.version.hip and torch.cuda.device_count() > 0:
        return _probe_rocm(versions)
    if torch.version.cuda and torch.cuda.device_count() > 0:
        return _probe_cuda(versions)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Platform("cpu", host.machine().lower(), _cpu_name(), memory, versions, probed=True)


def installed_versions() -> dict[str, str]:
    """Versions of the installed distributions by canonical name; the first on the path counts, as for imports."""
    found: dict[str, str] = {}
    for distribution in importlib_metadata.distributions():
        try:
            name, version = distribution.metadata["Name"], distribution.version
        except (KeyError, OSError, TypeError):
            continue  # An interrupted uninstall leaves no metadata; importlib_metadata's versions differ in the error.
        if name and version:
            found.setdefault(canonicalize_name(name), version)
    return found


def _probe_cuda(versions: dict[str, str]) -> Platform:
    facts = _nvml_facts()
    if facts is None:
        # No NVML: the runtime is the only one to ask, at the price of initializing CUDA.
        import torch

        properties = torch.cuda.get_device_properties(0)
        facts = (properties.major, properties.minor, properties.name, properties.total_memory)
    major, minor, name, memory = facts
    return Platform("cuda", f"sm{major}{minor}", name, memory, versions, probed=True)


def _probe_rocm(versions: dict[str, str]) -> Platform:
    import torch

    properties = torch.cuda.get_device_properties(0)
    arch = properties.gcnArchName.split(":")[0]
    return Platform("rocm", arch, properties.name, properties.total_memory, versions, probed=True)


def _nvml_facts() -> tuple[int, int, str, int] | None:
    """(major, minor, name, bytes) of the first visible device through NVML's C library, or None."""
    with _nvml_device() as found:
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
        return major.value, minor.value, name.value.decode(), int(memory[0])


# NVML's numbers of clock domains.
_CLOCK_DOMAINS: Final = {"sm": 1, "memory": 2}


def gpu_clocks() -> dict[str, int]:
    """What the first visible GPU runs at now, through NVML; what it does not say is left out, without NVML everything.

    Returns:
        `sm_mhz`, `max_sm_mhz`, `memory_mhz`, `max_memory_mhz` and `power_limit_w`.
    """
    clocks: dict[str, int] = {}
    with _nvml_device() as found:
        if found is None:
            return clocks
        nvml, handle = found
        value = ctypes.c_uint()
        for name, domain in _CLOCK_DOMAINS.items():
            if nvml.nvmlDeviceGetClockInfo(handle, domain, ctypes.byref(value)) == 0:
                clocks[f"{name}_mhz"] = value.value
            if nvml.nvmlDeviceGetMaxClockInfo(handle, domain, ctypes.byref(value)) == 0:
                clocks[f"max_{name}_mhz"] = value.value
        if nvml.nvmlDeviceGetEnforcedPowerLimit(handle, ctypes.byref(value)) == 0:
            clocks["power_limit_w"] = value.value // 1000
    return clocks


@contextlib.contextmanager
def _nvml_device() -> Iterator[tuple[Any, Any] | None]:
    """NVML and its handle of the first visible device, or None where either is missing."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        yield None
        return
    if nvml.nvmlInit_v2() != 0:
        yield None
        return
    try:
        handle = _nvml_handle(nvml)
        yield None if handle is None else (nvml, handle)
    finally:
        nvml.nvmlShutdown()


def _nvml_handle(nvml: object) -> object | None:
    handle = ctypes.c_void_p()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    if visible.isdigit():
        # CUDA numbers devices fastest first unless told otherwise; on hosts with one model both orders agree.
        code = nvml.nvmlDeviceGetHandleByIndex_v2(int(visible), ctypes.byref(handle))  # type: ignore[attr-defined]
    else:
        code = nvml.nvmlDeviceGetHandleByUUID(visible.encode(), ctypes.byref(handle))  # type: ignore[attr-defined]
    return handle if code == 0 else None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return host.processor() or host.machine()
