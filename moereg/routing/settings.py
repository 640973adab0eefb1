"""Settings of routers in a `config.json`: their names, and the refusal of those that a router would ignore."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from moereg.routing.config_entries import read_choice

__all__ = [
    "GROUPS",
    "NEUTRAL",
    "RARE",
    "RENORMALIZE",
    "SCALINGS",
    "require_choice",
    "require_neutral",
    "require_nothing_else",
    "require_scoring",
]

# Publishers' names of the function that makes scores of logits.
_SCORING: Final = (
    "scoring_func",
    "score_func",
    "score_function",
    "moe_router_activation_func",
    "moe_router_activation",
)
# Of whether chosen weights are divided by their sum.
RENORMALIZE: Final = ("norm_topk_prob", "moe_renormalize", "route_norm")
GROUPS: Final = ("n_group", "num_expert_group", "num_expert_groups", "topk_group", "num_limited_groups")
SCALINGS: Final = (
    "routed_scaling_factor",
    "moe_routed_scaling_factor",
    "moe_router_scaling_factor",
    "router_scaling_factor",
    "route_scale",
)
RARE: Final = ("moe_apply_router_weight_on_input", "moe_router_logit_softcapping", "zero_expert_num")
"""Settings of one family."""
# Settings of some routers, with the values that change nothing where a model type does not read them: some publishers
# write them for a router that has none.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(GROUPS, (1, 0, False)),
    **dict.fromkeys(SCALINGS, (1.0, 1, False)),
    "moe_apply_router_weight_on_input": (False,),
    "moe_router_logit_softcapping": (0.0, 0),
    "zero_expert_num": (0,),
}


def require_choice(config: Mapping[str, Any], name: str, choices: tuple[Any, ...], default: Any) -> Any:
    """Reads an optional entry and refuses values whose meaning is not defined for the model type.

    Args:
        config: The parsed file.
        name: Name of the entry.
        choices: Accepted.
        default: Meant where it is absent or null.

    Raises:
        CheckpointError: The entry has another value.
    """
    return read_choice(
        config, name, choices, default, cure="build the RouterSpec by hand if the model really routes so"
    )


def require_scoring(config: Mapping[str, Any], *choices: str) -> None:
    """Refuses other functions that make scores of logits, by every name that publishers have for the entry.

    Raises:
        CheckpointError: The file says another.
    """
    for name in _SCORING:
        require_choice(config, name, choices, choices[0])


def require_nothing_else(
    config: Mapping[str, Any],
    *,
    scoring: str | None = None,
    method: str = "greedy",
    renormalizes: bool | None = None,
    reads: Collection[str] = (),
) -> None:
    """Refuses settings of other model types' routers, but for values that say what this one does anyway.

    Args:
        config: The parsed file.
        scoring: Publishers' name of the scores; None where the reader looks at it.
        method: Publishers' name of the choice.
        renormalizes: Whether chosen weights are divided by their sum; None where the reader looks at it.
        reads: Entries that the reader looks at.

    Raises:
        CheckpointError: An entry says what this router does not do.
    """
    if scoring is not None:
        require_scoring(config, scoring)
        require_choice(config, "expert_selection_fn", (scoring,), scoring)
    require_choice(config, "topk_method", (method,), method)
    if renormalizes is not None:
        for name in RENORMALIZE:
            require_choice(config, name, (renormalizes,), renormalizes)
    require_neutral(config, *(name for name in NEUTRAL if name not in reads))


def require_neutral(config: Mapping[str, Any], *names: str) -> None:
    """Refuses settings that change something.

    Args:
        config: The parsed file.
        *names: Some of `NEUTRAL`.

    Raises:
        CheckpointError: One does.
    """
    for name in names:
        require_choice(config, name, NEUTRAL[name], NEUTRAL[name][0])
