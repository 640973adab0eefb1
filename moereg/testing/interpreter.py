"""Repairs of Triton's interpreter, without which kernels in bfloat16 or fp8 cannot be checked on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np


def patch_interpreter() -> None:
    """Makes `tl.dot` and rounding to bfloat16 correct under `TRITON_INTERPRET=1`; does nothing the second time.

    Triton 3.6 to 3.9 keep bfloat16 as the uint16 of its bits. Their interpreter multiplies those integers in `tl.dot`
    and raises nothing, and it truncates float32 to bfloat16 where a GPU rounds to nearest even. Products of int8 wrap
    in 3.6 and 3.7. Operands are therefore widened here, to float32 or int32, before the product: exact for every
    16-bit and 8-bit float. Elementwise arithmetic on bfloat16 stays wrong, so kernels widen before they compute.

    Mutates Triton's interpreter for the whole process, and only that: compiled kernels are not touched.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder: Any = interpreter.InterpreterBuilder
    if getattr(builder.create_dot, "_patched_by_moereg", False):
        return
    convert = interpreter._convert_float

    def widen(handle: Any) -> np.ndarray[Any, Any]:
        dtype = handle.dtype.scalar
        if not dtype.is_floating():
            return np.asarray(handle.data, dtype=np.int32)
        if handle.data.dtype.kind == "u":
            return np.asarray(convert(handle.data, dtype, tl.float32, None).view(np.float32))
        return np.asarray(handle.data, dtype=np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        # numpy's product, because torch's wakes its thread pool, which takes 10 ms for a tile on a busy machine.
        product = np.matmul(widen(a), widen(b))
        return interpreter.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    def convert_float(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source == tl.bfloat16 and target == tl.float32:
            # The same as Triton's, only faster: loads of bfloat16 are most of what a kernel does here.
            return data.astype(np.uint32) << 16
        nearest = rounding_mode is None or rounding_mode == interpreter._ir.ROUNDING_MODE.RTNE
        if source != tl.float32 or target != tl.bfloat16 or not nearest:
            return convert(data, source, target, rounding_mode)
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
        # Half of the last kept bit, less one where that bit is even, carries exactly where nearest-even rounds up.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, rounded).astype(np.uint16)

    create_dot._patched_by_moereg = True  # type: ignore[attr-defined]
    builder.create_dot = create_dot
    interpreter._convert_float = convert_float
