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


Seed = Annotated[int, seed_of("Of weights, inputs and routing; 0 if left out.")]
_MEASURED: Final = "Measure these alone; these opt-in ones too."
_REGISTERS: Final = "Files or modules that register backends."
Modules = Annotated[list[str] | None, option(_REGISTERS)]


@dataclasses.dataclass(frozen=True)
class _Imports:
    """Options of commands that read the registry."""

    file: Annotated[list[str] | None, typer.Argument(help=_REGISTERS)] = None
    module: Modules = None


@dataclasses.dataclass(frozen=True)
class _Output:
    """Options of every command."""

    json: Annotated[bool, option("Print one JSON object instead of a table.", "--json")] = False
    verbose: Annotated[bool, option("Log to standard error; show every reason.", "--verbose", "-v")] = False


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

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """By group, without ranges and defaults, which the texts say; options with one text share its lines."""
        titles = ("Model", "Layer", "Choice", "Measurement", "Options")
        groups: dict[str, dict[str, list[str]]] = {title: {} for title in titles}
        for parameter in self.get_params(ctx):
            names, text = parameter.get_help_record(ctx) or ("", "")
            group = groups[getattr(parameter, "rich_help_panel", None) or "Options"]
            names = names.replace("list[str]", "str").replace(" range", "")
            group.setdefault(text.partition("  [")[0], []).append(names)
        formatter.write_paragraph()
        for title, rows in groups.items():
            if rows:
                formatter.write(f"{title}:\n")
                with formatter.indentation():
                    short = {text: [name.split()[0] for name in names] for text, names in rows.items() if names[1:]}
                    formatter.write_dl([(", ".join(one), text) for text, one in {**rows, **short}.items()], col_max=25)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Examples, whose arguments the epilog has."""
        if self.epilog:
            calls = (f"  {ctx.command_path} {arguments}".rstrip() for arguments in self.epilog.split("; "))
            formatter.write("\n".join(("", "Examples:", *calls, "")))

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


@app.command(cls=RegistryCommand, epilog="; --report")
def info(
    cells: Annotated[bool, option("Show every cell, not a line per backend.", "--cells")] = False,
    report: Annotated[bool, option("Print a block to paste into a bug report.", "--report")] = False,
) -> Result:
    """Show this machine, the backends and the plugins."""
    from moereg.cli._info import collect_info, report_of, show_info

    found = collect_info()
    if report:
        text = report_of(found)
        return Result({**found, "report": text}, lambda: print(text))
    return Result(found, lambda: show_info(found, cells))


@app.command(cls=Command, epilog="; --json")
def models() -> Result:
    """List the models that --model knows, with their sizes."""
    from moereg.cli._info import list_models, show_models

    return Result(list_models(), show_models)


@app.command(cls=RegistryCommand, epilog="; --platform h100")
def schemes(platform: Platform = None) -> Result:
    """List the schemes that --quant knows, and who runs each."""
    from moereg.cli._info import list_schemes, show_schemes

    found, where = list_schemes(platform)
    return Result(found, lambda: show_schemes(found, where))


@app.command(cls=LayerCommand, epilog="--model qwen3-30b-a3b --platform h100; --checkpoint DIR")
def explain(
    context: typer.Context,
    reasons: Annotated[bool, option("Show every reason of each backend.", "--reasons")] = False,
    ep: Annotated[int | None, option("Experts over so many ranks.", min=1)] = None,
    dispatcher: Annotated[str | None, option("With --ep: all_to_all,all_gather; else any.")] = None,
) -> Result:
    """Show which backend a layer gets, and why."""
    from moereg.cli._explain import explain_checkpoint, explain_layer

    flags = context.obj
    if dispatcher is not None and ep is None:
        raise UsageError("--dispatcher says how tokens move between ranks; say with --ep how many there are")
    if flags.checkpoint is None or flags.layer is not None:
        return explain_layer(flags, find_subject(flags), ep, dispatcher, reasons or flags.verbose)
    if reasons or ep is not None:
        raise UsageError(f"{'--reasons' if reasons else '--ep'} is about one layer of a checkpoint; add --layer N")
    return explain_checkpoint(flags, flags.checkpoint)


@app.command(cls=LayerCommand, epilog="--model qwen3-30b-a3b --tokens 64; --checkpoint DIR --layer 3")
def run(context: typer.Context, seed: Seed = 0) -> Result:
    """Run one layer, check it against the reference, time it."""
    from moereg.cli._bench import run_layer

    return run_layer(context.obj, seed)


@app.command(cls=LayerCommand, epilog="my_kernel.py --model qwen3-30b-a3b; --checkpoint DIR --tokens 1,64")
def bench(
    context: typer.Context,
    tokens: Annotated[str | None, option("Such as 1,16,64; else to 4096, 256 on a CPU.")] = None,
    routing: Annotated[str, option("uniform (default), zipf or one_set.", words=_known_routings)] = "uniform",
    rounds: Annotated[int | None, option("Most timed calls of each backend; else 48.", min=1)] = None,
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
    epilog="allenai/OLMoE-1B-7B-0924 --batch 1,16 --html olmoe.html; DIR --random-weights --layers 4 --tokens 128,16",
)
def compare(
    model: Annotated[str, typer.Argument(help="Folder of a transformers model, or a name in the Hub's cache.")],
    random_weights: Annotated[
        bool, option("Make weights on the device, from config.json alone.", "--random-weights", group="Model")
    ] = False,
    layers: Annotated[int | None, option("With it: its first layers alone.", min=1, group="Model")] = None,
    dtype: Annotated[
        str | None, option("bfloat16, float16 or float32; else its own.", words=DTYPES, group="Model")
    ] = None,
    tokens: Annotated[str, option("Of each prompt, and new ones: 512,32.", group="Measurement")] = "512,32",
    batch: Annotated[str, option("Numbers of sequences, e.g. 1,16.", group="Measurement")] = "1",
    device: Annotated[str | None, option("cuda or cpu; else a GPU if any.", group="Measurement")] = None,
    implementations: Annotated[
        str | None, option("These alone, e.g. eager,moereg_prepared.", group="Measurement")
    ] = None,
    seconds: Annotated[float, option("Time of one median.", min=0.01, group="Measurement")] = 1.5,
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


@app.command(cls=LayerCommand, epilog="--model qwen3-30b-a3b; --checkpoint DIR --tokens 1,16,512")
def tune(
    context: typer.Context,
    tokens: Annotated[str | None, option("A list, or the most; else 8192, 512 on a CPU.")] = None,
    routing: Annotated[str | None, option("Routings that decide; else uniform,zipf.")] = None,
    require: Annotated[list[str] | None, backends_of(_MEASURED, group="Choice")] = None,
    prefer: Annotated[list[str] | None, backends_of(_MEASURED, group="Choice")] = None,
    seconds: Annotated[float | None, option("Stop then; the same command goes on.", min=1)] = None,
    histogram: Annotated[Path | None, option("JSON file of calls by tokens, as weights.")] = None,
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


@app.command(cls=RegistryCommand, epilog="--checkpoint DIR --quant int4_w4a16_g128; --checkpoint DIR")
def quantize(
    checkpoint: Annotated[Path, option("A folder or a name in the Hub's cache.", group="Layer")],
    layer: Annotated[int | None, option("Of it; else the first with experts.", group="Layer")] = None,
    quant: Annotated[list[str] | None, scheme_of("Such as nvfp4,int4_*; else all that fit.")] = None,
    tokens: Annotated[str | None, option("Of the timed calls; else 1,64.")] = None,
    inputs: Annotated[Path | None, option("Safetensors of hidden states [T,H] by layer.")] = None,
    num_local_experts: Annotated[int | None, option("Compare on so many experts alone.")] = None,
    platform: Annotated[str | None, option("cpu, on a machine that has a GPU.", group="Choice")] = None,
    require: Annotated[list[str] | None, backends_of("Use one of these backends.", group="Choice")] = None,
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


@app.command(cls=Command, epilog="my_kernel; my_kernel --from my_kernel.py")
def new_backend(
    name: Annotated[str, typer.Argument(help="Of the backend, as requests will spell it, e.g. my_kernel.")],
    directory: Annotated[Path | None, option("New or empty folder; else moereg-NAME here.")] = None,
    source: Annotated[Path | None, option("File that registers the backend, to put into the plugin.", "--from")] = None,
    triton: Annotated[bool, option("Write a template whose kernel is Triton.", "--triton")] = False,
) -> Result:
    """Write a plugin package around your kernel, or a template."""
    from moereg.cli._new_backend import show_wheel, write_wheel

    if triton and source is not None:
        raise UsageError("--from brings its own kernel, and --triton writes one; leave one of them out")
    written = write_wheel(name, directory, source, triton)
    return Result(written, lambda: show_wheel(written, is_complete=source is not None))


@app.command(cls=LayerCommand, epilog="--model qwen3-30b-a3b --platform h100; --check --cache kernels")
def compile(
    context: typer.Context,
    tokens: Annotated[str | None, option("Of calls, such as 1-512,1024; else 1-16384.")] = None,
    cache: Annotated[Path | None, option("Folder to fill and ship; else Triton's cache.")] = None,
    jobs: Annotated[int | None, option("Compilers at once; else as memory allows.", min=1)] = None,
    check: Annotated[bool, option("Only check that the folder serves here.", "--check")] = False,
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


@app.command(cls=Command, epilog="my_kernel.py; triton --check numbers")
def verify(
    name: Annotated[
        str | None, typer.Argument(help="A backend, or a file of one.", autocompletion=completing(known_backends))
    ] = None,
    module: Modules = None,
    platform: Annotated[str | None, option("This machine, its cpu, or one to imitate.")] = None,
    isolate: Annotated[bool, option("Import and run it in a worker process alone.")] = True,
    seconds: Annotated[float | None, option("Time for all; layers are drawn until then.", min=1)] = None,
    check_seconds: Annotated[float | None, option("Time per check; else 120, 300 by a GPU.", min=0.1)] = None,
    seed: Annotated[int, seed_of("Of the drawn layers.")] = 0,
    check: Annotated[list[str] | None, option("Only checks with this text, or a layer's JSON.")] = None,
    ledger: Annotated[Path | None, option("Record here which cells passed everything.")] = None,
    quarantine: Annotated[bool, option("Reject what failed until it changes.", "--quarantine")] = False,
    unquarantine: Annotated[bool, option("Lift its quarantine; run nothing.", "--unquarantine")] = False,
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
        show_verify(report, modules)
        if ledger is not None:
            print(f"{len(recorded)} of {len(report.cells)} cells are recorded in {ledger}")
            if report.imitated:
                print("imitated cells are not recorded: run the same command on a machine that they claim")
        if change is not None:
            print(change)

    quarantined = {} if change is None else {"quarantine": change.to_dict()}
    code = BAD_INPUT if report.has_no_time else code_of_verdict(report.passed)
    return Result({**report.to_dict(), **quarantined}, show, code)
