"""Options that commands share, and the problem, request and platform that they make."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from moereg.activations import Activation
from moereg.cli._completion import (
    activation_names,
    backend_list,
    dtype_names,
    model_names,
    platform_names,
    scheme_names,
)
from moereg.discovery import find_scheme
from moereg.errors import MoeregError
from moereg.platforms import platform_of_product
from moereg.problem import MoEProblem
from moereg.shapes import get_shape

__all__ = [
    "CheckpointOption",
    "EpOption",
    "JsonFlag",
    "LayerOption",
    "PlatformOption",
    "ProblemFlags",
    "UsageError",
    "VerboseFlag",
    "WayOption",
    "takes_problem_flags",
    "usage_errors",
]


class UsageError(MoeregError, ValueError):
    """Options that contradict each other or leave something out."""


JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
VerboseFlag = Annotated[bool, typer.Option("--verbose", "-v", help="Log to standard error.")]
CheckpointOption = Annotated[
    Path | None, typer.Option(help="A layer of this checkpoint directory instead of a model's or of sizes.")
]
LayerOption = Annotated[int | None, typer.Option(help="Of the checkpoint; the first with experts if left out.")]
EpOption = Annotated[
    int | None,
    typer.Option("--ep", min=1, help="Experts over so many ranks: processes here, or those of torchrun."),
]
WayOption = Annotated[
    str | None,
    typer.Option(help="With --ep: ways of moving tokens, such as all_to_all,all_gather; all that fit if left out."),
]
PlatformOption = Annotated[
    str | None,
    typer.Option(
        help="A platform such as cuda:sm90 or h100; this machine's if left out.", autocompletion=platform_names
    ),
]


@dataclasses.dataclass(frozen=True)
class ProblemFlags:
    """The options that describe a layer and a request; None if not given."""

    model: Annotated[
        str | None, typer.Option(help="A known model's layer, e.g. qwen3-30b-a3b.", autocompletion=model_names)
    ] = None
    experts: Annotated[int | None, typer.Option(help="Experts of the layer.")] = None
    hidden: Annotated[int | None, typer.Option(help="Hidden size.")] = None
    intermediate: Annotated[int | None, typer.Option(help="Intermediate size of one expert.")] = None
    top_k: Annotated[int | None, typer.Option(help="Experts a token.")] = None
    quant: Annotated[
        str | None, typer.Option(help="Scheme of the checkpoint's weights.", autocompletion=scheme_names)
    ] = None
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.", autocompletion=dtype_names)] = None
    activation: Annotated[
        str | None,
        typer.Option(help="silu, gelu, gelu_tanh, swigluoai or relu2.", autocompletion=activation_names),
    ] = None
    swiglu_limit: Annotated[float | None, typer.Option(help="Clamp of gate and up.")] = None
    bias: Annotated[bool | None, typer.Option("--bias/--no-bias", help="Both matmuls have a bias.")] = None
    activation_format: Annotated[str | None, typer.Option(help="standard or batched.")] = None
    num_local_experts: Annotated[int | None, typer.Option(help="Experts on one rank, fewer than the layer's.")] = None
    router_weight_on_input: Annotated[
        bool | None,
        typer.Option(
            "--router-weight-on-input/--no-router-weight-on-input",
            help="The routing weight scales the expert's input.",
        ),
    ] = None
    graph_capture: Annotated[bool, typer.Option("--graph-capture", help="Has to run in a CUDA graph.")] = False
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Has to give the same bits each time.")] = False
    exact_activations: Annotated[
        bool, typer.Option("--exact-activations", help="Activations quantized as the scheme says.")
    ] = False
    tokens: Annotated[int | None, typer.Option(min=0, help="Tokens of one call.")] = None
    platform: PlatformOption = None
    require: Annotated[
        list[str] | None,
        typer.Option(
            help="Use one of these backends, tried in this order, or fail: a,b or scheme=a or a_*.",
            autocompletion=backend_list,
        ),
    ] = None
    prefer: Annotated[
        list[str] | None,
        typer.Option(help="Use these backends first where they fit.", autocompletion=backend_list),
    ] = None
    deny: Annotated[list[str] | None, typer.Option(help="Use none of these backends.", autocompletion=backend_list)] = (
        None
    )

    def problem(self) -> MoEProblem:
        """The layer that `--model` or the sizes describe; explicit options override the model's values.

        Raises:
            UsageError: Sizes are missing or contradict each other.
            UnknownNameError: A model, scheme, dtype, activation or format is not known.
        """
        keywords = get_shape(self.model).problem_keywords() if self.model is not None else {}
        keywords.update(self._given(_SIZES), **self._given(_FACTS))
        if self.quant is not None:
            keywords["quant"] = find_scheme(self.quant)  # A plugin may bring its own.
        if missing := [_flag(field) for field, keyword in _SIZES.items() if keyword not in keywords]:
            raise UsageError(
                f"say which layer: --model NAME, or all of {', '.join(map(_flag, _SIZES))} "
                f"(missing: {', '.join(missing)}), or --checkpoint DIR; moereg models lists names"
            )
        with usage_errors():
            if self.activation is not None or self.swiglu_limit is not None:
                name = self.activation or keywords.get("activation", "silu")
                keywords["activation"] = Activation.from_name(name, self.swiglu_limit)
            return MoEProblem(**keywords, **self.wishes())

    def wishes(self) -> dict[str, Any]:
        """Keywords of `MoEProblem` that no model or checkpoint decides, where given.

        `--tokens` is the largest call that the layer will see, so that what cannot run a call of that size is rejected
        instead of failing, and `explain --tokens N` answers for the very problem that `run --tokens N` builds. A call
        without tokens bounds nothing.
        """
        values = self._given(_WISHES)
        values.update({field: True for field in _DEMANDS if getattr(self, field)})
        return {**values, "max_num_tokens": self.tokens} if self.tokens else values

    def notices(self) -> tuple[str, ...]:
        """One line for each option whose meaning may surprise."""
        notices = []
        if self.platform is not None and (product := platform_of_product(self.platform)) is not None:
            notices.append(f"--platform {self.platform} is {product}")
        if self.model is not None and self.quant is None:
            released = get_shape(self.model).released_quant
            if released != "unquantized":
                notices.append(
                    f"{self.model} is released in {released}, and --model alone means 16-bit weights; "
                    f"add --quant {released} for the released ones"
                )
        return tuple(notices)

    def request(self) -> dict[str, str]:
        """Keywords of `select_backend`; a repeated option adds to its list."""
        return {word: ",".join(names) for word in ("require", "prefer", "deny") if (names := getattr(self, word))}

    def check_no_checkpoint_facts(self, option: str = "--checkpoint") -> None:
        """Rejects flags that the checkpoint decides.

        Args:
            option: Which names it.

        Raises:
            UsageError: An option could contradict the checkpoint.
        """
        for field in ("model", *_SIZES, *_FACTS, "activation", "swiglu_limit"):
            if getattr(self, field) is not None:
                raise UsageError(f"{_flag(field)} cannot be combined with {option}, which decides it; leave one out")

    def _given(self, keywords: Mapping[str, str]) -> dict[str, Any]:
        values = {keyword: getattr(self, field) for field, keyword in keywords.items()}
        return {keyword: value for keyword, value in values.items() if value is not None}


# Fields of ProblemFlags to keywords of MoEProblem.
_SIZES: Final = {
    "experts": "num_experts",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "top_k": "top_k",
}
_FACTS: Final = {
    "quant": "quant",
    "bias": "has_bias",
    "router_weight_on_input": "apply_router_weight_on_input",
}
_WISHES: Final = {name: name for name in ("dtype", "activation_format", "num_local_experts")}
_DEMANDS: Final = ("graph_capture", "deterministic", "exact_activations")


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns a ValueError about a value that the user gave into a UsageError."""
    try:
        yield
    except MoeregError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error


def takes_problem_flags(command: Callable[..., int]) -> Callable[..., int]:
    """Gives a command the options of `ProblemFlags`, which arrive as one value, its first parameter `flags`.

    typer reads options from a signature; this one is the fields followed by the command's own parameters. An option of
    the command's own takes the place of a shared one of that name.
    """
    hints = get_type_hints(ProblemFlags, include_extras=True)
    own = inspect.signature(command, eval_str=True).parameters
    keyword_only = inspect.Parameter.KEYWORD_ONLY
    shared = [
        inspect.Parameter(field.name, keyword_only, default=field.default, annotation=hints[field.name])
        for field in dataclasses.fields(ProblemFlags)
        if field.name not in own
    ]
    others = [parameter.replace(kind=keyword_only) for name, parameter in own.items() if name != "flags"]

    @functools.wraps(command)
    def run(**values: Any) -> int:
        flags = ProblemFlags(**{parameter.name: values.pop(parameter.name) for parameter in shared})
        return command(flags, **values)

    parameters = [*shared, *others]
    run.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
