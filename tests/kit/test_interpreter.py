"""What `patch_interpreter` keeps is what Triton would make anew, and kernels stay inside their tensors."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from moereg.testing.interpreter import OutOfBoundsError, check_pointers, patch_interpreter


@pytest.fixture(autouse=True)
def _patched_interpreter() -> None:
    patch_interpreter()


def _add_one(x):  # type: ignore[no-untyped-def]
    return x + 1


def _add_two(x):  # type: ignore[no-untyped-def]
    return add_one(add_one(x))


def _write(out, fails):  # type: ignore[no-untyped-def]
    tl.static_assert(not fails)
    places = tl.arange(0, 4)
    tl.store(out + places, add_two(add_two(places)))


def _store_size(out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(out + tl.program_id(0), SIZE)


# Not `triton.jit`, which compiles where there is a device.
add_one: Any = interpreter.InterpretedFunction(_add_one)
add_two: Any = interpreter.InterpretedFunction(_add_two)
write: Any = interpreter.InterpretedFunction(_write)


def test_a_launch_patches_the_language_once_and_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    num_patched = 0
    patch_lang_core = interpreter._patch_lang_core

    def count(*args: Any) -> None:
        nonlocal num_patched
        num_patched += 1
        patch_lang_core(*args)

    monkeypatch.setattr(interpreter, "_patch_lang_core", count)
    load, is_block = tl.load, tl.core.dtype.is_block
    for number in (1, 2):
        out = torch.zeros(4, dtype=torch.int32)
        write[(1,)](out, fails=0)
        assert out.tolist() == [4, 5, 6, 7]
        assert num_patched == number
        assert tl.load is load
    with pytest.raises(interpreter.InterpreterError):
        write[(1,)](out, fails=1)
    assert tl.load is load
    assert tl.core.dtype.is_block is is_block
    out = torch.zeros(4, dtype=torch.int32)
    write[(1,)](out, fails=0)
    assert out.tolist() == [4, 5, 6, 7]
    assert num_patched == 4


def test_a_device_function_patches_what_its_kernel_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module names `triton.language.core`, the kernel's does not."""
    for name, member in list(vars(tl.core).items()):
        monkeypatch.setattr(tl.core, name, member)  # Puts back what Triton leaves patched.
    names = {"core": tl.core, "__name__": __name__}
    scope: dict[str, Any] = {}
    exec("def widen(x):\n    return core.maximum(x, 2)\n", names, scope)
    widen = interpreter.InterpretedFunction(scope["widen"])
    kernel = "def kernel(out):\n    places = tl.arange(0, 4)\n    tl.store(out + places, widen(places))\n"
    exec(kernel, {"tl": tl, "widen": widen, "__name__": __name__}, scope)
    out = torch.zeros(4, dtype=torch.int32)
    interpreter.InterpretedFunction(scope["kernel"])[(1,)](out)
    assert out.tolist() == [2, 2, 2, 3]


TYPES = (tl.float32, tl.int1, tl.pointer_type(tl.float32), tl.pointer_type(tl.float32, const=True), tl.bfloat16)


def test_types_of_blocks_differ_by_element_and_sizes() -> None:
    shapes = ([4], [4, 1], [1, 4], [tl.constexpr(8), 4], [4, 8], tl.tuple([8, 8]), [2, 2, 2])
    made = {}
    for _ in range(2):  # The second time all are kept.
        for element in TYPES:
            for shape in shapes:
                block = tl.block_type(element, shape)
                sizes = [getattr(size, "value", size) for size in shape]
                assert block.element_ty == element
                assert list(block.shape) == sizes
                assert block.numel == torch.Size(sizes).numel()
                assert block.name == f"<{block.shape}, {element}>"
                made[str(element), tuple(sizes)] = block
    assert len(made) == len(TYPES) * len(shapes)
    for key, block in made.items():
        assert [other for other, one in made.items() if one == block] == [key]
    other_space = tl.block_type(tl.pointer_type(tl.float32, 3), [4])
    assert other_space.element_ty.address_space == 3
    assert made[str(tl.pointer_type(tl.float32)), (4,)].element_ty.address_space == 1


def test_sizes_that_triton_refuses_are_refused_after_ones_that_equal_them() -> None:
    tl.block_type(tl.float32, [2])
    for _ in range(2):
        for shape, error in (([2.0], TypeError), ([3], ValueError), ([2**31], ValueError), ([], TypeError)):
            with pytest.raises(error):
                tl.block_type(tl.float32, shape)


def test_tensors_have_the_sizes_of_their_types_and_handles_of_their_own() -> None:
    for element in TYPES:
        for shape in ([4], [4, 2]):
            block = tl.block_type(element, shape)
            first, second = tl.tensor("one", block), tl.tensor("two", tl.block_type(element, shape))
            assert (first.handle, second.handle) == ("one", "two")
            for tensor in (first, second):
                assert tensor.type == block
                assert [size.value for size in tensor.shape] == shape
                assert tensor.numel.value == torch.Size(shape).numel()
                assert tensor.dtype == element
        scalar = tl.tensor("three", element)
        assert (scalar.handle, scalar.type, scalar.dtype, scalar.numel.value) == ("three", element, element, 1)

    # And so do dtypes of numpy.
    for _ in range(2):
        for element, name in ((tl.bfloat16, "uint16"), (tl.int1, "bool"), (tl.pointer_type(tl.int8), "uint64")):
            for dtype in (element, tl.block_type(element, [4])):
                assert interpreter._get_np_dtype(dtype) == name


def _add(out, x, y):  # type: ignore[no-untyped-def]
    rows, columns = tl.arange(0, 4), tl.arange(0, 2)
    total = tl.load(x + rows)[:, None] + tl.load(y + columns)[None, :]
    tl.static_assert(total.shape[1] == 2)
    tl.store(out + rows[:, None] * 2 + columns[None, :], total + total)


def test_sums_broadcast_and_wrap_and_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    create_add = interpreter.InterpreterBuilder.create_add

    def count(self: Any, left: Any, right: Any) -> Any:
        widths.append(left.data.itemsize)
        return create_add(self, left, right)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_add", count)
    x, y = torch.tensor([1, 2**30, -5, 0], dtype=torch.int32), torch.tensor([3, -7], dtype=torch.int32)
    out = torch.zeros(4, 2, dtype=torch.int32)
    interpreter.InterpretedFunction(_add)[(1,)](out, x, y)
    assert torch.equal(out, 2 * (x[:, None] + y[None, :]))
    assert widths == [4, 4]  # Addresses have an operation of their own.


# Below: a kernel that leaves the tensors it was given is an error that names kernel and argument.
def _copy(out, x, first, limit):  # type: ignore[no-untyped-def]
    places = tl.arange(0, 4) + first
    tl.store(out + tl.arange(0, 4), tl.load(x + places, mask=places < limit))


def _write_places(out, x, first, limit):  # type: ignore[no-untyped-def]
    places = tl.arange(0, 4) + first
    tl.store(x + places, places.to(tl.float32), mask=places < limit)


def _copy_by_number(out, x, first, limit):  # type: ignore[no-untyped-def]
    places = (x.to(tl.int64) + first * 4).to(tl.pointer_type(tl.float32)) + tl.arange(0, 4)
    tl.store(out + tl.arange(0, 4), tl.load(places))


def _add_at(out, x, first, limit):  # type: ignore[no-untyped-def]
    tl.atomic_add(x + first + tl.arange(0, 4), 1.0)


def _copy_selected(out, x, first, limit):  # type: ignore[no-untyped-def]
    lanes = tl.arange(0, 4)
    tl.store(out + lanes, tl.load(tl.where(lanes < 2, out + lanes, x + lanes + first)))


def _copy_block(out, x, first, limit):  # type: ignore[no-untyped-def]
    rows, columns = tl.arange(0, 2)[:, None], tl.arange(0, 2)[None, :]
    tl.store(out + rows * 2 + columns, tl.load(x + first + rows * 2 + columns))


def _launch(kernel: Any, first: int, limit: int = 100) -> torch.Tensor:
    """`x` is the middle third of a buffer, so what lies around it is readable memory of somebody else."""
    buffer, out = torch.arange(12.0), torch.zeros(4)
    interpreter.InterpretedFunction(kernel)[(1,)](out, buffer[4:8], first, limit)
    return out


KERNELS = {_copy: "load", _write_places: "store", _copy_by_number: "load", _add_at: "atomic", _copy_selected: "load"}


@pytest.mark.parametrize("first", [1, -1])
@pytest.mark.parametrize("kernel", [*KERNELS, _copy_block])
def test_leaving_a_view_of_a_larger_buffer_is_an_error(kernel: Any, first: int) -> None:
    _launch(kernel, 0)
    if first < 0 and kernel is _copy_selected:
        first = -3  # Its first two lanes read the other tensor.
    byte = 4 * first if kernel is not _copy_selected else {1: 16, -3: -4}[first]
    byte = 16 if first > 0 else byte
    access = KERNELS.get(kernel, "load")
    with pytest.raises(OutOfBoundsError, match=rf"^{kernel.__name__}: {access} of 4 bytes at byte {byte} of 'x'.* 16 "):
        _launch(kernel, first)


def test_a_number_that_is_half_outside_is_an_error() -> None:
    out, kernel = torch.zeros(4), interpreter.InterpretedFunction(_copy_by_number)
    with pytest.raises(OutOfBoundsError, match="load of 4 bytes at byte 12 of 'x', which has 14 bytes"):
        kernel[(1,)](out, torch.zeros(16, dtype=torch.uint8)[:14], 0, 0)


def test_the_line_that_leaves_a_tensor_is_named() -> None:
    line = inspect.getsourcelines(_copy_by_number)[1] + 2  # Of its load.
    kernel = interpreter.InterpretedFunction(_copy_by_number)
    with pytest.raises(OutOfBoundsError, match=rf"\(lane 3 in test_interpreter.py:{line}\)$"):
        kernel[(1,)](torch.zeros(4), torch.zeros(16, dtype=torch.uint8)[:14], 0, 0)


def test_an_autotuner_takes_its_first_configuration() -> None:
    kernel: Any = interpreter.InterpretedFunction(_store_size)
    configurations = [triton.Config({"SIZE": size}) for size in (4, 8)]
    for grid in ((1,), lambda meta: (meta["SIZE"] // 4,)):
        out = torch.zeros(2, dtype=torch.int32)
        triton.autotune(configurations, key=[])(kernel)[grid](out)
        assert out.tolist() == [4, 0]
    assert len(configurations) == 2


def test_masked_lanes_may_point_anywhere() -> None:
    assert _launch(_copy, 2, limit=4).tolist()[:2] == [6, 7]
    _launch(_write_places, 1 << 40, limit=0)


def test_a_strided_view_ends_at_its_last_element() -> None:
    buffer, out = torch.arange(12.0), torch.zeros(4)
    kernel: Any = interpreter.InterpretedFunction(_copy)
    kernel[(1,)](out, buffer[::3], 6, 100)  # 10 elements from the first to the last.
    assert out.tolist() == [6, 7, 8, 9]
    with pytest.raises(OutOfBoundsError, match="at byte 40 of 'x', which has 40 bytes"):
        kernel[(1,)](out, buffer[::3], 7, 100)


def _copy_described(out, x):  # type: ignore[no-untyped-def]
    tl.store(out + tl.arange(0, 4), x.load([0]))


def test_a_descriptor_larger_than_its_tensor_is_an_error() -> None:
    out, kernel = torch.zeros(4), interpreter.InterpretedFunction(_copy_described)
    x = torch.arange(8.0)[:3]
    kernel[(1,)](out, TensorDescriptor(x, [3], [1], [4]))
    assert out.tolist() == [0, 1, 2, 0]
    with pytest.raises(OutOfBoundsError, match="at byte 12 of 'x', which has 12 bytes"):
        kernel[(1,)](out, TensorDescriptor(x, [4], [1], [4]))


def test_a_version_of_triton_without_a_name_runs_unchecked_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = {name: getattr(interpreter, name) for name in ("InterpreterError", "_interpreter", "_unwrap_tensor")}
    check_pointers(SimpleNamespace(**names))
    (line,) = caplog.messages
    assert line.startswith("pointers of interpreted kernels are not checked")
    assert "_implicit_cvt" in line
