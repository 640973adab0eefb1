"""`moereg compile`: compiles what a layer launches before its first call, maybe on another machine."""

from __future__ import annotations

from pathlib import Path

from moereg.cli._options import ProblemFlags, Subject, UsageError
from moereg.cli._output import NOTHING_FITS, OK, Result, print_error
from moereg.dispatch import explain_backends
from moereg.layer.warm_up import check_shipped, check_token_counts, compile_ahead
from moereg.platforms import Platform, current_platform
from moereg.selection.loader import load_backends
from moereg.selection.result import SCHEMA


def compile_layer(
    flags: ProblemFlags, subject: Subject, tokens: str | None, cache: Path | None, jobs: int | None
) -> Result:
    """Compiles what a layer launches; takes the options' values by name."""
    counts = check_token_counts(None if tokens is None else parse_ranges(tokens), subject.problem.max_num_tokens)
    load_backends()  # A plugin's platforms are known once it is loaded.
    selection = explain_backends(subject.problem, flags.platform, **flags.request())
    winner = selection.winner
    result = None if winner is None else compile_ahead(selection, counts, cache, jobs)
    done = {} if result is None else result.to_dict()
    values = {
        "schema": SCHEMA,
        "problem": selection.problem.to_dict(),
        "platform": str(selection.platform),
        "experts": None if winner is None else winner.experts,
        "backend": selection.backend,
        **{"token_counts": None, "kernels": [], "num_compiled": 0, "seconds": 0.0, "cache": None},
        **done,
        "notes": [*subject.notices, *done.get("notes", ())],
    }
    if result is None or not result.kernels:
        print_error(selection.refusal if result is None else result.notes[0])
        return Result(values, lambda: None, NOTHING_FITS)
    return Result(values, lambda: print(result, *subject.notices, sep="\n"), OK)


def parse_ranges(text: str) -> list[int]:
    """Parses numbers such as `--tokens 1-512,1024`."""
    found: list[int] = []
    for word in text.split(","):
        ends = [end.strip() for end in word.split("-")]
        if not 1 <= len(ends) <= 2 or not all(end.isdecimal() and int(end) for end in ends):
            raise UsageError(f"--tokens takes numbers of at least 1 and ranges such as 1-512,1024, got {text!r}")
        first, last = int(ends[0]), int(ends[-1])
        if first > last or last - first >= 2**20:
            raise UsageError(f"--tokens takes ranges of at most 2**20 numbers that ascend, got {word.strip()!r}")
        found += range(first, last + 1)
    return found


def check_cache(folder: Path | None, platform: str | None) -> Result:
    """Checks a folder of compiled kernels (`--cache`), and rewrites its paths if it was moved."""
    if folder is None:
        raise UsageError("--check needs --cache, the folder to check")
    load_backends()
    target = current_platform() if platform is None else Platform.from_name(platform)
    place = folder.expanduser().absolute()
    note = check_shipped(place, target)
    if note is None:
        raise UsageError(f"--check takes a folder that moereg compile --cache has filled, got {folder}")
    found = [layer for layer in note["layers"] if layer["platform"] == str(target)]
    made = sum(layer["num_kernels"] for layer in found)
    layers = [{name: value for name, value in layer.items() if name != "facts"} for layer in found]
    values = {"schema": SCHEMA, "platform": str(target), "cache": str(place), "layers": layers}
    return Result(values, lambda: print(f"{place} serves {target}: {len(layers)} layers, {made} kernels"))
