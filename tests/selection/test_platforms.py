"""Platforms as values, the rules that match them, and probing without touching the device."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pynvml
import pytest
import torch

from moereg.errors import ArgumentError, PluginError, UnknownPlatformError
from moereg.platforms import (
    KINDS,
    Platform,
    PlatformKind,
    PlatformRule,
    gpu_clocks,
    installed_versions,
    probe_cpu,
    probe_platform,
    probe_settings,
    register_platform_kind,
    torch_device,
)
from moereg.platforms.claims import accept_plugin, claim_of, decide_claims
from moereg.platforms.kinds import kinds_of_plugin

SM80_UP = ("cuda:sm80", "cuda:sm89", "cuda:sm90", "cuda:sm100", "cuda:sm103", "cuda:sm120")
PLATFORMS = ("cpu", *SM80_UP, "rocm:gfx90a", "rocm:gfx942", "rocm:gfx1100", "tpu:v5e")
MATCHES = {
    "*": set(PLATFORMS),
    "cpu": {"cpu"},
    "cuda": set(SM80_UP),
    "rocm": {"rocm:gfx90a", "rocm:gfx942", "rocm:gfx1100"},
    "cuda:sm90": {"cuda:sm90"},
    "cuda:sm80+": set(SM80_UP),
    "cuda:sm89+": {"cuda:sm89", "cuda:sm90", "cuda:sm100", "cuda:sm103", "cuda:sm120"},
    "cuda:sm100+": {"cuda:sm100", "cuda:sm103", "cuda:sm120"},
    "cuda:sm80f": {"cuda:sm80", "cuda:sm89"},
    "cuda:sm100f": {"cuda:sm100", "cuda:sm103"},
    "cuda:sm103f": {"cuda:sm103"},
    "cuda:sm120f": {"cuda:sm120"},
    # No capability number crosses vendors, however large.
    "rocm:gfx942": {"rocm:gfx942"},
    "rocm:gfx908": set(),
    "tpu:v5e": {"tpu:v5e"},
    # Families of a kind whose architectures have no order, and exclusions.
    "rocm:gfx9*": {"rocm:gfx90a", "rocm:gfx942"},
    "rocm:gfx9*,!gfx94*": {"rocm:gfx90a"},
    "rocm:gfx9*,!gfx90a": {"rocm:gfx942"},
    "rocm:gfx94*": {"rocm:gfx942"},
    "rocm,!gfx9*": {"rocm:gfx1100"},
    "tpu,!v5e": set(),
    "cuda,!sm100+": {"cuda:sm80", "cuda:sm89", "cuda:sm90"},
    "cuda:sm80+,!sm100+": {"cuda:sm80", "cuda:sm89", "cuda:sm90"},
    "cuda:sm90+,!sm120": {"cuda:sm90", "cuda:sm100", "cuda:sm103"},
    "cuda:sm90+,!sm100f": {"cuda:sm90", "cuda:sm120"},
    "cuda:sm90+,!sm90,!sm103": {"cuda:sm100", "cuda:sm120"},
    "cuda:sm100f,!sm103": {"cuda:sm100"},
    "*,!cuda,!rocm:gfx9*": {"cpu", "rocm:gfx1100", "tpu:v5e"},
    "*,!cuda:sm90+": {"cpu", "cuda:sm80", "cuda:sm89", "rocm:gfx90a", "rocm:gfx942", "rocm:gfx1100", "tpu:v5e"},
}


@pytest.mark.parametrize("rule", MATCHES)
def test_matches(rule: str) -> None:
    assert {name for name in PLATFORMS if PlatformRule(rule).matches(Platform.from_name(name))} == MATCHES[rule]


def test_a_platform_without_arch_matches_its_kind_only() -> None:
    somewhere = Platform("rocm")
    assert PlatformRule("rocm").matches(somewhere)
    assert not PlatformRule("rocm:gfx942").matches(somewhere)
    assert not PlatformRule("cuda:sm80+").matches(Platform("cuda"))
    assert not PlatformRule("rocm:gfx9*").matches(somewhere)
    # It may be one of those that are excluded.
    assert not PlatformRule("rocm,!gfx942").matches(somewhere)
    assert not PlatformRule("*,!rocm:gfx942").matches(somewhere)
    assert PlatformRule("*,!cuda:sm90").matches(somewhere)


def test_specificity_orders_rules() -> None:
    rules = ("*", "cuda", "cuda:sm90+", "cuda:sm90f", "cuda:sm90")
    assert [PlatformRule(rule).specificity for rule in rules] == [0, 1, 2, 3, 4]


OVERLAPS = {
    ("*", "*"): True,
    ("*", "cpu"): False,
    ("cuda", "cuda"): True,
    ("cuda", "rocm"): False,
    ("cuda:sm90", "cuda:sm90"): True,
    ("cuda:sm90", "cuda:sm100"): False,
    ("cuda:sm90", "cuda:sm80+"): False,
    ("cuda:sm80+", "cuda:sm90+"): True,
    ("cuda:sm100f", "cuda:sm103f"): True,
    ("cuda:sm100f", "cuda:sm120f"): False,
    ("cuda:sm100f", "cuda:sm100+"): False,
    ("rocm:gfx9*", "rocm:gfx94*"): True,
    ("rocm:gfx9*", "rocm:gfx11*"): False,
    ("rocm:gfx9*,!gfx94*", "rocm:gfx94*"): False,
    ("rocm:gfx9*,!gfx942", "rocm:gfx94*"): True,
    ("rocm:gfx9*", "rocm:gfx942"): False,
    ("cuda:sm80+,!sm90+", "cuda:sm90+"): False,
    ("cuda:sm80+,!sm90f", "cuda:sm90+"): True,
    ("cuda:sm80+,!sm100+,!sm90f", "cuda:sm90+,!sm120"): False,
    ("cuda:sm80+,!sm90f,!sm100+", "cuda:sm90+"): False,
    ("cuda:sm90+,!sm120", "cuda:sm90+,!sm90"): True,
    ("cuda", "cuda,!sm90"): True,
    ("cuda,!sm90+", "cuda:sm90+"): False,
    ("*", "*,!cpu"): True,
}


@pytest.mark.parametrize(("first", "second"), OVERLAPS)
def test_overlaps(first: str, second: str) -> None:
    one, other = PlatformRule(first), PlatformRule(second)
    assert one.overlaps(other) is other.overlaps(one) is OVERLAPS[first, second]


def test_rules_that_do_not_overlap_never_tie() -> None:
    for first, second in itertools.combinations(map(PlatformRule, MATCHES), 2):
        both = [name for name in PLATFORMS if all(rule.matches(Platform.from_name(name)) for rule in (first, second))]
        if both and first.specificity == second.specificity:
            assert first.overlaps(second), (first, second, both)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("gpu", "unknown platform kind 'gpu'"),
        ("Cuda:sm90", "unknown platform kind 'Cuda', did you mean 'cuda'?"),
        (" cuda:sm90", "unknown platform kind ' cuda'"),
        ("cuda:90", r"platform rule 'cuda:90': cuda architectures match 'sm\\d{2,3}', got '90'"),
        ("cuda:sm90a", r"platform rule 'cuda:sm90a': cuda architectures match 'sm\\d{2,3}', got 'sm90a'"),
        ("cuda:sm80++", r"platform rule 'cuda:sm80++': cuda architectures match 'sm\\d{2,3}', got 'sm80+'"),
        ("cuda:", r"platform rule 'cuda:': cuda architectures match 'sm\\d{2,3}', got ''"),
        ("rocm:gfx942+", "platform rule 'rocm:gfx942+': rocm architectures have no order; name each one exactly"),
        ("cpu+", "unknown platform kind 'cpu+', did you mean 'cpu'?"),
        ("rocm:*", "platform rule 'rocm:*': rocm architectures match 'gfx[0-9a-f]{3,4}', and none begins with ''"),
        ("cuda:sm9*", r"platform rule 'cuda:sm9*': cuda architectures match 'sm\\d{2,3}', got 'sm9*'"),
        ("cuda:sm90+,cuda:sm80", "an exclusion is '!' and what it excludes, without spaces, got 'cuda:sm80'"),
        ("cuda:sm90+,!", "platform rule 'cuda:sm90+,!': an exclusion is '!' and what it excludes"),
        ("cuda:sm90+,", "platform rule 'cuda:sm90+,': an exclusion is '!' and what it excludes"),
        ("cuda:sm90+,!sm12x", r"platform rule 'cuda:sm90+,!sm12x': cuda architectures match 'sm\\d{2,3}', got 'sm12x'"),
        ("cuda:sm90+,!cuda:sm120", "an exclusion names architectures of cuda without the kind"),
        ("cuda:sm100+,!sm90", "'cuda:sm100+,!sm90': '!sm90' excludes nothing that cuda:sm100+ names; leave it out"),
        ("cuda:sm90f,!sm80+", "'cuda:sm90f,!sm80+': '!sm80+' excludes everything that cuda:sm90f names; leave one out"),
        ("*,!*", "platform rule '*,!*': it excludes every platform; leave '!*' out"),
        ("*,!gpu", "unknown platform kind 'gpu'"),
        ("rocm:gfx9*,!gfx942+", "platform rule 'rocm:gfx9*,!gfx942+': rocm architectures have no order"),
    ],
)
def test_bad_rules(text: str, error: str) -> None:
    with pytest.raises(UnknownPlatformError, match=re.escape(error)):
        PlatformRule(text)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("cuda", "platform 'cuda' needs an architecture, for instance 'cuda:sm90'"),
        ("cuda:hopper", r"platform arch 'hopper': cuda architectures match 'sm\\d{2,3}', for instance 'cuda:sm90'"),
        ("rocm:sm90", "unknown platform arch 'sm90': rocm architectures match 'gfx[0-9a-f]{3,4}'"),
        ("cude:sm90", "unknown platform 'cude:sm90', did you mean 'cuda:sm90'?"),
    ],
)
def test_bad_names(name: str, error: str) -> None:
    with pytest.raises(UnknownPlatformError, match=re.escape(error)):
        Platform.from_name(name)


def test_values_compare_without_versions() -> None:
    one = Platform("cuda", "sm90", versions={"triton": "3.6"})
    assert one == Platform("cuda", "sm90")
    assert hash(one) == hash(Platform("cuda", "sm90"))
    assert one != Platform("cuda", "sm90", probed=True)


@pytest.fixture
def kinds() -> Iterator[None]:
    before = dict(KINDS)
    yield
    KINDS.clear()
    KINDS.update(before)


@pytest.mark.usefixtures("kinds")
def test_a_plugin_orders_its_own_archs() -> None:
    with pytest.raises(UnknownPlatformError):
        PlatformRule("quux:q7f")
    kind = PlatformKind("quux", "privateuseone", r"q\d+f?", lambda arch: int(arch.strip("qf")))
    register_platform_kind(kind)
    register_platform_kind(kind)
    assert PlatformRule("quux:q7+").matches(Platform("quux", "q12"))
    assert not PlatformRule("quux:q7+").matches(Platform("quux", "q3"))
    # The kind has no families, so the letter belongs to the arch; nor did the failure above leave anything behind.
    assert PlatformRule("quux:q7f").specificity == 4
    assert PlatformRule("quux:q7f").matches(Platform("quux", "q7f"))
    assert Platform("quux", "q12").device_type == "privateuseone"
    assert Platform("quux", "q12").device_type != Platform("cuda", "sm90").device_type
    with pytest.raises(ValueError, match=r"platform kind 'quux' is already registered by .*; choose another name"):
        register_platform_kind(PlatformKind("quux", "cpu", ".*"))


@pytest.mark.usefixtures("kinds")
def test_an_order_that_fails_is_told_where_the_architecture_is_named() -> None:
    def number(arch: str) -> Any:
        if arch == "q13":
            raise SystemExit(3)
        return None if arch == "q14" else int(arch[1:])

    register_platform_kind(PlatformKind("quux", "cpu", r"q\d+", number, example="q7"))
    assert PlatformRule("quux:q12+").matches(Platform("quux", "q15"))
    fault = "arch_number of platform kind 'quux' must return an integer for {}, and it {}; name another architecture, "
    for make in (lambda: Platform("quux", "q13"), lambda: PlatformRule("quux:q13+"), lambda: PlatformRule("quux:q13")):
        with pytest.raises(UnknownPlatformError, match=re.escape(fault.format("'q13'", "raised SystemExit: 3"))):
            make()
    with pytest.raises(UnknownPlatformError, match=re.escape(fault.format("'q14'", "returned None"))):
        Platform.from_name("quux:q14")
    with pytest.raises(UnknownPlatformError, match="platform 'quux' needs an architecture, for instance 'quux:q7'"):
        Platform.from_name("quux")


@pytest.mark.usefixtures("kinds")
def test_a_plugin_describes_a_kind_that_moereg_only_names() -> None:
    old = PlatformRule("npu:910b")
    assert old.matches(Platform("npu", "910b"))
    with pytest.raises(UnknownPlatformError, match="npu architectures have no order"):
        PlatformRule("npu:910b+")
    described = PlatformKind("npu", "privateuseone", r"910[a-z]", lambda arch: ord(arch[-1]), 1, example="910b")
    register_platform_kind(described)
    assert PlatformRule("npu:910b+").matches(Platform("npu", "910c"))
    assert old.matches(Platform("npu", "910b"))
    assert Platform("npu", "910b").device_type == "privateuseone"
    with pytest.raises(ValueError, match=r"'npu' is already registered by tests\.selection\.test_platforms and"):
        register_platform_kind(dataclasses.replace(described, example=""))
    with pytest.raises(ValueError, match="platform kind 'cuda' is already registered by moereg and cannot be by tests"):
        register_platform_kind(dataclasses.replace(described, name="cuda"))


INSTANCES = {
    "*": None,
    "cpu": "cpu",
    "cuda": "cuda:sm90",
    "cuda,!sm90": None,
    "cuda:sm100f": "cuda:sm100",
    "cuda:sm80+,!sm80": "cuda:sm90",
    "rocm:gfx90a": "rocm:gfx90a",
    "rocm:gfx9*": "rocm:gfx942",
    "rocm:gfx11*": None,
}


@pytest.mark.parametrize("rule", INSTANCES)
def test_an_instance_is_a_platform_that_a_rule_names(rule: str) -> None:
    found = PlatformRule(rule).instance
    assert (None if found is None else str(found)) == INSTANCES[rule]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"name": "My"}, "name of a PlatformKind must be lower-case letters, digits and underscores, got 'My'"),
        ({"probe": 3}, "probe of a PlatformKind must be a function or None, got 3"),
        ({"example": "b2"}, r"example of a PlatformKind must match its arch_pattern 'a\\d', got 'b2'"),
    ],
)
def test_bad_kinds(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(error)):
        PlatformKind(**{"name": "mine", "device_type": "cpu", "arch_pattern": r"a\d", **changes})


@pytest.mark.usefixtures("kinds")
def test_kinds_of_a_plugin_that_fails_go_and_those_of_its_neighbors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def register(module: str, name: str) -> None:
        exec(  # As that module would.
            f"register(PlatformKind({name!r}, 'cpu', 'a'))",
            {"__name__": module, "register": register_platform_kind, "PlatformKind": PlatformKind},
        )

    monkeypatch.setitem(sys.modules, "neighbor", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "failing.late", SimpleNamespace())

    def load() -> None:
        register("failing", "one")
        register("failing.late", "two")
        register("neighbor", "three")
        raise OSError("late")

    with pytest.raises(OSError, match="late"), kinds_of_plugin("moereg-failing", "failing"):
        load()
    assert {"one", "two", "three"} & set(KINDS) == {"three"}
    taken = "'three' is already registered by moereg-failing and cannot be by moereg-b"
    with pytest.raises(ArgumentError, match=taken), kinds_of_plugin("moereg-b", "b"):
        register_platform_kind(PlatformKind("three", "cpu", "b"))


@pytest.mark.usefixtures("kinds")
def test_a_claim_is_checked() -> None:
    mine = PlatformKind("mine", "cpu", "a")
    here = Platform("cpu")

    assert claim_of("x:KIND", mine) is None
    assert claim_of("x:probe", lambda: None) is None
    assert claim_of("x:probe", lambda: here) == here
    with pytest.raises(TypeError, match="x:probe must return a Platform or None, got str"):
        claim_of("x:probe", lambda: "cpu")
    with pytest.raises(ValueError, match="the probe of x:KIND must return a platform of kind mine, got cpu"):
        claim_of("x:KIND", dataclasses.replace(mine, probe=lambda: here))
    with pytest.raises(SystemExit):
        claim_of("x:probe", lambda: sys.exit(3))
    with pytest.raises(TypeError, match=r"x must name a PlatformKind, or a function .* the module; name one .* x:KIND"):
        accept_plugin("x", sys)
    with pytest.raises(TypeError, match=r"x:y must name a PlatformKind, or a function that .*, and it is 3"):
        accept_plugin("x:y", 3)


@pytest.mark.parametrize(
    ("device_type", "cure"),
    [("bogus", "import the extension of torch that brings it, or name another"), ("meta:7:7", "")],
)
@pytest.mark.usefixtures("kinds")
def test_a_device_that_a_plugin_claims_is_told_with_the_plugin(device_type: str, cure: str) -> None:
    claimed = dataclasses.replace(Platform("cpu"), claimed_by="platform plugin 'a' of pl-a 1.0")
    with pytest.raises(UnknownPlatformError) as raised:
        torch_device(claimed, device_type)
    assert cure in str(raised.value)
    assert str(raised.value).endswith(
        "; platform plugin 'a' of pl-a 1.0 claims that this machine is cpu: where it is not, do without platform "
        "plugins by MOEREG_PLUGINS=platforms:"
    )


def test_claims_are_decided() -> None:
    h200 = Platform("cuda", "sm90")
    assert decide_claims({}) is None
    decided = decide_claims({"one of moereg-one 1.2": h200})
    assert decided is not None
    assert decided.probed
    assert decided.versions["torch"] == metadata.version("torch")
    assert decided.claimed_by == "platform plugin 'one' of moereg-one 1.2"
    assert decided == dataclasses.replace(decided, claimed_by="")
    with pytest.raises(PluginError, match=r"got 2: a of b 1, c of d 2; choose one by MOEREG_PLUGINS=platforms:a or"):
        decide_claims({"c of d 2": h200, "a of b 1": h200})


@pytest.mark.usefixtures("kinds")
def test_a_device_that_torch_does_not_have_is_told() -> None:
    register_platform_kind(PlatformKind("quux", "quux", "a"))
    assert torch_device(Platform("cpu")).type == "cpu"
    assert torch_device(Platform("quux"), "cpu").type == "cpu"
    for platform, device in ((Platform("quux"), "quux"), (Platform("npu"), "npu"), (Platform("xpu"), "xpu")):
        with pytest.raises(
            UnknownPlatformError,
            match=rf"layers of platform {platform.kind} live on torch's device type '{device}', which torch .* cannot",
        ):
            torch_device(platform)


def test_the_cpu_of_this_machine_is_the_platform_where_nothing_else_is(cuda_machine: pytest.MonkeyPatch) -> None:
    # torch counts no GPU where CUDA_VISIBLE_DEVICES is the empty string.
    assert (probe_cpu().kind, probe_cpu().probed) == ("cpu", True)
    assert probe_cpu().arch
    assert probe_cpu().memory_bytes > 0
    cuda_machine.setattr(torch.cuda, "device_count", lambda: 0)
    assert probe_platform() is probe_cpu()


class Nvml:
    """The functions of pynvml that the probe calls."""

    devices: ClassVar[list[tuple[tuple[int, int], str, int]]] = [
        ((9, 0), "NVIDIA H200", 150_754_820_096),
        ((10, 3), "NVIDIA B300", 288 * 2**30),
    ]
    uuids: ClassVar[list[str]] = ["GPU-aaaa", "GPU-bbbb"]

    def __init__(self, patch: pytest.MonkeyPatch, **failing: int) -> None:
        self.failing, self.shut_down = failing, 0
        for name in vars(Nvml):
            if name.startswith("nvml"):
                patch.setattr(pynvml, name, functools.partial(self._call, name))

    def _call(self, name: str, *arguments: Any) -> Any:
        if name in self.failing:
            raise pynvml.NVMLError(self.failing[name])
        return getattr(self, name)(*arguments)

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        self.shut_down += 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid not in self.uuids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.uuids.index(uuid)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: int) -> tuple[int, int]:
        return self.devices[gpu][0]

    def nvmlDeviceGetName(self, gpu: int) -> str:
        return self.devices[gpu][1]

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> SimpleNamespace:
        return SimpleNamespace(total=self.devices[gpu][2])

    def nvmlDeviceGetClockInfo(self, gpu: int, domain: int) -> int:
        return {pynvml.NVML_CLOCK_SM: 1501, pynvml.NVML_CLOCK_MEM: 3201}[domain] + gpu

    def nvmlDeviceGetMaxClockInfo(self, gpu: int, domain: int) -> int:
        if domain == pynvml.NVML_CLOCK_MEM:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return 1980

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:
        return 512_345

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: int) -> int:
        return 700_000

    def nvmlDeviceGetNumGpuCores(self, gpu: int) -> int:
        return 16_896

    def nvmlDeviceGetMigMode(self, gpu: int) -> list[int]:
        return [1, 0]

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"


@pytest.fixture
def cuda_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A torch built for CUDA that must not be initialized, on a machine with two GPUs."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("CUDA was initialized")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    probe_platform.cache_clear()
    yield monkeypatch
    probe_platform.cache_clear()


@pytest.mark.parametrize(
    ("visible", "arch", "device_name"),
    [
        (None, "sm90", "NVIDIA H200"),
        ("0", "sm90", "NVIDIA H200"),
        ("1", "sm103", "NVIDIA B300"),
        ("1,0", "sm103", "NVIDIA B300"),
        (" 1 , 0", "sm103", "NVIDIA B300"),
        ("GPU-bbbb", "sm103", "NVIDIA B300"),
        ("GPU-aaaa,GPU-bbbb", "sm90", "NVIDIA H200"),
    ],
)
def test_probe_reads_the_first_visible_gpu(
    cuda_machine: pytest.MonkeyPatch, visible: str | None, arch: str, device_name: str
) -> None:
    nvml = Nvml(cuda_machine)
    if visible is not None:
        cuda_machine.setenv("CUDA_VISIBLE_DEVICES", visible)
    platform = probe_platform()
    assert (platform.kind, platform.arch, platform.device_name) == ("cuda", arch, device_name)
    assert platform.memory_bytes > 2**37 - 1
    assert platform.probed
    assert platform.versions["torch"] == metadata.version("torch")
    assert probe_platform() is platform
    assert nvml.shut_down == 1, "it is asked once"


@pytest.mark.parametrize("broken", ["no library", "no driver", "unknown uuid", "failing call"])
def test_probe_without_nvml_asks_the_runtime(cuda_machine: pytest.MonkeyPatch, broken: str) -> None:
    name, error = {
        "no library": ("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND),
        "no driver": ("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
        "unknown uuid": ("", 0),
        "failing call": ("nvmlDeviceGetCudaComputeCapability", pynvml.NVML_ERROR_NOT_SUPPORTED),
    }[broken]
    Nvml(cuda_machine, **{name: error})
    if broken == "unknown uuid":
        cuda_machine.setenv("CUDA_VISIBLE_DEVICES", "GPU-cccc")
    properties = SimpleNamespace(major=8, minor=9, name="NVIDIA L40S", total_memory=48 * 2**30)
    cuda_machine.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert probe_platform() == Platform("cuda", "sm89", "NVIDIA L40S", 48 * 2**30, probed=True)


def test_clocks_are_the_first_visible_gpus_and_may_be_missing(cuda_machine: pytest.MonkeyPatch) -> None:
    nvml = Nvml(cuda_machine)
    cuda_machine.setenv("CUDA_VISIBLE_DEVICES", "1")
    powers = {"power_w": 512, "power_limit_w": 700}
    assert gpu_clocks() == {"sm_mhz": 1502, "max_sm_mhz": 1980, "memory_mhz": 3202, **powers}
    assert nvml.shut_down == 1
    cuda_machine.setenv("CUDA_VISIBLE_DEVICES", "GPU-cccc")
    assert gpu_clocks() == {}
    Nvml(cuda_machine, nvmlInit=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert gpu_clocks() == {}


def test_settings_that_a_gpu_does_not_have_are_zero(cuda_machine: pytest.MonkeyPatch) -> None:
    gpu = Platform("cuda", "sm90", probed=True)
    Nvml(cuda_machine)
    assert probe_settings(gpu) == (16_896, 700, True, "570.86.15")
    Nvml(cuda_machine, nvmlDeviceGetMigMode=pynvml.NVML_ERROR_NOT_SUPPORTED)
    assert probe_settings(gpu) == (16_896, 700, False, "570.86.15")
    Nvml(cuda_machine, nvmlInit=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    assert probe_settings(gpu) == (0, 0, False, "")


def test_probe_rocm(cuda_machine: pytest.MonkeyPatch) -> None:
    cuda_machine.setattr(torch.version, "cuda", None)
    cuda_machine.setattr(torch.version, "hip", "7.0")
    properties = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", name="AMD MI300X", total_memory=192 * 2**30)
    cuda_machine.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    platform = probe_platform()
    assert str(platform) == "rocm:gfx942"
    assert platform.device_type == "cuda"


def test_versions_are_of_canonical_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder, text in (
        ("some_Dotted.Name-1.5.dist-info", "Metadata-Version: 2.1\nName: Some_Dotted.Name\nVersion: 1.5\n"),
        ("nameless-1.0.dist-info", "Metadata-Version: 2.1\nVersion: 1.0\n"),
        ("leftover-1.0.dist-info", None),
    ):
        (tmp_path / folder).mkdir()
        if text is not None:
            (tmp_path / folder / "METADATA").write_text(text)
    (tmp_path / "latin-2.0.dist-info").mkdir()
    (tmp_path / "latin-2.0.dist-info" / "METADATA").write_bytes(b"Name: latin\nVersion: 2.0\nAuthor: Ren\xe9\n")
    monkeypatch.syspath_prepend(tmp_path)
    versions = installed_versions()
    assert versions["some-dotted-name"] == "1.5"
    # The remains of an interrupted uninstall, and what cannot be read, count as not installed and do no harm.
    assert not {"leftover", "latin"} & set(versions)
    assert versions["torch"] == metadata.version("torch")


@pytest.mark.parametrize("name", ["triton-rocm", "pytorch_triton_rocm", "pytorch-triton"])
def test_triton_is_installed_under_its_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def install(distribution: str, version: str) -> None:
        (tmp_path / f"{distribution}-{version}.dist-info").mkdir()
        metadata = f"Name: {distribution}\nVersion: {version}\n"
        (tmp_path / f"{distribution}-{version}.dist-info" / "METADATA").write_text(metadata)

    monkeypatch.setattr("sys.path", [str(tmp_path)])
    install(name, "3.6.0+rocm7.1")
    assert installed_versions()["triton"] == "3.6.0+rocm7.1"
    install("triton", "3.8.0")
    assert installed_versions()["triton"] == "3.8.0"
