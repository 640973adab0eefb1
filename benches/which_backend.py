"""The tables of docs/backends.md: which backend for what, from the registered cells, their ledgers and the boards.

The cells are moereg's own and those of the wheels under plugins/, whether or not these are installed: their modules are
imported from the tree, as their entry points name them. Nothing here depends on the machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benches.board import rows as board_rows
from benches.markdown import table
from benches.stored import SAME
from moereg.evidence.ledger import Evidence, arch_name, evidence_of
from moereg.platforms import Platform
from moereg.registry import BUILTIN, REGISTRY, BackendCell
from moereg.selection.decide import decide
from moereg.selection.loader import load_backends
from moereg.selection.request import Request
from moereg.selection.result import Decision
from moereg.spec.facts import Facts
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QUANT_SCHEMES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["TABLES", "World", "world"]

ROOT: Final = pathlib.Path(__file__).resolve().parent.parent

# One of each kind that a cell's rule or a record names.
PLATFORMS: Final = (
    "cpu",
    "cuda:sm80",
    "cuda:sm89",
    "cuda:sm90",
    "cuda:sm100",
    "cuda:sm103",
    "cuda:sm120",
    "rocm:gfx942",
    "rocm:gfx950",
    "tpu",
)
# Qwen3-30B-A3B's: no backend refuses its sizes.
LAYER: Final[Mapping[str, Any]] = {"num_experts": 128, "hidden_size": 2048, "intermediate_size": 768, "top_k": 8}
FORMATS: Final = ("standard", "batched")

_FAMILY: Final = "int4_w4a16_g"
_OTHER_EXTRAS: Final = ("test", "dev", "peers")


@dataclasses.dataclass(frozen=True)
class Fit:
    """A candidate that fits, on one platform.

    Attributes:
        decision: The candidate.
        evidence: Of its cell.
        is_default: Whether a bare `select_backend` of moereg alone chooses it there.
        is_opt_in: Whether a request has to name it.
    """

    decision: Decision
    evidence: Evidence
    is_default: bool
    is_opt_in: bool

    @property
    def is_wheel(self) -> bool:
        """Whether it comes from a wheel of its own."""
        return self.decision.origin != BUILTIN

    def text(self, platform: Platform) -> str:
        """Its name with what is special about it."""
        name = f"**{self.decision.backend}**" if self.is_default else self.decision.backend
        marks = ["✓"] if self.evidence.on(platform) else []
        words = [
            word
            for word, holds in (
                ("wheel", self.is_wheel),
                ("opt-in", self.is_opt_in),
                ("emulated", self.decision.tier == "emulation"),
            )
            if holds
        ]
        return " ".join([name, *marks, *([f"({', '.join(words)})"] if words else [])])


class World:
    """Every cell of the tree, and what each platform would make of it."""

    def __init__(self, cells: Sequence[BackendCell]) -> None:
        self.cells: Final = tuple(cells)
        self.evidence: Final = {id(cell): evidence_of(cell) for cell in cells}
        self._fits: Final[dict[tuple[str, Platform, str], list[Fit]]] = {}

    def fits(self, scheme: str, platform: Platform, activation_format: str) -> list[Fit]:
        """The candidates of a layer in a scheme, best first: a backend's best one alone."""
        key = (scheme, platform, activation_format)
        if key not in self._fits:
            self._fits[key] = self._look_up(*key)
        return self._fits[key]

    def _look_up(self, scheme: str, platform: Platform, activation_format: str) -> list[Fit]:
        problem = MoEProblem(**LAYER, quant=scheme, activation_format=activation_format)
        opt_in = tuple(dict.fromkeys(cell.name for cell in self.cells if cell.opt_in))
        builtin = [cell for cell in self.cells if cell.origin == BUILTIN]
        default = decide(problem, platform, Request(), builtin).winner
        found = decide(problem, platform, Request(prefer=opt_in), self.cells)
        fits: dict[str, Fit] = {}
        accepted = [decision for decision in found.decisions if decision.accepted and decision.cell is not None]
        accepted.sort(key=lambda one: (one.tier == "emulation", one.cell.opt_in, -one.priority))  # type: ignore[union-attr]
        for decision in accepted:
            cell = decision.cell
            assert cell is not None
            is_default = default is not None and (decision.backend, decision.experts) == (
                default.backend,
                default.experts,
            )
            fits.setdefault(decision.backend, Fit(decision, self.evidence[id(cell)], is_default, cell.opt_in))
        return list(fits.values())


@contextlib.contextmanager
def _collecting() -> Iterator[list[BackendCell]]:
    """Takes what modules of the tree register inside, so that the process's registry stays as it is."""
    cells: list[BackendCell] = []

    def collect(cell: BackendCell) -> bool:
        cells.append(cell)
        return True

    before = REGISTRY.owner_of, REGISTRY.collect
    # The package, whose ledger is found beside it.
    REGISTRY.owner_of = lambda name, module: None if module.startswith("moereg.") else (_package(module), "")
    REGISTRY.collect = collect
    try:
        yield cells
    finally:
        REGISTRY.owner_of, REGISTRY.collect = before


def _package(module: str) -> str:
    return module.partition(":")[0].partition(".")[0]


@contextlib.contextmanager
def _plugins() -> Iterator[dict[str, dict[str, Any]]]:
    """The projects under plugins/ by their package, on the path; the process is as before afterwards."""
    projects = {}
    folders = []
    for file in sorted((ROOT / "plugins").glob("*/pyproject.toml")):
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        folders.append(str(file.parent / "src"))
        for value in project["entry-points"].get("moereg.backends", {}).values():
            projects[_package(value)] = project
    roots = set(projects)
    hidden = {name: module for name, module in sys.modules.items() if _package(name) in roots}
    for name in hidden:
        del sys.modules[name]
    path, writes = list(sys.path), sys.dont_write_bytecode
    sys.path[:0], sys.dont_write_bytecode = folders, True
    importlib.invalidate_caches()
    try:
        yield projects
    finally:
        sys.path[:], sys.dont_write_bytecode = path, writes
        for name in [name for name in sys.modules if _package(name) in roots]:
            del sys.modules[name]
        sys.modules.update(hidden)


@functools.cache
def world() -> tuple[World, dict[str, dict[str, Any]], dict[str, str]]:
    """All cells, the wheels' projects by package, and each backend's own words about itself."""
    builtin = [cell for cell in load_backends().cells if cell.origin == BUILTIN]
    with _plugins() as projects:
        with _collecting() as cells:
            for project in projects.values():
                for value in project["entry-points"]["moereg.backends"].values():
                    importlib.import_module(value)
        found = World([*builtin, *cells])
        words = {cell.name: _words_of(cell) for cell in found.cells}
    return found, projects, words


def _words_of(cell: BackendCell) -> str:
    """A backend's own words: the line of its page's docstring that is about it, else the first paragraph."""
    text = sys.modules[cell.experts.__module__].__doc__ or ""
    own = re.search(rf"^- `{cell.name}`: (.+?)(?=^- |^$|\Z)", text, re.MULTILINE | re.DOTALL)
    words = " ".join((own[1] if own else text.split("\n\n")[0]).split())
    return words.removeprefix("Registers the backend ").removeprefix(f"`{cell.name}`").lstrip(": ").rstrip(".")


def plugins_file() -> str:
    """The content of `moereg.selection.ways_out.PLUGINS`: a row per backend of the tree's plugins."""
    found, projects, _ = world()
    rows: dict[tuple[str, str, bool], dict[str, list[str]]] = {}
    for cell in found.cells:
        if cell.origin != BUILTIN and cell.tier == "kernel":
            row = rows.setdefault((projects[cell.origin]["name"], cell.name, cell.opt_in), {})
            for rule in cell.rules:
                own = row.setdefault(rule.text, [])
                own += [name for name, one in QUANT_SCHEMES.items() if any(each.serves(one) for each in cell.schemes)]
    values = [[*key, {rule: sorted({*own}) for rule, own in row.items()}] for key, row in rows.items()]
    return json.dumps(values) + "\n"


def _platforms() -> list[Platform]:
    return [Platform.from_name(name) for name in PLATFORMS]


def defaults_table() -> str:
    """The choice of moereg alone for each scheme on each kind of machine."""
    found, _, _ = world()
    rows: dict[str, list[str]] = {}
    for scheme in QUANT_SCHEMES:
        cells = []
        for platform in _platforms():
            fits = found.fits(scheme, platform, "standard")
            default = next((fit for fit in fits if fit.is_default), None)
            cells.append("-" if default is None else default.text(platform).replace("**", ""))
        rows.setdefault(" | ".join(cells), []).append(scheme)
    lines = [[_spelled(schemes), text] for text, schemes in rows.items()]
    return table(["scheme", *(arch_name(name) for name in PLATFORMS)], lines)


def choices_table() -> str:
    """Everything that fits, best first: a table for each kind of machine; equal answers stand together."""
    found, _, _ = world()
    sections: dict[str, list[str]] = {}
    for platform in _platforms():
        rows: dict[str, list[str]] = {}
        for scheme in QUANT_SCHEMES:
            texts = [
                ", ".join(fit.text(platform) for fit in found.fits(scheme, platform, form)) or "-" for form in FORMATS
            ]
            rows.setdefault(" | ".join(texts), []).append(scheme)
        lines = [[_spelled(schemes), text] for text, schemes in rows.items()]
        sections.setdefault(table(["schemes", *FORMATS], lines), []).append(arch_name(str(platform)))
    return "\n\n".join(f"### {', '.join(archs)}\n\n{table}" for table, archs in sections.items())


def _spelled(schemes: Sequence[str]) -> str:
    """The names, with `*` for all that begin alike."""
    family = [scheme for scheme in QUANT_SCHEMES if scheme.startswith(_FAMILY)]
    short = [scheme for scheme in schemes if scheme not in family] if set(family) <= set(schemes) else list(schemes)
    return ", ".join(f"`{name}`" for name in [*short, *([f"{_FAMILY}*"] if len(short) < len(schemes) else [])])


def backends_table() -> str:
    """Each backend: what it is, how to get it, where it is the default, where it ran, and what the boards say of it."""
    found, projects, words = world()
    ranks = _fastest()
    rows = []
    for name in sorted({cell.name for cell in found.cells}):
        cells = [cell for cell in found.cells if cell.name == name]
        verified = dict.fromkeys(
            arch_name(record.platform) for cell in cells for record in found.evidence[id(cell)].current
        )
        stale = dict.fromkeys(arch_name(record.platform) for cell in cells for record in found.evidence[id(cell)].stale)
        ran = ", ".join(verified) or "nowhere yet"
        if older := [arch for arch in stale if arch not in verified]:
            ran += f"; before its code changed: {', '.join(older)}"
        rows.append(
            [
                f"`{name}`",
                words[name],
                _install(cells, projects),
                _chosen_where(found, name),
                _lacks(cells),
                ran,
                ranks(name),
            ]
        )
    return table(["backend", "what it is", "how to get it", "chosen for", "lacks", "verified on", "on the board"], rows)


def _chosen_where(found: World, name: str) -> str:
    """Platforms where it is chosen without a request, each with its schemes; of a wheel, once it is installed."""
    parts: dict[str, list[str]] = {}
    is_wheel = False
    for platform in _platforms():
        schemes = []
        for scheme in QUANT_SCHEMES:
            fits = found.fits(scheme, platform, "standard")
            own = next((fit for fit in fits if fit.decision.backend == name), None)
            if own is not None and (own.is_default or (own.is_wheel and own is fits[0] and not own.is_opt_in)):
                is_wheel |= own.is_wheel
                schemes.append(scheme)
        if schemes:
            count = "all schemes" if len(schemes) == len(QUANT_SCHEMES) else f"{len(schemes)} schemes"
            parts.setdefault(f"`{schemes[0]}`" if len(schemes) == 1 else count, []).append(arch_name(str(platform)))
    text = "; ".join(f"{what} on {', '.join(archs)}" for what, archs in parts.items())
    return f"{text}{', once installed' if is_wheel else ''}" if text else "on request only"


# What a layer may ask for, and how it is called where none of a backend's cells has it.
_ASKED: Final[tuple[tuple[str, Callable[[Facts], bool]], ...]] = (
    ("biases", lambda facts: facts.bias),
    ("a clamped `swigluoai`", lambda facts: facts.swiglu_limit and "swigluoai" in facts.activations),
    ("expert parallelism", lambda facts: "some" in facts.held_experts and bool(facts.placements)),
    ("an expert map", lambda facts: "map" in facts.placements),
    ("the batched format", lambda facts: "batched" in facts.activation_formats),
    ("float16", lambda facts: "float16" in facts.dtypes),
    ("float32", lambda facts: "float32" in facts.dtypes),
    ("router weights on the input", lambda facts: facts.router_weight_on_input),
    ("CUDA graphs", lambda facts: facts.graph_capture),
    ("bitwise reproducibility", lambda facts: facts.deterministic),
)


def _lacks(cells: Iterable[BackendCell]) -> str:
    """Features that no cell of a backend has."""
    facts = [cell.facts for cell in cells]
    missing = [name for name, has in _ASKED if not any(map(has, facts))]
    if "expert parallelism" in missing:
        missing.remove("an expert map")
    return ", ".join(missing) or "-"


def _install(cells: Sequence[BackendCell], projects: Mapping[str, Mapping[str, Any]]) -> str:
    requires = list(dict.fromkeys(text for cell in cells for text in cell.requires))
    needs = _needs(requires)
    if cells[0].origin != BUILTIN:
        # What is on no package index names where it comes from.
        sources = [f"'{one.name} @ {one.url}'" for one in map(Requirement, requires) if one.url]
        command = " ".join([f"./plugins/{projects[cells[0].origin]['name']}", *sources])
        return f"`pip install {command}`" + (f", with {needs}" if needs else "")
    wanted = {canonicalize_name(Requirement(text).name) for text in requires} - {"torch"}
    if not wanted:
        return "comes with moereg"
    chosen: list[str] = []
    while missing := wanted.difference(*(_extras()[extra] for extra in chosen)):
        best = max(sorted(_extras()), key=lambda extra: (len(_extras()[extra] & missing), -len(_extras()[extra])))
        if not _extras()[best] & missing:
            break
        chosen.append(best)
    command = f"`pip install 'moereg[{','.join(sorted(chosen))}]'`" if chosen else ""
    left = f"`pip install {' '.join(sorted(missing))}`" if missing else ""
    alone = "; some classes do without" if any(not cell.requires for cell in cells) else ""
    return f"{' and '.join(filter(None, (command, left)))}, for {needs}{alone}"


def _needs(requires: Iterable[str]) -> str:
    """Version ranges, each distribution once: the first cell's range, then those that other cells ask for."""
    ranges: dict[str, list[str]] = {}
    for text in requires:
        if Requirement(text).url:
            continue
        ranges.setdefault(canonicalize_name(Requirement(text).name), []).append(f"`{text}`")
    return ", ".join(
        texts[0] + (f" (some cells {', '.join(texts[1:])})" if len(texts) > 1 else "") for texts in ranges.values()
    )


@functools.cache
def _extras() -> dict[str, set[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        extra: {canonicalize_name(Requirement(text).name) for text in texts}
        for extra, texts in project["optional-dependencies"].items()
        if extra not in _OTHER_EXTRAS
    }


def _fastest() -> Callable[[str], str]:
    """By backend, in how many of its rows of each board that others ran in as well it was the fastest or tied."""
    counts: dict[str, list[str]] = {}
    for board in board_rows.BOARDS:
        try:
            files = board_rows.rows_of(board), board_rows.apart(board)
        except FileNotFoundError:
            continue
        seen: set[str] = set()
        device = next(iter(board_rows.documents(board).values()))["device"]
        # A backend that is in no row of the board is counted where it ran apart; none is counted in both.
        for rows in files:
            names = {name.partition(" (")[0] for row in rows for name in row.entries} - seen
            seen |= names
            for name in names:
                own = [row for row in rows if not row.is_alone and name in {e.backend for e in row.entries.values()}]
                first = sum(_is_first_or_tied(name, row) for row in own)
                if own:
                    counts.setdefault(name, []).append(f"fastest or tied in {first} of {len(own)} rows on {device}")
    return lambda name: "; ".join(counts.get(name, [])) or "not on it yet"


def _is_first_or_tied(name: str, row: board_rows.Standing) -> bool:
    own = [entry.time_us for entry in row.ranking if entry.backend == name and entry.time_us]
    return bool(own) and min(own) <= SAME * (row.ranking[0].time_us or 0.0)


TABLES: Final[dict[str, Callable[[], str]]] = {
    "defaults": defaults_table,
    "choices": choices_table,
    "backends": backends_table,
}
