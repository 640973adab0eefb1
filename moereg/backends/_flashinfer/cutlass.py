"""Layers on FlashInfer's `cutlass_fused_moe`: the base class, and 16-bit weights.

All kinds of weights pad sizes to the kernels' multiples, pass routing through, and use the finalize that sums a token's
rows in order. FlashInfer skips out-of-range ids, so only expert parallelism has to map ids.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple

import torch

from moereg.backends._flashinfer import loading, tactics
from moereg.backends._flashinfer.layouts import activation_scalars, arrange
from moereg.backends._flashinfer.tactics import CallTimer, layer_key
from moereg.backends._loaded import Call, Implementation
from moereg.backends._workspace import Piece, bytes_of, cut
from moereg.experts import Experts
from moereg.kernels.plain.device import local_expert_ids
from moereg.weights.layouts import ALIGNMENT, aligned, round_up
from moereg.weights.permuted import ExpertWeights, PermutedWeights

# FlashInfer's names. SwiGLU's clamp, alpha and beta are passed as tensors.
_ACTIVATIONS: Final = {
    "silu": "Swiglu",
    "swigluoai": "Swiglu",
    "gelu": "Geglu",
    "gelu_tanh": "GegluTanh",
    "relu2": "Relu2",
}


_SCALARS: Final = ("swiglu_alpha", "swiglu_beta", "swiglu_limit")


class Rows(NamedTuple):
    """FlashInfer's per-row arguments of a call.

    Attributes:
        x: [R,H_pad], quantized or 16-bit.
        ids: [R,k] int32, local experts; others are skipped.
        scales: [R,k] fp32, routing weights.
        out: [R,H_pad], FlashInfer's output.
        x_scale: [R,H_pad / 32] uint8 row-major scales of `x`, if quantized in groups.
    """

    x: torch.Tensor
    ids: torch.Tensor
    scales: torch.Tensor
    out: torch.Tensor
    x_scale: torch.Tensor | None = None


class Cutlass(Implementation):
    """Shared by all kinds of weights: `hidden` and `intermediate` are padded, `num_halves` is w13's rows per column."""

    multiple: ClassVar[int] = 8
    """H and I are padded to multiples of this."""
    flags: ClassVar[dict[str, bool]] = {}
    """Arguments that name the scheme to FlashInfer."""
    has_tactics: ClassVar[bool] = True

    def __init__(self, experts: Experts) -> None:
        super().__init__(experts)
        problem = self.problem
        self.num_halves = problem.activation.num_halves
        self.hidden = round_up(problem.hidden_size, self.multiple)
        self.intermediate = round_up(problem.intermediate_size, self.multiple)
        self._device: torch.device | None = None

    @functools.cached_property
    def library(self) -> loading.Library:
        """FlashInfer with this platform's kernels, loaded at first use."""
        return loading.load(self.platform.arch)

    @abc.abstractmethod
    def permuted(self, weights: ExpertWeights) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Matrices and scales in FlashInfer's order, per expert and shared."""

    def quant_scales(self, weights: PermutedWeights) -> list[torch.Tensor]:
        """The list of scales that the scheme takes."""
        return []

    def permute_weights(self, weights: ExpertWeights) -> PermutedWeights:
        """Puts up rows first and pads; subclasses say the rest."""
        self._device = weights.w13.device  # The device of workspace queries.
        per_expert, shared = self.permuted(weights)
        per_expert |= self._biases(weights)
        per_expert |= activation_scalars(weights, self.problem.activation, *_SCALARS)
        return PermutedWeights(self.layouts[0], per_expert, shared)

    def _biases(self, weights: ExpertWeights) -> dict[str, torch.Tensor]:
        """`w13_bias` [E, halves * I_pad] and `w2_bias` [E, H_pad] in the problem's dtype, if there are biases."""
        if weights.w13_bias is None or weights.w2_bias is None:
            return {}
        sizes = {"w13_bias": (self.intermediate, self.num_halves), "w2_bias": (self.hidden, 1)}
        dtype = self.problem.torch_dtype
        return {
            name: arrange(bias.unsqueeze(2).to(dtype), rows, 1, halves).squeeze(2)
            for name, bias in weights.tensors("bias").items()
            for rows, halves in (sizes[name],)
        }

    def matrices(self, weights: ExpertWeights, divisor: int = 1) -> dict[str, torch.Tensor]:
        """w13 and w2 reordered and padded; a stored element packs `divisor` values."""
        return {
            "w13": arrange(weights.w13, self.intermediate, self.hidden // divisor, self.num_halves),
            "w2": arrange(weights.w2, self.hidden, self.intermediate // divisor),
        }

    # A call.

    def workspace_shapes(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """FlashInfer's own workspace and, flat, its input and output rows."""
        itemsize = self.problem.torch_dtype.itemsize
        own = bytes_of(self.pieces(num_tokens))
        return (-(-self._library_bytes(num_tokens) // itemsize),), (own // itemsize,)

    def _library_bytes(self, num_tokens: int) -> int:
        return self.bytes_for(num_tokens, self.problem.top_k)

    def bytes_for(self, num_rows: int, top_k: int) -> int:
        """Workspace bytes that FlashInfer needs for rows with `top_k` routes each."""
        problem, library = self.problem, self.library
        name = _ACTIVATIONS[problem.activation.name]
        activation = problem.activation
        has_scalars = activation.alpha != 1.0 or activation.beta != 0.0 or activation.limit is not None
        num_bytes: int = library.workspace_bytes(
            num_rows,
            self.hidden,
            self.intermediate,
            problem.num_local_experts,
            top_k,
            **self.dtypes,
            **self.flags,
            # FlashInfer's SwiGLU with scalar tensors.
            activation_type=library.activation_type["SwigluBias" if has_scalars else name],
            use_fused_finalize=False,
            device=self._device if self._device is not None and self._device.type == "cuda" else None,
        )
        return num_bytes

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes that select FlashInfer's kernels: `x_dtype`, `weight_dtype` and `output_dtype`."""
        dtype = self.problem.torch_dtype
        return {"x_dtype": dtype, "weight_dtype": dtype, "output_dtype": dtype}

    def pieces(self, num_tokens: int) -> list[Piece]:
        """The rows that `make_rows` cuts from the second workspace."""
        if self.hidden == self.problem.hidden_size:
            return []
        return [Piece((num_tokens, self.hidden), self.problem.torch_dtype)] * 2

    def make_rows(self, call: Call) -> Rows:
        """The rows of a call: tokens as they are, or padded."""
        inputs, hidden_size = call.inputs, self.problem.hidden_size
        ids, scales = self.local_ids(call), inputs.topk_weights
        if self.hidden == hidden_size:
            # FlashInfer loads and stores aligned vectors.
            out = call.out if call.out.data_ptr() % ALIGNMENT == 0 else torch.empty_like(call.out)
            return Rows(aligned(inputs.hidden_states), ids, scales, out)
        x, out = cut_rows(call, self.pieces(len(inputs.hidden_states)))
        x[:, :hidden_size].copy_(inputs.hidden_states)
        x[:, hidden_size:].zero_()
        return Rows(x, ids, scales, out)

    def finish(self, call: Call, rows: Rows) -> None:
        """Copies FlashInfer's output into `out` if it is elsewhere."""
        if rows.out is not call.out:
            call.out.copy_(rows.out[:, : self.problem.hidden_size])

    def local_ids(self, call: Call) -> torch.Tensor:
        """[T,K] int32 of local experts; others are negative or too large, and FlashInfer skips them."""
        inputs = call.inputs
        if inputs.expert_map is None:
            return inputs.topk_ids.contiguous()
        return local_expert_ids(inputs.topk_ids, self.problem.num_local_experts, inputs.expert_map).to(torch.int32)

    def run(self, call: Call) -> None:
        library, rows, weights = self.library, self.make_rows(call), call.weights
        arguments = {
            **_of_rows(rows),
            "fc1_expert_weights": self.as_taken(weights["w13"]),
            "fc2_expert_weights": self.as_taken(weights["w2"]),
            "output_dtype": rows.out.dtype,
            "quant_scales": self.quant_scales(weights),
            "fc1_expert_biases": weights.get("w13_bias"),
            "fc2_expert_biases": weights.get("w2_bias"),
            **{name: weights.get(name) for name in _SCALARS},
            **self.flags,
            "output": rows.out,
            "activation_type": self._activation(library),
            # The fused one adds atomically, in any order.
            "use_fused_finalize": False,
            "workspace_buffer": self.buffer(call),
        }
        function = library.fused_moe
        function(**arguments, profile_ids=list(self._pair(call, rows, function, arguments)))
        self.finish(call, rows)

    def buffer(self, call: Call) -> torch.Tensor | None:
        """FlashInfer's workspace as bytes; None if it allocates its own."""
        return call.workspace13.view(-1).view(torch.uint8)

    def as_taken(self, matrix: torch.Tensor) -> torch.Tensor:
        """A matrix as FlashInfer expects it."""
        return matrix

    def _activation(self, library: loading.Library) -> Any:
        return library.activation_type[_ACTIVATIONS[self.problem.activation.name]]

    # Tactics.

    @property
    def choices(self) -> int:
        """Routes per row."""
        return self.problem.top_k

    @functools.cached_property
    def _tuner(self) -> tactics.Tuner:
        key = layer_key(self.problem, self.computes, self.platform, self.library.path, self.choices)
        return tactics.Tuner(key)

    def _pair(self, call: Call, rows: Rows, function: Callable[..., Any], arguments: dict[str, Any]) -> tactics.Pair:
        if not self.has_tactics:
            return tactics.UNTUNED
        # Streams, events and captures use the current device; FlashInfer uses its tensors' device.
        with torch.cuda.device_of(rows.out):
            return self._tuner.pair(
                call.inputs.hidden_states.shape[0],
                lambda: self._candidates(rows),
                lambda: self._timer(rows, function, arguments),
                torch.cuda.is_current_stream_capturing,
            )

    def _timer(self, rows: Rows, function: Callable[..., Any], arguments: dict[str, Any]) -> CallTimer:
        """Times the call on random rows: the result is kept, and a first call may be all zeros."""
        drawn = {**arguments, **_of_rows(drawn_rows(rows, self.problem.num_experts))}
        return CallTimer(functools.partial(_call, function, drawn), rows.out)

    def _candidates(self, rows: Rows) -> tuple[list[int], list[int]]:
        """Tactics of both GEMMs that the device can run, as FlashInfer numbers them."""
        runner = self.library.runner(
            **self.dtypes,
            top_k=rows.ids.shape[1],
            **{name: 1 for name in ("tp_size", "ep_size", "cluster_size")},
            **{name: 0 for name in ("tp_rank", "ep_rank", "cluster_rank")},
            **{name: self.flags.get(name, False) for name in _FLAGS},
            enable_alltoall=False,
            min_latency_mode=False,
            enable_pdl=True,
            activation_type=self._activation(self.library),
            use_fused_finalize=False,
        ).fused_moe_runner
        counts = (runner.get_gemm1_tactic_count(), runner.get_gemm2_tactic_count())
        sizes = (
            (self.num_halves * self.intermediate, self.hidden),
            (self.hidden, self.intermediate),
        )
        first = range(counts[0])
        second = range(counts[0], sum(counts))
        found = [[tactic for tactic in ids if _fits(runner, tactic)] for ids in (first, second)]
        if self.flags.get("use_w4_group_scaling"):
            for stage, (rows_n, depth) in enumerate(sizes):
                fitting = set(map(int, runner.get_valid_tactics_for_shape(stage + 1, rows_n, depth)))
                found[stage] = [tactic for tactic in found[stage] if tactic in fitting] or found[stage]
        return found[0], found[1]


_FLAGS: Final = (
    "use_deepseek_fp8_block_scale",
    "use_w4_group_scaling",
    "use_mxfp8_act_scaling",
    "use_packed_weights",
    "use_wfp4afp8_humming",
)


def _call(function: Callable[..., Any], arguments: dict[str, Any], pair: tactics.Pair) -> None:
    function(**arguments, profile_ids=list(pair))


def _of_rows(rows: Rows) -> dict[str, Any]:
    scale = {} if rows.x_scale is None else {"input_sf": rows.x_scale, "swizzled_input_sf": False}
    return {
        "input": rows.x,
        "token_selected_experts": rows.ids,
        "token_final_scales": rows.scales,
        **scale,
    }


def drawn_rows(rows: Rows, num_experts: int) -> Rows:
    """Random rows of the same shapes and dtypes, with the same `out`, that choose experts of all ranks about evenly."""
    device = rows.x.device
    generator = torch.Generator(device).manual_seed(0)
    # 8-bit values are scaled into the format's range.
    factor, scale = (32.0, rows.x_scale) if rows.x.dtype.itemsize == 1 else (1.0, None)
    x = torch.randn(rows.x.shape, generator=generator, device=device).mul_(factor).to(rows.x.dtype)
    num_rows, choices = rows.ids.shape
    first = torch.randint(num_experts, (num_rows, 1), generator=generator, device=device)
    # Steps of this size never repeat an expert within a row.
    apart = torch.arange(choices, device=device) * max(1, num_experts // choices)
    return Rows(
        x=x,
        ids=((first + apart) % num_experts).to(torch.int32),
        scales=torch.full_like(rows.scales, 1 / choices),
        out=rows.out,
        x_scale=None if scale is None else torch.full_like(scale, 127 - 5),  # 2 ** -5.
    )


def cut_rows(call: Call, pieces: list[Piece]) -> list[torch.Tensor]:
    """The pieces of a call's second workspace."""
    return cut(call.workspace2.view(-1).view(torch.uint8), *pieces)


def _fits(runner: Any, tactic: int) -> bool:
    """Whether the device can run a tactic; FlashInfer raises if the shared object lacks its kernels."""
    try:
        return bool(runner.get_tactic_occupancy(tactic) > 0)
    except RuntimeError:
        return False


class Plain(Cutlass):
    """16-bit weights."""

    def permuted(self, weights: ExpertWeights) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return self.matrices(weights), {}
