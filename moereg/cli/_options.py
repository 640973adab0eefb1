"""Options that commands share, and the layer, request and platform that they describe."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from moereg.cli._output import only_results_on_stdout
from moereg.errors import ArgumentError, MoeregError, one_line, shown
from moereg.platforms import PRODUCTS, platform_of_product
from moereg.prepare_finalize.cells import DISPATCHERS
from moereg.registry import REGISTRY
from moereg.selection.loader import find_scheme, list_backends
from moereg.selection.modules import import_modules, is_file_name, registers
from moereg.selection.result import Selection
from moereg.spec.activations import ACTIVATIONS, Activation
from moereg.spec.model_shapes import MODEL_SHAPES, get_shape
from moereg.spec.problem import DTYPES, MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES


class UsageError(MoeregError, ValueError):
    """Options contradict each other or are incomplete."""


Names = Iterable[str] | Callable[[], Iterable[str]]


def option(help: str, *names: str, words: Names | None = None, group: str | None = None, **others: Any) -> Any:
    """Declares an option that the tab key completes with some words; `others` are arguments of typer.

    It needs `names` where it can only be set, since typer otherwise adds `--no-NAME`. Options of one group with the
    same help share its lines.
    """
    complete = completing(words) if words else None
    return typer.Option(*names, help=help, autocompletion=complete, rich_help_panel=group, **others)


def completing(names: Names) -> Callable[[str], list[str]]:
    """The tab completion of one of some names, or of the last one in `a,b`. Loads no torch."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        found = names() if callable(names) else names
        return [f"{before}{comma}{name}" for name in found if name.startswith(last.lower())]

    return complete


def known_backends() -> Iterable[str]:
    """All backends, plugins' among them, for the tab key."""
    with only_results_on_stdout():  # This imports plugins.
        return list_backends()


# Schemes are without plugins', which would have to be imported.
scheme_of = functools.partial(option, words=QUANT_SCHEMES)
platform_of = functools.partial(option, words=("cpu", *dict.fromkeys(PRODUCTS.values()), *PRODUCTS))
backends_of = functools.partial(option, words=known_backends)
seed_of = functools.partial(option, min=0, max=2**63 - 2)

Platform = Annotated[str | None, platform_of("Such as cuda:sm90 or h100; else this machine.", group="Choice")]
Prefer = Annotated[list[str] | None, backends_of("Use these backends first where they fit.", group="Choice")]
Deny = Annotated[list[str] | None, backends_of("Use none of these backends.", group="Choice")]

_of_layer = functools.partial(option, group="Layer")
_size_of = functools.partial(_of_layer, "Sizes: experts, hidden, of one expert, top k.")
_fact_of = functools.partial(_of_layer, "Biases in both products; weights on the input.")
_demand_of = functools.partial(option, "CUDA graphs; equal bits, in any batch; exactness.", group="Choice")


@dataclasses.dataclass(frozen=True)
class ProblemFlags:
    """The options that describe a layer and a request, and how much to show; None if not given."""

    model: Annotated[str | None, _of_layer("A known model's layer, e.g. qwen3-30b-a3b.", words=MODEL_SHAPES)] = None
    checkpoint: Annotated[Path | None, _of_layer("A checkpoint's folder or name in the Hub's cache.")] = None
    layer: Annotated[int | None, _of_layer("Of the checkpoint; else the first with experts.")] = None
    experts: Annotated[int | None, _size_of()] = None
    hidden: Annotated[int | None, _size_of()] = None
    intermediate: Annotated[int | None, _size_of()] = None
    top_k: Annotated[int | None, _size_of()] = None
    quant: Annotated[str | None, scheme_of("Scheme of the checkpoint's weights.", group="Layer")] = None
    dtype: Annotated[str | None, _of_layer("bfloat16, float16 or float32.", words=DTYPES)] = None
    activation: Annotated[
        str | None, _of_layer("silu, gelu, gelu_tanh, swigluoai, situ, relu2.", words=ACTIVATIONS)
    ] = None
    swiglu_limit: Annotated[float | None, _of_layer("Clamp of gate and up.")] = None
    bias: Annotated[bool | None, _fact_of()] = None
    router_weight_on_input: Annotated[bool | None, _fact_of()] = None
    activation_format: Annotated[str | None, _of_layer("standard or batched.")] = None
    num_local_experts: Annotated[int | None, _of_layer("Experts on one rank, fewer than all.")] = None
    graph_capture: Annotated[bool, _demand_of("--graph-capture")] = False
    deterministic: Annotated[bool, _demand_of("--deterministic")] = False
    batch_invariant: Annotated[bool, _demand_of("--batch-invariant")] = False
    exact_activations: Annotated[bool, _demand_of("--exact-activations")] = False
    tokens: Annotated[int | None, option("Tokens of one call.", min=0)] = None
    platform: Platform = None
    require: Annotated[
        list[str] | None, backends_of("Use one of these or fail: a,b, scheme=a, a_*.", group="Choice")
    ] = None
    prefer: Prefer = None
    deny: Deny = None
    verbose: bool = False

    def problem(self) -> MoEProblem:
        """The layer that `--model` or the sizes describe; explicit options override the model's values."""
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

    def check_no_checkpoint_facts(self) -> None:
        """Rejects flags that the checkpoint decides."""
        for field in ("model", *_SIZES, *_FACTS, "activation", "swiglu_limit"):
            if getattr(self, field) is not None:
                raise UsageError(
                    f"{_flag(field)} cannot be combined with --checkpoint, which decides it; leave one out"
                )

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
_DEMANDS: Final = ("graph_capture", "deterministic", "batch_invariant", "exact_activations")


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def import_named(files: Sequence[str], modules: Sequence[str]) -> None:
    check_files(files, modules)
    if not files and not modules:
        return
    import_modules([*files, *modules])
    for name in files:
        if not any(registers(name, cell) for cell in (*REGISTRY.cells, *DISPATCHERS.cells)):
            raise ArgumentError(f"{name} must register a backend, got none; decorate a class there")


def check_files(files: Sequence[str], modules: Sequence[str]) -> None:
    """Checks the names that `import_named` takes."""
    for name in files:
        if not is_file_name(name):
            raise UsageError(
                f"a command must have no surplus argument but files of backends (FILE.py), got {shown(name)}; leave it "
                "out"
            )
    for name in (*files, *modules):
        if is_file_name(name) and not Path(name).is_file():
            raise UsageError(f"no file {one_line(name)!r}; name one that registers a backend, or a module")


@dataclasses.dataclass(frozen=True)
class Subject:
    """A layer and its name, a model's or checkpoint's, with unexpected effects of the options, one line each."""

    name: str | None
    problem: MoEProblem
    checkpoint: Path | None = None
    layer: int | None = None
    notices: tuple[str, ...] = ()

    def noted(self, selection: Selection) -> Selection:
        """The selection with these notices first, for tables and JSON."""
        return dataclasses.replace(selection, notices=(*self.notices, *selection.notices))


def find_subject(flags: ProblemFlags) -> Subject:
    """The layer that options describe. Reads only a checkpoint's headers."""
    checkpoint, layer = flags.checkpoint, flags.layer
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
    from moereg.checkpoints import moe_layers

    with_experts = moe_layers(checkpoint)
    if not with_experts:
        raise UsageError(f"no layer of {str(checkpoint)!r} has experts; give a Mixture-of-Experts checkpoint")
    return with_experts[0]
