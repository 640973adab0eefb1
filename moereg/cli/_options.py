"""Options that commands share, and the layer, request and platform that they name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from moereg.cli._output import only_results_on_stdout
from moereg.errors import MoeregError, one_line
from moereg.platforms import PRODUCTS, platform_of_product
from moereg.plugins.loader import find_scheme, list_backends
from moereg.selection.result import Selection
from moereg.spec.activations import ACTIVATIONS, Activation
from moereg.spec.model_shapes import MODEL_SHAPES, get_shape
from moereg.spec.problem import DTYPES, MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES


class UsageError(MoeregError, ValueError):
    """Options that contradict each other or leave something out."""


def _completes(names: Callable[[], Iterable[str]], is_list: bool = False) -> Callable[[str], list[str]]:
    """The shell's tab key for a value out of some names, or for the last of `a,b`. Loads no torch."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if is_list else ("", "", incomplete)
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last.lower())]

    return complete


def _routings() -> Iterable[str]:
    from moereg.tuning.inputs import ROUTINGS

    return ROUTINGS


def _backends() -> Iterable[str]:
    with only_results_on_stdout(False):  # Plugins are imported.
        return list_backends()


_models, _dtypes, _activations = (_completes(names.__iter__) for names in (MODEL_SHAPES, DTYPES, ACTIVATIONS))
# Schemes of plugins are left out, since they would have to be imported.
scheme_names, scheme_list = _completes(lambda: QUANT_SCHEMES), _completes(lambda: QUANT_SCHEMES, is_list=True)
platform_names: Final = _completes(lambda: ("cpu", *dict.fromkeys(PRODUCTS.values()), *PRODUCTS))
routing_names: Final = _completes(_routings)
backend_names, backend_list = _completes(_backends), _completes(_backends, is_list=True)

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
SeedOption = Annotated[int, typer.Option(min=0, max=2**63 - 2, help="Of weights, hidden states and routing.")]
JobsOption = Annotated[int | None, typer.Option(min=1, help="Compilers at once; as memory allows if left out.")]
PlatformOption = Annotated[
    str | None,
    typer.Option(
        help="A platform such as cuda:sm90 or h100; this machine's if left out.", autocompletion=platform_names
    ),
]
PreferOption = Annotated[
    list[str] | None, typer.Option(help="Use these backends first where they fit.", autocompletion=backend_list)
]
DenyOption = Annotated[list[str] | None, typer.Option(help="Use none of these backends.", autocompletion=backend_list)]


@dataclasses.dataclass(frozen=True)
class ProblemFlags:
    """The options that describe a layer and a request; None if not given."""

    model: Annotated[
        str | None, typer.Option(help="A known model's layer, e.g. qwen3-30b-a3b.", autocompletion=_models)
    ] = None
    experts: Annotated[int | None, typer.Option(help="Experts of the layer.")] = None
    hidden: Annotated[int | None, typer.Option(help="Hidden size.")] = None
    intermediate: Annotated[int | None, typer.Option(help="Intermediate size of one expert.")] = None
    top_k: Annotated[int | None, typer.Option(help="Experts a token.")] = None
    quant: Annotated[
        str | None, typer.Option(help="Scheme of the checkpoint's weights.", autocompletion=scheme_names)
    ] = None
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.", autocompletion=_dtypes)] = None
    activation: Annotated[
        str | None,
        typer.Option(help="silu, gelu, gelu_tanh, swigluoai or relu2.", autocompletion=_activations),
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
    prefer: PreferOption = None
    deny: DenyOption = None

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
        """One line for each option that may mean something else than expected."""
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


@dataclasses.dataclass(frozen=True)
class Subject:
    """A layer and what to call it.

    Attributes:
        name: The model's or checkpoint's name; None where only sizes were given.
        problem: The layer; of a checkpoint, as its headers say.
        checkpoint: Its directory, where the layer is one of a checkpoint.
        layer: The index there.
        notices: What a user may not expect of the options, one line each.
    """

    name: str | None
    problem: MoEProblem
    checkpoint: Path | None = None
    layer: int | None = None
    notices: tuple[str, ...] = ()

    def noted(self, selection: Selection) -> Selection:
        """The selection with these notices first, so that tables and JSON have them."""
        return dataclasses.replace(selection, notices=(*self.notices, *selection.notices))


def find_subject(flags: ProblemFlags, checkpoint: Path | None, layer: int | None) -> Subject:
    """The layer that options name. Of a checkpoint, no more than headers are read.

    Args:
        flags: The problem; with a checkpoint, what it leaves open.
        checkpoint: What `--checkpoint` says.
        layer: What `--layer` says; the first layer with experts where None.

    Raises:
        MoeregError: Options are missing or contradict each other, or the checkpoint cannot be read.
    """
    if checkpoint is None:
        if layer is not None:
            raise UsageError("--layer needs --checkpoint, whose layer it is")
        return Subject(flags.model, flags.problem(), notices=flags.notices())
    from moereg.checkpoints import read_problem

    flags.check_no_checkpoint_facts()
    with usage_errors():
        layer = first_layer(checkpoint) if layer is None else layer
        problem = read_problem(checkpoint, layer, **flags.wishes())
    name = f"{one_line(checkpoint.resolve().name)}, layer {layer}"
    return Subject(name, problem, checkpoint, layer, flags.notices())


def first_layer(checkpoint: Path) -> int:
    """The first layer of a checkpoint with experts.

    Raises:
        UsageError: None has.
    """
    from moereg.checkpoints import moe_layers

    with_experts = moe_layers(checkpoint)
    if not with_experts:
        raise UsageError(f"no layer of {str(checkpoint)!r} has experts; give a Mixture-of-Experts checkpoint")
    return with_experts[0]
