"""What `patch_interpreter` keeps from one operation to the next is what Triton would make anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from moereg.testing.interpreter import patch_interpreter


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


def test_dtypes_of_numpy_are_those_of_types() -> None:
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
