"""Area: arguments and MOEREG_* of any content. Exit codes and streams keep to what `moereg --help` says of them."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import random
from typing import Any, Final
from unittest import mock

from moereg.cli import main
from tests.fuzz.area import Area
from tests.fuzz.hostile import draw_edit, draw_file_name, draw_text
from tests.fuzz.small_checkpoints import BASES, base, checkpoint_directory

# Stands in for the directory, which differs in each run.
_CHECKPOINT: Final = "{checkpoint}"
_SIZES: Final = ("2", "3", "7", "8", "16", "32", "64", "100")
_ODD_NUMBERS: Final = (
    "", " ", "-1", "-0", "+1", "1.0", "1e3", "0x10", "1_0", "\u0663", "nan", "inf", "None", "99999999",
    "1" + "0" * 30, str(2**31), str(2**63 - 1), str(2**63), str(2**64), "1" * 5000,
)  # fmt: skip
_LISTS: Final = (
    "torch", "triton", "a", "torch,triton", "unquantized=torch", "=", ",", "a=b=c", "*", "torch=", "fp8_block128=x",
)  # fmt: skip
_VALUES: Final[dict[str, tuple[str, ...]]] = {
    "--model": ("qwen3-30b-a3b", "mixtral-8x7b", "deepseek-v3", "gpt-oss-20b", "qwen3"),
    "--experts": _SIZES,
    "--hidden": _SIZES,
    "--intermediate": _SIZES,
    "--top-k": ("1", "1", "2", "3"),
    "--quant": ("unquantized", "fp8_block128", "int4_w4a16_g32", "nvfp4", "mxfp4_w4a16", "int8_w8a8", "fp9"),
    "--dtype": ("bfloat16", "float16", "float32", "bf16", "float64", "int8"),
    "--activation": (
        "silu", "gelu", "gelu_tanh", "swigluoai", "relu2", "silu(limit=1e999)", "silu(alpha=nan)", "silu(",
    ),
    "--swiglu-limit": ("7", "0", "-1", "1e-30", "1e308"),
    "--activation-format": ("standard", "batched", "other"),
    "--num-local-experts": _SIZES,
    "--tokens": ("0", "1", "2", "16", "-1"),
    "--platform": (
        "cpu", "cuda:sm90", "cuda:sm100", "cuda", "rocm:gfx942", "cpu:x", "cuda:sm0", "tpu", ":", "cuda:", "h100",
    ),
    "--require": _LISTS,
    "--prefer": _LISTS,
    "--deny": _LISTS,
    "--seed": ("0", "1", str(2**63 - 2)),
    "--rounds": ("1", "2", "0"),
    "--layer": ("0", "1", "2", "-1"),
    "--checkpoint": (_CHECKPOINT, _CHECKPOINT, _CHECKPOINT, "/dev/null", "~nosuchuser/x", "/", "."),
    "--routing": ("uniform", "zipf", "one_set", "other"),
}  # fmt: skip
_FLAGS: Final = (
    "-v", "--bias", "--no-bias", "--graph-capture", "--deterministic", "--reasons", "--cells", "-h",
    "--exact-activations", "--router-weight-on-input", "--help", "--version", "--", "-", "-x", "--jso", "\x1b[31m",
)  # fmt: skip
_SIZED: Final = ("--experts", "--hidden", "--intermediate", "--top-k")
_COMMANDS: Final = (
    ("explain",) * 6
    + ("run",) * 4
    + ("bench", "info", "info", "models", "schemes")
    + ("verify", "new-backend", "nothing", "")
)
_SHARED: Final = tuple(_VALUES)[:16]
_RUN: Final = (*_SHARED, "--seed")
_OPTIONS: Final = {
    "explain": (*_SHARED, "--layer"),
    "schemes": ("--platform",),
    "run": (*_RUN, "--layer"),
    "bench": (*_RUN, "--rounds", "--routing"),
}
_VARIABLES: Final = ("MOEREG_REQUIRE", "MOEREG_PREFER", "MOEREG_DENY", "MOEREG_PLUGINS", "MOEREG_DEBUG")
# Largest layers that are run; explain answers for any.
_LARGEST_RUN: Final = 4_000_000


def _draw(rng: random.Random) -> dict[str, Any]:
    command = rng.choice(_COMMANDS)
    case: dict[str, Any] = {"arguments": [], "variables": {}}
    known = list(_VALUES) if rng.random() < 0.1 else _OPTIONS.get(command, ())
    options = [name for name in known if rng.random() < 0.1]
    if command in ("explain", "run", "bench"):
        kind = rng.random()
        if kind < 0.75:
            options += _SIZED
        elif command == "run":
            options = [*(name for name in options if name not in _SIZED and name != "--model"), "--checkpoint"]
        elif command == "explain":
            options.append("--model")
    arguments = [command]
    for name in dict.fromkeys(options):
        arguments += [name, _draw_argument(rng, name)]
    arguments += [flag for flag in _FLAGS if rng.random() < 0.03]
    if rng.random() < 0.5:
        arguments.append("--json")
    if "--checkpoint" in options:
        case["base"] = name = rng.choice(BASES)
        if rng.random() < 0.2:
            case["directory"] = draw_file_name(rng)
        if rng.random() < 0.6:
            case["config"] = [draw_edit(rng, base(name).config)]
    if command in ("run", "bench") and not _is_small(arguments):
        # These commands are for large layers, so one that fits may take its time.
        arguments[0] = "explain"
    if rng.random() < 0.1:
        rng.shuffle(arguments)
    if rng.random() < 0.3:
        variable = rng.choice(_VARIABLES)
        case["variables"][variable] = rng.choice(_LISTS) if rng.random() < 0.5 else _passable(draw_text(rng))
    case["arguments"] = arguments
    return case


def _draw_argument(rng: random.Random, name: str) -> str:
    kind = rng.random()
    if kind < 0.93:
        return rng.choice(_VALUES[name])
    return rng.choice(_ODD_NUMBERS) if kind < 0.97 else _passable(draw_text(rng))


def _passable(text: str) -> str:
    """A text as a process can get it: without NUL, and with non-UTF-8 bytes as Python passes them."""
    return text.replace("\0", "").encode("utf-8", "replace").decode() if "\ud800" not in text else "\udcff"


def _is_small(arguments: list[str]) -> bool:
    given = dict(itertools.pairwise(arguments))
    if "--model" in given:
        return False
    product = 3
    for name in ("--experts", "--hidden", "--intermediate"):
        value = given.get(name, "1")
        if not value.isascii() or not value.isdigit():
            return True  # Refused, or read as a small number.
        product *= int(value[:30])
    return product < _LARGEST_RUN


def _check(case: dict[str, Any]) -> str | None:
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(checkpoint_directory(case)) if "base" in case else "/nowhere"
        arguments = [str(directory) if text == _CHECKPOINT else text for text in case["arguments"]]
        variables = {name: text for name, text in os.environ.items() if name not in _VARIABLES} | case["variables"]
        stack.enter_context(mock.patch.dict(os.environ, variables, clear=True))
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
        texts = []
        for stream in (out, err):
            stream.flush()
            texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    return broken_promise(set(arguments), code, *texts)


def broken_promise(arguments: set[str], code: int, out: str, err: str) -> str | None:
    """The promise of the command line that an exit code and two streams break, or None."""
    found = f"exit {code}, standard output {out[-300:]!r}, standard error {err[-300:]!r}"
    if code not in (0, 1, 2, 3):
        return f"an exit code that no input may have: {found}"
    for text in (out, err):
        if not text.replace("\n", "").isprintable():
            return f"control characters: {found}"
    is_verbose = bool(arguments & {"-v", "--verbose"})
    errors = [line for line in err.splitlines() if not line.startswith("moereg: warning: ")]
    if code == 2 and (out or not (err.endswith("\n") and (is_verbose or len(errors) == 1))):
        return f"not one line of an error: {found}"
    if "--json" in arguments and code != 2 and not arguments & {"-h", "--help", "--version"}:
        if out.count("\n") != 1:
            return f"not one line of JSON: {found}"
        try:
            values = json.loads(out, parse_constant=lambda text: text.missing)
        except (ValueError, AttributeError):
            return f"no JSON: {found}"
        if not isinstance(values, dict):
            return f"no JSON object: {found}"
    return None


AREA = Area("command_line", _draw, _check, share=0.2, smoke=12, limit_s=20.0)
