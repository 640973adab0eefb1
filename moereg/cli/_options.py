"""Options that commands share, and the layer, request and platform that they describe."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from moereg.cli._output import OK, only_results_on_stdout, print_json
from moereg.errors import ArgumentError, MoeregError, one_line, shown
from moereg.platforms import PRODUCTS, platform_of_product
from moereg.plugins.loader import find_scheme, list_backends
from moereg.plugins.modules import import_modules, is_file_name, registers
from moereg.prepare_finalize.cells import MOVEMENTS
from moereg.registry import REGISTRY
from moereg.selection.result import Selection
from moereg.spec.activations import ACTIVATIONS, Activation
from moereg.spec.model_shapes import MODEL_SHAPES, get_shape
from moereg.spec.problem import DTYPES, MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES


class UsageError(MoeregError, ValueError):
    """Options contradict each other or are incomplete."""


def _completes(names: Callable[[], Iterable[str]], is_list: bool = False) -> Callable[[str], list[str]]:
    """Makes the tab completion of one of some names, or of the last one in `a,b`. Loads no torch."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if is_list else ("", "", incomplete)
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last.lower())]

    return complete


def _backends() -> Iterable[str]:
    with only_results_on_stdout(False):  # This imports plugins.
        return list_backends()


def option(text: str, complete: Callable[[str], list[str]] | None = None, **bounds: Any) -> Any:
    """Declares an option's help, tab completions and bounds."""
    return typer.Option(help=text, autocompletion=complete, **bounds)


# Without plugins' schemes, which would have to be imported.
scheme_of = functools.partial(option, complete=_completes(lambda: QUANT_SCHEMES))
schemes_of = functools.partial(option, complete=_completes(lambda: QUANT_SCHEMES, is_list=True))
platform_of = functools.partial(
    option, complete=_completes(lambda: ("cpu", *dict.fromkeys(PRODUCTS.values()), *PRODUCTS))
)
backends_of = functools.partial(option, complete=_completes(_backends, is_list=True))
seed_of = functools.partial(option, min=0, max=2**63 - 2)


def argument(text: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    """Like `option`, for a positional argument."""
    return typer.Argument(help=text, autocompletion=complete)


backend_name = functools.partial(argument, complete=_completes(_backends))


def _routings() -> Iterable[str]:
    from moereg.tuning.inputs import ROUTINGS

    return ROUTINGS


_SHARED: Final[dict[str, Any]] = {
    "model": option("A known model's layer, e.g. qwen3-30b-a3b.", _completes(lambda: MODEL_SHAPES)),
    "experts": "Experts of the layer.",
    "hidden": "Hidden size.",
    "intermediate": "Intermediate size of one expert.",
    "top_k": "Experts a token.",
    "quant": scheme_of("Scheme of the checkpoint's weights."),
    "dtype": option("bfloat16, float16 or float32.", _completes(lambda: DTYPES)),
    "activation": option("silu, gelu, gelu_tanh, swigluoai or relu2.", _completes(lambda: ACTIVATIONS)),
    "swiglu_limit": "Clamp of gate and up.",
    "bias": "Both matmuls have a bias.",
    "activation_format": "standard or batched.",
    "num_local_experts": "Experts on one rank, fewer than the layer's.",
    "router_weight_on_input": "The routing weight scales the expert's input.",
    "graph_capture": "Has to run in a CUDA graph.",
    "deterministic": "Has to give the same bits each time.",
    "exact_activations": "Activations quantized as the scheme says.",
    "tokens": option("Tokens of one call.", min=0),
    "platform": platform_of("A platform such as cuda:sm90 or h100; this machine's if left out."),
    "require": backends_of("Use one of these backends, tried in this order, or fail: a,b or scheme=a or a_*."),
    "prefer": backends_of("Use these backends first where they fit."),
    "deny": backends_of("Use none of these backends."),
    "checkpoint": "A layer of this checkpoint, a directory or a name in the Hub's cache, not of a model or sizes.",
    "layer": "Of the checkpoint; the first with experts if left out.",
    "ep": option("Experts over so many ranks: processes here, or those of torchrun.", min=1),
    "way": "With --ep: ways of moving tokens, such as all_to_all,all_gather; all that fit if left out.",
    "routing": option("uniform, zipf (popularity 1 / rank) or one_set (all to one set).", _completes(_routings)),
    "seed": seed_of("Of weights, hidden states and routing."),
    "jobs": option("Compilers at once; as memory allows if left out.", min=1),
    "file": argument("Files that register backends, e.g. ./my_kernel.py; each is imported alone."),
    "module": "Import this module or file too, which registers backends, e.g. my_package.backend.",
    "json": "Print one JSON object instead of a table.",
    "verbose": "Log to standard error, and show every reason of each backend.",
}
"""Default options by parameter name."""


@dataclasses.dataclass(frozen=True)
class ProblemFlags:
    """The options that describe a layer and a request; None if not given."""

    model: str | None = None
    experts: int | None = None
    hidden: int | None = None
    intermediate: int | None = None
    top_k: int | None = None
    quant: str | None = None
    dtype: str | None = None
    activation: str | None = None
    swiglu_limit: float | None = None
    bias: bool | None = None
    activation_format: str | None = None
    num_local_experts: int | None = None
    router_weight_on_input: bool | None = None
    graph_capture: bool = False
    deterministic: bool = False
    exact_activations: bool = False
    tokens: int | None = None
    platform: str | None = None
    require: list[str] | None = None
    prefer: list[str] | None = None
    deny: list[str] | None = None

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
        if self.activation is not None or self.swiglu_limit is not None:
            name = self.activation or keywords.get("activation", "silu")
            keywords["activation"] = Activation.from_name(name, self.swiglu_limit)
        return MoEProblem(**keywords, **self.wishes())

    def wishes(self) -> dict[str, Any]:
        """Given fields of `MoEProblem` that no model or checkpoint decides.

        `--tokens` is the largest call of the layer. So backends that cannot run it are rejected instead of failing, and
        `explain --tokens N` answers for the problem that `run --tokens N` builds. A call without tokens sets no bound.
        """
        values = self._given(_WISHES)
        values.update({field: True for field in _DEMANDS if getattr(self, field)})
        return {**values, "max_num_tokens": self.tokens} if self.tokens else values

    def notices(self) -> tuple[str, ...]:
        """One line per option that may mean something unexpected."""
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

        Raises:
            UsageError: An option could contradict the checkpoint.
        """
        for field in ("model", *_SIZES, *_FACTS, "activation", "swiglu_limit"):
            if getattr(self, field) is not None:
                raise UsageError(f"{_flag(field)} cannot be combined with {option}, which decides it; leave one out")

    def _given(self, keywords: Mapping[str, str]) -> dict[str, Any]:
        values = {keyword: getattr(self, field) for field, keyword in keywords.items()}
        return {keyword: value for keyword, value in values.items() if value is not None}


# Maps fields of ProblemFlags to fields of MoEProblem.
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


class Shown(NamedTuple):
    """A command's result.

    Attributes:
        values: Makes the object that `--json` prints.
        show: Prints the same as text.
        code: The exit code.
    """

    values: Callable[[], Mapping[str, Any]]
    show: Callable[[], object]
    code: int = OK


COMMANDS: Final[dict[str, Callable[..., int]]] = {}
"""Commands by name, in the help's order."""

_BY_NAME: Final = inspect.Parameter.KEYWORD_ONLY


def command(imports: bool = True, **options: Any) -> Callable[[Callable[..., Shown | int]], Callable[..., int]]:
    """Makes a function a command of its name, with `--json` and `--verbose`.

    Its parameters are options, and those of `ProblemFlags` too where the first one is `flags`. typer reads them from a
    signature; an option of the command's own takes the place of a shared one of that name, and `verbose` is passed to
    those that have it. What it returns is printed after its work, during which standard output is standard error; of an
    exit code alone nothing is.

    Args:
        imports: Whether it first imports what `--module` and, unless it has an argument of its own, `FILE...` name.
        options: What is said of the function's parameters; a text alone is the help of an option.
    """

    def decorate(work: Callable[..., Shown | int]) -> Callable[..., int]:
        own = dict(inspect.signature(work, eval_str=True).parameters)
        fields = inspect.signature(ProblemFlags, eval_str=True).parameters if own.pop("flags", None) else {}
        passed = {"verbose"} if own.pop("verbose", None) else set()
        shared = {name: field for name, field in fields.items() if name not in own}
        names = [] if not imports else ["module"] if "name" in own else ["file", "module"]
        brought = (inspect.Parameter(name, _BY_NAME, default=None, annotation=list[str] | None) for name in names)
        last = (inspect.Parameter(name, _BY_NAME, default=False, annotation=bool) for name in ("json", "verbose"))
        every = (*shared.values(), *own.values(), *brought, *last)
        parameters = [_declared(each, options.get(each.name) or _SHARED[each.name]) for each in every]

        @functools.wraps(work)
        def run(json: bool, verbose: bool, **values: Any) -> int:
            with only_results_on_stdout(verbose):
                import_named(values.pop("file", None) or [], values.pop("module", None) or [] if imports else [])
                flags = {"flags": ProblemFlags(**{name: values.pop(name) for name in shared})} if fields else {}
                found = work(**flags, **values, **dict.fromkeys(passed, verbose))
                if isinstance(found, int):
                    return found
                shown = found.values() if json else {}
            print_json(shown) if json else found.show()
            return found.code

        run.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        COMMANDS[work.__name__.replace("_", "-")] = run
        return run

    return decorate


def import_named(files: Sequence[str], modules: Sequence[str]) -> None:
    """Imports what a command line names beside what is installed.

    Raises:
        UsageError: A name is not that of a Python file, or the file does not exist.
        ArgumentError: One cannot be imported, or a file registers nothing.
    """
    check_files(files, modules)
    if not files and not modules:
        return
    import_modules([*files, *modules])
    for name in files:
        if not any(registers(name, cell) for cell in (*REGISTRY.cells, *MOVEMENTS.cells)):
            raise ArgumentError(f"{name} must register a backend, got none; decorate a class there")


def check_files(files: Sequence[str], modules: Sequence[str]) -> None:
    """Checks the names that `import_named` takes.

    Raises:
        UsageError: A name is not that of a Python file, or the file does not exist.
    """
    for name in files:
        if not is_file_name(name):
            raise UsageError(
                f"a command must have no surplus argument but files of backends (FILE.py), got {shown(name)}; leave it "
                "out"
            )
    for name in (*files, *modules):
        if is_file_name(name) and not Path(name).is_file():
            raise UsageError(f"no file {one_line(name)!r}; name one that registers a backend, or a module")


def _declared(parameter: inspect.Parameter, said: Any) -> inspect.Parameter:
    """Converts a parameter for typer."""
    said = option(said) if isinstance(said, str) else copy.copy(said)
    if parameter.default is False:  # Otherwise typer adds --no-NAME.
        said.param_decls = (_flag(parameter.name), *(["-v"] if parameter.name == "verbose" else []))
    return parameter.replace(kind=_BY_NAME, annotation=Annotated[parameter.annotation, said])


@dataclasses.dataclass(frozen=True)
class Subject:
    """A layer and its name.

    Attributes:
        name: The model's or checkpoint's name; None if only sizes were given.
        checkpoint, layer: The checkpoint's directory and the layer's index, if it has one.
        notices: Unexpected effects of the options, one line each.
    """

    name: str | None
    problem: MoEProblem
    checkpoint: Path | None = None
    layer: int | None = None
    notices: tuple[str, ...] = ()

    def noted(self, selection: Selection) -> Selection:
        """The selection with these notices first, for tables and JSON."""
        return dataclasses.replace(selection, notices=(*self.notices, *selection.notices))


def find_subject(flags: ProblemFlags, checkpoint: Path | None, layer: int | None) -> Subject:
    """The layer that options describe. Reads only a checkpoint's headers.

    Raises:
        MoeregError: Options are missing or contradict each other, or the checkpoint cannot be read.
    """
    if checkpoint is None:
        if layer is not None:
            raise UsageError("--layer needs --checkpoint, whose layer it is")
        return Subject(flags.model, flags.problem(), notices=flags.notices())
    from moereg.checkpoints import read_problem

    flags.check_no_checkpoint_facts()
    layer = first_layer(checkpoint) if layer is None else layer
    problem = read_problem(checkpoint, layer, **flags.wishes())
    name = f"{one_line(checkpoint.resolve().name)}, layer {layer}"
    return Subject(name, problem, checkpoint, layer, flags.notices())


def first_layer(checkpoint: Path) -> int:
    """The first layer of a checkpoint with experts.

    Raises:
        UsageError: No layer has experts.
    """
    from moereg.checkpoints import moe_layers

    with_experts = moe_layers(checkpoint)
    if not with_experts:
        raise UsageError(f"no layer of {str(checkpoint)!r} has experts; give a Mixture-of-Experts checkpoint")
    return with_experts[0]
