"""Repairs Triton's interpreter, so that kernels in bfloat16 or fp8 can be checked on a CPU.

It also checks that kernels stay inside their tensors.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import operator
import os
import traceback
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import torch

_LOGGER = logging.getLogger("moereg")

# User-space addresses have 47 bits. The bits above hold the argument's number, so that whatever is computed from a
# pointer, even through casts and selects, still carries its origin.
_ADDRESS_BITS = 48
_ADDRESS_MASK = np.uint64((1 << _ADDRESS_BITS) - 1)

# Private names of Triton's interpreter in 3.6 to 3.8.
_NAMES: Final = ("InterpreterError", "_interpreter", "_implicit_cvt", "_unwrap_tensor", "GridExecutor._init_args_hst")


def patch_interpreter() -> None:
    """Makes bfloat16 and 8-bit floats correct under `TRITON_INTERPRET=1`; does nothing the second time.

    Triton 3.6 to 3.9 represent bfloat16 as uint16 bits. Their interpreter multiplies those integers in `tl.dot` without
    an error, and truncates float32 to bfloat16 where a GPU rounds to nearest even. From float32 to 8-bit floats it
    rounds ties up, loses carries and makes wrong subnormals; back it reads NaN as a number. Products of int8 wrap in
    3.6 and 3.7. So operands are widened here to float32 or int32 before the product, exact for every 16-bit and 8-bit
    float. `tl.dot_scaled` reads every scale as a power of two there; here float8_e4m3fn scales are read correctly.
    Elementwise +, -, * and fma of bfloat16 are widened and rounded too; other arithmetic on it stays wrong, so kernels
    widen before they compute. `tl.fma` rounds its product there, but not here. Numbers beyond the range of an 8-bit
    float become what torch makes of them, so kernels saturate before they round.

    A lane that accesses memory outside the argument that its address came from raises an `OutOfBoundsError`. A view
    counts as its own extent, and masked lanes may point anywhere.

    An autotuner runs its first configuration: there is nothing to time. Kernels made of many small operations also take
    less than half of the time.

    Mutates Triton's interpreter for the whole process, and the constructors of its language's blocks and tensors, with
    equal results; compiled kernels are not touched.
    """
    import triton.language as tl
    from triton.runtime import autotuner, interpreter

    builder: Any = interpreter.InterpreterBuilder
    if getattr(builder.create_dot, "_patched_by_moereg", False):
        return
    convert = interpreter._convert_float
    multiply_add = builder.create_fma
    # Each dtype's torch dtype and the values of its 256 codes.
    codes = torch.arange(256, dtype=torch.uint8)
    float8 = {
        language_dtype: (dtype, codes.view(dtype).float().numpy())
        for language_dtype, dtype in ((tl.float8e4nv, torch.float8_e4m3fn), (tl.float8e5, torch.float8_e5m2))
    }

    def widen(handle: Any) -> np.ndarray[Any, Any]:
        dtype = handle.dtype.scalar
        if not dtype.is_floating():
            return np.asarray(handle.data, dtype=np.int32)
        if dtype == tl.bfloat16:
            return np.asarray((handle.data.astype(np.uint32) << 16).view(np.float32))
        if handle.data.dtype.kind == "u":
            return np.asarray(convert_float(handle.data, dtype, tl.float32, None).view(np.float32))
        return np.asarray(handle.data, dtype=np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        # numpy, because torch wakes its thread pool, which takes 10 ms per tile on a busy machine.
        product = np.matmul(widen(a), widen(b))
        return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        dtype = z.dtype.scalar
        if dtype not in (tl.float16, tl.bfloat16, tl.float32):
            return multiply_add(self, x, y, z)
        # The product is exact in float64, and rounding its sum to 32 or 16 bits hides the sum's own error.
        factor, other, addend = (
            (widen(handle) if dtype == tl.bfloat16 else handle.data).astype(np.float64) for handle in (x, y, z)
        )
        wide = factor * other + addend
        if dtype == tl.bfloat16:
            rounded = convert_float(wide.astype(np.float32), tl.float32, tl.bfloat16, None)
        else:
            rounded = wide.astype(z.data.dtype)
        return interpreter.TensorHandle(rounded, dtype)

    def convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source == tl.bfloat16 and target == tl.float32:
            # Triton's result, only faster: loading bfloat16 is most of an interpreted kernel's work.
            return data.astype(np.uint32) << 16
        nearest = rounding_mode is None or rounding_mode == interpreter._ir.ROUNDING_MODE.RTNE
        if source in float8 and target == tl.float32:
            return float8[source][1][data].view(np.uint32)
        if source == tl.float32 and target in float8 and nearest:
            values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            return values.to(float8[target][0]).view(torch.uint8).numpy()
        if source != tl.float32 or target != tl.bfloat16 or not nearest:
            return convert(data, source, target, rounding_mode)
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
        # Adding half of the last kept bit, less one if that bit is 0, carries exactly where nearest-even rounds up.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)

    splat = builder.create_splat

    def create_splat(self: Any, shape: Any, value: Any) -> Any:
        # A comparison keeps its operands' type. Triton 3.9 splats a scalar one into integers, which are no mask.
        is_mask = value.data.dtype == np.bool_ and not isinstance(value.dtype, tl.block_type)
        return splat(self, shape, interpreter.TensorHandle(value.data, tl.int1) if is_mask else value)

    def widening(name: str, operation: Any) -> Any:
        create = getattr(builder, name)

        def create_wide(self: Any, left: Any, right: Any) -> Any:
            if left.dtype.scalar != tl.bfloat16:
                return create(self, left, right)
            wide = operation(widen(left), widen(right))
            return interpreter.TensorHandle(convert_float(wide, tl.float32, tl.bfloat16, None), left.dtype.scalar)

        return create_wide

    # Only kernels with such scales need this function; they require Triton 3.8, which has it.
    prepare: Any = getattr(interpreter, "_prepare_dot_scaled_operand", None)

    def prepare_dot_scaled(values: Any, scale: Any, *others: Any, **named: Any) -> Any:
        if scale is None or scale.dtype.scalar != tl.float8e4nv:
            return prepare(values, scale, *others, **named)
        restored = prepare(values, None, *others, **named)
        # By name, since Triton 3.9 has one more argument. The right side's scales are [N, groups], its values [K, N].
        is_rhs = inspect.signature(prepare).bind(values, scale, *others, **named).arguments["is_rhs"]
        axis, factors = (-2, widen(scale).swapaxes(-1, -2)) if is_rhs else (-1, widen(scale))
        return restored * np.repeat(factors, restored.shape[axis] // factors.shape[axis], axis)

    if prepare is not None:
        interpreter._prepare_dot_scaled_operand = prepare_dot_scaled
    for name, operation in (("create_fadd", np.add), ("create_fsub", np.subtract), ("create_fmul", np.multiply)):
        setattr(builder, name, widening(name, operation))
    builtin_names: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, *scope: Any) -> None:
        # Triton's own searches the language at each call of a device function, a third of the time if calls are many.
        if package not in builtin_names:
            members = inspect.getmembers(package)
            builtin_names[package] = [member_name for member_name, member in members if tl.core.is_builtin(member)]
        for member_name in builtin_names[package]:
            member = getattr(package, member_name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, member_name, member, *scope)

    interpreter._patch_builtin = patch_builtin
    create_dot._patched_by_moereg = True  # type: ignore[attr-defined]
    builder.create_dot = create_dot
    builder.create_fma = create_fma
    builder.create_splat = create_splat
    interpreter._convert_float = convert_float
    # The overflow check repeats sums and products of short integers in 64 bits, but reports only when debugging.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)
    _keep_what_is_made_again(interpreter)
    _patch_once_a_launch(interpreter)
    tuner: Any = autotuner.Autotuner
    tune = tuner.run

    def run_first(self: Any, *args: Any, **named: Any) -> Any:
        function = self.fn
        while isinstance(function, (autotuner.Autotuner, autotuner.Heuristics)):
            function = function.fn
        if isinstance(function, interpreter.InterpretedFunction):
            self.configs = self.configs[:1]  # With more, Triton asks for a driver, which a CPU lacks.
        return tune(self, *args, **named)

    tuner.run = run_first
    check_pointers(interpreter)


def _keep_what_is_made_again(interpreter: Any) -> None:
    """Caches block types and the fields that tensors derive from them, which Triton rebuilds at each operation.

    Rebuilding took most of the time of a kernel made of many small operations.
    """
    import triton.language as tl

    language: Any = tl
    find_dtype, make_block, make_tensor = (
        interpreter._get_np_dtype,
        language.block_type.__init__,
        language.tensor.__init__,
    )
    semantic: Any = type(interpreter.interpreter_semantic)
    broadcast = semantic.broadcast_impl_value
    dtypes: dict[str, Any] = {}
    blocks: dict[object, dict[str, Any]] = {}

    def get_np_dtype(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = find_dtype(dtype)
        return dtypes[dtype.name]

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, language.constexpr) else size for size in shape]
        # As text, since 2.0 equals 2.
        key = element_ty.name, getattr(element_ty, "address_space", None), str(sizes)
        if key in blocks:
            self.__dict__.update(blocks[key])
            return
        make_block(self, element_ty, shape)
        self._of_tensors, self._sizes = {}, key[2]
        blocks[key] = self.__dict__

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        kept: dict[str, Any] | None = type.__dict__.get("_of_tensors")
        if kept:
            self.__dict__.update(kept)
            self.handle, self.type = handle, type
            return
        make_tensor(self, handle, type)
        # Further fields of another Triton version may belong to the tensor.
        if kept is not None and vars(self).keys() == {"handle", "type", "shape", "numel", "dtype"}:
            kept.update(shape=self.shape, numel=self.numel, dtype=self.dtype)

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        sizes = vars(lhs.type).get("_sizes")
        if sizes is not None and sizes == vars(rhs.type).get("_sizes"):
            return lhs, rhs  # Triton's result, without its loop over sizes.
        return tuple(broadcast(self, lhs, rhs))

    interpreter._get_np_dtype = get_np_dtype
    semantic.broadcast_impl_value = broadcast_impl_value
    language.block_type.__init__ = init_block
    language.tensor.__init__ = init_tensor


def _patch_once_a_launch(interpreter: Any) -> None:
    """Patches the language once per launch; Triton does so at every call of a device function, to no effect."""
    import triton.language as tl

    modules = {"triton.language": tl, "triton.language.core": tl.core}
    patch_language, run_grid = interpreter._patch_lang, interpreter.GridExecutor.__call__
    # The patched modules of each running launch.
    patched: list[set[str]] = []
    seen: dict[Any, frozenset[str]] = {}

    def patch(function: Any) -> Any:
        if function not in seen:
            values = list(function.__globals__.values())
            seen[function] = frozenset(
                name for name, module in modules.items() if any(value is module for value in values)
            )
        if patched:
            if seen[function] and seen[function] <= patched[-1]:
                return None
            patched[-1].update(seen[function])
        return patch_language(function)

    def run(self: Any, *args: Any, **named: Any) -> Any:
        patched.append(set())
        try:
            return run_grid(self, *args, **named)
        finally:
            patched.pop()

    interpreter._patch_lang = patch
    interpreter.GridExecutor.__call__ = run


class OutOfBoundsError(Exception):
    """An unmasked lane accesses memory outside the argument that its address was derived from."""


def _line() -> str:
    """The innermost running line of an interpreted kernel, as `my_triton.py:31`."""
    for frame, line in traceback.walk_stack(None):
        if frame.f_globals["__name__"].partition(".")[0] != "triton" and frame.f_globals is not globals():
            return f"{os.path.basename(frame.f_code.co_filename)}:{line}"
    raise AssertionError("a kernel runs")


class _Launch:
    """The tensor arguments of one launch. Number 0 stands for addresses that a kernel loaded from memory."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.passed: tuple[Any, Any] = ((), {})
        self.tensors: list[Any] = [None]
        self.starts = [0]
        self.extents = [1 << _ADDRESS_BITS]

    def add(self, tensor: Any, address: int, extent: int) -> int:
        """Returns the address tagged with the argument's number in its upper bits."""
        tagged = (len(self.tensors) << _ADDRESS_BITS) + address
        self.tensors.append(tensor)
        self.starts.append(tagged)
        self.extents.append(extent)
        return tagged

    def check(self, access: str, pointers: Any, mask: Any, width: int) -> Any:
        """Returns the real addresses, after checking that unmasked lanes are inside their arguments."""
        addresses = np.asarray(pointers).view(np.int64)
        first = addresses.item() if addresses.size == 1 else int(addresses.min())
        number = first >> _ADDRESS_BITS
        if 0 <= number < len(self.starts):
            # Masked lanes are almost always inside too, and checking all is faster than finding the unmasked ones.
            last = first if addresses.size == 1 else int(addresses.max())
            if self.starts[number] <= first and last + width <= self.starts[number] + self.extents[number]:
                return pointers & _ADDRESS_MASK
        numbers = addresses >> _ADDRESS_BITS
        offsets = addresses - np.array(self.starts).take(numbers, mode="clip")
        extents = np.array(self.extents).take(numbers, mode="clip")
        outside = (offsets < 0) | (offsets + width > extents)
        if mask is not None:
            outside = outside & mask
        if outside.any():
            lane = int(np.flatnonzero(outside)[0])
            number = min(max(int(np.ravel(numbers)[lane]), 0), len(self.tensors) - 1)
            raise OutOfBoundsError(
                f"{self.kernel.__name__}: {access} of {width} bytes at byte {int(np.ravel(offsets)[lane])} of "
                f"{self._name(number)!r}, which has {int(np.ravel(extents)[lane])} bytes (lane {lane} in {_line()})"
            )
        return pointers & _ADDRESS_MASK

    def _name(self, number: int) -> str:
        """The name of an argument, or of the tuple or descriptor that holds it."""
        for name, value in inspect.getcallargs(self.kernel, *self.passed[0], **self.passed[1]).items():
            for part in _parts(value):
                if number and (part is self.tensors[number] or getattr(part, "base", None) is self.tensors[number]):
                    return name
        return "an argument" if number else "an address from memory"


class _CheckedMemory:
    """Wraps the functions of Triton's interpreter that read and write memory."""

    def __init__(self, memory: Any, launches: list[_Launch]) -> None:
        self._memory, self._launches = memory, launches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def _check(self, access: str, pointers: Any, mask: Any, width: int) -> Any:
        return self._launches[-1].check(access, pointers, mask, width) if self._launches else pointers

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        return self._memory.load(self._check("load", pointers, mask, dtype.itemsize), mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        return self._memory.store(self._check("store", pointers, mask, value.itemsize), value, mask)

    def atomic_cas(self, pointers: Any, compared: Any, value: Any, semantics: Any) -> Any:
        real = self._check("atomic compare and swap", pointers, None, value.itemsize)
        return self._memory.atomic_cas(real, compared, value, semantics)

    def atomic_rmw(self, operation: Any, pointers: Any, value: Any, mask: Any, semantics: Any) -> Any:
        real = self._check("atomic", pointers, mask, value.itemsize)
        return self._memory.atomic_rmw(operation, real, value, mask, semantics)


def _parts(value: Any) -> Iterator[Any]:
    """The value, or the elements of nested tuples."""
    if isinstance(value, tuple):
        for part in value:
            yield from _parts(part)
    else:
        yield value


def check_pointers(interpreter: Any) -> None:
    """Makes every launch check its loads, stores and atomics; a view counts as its own extent.

    If Triton lacks a function that is replaced here, kernels run unchecked and the log says so.
    """
    try:
        operator.attrgetter(*_NAMES)(interpreter)
    except AttributeError as error:
        _LOGGER.warning("pointers of interpreted kernels are not checked with this version of Triton: %s", error)
        return
    launches: list[_Launch] = []
    convert, executor = interpreter._implicit_cvt, interpreter.GridExecutor
    init_args, run_grid = executor._init_args_hst, executor.__call__

    def init_args_and_keep(self: Any, args: Any, named: Any) -> Any:
        launches[-1].passed = init_args(self, args, named)
        return launches[-1].passed

    def convert_with_number(value: Any) -> Any:
        converted = convert(value)
        if launches and hasattr(value, "data_ptr"):
            tensor = interpreter._unwrap_tensor(value)
            size = tensor.numel()
            if not tensor.is_contiguous():  # Tensors without elements are contiguous.
                size = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            tagged = launches[-1].add(value, value.data_ptr(), size * tensor.element_size())
            converted.handle.data = np.array([tagged], dtype=np.uint64)
        return converted

    def run(self: Any, *args: Any, **named: Any) -> Any:
        launches.append(_Launch(self.fn))
        try:
            return run_grid(self, *args, **named)
        except interpreter.InterpreterError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OutOfBoundsError):
                cause = cause.__cause__
            if cause is None:
                raise
            raise cause from None
        finally:
            launches.pop()

    interpreter._interpreter = _CheckedMemory(interpreter._interpreter, launches)
    interpreter._implicit_cvt = convert_with_number
    executor._init_args_hst, executor.__call__ = init_args_and_keep, run
