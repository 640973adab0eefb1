"""In the interpreter a kernel that leaves the tensors it was given is an error that names kernel and argument."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from moereg.testing.interpreter import OutOfBoundsError, check_pointers, patch_interpreter


@pytest.fixture(autouse=True)
def _patched_interpreter() -> None:
    patch_interpreter()


def _copy(out, x, first, limit):  # type: ignore[no-untyped-def]
    places = tl.arange(0, 4) + first
    tl.store(out + tl.arange(0, 4), tl.load(x + places, mask=places < limit))


def _write(out, x, first, limit):  # type: ignore[no-untyped-def]
    places = tl.arange(0, 4) + first
    tl.store(x + places, places.to(tl.float32), mask=places < limit)


def _copy_by_number(out, x, first, limit):  # type: ignore[no-untyped-def]
    places = (x.to(tl.int64) + first * 4).to(tl.pointer_type(tl.float32)) + tl.arange(0, 4)
    tl.store(out + tl.arange(0, 4), tl.load(places))


def _add(out, x, first, limit):  # type: ignore[no-untyped-def]
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


KERNELS = {_copy: "load", _write: "store", _copy_by_number: "load", _add: "atomic", _copy_selected: "load"}


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


def test_masked_lanes_may_point_anywhere() -> None:
    assert _launch(_copy, 2, limit=4).tolist()[:2] == [6, 7]
    _launch(_write, 1 << 40, limit=0)


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
