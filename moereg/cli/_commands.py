"""The commands: their options and steps.

A command's computation and output are in separate modules, which may load torch; this one does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from moereg.cli._options import (
    COMMANDS,
    ProblemFlags,
    Shown,
    UsageError,
    argument,
    backend_name,
    backends_of,
    command,
    find_subject,
    option,
    schemes_of,
    seed_of,
)
from moereg.cli._output import BAD_INPUT, NOTHING_FITS, OK, WRONG_NUMBERS, code_of_verdict, print_error
from moereg.errors import BackendError
from moereg.selection.result import SCHEMA

__all__ = ["COMMANDS"]

if TYPE_CHECKING:
    from moereg.cli._bench import BenchResult, RunResult
    from moereg.cli._ep import EpResult
    from moereg.cli._quantize import QuantizeResult


@command(cells="Show every cell, not a line a backend.")
def info(cells: bool = False) -> Shown:
    """Show this machine, the backends and the plugins."""
    from moereg.cli._info import collect_info, show_info

    found = collect_info()
    return Shown(lambda: found, lambda: show_info(found, cells))


@command(imports=False)
def models() -> Shown:
    """List the models that --model knows, with their sizes."""
    from moereg.cli._info import list_models, show_models

    return Shown(list_models, show_models)


@command()
def schemes(platform: str | None = None) -> Shown:
    """List the schemes that --quant knows, and who runs each."""
    from moereg.cli._info import list_schemes, show_schemes

    found, where = list_schemes(platform)
    return Shown(lambda: found, lambda: show_schemes(found, where))


@command(
    model_dir="Every layer of the model of this directory's config.json, as transformers builds it.",
    reasons="Show every reason, not the first of a backend.",
)
def explain(
    flags: ProblemFlags,
    checkpoint: Path | None = None,
    layer: int | None = None,
    model_dir: Path | None = None,
    reasons: bool = False,
    ep: int | None = None,
    way: str | None = None,
    verbose: bool = False,
) -> Shown:
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
    found: Explanation | ModelChoices
    if model_dir is not None:
        found = ModelChoices.of(flags, model_dir)
    else:
        found = Explanation.of(flags, find_subject(flags, checkpoint, layer), ep, way)
    return Shown(found.to_dict, lambda: found.show(reasons or verbose), OK if found.fits else NOTHING_FITS)


def _check_ep(ep: int | None, way: str | None, checkpoint: Path | None = None) -> None:
    if way is not None and ep is None:
        raise UsageError("--way says how tokens move between ranks; say with --ep how many there are")
    if ep is not None and checkpoint is not None:
        raise UsageError("--ep builds random weights, and --checkpoint names others; leave one out")


def _measured(
    found: BenchResult | EpResult | QuantizeResult | RunResult, show: Callable[[], object] | None = None
) -> Shown:
    return Shown(found.to_dict, show or found.show, code_of_verdict(found.passed))


@command()
def run(
    flags: ProblemFlags,
    checkpoint: Path | None = None,
    layer: int | None = None,
    seed: int = 0,
    ep: int | None = None,
    way: str | None = None,
    verbose: bool = False,
) -> Shown | int:
    """Run one layer, check it against the reference, time it."""
    _check_ep(ep, way, checkpoint)
    if ep is not None:
        from moereg.cli._ep import run_group

        group = run_group(flags, ep, way, seed)
        return _measured(group) if group.is_printed else code_of_verdict(group.passed)
    from moereg.cli._bench import run_layer

    result = run_layer(flags, checkpoint, layer, seed)
    return _measured(result, lambda: result.show(verbose))


@command(
    tokens="Numbers of tokens, e.g. 1,16,64; 1 to 4096 on a GPU and 1 to 256 on a CPU if left out.",
    rounds=option("Timed calls of each backend, 48 if left out; fewer where they take a second.", min=1),
    replicas=option("With --ep: balance experts by the routing's loads, so many of them twice.", min=0),
    batches="With --ep: parts into which calls are cut, e.g. 1,2; 1 if left out.",
    eager="With --ep: capture nothing in CUDA graphs.",
)
def bench(
    flags: ProblemFlags,
    checkpoint: Path | None = None,
    layer: int | None = None,
    tokens: str | None = None,
    routing: str = "uniform",
    rounds: int | None = None,
    seed: int = 0,
    ep: int | None = None,
    way: str | None = None,
    replicas: int | None = None,
    batches: str | None = None,
    eager: bool = False,
    verbose: bool = False,
) -> Shown | int:
    """Compare all backends that fit: numbers first, then speed."""
    from moereg.cli._bench import bench_layer, check_routing, parse_counts
    from moereg.tuning.timing import ROUNDS

    _check_ep(ep, way, checkpoint)
    token_counts = None if tokens is None else parse_counts(tokens)
    parts = (1,) if batches is None else parse_counts(batches, "--batches 1,2")
    timed = ROUNDS if rounds is None else rounds
    if ep is not None:
        from moereg.cli._ep import bench_group

        group = bench_group(flags, ep, way, token_counts, routing, timed, seed, replicas, eager, parts)
        return _measured(group) if group.is_printed else code_of_verdict(group.passed)
    of_ranks = {"--replicas": replicas is not None, "--batches": batches is not None, "--eager": eager}
    for name in (name for name, is_given in of_ranks.items() if is_given):
        raise UsageError(f"{name} is about ranks; say --ep, too")
    check_routing(routing)
    result = bench_layer(flags, checkpoint, layer, token_counts, routing, timed, seed)
    return _measured(result, lambda: result.show(verbose))


@command(
    tokens="Most tokens of a call, of which all powers of two are measured, or a list; 8192, 512 on a CPU if left out.",
    routing="Routings that decide, of uniform,zipf; both if left out.",
    require=backends_of("Measure these backends alone."),
    prefer=backends_of("Measure these backends too, although they are opt-in."),
    seconds=option("Stop after so long; the same command goes on.", min=1),
    histogram="Calls by number of tokens in a JSON file, which weigh the choice; decades count alike if left out.",
    refresh="Measure again what was measured.",
    dry_run="Say what would be measured.",
)
def tune(
    flags: ProblemFlags,
    checkpoint: Path | None = None,
    layer: int | None = None,
    tokens: str | None = None,
    routing: str | None = None,
    require: list[str] | None = None,
    prefer: list[str] | None = None,
    seconds: float | None = None,
    histogram: Path | None = None,
    seed: int = 0,
    refresh: bool = False,
    dry_run: bool = False,
    verbose: bool = False,
) -> Shown | int:
    """Time a layer's backends here; layers get the fastest."""
    from moereg.cli._tune import parse_routings, parse_tokens, read_histogram, tune_layer
    from moereg.cli._tune_session import Question
    from moereg.measured.significance import ASKED

    flags = dataclasses.replace(flags, require=require, prefer=prefer)
    counts = () if tokens is None else parse_tokens(tokens)
    routings = ASKED if routing is None else parse_routings(routing)
    calls = None if histogram is None else read_histogram(histogram)
    question = Question(flags, checkpoint, layer, counts, routings, seed)
    try:
        result = tune_layer(question, seconds, refresh, dry_run, calls)
    except BackendError as error:
        print_error(str(error))
        return WRONG_NUMBERS
    return Shown(result.to_dict, lambda: result.show(verbose), result.code)


@command(
    checkpoint="The checkpoint, a directory or a name in the Hub's cache; it is only read.",
    layer="Compare on this layer, the first with experts if left out.",
    quant=schemes_of("Schemes to compare: int4_w4a16_g128 or a,b or int4_*; all that fit if left out."),
    tokens="Tokens of the timed calls; 1,64 if left out.",
    inputs="Real hidden states [T,H] by layer index, in a safetensors file; random ones if left out.",
    num_local_experts="Compare on so many experts alone.",
    platform="cpu, on a machine that has a GPU.",
    require=backends_of("Use one of these backends."),
    seed=seed_of("Of random hidden states."),
)
def quantize(
    checkpoint: Path,
    layer: int | None = None,
    quant: list[str] | None = None,
    tokens: str | None = None,
    inputs: Path | None = None,
    num_local_experts: int | None = None,
    platform: str | None = None,
    require: list[str] | None = None,
    prefer: list[str] | None = None,
    deny: list[str] | None = None,
    seed: int = 0,
) -> Shown:
    """Compare schemes on a checkpoint's layer."""
    from moereg.cli._bench import parse_counts
    from moereg.cli._quantize import DEFAULT_TOKENS, Question, compare_schemes, find_schemes, read_inputs

    question = Question(
        checkpoint,
        layer,
        find_schemes(quant or []),
        DEFAULT_TOKENS if tokens is None else parse_counts(tokens),
        read_inputs(inputs),
        seed,
    )
    flags = ProblemFlags(
        num_local_experts=num_local_experts, platform=platform, require=require, prefer=prefer, deny=deny
    )
    return _measured(compare_schemes(flags, question))


@command(
    imports=False,
    name=argument("Of the backend, as requests will spell it, e.g. my_kernel."),
    directory="Folder to write into, new or empty; moereg-NAME here if left out.",
)
def new_backend(name: str, directory: Path | None = None) -> Shown:
    """Write a wheel with one backend, to put a kernel into."""
    from moereg.cli._new_backend import show_wheel, write_wheel

    written = write_wheel(name, directory)
    return Shown(lambda: written, lambda: show_wheel(written))


@command(
    tokens="Numbers of tokens of a call, e.g. 1-512,1024; 1-16384 if left out.",
    cache="Folder to compile into, and to ship; Triton's own cache if left out.",
    check="Check that the folder serves this machine's Triton, and compile nothing.",
)
def compile(
    flags: ProblemFlags,
    checkpoint: Path | None = None,
    layer: int | None = None,
    tokens: str | None = None,
    cache: Path | None = None,
    jobs: int | None = None,
    check: bool = False,
) -> Shown | int:
    """Compile what a layer launches ahead of its first call."""
    from moereg.cli._compile import check_cache, compile_layer

    if check:
        found, line = check_cache(cache, flags.platform)
        return Shown(lambda: found, lambda: print(line))
    try:
        found, line, refusal = compile_layer(flags, find_subject(flags, checkpoint, layer), tokens, cache, jobs)
    except BackendError as error:
        print_error(str(error))
        return WRONG_NUMBERS
    if refusal is None:
        return Shown(lambda: found, lambda: print(line))
    print_error(refusal)
    return Shown(lambda: found, lambda: None, NOTHING_FITS)


@command(
    imports=False,
    name=backend_name("A backend, or a file that registers one, e.g. ./my_backend.py."),
    platform="Run as this machine, as its cpu, or as a platform that is imitated here.",
    isolate="Import and run the backend in a worker process alone.",
    seconds=option("Time for everything; layers are drawn until it is over.", min=1),
    check_seconds=option("Time for each check; 120, and 300 beside a GPU, if left out.", min=0.1),
    seed=seed_of("Of the drawn layers."),
    check="Run only checks whose id has this text, e.g. numbers, or that of a drawn layer's JSON.",
    ledger="Record in this file which cells passed everything on this machine.",
    quarantine="Reject what failed on this machine until its code or versions change.",
    unquarantine="Lift the backend's quarantine on this machine, and run nothing.",
)
def verify(
    name: str | None = None,
    module: list[str] | None = None,
    platform: str | None = None,
    isolate: bool = True,
    seconds: float | None = None,
    check_seconds: float | None = None,
    seed: int = 0,
    check: list[str] | None = None,
    ledger: Path | None = None,
    quarantine: bool = False,
    unquarantine: bool = False,
) -> Shown:
    """Run the conformance kit on one backend."""
    from moereg.cli._quarantine import lift_quarantine, quarantine_failures
    from moereg.cli._verify import Subject, check_ledger, record_verified, show_verify, verify_backend
    from moereg.evidence.quarantine import QUARANTINE
    from moereg.testing.suite import run_again

    if unquarantine:
        if name is None or quarantine:
            raise UsageError("--unquarantine takes a backend's name, and does not go with --quarantine; leave one out")
        lifted = lift_quarantine(name)
        return Shown(lambda: {"schema": SCHEMA, "quarantine": lifted.to_dict()}, lambda: print(lifted))
    if quarantine:
        QUARANTINE.change()  # Refuses an unwritable file before anything runs.
    subject = Subject(name, module or [])
    if ledger is not None:
        check_ledger(ledger, check or [])
    report = verify_backend(subject, platform, isolate, seconds, check_seconds, seed, check or [])
    recorded = () if ledger is None else record_verified(report, ledger, subject)
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
    return Shown(lambda: {**report.to_dict(), **quarantined}, show, code)
