"""What a row of the tables is, and where moereg chooses differently on purpose."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from moereg.platforms import Platform
from moereg.problem import MoEProblem
from tests.oracle_parity.cells import PACKAGES
from tests.oracle_parity.oracles import Layer

__all__ = [
    "CONFLICT",
    "DATA_PARALLEL",
    "DIFFERENCES",
    "FACTS_DECIDE",
    "KEPT_REQUEST",
    "LATER",
    "MEASURED",
    "RAN_FIRST",
    "SERVED_HERE",
    "UNCLAIMED",
    "UNMEASURED",
    "Difference",
    "Row",
    "row_of",
]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A deliberate difference; `docs/selection.md` says each of them, in these words.

    Attributes:
        text: The difference, and why.
    """

    text: str


RAN_FIRST: Final = Difference(
    "A foreign kernel that comes with moereg is opt-in on hardware that it never ran on, and `triton` goes first "
    "there. That one did not run everywhere either, but its numbers are tested on a CPU as well. An engine's order "
    "was measured by others, with other versions"
)
MEASURED: Final = Difference(
    "On an H200 `triton` goes before vLLM's kernels for the same scheme: it won or tied every row "
    "[of the wheels](results.md#kernels-of-wheels-on-an-h200) but three of Humming's, of int4 and mxfp4 at 1,024 "
    "tokens. [The board](board.md) has three more rows where vLLM's Triton kernels (16 tokens that all choose the same "
    "experts) or Humming take 5 to 10 % less time"
)
UNMEASURED: Final = Difference(
    "On other GPUs nobody here measured them. `triton` stays before vLLM's kernels for 4-bit weights there, as on the "
    "H200"
)
FACTS_DECIDE: Final = Difference(
    "Each backend declares whether it applies a clamp. vLLM's function for nvfp4 has a list with one backend, "
    "recommends another one in its error text, and does not ask Marlin where that is forced"
)
KEPT_REQUEST: Final = Difference(
    "A backend that is asked for runs or is an error. vLLM returns a CPU's, a TPU's or a plugin's backend before it "
    "reads the request"
)
CONFLICT: Final = Difference(
    "Asked for and forced off at once is an error that names both sources. vLLM lets the first win, and one of two "
    "people does not hear of it"
)
SERVED_HERE: Final = Difference(
    "moereg serves layers that vLLM refuses: `torch` runs unquantized ones on anything and quantized ones on a CPU, "
    "and `triton` has batched kernels for every scheme and reads 4-bit weights on GPUs without 4-bit products"
)
UNCLAIMED: Final = Difference(
    "No cell claims what vLLM has there: no wheel brings those kernels for that scheme, platform, size or format of "
    "activations"
)
LATER: Final = Difference(
    "`humming` is still behind `marlin` on Hopper. vLLM has it before Marlin there, and it is faster on the board: "
    "1.29 times `triton`'s time for mxfp4 (`marlin` 1.46, `triton_kernels` 1.81). `deepgemm` and `vllm_cutlass` are "
    "before `vllm_triton` as in vLLM. On the board `deepgemm` is faster than it at 4,096 tokens, but for one rank of "
    "eight of DeepSeek-V3, and `vllm_cutlass` from 1,024 tokens on, but where all choose the same experts; both are "
    "slower in all other rows. Those wheels' priorities change when their cells are next verified, since the evidence "
    "is for the code as it stands"
)
DATA_PARALLEL: Final = Difference(
    "A layer is the same on each of several data parallel ranks, so their number changes no order: an engine that "
    "wants `triton` before FlashInfer's CUTLASS there says so by `prefer`. vLLM's function reads the number"
)
DIFFERENCES: Final = (
    *(RAN_FIRST, MEASURED, UNMEASURED, FACTS_DECIDE, KEPT_REQUEST, CONFLICT, SERVED_HERE, UNCLAIMED, LATER),
    DATA_PARALLEL,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One question, asked of an oracle and of moereg.

    Attributes:
        platform: Name of the machine.
        ours: What moereg accepts, best first, as far as the row is about it; the first one wins, and none is an error.
            `name~` is an emulation.
        by: Class of the winner, where its name has several that fit.
        supports: Backends whose predicate would say yes to vLLM.
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
        why: The difference, where there is one, with the backends whose place it explains.
    """

    platform: str
    ours: str
    by: str = ""
    supports: str = ""
    problem: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    engine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    request: Mapping[str, str] = dataclasses.field(default_factory=dict)
    packages: Mapping[str, str | None] | None = None
    failing: str = ""
    reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    named: bool = False
    error: str = ""
    why: Mapping[Difference, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.platform]
        for values in (self.problem, self.engine, self.request, self.packages or {}):
            words += [f"{name}={value}" for name, value in values.items()]
        return " ".join([*words, *filter(None, [self.failing, "named" * self.named])])

    def moe_problem(self) -> MoEProblem:
        """The layer, with sizes that every backend takes."""
        sizes = {"num_experts": 64, "hidden_size": 2048, "intermediate_size": 1024, "top_k": 4}
        return MoEProblem(**{**sizes, **self.problem})

    def machine(self) -> Platform:
        """The platform: a name, or a machine with packages."""
        named = Platform.from_name(self.platform)
        if self.packages is None:
            return named
        versions = {**PACKAGES, **self.packages}
        installed = {name: version for name, version in versions.items() if version is not None}
        return dataclasses.replace(named, versions=installed, probed=True)

    def layer(self) -> Layer:
        """The same, as vLLM sees it."""
        problem, engine = self.moe_problem(), dict(self.engine)
        kind, _, arch = self.platform.partition(":")
        return Layer(
            kind=kind,
            arch=arch,
            scheme=problem.quant.name,
            supports=tuple(self.supports.split()),
            is_batched=problem.activation_format == "batched",
            is_swigluoai=problem.activation.name == "swigluoai",
            has_clamp=problem.activation.limit is not None,
            num_data_parallel=engine.pop("num_data_parallel", 1),
            num_expert_parallel=problem.num_experts // problem.num_local_experts,
            backend=engine.pop("backend", "auto"),
            variables=engine,
        )

    def explained(self) -> frozenset[str]:
        """Backends whose place a difference explains."""
        return frozenset(" ".join(self.why.values()).split())


def row_of(quant: str, platform: str, ours: str, supports: str = "", **others: Any) -> Row:
    """The row of a scheme."""
    return Row(
        platform=platform,
        ours=ours,
        supports=supports,
        **{**others, "problem": {"quant": quant, **others.get("problem", {})}},
    )
