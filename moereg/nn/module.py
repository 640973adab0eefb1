"""MoELayer: routed experts as a torch module, optionally with their router."""

from __future__ import annotations

import dataclasses
import functools
import os
import weakref
from collections.abc import Collection
from typing import Any

import torch

from moereg.arguments import check_count, check_device, check_flag, check_instance
from moereg.checkpoints import CheckpointLayer, load_experts
from moereg.dispatch import Names, Selection, select_backend
from moereg.errors import ArgumentError
from moereg.layer.checks import check_call, check_no_transform, resolve_expert_map
from moereg.layer.factory import MoEKernel, make_kernel
from moereg.layer.in_place import check_in_place, say_gain, say_once
from moereg.layer.one_expert import keeping_moves
from moereg.layer.train_op import joined, reshaped, run_training, trains
from moereg.nn.export_op import run_exported
from moereg.nn.state import CanonicalModule, experts_of, has_shared_experts, router_tensors, zeros_for
from moereg.platforms import platform_of
from moereg.routing import RouterSpec
from moereg.runtime.graph_pools import outside_pools
from moereg.runtime.torch_op import is_exporting, new_handle, run_compiled
from moereg.runtime.torch_state import plain_torch
from moereg.selection.decide import reading_in_place
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import TENSOR_ROLES
from moereg.weights.adapters import ADAPTER_TENSORS, ExpertAdapters
from moereg.weights.permuted import ExpertWeights


class MoELayer(CanonicalModule):
    """The routed experts of one layer as a module, optionally with their router.

    Its parameters are the canonical tensors named as in `ExpertWeights`: `w13` [E,2I,H] with gate rows first, `w2`
    [E,H,I], scales and biases; `router_weight` [E,H], `router_bias` [E] and `correction_bias` [E]; and those of
    `ExpertAdapters`. `state_dict` holds these on every machine, whatever layout the kernel reads.

    The first call takes the best kernel that reads the parameters where they are: each call sees them as they are then,
    whoever wrote or replaced them, and nothing is copied. `prepare` may take a kernel with a copy in a layout of its
    own; it follows `.to()`, `load_state_dict`, steps of torch's optimizers, and parameters that are replaced or
    written. Writes through `parameter.data` or a raw pointer, which torch does not see, need `refresh()` then. Where no
    kernel reads the parameters in place, as with most 4-bit weights on a GPU, the first call prepares.

    Parameters require a gradient where the problem's `gradients` name them: the experts' as `weights`, which are then
    read and trained in place, the router's as `topk_weights`, and `adapters`. See [docs/training.md](docs/training.md).

    With `keep_canonical=False` the first call prepares and frees the experts' parameters, and `state_dict`, `.to()` and
    copies read them back from the kernel.

    It can be copied, pickled, compiled and exported, and with a router be part of `nn.Sequential`. An exported program
    holds the parameters and makes its kernel where it runs, after `import moereg.nn.module`. If the layer's parameters
    were freed, the program runs in this process only.

    Args:
        problem: The layer.
        weights: Canonical weights of this rank's experts; they become the parameters without a copy. None makes zeros,
            for `load_state_dict`.
        router: How the layer routes if a call names no experts.
        router_weight: [E,H], all experts, in the problem's dtype; with a router None makes zeros.
        router_bias: [E] in the problem's dtype, or None.
        correction_bias: [E] fp32, only for routers that have one; None makes zeros.
        adapters: Low-rank adapters of the experts, for a problem with gradients of them; their tensors become
            parameters without a copy. Their scalings are the layer's, like its activation, and not in `state_dict`.
            None makes `ExpertAdapters.initial`, which change nothing yet, with a scaling of 1.
        ep_rank, expert_map: As in `make_kernel`.
        keep_canonical: Whether the parameters stay after the kernel was made.
        device: Device of zeros; None means torch's default. `meta` takes no memory.
        require, prefer, deny: As in `select_backend`.

    Raises:
        ArgumentError: Weights or router do not fit the problem.

    Attributes:
        problem: The layer, in its parameters' current dtype.
        router: How it routes, or None.
        expert_map: Buffer [num_experts] int32, local expert or -1, if placement is `map`; update it in place. Not in
            `state_dict`, since it differs between ranks.
        has_shared_experts: Whether the checkpoint's layer, or the live module, also has shared experts, which are not
            part of this one.

    Example:
        >>> import torch
        >>> problem = moereg.MoEProblem(num_experts=8, hidden_size=64, intermediate_size=32, top_k=2, dtype="float32")
        >>> router = moereg.routing.RouterSpec(kind="softmax_topk", num_experts=8, top_k=2, renormalize=True)
        >>> layer = moereg.MoELayer(problem, router=router)
        >>> sorted(layer.state_dict())
        ['router_weight', 'w13', 'w2']
        >>> layer(torch.randn(2, 5, 64)).shape
        torch.Size([2, 5, 64])
    """

    def __init__(
        self,
        problem: MoEProblem,
        weights: ExpertWeights | None = None,
        *,
        router: RouterSpec | None = None,
        router_weight: torch.Tensor | None = None,
        router_bias: torch.Tensor | None = None,
        correction_bias: torch.Tensor | None = None,
        adapters: ExpertAdapters | None = None,
        ep_rank: int = 0,
        expert_map: torch.Tensor | None = None,
        keep_canonical: bool = True,
        device: torch.device | str | None = None,
        require: Names = None,
        prefer: Names = None,
        deny: Names = None,
    ) -> None:
        """Makes the layer without a kernel."""
        super().__init__()
        check_instance("problem", problem, MoEProblem, "make one with MoEProblem(...)")
        check_flag("keep_canonical", keep_canonical)
        self.problem: MoEProblem = problem
        self.router = router
        self.ep_rank = check_count("ep_rank", ep_rank, minimum=0)
        self.keep_canonical = keep_canonical
        self.has_shared_experts = False
        if "weights" in problem.gradients and not keep_canonical:
            raise ArgumentError(
                "keep_canonical=False frees the parameters, and gradients of weights train them; leave one of them out"
            )
        if weights is not None:
            check_instance("weights", weights, ExpertWeights, "make them with ExpertWeights(w13=..., w2=...)")
        if device is not None:
            device = check_device("device", device)
        self._wishes = {"require": require, "prefer": prefer, "deny": deny}
        if weights is None:
            place = torch.get_default_device() if device is None else device
            weights = ExpertWeights.unchecked(zeros_for(problem, place), problem.quant)
        elif device is not None:
            weights = weights.to(device)
        weights.check_against(problem)
        place = weights.w13.device
        for name in TENSOR_ROLES:
            self._set(name, weights.tensors().get(name))
        given = {"router_weight": router_weight, "router_bias": router_bias, "correction_bias": correction_bias}
        routing = router_tensors(problem, router, given, place)
        for name in given:
            self._set(name, routing.get(name))
        if adapters is None and problem.adapter_rank:
            adapters = ExpertAdapters.initial(problem, problem.adapter_rank, device=place)
        self._set_adapters(adapters, place)
        resolved = resolve_expert_map(problem, ep_rank, expert_map, place)
        self.register_buffer("expert_map", resolved if problem.placement == "map" else None, persistent=False)
        self._handle = new_handle(self)

    def _set_adapters(self, adapters: ExpertAdapters | None, place: torch.device) -> None:
        if adapters is not None:
            check_instance("adapters", adapters, ExpertAdapters, "make them with ExpertAdapters(w13_a=..., w13_b=...)")
            adapters = adapters.with_tensors({name: tensor.to(place) for name, tensor in adapters.tensors().items()})
            adapters.check_against(self.problem, place)
            for name, tensor in adapters.tensors().items():
                if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
                    raise ArgumentError(
                        f"{name} shares memory between its elements, and optimizers write each of a parameter's, got "
                        f"strides {list(tensor.stride())}; pass {name}.contiguous(), or adapters at a kernel's call"
                    )
            self._adapter_scaling = (adapters.w13_scaling, adapters.w2_scaling)
        for name in ADAPTER_TENSORS:
            self._set(name, None if adapters is None else getattr(adapters, name))

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        layer: int,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device = "cpu",
        *,
        num_local_experts: int | None = None,
        ep_rank: int = 0,
        **keywords: Any,
    ) -> MoELayer:
        """Loads one layer of a checkpoint: its routed experts and their router.

        Shared experts, which take every token, are left out; `has_shared_experts` says whether the model has some.

        Args:
            path: As `load_experts` takes it.
            layer: Index in the whole model.
            dtype: Dtype to load in, or to run quantized experts in; None means the checkpoint's.
            device: Device to load to.
            num_local_experts: Experts of this rank; None means all.
            ep_rank: Selects the experts from `ep_rank * num_local_experts` on.
            **keywords: `keep_canonical`, `require`, `prefer` and `deny`.

        Raises:
            CheckpointError: The layer cannot be read; the message says why.
        """
        loaded = load_experts(path, layer, dtype, device, num_local_experts=num_local_experts, ep_rank=ep_rank)
        return cls.from_loaded(loaded, **keywords)

    @classmethod
    def from_loaded(cls, loaded: CheckpointLayer, **keywords: Any) -> MoELayer:
        """Makes a layer from the result of `load_experts`; its tensors become the parameters.

        It has no router, so that calls name the experts, where `loaded.route` takes or does more than a `RouterSpec`.

        Args:
            loaded: The result of `load_experts`.
            **keywords: `keep_canonical`, `require`, `prefer` and `deny`.
        """
        names = ("router", "router_weight", "router_bias", "correction_bias")
        is_other = loaded.router_weight.shape[1] != loaded.problem.hidden_size or loaded.router.has_expert_scale
        routing = {} if is_other or loaded.expert_table is not None else {name: getattr(loaded, name) for name in names}
        made = cls(loaded.problem, loaded.weights, **routing, ep_rank=loaded.ep_rank, **keywords)
        made.has_shared_experts = getattr(loaded, "has_shared_experts", False)
        return made

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Module,
        *,
        top_k: int | None = None,
        dtype: torch.dtype | None = None,
        gradients: Collection[str] = (),
        **keywords: Any,
    ) -> MoELayer:
        """The routed experts of a live module of transformers, such as `model.model.layers[3].mlp`, and their router.

        The module's memory becomes the parameters where its layout is canonical; elsewhere they are copies. What else
        the module does with the experts' sum (shared experts, a norm) is not in the layer. The router is taken where
        the module has it and its config names a model type of which `load_experts` reads checkpoints; elsewhere
        `router` is None, and calls name the experts.

        Args:
            module: Holds the experts of one layer.
            top_k: Experts a token; what the module or its config says where None.
            dtype: Of hidden states, where quantized weights do not say it; bfloat16 where None.
            gradients: As in `MoEProblem`.
            **keywords: As the constructor takes them; with `router`, the module's own is left out.

        Raises:
            ArgumentError: The module has no experts or those of several layers, or moereg cannot compute them.
        """
        problem, weights, routing = experts_of(module, top_k, dtype)
        problem = dataclasses.replace(problem, gradients=frozenset(gradients))
        made = cls(problem, weights, **(keywords if "router" in keywords else {**routing, **keywords}))
        made.has_shared_experts = has_shared_experts(module)
        return made

    def forward(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor | None = None,
        topk_ids: torch.Tensor | None = None,
        *,
        output_router_logits: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Runs the experts.

        Args:
            hidden_states: [..., H] in the problem's dtype, with any strides.
            topk_weights: [..., K] or [T,K], fp32, bf16 or fp16; None lets the layer's router choose.
            topk_ids: The same shape, int32 or int64, global experts; given together with `topk_weights`.
            output_router_logits: Whether to return the router's logits too, as auxiliary losses take them.

        Returns:
            [..., H]: the sum over this rank's experts. A backward pass computes the problem's `gradients`, and raises
            `GradientError` where another tensor requires one. Under autocast a layer with gradients takes hidden states
            of any float dtype, and computes and returns its own. With `output_router_logits`, this and the [T,E] logits
            from which the experts were chosen, before any softmax, which autograd follows in a layer with gradients.

        Raises:
            ArgumentError: A shape, dtype or device is wrong, or the layer has no router and no experts were named.
        """
        check_instance("hidden_states", hidden_states, torch.Tensor, "pass [..., H]")
        check_no_transform((hidden_states, topk_weights, topk_ids), self._parameters.values())
        hidden_size = self.problem.hidden_size
        if not hidden_states.dim() or hidden_states.shape[-1] != hidden_size:
            raise ArgumentError(f"hidden_states must be [..., {hidden_size}], got {list(hidden_states.shape)}")
        if self.problem.gradients and hidden_states.dtype != self.problem.torch_dtype and _is_autocast(hidden_states):
            hidden_states = hidden_states.to(self.problem.torch_dtype)
        rows = hidden_states.reshape(-1, hidden_size).contiguous()
        if (topk_weights is None) != (topk_ids is None):
            raise ArgumentError("topk_weights and topk_ids go together; pass both, or none for the layer's router")
        if output_router_logits:
            if topk_ids is not None:
                raise ArgumentError("output_router_logits are of the layer's router, got topk_ids too; leave one out")
            logits, *routes = self._routed(rows)
            out: Any = self.forward(hidden_states, *routes)
            return out, logits
        if topk_weights is None or topk_ids is None:
            topk_weights, topk_ids = self.route(rows)
        else:
            topk_weights = self._flat(topk_weights, "topk_weights", hidden_states)
            topk_ids = self._flat(topk_ids, "topk_ids", hidden_states)
            if topk_ids.dtype.is_floating_point and not topk_weights.dtype.is_floating_point:
                raise ArgumentError("topk_weights come before topk_ids, got them the other way round; exchange the two")
        if topk_weights.dtype in (torch.bfloat16, torch.float16):
            topk_weights = topk_weights.float()
        if torch.compiler.is_compiling():
            check_call(self.problem, hidden_states.device, rows, topk_weights, topk_ids, None)
            held, adapters = self._in_place, self.adapters
            if adapters is not None:
                if is_exporting():
                    raise ArgumentError(
                        "an exported program has no adapters; export a layer of layer.adapters.merged(layer.weights)"
                    )
                adapters.check_against(self.problem, hidden_states.device)
                adapters = adapters.computed_in(self.problem.torch_dtype)
            if not is_exporting() and trains(self.problem, rows, topk_weights, held, adapters):
                out = run_training(self.problem, rows, topk_weights, topk_ids, held, self._handle, adapters)
                return reshaped(joined(out, *self._untrained), hidden_states.shape)
            out = torch.empty_like(rows)
            if adapters is not None or (held and not is_exporting()):
                with torch.no_grad():
                    out = run_training(self.problem, rows, topk_weights, topk_ids, held, self._handle, adapters)
            elif is_exporting() and not self._is_freed:
                expert_map = self._buffers["expert_map"]
                tensors = self._held if expert_map is None else {**self._held, "expert_map": expert_map}
                run_exported(
                    rows, topk_weights, topk_ids, out, tensors, self.problem, ep_rank=self.ep_rank, **self._wishes
                )
            elif rows.shape[0]:
                run_compiled(rows, topk_weights, topk_ids, out, self._handle)
        else:
            out = self.training_kernel()(rows, topk_weights, topk_ids, adapters=self.adapters)
        # The kernel follows what it trains.
        followed = self._untrained if out.requires_grad else (rows, topk_weights, *self._parameters.values())
        return reshaped(joined(out, *followed), hidden_states.shape)

    def route(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Chooses experts like the model's router, with logits in the model's dtype for them.

        Args:
            hidden_states: [T,H] in the problem's dtype, on the layer's device.

        Returns:
            topk_weights [T,K] fp32 and topk_ids [T,K] int32, global experts.

        Raises:
            ArgumentError: The layer has no router.
        """
        _, topk_weights, topk_ids = self._routed(hidden_states)
        return topk_weights, topk_ids

    def _routed(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The logits, and what `route` returns for them."""
        if self.router is None:
            raise ArgumentError(
                "this MoELayer has no router; pass topk_weights and topk_ids, or make it with router=..."
            )
        if torch.compiler.is_compiling():
            return self._route(self.router, hidden_states)
        # Even if the problem does not name `topk_weights`: hidden states would lose a part of their gradient.
        with plain_torch(keeps_gradients=bool(self.problem.gradients)):
            return self._route(self.router, hidden_states)

    def _route(self, router: RouterSpec, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight, router_bias = self._parameters["router_weight"], self._parameters["router_bias"]
        assert weight is not None
        dtype = torch.float32 if router.fp32_logits else weight.dtype
        bias = None if router_bias is None else router_bias.to(dtype)
        logits = torch.nn.functional.linear(hidden_states.to(dtype), weight.to(dtype), bias)
        return logits, *router.route(logits, self._parameters["correction_bias"])

    def prepare(self, selection: Selection | None = None, *, refresh: bool = False) -> MoEKernel:
        """Makes the best kernel, or updates it with written or replaced parameters.

        It may hold a copy of the weights in a layout of its own: `print` it for the bytes. Where the best class reads
        the parameters in place, so does the kernel, which then serves as long as the layer lives.

        Args:
            selection: A selection for this problem, for this kernel only; None selects on the layer's device by its
                request.
            refresh: Whether to read the parameters again even if torch counted no writes, like `refresh`.

        Returns:
            The kernel. `.to()` drops it.

        Raises:
            UnsupportedProblemError: Nothing fits.
            ArgumentError: The parameters are on meta or on a device that this machine's platform lacks, or they are to
                be freed and the kernel's layout cannot be read back.
        """
        was_prepared, self._is_prepared = self._is_prepared, True
        reads_in_place = self._kernel is not None and self._kernel.held.is_borrowed
        if selection is None and (was_prepared or not reads_in_place):
            followed = self._followed(refresh)
            # The first call may have made the best one, for want of any that reads in place.
            if followed is not None and (was_prepared or followed.selection.backend == self._selected().backend):
                return followed
        return self._made(selection or self._selected())

    def _followed(self, refresh: bool = False) -> MoEKernel | None:
        """The kernel, up to date with the parameters; None if they need another one."""
        kernel = self._kernel
        if kernel is None or self._is_freed:
            return kernel
        if kernel.held.is_borrowed:
            return kernel if kernel.held.fits(self._in_place) else None
        state, seen = self._state(checks=not refresh), self._seen
        if refresh or state != seen:
            weights = self._checked_weights()
            if kernel.held.borrowed - kernel.weights.shared_with(weights):
                return None  # It would write into the old parameters, which may be anybody's.
            # In place, so that captured graphs see it.
            kernel.reload(weights, write_shared=True)
            self._seen = state
        return kernel

    def _selected(self) -> Selection:
        """Selects among all classes."""
        if self._device.type == "meta":
            raise ArgumentError(
                "the parameters of this MoELayer are on meta and hold nothing; load_state_dict(..., assign=True), or "
                "to_empty(device=...) and load_state_dict"
            )
        return select_backend(self.problem, platform_of(self._device), **self._wishes)

    def _made(self, selection: Selection | None = None) -> MoEKernel:
        """Makes the kernel of a selection; by default the best one that reads the parameters in place, if there is any.

        Raises:
            UnsupportedProblemError, ArgumentError: As in `prepare`.
        """
        outside_pools(self._thaw, self._device)
        weights = self._checked_weights()
        if selection is None:
            selection = best = self._selected()
            if self._is_copied:
                strides = {name: list(one.stride()) for name, one in self._held.items() if not one.is_contiguous()}
                say_once(f"layers run on a copy of weights that are not contiguous, got strides {strides}")
            else:
                selection = reading_in_place(best)
                say_gain(best, selection, weights, "layer.prepare()")
                selection = best if selection.winner is None else selection
        place, held = self._buffers["expert_map"], self._in_place
        if held and reading_in_place(selection).winner is selection.winner:
            check_in_place(held)
        kernel = make_kernel(self.problem, weights, selection, ep_rank=self.ep_rank, expert_map=place)
        kernel.held.leave_to_owner()  # Later calls of `prepare` reload it.
        if not self.keep_canonical:
            with keeping_moves():
                kernel.weights.to_canonical(0)  # Raises if nothing could be read back.
            self._free()
        elif held and kernel.held.reads_in_place:
            check_in_place(held)  # By another class than the selection's, if that failed its first check.
            kernel.held.read_from(functools.partial(_held_by, weakref.ref(self)))
        self._kernel, self._seen = kernel, self._state()
        return kernel

    def refresh(self) -> None:
        """Reads all parameters again, after writes that torch does not count.

        Such writes go through `parameter.data` or a raw pointer, or are made by replayed CUDA graphs. Captured graphs
        of this layer see them.
        """
        if self._kernel is not None and self._followed(refresh=True) is None:
            self._kernel = None  # The next call makes another.

    def update_expert(self, expert: int, weights: ExpertWeights) -> None:
        """Replaces one expert in parameters and kernel, in place.

        Args:
            expert: Local expert.
            weights: That expert alone, E = 1, on the layer's device.

        Raises:
            ArgumentError: As in `MoEKernel.update_expert`.
        """
        kernel = self.training_kernel()
        with kernel.held.in_turn.exclusive():
            # The kernel shares the parameters' own memory.
            kernel.update_expert(expert, weights, write_shared=True)
            if not self._is_freed and not kernel.held.is_borrowed:
                with torch.no_grad():
                    for name, tensor in weights.tensors().items():
                        parameter = self._parameters[name]
                        assert parameter is not None
                        if parameter.dim():
                            parameter[expert].copy_(tensor[0])
                self._seen = self._state()

    def check_and_run(
        self, hidden_states: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Runs a call of compiled code, whose shapes and dtypes were checked.

        Args:
            hidden_states, topk_weights, topk_ids, out: As in `MoEKernel.check_and_run`.
        """
        with torch.no_grad():
            self.training_kernel()(hidden_states, topk_weights, topk_ids, out)

    def training_kernel(self) -> MoEKernel:
        """The kernel that serves the layer's calls: the prepared one, or one that reads the parameters in place."""
        if not self.keep_canonical:
            return self.prepare()
        return self._followed() or self._made(self._selected() if self._is_prepared else None)

    def extra_repr(self) -> str:
        """The problem, the backend and the router, for `repr`."""
        backend = "no kernel yet" if self._kernel is None else str(self._kernel.selection.backend)
        router = "no router" if self.router is None else self.router.kind
        return f"{self.problem}, {router}, {backend}{', canonical weights freed' if self._is_freed else ''}"

    def _flat(self, routes: torch.Tensor, name: str, hidden_states: torch.Tensor) -> torch.Tensor:
        check_instance(name, routes, torch.Tensor, "pass [..., K]")
        if not routes.dim() or routes.shape[-1] != self.problem.top_k:
            raise ArgumentError(f"{name} must be [..., {self.problem.top_k}], got {list(routes.shape)}")
        # [T,K] goes with hidden states of any leading sizes; `check_call` compares T.
        if routes.dim() != 2 and routes.shape[:-1] != hidden_states.shape[:-1]:
            wanted = [*hidden_states.shape[:-1], self.problem.top_k]
            raise ArgumentError(
                f"{name} must be {wanted}, as hidden_states are {list(hidden_states.shape)}, or [T,K], got "
                f"{list(routes.shape)}; a route belongs to the token at its place"
            )
        return routes.reshape(-1, self.problem.top_k).contiguous()


def _held_by(layer: weakref.ref[MoELayer]) -> dict[str, torch.Tensor]:
    """The tensors that a kernel in place reads: the parameters as they are at a call."""
    found = layer()
    if found is None:
        raise ArgumentError(
            "this kernel reads the parameters of a MoELayer, got a call after the layer was freed; keep the layer"
        )
    held = found._in_place
    if found._kernel is None or not found._kernel.held.fits(held):
        raise ArgumentError(
            "this kernel was made for parameters of other sizes, dtypes or places than the layer has now; call "
            "layer.prepare() again"
        )
    return held


def _is_autocast(tensor: torch.Tensor) -> bool:
    # Devices without autocast, such as meta, raise when asked about it.
    kind = tensor.device.type
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
