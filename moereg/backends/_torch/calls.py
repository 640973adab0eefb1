"""Shared by the implementations of `torch`: how a CPU runs experts with given matmuls, in either format."""

from __future__ import annotations

import abc
from typing import ClassVar

from moereg.backends._loaded import Call, Implementation
from moereg.kernels.plain import cpu, host
from moereg.kernels.plain.mlp import ExpertMlp, IsolatingMlp

CANONICAL = "canonical"


class HostImplementation(Implementation):
    """Standard format: routes are sorted on the host, and each active expert's rows run through `_mlp`.

    Attributes:
        side_by_side: Whether experts are faster with a thread each than one after the other with all threads.
    """

    side_by_side: ClassVar[bool] = True

    @abc.abstractmethod
    def _mlp(self, call: Call) -> ExpertMlp:
        """The experts' matmuls."""

    def _isolated_mlp(self, call: Call) -> ExpertMlp:
        problem, mlp = self.problem, self._mlp(call)
        mixes = cpu.mixes_rows(problem.torch_dtype, problem.hidden_size, problem.intermediate_size)
        return IsolatingMlp(mlp) if mixes else mlp

    @property
    def _w13_rows(self) -> int:
        return self.problem.activation.num_halves * self.problem.intermediate_size

    @property
    def _read_bytes(self) -> int | None:
        """Bytes of an expert's weights where few rows take as long as reading them; None where they are restored."""
        return None

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None, and the routed rows of a chunk of tokens."""
        problem, dtype = self.problem, host.rows_dtype(self.problem.torch_dtype)
        rows = host.routed_rows(num_tokens, problem.top_k, problem.hidden_size, dtype.itemsize)
        return (0,), (rows, problem.hidden_size * dtype.itemsize // problem.torch_dtype.itemsize)

    def run(self, call: Call) -> None:
        inputs = call.inputs
        host.host_experts(
            call.out,
            inputs.hidden_states,
            inputs.topk_weights,
            inputs.topk_ids,
            self._isolated_mlp(call),
            num_local_experts=self.problem.num_local_experts,
            w13_rows=self._w13_rows,
            workspace=call.workspace2.view(host.rows_dtype(self.problem.torch_dtype)),
            expert_map=inputs.expert_map,
            apply_router_weight_on_input=self.problem.apply_router_weight_on_input,
            # Scaled inputs are rounded where the reference rounds them: before they are quantized.
            scaled_dtype=host.rows_dtype(self.problem.torch_dtype) if self.computes.activation is None else None,
            side_by_side=self.side_by_side,
            read_bytes=self._read_bytes,
        )


class HostBatchedImplementation(HostImplementation):
    """Batched format: as in the standard one, on the rows that prepare laid out for each expert."""

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """None: results go straight to `out`."""
        return (0,), (0,)

    def run(self, call: Call) -> None:
        inputs = call.inputs
        assert inputs.expert_num_tokens is not None
        host.host_batched_experts(
            call.out,
            inputs.hidden_states,
            inputs.expert_num_tokens,
            self._isolated_mlp(call),
            w13_rows=self._w13_rows,
            side_by_side=self.side_by_side,
            read_bytes=self._read_bytes,
        )
