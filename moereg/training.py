"""Says after a backward pass what trains in a model, in anybody's modules."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

import torch

from moereg.arguments import check_instance
from moereg.errors import index_ranges

__all__ = ["TrainingReport", "report"]

_PEFT: Final = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])\.(?P<adapter>[^.]+)\.weight")
_OWN: Final = re.compile(r"(?P<module>.*?)\.?(w13|w2)_[ab]")
_OF_EXPERTS: Final = re.compile(r"(?P<module>.*?)\.?(gate_up_proj|up_proj|down_proj|w13|w2|w13_[ab]|w2_[ab])")
"""Names of parameters: factors of PEFT's adapters, those of a `MoELayer`'s, and what has a row for each expert."""


@dataclasses.dataclass(frozen=True)
class TrainingReport:
    """Result of `report`.

    Attributes:
        parameters: By name: `frozen`, or the gradient of one that requires it: `none`, only `zeros`, or a `gradient`.
        inert: Adapters with no gradient in either factor, as `module: name`.
        unreached: Experts whose gradients are all zero, since no token reached them, by module; only where there are.
            Parameters that got no gradient say nothing of experts.
    """

    parameters: Mapping[str, Literal["frozen", "none", "zeros", "gradient"]]
    inert: tuple[str, ...]
    unreached: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        """A line of counts, one for each inert adapter, and one for each module with experts that no token reached."""
        states = list(self.parameters.values())
        lines = [
            f"{len(states) - states.count('frozen')} of {len(states)} parameters require gradients: "
            f"{states.count('gradient')} got one, {states.count('zeros')} got zeros, {states.count('none')} got none"
        ]
        lines += [f"inert adapter: {each}" for each in self.inert]
        for module, experts in self.unreached.items():
            lines.append(f"no token reached experts {', '.join(index_ranges(experts))} of {module}")
        return "\n".join(lines)


@torch.no_grad()
def report(model: torch.nn.Module) -> TrainingReport:
    """Reads the gradients of a model's parameters, after a backward pass and before they are cleared.

    An adapter that got none, or zeros in both factors, does not train: it is not active, or what runs does not use it.
    In a first step zeros in one factor are right, since the other one is zero.

    Args:
        model: Any module; experts are found by the names that transformers, PEFT and `MoELayer` give their parameters.

    Returns:
        What requires gradients and got them; `print` shows it.
    """
    check_instance("model", model, torch.nn.Module, "pass the module that you train")
    states: dict[str, Any] = {}
    adapters: dict[str, bool] = {}
    reached: dict[str, torch.Tensor] = {}
    wrappers = {name: each for name, each in model.named_modules() if type(each).__name__ == "ParamWrapper"}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if not parameter.requires_grad:
            states[name] = "frozen"
            continue
        has_some = gradient is not None and bool(gradient.count_nonzero())
        states[name] = "none" if gradient is None else "gradient" if has_some else "zeros"
        factor = _PEFT.fullmatch(name)
        wrapper: Any = None if factor is None else wrappers.get(factor["module"])
        adapter = None
        if factor is not None:
            target = _unwrapped(factor["module"]) + ("" if wrapper is None else f".{wrapper.parameter_name}")
            adapter = f"{target}: {factor['adapter']}"
        elif own := _OWN.fullmatch(name):
            adapter = own["module"] or "the model"
        if adapter is not None:
            adapters[adapter] = adapters.get(adapter, False) or has_some
        if gradient is None:
            continue  # It took no part in the backward pass, whichever experts tokens reached.
        if wrapper is not None and factor is not None and wrapper.num_experts > 1:
            # Experts are the slowest rows of factor A, and the fastest columns of factor B.
            count, of_a = wrapper.num_experts, factor["factor"] == "A"
            module, rows = factor["module"], gradient.reshape(count, -1) if of_a else gradient.reshape(-1, count).T
        elif parameter.dim() == 3 and (of_experts := _OF_EXPERTS.fullmatch(name)):
            module, rows = of_experts["module"], gradient.flatten(1)
        else:
            continue
        module, experts = _unwrapped(module) or "the model", rows.count_nonzero(1) > 0
        reached[module] = reached[module] | experts if module in reached else experts
    missed = {module: tuple(torch.nonzero(~experts).flatten().tolist()) for module, experts in reached.items()}
    inert = tuple(adapter for adapter, trains in adapters.items() if not trains)
    return TrainingReport(states, inert, {module: experts for module, experts in missed.items() if experts})


def _unwrapped(module: str) -> str:
    """A module's name without PEFT's wrappers, which may nest."""
    return module.replace(".base_layer", "")
