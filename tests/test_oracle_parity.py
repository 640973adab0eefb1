"""What moereg chooses equals what vLLM's functions choose, but where a row of the tables says why not.

Each row of `tests/oracle_parity/rows.tsv` has vLLM's answer to a question and moereg's.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

import moereg.selection.decide
from moereg.errors import MoeregError
from moereg.evidence.ledger import evidence_of, read_ledger
from moereg.platforms import Platform
from moereg.registry import (
    BUILTIN,
    REGISTRY,
    BackendCell,
    BackendRegistry,
    Probe,
    register_moe_backend,
    registering_origin,
)
from moereg.selection.loader import load_backends
from moereg.selection.request import Request
from moereg.selection.result import Decision, Selection
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES
from moereg.spec.reasons import Reason
from tests.support.fakes import FakeExperts

ROOT: Final = Path(__file__).parents[1]
OWN: Final = ("torch", "triton")
"""Backends whose kernels are moereg's or torch's. Others are foreign."""

PACKAGES: Final = {
    "triton": "3.8.0",
    "flashinfer-python": "0.7.2.post1",
    "quack-kernels": "0.6.5",
    "nvidia-cutlass-dsl": "4.8.1",
    "vllm": "0.26.0",
    "humming-kernels": "0.1.19",
    "amd-aiter": "0.1.20",
    "jax": "0.10.2",
}
"""A machine with every package, in a version that its backends accept; SonicMoE asks for another nvidia-cutlass-dsl."""

_WHEELS: Final = {
    "moereg-aiter": ("moereg_aiter.backend",),
    "moereg-humming": ("moereg_humming.backend",),
    "moereg-jax": ("moereg_jax",),
    "moereg-sonic": ("moereg_sonic.backend",),
    "moereg-vllm": tuple(
        f"moereg_vllm.{name}" for name in ("deepgemm", "marlin", "triton_kernels", "vllm_cutlass", "vllm_triton")
    ),
}


def builtin_cells() -> tuple[BackendCell, ...]:
    """Those of moereg itself."""
    return tuple(cell for cell in load_backends().cells if cell.origin == BUILTIN)


def parity_cells() -> tuple[BackendCell, ...]:
    """All of them. Leaves the registry and loaded modules as they were."""
    return (*builtin_cells(), *_wheels(), *_vendors())


def _wheels() -> Iterator[BackendCell]:
    """Cells of the wheels, out of their sources: claims import no kernel library."""
    before, path, loaded = REGISTRY.cells, list(sys.path), dict(sys.modules)
    REGISTRY.restore(())
    try:
        for wheel, modules in _WHEELS.items():
            sys.path.insert(0, str(ROOT / "plugins" / wheel / "src"))
            with registering_origin(wheel, "1.0"):
                for module in modules:
                    sys.modules.pop(module, None)
                    importlib.import_module(module)
        # As built-in ones, whose predicates are asked also where they are denied.
        yield from (dataclasses.replace(cell, origin=BUILTIN) for cell in REGISTRY.cells)
    finally:
        REGISTRY.restore(before)
        sys.path[:] = path
        for name in [name for name in sys.modules if name.partition(".")[0].startswith("moereg_")]:
            del sys.modules[name]
        sys.modules.update({name: module for name, module in loaded.items() if name.startswith("moereg_")})


def _vendors() -> tuple[BackendCell, ...]:
    """What wheels of other vendors would bring, for platforms that moereg has no kernels for."""
    registry = BackendRegistry()
    claims = (
        ("npu_kernels", "npu", ("unquantized",)),
        ("xpu_kernels", "xpu", ("unquantized", "fp8_block128", "mxfp8", "mxfp4_w4a16", "int4_w4a16_g128")),
    )
    for name, platform, schemes in claims:
        with registering_origin(f"moereg-{platform}", "1.0"):
            register_moe_backend(name, 100, schemes, (platform,), registry=registry)(FakeExperts)
    return registry.cells


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


_TEXTS: Final = ("by", "failing", "named", "error")
_VALUES: Final = {"True": True, "None": None}


def _lines(name: str) -> Iterator[list[str]]:
    """The columns of each line of a table that is no comment."""
    for line in (ROOT / "tests" / "oracle_parity" / name).read_text(encoding="utf-8").splitlines():
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


@pytest.fixture(scope="module")
def cells() -> tuple[BackendCell, ...]:
    return parity_cells()


def choose(row: Row, cells: Sequence[BackendCell]) -> Selection:
    """What moereg says to a row.

    Raises:
        MoeregError: The request cannot be met by any machine.
    """
    problem = row.moe_problem()
    words = {word: names for word, names in row.request.items() if word.islower()}
    environ = {name: value for name, value in row.request.items() if name.isupper()}
    if row.named:  # A pattern gives those that are named beside it one place, in which they go by priority.
        words["prefer"] = ",".join(["*", *sorted({cell.name for cell in cells if cell.opt_in})])
    request = Request.resolve(problem.quant.name, **words, environ=environ, cells=cells)
    return decided(row, problem, row.machine(), request, cells)


def decided(
    row: Row, problem: MoEProblem, platform: Platform, request: Request, cells: Sequence[BackendCell]
) -> Selection:
    """Decides as on a machine that has what probes look for, but for the row's one."""

    def ask(probe: Probe, platform: Platform) -> Reason | None:
        fails = row.failing and row.failing in getattr(probe, "__name__", "")
        return Reason("probe", f"requires what {row.failing} looks for") if fails else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moereg.selection.decide.ask_probe", ask)
        return moereg.selection.decide.decide(problem, platform, request, cells)


def accepted(decisions: Iterable[Decision]) -> list[str]:
    """Names of what fits, best first, each once; `~` behind an emulation."""
    return list(dict.fromkeys(d.backend + "~" * (d.tier == "emulation") for d in decisions if d.accepted))


def wrong_order(row: Row, decisions: Sequence[Decision]) -> str | None:
    """How what fits differs from what a row says, or None."""
    found, expected = accepted(decisions), row.ours.split()
    about = {*expected, *row.reasons}
    if found[:1] != expected[:1] or [name for name in found if name in about] != expected:
        return f"accepts {found}, expected {expected}"
    if row.by and decisions[0].experts != row.by:
        return f"{decisions[0].experts} wins, expected {row.by}"
    return None


def unlike(row: Row, said: Selection | MoeregError) -> str | None:
    """The first thing that moereg says and a row does not, or None."""
    if isinstance(said, MoeregError):
        return None if row.error and re.search(row.error, str(said)) else f"error: {said}"
    if row.error:
        return f"no error, expected {row.error}"
    if wrong := wrong_order(row, said.decisions):
        return wrong
    for backend, pattern in row.reasons.items():
        texts = [
            f"{reason.code}: {reason.text}"
            for decision in said.decisions
            if decision.backend == backend
            for reason in decision.reasons
        ]
        if not any(re.match(pattern, text) for text in texts):
            return f"{backend} has {texts or 'no reason'}, expected {pattern}"
    return None


@pytest.fixture(scope="module")
def answers(cells: tuple[BackendCell, ...]) -> list[Selection | MoeregError]:
    """What moereg says to each row."""
    found: list[Selection | MoeregError] = []
    for row in ROWS:
        try:
            found.append(choose(row, cells))
        except MoeregError as error:
            found.append(error)
    return found


def disagreement(row: Row, explained: frozenset[str]) -> str | None:
    """What differs between the two answers of a row, leaving the places of explained backends out."""
    ours, order = row.ours.split(), row.vllm.split()
    known = [name for name in order if name not in explained]
    if [name for name in ours if name in known] != known:
        return f"accepts {ours}, and vLLM {order}"
    winners = {next(iter(ours), "nothing"), next(iter(order), "nothing")}
    if len(winners) > 1 and not winners & explained:
        return f"{next(iter(ours), 'nothing')} wins, and for vLLM {next(iter(order), 'nothing')}"
    return None


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda number: str(ROWS[number]))
def test_rows(number: int, answers: list[Selection | MoeregError]) -> None:
    """moereg does what a row says, which is what vLLM does, but for backends whose place a difference explains."""
    row = ROWS[number]
    assert unlike(row, answers[number]) is None
    assert disagreement(row, row.explained()) is None
    for name in row.explained():
        assert disagreement(row, row.explained() - {name}) is not None, f"{name} needs no explanation"


def test_every_difference_has_a_row_and_stands_on_the_page() -> None:
    used = {difference for row in ROWS for difference in row.why}
    assert used == set(DIFFERENCES)
    page = " ".join((ROOT / "docs" / "selection.md").read_text(encoding="utf-8").split())
    assert [text for text in DIFFERENCES.values() if f"- {text}." not in page] == []


SCHEMES = [name for name in QUANT_SCHEMES if not name.startswith("int4") or name == "int4_w4a16_g128"]
GPUS = ("cuda:sm90", "cuda:sm100", "cuda:sm103", "cuda:sm120", "rocm:gfx942", "rocm:gfx950")
OTHERS = ("cuda:sm75", "cuda:sm80", "cuda:sm89", "cuda:sm110", "rocm:gfx90a", "cpu", "xpu", "npu", "tpu")


_RAN_ON: dict[int, frozenset[str]] = {}


def ever_ran(cell: BackendCell, platform: Platform) -> bool:
    """Whether the ledger has it there, in any version; `tests/kit/stale_evidence.txt` names those changed since."""
    if id(cell) not in _RAN_ON:
        evidence = evidence_of(cell)
        _RAN_ON[id(cell)] = frozenset(record.platform for record in (*evidence.current, *evidence.stale))
    return str(platform) in _RAN_ON[id(cell)]


def has_records(platform: str) -> bool:
    """Whether anything of moereg ran there. Elsewhere the order is the engines', which the rows compare."""
    return any(ever_ran(cell, Platform.from_name(platform)) for cell in builtin_cells())


def test_the_machines_with_records() -> None:
    assert [platform for platform in (*GPUS, *OTHERS) if has_records(platform)] == ["cuda:sm90", "cpu"]


@pytest.mark.parametrize("platform", ["cuda:sm90", "cpu"])
def test_a_foreign_cell_that_never_ran_where_others_did_is_opt_in(platform: str) -> None:
    named = Platform.from_name(platform)
    unproven = [
        f"{cell.name} {cell.class_name} for {cell.schemes[0].name}"
        for cell in builtin_cells()
        if cell.name not in OWN
        and not cell.opt_in
        and any(rule.matches(named) for rule in cell.rules)
        and not ever_ran(cell, named)
    ]
    assert not unproven, f"make it opt-in on {platform}: {unproven}"


# Triton 3.6 comes with torch 2.11, and some of moereg's own kernels ask for a later one.
TRITONS = (None, "3.6.0")


def winners(platform: str, cells: Sequence[BackendCell], triton: str | None) -> Iterator[tuple[str, Decision]]:
    """What a bare call chooses on a machine with all packages but for its Triton: schemes with decisions."""
    dtype = "float16" if platform == "cuda:sm75" else "bfloat16"
    for scheme in SCHEMES:
        problem = {"quant": scheme, "dtype": dtype}
        winner = choose(Row(platform=platform, ours="", problem=problem, packages={"triton": triton}), cells).winner
        if winner is not None:
            yield scheme, winner


_ON_SM100 = {
    None: {"flashinfer_cutlass"},
    "3.6.0": {"flashinfer_trtllm", "flashinfer_cutedsl"},
}
FLASHINFER_FIRST: dict[str, dict[str | None, set[str]]] = {
    "cuda:sm100": _ON_SM100,
    "cuda:sm103": _ON_SM100,
    "cuda:sm120": {None: {"flashinfer_cutlass"}, "3.6.0": {"flashinfer_cutlass"}},
}
"""Machines of which nothing of moereg has a record, and where engines try FlashInfer's kernels first, by Triton."""


@pytest.mark.parametrize("triton", TRITONS, ids=str)
@pytest.mark.parametrize("platform", GPUS)
def test_a_foreign_kernel_that_never_ran_there_is_the_default_where_it_is_the_engines(
    platform: str, triton: str | None
) -> None:
    named = Platform.from_name(platform)
    unproven = {
        winner.backend
        for _, winner in winners(platform, builtin_cells(), triton)
        if winner.backend not in OWN and winner.cell is not None and not ever_ran(winner.cell, named)
    }
    assert unproven == FLASHINFER_FIRST.get(platform, {}).get(triton, set())


# `docs/selection.md` says them: whoever installs a wheel wants its kernels, also where nobody ran them yet.
UNTRIED_WHEELS = {
    "cuda:sm75": {f"humming {scheme}" for scheme in SCHEMES if scheme not in ("unquantized", "nf4", "nf4_dq")},
    "cuda:sm80": {
        *(f"marlin fp8_{kind}" for kind in ("block128", "channel_token", "tensor_dynamic", "tensor_static")),
        "humming mxfp8",
    },
    "cuda:sm89": {"humming mxfp8"},
}


@pytest.mark.parametrize("platform", [*GPUS, "cuda:sm75", "cuda:sm80", "cuda:sm89", "cpu"])
def test_a_wheel_is_the_default_where_it_ran_or_is_listed(platform: str, cells: tuple[BackendCell, ...]) -> None:
    ran = {
        (record.backend, record.experts, record.platform)
        for ledger in ROOT.glob("plugins/*/src/*/moereg_ledger.json")
        for record in read_ledger(ledger)
    }
    ours = {cell.name for cell in builtin_cells()}
    without_fakes = [cell for cell in cells if cell.origin == BUILTIN]
    untried = {
        f"{winner.backend} {scheme}"
        for scheme, winner in winners(platform, without_fakes, PACKAGES["triton"])
        if winner.backend not in ours and (winner.backend, winner.experts, platform) not in ran
    }
    assert untried == UNTRIED_WHEELS.get(platform, set())
