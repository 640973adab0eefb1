"""The shared library: its C structures and functions, its tables of kernels, and the threads that it runs on."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

ISA_VARIABLE: Final = "MOEREG_CPU_ISA"
"""Names the table of kernels to use instead of the fastest that the processor runs."""

PATH: Final = Path(__file__).parent / "libmoereg_cpu.so"

_API: Final = 4

_pointer, _int32, _int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

FORMATS: Final = {
    "float32": 0,
    "float16": 1,
    "bfloat16": 2,
    "int8": 3,
    "float8_e4m3fn": 4,
    "uint4": 5,
    "float4_e2m1fn": 6,
    "float8_e8m0fnu": 7,
}
"""Numbers of element types, by torch's names and moereg's."""

ACTIVATIONS: Final = {"silu": 0, "swigluoai": 0, "gelu": 1, "gelu_tanh": 2, "relu2": 3, "situ": 4}


class Matrix(ctypes.Structure):
    """`moereg_cpu_matrix` of csrc/moereg_cpu.h; the other structures likewise."""

    _fields_ = (
        ("weight", _pointer),
        ("scale", _pointer),
        ("scale_2", _pointer),
        ("zero_point", _pointer),
        ("bias", _pointer),
        ("rows", _int64),
        ("columns", _int64),
        ("format", _int32),
        ("bias_format", _int32),
        ("scale_format", _int32),
        ("group_columns", _int32),
        ("group_rows", _int32),
        ("scale_halves", _int32),
        ("scale_2_halves", _int32),
        ("rounds_tokens", _int32),
        ("batch_invariant", _int32),
    )


class Layer(ctypes.Structure):
    """`moereg_cpu_layer`."""

    _fields_ = (
        ("w13", Matrix),
        ("w2", Matrix),
        ("num_experts", _int64),
        ("num_local_experts", _int64),
        ("top_k", _int64),
        ("format", _int32),
        ("out_format", _int32),
        ("activation", _int32),
        ("scales_input", _int32),
        ("has_limit", _int32),
        ("alpha", ctypes.c_float),
        ("beta", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("gate_softcap", ctypes.c_float),
        ("up_softcap", ctypes.c_float),
    )


class Threads(ctypes.Structure):
    """`moereg_cpu_threads`."""

    _fields_ = (("parallel", _pointer), ("barrier", _pointer), ("num_threads", _int32))


class Call(ctypes.Structure):
    """`moereg_cpu_call`."""

    _fields_ = (
        ("hidden_states", _pointer),
        ("topk_weights", _pointer),
        ("topk_ids", _pointer),
        ("expert_map", _pointer),
        ("expert_num_rows", _pointer),
        ("out", _pointer),
        ("workspace", _pointer),
        ("num_tokens", _int64),
    )


@dataclasses.dataclass(frozen=True)
class Library:
    """The loaded library.

    Attributes:
        run, workspace_bytes, read: Its functions, as the header describes them.
        tables: Names of its tables of kernels, the fastest last.
        runnable: Those that this processor runs.
    """

    run: Callable[..., int]
    workspace_bytes: Callable[..., int]
    read: Callable[..., int]
    tables: tuple[str, ...]
    runnable: tuple[str, ...]

    def table(self, name: str = "") -> int:
        """The number of a table; of the one that the environment names, or the fastest, where the name is empty."""
        return self.tables.index(name or os.environ.get(ISA_VARIABLE) or self.runnable[-1])


@functools.cache
def load_library() -> Library:
    """Loads the library; an OSError says why it cannot be."""
    loaded = ctypes.CDLL(str(PATH))
    if (found := loaded.moereg_cpu_api()) != _API:
        raise OSError(f"{PATH.name} has interface {found}, and this version of moereg-cpu calls interface {_API}")
    loaded.moereg_cpu_table_name.restype = ctypes.c_char_p
    loaded.moereg_cpu_workspace_bytes.argtypes = (ctypes.POINTER(Layer), _int64, _int32, _int32)
    loaded.moereg_cpu_workspace_bytes.restype = _int64
    loaded.moereg_cpu_run.argtypes = (ctypes.POINTER(Layer), ctypes.POINTER(Call), ctypes.POINTER(Threads), _int32)
    loaded.moereg_cpu_read.argtypes = (_pointer, _int64, _int32)
    loaded.moereg_cpu_read.restype = ctypes.c_uint64
    numbers = range(loaded.moereg_cpu_num_tables())
    names = [loaded.moereg_cpu_table_name(number).decode() for number in numbers]
    runnable = [names[number] for number in numbers if loaded.moereg_cpu_table_runs(number)]
    return Library(
        loaded.moereg_cpu_run,
        loaded.moereg_cpu_workspace_bytes,
        loaded.moereg_cpu_read,
        tuple(names),
        tuple(runnable),
    )


def why_unavailable() -> str | None:
    """Why no kernel can run, as a reason: the library was not built, does not load, or lacks the table asked for."""
    if not PATH.exists():
        return f"requires the compiled library of moereg-cpu, got none in {PATH.parent}; install its wheel or build it"
    try:
        library = load_library()
    except (OSError, AttributeError) as error:
        return f"requires that the library of moereg-cpu loads, got {error}"
    asked = os.environ.get(ISA_VARIABLE)
    if asked and asked not in library.runnable:
        return f"requires {ISA_VARIABLE} in ({', '.join(library.runnable)}) on this processor, got {asked}"
    return None


@functools.cache
def _entry_points() -> tuple[int, int] | None:
    """Addresses of `GOMP_parallel` and `GOMP_barrier` in the OpenMP runtime that torch is linked with, or None.

    GNU's and LLVM's runtimes for Linux export both. A runtime of one's own would have threads of its own, which would
    contend with torch's.
    """
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        # The search goes through the libraries that this one needs.
        runtime: Any = ctypes.CDLL(torch._C.__file__)
        addresses = [ctypes.cast(runtime[name], _pointer).value for name in ("GOMP_parallel", "GOMP_barrier")]
    except (OSError, AttributeError):
        return None
    parallel, barrier = addresses
    return None if parallel is None or barrier is None else (parallel, barrier)


def current_threads() -> Threads:
    """As many threads as torch would use now."""
    found = _entry_points()
    return Threads(None, None, 1) if found is None else Threads(*found, torch.get_num_threads())
