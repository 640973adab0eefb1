"""Checks of what every router has: how many experts a token takes, and out of how many groups."""

from __future__ import annotations

from moereg.arguments import check_count

__all__ = ["check_group_score", "check_groups", "check_top_k", "check_two_experts"]


def check_top_k(num_experts: int, top_k: int) -> None:
    """Checks that a token can take that many experts.

    Raises:
        ArgumentError: `top_k` is not an integer.
        ValueError: `top_k` is not in 1..num_experts.
    """
    check_count("top_k", top_k, minimum=0)
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"top_k must be in 1..num_experts, got top_k={top_k} with {num_experts} experts; lower top_k, or check "
            "that num_experts is the global count"
        )


def check_groups(num_experts: int, top_k: int, num_groups: int, topk_groups: int) -> None:
    """Checks that experts divide into groups, and that the chosen groups hold enough of them.

    Raises:
        ArgumentError: A count is not an integer.
        ValueError: The counts do not fit together.
    """
    check_count("num_groups", num_groups, minimum=0)
    check_count("topk_groups", topk_groups, minimum=0)
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(
            f"num_experts must be divisible by num_groups, got {num_experts} experts in {num_groups} groups; "
            "use the model's n_group, or 1 for no groups"
        )
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(
            f"topk_groups must be in 1..num_groups, got topk_groups={topk_groups} of {num_groups}; "
            "use the model's topk_group"
        )
    reachable = topk_groups * (num_experts // num_groups)
    if top_k > reachable:
        raise ValueError(
            f"top_k must not exceed the experts of the chosen groups, got top_k={top_k} with {reachable} experts in "
            f"{topk_groups} of {num_groups} groups; raise topk_groups or lower top_k"
        )


def check_group_score(num_experts: int, num_groups: int, scored_experts: int) -> None:
    """Checks that a group has the experts that make its score.

    Raises:
        ValueError: It has fewer.
    """
    if num_experts // num_groups < scored_experts:
        count = "two best experts" if scored_experts == 2 else f"{scored_experts} best experts"
        raise ValueError(
            f"a group's score is the sum of its {count}, got {num_experts} experts in {num_groups} groups; "
            f"use num_groups <= num_experts / {scored_experts}, or 1 for no groups"
        )


def check_two_experts(top_k: int) -> None:
    """Checks what `sparsemixer` needs.

    Raises:
        ValueError: `top_k` is not 2.
    """
    if top_k != 2:
        raise ValueError(f"sparsemixer chooses two experts, got top_k={top_k}; use top_k=2")
