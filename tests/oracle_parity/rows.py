"""The rows of `rows.tsv`, and where moereg chooses differently on purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from moereg.platforms import Platform
from moereg.spec.problem import MoEProblem
from tests.oracle_parity.cells import PACKAGES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One question, with the answers of vLLM and of moereg.

    Attributes:
        platform: Name of the machine.
        ours: What moereg accepts, best first, as far as the row is about it; the first one wins, and none is an error.
            `name~` is an emulation.
        by: Class of the winner, where its name has several that fit.
        vllm: The answer of vLLM 0.33's `fused_moe/oracle/` for the scheme, best first, in moereg's names.
        problem: The layer, as far as it is not the usual one.
        engine: What the engine is told: `backend`, variables of its environment, ranks.
        request: What moereg is told for it: `require`, `prefer`, `deny` or variables of its environment.
        packages: Versions of installed packages that are not the usual ones, or None for one that is missing; the
            platform is that machine then, and a name otherwise.
        failing: Probe that finds something missing on that machine, by a part of its name.
        reasons: Backend to what one of its reasons says, as `code: text`, a regular expression. It does not fit, unless
            `ours` has its name as well, by another cell.
        named: Whether the request names what is opt-in as well, at the place that priorities give it.
        error: What an error about the request says, a regular expression.
        why: The name of a difference, with the backends whose place it explains.
    """

    platform: str
    ours: str
    by: str = ""
    vllm: str = ""
    problem: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    request: Mapping[str, str] = dataclasses.field(default_factory=dict)
    packages: Mapping[str, str | None] | None = None
    failing: str = ""
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    named: bool = False
    error: str = ""
    why: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.platform]
        for values in (self.problem, self.engine, self.request, self.packages or {}):
            words += [f"{name}={value}" for name, value in values.items()]
        return " ".join([*words, *filter(None, [self.failing, "named" * self.named])])

    def moe_problem(self) -> MoEProblem:
        """The layer, with sizes that every backend takes."""
        sizes = {"num_experts": 64, "hidden_size": 2048, "intermediate_size": 1024, "top_k": 4}
        gradients = self.problem.get("gradients", "").split()
        return MoEProblem(**{**sizes, **self.problem, "gradients": gradients})

    def machine(self) -> Platform:
        """The platform: a name, or a machine with packages."""
        named = Platform.from_name(self.platform)
        if self.packages is None:
            return named
        versions = {**PACKAGES, **self.packages}
        installed = {name: version for name, version in versions.items() if version is not None}
        return dataclasses.replace(named, versions=installed, probed=True)

    def explained(self) -> frozenset[str]:
        """Backends whose place a difference explains."""
        return frozenset(" ".join(self.why.values()).split())


_HERE: Final = Path(__file__).parent
_TEXTS: Final = ("by", "failing", "named", "error")
_VALUES: Final = {"True": True, "None": None}


def _lines(name: str) -> Iterator[list[str]]:
    """The columns of each line of a table that is no comment."""
    for line in (_HERE / name).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            yield line.split("\t")


def _read_rows() -> Iterator[Row]:
    """The rows of the table: scheme, platform, `ours` and `vllm`, then `field: text` for what else a row has.

    A text is `name=value; name=value` where the field is a mapping. In `reasons`, several backends may share one.
    """
    for columns in _lines("rows.tsv"):
        quant, platform, ours, vllm, *others = *columns, *[""] * (4 - len(columns))
        fields: dict[str, Any] = {}
        for cell in others:
            field, _, text = cell.partition(":")
            fields[field] = text.strip() if field in _TEXTS else _pairs(text.strip())
        fields["named"] = "named" in fields
        fields["problem"] = {"quant": quant, **fields.get("problem", {})}
        shared = fields.get("reasons", {}).items()
        fields["reasons"] = {backend: pattern for backends, pattern in shared for backend in backends.split()}
        yield Row(platform=platform, ours=ours, vllm=vllm, **fields)


def _pairs(text: str) -> dict[str, Any]:
    pairs = (pair.partition("=") for pair in text.split("; ") if pair)
    return {
        name: int(value) if name.islower() and value.isdigit() else _VALUES.get(value, value)
        for name, _, value in pairs
    }


ROWS: Final = tuple(_read_rows())
DIFFERENCES: Final = {name: text for name, text in _lines("differences.tsv")}
"""Deliberate differences by the name that rows have for each; `docs/selection.md` says them, in these words."""
