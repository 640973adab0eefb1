"""Problem and canonical weights out of a Hugging Face checkpoint directory, one layer at a time.

Only what the layer needs is opened and read: config.json, the index, and the shards that hold its experts and router.
Shared experts are not read.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Container
from typing import Any, Final

import torch

from moereg.ambient import in_plain_torch
from moereg.arguments import check_device
from moereg.checkpoints._files import CheckpointFiles
from moereg.checkpoints._memory import check_fits
from moereg.checkpoints._plan import LayerPlan, moe_layer_indices, plan_layer
from moereg.errors import ArgumentError, CheckpointError, RequestError, shown
from moereg.layer import MoEKernel, make_kernel
from moereg.problem import MoEProblem
from moereg.routing import RouterSpec
from moereg.selection import Selection
from moereg.weights import ExpertWeights

__all__ = ["CheckpointLayer", "load_experts", "moe_layers", "read_problem"]

# What a checkpoint does not say. The other keywords of a problem are facts of the checkpoint.
_OVERRIDES: Final = (
    "activation_format",
    "deterministic",
    "dtype",
    "exact_activations",
    "graph_capture",
    "max_num_tokens",
    "num_local_experts",
    "placement",
)


@dataclasses.dataclass(frozen=True, eq=False)
class CheckpointLayer:
    """The routed experts of one layer of a checkpoint, and the router that feeds them.

    Attributes:
        problem: The layer, in the dtype that it was loaded in.
        weights: Canonical, local experts only; quantized where the checkpoint is.
        model_type: As config.json says it; for multimodal models that of the language model.
        layer: Index in the whole model.
        router: How the model routes.
        router_weight: [E,H], all experts, in the problem's dtype.
        router_bias: [E] in the problem's dtype, or None.
        correction_bias: [E] fp32, DeepSeek-V3's bias for the choice, or None.
        ep_rank: Local experts are those from `ep_rank * num_local_experts` on.
    """

    problem: MoEProblem
    weights: ExpertWeights
    model_type: str
    layer: int
    router: RouterSpec
    router_weight: torch.Tensor
    router_bias: torch.Tensor | None = None
    correction_bias: torch.Tensor | None = None
    ep_rank: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of experts and router."""
        router = (self.router_weight, self.router_bias, self.correction_bias)
        tensors = [*self.weights.tensors().values(), *(tensor for tensor in router if tensor is not None)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @in_plain_torch
    def route(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Routes as the checkpoint's own router does, logits in the dtype that the model computes them in.

        Args:
            hidden_states: [T,H] in the problem's dtype, on the weights' device.

        Returns:
            topk_weights [T,K] fp32 and topk_ids [T,K] int32, global experts. Models that round the weights to the
            dtype of their logits differ by that rounding.

        Raises:
            ValueError: hidden_states have another shape, dtype or device.
        """
        expected = (self.problem.hidden_size, self.router_weight.dtype, self.router_weight.device)
        columns = hidden_states.shape[1] if hidden_states.dim() == 2 else None
        if (columns, hidden_states.dtype, hidden_states.device) != expected:
            raise ValueError(
                f"hidden_states must be [T,{expected[0]}] {expected[1]} on {expected[2]}, got "
                f"{list(hidden_states.shape)} {hidden_states.dtype} on {hidden_states.device}; convert them"
            )
        dtype = torch.float32 if self.router.fp32_logits else self.router_weight.dtype
        bias = None if self.router_bias is None else self.router_bias.to(dtype)
        logits = torch.nn.functional.linear(hidden_states.to(dtype), self.router_weight.to(dtype), bias)
        return self.router.route(logits, self.correction_bias)

    def make_kernel(self, selection: Selection | None = None, **keywords: Any) -> MoEKernel:
        """`moereg.make_kernel` for this layer and the rank whose experts it holds.

        Args:
            selection: From `select_backend(layer.problem)`; made here where None.
            **keywords: As `make_kernel` takes them, but for `ep_rank`.
        """
        return make_kernel(self.problem, self.weights, selection, ep_rank=self.ep_rank, **keywords)


def moe_layers(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Indices of the layers that have experts, ascending. Reads config.json only.

    Raises:
        CheckpointError: There is no readable config.json of a known model type.
    """
    with CheckpointFiles(path) as files:
        return moe_layer_indices(files)


def read_problem(path: str | os.PathLike[str], layer: int, **overrides: Any) -> MoEProblem:
    """The problem that a layer of a checkpoint is, from config.json and tensor headers; no tensor data is read.

    Args:
        path: Checkpoint directory.
        layer: Index in the whole model.
        overrides: Keywords of `MoEProblem` that a checkpoint does not decide, such as dtype or max_num_tokens.

    Raises:
        CheckpointError: The layer cannot be read; the message says why.
        RequestError: An override contradicts what is a fact of the checkpoint.
        ValueError: An override's value does not fit the layer.
    """
    if facts := sorted(set(overrides) - set(_OVERRIDES)):
        raise RequestError(
            f"{facts[0]} cannot be overridden, got {facts[0]}={overrides[facts[0]]!r}: the checkpoint decides it; "
            f"leave it out (can be overridden: {', '.join(_OVERRIDES)})"
        )
    with CheckpointFiles(path) as files:
        return dataclasses.replace(plan_layer(files, layer).problem, **overrides)


def load_experts(
    path: str | os.PathLike[str],
    layer: int,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device = "cpu",
    max_memory_fraction: float = 0.6,
    *,
    num_local_experts: int | None = None,
    ep_rank: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> CheckpointLayer:
    """Reads the routed experts and the router of one layer.

    Experts are read one by one into the canonical tensors, so that the peak is the layer and one expert.

    Args:
        path: Checkpoint directory.
        layer: Index in the whole model.
        dtype: To load in, or of quantized experts to run in; the checkpoint's where None.
        device: To load to.
        max_memory_fraction: Of the device's free memory that the layer may take.
        num_local_experts: Experts of this rank; all where None.
        ep_rank: Which ones: those from `ep_rank * num_local_experts` on. Other experts' shards are not opened.
        progress: Called with the experts read so far and those to read, after each.

    Returns:
        The layer; its tensors do not alias the files.

    Raises:
        CheckpointError: The layer cannot be read; the message says why.
        TooLargeError: The layer would not fit in the memory that is free.
        ValueError: The rank's experts are not experts of the layer, or an argument is out of range.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError(f"path must be a directory of a checkpoint, got {shown(path)}")
    if not (type(max_memory_fraction) in (int, float) and 0 < max_memory_fraction <= 1):
        raise ArgumentError(f"max_memory_fraction must be above 0 and at most 1, got {shown(max_memory_fraction)}")
    device = check_device("device", device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r} needs a GPU that this torch build can use; leave it out for the CPU")
    with CheckpointFiles(path) as files:
        plan = plan_layer(files, layer, num_local_experts, ep_rank)
        overrides: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        problem = dataclasses.replace(plan.problem, **overrides)
        rows = _canonical_rows(problem, {part.field for parts in plan.parts for part in parts})
        expert_bytes = sum(math.prod(shape[1:]) * dtype.itemsize for shape, dtype in rows.values())
        subject = f"layer {layer} of {str(files.path)!r}"
        stored_as = problem.dtype if problem.quant.weight is None else problem.quant.name
        check_fits(subject, expert_bytes, problem.num_local_experts, stored_as, device, max_memory_fraction)
        tensors = {field: torch.empty(shape, dtype=dtype, device=device) for field, (shape, dtype) in rows.items()}
        for local_expert, parts in enumerate(plan.parts):
            for part in parts:
                stored = files.read(part.name, part.row)
                try:
                    part.copy_to(tensors, local_expert, stored)
                except ValueError as error:
                    raise CheckpointError(f"{part.name} of {str(files.path)!r}: {error}") from error
            if progress is not None:
                progress(local_expert + 1, len(plan.parts))
        try:
            weights = ExpertWeights(**tensors, quant=problem.quant)
        except ValueError as error:
            raise CheckpointError(f"{subject}: {error}") from error
        return _with_router(files, plan, problem, layer, weights, ep_rank)


def _with_router(
    files: CheckpointFiles, plan: LayerPlan, problem: MoEProblem, layer: int, weights: ExpertWeights, ep_rank: int
) -> CheckpointLayer:
    def read(name: str | None, dtype: torch.dtype) -> torch.Tensor | None:
        return None if name is None else files.read(name).to(weights.w13.device, dtype, copy=True)

    router_weight = read(plan.router_weight, problem.torch_dtype)
    assert router_weight is not None
    return CheckpointLayer(
        problem,
        weights,
        plan.model_type,
        layer,
        plan.router,
        router_weight,
        # transformers loads the router in the model's dtype, but keeps the correction bias in fp32.
        router_bias=read(plan.router_bias, problem.torch_dtype),
        correction_bias=read(plan.correction_bias, torch.float32),
        ep_rank=ep_rank,
    )


def _canonical_rows(
    problem: MoEProblem, fields: Container[str | None]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the fields of `ExpertWeights` that the layer has; of scales of halves, one for each."""
    rows = problem.quant.tensor_rows(
        problem.num_local_experts,
        problem.hidden_size,
        problem.intermediate_size,
        problem.activation.num_halves,
        problem.has_bias,
    )
    return {
        row.name: (
            row.shapes[-1] if row.name.startswith("w") else row.shapes[0],
            problem.torch_dtype if row.dtype is None else row.dtype,
        )
        for row in rows
        if row.name in fields
    }
