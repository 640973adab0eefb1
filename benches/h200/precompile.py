"""Compiles the kernels of the `triton` backend on all cores at once, since a compiler on one core outlasts a bench."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from moereg.backends._loaded import Call
from moereg.dispatch import select_backend
from moereg.experts import ExpertInputs
from moereg.platforms import probe_platform
from moereg.spec.problem import MoEProblem
from moereg.weights.permuted import ExpertWeights, PermutedWeights


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """Triton's launches inside compile in the background and launch nothing; the end waits for all of them.

    A candidate that does not compile is left for its first launch to report.
    """
    from triton.runtime import driver
    from triton.runtime._async_compile import AsyncCompileMode, FutureKernel
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    futures: list[Any] = []

    def warm_up(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        if isinstance(kernel, FutureKernel):
            futures.append(kernel)
        return kernel

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        JITFunction.run = warm_up
        try:
            with AsyncCompileMode(pool, ignore_errors=True):
                yield
        finally:
            JITFunction.run = run
        # Triton 3.6 has a C compiler build a launcher for each signature, and keeps it on disk.
        kernels = [future.kernel for future in dict.fromkeys(futures) if future.kernel is not None]
        list(pool.map(lambda kernel: driver.active.launcher_cls(kernel.src, kernel.metadata), kernels))


class EmptyLayer:
    """A layer whose weights take memory and hold nothing: enough to compile for. Needs a GPU."""

    def __init__(self, problem: MoEProblem, device: str = "cuda") -> None:
        winner = select_backend(problem, require="triton").winner
        assert winner is not None
        assert winner.cell is not None
        self.problem = problem
        self.device = device
        self.experts: Any = winner.cell.experts(problem, probe_platform(), winner.scheme)
        local, hidden, inter = problem.num_local_experts, problem.hidden_size, problem.intermediate_size
        halves, dtype = problem.activation.num_halves, problem.torch_dtype
        rows = problem.quant.tensor_rows(local, hidden, inter, halves, problem.has_bias)
        canonical: dict[str, Any] = {
            row.name: torch.empty(row.shapes[0], dtype=row.dtype or dtype, device="meta") for row in rows
        }
        permuted = self.experts.permute_weights(ExpertWeights(**canonical, quant=problem.quant), problem)
        parts = [
            {name: torch.empty_like(permuted[name], device=device) for name in names}
            for names in (permuted.per_expert, permuted.shared)
        ]
        self.weights = PermutedWeights(permuted.layout, *parts)

    def launch(self, num_tokens: int) -> None:
        """Makes, without recording, the launches of a call of that many tokens."""
        problem = self.problem

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        dtype = problem.torch_dtype
        tokens = empty(num_tokens, problem.hidden_size, dtype=dtype)
        inputs = ExpertInputs(
            tokens,
            empty(num_tokens, problem.top_k, dtype=torch.float32),
            empty(num_tokens, problem.top_k, dtype=torch.int32),
        )
        scratch = [empty(*shape, dtype=dtype) for shape in self.experts.workspace_shapes(problem, num_tokens)]
        call = Call(torch.empty_like(tokens), inputs, self.weights, *scratch)
        self.experts.implementation.launch(call)


def precompile(rows: Iterable[tuple[MoEProblem, int]]) -> None:
    """Compiles everything that calls of these layers with that many tokens launch; rows of a layer stand together."""
    layer: EmptyLayer | None = None
    with compiling_only():
        for problem, num_tokens in rows:
            if layer is None or layer.problem != problem:
                layer = None  # The old weights go first.
                layer = EmptyLayer(problem)
            layer.launch(num_tokens)
