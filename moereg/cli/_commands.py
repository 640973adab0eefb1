"""The commands: their options, and what each does in order.

What a command computes and shows is in a module of its own, which may load torch; this one does not.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from moereg.cli._options import (
    CheckpointOption,
    DenyOption,
    EpOption,
    JobsOption,
    JsonFlag,
    LayerOption,
    PlatformOption,
    PreferOption,
    ProblemFlags,
    SeedOption,
    UsageError,
    VerboseFlag,
    WayOption,
    backend_list,
    backend_names,
    find_subject,
    platform_names,
    routing_names,
    scheme_list,
    scheme_names,
    takes_problem_flags,
)
from moereg.cli._output import (
    BAD_INPUT,
    NOTHING_FITS,
    OK,
    WRONG_NUMBERS,
    code_of_verdict,
    only_results_on_stdout,
    print_error,
    print_json,
)
from moereg.errors import BackendError
from moereg.evidence.code_digest import files_stay
from moereg.selection.result import SCHEMA

if TYPE_CHECKING:
    from moereg.cli._bench import BenchResult
    from moereg.cli._ep import EpExplanation, EpResult
    from moereg.cli._quantize import QuantizeResult
    from moereg.cli._run import RunResult


def info(
    cells: Annotated[bool, typer.Option("--cells", help="Show every cell, not a line a backend.")] = False,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Show this machine, the backends and the plugins."""
    from moereg.cli._info import collect_info, show_info

    with files_stay():
        with only_results_on_stdout(verbose):
            found = collect_info()
        print_json(found) if json else show_info(found, cells)
    return OK


def models(json: JsonFlag = False, verbose: VerboseFlag = False) -> int:
    """List the models that --model knows, with their sizes."""
    from moereg.cli._info import list_models, show_models

    with only_results_on_stdout(verbose):
        found = list_models()
    print_json(found) if json else show_models()
    return OK


def schemes(platform: PlatformOption = None, json: JsonFlag = False, verbose: VerboseFlag = False) -> int:
    """List the schemes that --quant knows, and who runs each."""
    from moereg.cli._info import list_schemes, show_schemes

    with only_results_on_stdout(verbose):
        found, where = list_schemes(platform)
    print_json(found) if json else show_schemes(found, where)
    return OK


@takes_problem_flags
def explain(
    flags: ProblemFlags,
    checkpoint: CheckpointOption = None,
    layer: LayerOption = None,
    model_dir: Annotated[
        Path | None,
        typer.Option(help="Every layer of the model of this directory's config.json, as transformers builds it."),
    ] = None,
    reasons: Annotated[bool, typer.Option("--reasons", help="Show every reason, not the first of a backend.")] = False,
    ep: EpOption = None,
    way: WayOption = None,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Show which backend a layer gets, and why."""
    from moereg.cli._explain import Explanation, ModelChoices

    _check_ep(ep, way)
    if model_dir is not None and (layer is not None or reasons):
        option = "--reasons" if layer is None else "--layer"
        raise UsageError(
            f"{option} is about one layer and --model-dir about all of them; give --checkpoint {model_dir} for one"
        )
    if model_dir is not None and checkpoint is not None:
        raise UsageError("--checkpoint asks for one layer and --model-dir for all of them; leave one out")
    found: EpExplanation | Explanation | ModelChoices
    with only_results_on_stdout(verbose):  # Plugins are loaded, which may print.
        if model_dir is not None:
            found = ModelChoices.of(flags, model_dir)
        elif ep is not None:
            from moereg.cli._ep import EpExplanation

            found = EpExplanation.of(flags, find_subject(flags, checkpoint, layer), ep, way)
        else:
            found = Explanation.of(flags, find_subject(flags, checkpoint, layer))
        values = found.to_dict() if json else {}
    print_json(values) if json else found.show(reasons)
    return OK if found.fits else NOTHING_FITS


def _check_ep(ep: int | None, way: str | None, checkpoint: Path | None = None) -> None:
    if way is not None and ep is None:
        raise UsageError("--way says how tokens move between ranks; say with --ep how many there are")
    if ep is not None and checkpoint is not None:
        raise UsageError("--ep builds random weights, and --checkpoint names others; leave one out")


@takes_problem_flags
def run(
    flags: ProblemFlags,
    checkpoint: CheckpointOption = None,
    layer: LayerOption = None,
    seed: SeedOption = 0,
    ep: EpOption = None,
    way: WayOption = None,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Run one layer, check it against the reference, time it."""
    _check_ep(ep, way, checkpoint)
    if ep is not None:
        from moereg.cli._ep import run_group

        with only_results_on_stdout(verbose):
            group = run_group(flags, ep, way, seed)
        return _show_measured(group, json, group.is_printed)
    from moereg.cli._run import run_layer

    with only_results_on_stdout(verbose):
        result = run_layer(flags, checkpoint, layer, seed)
    return _show_measured(result, json)


def _show_measured(
    found: BenchResult | EpResult | QuantizeResult | RunResult, json: bool, is_printed: bool = True
) -> int:
    """Prints a result, on one of the ranks alone; returns the exit code of its verdict."""
    if is_printed:
        print_json(found.to_dict()) if json else found.show()
    return code_of_verdict(found.passed)


@takes_problem_flags
def bench(
    flags: ProblemFlags,
    checkpoint: CheckpointOption = None,
    layer: LayerOption = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Numbers of tokens, e.g. 1,16,64; 1 to 4096 on a GPU and 1 to 256 on a CPU if left out."),
    ] = None,
    routing: Annotated[
        str,
        typer.Option(
            help="uniform, zipf (popularity 1 / rank) or one_set (all to one set).", autocompletion=routing_names
        ),
    ] = "uniform",
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Timed calls of each backend, 48 if left out; fewer where they take a second."),
    ] = None,
    seed: SeedOption = 0,
    ep: EpOption = None,
    way: WayOption = None,
    replicas: Annotated[
        int | None,
        typer.Option(min=0, help="With --ep: balance experts by the routing's loads, so many of them twice."),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option(help="With --ep: parts into which calls are cut, e.g. 1,2; 1 if left out."),
    ] = None,
    eager: Annotated[bool, typer.Option("--eager", help="With --ep: capture nothing in CUDA graphs.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time and share of the roofline into this file, e.g. bench.png.")
    ] = None,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Compare all backends that fit: numbers first, then speed."""
    from moereg.cli._bench import bench_layer, check_routing, parse_counts
    from moereg.cli._plot import check_can_plot, plot_bench, write_plot
    from moereg.tuning.timing import ROUNDS

    _check_ep(ep, way, checkpoint)
    token_counts = None if tokens is None else parse_counts(tokens)
    parts = (1,) if batches is None else parse_counts(batches, "--batches 1,2")
    timed = ROUNDS if rounds is None else rounds
    if ep is not None:
        if plot is not None:
            raise UsageError("--plot draws backends, and --ep compares ways of moving tokens; leave one out")
        from moereg.cli._ep import bench_group

        with only_results_on_stdout(verbose):
            group = bench_group(flags, ep, way, token_counts, routing, timed, seed, replicas, eager, parts)
        return _show_measured(group, json, group.is_printed)
    of_ranks = {"--replicas": replicas is not None, "--batches": batches is not None, "--eager": eager}
    for name in (name for name, is_given in of_ranks.items() if is_given):
        raise UsageError(f"{name} is about ranks; say --ep, too")
    check_routing(routing)
    if plot is not None:
        check_can_plot(plot)
    with only_results_on_stdout(verbose):
        result = bench_layer(flags, checkpoint, layer, token_counts, routing, timed, seed)
        # First, so that a disk that is full by now leaves nothing on standard output.
        if plot is not None and result.rows:
            write_plot(plot_bench, result, plot)
    return _show_measured(result, json)


def quantize(
    checkpoint: Annotated[Path, typer.Option(help="Directory of the checkpoint; it is only read.")],
    layer: Annotated[
        int | None,
        typer.Option(
            help="Compare on this layer, the first with experts if left out. With --out, quantize it alone; all if "
            "left out."
        ),
    ] = None,
    quant: Annotated[
        list[str] | None,
        typer.Option(
            help="Schemes to compare: int4_w4a16_g128 or a,b or int4_*; all that fit if left out.",
            autocompletion=scheme_list,
        ),
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens of the timed calls; 1,64 if left out.")] = None,
    inputs: Annotated[
        Path | None,
        typer.Option(help="Real hidden states [T,H] by layer index, in a safetensors file; random ones if left out."),
    ] = None,
    num_local_experts: Annotated[int | None, typer.Option(help="Compare on so many experts alone.")] = None,
    platform: Annotated[str | None, typer.Option(help="cpu, on a machine that has a GPU.")] = None,
    require: Annotated[
        list[str] | None, typer.Option(help="Use one of these backends.", autocompletion=backend_list)
    ] = None,
    prefer: PreferOption = None,
    deny: DenyOption = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 2, help="Of random hidden states.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw error over size and over time into this file, e.g. quantize.png.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write a copy with quantized experts into this new directory.")
    ] = None,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Compare schemes on a checkpoint's layer, write a copy."""
    from moereg.cli._bench import parse_counts
    from moereg.cli._plot import check_can_plot, write_plot
    from moereg.cli._quantize import DEFAULT_TOKENS, Question, compare_schemes, find_schemes, plot_quantize, read_inputs

    with only_results_on_stdout(verbose):
        question = Question(
            checkpoint,
            layer,
            find_schemes(quant or []),
            DEFAULT_TOKENS if tokens is None else parse_counts(tokens),
            read_inputs(inputs),
            seed,
            out,
            layer is not None,
        )
        if plot is not None:
            check_can_plot(plot)
        flags = ProblemFlags(
            num_local_experts=num_local_experts, platform=platform, require=require, prefer=prefer, deny=deny
        )
        result = compare_schemes(flags, question)
        if plot is not None and result.rows:
            write_plot(plot_quantize, result, plot)
    return _show_measured(result, json)


@takes_problem_flags
def compile_kernels(
    flags: ProblemFlags,
    checkpoint: CheckpointOption = None,
    layer: LayerOption = None,
    tokens: Annotated[
        str | None, typer.Option(help="Numbers of tokens of a call, e.g. 1-512,1024; 1-16384 if left out.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder to compile into, and to ship; Triton's own cache if left out.")
    ] = None,
    jobs: JobsOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check that the folder serves this machine's Triton, and compile nothing.")
    ] = False,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Compile what a layer launches ahead of its first call."""
    from moereg.cli import _compile

    if check:
        with only_results_on_stdout(verbose):
            checked, text = _compile.check_cache(cache, flags.platform)
        print_json(checked) if json else print(text)
        return OK
    with only_results_on_stdout(verbose):
        subject = find_subject(flags, checkpoint, layer)
        try:
            compiled, text, refusal = _compile.compile_layer(flags, subject, tokens, cache, jobs)
        except BackendError as error:
            print_error(str(error))
            return WRONG_NUMBERS
    if json:
        print_json(compiled)
    elif refusal is None:
        print(text)
    if refusal is not None:
        print_error(refusal)
        return NOTHING_FITS
    return OK


def new_backend(
    name: Annotated[str, typer.Argument(help="Of the backend, as requests will spell it, e.g. my_kernel.")],
    directory: Annotated[
        Path | None, typer.Option(help="Folder to write into, new or empty; moereg-NAME here if left out.")
    ] = None,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Write a wheel with one backend, to put a kernel into."""
    from moereg.cli._new_backend import show_wheel, write_wheel

    with only_results_on_stdout(verbose):
        written = write_wheel(name, directory)
    print_json(written) if json else show_wheel(written)
    return OK


def build_kernels(
    name: Annotated[
        str, typer.Argument(help="A backend whose kernels are built ahead of time.", autocompletion=backend_names)
    ],
    quant: Annotated[
        list[str] | None,
        typer.Option(
            help="Scheme that it shall compute; all of the platform's if left out.", autocompletion=scheme_names
        ),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Of hidden states; bfloat16 if left out.")] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="Build this set too, by the backend's own name for it.")
    ] = None,
    platform: Annotated[
        str | None,
        typer.Option(help="Build for it, e.g. cuda:sm90; this machine if left out.", autocompletion=platform_names),
    ] = None,
    jobs: JobsOption = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write into; where the backend looks if left out.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what it would do and how long that takes.")] = False,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Build a backend's kernels ahead of time."""
    from moereg.cli import _build_kernels

    with only_results_on_stdout(verbose):
        built, text = _build_kernels.build_kernels(
            name, quant or [], dtype or [], part or [], platform, jobs, out, dry_run
        )
    print_json(built) if json else print(text)
    return OK


def verify(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A backend, or a file that registers one, e.g. ./my_backend.py.", autocompletion=backend_names
        ),
    ] = None,
    module: Annotated[
        list[str] | None, typer.Option(help="Import this module or file first, e.g. my_package.backend.")
    ] = None,
    platform: Annotated[
        str | None, typer.Option(help="Run as this machine, as its cpu, or as a platform that is imitated here.")
    ] = None,
    isolate: Annotated[
        bool, typer.Option("--isolate/--no-isolate", help="Import and run the backend in a worker process alone.")
    ] = True,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="Time for everything; layers are drawn until it is over.")
    ] = None,
    check_seconds: Annotated[
        float | None, typer.Option(min=0.1, help="Time for each check; 120, and 300 beside a GPU, if left out.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 2, help="Of the drawn layers.")] = 0,
    check: Annotated[
        list[str] | None, typer.Option(help="Run only checks whose id has this text, or a drawn layer's JSON.")
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Record in this file which cells passed everything on this machine.")
    ] = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Reject what failed on this machine until its code or versions change.")
    ] = False,
    unquarantine: Annotated[
        bool, typer.Option("--unquarantine", help="Lift the backend's quarantine on this machine, and run nothing.")
    ] = False,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Run the conformance kit on one backend."""
    from moereg.cli._quarantine import check_quarantine, lift_quarantine, quarantine_failures
    from moereg.cli._verify import Subject, check_ledger, record_verified, show_verify, verify_backend
    from moereg.testing.suite import run_again

    if unquarantine:
        if name is None or quarantine:
            raise UsageError("--unquarantine takes a backend's name, and does not go with --quarantine; leave one out")
        with only_results_on_stdout(verbose):
            lifted = lift_quarantine(name)
        print_json({"schema": SCHEMA, "quarantine": lifted.to_dict()}) if json else print(lifted)
        return OK
    if quarantine:
        check_quarantine()
    subject = Subject(name, module or [])
    if ledger is not None:
        check_ledger(ledger, check or [])
    with only_results_on_stdout(verbose):
        report = verify_backend(subject, platform, isolate, seconds, check_seconds, seed, check or [])
        recorded = () if ledger is None else record_verified(report, ledger, subject)
        change = None
        if quarantine:
            change = quarantine_failures(report, not check, lambda found: run_again(found, isolate, check_seconds))
    if json:
        print_json(report.to_dict() if change is None else {**report.to_dict(), "quarantine": change.to_dict()})
    else:
        show_verify(report)
        if ledger is not None:
            print(f"{len(recorded)} of {len(report.cells)} cells are recorded in {ledger}")
        if change is not None:
            print(change)
    if report.has_no_time:
        return BAD_INPUT
    return code_of_verdict(report.passed)


COMMANDS: Final[dict[str, Callable[..., int]]] = {
    "info": info,
    "models": models,
    "schemes": schemes,
    "explain": explain,
    "run": run,
    "bench": bench,
    "quantize": quantize,
    "new-backend": new_backend,
    "build-kernels": build_kernels,
    "compile": compile_kernels,
    "verify": verify,
}
"""By name, in the order of the help."""
