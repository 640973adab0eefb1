"""Recorded launches, through the CUDA launcher of the Triton that is installed, with a fake C function at its end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
import triton
from triton.backends.nvidia import driver as nvidia

from moereg.backends._loaded import Call, LoadedExperts
from moereg.backends._triton.recorded import Recorded
from moereg.experts import ExpertInputs, Experts
from moereg.kernels.launch import remembered, replay
from moereg.kernels.launch.remembered import forget_recordings
from moereg.kernels.launch.replay import launch, recording
from moereg.platforms import Platform
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights, PermutedWeights

META = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
BOX = "tensordesc<bf16[64,64],layout>"


@dataclass(frozen=True)
class FakeMap:
    """A tensor map: the tensor that it was encoded from."""

    arguments: tuple[Any, ...]


def _flat(values: Iterable[Any]) -> list[Any]:
    parts = (_flat(value) if isinstance(value, (list, tuple)) else [value] for value in values)
    return [part for each in parts for part in each]


class FakeDriver:
    """Records launches and counts the encoded maps."""

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
        flat = _flat(arguments)
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
        meta = [META for kind in signature.values() if str(kind).startswith("tensordesc")]
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


class Shape(NamedTuple):
    rows: int
    masked: bool


class Nested(NamedTuple):
    out: torch.Tensor
    inner: tuple[torch.Tensor, None, int]


@pytest.mark.parametrize("is_constant", [False, True])
def test_what_belongs_together_is_one_tuple(driver: FakeDriver, is_constant: bool) -> None:
    """Pointers in nested tuples are put in anew, and none is looked for in a constant with fields."""
    nested = {"gemm": ("*i32", ("*i32", "constexpr", "i32")), "count": "i32"}
    kernel = FakeKernel(driver, PLAIN if is_constant else nested)
    out, x, other_out, other_x = tensor(), tensor(), tensor(), tensor()

    def launch_tuple(out: torch.Tensor, x: torch.Tensor) -> None:
        if is_constant:
            launch(kernel, (5, 2), out, x[16:], None, 4, BLOCK=Shape(16, True), num_warps=4)
        else:
            launch(kernel, (5,), Nested(out, (x[16:], None, 4)), 4, num_warps=4)

    with recording([out, None, x]) as record:
        launch_tuple(out, x)
    assert record.complete
    driver.take()
    launch_tuple(other_out, other_x)
    expected = driver.take()
    record.replay([other_out.data_ptr(), 0, other_x.data_ptr()])
    assert driver.take() == expected


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


def test_a_recording_keeps_its_kernels_loaded_but_no_tensor(driver: FakeDriver) -> None:
    kernel = FakeKernel(driver, BOXES)
    tensors = [tensor(4096) for _ in range(3)]
    with recording(tensors) as record:
        launch_boxes(kernel, *tensors)
    assert record.complete
    driver.take()
    references, compiled = [weakref.ref(one) for one in tensors], weakref.ref(kernel.compiled)
    del tensors, kernel
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]
    assert compiled() is not None
    del record
    gc.collect()
    assert compiled() is None


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


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_launchers_that_are_not_known_are_not_recorded(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, is_wrapped: bool
) -> None:
    """Of another Triton, and one that wraps the C function otherwise."""
    out, x, rows = tensor(4096), tensor(4096), tensor(4096)
    kernel = FakeKernel(driver, BOXES)
    if is_wrapped:
        wrapped = kernel.compiled.run.launch
        kernel.compiled.run.launch = lambda *arguments: wrapped(*arguments)
    else:
        monkeypatch.setattr(triton, "__version__", "4.0.0")
    with recording([out, x, rows]) as record:
        launch_boxes(kernel, out, x, rows)
    assert len(driver.take()) == 1
    assert not record.complete


def test_a_launch_with_a_tensor_of_nobody_is_a_bug(driver: FakeDriver) -> None:
    out, x = tensor(), tensor()
    with pytest.raises(AssertionError, match="does not know"), recording([out]):
        launch_plain(FakeKernel(driver, PLAIN), out, x)
    assert replay._ACTIVE.recording is None


# --- experts that record ---


class OnGpu(torch.Tensor):
    """Memory of the host that calls itself a GPU's."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]


LAYER = {"out": "*i32", "x": "*i32", "ids": "*i32", "map": "*i32", "scratch": "*i32", "w13": "*i32", "rows": "i32"}


class Launching(Recorded):
    """Launches a kernel that is passed the number of rows."""

    recorded_weights = ("w13", "w13_bias")
    plan_bytes = work = select = None  # Of what `launch` replaces.

    def __init__(self, experts: Experts, kernel: FakeKernel) -> None:
        super().__init__(experts)
        self.kernel = kernel
        self.launches = 0

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        raise NotImplementedError

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        raise NotImplementedError

    def launch(self, call: Call) -> None:
        self.launches += 1
        inputs = call.inputs
        rows = inputs.hidden_states.shape[-2]
        tensors = (call.out, inputs.hidden_states, inputs.topk_ids, inputs.expert_map, call.workspace13)
        launch(self.kernel, (rows,), *tensors, call.weights["w13"], rows=rows)


class LaunchingExperts(LoadedExperts):
    layouts = ("canonical",)

    def __init__(self, kernel: FakeKernel, top_k: int = 2) -> None:
        problem = MoEProblem(num_experts=8, hidden_size=16, intermediate_size=16, top_k=top_k)
        self.kernel = kernel
        super().__init__(problem, Platform.from_name("cuda:sm90"))

    def _load(self) -> Launching:
        return Launching(self, self.kernel)


class RecordedLayer:
    """Calls recorded experts on new tensors; returns their launches."""

    def __init__(self, driver: FakeDriver, top_k: int = 2) -> None:
        self._driver = driver
        self.experts = LaunchingExperts(FakeKernel(driver, LAYER), top_k)
        self.launching = cast(Launching, self.experts.implementation)
        self._kept: list[torch.Tensor] = []

    def tensor(self, *shape: int, shift: int = 0) -> torch.Tensor:
        numel = 1
        for size in shape:
            numel *= size
        # Torch's allocator aligns to 64 bytes; one element further is 4 bytes past that.
        made = torch.zeros(numel + 4, dtype=torch.int32)[shift : shift + numel].view(shape).as_subclass(OnGpu)
        self._kept.append(made)
        return made

    def __call__(
        self,
        num_tokens: int,
        *,
        shift: int = 0,
        has_map: bool = True,
        hidden_size: int = 16,
        batches: int = 0,
        out_dtype: torch.dtype = torch.int32,
        num_rows: int = 16,
    ) -> tuple[list[int | None], list[list[Any]]]:
        shape = (batches, num_tokens, hidden_size) if batches else (num_tokens, hidden_size)
        out, x, scratch = self.tensor(*shape).view(out_dtype), self.tensor(*shape, shift=shift), self.tensor(64)
        weights, ids = self.tensor(num_tokens, 2), self.tensor(num_tokens, 2)
        expert_map = self.tensor(8) if has_map else None
        w13 = self.tensor(8, num_rows, 16)
        inputs = ExpertInputs(x, weights, ids, expert_map=expert_map)
        self.experts.apply(out, inputs, PermutedWeights("canonical", {"w13": w13}), scratch, self.tensor(64))
        pointers = [each if each is None else each.data_ptr() for each in (out, x, ids, expert_map, scratch, w13)]
        return [*pointers, num_tokens], self._driver.take()


@pytest.fixture
def layer(driver: FakeDriver) -> Iterator[RecordedLayer]:
    forget_recordings()
    yield RecordedLayer(driver)
    forget_recordings()


def launched_with(found: list[list[Any]]) -> list[list[Any]]:
    """Grid and arguments of each launch, without what a launcher adds between them."""
    size = len(LAYER)
    return [[*launched[:3], *launched[-size:]] for launched in found]


def test_equal_calls_are_replayed_with_their_own_tensors(layer: RecordedLayer) -> None:
    for number in range(3):
        expected, found = layer(4)
        assert launched_with(found) == [[4, 1, 1, *expected]], number
    assert layer.launching.launches == 1


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 5},
        {"has_map": False},
        {"hidden_size": 32},
        {"batches": 3},
        {"out_dtype": torch.float32},
        {"num_rows": 8},
    ],
    ids=lambda change: str(change),
)
def test_what_a_launch_depends_on_is_recorded_anew(layer: RecordedLayer, change: dict[str, Any]) -> None:
    layer(4)
    expected, found = layer(**{"num_tokens": 4, **change})
    assert layer.launching.launches == 2
    assert launched_with(found) == [[expected[-1], 1, 1, *expected]]
    expected, found = layer(4)
    assert layer.launching.launches == 2, "the first recording is still there"
    assert launched_with(found) == [[4, 1, 1, *expected]]


def test_pointers_that_are_not_aligned_are_never_replayed(layer: RecordedLayer) -> None:
    layer(4)
    for number in (2, 3):
        expected, found = layer(4, shift=1)
        assert expected[1] % 16 == 4
        assert layer.launching.launches == number
        assert launched_with(found) == [[4, 1, 1, *expected]]
    layer(4)
    assert layer.launching.launches == 3, "nor recorded"


def test_layers_of_one_shape_share_recordings_and_others_do_not(driver: FakeDriver, layer: RecordedLayer) -> None:
    layer(4)
    twin, other = RecordedLayer(driver), RecordedLayer(driver, top_k=3)
    for one, launches in ((twin, 0), (other, 1), (layer, 1), (twin, 0)):
        expected, found = one(4)
        assert launched_with(found) == [[4, 1, 1, *expected]]
        assert one.launching.launches == launches


def test_experts_keep_no_weights(layer: RecordedLayer) -> None:
    layer(4)
    kept = [weakref.ref(tensor) for tensor in layer._kept]
    layer._kept.clear()
    gc.collect()
    assert [each() for each in kept] == [None] * len(kept)


def test_a_launch_is_remembered_by_all_that_it_depends_on(
    driver: FakeDriver, layer: RecordedLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two recordings are kept: those that were used last."""
    monkeypatch.setattr(remembered, "_MAX_RECORDINGS", 2)
    kernels = [FakeKernel(driver, dict.fromkeys(names, "*i32")) for names in ("x", "xy")]

    def is_new(what: str, *tensors: torch.Tensor, numbers: object = ()) -> bool:
        """Whether a call is launched and not replayed; either way it gets its own pointers."""
        calls: list[int] = []

        def launches() -> None:
            calls.append(1)
            launch(kernels[len(tensors) - 1], (1,), *tensors)

        remembered.launch_remembered(what, launches, (*tensors, None), numbers)
        (arguments,) = driver.take()
        assert arguments[-len(tensors) :] == [each.data_ptr() for each in tensors]
        return bool(calls)

    x, y, odd, apart = layer.tensor(4), layer.tensor(4), layer.tensor(4, shift=1), layer.tensor(8)[::2]
    assert [is_new("a", each) for each in (x, y)] == [True, False]
    # Other kernels, other numbers, and pointers that are not multiples of 16.
    assert is_new("b", x)
    assert not is_new("a", x)
    assert is_new("b", x, numbers=1)
    assert not is_new("a", x)
    assert is_new("b", odd, numbers=1)
    assert not is_new("b", y, numbers=1)
    # Another tensor beside the first, and other strides.
    assert is_new("b", y, x, numbers=1)
    assert is_new("b", apart, numbers=1)
    assert is_new("b", x, numbers=1)
    assert len(remembered._RECORDINGS) == 2
    assert is_new("a", x)  # It was not used for longest.
    for recorded in remembered._RECORDINGS.values():
        recorded.complete = False
    assert is_new("a", x)
