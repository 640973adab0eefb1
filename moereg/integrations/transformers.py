"""moereg inside transformers: an experts implementation for live models.

    from moereg.integrations.transformers import prepare, register

    register()
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moereg")
    prepare(model)  # Optional: makes every kernel now, and says what could not be served.

`register` suffices for every class that uses transformers' experts interface: its kernels read the parameters in place.
`prepare` takes the best kernels, ahead of time, which may repack weights. It also patches classes that have experts but
not the interface, and frees the canonical weights if asked. Needs transformers 5.17 or newer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from moereg.arguments import check_flag, check_text
from moereg.dispatch import Names, explain_backends, select_backend
from moereg.errors import ArgumentError, UnsupportedProblemError, one_line, shown
from moereg.evidence.ledger import evidence_of
from moereg.integrations._experts import memory, quantized, serving, training
from moereg.integrations._experts.blocks import FoundExperts, find_experts, patch, switch
from moereg.integrations._experts.calls import call
from moereg.integrations._experts.packed import is_packed, packed_in
from moereg.integrations._experts.peft_hooks import follow_peft
from moereg.layer.one_expert import keeping_moves
from moereg.layer.warm_up import WarmUp, check_token_counts
from moereg.platforms import Platform, platform_of
from moereg.runtime.memory import format_bytes
from moereg.selection.result import Selection
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme
from moereg.weights.permuted import ExpertWeights

__all__ = [
    "LayerChoice",
    "PreparedModel",
    "dequantize_experts",
    "explain_model",
    "prepare",
    "quantize_experts",
    "quantize_on_load",
    "refresh",
    "register",
    "restore",
    "warm_up",
]

_LOGGER: Final = logging.getLogger("moereg")


@dataclasses.dataclass(frozen=True)
class LayerChoice:
    """The choice for one layer of a model.

    Attributes:
        name: Dotted name of its experts module.
        class_name: That module's class.
        problem: The layer; None if it cannot be served.
        selection: How its backend was chosen; without a winner if nothing fits.
        refusal: Why moereg does not serve it; None if it does.
        kept: Why its canonical weights were not freed; None if they were, or if not requested.
        kernel_bytes: Bytes of its kernel's own copy of the weights, 0 if it reads the model's; None without a kernel.
    """

    name: str
    class_name: str
    problem: MoEProblem | None = None
    selection: Selection | None = None
    refusal: str | None = None
    kept: str | None = None
    kernel_bytes: int | None = None

    @property
    def backend(self) -> str | None:
        """Name of the kernel's backend; None if there is no kernel."""
        return None if self.selection is None else self.selection.backend


@dataclasses.dataclass(frozen=True)
class PreparedModel:
    """Result of `prepare`.

    Attributes:
        layers: One per experts module, in model order.
        bytes_before: Bytes of the model's parameters, buffers and kernels before.
        bytes_after: The same after.
    """

    layers: tuple[LayerChoice, ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        """A line for each distinct layer shape, and the memory of all."""
        groups: dict[object, list[LayerChoice]] = {}
        for layer in self.layers:
            groups.setdefault((_answer(layer), layer.selection and layer.selection.plan_text), []).append(layer)
        lines = [_line(group) for group in groups.values()]
        lines.append(f"weights: {format_bytes(self.bytes_before)} before, {format_bytes(self.bytes_after)} now")
        return "\n".join(lines)


_answer: Final = operator.attrgetter("class_name", "problem", "backend", "refusal", "kept")


def grouped(layers: tuple[LayerChoice, ...]) -> list[tuple[LayerChoice, ...]]:
    """Groups consecutive layers with the same choice."""
    return [tuple(group) for _, group in itertools.groupby(layers, _answer)]


def _line(group: list[LayerChoice]) -> str:
    """The backend of layers of one shape, why, where it was verified, and its bytes."""
    first = group[0]
    names = first.name if len(group) == 1 else f"{len(group)} layers, {first.name} to {group[-1].name}"
    selection = first.selection
    if selection is None or (winner := selection.winner) is None:
        return f"{names}: {first.problem} -> {first.backend}"
    nearest = None if winner.cell is None else evidence_of(winner.cell).nearest(selection.platform)
    where = "on no machine" if nearest is None else f"on {nearest.machine_in_brief}"
    num_bytes = sum(layer.kernel_bytes or 0 for layer in group)
    copy = f"{format_bytes(num_bytes)} in its own layout" if num_bytes else "weights read in place"
    kept = f" (weights kept: {first.kept})" if first.kept else ""
    chosen = f"{winner.backend} ({winner.experts}), by {selection.source}, verified {where}"
    return f"{names}: {first.problem} -> {chosen}; {copy}{kept}"


def register(name: str = serving.NAME) -> None:
    """Makes moereg an experts implementation of transformers in this process; may be called again.

    After it, `from_pretrained(..., experts_implementation="moereg")` and `model.set_experts_implementation("moereg")`
    run every class with the experts interface on moereg's kernels, FP8 models included. Kernels read the model's own
    parameters at each call, so nothing is copied and nothing can be stale. Where none can, as with the row order of
    gpt-oss, transformers' own code runs, and one line in the log says what `prepare` would gain.

    Args:
        name: The name to register.

    Raises:
        ArgumentError: The name is one of transformers' own, or transformers is missing or older than 5.17.
    """
    check_text("name", name)
    interfaces = _interfaces()
    for interface in interfaces:
        if name == "eager" or interface.get(name) not in (None, call):
            raise ArgumentError(f"name must not be taken in transformers, got {shown(name)}; leave it out for 'moereg'")
    for interface in interfaces:
        type(interface).register(name, call)
    serving.NAMES.add(name)
    follow_peft()


def _register_with_peft() -> None:
    with contextlib.suppress(ImportError):
        import peft  # noqa: F401  # Quantized experts train by its adapters.
    register()


def _interfaces() -> tuple[Any, ...]:
    try:
        from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ArgumentError(
            f"moereg.integrations.transformers needs transformers 5.17 or newer ({one_line(str(error))}); "
            "pip install 'moereg[transformers]'"
        ) from error
    return ALL_EXPERTS_FUNCTIONS, ALL_FP8_EXPERTS_FUNCTIONS


def prepare(
    model: torch.nn.Module,
    *,
    free: bool = False,
    batch_invariant: bool = False,
    progress: bool | Callable[[int, int], None] = True,
    require: Names = None,
    prefer: Names = None,
    deny: Names = None,
) -> PreparedModel:
    """Makes the best kernels of all experts of a model, and switches the model to them.

    A kernel may hold a copy of the weights in a layout of its own: the result says how many bytes all weights take. A
    copy follows the writes that torch counts; after others, `refresh` reads all parameters again.

    Every layer's backend is chosen before anything changes. If a later step raises, such as out of memory, the model
    keeps its previous implementation. Layers are repacked one by one.

    A model may be prepared again: kernels that fit the request are kept and read all parameters again, others are made
    anew. Freed experts stay freed.

    Args:
        model: A model with loaded weights, each layer on one device.
        free: Whether to free each layer's canonical weights once its kernel has them in its own layout. `state_dict`,
            `load_state_dict`, `save_pretrained` and other experts implementations read them back from the kernel.
            Tied weights are kept.
        batch_invariant: Whether the experts' results for a token must have the same bits whatever other tokens are in
            the call, in training too. What else is in the model may still depend on its batch.
        progress: Whether to show a bar on standard error, or a function of (layers done, all layers).
        require, prefer, deny: As for `select_backend`.

    Returns:
        Each layer's choice, and memory before and after; `print` shows it.

    Raises:
        ArgumentError: A layer cannot be served or freed (with reason and cure), or the model has no experts.
        UnsupportedProblemError: No backend fits a layer; gives every backend's reasons.
    """
    check_flag("free", free)
    check_flag("batch_invariant", batch_invariant)
    if not (isinstance(progress, bool) or callable(progress)):
        raise ArgumentError(f"progress must be a bool or a function of (done, total), got {shown(progress)}")
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, got {shown(model)}")
    found = _experts_of(model)
    wishes = {"require": require, "prefer": prefer, "deny": deny}
    request = {name: names for name, names in wishes.items() if names is not None}
    register()
    plans = [_plan(model, each, request, batch_invariant) for each in found]
    if free:
        for each in found:
            memory.check_can_free(each.module, each.name)
    shared = memory.shared_addresses(model)
    before = memory.held_bytes(model)
    layers: list[LayerChoice] = []
    with keeping_moves(), _bar(progress, len(found)) as advance:
        for plan in plans:
            layers.append(_prepare_layer(plan, request, batch_invariant, free, shared))
            advance(len(layers), len(found))
    switch(model, found)
    prepared = PreparedModel(tuple(layers), before, memory.held_bytes(model))
    for line in str(prepared).splitlines():
        _LOGGER.info("%s", line)
    return prepared


def refresh(model: torch.nn.Module) -> None:
    """Reads all parameters of a model's experts again, after writes that torch does not count.

    Captured graphs see them. Freed experts have nothing to read.

    Args:
        model: A model that was prepared or has run; others are left alone.

    Raises:
        ArgumentError: A layer cannot be served any more; says why and what to do.
    """
    for module in model.modules():
        found = serving.served(module)
        if found is not None:
            found.forget()
            found.follow_parameters()


def warm_up(
    model: torch.nn.Module, token_counts: Iterable[int] | None = None, *, jobs: int | None = None
) -> tuple[WarmUp, ...]:
    """Compiles everything that a prepared model's experts launch, so that later calls do not wait.

    Args:
        model: A model that was prepared or has run.
        token_counts, jobs: As in `MoEKernel.warm_up`.

    Returns:
        The result for each kernel, in model order. Equal layers share what the first one compiles.

    Raises:
        ArgumentError: The model has no kernels yet, or as in `MoEKernel.warm_up`.
        BackendError: A kernel did not compile, or a call failed.
    """
    found = [serving.served(each.module) for each in find_experts(model)]
    kernels = [kernel for each in found if each is not None for kernel in each.kernels.values()]
    if not kernels:
        raise ArgumentError("warm_up needs a model with kernels of moereg; call prepare(model) first")
    counts = None if token_counts is None else check_token_counts(token_counts)
    return tuple(kernel.warm_up(counts, jobs=jobs) for kernel in kernels)


def _experts_of(model: torch.nn.Module) -> tuple[FoundExperts, ...]:
    found = find_experts(model)
    if not found:
        raise ArgumentError(
            f"{type(model).__name__} has no routed experts that moereg knows; load a Mixture-of-Experts model"
        )
    return found


class _Plan(NamedTuple):
    """The plan of `prepare` for one layer."""

    found: FoundExperts
    top_k: int
    dtype: torch.dtype
    selection: Selection


def _plan(model: torch.nn.Module, found: FoundExperts, request: Mapping[str, Names], batch_invariant: bool) -> _Plan:
    """Plans one layer, or raises if it cannot be served; changes nothing."""
    module, live, top_k = found.module, found.live, found.top_k
    try:
        if live is None:
            raise ArgumentError(str(found.refusal))
        if top_k is None:
            raise ArgumentError("neither its block nor its config says how many experts a token has")
        known = serving.served(module)
        if known is not None and known.released:
            device = next(iter(known.kernels.values())).weights.device
        else:
            device = serving.check_servable(module, live)
        platform = platform_of(device)
    except ArgumentError as error:
        raise serving.refused(module, error, found.name) from error
    dtype = getattr(torch, live.dtype) if live.dtype else _hidden_dtype(model)
    try:
        problem = serving.problem_of(module, live, top_k, dtype, batch_invariant)
        selection = select_backend(problem, platform, **request)
    except UnsupportedProblemError as error:
        raise UnsupportedProblemError(f"{found.name}: {error}", error.selection) from None
    return _Plan(found, top_k, dtype, selection)


def _prepare_layer(
    plan: _Plan, request: Mapping[str, Names], batch_invariant: bool, free: bool, shared: frozenset[int]
) -> LayerChoice:
    found = plan.found
    known = serving.served(found.module)
    was_freed = known is not None and bool(known.released)
    if known is not None and (known.request, known.batch_invariant) == (request, batch_invariant):
        served = known
        served.forget()
    else:
        if known is not None:
            known.give_back()  # Its kernel may hold the only copy of the weights.
        served = serving.ServedExperts(found.module, request, batch_invariant)
    if not served.is_prepared:
        served.kernels.clear()  # Those that read in place; there may be faster ones with a copy.
    served.is_prepared = True
    served.follow_parameters()
    kernel = served.kernel(plan.top_k, plan.dtype, plan.selection)
    serving.attach(found.module, served)
    if serving.has_interface(found.module) and not served.released:
        training.plan(found.module, plan.top_k)  # Compiled code cannot.
    if found.block is not None:
        patch(found.block)
    num_bytes = memory.held_bytes(found.module) - memory.held_bytes(found.module, with_kernels=False)
    kept = memory.release(served, shared) if free or was_freed else None
    return LayerChoice(
        found.name, found.class_name, kernel.problem, kernel.selection, kept=kept, kernel_bytes=num_bytes
    )


def _hidden_dtype(model: torch.nn.Module) -> torch.dtype:
    """The dtype of hidden states in a model with quantized experts: that of its 16-bit weights."""
    dtypes = [parameter.dtype for parameter in model.parameters()]
    return next((dtype for dtype in dtypes if dtype in (torch.bfloat16, torch.float16)), torch.float32)


def restore(model: torch.nn.Module) -> None:
    """Undoes `prepare`: puts freed weights back and drops all kernels.

    Patched classes run their own code again. Others make their kernels again at the next call, unless another
    implementation is set.
    """
    with keeping_moves():
        for module in model.modules():
            found = serving.served(module)
            if found is not None:
                found.give_back()
                serving.detach(module)


def quantize_experts(
    model: torch.nn.Module,
    scheme: QuantScheme | str | None = None,
    *,
    weights: Callable[[int], ExpertWeights] | None = None,
) -> str:
    """Stores a model's experts quantized and freezes them, layer by layer, so that adapters above them train.

    Each parameter keeps its name, shape and dtype, so that PEFT finds it. Every operation on it, but for moereg's
    kernels, restores its values.

    Args:
        model: A model whose experts use transformers' interface, each layer on one device.
        scheme: A scheme or its name, for experts in 16 or 32 bits; None for those that are quantized already:
            `FP8Experts`, whose tensors are taken as they are.
        weights: Gives quantized weights of the layer of that index instead of the model's own, such as
            `lambda layer: moereg.load_experts(path, layer, device=model.device).weights`.

    Returns:
        A line with the scheme, and memory before and after.

    Raises:
        ArgumentError: A layer cannot be quantized; says why. Layers before it are quantized.
        UnknownSchemeError: No scheme has that name.
    """
    if scheme is not None and weights is not None:
        raise ArgumentError(f"scheme must be None with weights, which have one, got {shown(scheme)}; leave one out")
    _register_with_peft()
    found = _experts_of(model)
    wanted = None if scheme is None else quantized.check_scheme(scheme)
    restore(model)
    before = memory.held_bytes(model)
    for each in found:
        quantized.packable(each)
        if is_packed(each.module):
            raise ArgumentError(f"{each.name} is quantized already; call dequantize_experts(model) first")
    if wanted is not None and all(each.live is not None and each.live.dtype is None for each in found):
        raise ArgumentError(
            f"scheme must be None for experts that are quantized already ({found[0].class_name}), got {wanted.name}; "
            "leave it out, and they are taken as they are"
        )
    for each in found:
        if weights is not None:
            quantized.put(model, each, weights(quantized.layer_index(each)), _hidden_dtype(model))
        elif not is_packed(each.module):  # Layers may share parameters.
            quantized.quantize_layer(model, each, wanted, _hidden_dtype(model))
        each.module.requires_grad_(False)
    switch(model, found)
    said = f"{packed_in(model)}; weights: {format_bytes(before)} before, {format_bytes(memory.held_bytes(model))} now"
    _LOGGER.info("%s", said)
    return said


def quantize_on_load(scheme: QuantScheme | str | None = None, *, read: Callable[..., Any] | None = None) -> Any:
    """A `quantization_config` for `from_pretrained`, which quantizes experts while a model loads.

    At most three layers of a checkpoint in 16 bits are in memory at once. Where experts alone are quantized, as in
    gpt-oss's MXFP4, they are read as they are.

    Args:
        scheme: As in `quantize_experts`, for a checkpoint in 16 bits.
        read: `moereg.load_experts`, for a checkpoint with quantized experts.

    Raises:
        ArgumentError: Not one of the two is given, or as in `quantize_experts`, from `from_pretrained` too.
        UnknownSchemeError: No scheme has that name.
    """
    if (scheme is None) is (read is None):
        raise ArgumentError("quantize_on_load needs a scheme or read=moereg.load_experts, got both or none; give one")
    _register_with_peft()
    from moereg.integrations._experts.loading import ExpertsConfig

    return ExpertsConfig(None if scheme is None else quantized.check_scheme(scheme), read)


def dequantize_experts(model: torch.nn.Module) -> None:
    """Undoes `quantize_experts`, but for the rounding: parameters hold the restored values, into which adapters merge.

    A model that `quantize_on_load` quantized can be saved again.

    Args:
        model: A model; experts that are not quantized stay as they are.
    """
    from moereg.integrations._experts.loading import ExpertsQuantizer

    restore(model)
    for module in model.modules():
        quantized.dequantize_layer(model, module)
        quantizer = vars(module).get("hf_quantizer")
        if isinstance(quantizer, ExpertsQuantizer):
            quantizer.remove_quantization_config(module)  # type: ignore[no-untyped-call]


def explain_model(
    path: str | os.PathLike[str],
    platform: Platform | str | None = None,
    *,
    require: Names = None,
    prefer: Names = None,
    deny: Names = None,
    **wishes: Any,
) -> tuple[LayerChoice, ...]:
    """The choice that `prepare` would make for every layer of a saved model, based only on its config.json.

    The model is built on meta, which needs neither memory nor weights. Code of the repository is not run.

    Args:
        path: Directory with config.json.
        platform: The platform to select for; None means this machine.
        require, prefer, deny: As for `select_backend`.
        wishes: Fields of `MoEProblem` that no model decides, such as max_num_tokens.

    Raises:
        ArgumentError: transformers cannot make a model of that config, or it has no experts.
    """
    from moereg.integrations._experts.meta import model_on_meta, scheme_of

    model = model_on_meta(path)
    found = find_experts(model)
    if not found:
        raise ArgumentError(f"the model of {str(path)!r} ({type(model).__name__}) has no routed experts")
    scheme = scheme_of(model)
    dtype = _hidden_dtype(model)
    layers = []
    for each in found:
        choice = LayerChoice(each.name, each.class_name, refusal=each.refusal)
        if each.live is not None and each.top_k is not None:
            quant = scheme(each.name)
            live = each.live if quant is None else dataclasses.replace(each.live, quant=quant)
            problem = dataclasses.replace(live.problem(each.top_k, dtype), **wishes)
            selection = explain_backends(problem, platform, require, prefer, deny)
            choice = dataclasses.replace(choice, problem=problem, selection=selection)
        elif each.live is not None:
            choice = dataclasses.replace(choice, refusal="nothing says how many experts a token has")
        layers.append(choice)
    return tuple(layers)


@contextlib.contextmanager
def _bar(progress: bool | Callable[[int, int], None], total: int) -> Iterator[Callable[[int, int], None]]:
    """Transformers' own progress bar, which `disable_progress_bar` turns off, or the caller's function."""
    if progress is not True:
        yield progress or (lambda done, total: None)
        return
    from transformers.utils import logging

    with logging.tqdm(total=total, desc="Making moereg kernels", unit="layer") as bar:
        yield lambda done, total: bar.update(1)
