"""Runs experts on a CPU with a subclass's matmuls, in either activation format."""

from __future__ import annotations

import abc

from moereg.backends._loaded import Call, Implementation
from moereg.kernels.plain import cpu, host
from moereg.kernels.plain.mlp import ExpertMlp, IsolatingMlp

CANONICAL = "canonical"


class HostImplementation(Implementation):
    """Standard format: sorts routes on the host and runs each active expert's rows through `_mlp`."""

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
    def _min_rows(self) -> int:
        """As in `host.bucket_rows`."""
        return host.MIN_ROWS

    @property
    def _min_tasks(self) -> int:
        """Fewest blocks of an expert's rows for which a thread each is faster than all threads on one at a time."""
        return 2

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The routed rows of a chunk of tokens, in the second workspace."""
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
            # As in the reference, scaled inputs are rounded before they are quantized.
            scaled_dtype=host.rows_dtype(self.problem.torch_dtype) if self.computes.activation is None else None,
            min_tasks=self._min_tasks,
            min_rows=self._min_rows,
        )


class HostBatchedImplementation(HostImplementation):
    """Batched format: likewise, on the rows that prepare laid out for each expert."""

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
            min_tasks=self._min_tasks,
            min_rows=self._min_rows,
        )
