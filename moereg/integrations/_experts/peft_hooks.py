"""Changes what PEFT does to experts that moereg runs, in the versions of PEFT whose code is known."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any, Final

import torch

from moereg.errors import ArgumentError, shown
from moereg.integrations._experts.adapters import KNOWN, skip_check
from moereg.integrations._experts.packed import PackedExperts
from moereg.integrations._experts.serving import NAMES, served

_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


def follow_peft() -> None:
    """Lets PEFT, if it is imported, hand over the factors of several active adapters, and not miss quantized experts.

    Else it sums products of factors, of the size of the experts, and warns where it adds no adapter.
    """
    if getattr(sys.modules.get("peft"), "__version__", "") not in KNOWN:
        return
    from peft.tuners.lora import layer
    from peft.tuners.tuners_utils import BaseTuner

    tuner: Any = BaseTuner
    wrapper: Any = layer.ParamWrapper
    if hasattr(tuner._inject_parameters, "_is_moereg"):
        return
    skip_check(layer._LoraFactorsProxy)
    inject, activate, factors = tuner._inject_parameters, wrapper._activate_lora, wrapper.get_delta_factors

    @functools.wraps(inject)
    def _inject_parameters(self: Any, peft_config: Any, model: torch.nn.Module, *others: Any, **named: Any) -> Any:
        matched = inject(self, peft_config, model, *others, **named)
        if not matched:
            _check_unmatched(model, peft_config.target_parameters)
        return matched

    @functools.wraps(activate)
    @contextlib.contextmanager
    def _activate_lora(self: Any, active_adapters: list[str]) -> Iterator[None]:
        several = [each for each in active_adapters if each in self.lora_A]
        config = getattr(self.get_base_layer(), "config", None)
        if (
            len(several) > 1
            and self.num_experts > 1
            and self.get_param().dtype in _FLOATS
            and getattr(config, "_experts_implementation", None) in NAMES
        ):
            self._moereg_several, active_adapters = several, several[:1]
        with activate(self, active_adapters):
            yield

    @functools.wraps(factors)
    def get_delta_factors(self: Any, adapter_name: str) -> tuple[torch.Tensor, torch.Tensor, float]:
        parts = [factors(self, each) for each in vars(self).pop("_moereg_several", (adapter_name,))]
        scaling = parts[0][2] if len({part[2] for part in parts}) == 1 else 1.0
        left = torch.cat([part[0] if part[2] == scaling else part[0] * part[2] for part in parts], dim=-1)
        return left, torch.cat([part[1] for part in parts], dim=-2), scaling

    _inject_parameters._is_moereg = True  # type: ignore[attr-defined]
    tuner._inject_parameters = _inject_parameters
    wrapper._activate_lora, wrapper.get_delta_factors = _activate_lora, get_delta_factors


def _check_unmatched(model: torch.nn.Module, targets: Any) -> None:
    """Raises for experts of ours that PEFT does not find by any of these names."""
    names: dict[str, None] = {}
    for module in model.modules():
        if (known := served(module)) is not None and known.released:
            raise ArgumentError(
                f"target_parameters must name parameters, got {shown(sorted(targets))}, and prepare(model, free=True) "
                "freed those of the experts; call moereg.integrations.transformers.restore(model) first"
            )
        names |= dict.fromkeys(name for name, each in module._parameters.items() if isinstance(each, PackedExperts))
    if names:
        raise ArgumentError(
            f"target_parameters must name parameters of the model, got {shown(sorted(targets))}; for its experts write "
            f"target_parameters={list(names)}"
        )
