"""Converts live experts modules' parameters to canonical weights and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from moereg.errors import ArgumentError
from moereg.integrations._experts.activation import gate_function, gated_by, recognize
from moereg.integrations._experts.adapters import parameter_of
from moereg.integrations._experts.packed import PackedExperts
from moereg.spec.activations import Activation
from moereg.spec.problem import DTYPES, MoEProblem
from moereg.spec.quant_schemes import QuantScheme
from moereg.weights.permuted import ExpertWeights

_FP8_BLOCK: Final = (128, 128)
QUANTIZED: Final = "its weights are quantized"
"""Why no kernel reads such parameters in place."""


@dataclasses.dataclass(frozen=True)
class LiveExperts:
    """The meaning of a module's parameters.

    Attributes:
        num_experts, hidden_size, intermediate_size: Sizes on this rank.
        activation: The activation between the matmuls.
        parameters: Dotted names of the parameters in the module.
        canonical: Makes a module's canonical weights; views where nothing moves.
        stored: Maps canonical weights to the parameters by name; None if they cannot be written back.
        dtype: The problem's dtype; None if hidden states decide it, since quantized weights have none.
        quant: Scheme of the weights.
        has_bias: Whether both matmuls have biases.
        moved: How the parameters differ from canonical tensors, as a clause; None if they are those tensors, named in
            the order w13, w2, w13_bias, w2_bias.
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    activation: Activation
    parameters: tuple[str, ...]
    canonical: Callable[[torch.nn.Module], ExpertWeights]
    stored: Callable[[ExpertWeights], Mapping[str, torch.Tensor]] | None = None
    dtype: str | None = None
    quant: QuantScheme | str = "unquantized"
    has_bias: bool = False
    moved: str | None = None

    def problem(self, top_k: int, dtype: torch.dtype, all_experts: int | None = None, **others: Any) -> MoEProblem:
        """The layer's problem, in the weights' dtype if they have one; `all_experts` counts all ranks' experts."""
        return MoEProblem(
            num_experts=all_experts or self.num_experts,
            num_local_experts=self.num_experts,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            top_k=top_k,
            dtype=self.dtype or dtype,
            quant=self.quant,
            activation=self.activation,
            has_bias=self.has_bias,
            **others,
        )


def read_experts(module: torch.nn.Module) -> LiveExperts:
    """Reads a module's shapes and flags, but no values of its weights, which may be on meta.

    The message of an ArgumentError is a clause that says why moereg cannot compute what the module does.
    """
    if getattr(module, "has_post_expert_norm", False):  # transformers 5.17 has no such flag.
        raise ArgumentError("it normalizes the output of each expert, which no kernel here does")
    if getattr(module, "gate_up_proj_precision_config", None) is not None or type(module).__name__ == _MXFP4:
        return _mxfp4(module)
    if has_fp8(module):
        return _fp8(module)
    if getattr(getattr(module, "mlp", None), "v1", None) is not None:
        return _flat(module)
    return _fused(module)


def has_fp8(module: torch.nn.Module) -> bool:
    """Whether a module is `FP8Experts` with its scales, which `quantize_experts` takes over."""
    return isinstance(getattr(module, "down_proj_scale_inv", None), torch.Tensor)


_MXFP4: Final = "Mxfp4GptOssExperts"
_ALWAYS_TRANSPOSED: Final = frozenset({"Llama4TextExperts"})
"""Transposed classes without a flag that says so."""


def _parameter(module: torch.nn.Module, name: str, is_computed: bool = False) -> torch.Tensor:
    """A parameter of that dotted name; the sum with its adapter only if it `is_computed`."""
    value: Any = parameter_of(module, name)
    if is_computed and value is not None:
        value = functools.reduce(getattr, name.split("."), module)
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"{name} must be a tensor, got {type(value).__name__}")
    if isinstance(value, PackedExperts):
        return value
    kind = type(value.data)
    if kind.__name__ == "DTensor":
        raise ArgumentError(
            f"{name} is sharded over devices (a DTensor); give each rank whole experts as plain tensors, or load the "
            "model onto one device"
        )
    if kind is not torch.Tensor:
        raise ArgumentError(f"{name} is a {kind.__name__} of another library; load the model without that quantization")
    return value


def _tensors(module: torch.nn.Module, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Parameters by field of `ExpertWeights`, given their names by field."""
    return {field: _parameter(module, name, is_computed=True).detach() for field, name in names.items()}


def _in_halves(rows: torch.Tensor) -> torch.Tensor:
    """Puts alternating gate and up rows [E,2I,...] one after the other."""
    return torch.cat([rows[:, 0::2], rows[:, 1::2]], dim=1)


def _dtype_name(name: str, tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ArgumentError(f"{name} must be {', '.join(DTYPES)}, got {dtype}")
    return dtype


def _same_dtype(named: Mapping[str, torch.Tensor]) -> None:
    (first, tensor), (second, other) = named.items()
    if tensor.dtype != other.dtype:
        raise ArgumentError(
            f"{first} is {_dtype_name(first, tensor)} and {second} is {_dtype_name(second, other)}, and a kernel takes "
            "one dtype; convert one with .to(dtype)"
        )


def _fused(module: torch.nn.Module) -> LiveExperts:
    """[E,2I,H] and [E,H,I], possibly transposed, with gate and up concatenated or alternating, as the flags say."""
    is_gated = bool(getattr(module, "has_gate", True))
    has_bias = bool(getattr(module, "has_bias", False))
    is_concatenated = bool(getattr(module, "is_concatenated", True))
    is_transposed = bool(getattr(module, "is_transposed", type(module).__name__ in _ALWAYS_TRANSPOSED))
    up_name = "gate_up_proj" if is_gated else "up_proj"
    names = {"w13": up_name, "w2": "down_proj"}
    if has_bias:
        names |= {"w13_bias": f"{up_name}_bias", "w2_bias": "down_proj_bias"}
    up, down = _parameter(module, up_name), _parameter(module, "down_proj")
    if up.dim() != 3 or down.dim() != 3 or up.shape[0] != down.shape[0]:
        raise ArgumentError(
            f"{up_name} and down_proj must hold one matrix an expert, got {list(up.shape)} and {list(down.shape)}"
        )
    _same_dtype({up_name: up, "down_proj": down})
    function = gate_function(module, is_concatenated) if is_gated else module.act_fn
    activation = recognize(module, function, is_gated)  # type: ignore[arg-type]
    rows, columns = (up.shape[2], up.shape[1]) if is_transposed else (up.shape[1], up.shape[2])

    def canonical(module: torch.nn.Module) -> ExpertWeights:
        fields = _tensors(module, names)
        if is_transposed:
            fields |= {field: fields[field].transpose(1, 2) for field in ("w13", "w2")}
        if is_gated and not is_concatenated:
            fields |= {field: _in_halves(fields[field]) for field in ("w13", "w13_bias") if field in fields}
        return ExpertWeights(**fields)  # type: ignore[arg-type]

    moved = None
    if is_transposed:
        moved = "its matrices are transposed, and moereg reads [E,2I,H] and [E,H,I] in place"
    elif is_gated and not is_concatenated:
        moved = "its gate and up rows alternate, and moereg reads all of gate before all of up in place"

    if isinstance(up, PackedExperts) != isinstance(down, PackedExperts):
        raise ArgumentError(f"{up_name} and down_proj must be quantized together, got one that is not")
    quant: QuantScheme | str = "unquantized"
    if isinstance(up, PackedExperts):
        quant, moved, canonical = up.form.scheme, QUANTIZED, functools.partial(_unpacked, names=names)

    def stored(weights: ExpertWeights) -> Mapping[str, torch.Tensor]:
        fields = {field: getattr(weights, field) for field in names}
        if is_gated and not is_concatenated:
            for field in fields.keys() & {"w13", "w13_bias"}:
                gate, up = fields[field].chunk(2, dim=1)
                fields[field] = torch.stack([gate, up], dim=2).flatten(1, 2)
        if is_transposed:
            fields |= {field: fields[field].transpose(1, 2).contiguous() for field in ("w13", "w2")}
        return {names[field]: value for field, value in fields.items()}

    return LiveExperts(
        num_experts=up.shape[0],
        hidden_size=columns,
        intermediate_size=rows // 2 if is_gated else rows,
        dtype=_dtype_name(up_name, up),
        quant=quant,
        activation=activation,
        has_bias=has_bias,
        parameters=tuple(names.values()),
        canonical=canonical,
        stored=None if isinstance(up, PackedExperts) else stored,
        moved=moved,
    )


def _unpacked(module: torch.nn.Module, names: Mapping[str, str]) -> ExpertWeights:
    """The tensors in which quantized parameters are stored, and biases."""
    fields: dict[str, torch.Tensor] = {}
    forms = {}
    for field, name in names.items():
        value = _parameter(module, name).detach()
        if isinstance(value, PackedExperts):
            fields |= value.stored
            forms[field] = value.form
        else:
            fields[field] = value
    if "w13_bias" in fields and forms["w13"].is_alternating:
        fields["w13_bias"] = _in_halves(fields["w13_bias"])
    return ExpertWeights.unchecked(fields, forms["w13"].scheme)


def _flat(module: torch.nn.Module) -> LiveExperts:
    """DBRX: gate `w1`, up `v1` and down `w2`, all [E*I,H]."""
    mlp = module.mlp
    gate, down = _parameter(module, "mlp.w1"), _parameter(module, "mlp.w2")
    _same_dtype({"mlp.w1": gate, "mlp.w2": down})
    num_experts, intermediate_size = int(module.num_experts), int(module.ffn_hidden_size)  # type: ignore[arg-type]

    def canonical(module: torch.nn.Module) -> ExpertWeights:
        w1, v1, w2 = (
            _parameter(module, name, is_computed=True).detach().unflatten(0, (num_experts, intermediate_size))
            for name in ("mlp.w1", "mlp.v1", "mlp.w2")
        )
        return ExpertWeights(w13=torch.cat([w1, v1], dim=1), w2=w2.transpose(1, 2))

    def stored(weights: ExpertWeights) -> Mapping[str, torch.Tensor]:
        first, second = weights.w13.chunk(2, dim=1)
        third = weights.w2.transpose(1, 2)
        flat = {"mlp.w1": first, "mlp.v1": second, "mlp.w2": third}
        return {name: value.flatten(0, 1).contiguous() for name, value in flat.items()}

    return LiveExperts(
        num_experts=num_experts,
        hidden_size=down.shape[1],
        intermediate_size=intermediate_size,
        dtype=_dtype_name("mlp.w1", gate),
        activation=recognize(module, gated_by(mlp.activation_fn), is_gated=True),  # type: ignore[arg-type, union-attr]
        parameters=("mlp.w1", "mlp.v1", "mlp.w2"),
        canonical=canonical,
        stored=stored,
        moved="its gate and up matrices are apart, and moereg reads one tensor of both in place",
    )


def _fp8(module: torch.nn.Module) -> LiveExperts:
    """`FP8Experts`: codes with `*_scale_inv` per block or matrix, or MXFP4 codes in int8."""
    is_gated = bool(getattr(module, "has_gate", True))
    up_name = "gate_up_proj" if is_gated else "up_proj"
    names = {
        "w13": up_name,
        "w13_scale": f"{up_name}_scale_inv",
        "w2": "down_proj",
        "w2_scale": "down_proj_scale_inv",
    }
    up = _parameter(module, up_name)
    is_static = getattr(module, "activation_scheme", "dynamic") == "static"
    block = getattr(module, "block_size", None)
    is_fp4 = up.dtype == torch.int8
    if is_fp4:
        quant = "mxfp4_mxfp8"
    elif block is None:
        quant = "fp8_tensor_static" if is_static else "fp8_tensor_dynamic"
    elif tuple(block) == _FP8_BLOCK and not is_static:
        quant = "fp8_block128"
        if is_gated and up.shape[1] // 2 % block[0]:
            # transformers counts blocks over both halves.
            raise ArgumentError(
                f"its intermediate size must be a multiple of {block[0]}, or one fp8 block has gate and up rows, got "
                f"{up.shape[1] // 2}; read its checkpoint with moereg.load_experts instead"
            )
    else:
        raise ArgumentError(
            f"its fp8 scales are of blocks {tuple(block)}{' with static activations' * is_static}, and moereg has "
            f"blocks of {_FP8_BLOCK} with dynamic ones"
        )
    if quant == "fp8_tensor_static":
        # transformers names w13's input scale after gate and up even without a gate.
        names |= {"a13_scale": "gate_up_proj_activation_scale", "a2_scale": "down_proj_activation_scale"}
    activation = recognize(module, gate_function(module, True) if is_gated else module.act_fn, is_gated)  # type: ignore[arg-type]

    def canonical(module: torch.nn.Module) -> ExpertWeights:
        fields = _tensors(module, names)
        for field in ("w13", "w2"):
            scale = fields[f"{field}_scale"].to(torch.float8_e8m0fnu if is_fp4 else torch.float32)
            if is_fp4:
                fields[field] = fields[field].view(torch.uint8)
            elif block is None:
                scale = scale.flatten(1)  # [E,2,1] for gate and up, [E,1,1] for down.
                scale = scale[:, 0] if scale.shape[1] == 1 else scale
            fields[f"{field}_scale"] = scale
        return ExpertWeights(**fields, quant=quant)

    return LiveExperts(
        num_experts=up.shape[0],
        hidden_size=up.shape[2] * (2 if is_fp4 else 1),
        intermediate_size=up.shape[1] // 2 if is_gated else up.shape[1],
        quant=quant,
        activation=activation,
        parameters=tuple(names.values()),
        canonical=canonical,
        moved=QUANTIZED,
    )


def _mxfp4(module: torch.nn.Module) -> LiveExperts:
    """`Mxfp4GptOssExperts`: codes and scales in another library's kernel order, which that library undoes."""
    biases = {"w13_bias": "gate_up_proj_bias", "w2_bias": "down_proj_bias"}
    bias, down_bias = (_parameter(module, name) for name in biases.values())
    alpha, limit = float(module.alpha), float(module.limit)  # type: ignore[arg-type]

    def canonical(module: torch.nn.Module) -> ExpertWeights:
        fields = _tensors(module, biases)
        for field, name in (("w13", "gate_up_proj"), ("w2", "down_proj")):
            config = getattr(module, f"{name}_precision_config", None)
            if config is None:
                raise ArgumentError(f"{name} has no scales yet; load the model's weights first")
            fields[field] = _unswizzled(getattr(module, name)).view(torch.uint8)
            fields[f"{field}_scale"] = _unswizzled(config.weight_scale).view(torch.uint8)
        fields |= {field: _in_halves(fields[field]) for field in ("w13", "w13_scale", "w13_bias")}
        # Bytes until here, since not every torch concatenates e8m0.
        fields |= {field: fields[field].view(torch.float8_e8m0fnu) for field in ("w13_scale", "w2_scale")}
        return ExpertWeights(**fields, quant="mxfp4_w4a16")

    return LiveExperts(
        num_experts=bias.shape[0],
        hidden_size=down_bias.shape[1],
        intermediate_size=bias.shape[1] // 2,
        quant="mxfp4_w4a16",
        activation=Activation("swigluoai", alpha=alpha, beta=1.0, limit=limit),
        has_bias=True,
        # Once swizzled, the codes are no longer parameters.
        parameters=tuple(biases.values()),
        canonical=canonical,
        moved=QUANTIZED,
    )


def _unswizzled(wrapped: Any) -> torch.Tensor:
    """Unwraps a swizzled [E,K,N] tensor to [E,N,K packed]."""
    if isinstance(wrapped, torch.Tensor):
        return wrapped.detach()
    data: torch.Tensor = wrapped.storage.layout.unswizzle_data(wrapped.storage.data)
    return data.transpose(-1, -2).contiguous()
