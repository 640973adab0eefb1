"""Lists a backend's checks on one machine, generated from the registry."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from packaging.requirements import Requirement

from moereg.errors import ArgumentError, UnknownBackendError, unknown_name_message
from moereg.platforms import current_platform, torch_device
from moereg.registry import BackendCell
from moereg.selection.loader import load_backends, missing_backend
from moereg.selection.modules import import_modules, is_file_name, registers
from moereg.testing import cases
from moereg.testing.cases import is_imitated, runnable_platform, running_as
from moereg.testing.check import KINDS, CellName, Check, chosen_machine
from moereg.testing.gradients import gradient_cases
from moereg.testing.problems import accepted_problems

_DRAWN_IMITATED: Final = 3


@dataclasses.dataclass(frozen=True)
class Suite:
    """A backend's checks on a machine, except drawn layers, in running order.

    Attributes:
        idle: Cells that cannot run here, with their reasons; some of their checks can.
        imitated: Cells that run by imitating another platform.
        unchecked: What cells that run here promise and this machine cannot check.
    """

    platform: str
    device: str
    versions: Mapping[str, str]
    checks: tuple[Check, ...]
    idle: Mapping[CellName, str]
    imitated: frozenset[CellName]
    unchecked: tuple[str, ...] = ()

    @property
    def running(self) -> tuple[CellName, ...]:
        """Cells that can run here."""
        return tuple(cell for cell in dict.fromkeys(check.cell for check in self.checks) if cell not in self.idle)

    def check(self, cell: CellName, kind: str, argument: object) -> Check:
        """Another check of a cell."""
        like = next(check for check in self.checks if check.cell == cell)
        return Check.make(cell, kind, argument, like.platform, like.modules)

    def drawn(self, cell: CellName, seed: int, num_layers: int | None, seconds: float | None = None) -> Check:
        """The check of a cell's drawn layers, with the arguments of `moereg.testing.drawing.check_drawn`."""
        if num_layers is not None and cell in self.imitated:
            num_layers = min(num_layers, _DRAWN_IMITATED)
        return self.check(cell, "drawn", {"seed": seed, "num_layers": num_layers, "seconds": seconds})


def list_suite(name: str, platform: str = "", modules: Sequence[str] = ()) -> Suite:
    """Lists the checks of a backend, as `moereg.testing.checks_of`; of its code runs only the predicates.

    Raises:
        UnknownPlatformError: This torch lacks the machine's device, which is no backend's fault.
    """
    import_modules(modules)
    registry = load_backends()
    names = CellName.of_all(registry.cells)
    wanted = {
        cell_name: cell
        for cell_name, cell in names.items()
        if (cell.name == name if name else any(registers(module, cell) for module in modules))
    }
    if not wanted and not name:
        # A module may decorate a class from another module of its package.
        roots = {module.partition(".")[0] for module in modules if not is_file_name(module)}
        wanted = {key: cell for key, cell in names.items() if cell.experts.__module__.partition(".")[0] in roots}
    if not wanted:
        if (error := missing_backend(name)) is not None:
            raise error
        if not name:
            raise ArgumentError(f"{', '.join(modules)} must register a backend, got none; decorate a class there")
        raise UnknownBackendError(unknown_name_message("backend", name, registry.names))
    found: list[Check] = []
    idle, imitated, seen = {}, set(), set()
    unchecked: dict[str, None] = {}
    machine = chosen_machine(platform)
    with running_as(machine):
        # A platform plugin may claim a device that torch does not have here, which is no backend's fault.
        here = cases.machine()
        torch_device(here if here.probed else current_platform())
        for cell_name, cell in wanted.items():
            if runnable_platform(cell) is None:
                idle[cell_name] = cases.why_not_runnable(cell)
            elif is_imitated(cell):
                imitated.add(cell_name)
            for kind, argument in _promises(cell, cell_name in idle, cell.class_name in seen):
                found.append(Check.make(cell_name, kind, argument, platform, tuple(modules)))
            if cell_name not in idle:
                seen.add(cell.class_name)
                unchecked.update(dict.fromkeys(_unchecked(cell)))
    required = {"torch", *(Requirement(text).name for cell in wanted.values() for text in cell.requires)}
    physical = current_platform()
    versions = physical.versions
    return Suite(
        platform=str(here),
        # This device imitates another platform; the CPU next to a GPU has no device name here.
        device=here.device_name if here.probed else f"imitated by {physical.device_name}",
        versions={name: versions[name] for name in sorted(required) if name in versions},
        checks=_interleaved(found),
        idle=idle,
        imitated=frozenset(imitated),
        unchecked=tuple(unchecked),
    )


def _interleaved(checks: Sequence[Check]) -> tuple[Check, ...]:
    """Orders checks by kind and alternates cells within a kind, so that a short run covers every cell."""
    counts: collections.Counter[tuple[CellName, str]] = collections.Counter()
    keys, order = {}, list(KINDS)
    for check in checks:
        keys[check] = (order.index(check.kind), counts[check.cell, check.kind])
        counts[check.cell, check.kind] += 1
    return tuple(sorted(checks, key=keys.__getitem__))


def _promises(cell: BackendCell, is_idle: bool, is_known: bool) -> Iterator[tuple[str, object]]:
    """Kinds and arguments of a cell's checks; of one that cannot run here (`is_idle`) only selection can be checked.

    An earlier cell may have the same class (`is_known`).
    """
    yield "deciding", None
    if is_idle:
        return
    yield "rejections", None
    yield "workspaces", None
    yield "permute", None
    platform = runnable_platform(cell)
    assert platform is not None
    problems = accepted_problems(cell, platform)
    if is_imitated(cell) and is_known:
        # Interpreted kernels are slow, and cells of one class share them.
        problems = list({problem.quant: problem for problem in reversed(problems)}.values())[::-1]
    is_batched = cell.experts.output_form == "per_expert"
    for place, problem in enumerate(problems):
        is_first = place == 0 and not is_known and not is_batched
        yield "numbers", {"problem": problem.to_dict(), "is_first": is_first}
    served = [problem.quant for problem in problems]
    for scheme in cases.fault_schemes(cell):
        if scheme in served:
            yield "faults", dataclasses.asdict(scheme)
    for scheme in cell.schemes:
        if scheme.activation is not None and scheme in served:
            yield "rounding", dataclasses.asdict(scheme)
    trained = [] if is_known and is_imitated(cell) else gradient_cases(cell)
    for place, case in enumerate(trained):
        yield "gradients", {"problem": case.problem.to_dict(), "is_first": place == 0 and not is_known}
    if trained:
        yield "gradient_faults", None
        yield "training", None
    yield "reload", None
    if cell.facts.deterministic and not is_imitated(cell):
        yield "equal_bits", None
    if _has_device(cell):
        if cell.facts.graph_capture:
            yield "graph", None
        yield "synchronization", None
    yield "compile", None


def _has_device(cell: BackendCell) -> bool:
    """Whether a cell runs here on a device that works beside the host, which can wait for it."""
    platform = runnable_platform(cell)
    return platform is not None and platform.device_type == "cuda" and not is_imitated(cell)


def _unchecked(cell: BackendCell) -> Iterator[str]:
    """The promises of a cell that `_promises` leaves out since this machine cannot check them."""
    if is_imitated(cell) and cell.facts.deterministic:
        yield "equal bits of repeated calls"
    if not _has_device(cell) and any(rule.text != "cpu" for rule in cell.rules):
        yield "that a call never waits for the device"
        if cell.facts.graph_capture:
            yield "capture in a CUDA graph"
