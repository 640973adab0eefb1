"""The commands: their options and steps.

A command's computation and output are in separate modules, which may load torch; this one does not. They raise a
`MoeregError` for anything that the user can fix.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import typer
import typer.core

from moereg._version import __version__
from moereg.cli._options import (
    Deny,
    Platform,
    Prefer,
    ProblemFlags,
    UsageError,
    backends_of,
    completing,
    find_subject,
    import_named,
    known_backends,
    option,
    scheme_of,
    seed_of,
)
from moereg.cli._output import (
    BAD_INPUT,
    EXIT_CODES,
    WRONG_NUMBERS,
    Result,
    code_of_verdict,
    only_results_on_stdout,
    print_error,
)
from moereg.errors import BackendError, UnknownNameError, described, shown, unknown_name_message
from moereg.selection.result import SCHEMA
from moereg.spec.problem import DTYPES

_ALSO_CALLED: Final = {
    **dict.fromkeys(("list", "ls"), ("info", "models", "schemes")),
    **dict.fromkeys(("backends", "doctor", "status"), ("info",)),
    **dict.fromkeys(("why", "choose", "select"), ("explain",)),
    **dict.fromkeys(("warm-up", "precompile", "build"), ("compile",)),
    **dict.fromkeys(("gain", "measure", "benchmark"), ("compare", "bench")),
    "test": ("verify",),
    "check": ("verify", "run"),
    "quants": ("schemes",),
    "new": ("new-backend",),
}
"""Other words for commands, with the commands that they may mean."""


def _known_routings() -> Iterable[str]:
    from moereg.bench.inputs import ROUTINGS

    return ROUTINGS


Seed = Annotated[int, seed_of("Of weights, hidden states and routing.")]
Jobs = Annotated[int | None, option("Compilers at once; as memory allows if left out.", min=1)]
Modules = Annotated[
    list[str] | None, option("Import this module or file too, which registers backends, e.g. my_package.backend.")
]


@dataclasses.dataclass(frozen=True)
class _Imports:
    """Options of commands that read the registry."""

    file: Annotated[
        list[str] | None,
        typer.Argument(help="Files that register backends, e.g. ./my_kernel.py; each is imported alone."),
    ] = None
    module: Modules = None


@dataclasses.dataclass(frozen=True)
class _Output:
    """Options of every command."""

    json: Annotated[bool, option("Print one JSON object instead of a table.", "--json")] = False
    verbose: Annotated[
        bool, option("Log to standard error, and show every reason of each backend.", "--verbose", "-v")
    ] = False


@functools.cache
def _parameters(declared: type) -> tuple[Any, ...]:
    """The options and arguments that typer reads from the fields of a dataclass."""
    app = typer.Typer(add_completion=False)
    app.command()(declared)
    return tuple(typer.main.get_command(app).params)


class Command(typer.core.TyperCommand):
    """A command, with `--json` and `--verbose` too: it returns a `Result`, which is printed after its work.

    Until then standard output is standard error. An option of its own takes the place of a shared one of its name.
    """

    before: ClassVar[tuple[type, ...]] = ()
    after: ClassVar[tuple[type, ...]] = (_Output,)

    def __init__(self, *arguments: Any, params: list[Any], **others: Any) -> None:
        """Adds the shared options to the command's own."""
        own = {parameter.name for parameter in params}
        after = [one for kind in self.after for one in _parameters(kind) if one.name not in own]
        names = {*own, *(one.name for one in after)}
        before = [one for kind in self.before for one in _parameters(kind) if one.name not in names]
        self._shared = [one.name for one in (*before, *after)]
        super().__init__(*arguments, params=[*before, *params, *after], **others)

    def invoke(self, ctx: Any) -> int:
        """Runs the command, whose context has the layer's `ProblemFlags` as its object; returns the exit code."""
        shared = {name: ctx.params.pop(name) for name in self._shared}
        fields = {one.name for one in dataclasses.fields(ProblemFlags)}
        ctx.obj = ProblemFlags(**{name: value for name, value in shared.items() if name in fields})
        with only_results_on_stdout(shared["verbose"]):
            try:
                import_named(shared.get("file") or (), shared.get("module") or ())
                result: Result = super().invoke(ctx)
            except OSError as error:  # Others are taken for those of standard output.
                raise RuntimeError(described(error)) from error
        result.print(shared["json"])
        return result.code


class RegistryCommand(Command):
    """A command that reads the registry: it imports what `FILE...` and `--module` name first."""

    after = (_Imports, _Output)


class LayerCommand(RegistryCommand):
    """A command about a layer, with the options of `ProblemFlags`."""

    before = (ProblemFlags,)


class _Commands(typer.core.TyperGroup):
    """The commands; a mistyped one gets moereg's usual error for unknown names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Like click's, but checks that the first word is a command's name."""
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise UnknownNameError(unknown_name_message("command", args[0], self.list_commands(ctx), _ALSO_CALLED))
        return super().resolve_command(ctx, args)


app: Final = typer.Typer(
    name="moereg",
    cls=_Commands,
    help="Picks, prepares, runs and compares Mixture-of-Experts kernels for PyTorch.",
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    # Rich's boxes truncate option names at 80 columns.
    rich_markup_mode=None,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print("moereg", __version__)
        raise typer.Exit


@app.callback()
def _moereg(
    version: Annotated[bool, option("Print the version.", "--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Picks, prepares, runs and compares Mixture-of-Experts kernels for PyTorch."""


@app.command(cls=RegistryCommand)
def info(cells: Annotated[bool, option("Show every cell, not a line a backend.", "--cells")] = False) -> Result:
    """Show this machine, the backends and the plugins."""
    from moereg.cli._info import collect_info, show_info

    found = collect_info()
    return Result(found, lambda: show_info(found, cells))


@app.command(cls=Command)
def models() -> Result:
    """List the models that --model knows, with their sizes."""
    from moereg.cli._info import list_models, show_models

    return Result(list_models(), show_models)


@app.command(cls=RegistryCommand)
def schemes(platform: Platform = None) -> Result:
    """List the schemes that --quant knows, and who runs each."""
    from moereg.cli._info import list_schemes, show_schemes

    found, where = list_schemes(platform)
    return Result(found, lambda: show_schemes(found, where))


@app.command(cls=LayerCommand)
def explain(
    context: typer.Context,
    model_dir: Annotated[
        Path | None, option("Every layer of the model of this directory's config.json, as transformers builds it.")
    ] = None,
    reasons: Annotated[bool, option("Show every reason, not the first of a backend.", "--reasons")] = False,
    ep: Annotated[int | None, option("Experts over so many ranks.", min=1)] = None,
    dispatcher: Annotated[
        str | None, option("With --ep: token dispatchers, such as all_to_all,all_gather; all that fit if left out.")
    ] = None,
) -> Result:
    """Show which backend a layer gets, and why."""
    from moereg.cli._explain import explain_layer, explain_model_dir

    flags = context.obj
    if dispatcher is not None and ep is None:
        raise UsageError("--dispatcher says how tokens move between ranks; say with --ep how many there are")
    if model_dir is not None and (flags.layer is not None or reasons):
        name = "--reasons" if flags.layer is None else "--layer"
        raise UsageError(
            f"{name} is about one layer and --model-dir about all of them; give --checkpoint {model_dir} for one"
        )
    if model_dir is not None and flags.checkpoint is not None:
        raise UsageError("--checkpoint asks for one layer and --model-dir for all of them; leave one out")
    if model_dir is not None:
        return explain_model_dir(flags, model_dir)
    return explain_layer(flags, find_subject(flags), ep, dispatcher, reasons or flags.verbose)


@app.command(cls=LayerCommand)
def run(context: typer.Context, seed: Seed = 0) -> Result:
    """Run one layer, check it against the reference, time it."""
    from moereg.cli._bench import run_layer

    return run_layer(context.obj, seed)


@app.command(cls=LayerCommand)
def bench(
    context: typer.Context,
    tokens: Annotated[
        str | None,
        option("Numbers of tokens, e.g. 1,16,64; 1 to 4096 on a GPU and 1 to 256 on a CPU if left out."),
    ] = None,
    routing: Annotated[
        str, option("uniform, zipf (popularity 1 / rank) or one_set (all to one set).", words=_known_routings)
    ] = "uniform",
    rounds: Annotated[
        int | None, option("Timed calls of each backend, 48 if left out; fewer where they take a second.", min=1)
    ] = None,
    seed: Seed = 0,
) -> Result:
    """Compare all backends that fit: numbers first, then speed."""
    from moereg.bench.timing import ROUNDS
    from moereg.cli._bench import bench_layer, check_routing, parse_counts

    token_counts = None if tokens is None else parse_counts(tokens)
    check_routing(routing)
    return bench_layer(context.obj, token_counts, routing, ROUNDS if rounds is None else rounds, seed)


@app.command(
    cls=Command,
    epilog="\b\nExamples:\n  moereg compare allenai/OLMoE-1B-7B-0924 --batch 1,16 --html olmoe.html"
    "\n  moereg compare DIR --random-weights --layers 4 --tokens 128,16",
)
def compare(
    model: Annotated[str, typer.Argument(help="Folder of a transformers model, or a name in the Hub's cache.")],
    random_weights: Annotated[
        bool, option("Make weights on the device, from config.json alone.", "--random-weights", rich_help_panel="Model")
    ] = False,
    layers: Annotated[int | None, option("With it: its first layers alone.", min=1, rich_help_panel="Model")] = None,
    dtype: Annotated[
        str | None, option("bfloat16, float16 or float32; else its own.", words=DTYPES, rich_help_panel="Model")
    ] = None,
    tokens: Annotated[str, option("Of each prompt, and new ones: 512,32.", rich_help_panel="Measurement")] = "512,32",
    batch: Annotated[str, option("Numbers of sequences, e.g. 1,16.", rich_help_panel="Measurement")] = "1",
    device: Annotated[str | None, option("cuda or cpu; else a GPU if any.", rich_help_panel="Measurement")] = None,
    implementations: Annotated[
        str | None, option("These alone, e.g. eager,moereg_prepared.", rich_help_panel="Measurement")
    ] = None,
    seconds: Annotated[float, option("Time of one median.", min=0.01, rich_help_panel="Measurement")] = 1.5,
    html: Annotated[Path | None, option("Write a page with pictures to this file.")] = None,
) -> Result:
    """Measure what moereg gains on a transformers model of yours."""
    from moereg.cli._bench import parse_counts
    from moereg.cli._compare import compare_model

    for value, known in ((dtype, DTYPES), (device, ("cuda", "cpu"))):
        if value not in (None, *known):
            raise UnknownNameError(unknown_name_message("name", str(value), known))
    counts = [int(part) if part.strip().isdecimal() else 0 for part in tokens.split(",")]
    if len(counts) != 2 or min(counts) < 1:
        raise UsageError(f"--tokens must be those of a prompt and new ones, such as 512,32, got {shown(tokens)}")
    names = None if implementations is None else [name.strip() for name in implementations.split(",")]
    loading = {"random_weights": random_weights, "layers": layers, "dtype": dtype}
    return compare_model(model, (counts[0], counts[1]), parse_counts(batch), names, seconds, html, device, **loading)


@app.command(cls=LayerCommand)
def tune(
    context: typer.Context,
    tokens: Annotated[
        str | None,
        option(
            "Most tokens of a call, of which all powers of two are measured, or a list; 8192, 512 on a CPU if left out."
        ),
    ] = None,
    routing: Annotated[
        str | None,
        option("Routings that decide, of uniform,zipf; both if left out."),
    ] = None,
    require: Annotated[list[str] | None, backends_of("Measure these backends alone.")] = None,
    prefer: Annotated[list[str] | None, backends_of("Measure these backends too, although they are opt-in.")] = None,
    seconds: Annotated[float | None, option("Stop after so long; the same command goes on.", min=1)] = None,
    histogram: Annotated[
        Path | None,
        option("Calls by number of tokens in a JSON file, which weigh the choice; decades count alike if left out."),
    ] = None,
    seed: Seed = 0,
    refresh: Annotated[bool, option("Measure again what was measured.", "--refresh")] = False,
    dry_run: Annotated[bool, option("Say what would be measured.", "--dry-run")] = False,
) -> Result:
    """Time a layer's backends here; layers get the fastest."""
    from moereg.cli._tune import parse_routings, parse_tokens, read_histogram, tune_layer
    from moereg.cli._tuner import Question
    from moereg.evidence.significance import ASKED

    flags = dataclasses.replace(context.obj, require=require, prefer=prefer)
    counts = () if tokens is None else parse_tokens(tokens)
    routings = ASKED if routing is None else parse_routings(routing)
    calls = None if histogram is None else read_histogram(histogram)
    question = Question(flags, counts, routings, seed)
    try:
        return tune_layer(question, seconds, refresh, dry_run, calls)
    except BackendError as error:
        print_error(str(error))
        raise typer.Exit(WRONG_NUMBERS) from None


@app.command(cls=RegistryCommand)
def quantize(
    checkpoint: Annotated[Path, option("The checkpoint, a directory or a name in the Hub's cache; it is only read.")],
    layer: Annotated[int | None, option("Compare on this layer, the first with experts if left out.")] = None,
    quant: Annotated[
        list[str] | None,
        scheme_of("Schemes to compare: int4_w4a16_g128 or a,b or int4_*; all that fit if left out."),
    ] = None,
    tokens: Annotated[str | None, option("Tokens of the timed calls; 1,64 if left out.")] = None,
    inputs: Annotated[
        Path | None,
        option("Real hidden states [T,H] by layer index, in a safetensors file; random ones if left out."),
    ] = None,
    num_local_experts: Annotated[int | None, option("Compare on so many experts alone.")] = None,
    platform: Annotated[str | None, option("cpu, on a machine that has a GPU.")] = None,
    require: Annotated[list[str] | None, backends_of("Use one of these backends.")] = None,
    prefer: Prefer = None,
    deny: Deny = None,
    seed: Annotated[int, seed_of("Of random hidden states.")] = 0,
) -> Result:
    """Compare schemes on a checkpoint's layer."""
    from moereg.cli._bench import parse_counts
    from moereg.cli._quantize import DEFAULT_TOKENS, compare_schemes, find_schemes, read_inputs

    flags = ProblemFlags(
        num_local_experts=num_local_experts, platform=platform, require=require, prefer=prefer, deny=deny
    )
    counts = DEFAULT_TOKENS if tokens is None else parse_counts(tokens)
    return compare_schemes(flags, checkpoint, layer, find_schemes(quant or []), counts, read_inputs(inputs), seed)


@app.command(cls=Command)
def new_backend(
    name: Annotated[str, typer.Argument(help="Of the backend, as requests will spell it, e.g. my_kernel.")],
    directory: Annotated[
        Path | None, option("Folder to write into, new or empty; moereg-NAME here if left out.")
    ] = None,
) -> Result:
    """Write a wheel with one backend, to put a kernel into."""
    from moereg.cli._new_backend import show_wheel, write_wheel

    written = write_wheel(name, directory)
    return Result(written, lambda: show_wheel(written))


@app.command(cls=LayerCommand)
def compile(
    context: typer.Context,
    tokens: Annotated[str | None, option("Numbers of tokens of a call, e.g. 1-512,1024; 1-16384 if left out.")] = None,
    cache: Annotated[
        Path | None, option("Folder to compile into, and to ship; Triton's own cache if left out.")
    ] = None,
    jobs: Jobs = None,
    check: Annotated[
        bool, option("Check that the folder serves this machine's Triton, and compile nothing.", "--check")
    ] = False,
) -> Result:
    """Compile what a layer launches ahead of its first call."""
    from moereg.cli._compile import check_cache, compile_layer

    flags = context.obj
    if check:
        return check_cache(cache, flags.platform)
    try:
        return compile_layer(flags, find_subject(flags), tokens, cache, jobs)
    except BackendError as error:
        print_error(str(error))
        raise typer.Exit(WRONG_NUMBERS) from None


@app.command(cls=Command)
def verify(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A backend, or a file that registers one, e.g. ./my_backend.py.",
            autocompletion=completing(known_backends),
        ),
    ] = None,
    module: Modules = None,
    platform: Annotated[
        str | None,
        option("Run as this machine, as its cpu, or as a platform that is imitated here."),
    ] = None,
    isolate: Annotated[bool, option("Import and run the backend in a worker process alone.")] = True,
    seconds: Annotated[float | None, option("Time for everything; layers are drawn until it is over.", min=1)] = None,
    check_seconds: Annotated[
        float | None, option("Time for each check; 120, and 300 beside a GPU, if left out.", min=0.1)
    ] = None,
    seed: Annotated[int, seed_of("Of the drawn layers.")] = 0,
    check: Annotated[
        list[str] | None,
        option("Run only checks whose id has this text, e.g. numbers, or a drawn layer given as its line of JSON."),
    ] = None,
    ledger: Annotated[Path | None, option("Record in this file which cells passed everything on this machine.")] = None,
    quarantine: Annotated[
        bool, option("Reject what failed on this machine until its code or versions change.", "--quarantine")
    ] = False,
    unquarantine: Annotated[
        bool, option("Lift the backend's quarantine on this machine, and run nothing.", "--unquarantine")
    ] = False,
) -> Result:
    """Run the conformance kit on one backend."""
    from moereg.cli._quarantine import lift_quarantine, quarantine_failures
    from moereg.cli._verify import check_ledger, record_verified, show_verify, subject_of, verify_backend
    from moereg.evidence.on_machine import QUARANTINE
    from moereg.testing.suite import run_again

    if unquarantine:
        if name is None or quarantine:
            raise UsageError("--unquarantine takes a backend's name, and does not go with --quarantine; leave one out")
        lifted = lift_quarantine(name)
        return Result({"schema": SCHEMA, "quarantine": lifted.to_dict()}, lambda: print(lifted))
    if quarantine:
        QUARANTINE.change()  # Refuses an unwritable file before anything runs.
    backend, modules = subject_of(name, module or [])
    if ledger is not None:
        check_ledger(ledger, check or [])
    options = {"seed": seed, "only": check or [], "check_seconds": check_seconds}
    report = verify_backend(backend, modules, platform, isolate, seconds, **options)
    recorded = () if ledger is None else record_verified(report, ledger, modules)
    change = None
    if quarantine:
        change = quarantine_failures(report, not check, lambda found: run_again(found, isolate, check_seconds))

    def show() -> None:
        show_verify(report)
        if ledger is not None:
            print(f"{len(recorded)} of {len(report.cells)} cells are recorded in {ledger}")
        if change is not None:
            print(change)

    quarantined = {} if change is None else {"quarantine": change.to_dict()}
    code = BAD_INPUT if report.has_no_time else code_of_verdict(report.passed)
    return Result({**report.to_dict(), **quarantined}, show, code)
