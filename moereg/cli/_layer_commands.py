"""The commands about a machine and about a layer: their options, and what each does in order."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moereg.cli._completion import routing_names
from moereg.cli._exits import NOTHING_FITS, OK, WRONG_NUMBERS, code_of_verdict
from moereg.cli._info import collect_info, machine_shown, selection_with_evidence
from moereg.cli._options import (
    CheckpointOption,
    EpOption,
    JsonFlag,
    LayerOption,
    PlatformOption,
    ProblemFlags,
    UsageError,
    VerboseFlag,
    WayOption,
    takes_problem_flags,
)
from moereg.cli._output import only_results_on_stdout, print_error, print_json
from moereg.cli._subject import find_subject
from moereg.digest import files_stay
from moereg.discovery import load_backends
from moereg.dispatch import explain_backends
from moereg.errors import BackendError

if TYPE_CHECKING:
    from moereg.cli._ep import EpResult

__all__ = ["bench", "compile_kernels", "explain", "info", "models", "run", "schemes"]


def info(
    cells: Annotated[bool, typer.Option("--cells", help="Show every cell, not a line a backend.")] = False,
    json: JsonFlag = False,
    verbose: VerboseFlag = False,
) -> int:
    """Show this machine, the backends and the plugins."""
    with files_stay():
        with only_results_on_stdout(verbose):
            found = collect_info()
        if json:
            print_json(found)
        else:
            from moereg.cli._show_info import show_cells, show_info

            (show_cells if cells else show_info)(found, machine_shown()[0])
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
    _check_ep(ep, way)
    if model_dir is not None:
        if layer is not None or reasons:
            option = "--reasons" if layer is None else "--layer"
            raise UsageError(
                f"{option} is about one layer and --model-dir about all of them; give --checkpoint {model_dir} for one"
            )
        return _explain_model_dir(flags, model_dir, checkpoint, json, verbose)
    if ep is not None:
        return _explain_group(flags, checkpoint, layer, ep, way, reasons, json, verbose)
    with only_results_on_stdout(verbose):
        subject = find_subject(flags, checkpoint, layer)  # A plugin's scheme loads the plugins, which may print.
        load_backends()  # A plugin's kind of platform is known once it is loaded.
        selection = subject.noted(explain_backends(subject.problem, flags.platform, **flags.request()))
        values = selection_with_evidence(selection) if json else {}
    if json:
        print_json(values)
    else:
        from moereg.cli._show import show_selection

        show_selection(selection, subject.name, all_reasons=reasons)
    return OK if selection.winner else NOTHING_FITS


def _check_ep(ep: int | None, way: str | None, checkpoint: Path | None = None) -> None:
    if way is not None and ep is None:
        raise UsageError("--way says how tokens move between ranks; say with --ep how many there are")
    if ep is not None and checkpoint is not None:
        raise UsageError("--ep builds random weights, and --checkpoint names others; leave one out")


def _explain_group(
    flags: ProblemFlags,
    checkpoint: Path | None,
    layer: int | None,
    ep: int,
    way: str | None,
    reasons: bool,
    json: bool,
    verbose: bool,
) -> int:
    from moereg.cli._ep import explain_group
    from moereg.cli._show_ep import show_ep_explanation

    with only_results_on_stdout(verbose):
        found = explain_group(flags, find_subject(flags, checkpoint, layer), ep, way)
        values = {**selection_with_evidence(found.selection), "ranks": ep, "movement": found.movement.to_dict()}
    if json:
        print_json(values)
    else:
        show_ep_explanation(found, reasons)
    return OK if found.fits else NOTHING_FITS


def _explain_model_dir(flags: ProblemFlags, model_dir: Path, checkpoint: Path | None, json: bool, verbose: bool) -> int:
    from moereg.cli._model_dir import explain_model_dir, show_model_choices

    if checkpoint is not None:
        raise UsageError("--checkpoint asks for one layer and --model-dir for all of them; leave one out")
    with only_results_on_stdout(verbose):
        choices = explain_model_dir(flags, model_dir)
        values = choices.to_dict() if json else {}
    if json:
        print_json(values)
    else:
        show_model_choices(choices)
    return OK if choices.fits else NOTHING_FITS


@takes_problem_flags
def run(
    flags: ProblemFlags,
    checkpoint: CheckpointOption = None,
    layer: LayerOption = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 2, help="Of weights, hidden states and routing.")] = 0,
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
            found = run_group(flags, ep, way, seed)
        return _tell_group(found, json)
    from moereg.cli._run import run_layer
    from moereg.cli._show_results import show_run

    with only_results_on_stdout(verbose):
        result = run_layer(flags, checkpoint, layer, seed)
    if json:
        print_json(result.to_dict())
    else:
        show_run(result)
    return code_of_verdict(result.passed)


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
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 2, help="Of weights, hidden states and routing.")] = 0,
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
    from moereg.cli._show_results import show_bench
    from moereg.tuning.timing import ROUNDS

    _check_ep(ep, way, checkpoint)
    token_counts = None if tokens is None else parse_counts(tokens)
    parts = (1,) if batches is None else parse_counts(batches, "--batches 1,2")
    if ep is not None:
        if plot is not None:
            raise UsageError("--plot draws backends, and --ep compares ways of moving tokens; leave one out")
        from moereg.cli._ep import bench_group

        with only_results_on_stdout(verbose):
            timed = ROUNDS if rounds is None else rounds
            found = bench_group(flags, ep, way, token_counts, routing, timed, seed, replicas, eager, parts)
        return _tell_group(found, json)
    of_ranks = {"--replicas": replicas is not None, "--batches": batches is not None, "--eager": eager}
    for name in (name for name, is_given in of_ranks.items() if is_given):
        raise UsageError(f"{name} is about ranks; say --ep, too")
    check_routing(routing)
    if plot is not None:
        check_can_plot(plot)
    with only_results_on_stdout(verbose):
        timed = ROUNDS if rounds is None else rounds
        result = bench_layer(flags, checkpoint, layer, token_counts, routing, timed, seed)
        # First, so that a disk that is full by now leaves nothing on standard output.
        if plot is not None and result.rows:
            write_plot(plot_bench, result, plot)
    if json:
        print_json(result.to_dict())
    else:
        show_bench(result)
    return code_of_verdict(result.passed)


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
    jobs: Annotated[int | None, typer.Option(min=1, help="Compilers at once; as memory allows if left out.")] = None,
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
            checked = _compile.check_cache(cache, flags.platform)
        print_json(checked.to_dict()) if json else print(checked)
        return OK
    with only_results_on_stdout(verbose):
        subject = find_subject(flags, checkpoint, layer)
        try:
            compiled = _compile.compile_layer(flags, subject, tokens, cache, jobs)
        except BackendError as error:
            print_error(str(error))
            return WRONG_NUMBERS
    if json:
        print_json(compiled.to_dict())
    elif compiled.refusal is None:
        print(compiled)
    if compiled.refusal is not None:
        print_error(compiled.refusal)
        return NOTHING_FITS
    return OK


def _tell_group(found: EpResult, json: bool) -> int:
    from moereg.cli._show_ep import show_ep

    if found.is_told:
        if json:
            print_json(found.to_dict())
        else:
            show_ep(found)
    return code_of_verdict(found.passed)


def models(json: JsonFlag = False, verbose: VerboseFlag = False) -> int:
    """List the models that --model knows, with their sizes."""
    from moereg.cli._names import list_models, show_models

    with only_results_on_stdout(verbose):
        found = list_models()
    if json:
        print_json(found)
    else:
        show_models()
    return OK


def schemes(platform: PlatformOption = None, json: JsonFlag = False, verbose: VerboseFlag = False) -> int:
    """List the schemes that --quant knows, and who runs each."""
    from moereg.cli._names import list_schemes, show_schemes

    with only_results_on_stdout(verbose):
        found, where = list_schemes(platform)
    if json:
        print_json(found)
    else:
        show_schemes(found, where)
    return OK
