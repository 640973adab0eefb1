"""Each worker of a vLLM engine imports this for `benches.h200.serving`: random weights, and comparisons with fp32.

Importing it patches vLLM, since a worker offers nothing else that runs before its model is loaded.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

from vllm.model_executor.model_loader import dummy_loader

from benches.h200.engines import Compared, fill
from benches.h200.serving import SETTINGS


def served(model: Any) -> dict[str, Any]:
    """The kernel of the first layer of experts."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or not hasattr(method, "get_fused_moe_quant_config"):
            continue
        ours, kernel = getattr(method, "moereg", None), getattr(method, "moe_kernel", None)
        backend = next((str(value) for key, value in vars(method).items() if key.endswith("backend")), None)
        experts = type(getattr(kernel, "fused_experts", None)).__name__
        return {
            "layer": name,
            "method": type(method).__name__,
            "vllm_backend": backend,
            "experts": experts,
            "moereg": ours and ours.selection.backend,
        }
    return {}


class Rank:
    """Methods that a worker gets: `LLM(worker_extension_cls=...)`."""

    def bench_served(self) -> dict[str, Any]:
        """The kernel of the first layer of experts."""
        return served(self.get_model())  # type: ignore[attr-defined]

    def bench_compared(self) -> dict[str, Any] | None:
        """Errors of the calls that were compared."""
        return _COMPARED and _COMPARED.found()


_GIVEN: Final = json.loads(os.environ[SETTINGS])
_COMPARED: Compared | None = None
if _GIVEN["compare"]:
    from vllm_moereg import hook

    _COMPARED = Compared(hook, lambda x, topk_weights, topk_ids, *_, **__: (x, topk_weights, topk_ids))


def _load_weights(self: Any, model: Any, model_config: Any) -> None:
    fill(model, _GIVEN["config"], _GIVEN["shards"], _GIVEN["zero_experts"])


dummy_loader.DummyModelLoader.load_weights = _load_weights
