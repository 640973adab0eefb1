"""Request and result of `moereg quantize`."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from moereg.checkpoints import SavedCheckpoint
from moereg.cli._options import UsageError
from moereg.discovery import find_scheme
from moereg.errors import one_line, shown
from moereg.platforms import Platform
from moereg.problem import MoEProblem
from moereg.quant import QUANT_SCHEMES, QuantScheme
from moereg.selection import SCHEMA, Decision, Selection, nearest_by_backend
from moereg.tuning.compare import Measurement

__all__ = ["QuantizeResult", "Question", "SchemeRow", "find_schemes", "read_inputs"]


@dataclasses.dataclass(frozen=True)
class Question:
    """The request.

    Attributes:
        checkpoint: Directory.
        layer: Index in the whole model; the first with experts where None.
        schemes: To compare.
        token_counts: Of the calls that are timed, ascending.
        inputs: By layer, [T,H]: real inputs; random ones where a layer has none.
        seed: Of random inputs.
        out: Directory of the copy; None for none.
        is_one_layer: Whether the copy has this layer alone quantized, instead of all.
    """

    checkpoint: Path
    layer: int | None
    schemes: tuple[QuantScheme, ...]
    token_counts: tuple[int, ...]
    inputs: Mapping[int, torch.Tensor]
    seed: int
    out: Path | None
    is_one_layer: bool


@dataclasses.dataclass(frozen=True)
class SchemeRow:
    """One scheme, or the original.

    Attributes:
        quant: The scheme's name.
        decision: The backend that a layer gets.
        num_bytes: Of the layer's canonical weights.
        bits: Of a weight, with its share of scales and zero points.
        weights_error: Of the restored weights against the original ones.
        output_error: Of the layer's output, as the scheme defines it, against the original's in fp32.
        measured: By number of tokens, as in the question.
        original_us: Times of the original, taken beside these; NaN where it has none.
    """

    quant: str
    decision: Decision
    num_bytes: int
    bits: float
    weights_error: float
    output_error: float
    measured: tuple[Measurement, ...]
    original_us: tuple[float, ...]

    @property
    def passed(self) -> bool:
        """Whether the backend ran and its numbers are the scheme's."""
        return all(row.passed for row in self.measured)

    def to_dict(self) -> dict[str, Any]:
        """One row of `moereg quantize --json`."""
        return {
            "quant": self.quant,
            "computes": self.decision.computes,
            "backend": self.decision.backend,
            "experts": self.decision.experts,
            "tier": self.decision.tier,
            "bytes": self.num_bytes,
            "bits": self.bits,
            "weights_error": self.weights_error,
            "output_error": self.output_error,
            "passed": self.passed,
            "times": [
                {
                    "tokens": row.num_tokens,
                    "time_us": row.time_us,
                    "original_us": original_us,
                    "speedup": original_us / row.time_us,
                    "relative_error": row.relative_error,
                    "tolerance": row.tolerance,
                    "passed": row.passed,
                    "failure": row.failure or None,
                    "damage": row.damage or None,
                }
                for row, original_us in zip(self.measured, self.original_us, strict=True)
            ],
        }


@dataclasses.dataclass(frozen=True)
class QuantizeResult:
    """The result; `original` is None if nothing fitted.

    Attributes:
        question: What was asked, with the layer's index.
        subject: The layer, to show.
        problem: The layer as it is stored.
        platform: This machine.
        measured_on: `device`, `versions`, `commit` and `date`, among others.
        inputs: `random` or `given`.
        original: The layer as it is stored.
        rows: In the question's order, but for what does not fit.
        skipped: Name and nearest candidate of each scheme that nothing here computes.
        saved: The copy that was written.
        read_back: Whether this layer of the copy was read and had the same bits.
    """

    question: Question
    subject: str
    problem: MoEProblem
    platform: Platform
    measured_on: Mapping[str, Any]
    inputs: str
    original: SchemeRow | None = None
    rows: tuple[SchemeRow, ...] = ()
    skipped: tuple[tuple[str, Selection], ...] = ()
    saved: SavedCheckpoint | None = None
    read_back: bool | None = None

    @property
    def passed(self) -> bool | None:
        """Whether everything that ran was right, what was written included; None if nothing fitted."""
        if not self.rows or self.original is None:
            return None
        return all(row.passed for row in (self.original, *self.rows)) and self.read_back is not False

    def unbeaten(self) -> tuple[SchemeRow, ...]:
        """Rows that no other one beats in size, error and time at once; wrong ones and emulations are none."""

        def values(row: SchemeRow) -> tuple[float, ...]:
            return (row.num_bytes, row.output_error, row.measured[-1].time_us)

        rows = [row for row in self.rows if row.passed and row.decision.tier == "kernel"]
        return tuple(
            row
            for row in rows
            if not any(
                values(other) != values(row)
                and all(mine >= theirs for mine, theirs in zip(values(row), values(other), strict=True))
                for other in rows
            )
        )

    def to_dict(self) -> dict[str, Any]:
        """The object that `moereg quantize --json` prints."""
        saved = self.saved
        return {
            "schema": SCHEMA,
            "checkpoint": str(self.question.checkpoint),
            "layer": self.question.layer,
            "problem": self.problem.to_dict(),
            "platform": str(self.platform),
            **{name: self.measured_on[name] for name in ("device", "versions", "commit", "date")},
            "inputs": self.inputs,
            "original": None if self.original is None else self.original.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
            "unbeaten": [row.quant for row in self.unbeaten()],
            "skipped": [
                {"quant": name, "reasons": nearest_by_backend(selection.decisions)[0].to_dict()["reasons"]}
                for name, selection in self.skipped
            ],
            "out": None
            if saved is None
            else {
                "path": str(saved.path),
                "quant": saved.quant.name,
                "layers": list(saved.layers),
                "bytes": saved.num_bytes,
                "read_back": self.read_back,
            },
        }


def find_schemes(words: Sequence[str]) -> tuple[QuantScheme, ...]:
    """The schemes of `--quant`: names, and stars as in `int4_*`; all that moereg names if there is no word.

    Raises:
        UnknownSchemeError: A name is not known.
        UsageError: A pattern matches none, or a scheme has nothing to quantize to.
    """
    known = {name: scheme for name, scheme in QUANT_SCHEMES.items() if scheme.weight is not None}
    names = [name.strip() for word in words for name in word.split(",") if name.strip()]
    found: dict[str, QuantScheme] = {}
    for name in names or ["*"]:
        if "*" in name or "?" in name:
            matching = fnmatch.filter(known, name)
            if not matching:
                raise UsageError(f"--quant {shown(name)} matches no scheme (known: {', '.join(known)})")
            found |= {match: known[match] for match in matching}
            continue
        scheme = find_scheme(name)  # A plugin may bring its own.
        if scheme.weight is None:
            raise UsageError(f"--quant names what to quantize to, got {name}; the original is always in the table")
        found[name] = scheme
    return tuple(found.values())


def read_inputs(path: Path | None) -> dict[int, torch.Tensor]:
    """`--inputs`: a safetensors file with [T,H] for some layers, named by their index.

    Raises:
        UsageError: It is no such file.
    """
    if path is None:
        return {}
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--inputs takes a safetensors file, got {str(path)!r}: {one_line(str(error))}") from None
    for name, tensor in tensors.items():
        if not name.isdecimal() or tensor.dim() != 2 or not tensor.is_floating_point() or not len(tensor):
            raise UsageError(
                "--inputs takes hidden states [T,H] by the index of their layer, such as '12', got "
                f"{shown(name)} {list(tensor.shape)} {tensor.dtype}; save each layer's under its index"
            )
        if not tensor.isfinite().all():
            raise UsageError(f"--inputs takes finite numbers, got infinity or NaN in {shown(name)}; capture them again")
    return {int(name): tensor for name, tensor in tensors.items()}
