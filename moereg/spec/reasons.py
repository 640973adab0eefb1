"""Reasons why a cell cannot serve a problem: a closed set of codes with cures, and a clause."""

from __future__ import annotations

import dataclasses
from typing import Final

from moereg.errors import UnknownNameError, unknown_name_message
from moereg.runtime.json_types import Text

CURES: Final[dict[str, str]] = {
    "platform": "run on one of those platforms",
    "package": "install that package",
    "probe": "provide what the probe looks for",
    "denied": "take it out of deny",
    "not_required": "add it to require",
    "opt_in": "name it in require or prefer",
    "quarantined": "repair or update it, or lift that with moereg verify NAME --unquarantine",
    "quant_scheme": "use a checkpoint of that scheme",
    "activation": "use that activation, if the model allows",
    "swiglu_limit": "there is no cure but another backend",
    "bias": "there is no cure but another backend",
    "dtype": "load the layer in one of those dtypes",
    "activation_format": "use that activation format",
    "placement": "place experts that way",
    "router_weight_on_input": "there is no cure but another backend",
    "alignment": "pad the weights to that multiple",
    "group": "use a group of that kind and size",
    "size": "split the layer over more ranks or the call over more calls",
    "graph_capture": "run without graph capture",
    "deterministic": "ask without deterministic",
    "batch_invariant": "ask without batch_invariant",
    "gradients": "leave those tensors out of gradients, or train with another backend",
    "layout": "prepare the layer, which repacks its weights",
    "precision": "ask without exact_activations",
    "backend": "change that fact of the problem",
    "predicate_error": "report the bug to that backend's authors",
}
"""The cure for every code, in an error's words."""

REASON_CODES: Final = tuple(CURES)


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a cell cannot serve a problem: a closed code and a lowercase clause, rule then fact."""

    code: Text
    text: Text

    def __post_init__(self) -> None:
        if self.code not in REASON_CODES:
            raise UnknownNameError(unknown_name_message("code", self.code, REASON_CODES))
