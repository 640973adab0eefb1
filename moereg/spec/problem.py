"""MoEProblem: what is known about a layer when it is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch

from moereg.arguments import check_count, check_flag, check_one_of
from moereg.errors import ArgumentError, shown
from moereg.spec.activations import ACTIVATIONS, Activation
from moereg.spec.quant_schemes import QUANT_SCHEMES, QuantScheme, get_scheme, known_fields

DTYPES: Final = ("bfloat16", "float16", "float32")
_DTYPE_ALIASES: Final = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
ACTIVATION_FORMATS: Final = ("standard", "batched")
PLACEMENTS: Final = ("contiguous", "map")
HELD_EXPERTS: Final = ("all", "some")
GRADIENTS: Final = ("hidden_states", "topk_weights", "weights", "adapters")
_REQUIRED: Final = ("num_experts", "hidden_size", "intermediate_size", "top_k")
_LATER: Final = ("gradients", "adapter_rank", "batch_invariant")
_FLAGS: Final = (
    *("has_bias", "apply_router_weight_on_input", "graph_capture", "deterministic", "batch_invariant"),
    "exact_activations",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEProblem:
    """One Mixture-of-Experts layer as one rank sees it.

    Sizes are this rank's; the caller does tensor-parallel sharding.
    Values can be given by name: `dtype="bfloat16"` or `torch.bfloat16`, `quant="unquantized"` or a `QuantScheme`,
    `activation="silu"` or an `Activation`.

    Attributes:
        num_experts: Experts of the whole layer; topk_ids are in [0, num_experts).
        hidden_size: H.
        intermediate_size: I.
        top_k: K, experts per token.
        dtype: Name of the dtype of hidden states, output and 16/32-bit weights.
        quant: The scheme of the checkpoint's weights.
        activation: The function between the two matmuls.
        has_bias: Whether both matmuls have a bias.
        activation_format: `standard` [T,H] or `batched` [E,max_T,H] as the experts see it.
        num_local_experts: Experts on this rank; None means all.
        placement: `contiguous` local experts, or any, through an expert `map`.
        apply_router_weight_on_input: The routing weight scales the expert's input instead of its output.
        graph_capture: Requires a kernel that a CUDA graph can capture.
        deterministic: Requires equal bits for equal inputs.
        batch_invariant: Requires that a token's result has the same bits whatever other tokens are in the call.
        exact_activations: Rejects kernels that keep activations at 16 bits although the scheme quantizes them.
        max_num_tokens: Most tokens of a call, if known. Not part of a tuning key.
        gradients: Names of those whose gradients a backward pass computes: `hidden_states`, `topk_weights`,
            `weights` for w13, w2 and their biases, and `adapters`. Empty for inference.
        adapter_rank: Largest rank of the experts' low-rank adapters, if `gradients` names them, else 0.

    Raises:
        ArgumentError: A value has another type, a count is below 1, top_k exceeds num_experts, or values conflict.
        UnknownNameError: A dtype, scheme, activation, format or placement is unknown.

    Example:
        >>> problem = moereg.MoEProblem(
        ...     num_experts=128, hidden_size=2048, intermediate_size=768, top_k=8, quant="fp8_block128"
        ... )
        >>> print(problem)
        E128 H2048 I768 k8 bfloat16 fp8_block128 silu
        >>> moereg.MoEProblem.from_dict(problem.to_dict()) == problem
        True
    """

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    dtype: str = "bfloat16"
    quant: QuantScheme = QUANT_SCHEMES["unquantized"]
    activation: Activation = ACTIVATIONS["silu"]
    has_bias: bool = False
    activation_format: str = "standard"
    num_local_experts: int = None  # type: ignore[assignment]  # resolved to num_experts below
    placement: str = "contiguous"
    apply_router_weight_on_input: bool = False
    graph_capture: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    exact_activations: bool = False
    max_num_tokens: int | None = None
    gradients: frozenset[str] = frozenset()
    adapter_rank: int = 0

    def __init__(
        self,
        *,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        top_k: int,
        dtype: str | torch.dtype = "bfloat16",
        quant: str | QuantScheme = "unquantized",
        activation: str | Activation = "silu",
        has_bias: bool = False,
        activation_format: str = "standard",
        num_local_experts: int | None = None,
        placement: str = "contiguous",
        apply_router_weight_on_input: bool = False,
        graph_capture: bool = False,
        deterministic: bool = False,
        batch_invariant: bool = False,
        exact_activations: bool = False,
        max_num_tokens: int | None = None,
        gradients: Collection[str] = (),
        adapter_rank: int = 0,
    ) -> None:
        given = locals()  # The arguments have the fields' names.
        resolved = {
            "dtype": _dtype_name(dtype),
            "quant": get_scheme(quant),
            "activation": Activation.from_name(activation) if isinstance(activation, str) else activation,
            "activation_format": check_one_of("activation format", activation_format, ACTIVATION_FORMATS),
            "num_local_experts": num_experts if num_local_experts is None else num_local_experts,
            "placement": check_one_of("placement", placement, PLACEMENTS),
            "gradients": _names_of_gradients(gradients),
        }
        for field in dataclasses.fields(MoEProblem):
            object.__setattr__(self, field.name, resolved.get(field.name, given[field.name]))
        for name in (*_REQUIRED, "num_local_experts"):
            check_count(name, getattr(self, name))
        if max_num_tokens is not None:
            check_count("max_num_tokens", max_num_tokens)
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        if not isinstance(self.activation, Activation):
            raise ArgumentError(f"activation must be a name or an Activation, got {shown(self.activation)}")
        if self.top_k > self.num_experts:
            raise ArgumentError(
                f"top_k must be at most num_experts: a token takes each expert once at most, "
                f"got top_k={self.top_k}, num_experts={self.num_experts}"
            )
        if self.num_local_experts > self.num_experts:
            raise ArgumentError(
                f"num_local_experts must be at most num_experts, "
                f"got num_local_experts={self.num_local_experts}, num_experts={self.num_experts}"
            )
        if self.apply_router_weight_on_input and self.top_k != 1:
            raise ArgumentError(
                f"apply_router_weight_on_input requires top_k = 1: an input has one routing weight, "
                f"got top_k={self.top_k}"
            )
        if "weights" in self.gradients and self.quant.weight is not None:
            raise ArgumentError(
                f"gradients of weights require unquantized weights, got {self.quant.name}; leave 'weights' out of "
                "gradients, or train weights in 16 or 32 bits"
            )
        if check_count("adapter_rank", adapter_rank, minimum=0) != 0 and "adapters" not in self.gradients:
            raise ArgumentError(
                f"adapter_rank is that of adapters with gradients, got {adapter_rank} with gradients of "
                f"({', '.join(sorted(self.gradients))}); add 'adapters' to gradients"
            )
        if "adapters" in self.gradients and not adapter_rank:
            raise ArgumentError(
                "gradients of adapters require their largest rank, got adapter_rank=0; pass adapter_rank"
            )
        if self.gradients and self.activation_format != "standard":
            raise ArgumentError(
                f"gradients require activation_format 'standard', got {self.activation_format!r} with gradients of "
                f"{', '.join(sorted(self.gradients))}; use the standard format"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as a torch dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def restored(self) -> MoEProblem:
        """The layer whose gradients classes compute: quantized weights, which are frozen, are restored to its dtype."""
        if not self.gradients or self.quant.weight is None:
            return self
        return dataclasses.replace(self, quant=QUANT_SCHEMES["unquantized"])

    def computed_as(self, scheme: QuantScheme | None) -> MoEProblem:
        """The layer as experts that compute a scheme see it: restored where that has other weights."""
        return self if scheme is None or scheme.weight == self.quant.weight else self.restored

    @property
    def is_expert_parallel(self) -> bool:
        """Whether other ranks hold experts of this layer."""
        return self.num_local_experts != self.num_experts

    @property
    def held_experts(self) -> str:
        """Whether this rank holds `all` or `some` of the layer's experts."""
        return "some" if self.is_expert_parallel else "all"

    def to_dict(self) -> dict[str, Any]:
        """The constructor's arguments as JSON values; `MoEProblem.from_dict` reads them back.

        Omits fields that are None, and `gradients`, `adapter_rank` and `batch_invariant` if not asked. A scheme other
        than moereg's own cannot be found by name, so it is written as a mapping.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values = {name: value for name, value in fields.items() if value is not None}
        known = self.quant == QUANT_SCHEMES.get(self.quant.name)
        values["quant"] = self.quant.name if known else dataclasses.asdict(self.quant)
        values["activation"] = str(self.activation)
        # A layer without them has the keys and fingerprints that it had before these fields were added.
        values["gradients"] = sorted(self.gradients)
        for name in _LATER:
            if not values[name]:
                del values[name]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> MoEProblem:
        """Inverse of `to_dict`.

        Raises:
            ArgumentError: A field is missing, unknown, or invalid for the constructor.
        """
        keywords = known_fields(cls, "a problem", values)
        for name in _REQUIRED:
            if name not in keywords:
                raise ArgumentError(f"{name} is required, got an object with {shown(sorted(keywords))}")
        if isinstance(quant := keywords.get("quant"), Mapping):
            keywords["quant"] = QuantScheme.from_dict(quant)
        return cls(**keywords)

    def __str__(self) -> str:
        text = (
            f"E{self.num_experts} H{self.hidden_size} I{self.intermediate_size} k{self.top_k} "
            f"{self.dtype} {self.quant.name} {self.activation}"
        )
        flags = [name for name in _FLAGS if getattr(self, name)]
        if self.activation_format != "standard":
            flags.append(self.activation_format)
        if self.is_expert_parallel:
            flags.append(f"{self.num_local_experts} local experts")
        if self.placement != "contiguous":
            flags.append(f"placement {self.placement}")
        if self.gradients:
            flags.append(f"gradients of {' and '.join(sorted(self.gradients))}")
        if self.adapter_rank:
            flags.append(f"adapter rank {self.adapter_rank}")
        return ", ".join([text, *flags])

    def __repr__(self) -> str:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["gradients"] = sorted(self.gradients)
        fields = {name: value for name, value in fields.items() if value or name not in _LATER}
        return f"MoEProblem({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def _names_of_gradients(names: object) -> frozenset[str]:
    if isinstance(names, str) or not isinstance(names, Collection):
        raise ArgumentError(f"gradients must be a collection of names ({', '.join(GRADIENTS)}), got {shown(names)}")
    return frozenset(check_one_of("gradient", name, GRADIENTS) for name in names)


def _dtype_name(dtype: object) -> str:
    # Check for a name first, since reading torch.dtype loads torch, which a command may not need.
    if not isinstance(dtype, str) and not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype must be a torch dtype or its name, got {shown(dtype)}")
    name = str(dtype).removeprefix("torch.")
    return check_one_of("dtype", _DTYPE_ALIASES.get(name, name), DTYPES)
