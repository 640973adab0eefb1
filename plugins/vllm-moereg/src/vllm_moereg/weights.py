"""From the parameters that vLLM's quantization methods register to canonical `ExpertWeights`.

One reader per method class says the scheme, and for each tensor the parameter that has it and what makes it canonical.
Shapes in vLLM: E local experts, H hidden size, I intermediate size of this rank, g columns of a group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moereg import ExpertWeights, MoEKernel
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import MATRICES, QUANT_SCHEMES, TensorRole, tensor_name
from moereg.weights.words import awq_codes, awq_zero_points, gptq_codes, repacked_zero_points, word_bytes

__all__ = [
    *("READERS", "Declined", "Form", "Stored"),
    *("give_back", "places_of", "read_form", "rows_of_experts", "take_weights"),
]

Decode = Callable[[torch.Tensor], torch.Tensor]
_BLOCK: Final = 128


class Declined(Exception):
    """moereg does not serve a layer; the text is one reason, a lowercase clause."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A method's place for a tensor of each matrix.

    Attributes:
        suffix: Of the parameter's name, after `w13` and `w2`.
        decode: Makes it canonical, from the parameter's tensor; may return a view.
    """

    suffix: str
    decode: Decode = lambda stored: stored


@dataclasses.dataclass(frozen=True)
class Form:
    """A layer's weights as vLLM holds them.

    Attributes:
        scheme: Name of moereg's scheme.
        tensors: By role; biases are added where the layer has them.
        may_interleave: Whether rows of gate and up alternate in w13 where vLLM's activation says so.
        is_padded: Whether vLLM's loader cuts ranks by sizes that it has rounded up to whole groups.
        refined: Parts, each way, into which vLLM cuts a block's scale, since a rank may begin inside one.
        front: Elements of the intermediate before this rank's first in the block where it begins.
    """

    scheme: str
    tensors: Mapping[TensorRole, Stored]
    may_interleave: bool = False
    is_padded: bool = False
    refined: int = 1
    front: int = 0


class Layer(Protocol):
    """The part of vLLM's `RoutedExperts` that is read."""

    local_num_experts: int
    _parameters: dict[str, torch.nn.Parameter | None]

    def register_parameter(self, name: str, param: torch.nn.Parameter) -> None: ...

    def register_buffer(self, name: str, tensor: torch.Tensor, persistent: bool) -> None: ...


def read_form(method: Any) -> Form:
    """The form of a method's weights.

    Raises:
        Declined: No reader knows the method, or its settings are ones that moereg does not read.
    """
    reader = READERS.get(type(method).__name__)
    if reader is None:
        raise Declined(f"requires a quantization method that moereg reads, got {type(method).__name__}")
    form = reader(method)
    if form.scheme not in QUANT_SCHEMES:
        raise Declined(f"requires a scheme of moereg, got {form.scheme}")
    return form


def take_weights(layer: Layer, form: Form, problem: MoEProblem, is_interleaved: bool) -> ExpertWeights:
    """Takes a layer's weights out of its parameters, which keep their names and hold nothing after it.

    Parameters are emptied before anything is copied, so that what a copy replaces is freed at once.

    Args:
        layer: vLLM's layer, loaded.
        form: From `read_form`.
        problem: The layer.
        is_interleaved: Whether gate and up rows alternate in w13.

    Raises:
        ValueError: A parameter is missing, or tensors have other shapes or dtypes than the scheme says.
    """
    tensors = dict(form.tensors)
    if problem.has_bias:
        tensors["bias"] = Stored("_bias", lambda bias: _as_dtype(bias, problem.torch_dtype))
    stored = {
        (matrix, role): _parameter(layer, matrix + where.suffix)
        for role, where in tensors.items()
        for matrix in MATRICES
    }
    held = {key: parameter.data for key, parameter in stored.items()}
    for name, parameter in layer._parameters.items():
        # Also what no kernel of moereg reads, such as zero points of symmetric codes; but nothing of the router.
        if parameter is not None and _is_of_experts(name):
            parameter.data = parameter.data.new_empty((layer.local_num_experts, 0, 0))
    found: dict[str, torch.Tensor] = {}
    for matrix, role in stored:
        canonical = tensors[role].decode(held.pop((matrix, role)))
        if is_interleaved and matrix == "w13":
            canonical = canonical.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        if form.refined > 1:
            canonical = _in_whole_blocks(canonical, matrix, role, form, problem)
        found[tensor_name(matrix, role)] = canonical
        del canonical
    return ExpertWeights(**found, quant=problem.quant)


def _in_whole_blocks(
    stored: torch.Tensor, matrix: str, role: TensorRole, form: Form, problem: MoEProblem
) -> torch.Tensor:
    """Codes behind `form.front` zeros, up to the problem's size; one scale of each block instead of its parts' ones."""
    dim, halves, across = (1, problem.activation.num_halves, 3) if matrix == "w13" else (2, 1, 1)
    parts = stored.unflatten(dim, (halves, -1))
    if role == "weight":
        codes = parts.view(torch.uint8)
        shape = (*parts.shape[: dim + 1], problem.intermediate_size, *parts.shape[dim + 2 :])
        whole = codes.new_zeros(shape)
        whole.narrow(dim + 1, form.front, parts.shape[dim + 1]).copy_(codes)
        return whole.flatten(dim, dim + 1).view(stored.dtype)
    first = torch.arange(0, problem.intermediate_size, _BLOCK, device=stored.device) - form.front
    first = (first // (_BLOCK // form.refined)).clamp(0, parts.shape[dim + 1] - 1)
    across_first = torch.arange(0, parts.shape[across], form.refined, device=stored.device)
    return parts.index_select(dim + 1, first).index_select(across, across_first).flatten(dim, dim + 1)


Places = dict[str, tuple[StorageWeakRef, torch.Size, torch.dtype]]
"""Memory, shape and dtype of parameters, by name. While a reference lives, no other memory is equal to it."""


def places_of(layer: Layer) -> Places:
    """Notes where a layer's parameters of experts are, before they are taken."""
    held = {name: one for name, one in layer._parameters.items() if one is not None and _is_of_experts(name)}
    return {name: (StorageWeakRef(one.untyped_storage()), one.shape, one.dtype) for name, one in held.items()}


def give_back(layer: Layer, places: Places, kernel: MoEKernel) -> dict[str, torch.Tensor]:
    """Makes the tensors that a kernel reads where vLLM had them the layer's parameters again, without a copy.

    Returns:
        These tensors by the parameter's name.
    """
    found = {}
    shared = [one for one in kernel.weights.flat() if one.layout == torch.strided]
    read = {one.untyped_storage()._cdata: one for one in shared if not one.storage_offset()}
    for name, (memory, shape, dtype) in places.items():
        tensor = read.get(memory.cdata)
        if tensor is not None and (tensor.shape, tensor.dtype) == (shape, dtype) and tensor.is_contiguous():
            _parameter(layer, name).data = found[name] = tensor
    return found


def expose(layer: Layer, kernel: MoEKernel) -> None:
    """Registers what else a kernel reads, so that what vLLM does to a layer's tensors reaches it.

    Repacked weights become parameters [E,...], and tables buffers, both called `moereg_NAME`.
    """
    own = {parameter.untyped_storage()._cdata for parameter in layer._parameters.values() if parameter is not None}
    weights = kernel.weights
    for name, tensor in {**weights.per_expert, **weights.shared}.items():
        # On a CPU some are lists, or in a layout of oneDNN's that no parameter has.
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            continue
        if name in weights.shared:
            layer.register_buffer(f"moereg_{name}", tensor, persistent=False)
        elif tensor.untyped_storage()._cdata not in own:
            layer.register_parameter(f"moereg_{name}", torch.nn.Parameter(tensor, requires_grad=False))


def rows_of_experts(kernel: MoEKernel) -> list[torch.Tensor]:
    """All that a kernel reads of each expert, as views of bytes [E,n], for vLLM to move experts between ranks.

    Raises:
        ValueError: An expert's part of a tensor is not one piece of memory.
    """
    found = []
    for name, tensor in kernel.weights.per_expert.items():
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            # A transposed matrix is one piece, too.
            rows = tensor.permute(0, *sorted(range(1, tensor.dim()), key=tensor.stride, reverse=True))
            if rows.is_contiguous():
                # As bytes, since NCCL does not know each dtype.
                found.append(rows.view(len(rows), -1).view(torch.uint8))
                continue
        raise ValueError(
            f"with --enable-eplb a kernel must have each expert's {name} in one piece, got another layout of "
            f"{kernel.selection.backend}; deny that backend"
        )
    return found


def _is_of_experts(name: str) -> bool:
    return name.partition("_")[0] in MATRICES


def _parameter(layer: Layer, name: str) -> torch.nn.Parameter:
    parameter = layer._parameters.get(name)
    if parameter is None:
        raise ValueError(f"the layer must have the parameter {name}, got {', '.join(layer._parameters)}")
    return parameter


def _as_dtype(bias: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return bias if bias.dtype in (dtype, torch.float32) else bias.float()


# --- What makes a stored tensor canonical. ---


def _e8m0(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e8m0fnu)


def _float(scale: torch.Tensor) -> torch.Tensor:
    return scale.float()


def _largest(scale: torch.Tensor) -> torch.Tensor:
    """One number for all experts, as vLLM quantizes activations with a static scale."""
    return scale.float().max()


def _of_expert(scale: torch.Tensor) -> torch.Tensor:
    """[E], from [E] or [E,2] for gate and up, which read the same input: the larger one, so that nothing saturates."""
    return scale.float().flatten(1).amax(1) if scale.dim() == 2 else scale.float()


def _halves(scale: torch.Tensor) -> torch.Tensor:
    """[E] or [E,2], from [E,1] where the activation is not gated."""
    return scale.float().squeeze(1) if scale.dim() == 2 and scale.shape[1] == 1 else scale.float()


def _inverse(decode: Decode) -> Decode:
    """compressed-tensors divides by global scales."""
    return lambda scale: decode(1 / scale.float())


def _by_expert(decode: Decode) -> Decode:
    """Decodes expert by expert, since intermediate results are larger than codes."""

    def every(stored: torch.Tensor) -> torch.Tensor:
        first = decode(stored[0])
        out = first.new_empty((len(stored), *first.shape))
        for expert, words in enumerate(stored):
            out[expert] = decode(words)
        return out

    return every


# --- Readers. ---

_WEIGHT: Final[Mapping[TensorRole, Stored]] = MappingProxyType({"weight": Stored("_weight")})
_SCALED: Final[Mapping[TensorRole, Stored]] = MappingProxyType({**_WEIGHT, "scale": Stored("_weight_scale")})
_MX: Final = Stored("_weight_scale", _e8m0)


def _unquantized(method: Any) -> Form:
    return Form("unquantized", _WEIGHT, may_interleave=True)


def _fp8(method: Any) -> Form:
    """e4m3; blocks [E,2ceil(I/128),ceil(H/128)] fp32, or a number per projection, [E,2] and [E]."""
    if method.block_quant:
        return _fp8_block(method.weight_block_size, getattr(method, "weight_scale_refine", None), "_weight_scale_inv")
    return _fp8_tensor(method.quant_config.activation_scheme == "static")


def _fp8_block(blocks: Any, refined: Any, suffix: str) -> Form:
    """From vLLM 0.29 on `refined`, such as (2, 2), where a rank's part of the intermediate is not in whole blocks."""
    if list(blocks) != [_BLOCK, _BLOCK]:
        raise Declined(f"requires fp8 blocks of 128 x 128, got {list(blocks)}")
    return Form("fp8_block128", {**_WEIGHT, "scale": Stored(suffix)}, refined=refined[0] if refined else 1)


def _fp8_tensor(is_static: bool) -> Form:
    tensors: dict[TensorRole, Stored] = {**_WEIGHT, "scale": Stored("_weight_scale", _halves)}
    if is_static:
        tensors["activation_scale"] = Stored("_input_scale", _largest)
    return Form("fp8_tensor_static" if is_static else "fp8_tensor_dynamic", tensors)


def _modelopt_fp8(method: Any) -> Form:
    return _fp8_tensor(is_static=True)


def _compressed_fp8(method: Any) -> Form:
    """As `_fp8`, or a number per row, [E,2I,1] and [E,H,1]."""
    if method.block_quant:
        return _fp8_block(method.weight_block_size, getattr(method, "weight_scale_refine", None), "_weight_scale")
    strategy = str(getattr(method.weight_quant.strategy, "value", method.weight_quant.strategy))
    if strategy == "channel":
        return Form("fp8_channel_token", _SCALED)
    return _fp8_tensor(method.static_input_scales)


def _int8(method: Any) -> Form:
    return Form("int8_w8a8", _SCALED)


def _mxfp8(method: Any) -> Form:
    return Form("mxfp8", {**_WEIGHT, "scale": _MX})


def _gpt_oss(method: Any) -> Form:
    return Form("mxfp4_w4a16", {**_WEIGHT, "scale": _MX}, may_interleave=True, is_padded=True)


def _compressed_mxfp4(method: Any) -> Form:
    return Form("mxfp4_w4a16", {"weight": Stored("_weight_packed"), "scale": _MX})


def _modelopt_nvfp4(method: Any) -> Form:
    """uint8 pairs; e4m3 [E,2I,H/16]; multipliers [E,2] and [E]; activations' [.,2] and [.], maybe of all ranks."""
    tensors: dict[TensorRole, Stored] = {**_SCALED, "scale_2": Stored("_weight_scale_2", _halves)}
    if getattr(method, "per_token_activation", False):
        raise Declined("requires nvfp4 activations with one global scale, got one per token")
    if not method.use_a16:
        decode = _largest if method.use_global_sf else _of_expert
        tensors["activation_scale"] = Stored("_input_scale", decode)
    return Form("nvfp4_w4a16" if method.use_a16 else "nvfp4", tensors)


def _compressed_nvfp4(method: Any) -> Form:
    """As `_modelopt_nvfp4` with other names, and global scales that divide."""
    tensors: dict[TensorRole, Stored] = {
        "weight": Stored("_weight_packed"),
        "scale": Stored("_weight_scale"),
        "scale_2": Stored("_weight_global_scale", _inverse(_halves)),
    }
    use_a16 = getattr(method, "use_a16", None)
    if use_a16 is None:
        raise Declined("requires a method that says whether activations are nvfp4 too, as vLLM's does from 0.29 on")
    if not use_a16:
        tensors["activation_scale"] = Stored("_input_global_scale", _inverse(_of_expert))
    return Form("nvfp4_w4a16" if use_a16 else "nvfp4", tensors)


def _int4_name(group_size: int | None, is_symmetric: bool) -> str:
    group = "all" if group_size in (None, -1) else str(group_size)
    return f"int4_w4a16_g{group}{'' if is_symmetric else '_zp'}"


def _compressed_int4(method: Any) -> Form:
    """int32 words along K, [E,2I,H/8], scales [E,2I,g], zero points [E,2I/8,g]; or each with K first, before 0.31."""
    if method.num_bits != 4:
        raise Declined(f"requires 4 bits, got {method.num_bits}")
    order = str(getattr(method.weight_quant.actorder, "value", method.weight_quant.actorder))
    if order in ("group", "dynamic"):
        raise Declined(f"requires groups of neighboring columns, got actorder {order}")
    # Before 0.31 the layout depended on the kernel that vLLM chose; the attribute is from 0.27 on. A wrong answer is no
    # wrong number: w13 and w2 cannot both have fitting shapes in the other layout.
    backend = getattr(method, "wna16_backend", None)
    is_k_first = getattr(method, "is_transposed", backend is None or backend.name != "FLASHINFER_TRTLLM")
    tensors: dict[TensorRole, Stored] = {
        "weight": Stored("_weight_packed", gptq_codes if is_k_first else word_bytes),
        "scale": Stored("_weight_scale", _transposed_float if is_k_first else _float),
    }
    if not method.weight_quant.symmetric:
        decode = _zero_points if is_k_first else lambda words: _zero_points(words.mT)
        tensors["zero_point"] = Stored("_weight_zero_point", decode)
    return Form(_int4_name(method.group_size, method.weight_quant.symmetric), tensors)


def _gptq(method: Any) -> Form:
    """int32 words along K, [E,H/8,2I], and scales [E,g,2I]; symmetric, so that zero points say nothing."""
    config = method.quant_config
    if config.quant_type.size_bits != 4 or not config.is_sym:
        raise Declined(f"requires symmetric 4-bit GPTQ, got {config.quant_type}")
    if config.desc_act:
        raise Declined("requires groups of neighboring columns, got desc_act")
    tensors: dict[TensorRole, Stored] = {
        "weight": Stored("_qweight", gptq_codes),
        "scale": Stored("_scales", _transposed_float),
    }
    return Form(_int4_name(config.group_size, is_symmetric=True), tensors)


def _awq(method: Any) -> Form:
    """int32 words along rows in AWQ's order, [E,H,2I/8], scales [E,g,2I], zero points [E,g,2I/8]."""
    config = method.quant_config
    if not config.zero_point:
        raise Declined("requires AWQ with zero points, got zero_point false")
    tensors: dict[TensorRole, Stored] = {
        "weight": Stored("_qweight", _by_expert(awq_codes)),
        "scale": Stored("_scales", _transposed_float),
        "zero_point": Stored("_qzeros", awq_zero_points),
    }
    return Form(_int4_name(config.group_size, is_symmetric=False), tensors)


def _transposed_float(scale: torch.Tensor) -> torch.Tensor:
    return scale.float().mT.contiguous()


def _zero_points(words: torch.Tensor) -> torch.Tensor:
    """[E,N,ceil(g/2)] uint8, from words [E,g,N/8]."""
    return repacked_zero_points(words, words.shape[-1] * 8)


READERS: Final[Mapping[str, Callable[[Any], Form]]] = MappingProxyType(
    {
        "UnquantizedFusedMoEMethod": _unquantized,
        "Fp8MoEMethod": _fp8,
        "ModelOptFp8MoEMethod": _modelopt_fp8,
        "CompressedTensorsW8A8Fp8MoEMethod": _compressed_fp8,
        "CompressedTensorsW8A8Int8MoEMethod": _int8,
        "ModelOptMxFp8FusedMoE": _mxfp8,
        "CompressedTensorsW8A8Mxfp8MoEMethod": _mxfp8,
        "GptOssMxfp4MoEMethod": _gpt_oss,
        "CompressedTensorsW4A4Mxfp4MoEMethod": _compressed_mxfp4,
        "ModelOptNvFp4FusedMoE": _modelopt_nvfp4,
        "CompressedTensorsW4A4Nvfp4MoEMethod": _compressed_nvfp4,
        "CompressedTensorsWNA16MoEMethod": _compressed_int4,
        "CompressedTensorsWNA16MarlinMoEMethod": _compressed_int4,
        "AutoGPTQMoEMethod": _gptq,
        "AutoAWQMoEMethod": _awq,
    }
)
"""Readers by the class name of vLLM's method; each may raise `Declined`."""
