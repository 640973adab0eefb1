"""Lets transformers' own code run experts that are trained, or to whose output a backward pass may come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.nn.utils import parametrize

from moereg.errors import described, is_lack_of_memory
from moereg.integrations._experts.adapters import factors_of
from moereg.integrations._experts.serving import ServedExperts
from moereg.layer.in_place import say_once
from moereg.layer.train_op import wants_gradient


def follows(module: torch.nn.Module, inputs: Iterable[Any]) -> bool:
    """Whether autograd follows a call of a module, by its inputs or weights."""
    # Grad mode first: reading weights that another adapter than LoRA computes takes a while.
    return torch.is_grad_enabled() and wants_gradient(
        *(each for each in inputs if isinstance(each, torch.Tensor)), *weights_of(module)
    )


def own_output(
    module: torch.nn.Module,
    found: ServedExperts | None,
    is_followed: bool,
    reason: str,
    ways: Mapping[str, Callable[[], Any]],
    is_trained: bool = True,
) -> Any | None:
    """Output of a module's own code, on its own weights, where moereg does not train it or would have to copy them.

    `module` may be the block around the experts whose forward is patched, `reason` is a clause, and the first of `ways`
    that does not raise counts. Where not `is_trained`, moereg reads no such weights in place. None means that moereg is
    to infer: the module's own code has no backward either.
    """
    if found is not None:
        found.forget()  # Training may write weights in a way that torch does not count.
    kind = parametrize.type_before_parametrizations(module).__name__
    name, out, reasons = first_that_runs(ways, is_followed)
    if name and is_trained:
        say(
            f"moereg does not train {kind} ({reason}), which runs transformers' own {name} in train() "
            f"and where inputs or weights require a gradient{reasons}"
        )
    elif name:
        say(
            f"moereg copies no weights unasked, and {kind} ({reason}) runs transformers' own {name}; "
            f"moereg.integrations.transformers.prepare(model) repacks them for moereg's kernels{reasons}"
        )
    elif is_trained:
        say(f"moereg does not train {kind} ({reason}), so a backward pass to it will raise{reasons}")
    return out


def first_that_runs(ways: Mapping[str, Callable[[], Any]], is_followed: bool) -> tuple[str, Any, str]:
    """Name and output of the first way that does not raise, or "" and None, and why those before it do not do."""
    reasons = ""
    for name, way in ways.items():
        try:
            out = way()
        except _CANNOT as error:
            if is_lack_of_memory(error):
                raise
            reasons += f"; {name} raised {described(error)}"
            continue
        if is_followed and not (out[0] if isinstance(out, tuple) else out).requires_grad:
            reasons += f"; {name} has no backward"
            continue
        return name, out, reasons
    return "", None, reasons


_CANNOT: Final = (RuntimeError, ValueError, TypeError, ImportError, OSError, NameError, AttributeError)
"""Errors of code that does not run such a layer here. Not every one: checkpointing ends a recomputation by raising."""


def weights_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters of a module, with the factors of their adapters, or what other adapters make of them."""
    yield from module.parameters()
    for each in module.modules():
        if parametrize.is_parametrized(each):
            for name in each.parametrizations:  # type: ignore[union-attr]
                factors = factors_of(each, name)
                yield from (getattr(each, name),) if factors is None else (factors.left, factors.right)


# Compiled code says it while it is compiled: Dynamo makes no graph of logging.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def say(text: str) -> None:
    """Warns once in a process."""
    say_once(text)
