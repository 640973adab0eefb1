"""`moereg compare`: what moereg gains on a user's own transformers model."""

from __future__ import annotations

import importlib.util
import math
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from rich.text import Text

from moereg._version import __version__
from moereg.checkpoints._files import CheckpointFiles
from moereg.cli._options import UsageError
from moereg.cli._output import Result, code_of_verdict
from moereg.cli._progress import phase
from moereg.cli._show import bad, good, new_table, print_notices, say
from moereg.cli._whole_model import EAGER, OURS, PREPARED, Case, WholeModel, forget, implementations
from moereg.cli._whole_model_page import Bar, draw_bars, html_page
from moereg.errors import (
    ArgumentError,
    TooLargeError,
    UnknownNameError,
    described,
    is_lack_of_memory,
    one_line,
    shown,
    unknown_name_message,
)
from moereg.evidence.provenance import clocks, provenance
from moereg.integrations._experts.blocks import find_experts
from moereg.integrations._experts.meta import auto_class, model_on_meta
from moereg.integrations.transformers import restore
from moereg.platforms import probe_cpu, probe_platform
from moereg.runtime.memory import format_bytes, free_memory_bytes
from moereg.selection.result import SCHEMA

_TIE: Final = 1.03
"""The noise between processes: within it neither is faster."""
_NOISY: Final = 2.0
"""The 90th over the 10th percentile of a case from which its times say little."""
_HOW: Final = {
    OURS: 'moereg.integrations.transformers.register(), and experts_implementation="moereg"',
    PREPARED: "moereg.integrations.transformers.prepare(model)",
}


@torch.no_grad()
def compare_model(
    name: str,
    tokens: tuple[int, int],
    batch: Sequence[int],
    wanted: Sequence[str] | None,
    seconds: float,
    html: Path | None,
    device_type: str | None,
    **loading: Any,
) -> Result:
    """Loads a model, measures it with each experts implementation, and says what to use.

    Args:
        name: A folder, or a name in the Hub's local cache.
        tokens: Of each prompt, and new ones.
        batch: Numbers of sequences.
        wanted: Implementations; None for all.
        seconds: Of one median.
        html: File for the page.
        device_type: cpu or cuda; None for a GPU if there is one.
        loading: Arguments of `load`.
    """
    # Nothing is downloaded: kernels of the Hub run where its cache has them.
    os.environ["HF_HUB_OFFLINE"] = "1"
    device = torch.device(device_type or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda needs a GPU that torch sees, and there is none; pass --device cpu")
    if html is not None and not os.access(html if html.is_file() else html.parent, os.W_OK):
        raise UsageError(f"--html must name a file in a folder that can be written to, got {shown(str(html))}")
    model, notices = load(name, device, wanted or (), **loading)
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    platform = probe_cpu() if device.type == "cpu" else probe_platform()
    record: dict[str, Any] = {
        **{"schema": SCHEMA, "model": one_line(name), "random_weights": loading["random_weights"]},
        **provenance(platform, ("torch", "triton")),
        **{"dtype": str(model.dtype).removeprefix("torch."), "prompt_tokens": tokens[0], "new_tokens": tokens[1]},
        **{"rows": [], "generated": {}, "layers_chosen": [], "notices": notices},
    }
    record["versions"] |= {"transformers": transformers.__version__, "moereg": __version__}
    try:
        with phase("computing logits in fp32"):
            whole = WholeModel(model, device, record)
    except Exception as error:
        if is_lack_of_memory(error) or isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"compare needs a model whose own code computes logits of token ids here, got {type(model).__name__}: "
            f"{one_line(described(error))}; give another model"
        ) from error
    modes = ("eager", "graph") if device.type == "cuda" else ("eager",)
    cases = [Case("prefill", "eager", size, tokens[0]) for size in batch]
    cases += [Case("decode", mode, size, tokens[0]) for mode in modes for size in batch]
    for group in _groups(whole, [each for each in whole.names if wanted is None or each in wanted]):
        whole.names = group
        whole.check(phase)
        for each in whole.names:
            with phase(f"generating with {_label(each)}"):
                whole.use(each)
                record["generated"][each] = whole.generate(*tokens)
        for case in cases:
            with phase(f"timing {_name_of(vars(case))}"):
                whole.measure(case, seconds)
    if record["control"]["norm"] <= record["bound"]:
        notices.append("logits say little here, since experts that return zeros pass too: the check by layer decides")
    record |= {**clocks(platform), "verdict": verdict_of(record["rows"])}
    if html is not None:
        html.write_text(page_of(record), encoding="utf-8")
    ours = [row for row in record["rows"] if row["implementation"] in _HOW]
    checks = [check for each, check in record["checks"].items() if each in _HOW and "outcome" not in check]
    wrong = any(str(row.get("outcome")).startswith("wrong") for row in ours) or not all(one["passed"] for one in checks)
    timed = any("ms" in row for row in ours)
    return Result(record, lambda: show(record), code_of_verdict(False if wrong else True if timed else None))


def load(
    name: str,
    device: torch.device,
    wanted: Sequence[str],
    random_weights: bool = False,
    layers: int | None = None,
    dtype: str | None = None,
) -> tuple[Any, list[str]]:
    """The model on a device with eager experts, and notices. No code of its repository runs.

    Raises:
        CheckpointError: It is neither a folder nor in the Hub's local cache.
        UnknownNameError: It has no such implementation.
        ArgumentError: transformers does not know or load it, or it has no experts.
        TooLargeError: Its weights do not fit.
    """
    if layers is not None and not random_weights:
        raise UsageError("--layers takes a part of a model, which needs --random-weights; leave it out or add that")
    with CheckpointFiles(name) as files:
        folder = files.path
    meta: Any = model_on_meta(folder, layers)
    auto: Any = auto_class(meta.config)
    experts = [each.module for each in find_experts(meta)]
    if not experts:
        cure = "moereg runs nothing else" if layers is None else f"raise --layers, which is {layers}"
        raise ArgumentError(
            f"{shown(name)} must be a Mixture-of-Experts model, got {type(meta).__name__}, without routed experts; "
            f"{cure}"
        )
    known = implementations(experts)
    if wanted and not {OURS, PREPARED} & {*wanted}:
        raise UsageError(f"--implementations must name {OURS} or {PREPARED} beside others, got {','.join(wanted)}")
    for each in wanted:
        if each not in known:
            raise UnknownNameError(unknown_name_message("implementation", each, known))
    values: dict[str, Any] = {"dtype": dtype and getattr(torch, dtype), "experts_implementation": EAGER}
    shards = list(folder.glob("model*.safetensors"))
    if random_weights:
        own = getattr(meta.config, "dtype", None)
        values["dtype"] = values["dtype"] or (own if isinstance(own, torch.dtype) else torch.bfloat16)
    elif not shards:
        raise ArgumentError(f"{str(folder)!r} must have safetensors, got none; add --random-weights to do without")
    need = sum(shard.stat().st_size for shard in shards)
    if values["dtype"] and (random_weights or not meta._moereg_quantization):
        need = sum(parameter.numel() for parameter in meta.parameters()) * values["dtype"].itemsize
    free = free_memory_bytes(device)
    if free is not None and need > free:
        raise TooLargeError(
            f"the weights take {format_bytes(need)}, over the {format_bytes(free)} free on {device}; "
            "--random-weights --layers N takes a part of the model"
        )
    try:
        with phase("making random weights" if random_weights else "loading weights"):
            if random_weights:
                torch.manual_seed(0)
                with device:
                    model = auto.from_config(meta.config, **values).eval()
                quantized = "random weights are not quantized, as the model's own are"
                return model, [quantized] if meta._moereg_quantization else []
            if importlib.util.find_spec("accelerate"):  # It reads onto the device at once.
                values["device_map"] = str(device)
            safe = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
            values["dtype"] = values["dtype"] or "auto"
            return auto.from_pretrained(folder, **values, **safe).to(device).eval(), []
    except Exception as error:
        if is_lack_of_memory(error):
            raise
        raise ArgumentError(f"transformers must load {shown(name)}, got {one_line(described(error))}") from error


def _groups(whole: WholeModel, names: list[str]) -> Iterator[list[str]]:
    """Implementations that take turns; the prepared one comes alone if its copy does not fit beside the weights."""
    lacked = False
    if PREPARED in names:
        try:
            with phase("preparing"):
                whole.record["layers_chosen"] = str(whole.prepare()).splitlines()
        except Exception as error:
            lacked = is_lack_of_memory(error)
            if not lacked:
                whole.record["checks"][PREPARED] = {"passed": False, "outcome": one_line(str(error))[:300]}
            forget(error)
            restore(whole.model)
            names = [name for name in names if name != PREPARED]
    yield names
    made = whole.record.get("prepare")
    if lacked or (made and made["bytes_after"] > made["bytes_before"]):
        try:
            with phase("preparing with free=True"):
                prepared = whole.prepare(free=True)
        except Exception as error:
            whole.record["notices"].append(f"prepare(model, free=True) failed: {one_line(str(error))[:300]}")
            return
        if lacked:
            whole.record["layers_chosen"] = str(prepared).splitlines()
            whole.record["notices"].append("moereg prepared ran after the others, with free=True: no room for a copy")
            yield [PREPARED]


def _label(name: str) -> str:
    return name.replace("_prepared", " prepared")


def _name_of(case: Mapping[str, Any]) -> str:
    """Such as `prefill, 1 x 512` or `decode, batch 16, graph`."""
    size = f"{case['batch']} x {case['tokens']:,}" if case["phase"] == "prefill" else f"batch {case['batch']}"
    return f"{case['phase']}, {size}" + (", graph" if case["mode"] == "graph" else "")


def _timed(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Mapping[str, Any]]]:
    """Rows with a time, by case and by implementation."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if "ms" in row:
            found.setdefault(_name_of(row), {})[row["implementation"]] = row
    return found


def verdict_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The verdict: `implementation` to use, None if moereg has no time, `lines`, `over_best_other` and `cases`.

    A prepared model costs memory and time, so it must beat a registered one by more than the noise.
    """
    # What is wrong at one number of tokens is recommended for none.
    wrong = {row["implementation"] for row in rows if str(row.get("outcome")).startswith("wrong")}
    cases = _timed([row for row in rows if row["implementation"] not in wrong])
    pairs = [_gain(each[PREPARED], each[OURS])[1] for each in cases.values() if {PREPARED, OURS} <= {*each}]
    present = {name for each in cases.values() for name in each}
    ours = OURS if OURS in present and (not pairs or _mean(pairs) <= _TIE) else PREPARED
    if ours not in present:
        return {"implementation": None, "lines": ["moereg has no time here, for the reasons given"], "cases": []}
    lines, found, gains = [], [], []
    for name, each in cases.items():
        others = {other: row for other, row in each.items() if other not in _HOW}
        if ours not in each or not others:
            continue
        best = min(others, key=lambda other: others[other]["ms"])
        texts = []
        for other in dict.fromkeys([*({EAGER} & {*others}), best]):
            ratio, counted = _gain(each[ours], others[other])
            is_tie = 1 / _TIE <= ratio <= _TIE
            texts.append(f"{ratio:.2f}x {other}" + (" (a tie)" if is_tie else " (within the noise)") * (counted == 1))
        gains.append(counted)
        over_eager = _gain(each[ours], others[EAGER])[0] if EAGER in others else None
        found.append({"case": name, "best_other": best, "over_best_other": ratio, "over_eager": over_eager})
        lines.append(f"{name}: {_label(ours)} {', '.join(texts)}, the best other")
    overall = _mean(gains) if gains else math.nan
    use = f"use: {_HOW[ours]}"
    noise = max(row["p90_ms"] / row["p10_ms"] for each in cases.values() for row in each.values())
    if noise > _NOISY:
        lines.append(
            f"times of one case vary up to {noise:.1f} times: the machine is busy; compare again before you decide, on "
            "a CPU with OMP_NUM_THREADS set to its free cores"
        )
    if overall < 1 / _TIE:
        stay = min(
            (name for name in present if name not in _HOW),
            key=lambda name: _mean([each[name]["ms"] if name in each else math.inf for each in cases.values()]),
        )
        use = f"on average {overall:.2f}x the best other: stay with model.set_experts_implementation({stay!r})"
    elif overall <= _TIE:
        use = f"on average a tie with the best other, so nothing is gained; {use}"
    return {"implementation": ours, "lines": [*lines, use], "over_best_other": overall, "cases": found}


def _gain(row: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float]:
    """Speed over another's, and the same with 1 for a tie: within the noise, or each median in the other's spread."""
    ratio = other["ms"] / row["ms"]
    inside = row["p10_ms"] <= other["ms"] <= row["p90_ms"] and other["p10_ms"] <= row["ms"] <= other["p90_ms"]
    return ratio, 1.0 if inside or 1 / _TIE <= ratio <= _TIE else ratio


def _speed(row: Mapping[str, Any]) -> str:
    speed: float = row["tokens_per_s"]
    return f"{speed:,.{0 if speed >= 100 else 1}f}"


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


_HEAD: Final = ("", "tokens/s", "ms", "p10 to p90", "over eager")


def _times(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for case, found in _timed(record["rows"]).items():
        rows.append((case, "", "", "", ""))
        for name, row in found.items():
            over = f"{_gain(row, found[EAGER])[0]:.2f}x" if EAGER in found else ""
            spread = f"{row['p10_ms']:.2f} to {row['p90_ms']:.2f}"
            rows.append((f"  {_label(name)}", _speed(row), f"{row['ms']:.2f}", spread, over))
    return rows


def _reasons(record: Mapping[str, Any]) -> list[str]:
    """Reasons of all that has no time."""
    found = []
    for name, check in record["checks"].items():
        if "outcome" in check:
            found.append(f"{_label(name)} did not run: {check['outcome']}")
        elif not check["passed"]:
            logits = f"logits {check['norm']:.2g} (bound {record['bound']:.2g})"
            layers = f"experts {check['layers']:.2g} (bound {record['layer_bound']:.2g})"
            found.append(f"{_label(name)} is WRONG: {logits}, {layers} from {record['reference']}")
    rows = [row for row in record["rows"] if "ms" not in row]
    return found + [f"{_label(row['implementation'])}, {_name_of(row)}: {row['outcome']}" for row in rows]


def _facts(record: Mapping[str, Any]) -> dict[str, list[str]]:
    """Lines about memory, tokens, the check and the machine, by heading."""
    extra: dict[str, int] = {}
    for row in record["rows"]:
        extra[row["implementation"]] = max(extra.get(row["implementation"], 0), row.get("extra_bytes", 0))
    sizes = {"weights and kernels": record["held_bytes"], "peak memory beyond these": extra}
    memory = [
        f"{what}: {', '.join(f'{_label(name)} {format_bytes(size)}' for name, size in most.items())}"
        for what, most in sizes.items()
        if any(most.values())
    ]
    if "prepare_free" in record:
        memory.append(f"prepare(model, free=True): {format_bytes(record['prepare_free']['bytes_after'])}")
    first = record["generated"].get(EAGER) or []
    # Rounding alone may change one token, and with it all behind it.
    same = [
        f"{_label(name)} {[*map(operator.eq, found, first), False].index(False)}"
        for name, found in record["generated"].items()
        if found and first and name != EAGER
    ]
    tokens = (
        [f"greedy tokens equal to eager's before the first difference, of {len(first)}: {', '.join(same)}"]
        if same
        else []
    )
    ran = {_label(name): check for name, check in record["checks"].items() if "norm" in check}
    checks = [
        f"distance of {what} from {record['reference']}, at most {record[bound]:.2g}: "
        + ", ".join(f"{name} {check[key]:.2g}" for name, check in ran.items())
        for what, key, bound in (("logits", "norm", "bound"), ("any layer's experts", "layers", "layer_bound"))
    ]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    weights = "random weights" if record["random_weights"] else "its own weights"
    where = f"{record['layers']} MoE layers in {record['dtype']}, {weights}; {record['device']}, {versions}"
    return {"Memory": memory, "Tokens": tokens, "Check": checks, "Where": [where, record["date"]]}


def show(record: Mapping[str, Any]) -> None:
    """Prints the comparison, the verdict last."""
    facts = _facts(record)
    say(f"{record['model']}: {facts['Where'][0]}", *record["layers_chosen"])
    rows = _times(record)
    say(new_table(*(f">{name}" if name else name for name in _HEAD), rows=rows))
    say("prefill time is the time to the first token", *map(bad, _reasons(record)))
    say(*facts["Memory"], *facts["Tokens"])
    print_notices(record["notices"])
    verdict = record["verdict"]
    say(*(good(line) if verdict["implementation"] else Text(line) for line in verdict["lines"]))


def page_of(record: Mapping[str, Any]) -> str:
    """The page of one model, which asks no host for anything."""
    groups: dict[str, dict[str, Bar]] = {}
    bases: dict[tuple[str, int], float] = {}
    for case, found in _timed(record["rows"]).items():
        first = next(iter(found.values()))
        # Steps in a graph are shown over eager's plain ones, which come before them.
        base = bases.setdefault((first["phase"], first["batch"]), first["ms"])
        groups[case] = {
            name: Bar(base / row["ms"], base / row["p90_ms"], base / row["p10_ms"], _speed(row))
            for name, row in found.items()
        }
    labels = {name: _label(name) for found in groups.values() for name in found}
    title = f"Speed over {next(iter(labels.values()), EAGER)}, with p10 to p90; above the bars tokens a second"
    lines = {
        "Not timed": _reasons(record),
        "Layers": record["layers_chosen"],
        **_facts(record),
        "Notes": record["notices"],
    }
    tables = {heading: [[line] for line in found] for heading, found in lines.items() if found}
    name = Path(record["model"]).name
    picture = draw_bars({name: groups}, labels, title)
    return html_page(
        f"moereg compare {name}", record["verdict"]["lines"], picture, {"Times": [_HEAD, *_times(record)], **tables}
    )
