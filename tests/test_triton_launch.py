"""Recorded launches, through the CUDA launcher of the Triton that is installed, with a fake C function at its end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia import driver as nvidia

from moereg.kernels import triton_launch
from moereg.kernels.triton_launch import launch, recording

META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
BOX = "tensordesc<bf16[64,64],layout>"


@dataclass(frozen=True)
class FakeMap:
    """A tensor map: what it was encoded from."""

    arguments: tuple[Any, ...]


class FakeDriver:
    """Keeps what was launched and counts the encoded maps."""

    def __init__(self) -> None:
        self.stream = 7
        self.launched: list[list[Any]] = []
        self.encoded = 0
        self.utils = SimpleNamespace(fill_tma_descriptor=self._encode, fill_tma_descriptor_tiled=self._encode)

    def _encode(self, address: int, *others: Any) -> FakeMap:
        self.encoded += 1
        return FakeMap((address, *map(str, others)))

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def launch(self, *arguments: Any) -> None:
        """The C function: notes its arguments, nested ones in line, tensors as addresses."""
        flat = []
        for argument in arguments:
            flat += argument if isinstance(argument, (list, tuple)) else [argument]
        self.launched.append([value.data_ptr() if isinstance(value, torch.Tensor) else value for value in flat])

    def take(self) -> list[list[Any]]:
        taken, self.launched = self.launched, []
        return taken


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(triton.runtime.driver, "_active", fake, raising=False)
    monkeypatch.setattr(nvidia, "PyCUtensorMap", FakeMap)
    assert triton.runtime.driver.active is fake
    return fake


class Compiled(SimpleNamespace):
    """A compiled kernel; unlike its base it can be referred to weakly."""


class FakeKernel:
    """A kernel with a compiled variant, launched as `JITFunction.run` does."""

    def __init__(self, driver: FakeDriver, signature: dict[str, str], **launcher_attributes: Any) -> None:
        self._driver = driver
        self.arg_names = list(signature)
        meta = [META for kind in signature.values() if kind.startswith("tensordesc")]
        launcher = nvidia.CudaLauncher.__new__(nvidia.CudaLauncher)
        launcher.launch = nvidia.wrap_handle_tensordesc(driver.launch, signature, meta)
        attributes = {
            "num_ctas": 1,
            "global_scratch_size": 0,
            "global_scratch_align": 1,
            "profile_scratch_size": 0,
            "profile_scratch_align": 1,
            "launch_cooperative_grid": False,
            "launch_pdl": True,
            "gsan_enabled": False,
            "arg_annotations": "annotations",
            "kernel_signature": "signature",
            **launcher_attributes,
        }
        for name, value in attributes.items():
            setattr(launcher, name, value)
        self.compiled = Compiled(
            run=launcher,
            function=object(),
            packed_metadata=(4, 1, 1024),
            src=SimpleNamespace(signature=signature),
            metadata=SimpleNamespace(tensordesc_meta=meta),
        )

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            named = dict(zip(self.arg_names, arguments, strict=False)) | options
            compiled = self.compiled
            x, y, z = (*grid, 1, 1)[:3]
            values = [named[name] for name in self.arg_names]
            compiled.run(
                x, y, z, self._driver.stream, compiled.function, compiled.packed_metadata, None, None, None, *values
            )
            return compiled

        return run


@dataclass
class Descriptor:
    base: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str = "zero"
    round_f32_to_tf32: bool = False


def tensor(numel: int = 64) -> torch.Tensor:
    return torch.zeros(numel, dtype=torch.int32)


PLAIN = {"out": "*i32", "x": "*i32", "bias": "constexpr", "count": "i32", "BLOCK": "constexpr"}


def launch_plain(kernel: FakeKernel, out: torch.Tensor, x: torch.Tensor) -> None:
    # 4 is a number of warps too, which no argument of the same value may be taken for.
    launch(kernel, (5, 2), out, x[16:], None, 4, BLOCK=64, num_warps=4)


def test_a_replay_launches_the_same_with_other_pointers(driver: FakeDriver) -> None:
    kernel = FakeKernel(driver, PLAIN)
    out, x, other_out, other_x = tensor(), tensor(), tensor(), tensor()
    with recording([out, None, x]) as record:
        launch_plain(kernel, out, x)
        launch_plain(kernel, x, out)
    assert record.complete
    assert len(driver.take()) == 2, "recording must launch once each"
    driver.stream = 9
    launch_plain(kernel, other_out, other_x)
    launch_plain(kernel, other_x, other_out)
    expected = driver.take()
    assert expected[0] != expected[1]
    for _ in range(2):
        record.replay([other_out.data_ptr(), 0, other_x.data_ptr()])
        assert driver.take() == expected
    record.replay([out.data_ptr(), 0, other_x.data_ptr()])
    mixed = driver.take()
    launch_plain(kernel, out, other_x)
    launch_plain(kernel, other_x, out)
    assert mixed == driver.take()


BOXES = {"out": BOX, "count": "i32", "x": "*i32", "rows": BOX}


def launch_boxes(kernel: FakeKernel, out: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> None:
    boxes = [Descriptor(base, (64, base.numel() // 64), (base.numel() // 64, 1)) for base in (out, rows[8:])]
    launch(kernel, (132,), boxes[0], 4, x[4:], boxes[1])


def test_a_replay_encodes_only_maps_whose_tensor_moved(driver: FakeDriver) -> None:
    kernel = FakeKernel(driver, BOXES)
    out, x, rows, other_x, other_rows = (tensor(4096) for _ in range(5))
    with recording([out, x, rows]) as record:
        launch_boxes(kernel, out, x, rows)
    assert record.complete
    driver.take()
    for second, third in ((other_x, rows), (x, other_rows), (other_x, other_rows)):
        launch_boxes(kernel, out, second, third)
        expected = driver.take()
        pointers = [out.data_ptr(), second.data_ptr(), third.data_ptr()]
        record.replay(pointers)
        assert driver.take() == expected
        assert sum(isinstance(value, FakeMap) for value in expected[0]) == 2
        before = driver.encoded
        record.replay(list(pointers))
        assert driver.take() == expected
        assert driver.encoded == before
    before = driver.encoded
    record.replay([out.data_ptr(), x.data_ptr(), other_rows.data_ptr()])
    assert driver.encoded == before, "no map's tensor moved"


def test_a_recording_keeps_no_tensor(driver: FakeDriver) -> None:
    kernel = FakeKernel(driver, BOXES)
    tensors = [tensor(4096) for _ in range(3)]
    with recording(tensors) as record:
        launch_boxes(kernel, *tensors)
    assert record.complete
    driver.take()
    references = [weakref.ref(one) for one in tensors]
    del tensors
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


def test_a_recording_keeps_its_kernels_loaded(driver: FakeDriver) -> None:
    kernel = FakeKernel(driver, PLAIN)
    out, x = tensor(), tensor()
    with recording([out, x]) as record:
        launch_plain(kernel, out, x)
    reference = weakref.ref(kernel.compiled)
    del kernel
    gc.collect()
    assert reference() is not None
    del record
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize(
    "attributes", [{"gsan_enabled": True}, {"global_scratch_size": 8}, {"profile_scratch_size": 8}]
)
def test_what_allocates_or_waits_at_each_launch_is_not_recorded(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, attributes: dict[str, Any]
) -> None:
    kernel = FakeKernel(driver, PLAIN)
    with recording([tensor()]) as record:
        for name, value in attributes.items():
            monkeypatch.setattr(kernel.compiled.run, name, value)
        record.add(kernel, kernel.compiled, (1,), (None, None, None, 4), {"BLOCK": 64})
    assert not record.complete


def test_an_unknown_triton_is_not_recorded(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    out, x = tensor(), tensor()
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    with recording([out, x]) as record:
        launch_plain(FakeKernel(driver, PLAIN), out, x)
    assert len(driver.take()) == 1
    assert not record.complete


def test_a_launcher_that_wraps_otherwise_is_not_recorded(driver: FakeDriver) -> None:
    out, x, rows = tensor(4096), tensor(4096), tensor(4096)
    kernel = FakeKernel(driver, BOXES)
    wrapped = kernel.compiled.run.launch
    kernel.compiled.run.launch = lambda *arguments: wrapped(*arguments)
    with recording([out, x, rows]) as record:
        launch_boxes(kernel, out, x, rows)
    assert len(driver.take()) == 1
    assert not record.complete


def test_a_launch_with_a_tensor_of_nobody_is_a_bug(driver: FakeDriver) -> None:
    out, x = tensor(), tensor()
    with pytest.raises(AssertionError, match="does not know"), recording([out]):
        launch_plain(FakeKernel(driver, PLAIN), out, x)
    assert triton_launch._ACTIVE.recording is None
