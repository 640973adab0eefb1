"""Packs in force: where they lie, which may choose among which backends, and what each says of a layer.

In order: the file that MOEREG_TUNING names (none at all if it is empty), the user's, the one that moereg ships, and
those of wheels, which may only order their own backends. The first one with usable times of a layer chooses for it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import statistics
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import importlib_metadata
import msgspec
from packaging.utils import canonicalize_name

from moereg.errors import RecordFileWarning, shown
from moereg.evidence.code_digest import module_file
from moereg.evidence.on_machine import Machine, cell_key, machine_of, user_data
from moereg.evidence.pack import VARIABLE, Pack, TimedCell, key_text, problem_key, read_pack
from moereg.evidence.plans import LayerTimes, Ranges, best_for_all, with_ranges
from moereg.evidence.significance import NUM_SESSIONS, mean_gain, num_shared_sessions
from moereg.evidence.store import read_once, unusable
from moereg.experts import Experts
from moereg.platforms import Platform, PlatformRule
from moereg.registry import BackendCell
from moereg.spec.problem import MoEProblem
from moereg.spec.quant_schemes import QuantScheme

ENTRY_POINTS: Final = "moereg.tuning"
"""The group of wheels' packs: `moereg_mine:tuning.json` is a file of the package `moereg_mine`."""

Candidate = tuple[BackendCell, QuantScheme, PlatformRule]
"""A cell that fits, the scheme that it would compute, and the rule by which it may run."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The answer of packs about a layer.

    Attributes:
        ranges: (most tokens, index of a candidate) in ascending order, the last one open; empty if no pack chose.
        note: One line on the choice; empty without one.
        notes: What is not used and why, one line each.
        digest: Of the times that chose; empty without a choice.
    """

    ranges: Ranges = ()
    note: str = ""
    notes: tuple[str, ...] = ()
    digest: str = ""


class Source:
    """A pack in force, with its layers by problem and the plans made so far.

    Attributes:
        pack: The pack.
        origin: The distribution whose backends alone it may order; empty for all.
        is_users: Whether a user made it, who wants to know which layers it lacks.
        name: What notes call it.
    """

    def __init__(self, pack: Pack, origin: str = "", is_users: bool = True) -> None:
        self.pack, self.origin, self.is_users = pack, origin, is_users
        self.name: Final = "pack" if is_users else f"pack of {origin or 'moereg'}"
        self._layers: dict[str, list[int]] = {}
        self._cells: dict[tuple[str, ...], list[int]] = {}
        self._plans: dict[tuple[int, tuple[int, ...]], Measured] = {}
        # What was added later goes first.
        for place in reversed(range(len(pack.layers))):
            self._layers.setdefault(pack.layers[place].key[0], []).append(place)
        for index in reversed(range(len(pack.cells))):
            self._cells.setdefault(pack.cells[index].cell_key, []).append(index)

    def order(self, problem: MoEProblem, platform: Platform, candidates: Sequence[Candidate]) -> Measured:
        """Asks this pack alone; as `measured_order`."""
        if differences := self.pack.machine.differences(machine_of(platform)):
            return Measured(notes=(f"{self.name} unused: it is of another machine: {', '.join(differences)}",))
        own = [
            place
            for place, (cell, _, _) in enumerate(candidates)
            if self.origin in ("", canonicalize_name(cell.origin))
        ]
        if own[:1] != [0]:  # A wheel may not put its backends before another's.
            return Measured()
        key = problem_key(problem)
        places = self._layers.get(key_text(key), ())
        if not places:
            return Measured(notes=tuple(_nearest(self.pack, key)) if self.is_users else ())
        return _first(self._of_layer(place, candidates, own, platform) for place in places)

    def unused(self, platform: Platform, cells: Iterable[BackendCell]) -> dict[str, str]:
        """Why times do not count on the machine at hand: by backend, or under an empty name if none does."""
        if differences := self.pack.machine.differences(machine_of(platform)):
            return {"": f"it is of another machine: {', '.join(differences)}"}
        here = {}
        for cell in cells:
            if (rule := cell.rule_for(platform)) is not None:
                here.update({cell_key(cell, scheme, rule): cell for scheme in cell.schemes})
        found: dict[str, str] = {}
        for key, places in self._cells.items():
            timed = [self.pack.cells[at] for at in places]
            own = here.get(key)
            changes = [one.changes(own, platform) for one in timed] if own else [("not installed",)]
            if all(changes):
                found.setdefault(timed[0].backend, ", ".join(changes[0]))
        return found

    def _of_layer(
        self, place: int, candidates: Sequence[Candidate], own: Sequence[int], platform: Platform
    ) -> Measured:
        layer, cells = self.pack.layers[place], self.pack.cells
        wrong = dict(layer.wrong)
        notes: list[str] = []
        usable: dict[int, int] = {}
        for index in own:
            cell = candidates[index][0]
            changes = {
                at: cells[at].changes(cell, platform) for at in self._cells.get(cell_key(*candidates[index]), ())
            }
            known = [at for at in changes if at in layer.cells]
            at = next((at for at in known if not changes[at]), None)
            if at is not None and at not in wrong:
                usable[at] = index
                continue
            if at is not None:
                reason = f"{cell.name} failed when it was measured: {wrong[at]}"
            else:
                reason = ", ".join(changes[known[0]]) if known else f"{cell.name} was not measured"
            if index == 0 or layer.default in known:
                return Measured(notes=(*notes, f"{self.name} unused: {reason}"))
            if known:
                notes.append(f"{self.name} unused for {cell.name}: {reason}")
        order = tuple(usable)
        plan = self._plans.get((place, order))
        if plan is None:
            classes = {at: candidates[index][0].experts for at, index in usable.items()}
            plan = self._plans[place, order] = _plan(self, place, classes)
        ranges = tuple((most, usable[at]) for most, at in plan.ranges)
        return dataclasses.replace(plan, ranges=ranges, notes=(*notes, *plan.notes))


def measured_order(
    sources: Iterable[Source], problem: MoEProblem, platform: Platform, candidates: Sequence[Candidate]
) -> Measured:
    """Asks packs in order about a layer; they have nothing to say of a platform that is only named.

    `candidates` is what fits, in the order of static priority, among which a request has no preference.
    """
    asked = sources if platform.probed and candidates else ()
    return _first(source.order(problem, platform, candidates) for source in asked)


def _first(found: Iterable[Measured]) -> Measured:
    """The first one that chooses, with the notes of those before it."""
    notes: list[str] = []
    for one in found:
        notes += one.notes
        if one.ranges:
            return dataclasses.replace(one, notes=tuple(notes))
    return Measured(notes=tuple(notes))


def _plan(source: Source, place: int, classes: Mapping[int, type[Experts]]) -> Measured:
    """The plan for cells of a pack, in the order of priority; its ranges have their indices in the pack."""
    order, pack = tuple(classes), source.pack
    layer, cells = pack.layers[place], pack.cells
    times = LayerTimes(layer.rows, layer.default, layer.calls)
    pairs = ((times.at(cell, at), times.at(order[0], at)) for cell in order[1:] for at in times.tokens)
    compared = max((num_shared_sessions(*pair) for pair in pairs), default=0)
    if compared < NUM_SESSIONS:
        least = _counted(NUM_SESSIONS)
        alone = f"only {cells[order[0]].backend} was measured"
        what = f"{_counted(compared)} compared it with others, and a choice takes {least}" if len(order) > 1 else alone
        return Measured(notes=(f"{source.name} unused: {what}",))
    base = best_for_all(times, order)
    # A layer has one copy of its weights. A class with several layouts may have been timed in any of them.
    layouts = {cell: kind.layouts for cell, kind in classes.items() if kind.layouts == kind.shared_layouts[:1]}
    others = {cell for cell, layout in layouts.items() if layout == layouts.get(base)}
    ranges = with_ranges(times, order, base, others)
    sessions = {row.session for row in layer.rows}
    date = max(session.date for session in pack.sessions if session.number in sessions)
    used = json.dumps(msgspec.to_builtins([layer, [cells[cell] for cell in order], ranges]))
    return Measured(
        ranges=ranges,
        note=f"measured {date}: {_gains(times, cells, order[0], base, ranges)}, {_counted(len(sessions))}",
        digest=hashlib.sha256(used.encode()).hexdigest()[:16],
    )


def _gains(times: LayerTimes, cells: Sequence[TimedCell], default: int, base: int, ranges: Ranges) -> str:
    """The gains of a plan, such as `humming 11 % less than triton at 256-1024`."""
    parts = []
    if base != default:
        gain = mean_gain(times.over_all(base, default), times.over_all(default, default))
        parts.append(_less(cells, base, default, gain))
    least = 1
    for most, cell in ranges[:-1]:
        assert most is not None
        at = [tokens for tokens in times.tokens if least <= tokens <= most]
        least = most + 1
        if cell != base:
            gain = statistics.fmean(mean_gain(times.at(cell, each), times.at(base, each)) for each in at)
            where = f"{at[0]}-{at[-1]}" if len(at) > 1 else f"{at[0]}"
            parts.append(f"{_less(cells, cell, base, gain)} at {where}")
    return ", ".join(parts) or f"nothing beats {cells[default].backend}"


def _less(cells: Sequence[TimedCell], cell: int, than: int, gain: float) -> str:
    name = "experts" if cells[cell].backend == cells[than].backend else "backend"
    return f"{getattr(cells[cell], name)} {100 * -math.expm1(gain):.0f} % less than {getattr(cells[than], name)}"


def _counted(number: int) -> str:
    words = ("no", "one", "two", "three", "four")
    return f"{words[number] if number < len(words) else number} session{'' if number == 1 else 's'}"


def _nearest(pack: Pack, key: Mapping[str, Any]) -> list[str]:
    """A line on the measured layer with the fewest fields of other values, if there is one."""
    if not pack.layers:
        return []

    def differing(other: Mapping[str, Any]) -> list[str]:
        return [name for name in {**key, **other} if other.get(name) != key.get(name)]

    nearest = min((layer.problem for layer in pack.layers), key=lambda other: len(differing(other)))
    texts = ", ".join(f"{name} {shown(nearest.get(name))}, here {shown(key.get(name))}" for name in differing(nearest))
    return [f"untuned: the nearest measured layer has {texts}"]


def tuning_path() -> Path | None:
    """The file that `moereg tune` writes, whether or not it exists; None if packs are turned off."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    return user_data() / "tuning.json"


def read_tuning(platform: Platform | None = None) -> tuple[Source, ...]:
    """The packs in force, in order, read once per process and again when a file has changed.

    A file that cannot be used causes one `RecordFileWarning` and is left out. If a platform is given, packs of other
    machines are left empty; one that is only named has none.
    """
    first = tuning_path()
    if first is None or not (platform is None or platform.probed):
        return ()
    here = None if platform is None else machine_of(platform)
    files = [(path, "", "own") for path in dict.fromkeys((first, user_data() / "tuning.json"))]
    files += [(_SHIPPED, "", ""), *((path, origin, "") for path, origin in _files_of_wheels())]
    return tuple(filter(None, (read_once(path, _believed, None, here, *rest) for path, *rest in files)))


_SHIPPED: Final = Path(__file__).parents[1] / "tuning_pack.json"


def _believed(path: Path, here: Machine | None, origin: str, own: str) -> Source | None:
    try:
        return Source(read_pack(path, bool(own), here), origin, is_users=bool(own))
    except ValueError as error:
        theirs = f"the pack {shown(str(path))} cannot be used: {error}; tell the authors of {origin or 'moereg'}"
        text = unusable("the pack", path, error, VARIABLE) if own else theirs
        warnings.warn(text, RecordFileWarning, stacklevel=6)
        return None


@functools.lru_cache(maxsize=1)
def _files_of_wheels() -> tuple[tuple[Path, str], ...]:
    """Files of packs that installed distributions name, with the distribution. Imports nothing of them."""
    found = []
    for distribution in importlib_metadata.distributions():
        try:
            # Most have none; parsing every file would take longer than all the rest.
            if ENTRY_POINTS not in (distribution.read_text("entry_points.txt") or ""):
                continue
            for point in distribution.entry_points:
                module, _, name = point.value.partition(":")
                file = module_file(module.strip()) if point.group == ENTRY_POINTS else None
                if file is not None and name:
                    found.append((file.with_name(Path(name.strip()).name), canonicalize_name(distribution.name)))
        except Exception:  # Metadata that an interrupted uninstall left behind may raise anything; its backends warn.
            continue
    return tuple(dict.fromkeys(sorted(found)))
