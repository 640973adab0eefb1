"""Time of moereg's own kernels beside the best of other people's: both from one process, or there is no ratio.

Two machines of one name differ by a tenth, and one machine does from hour to hour, so a ratio of times from two
processes says as much about the machines as about the kernels. A `Comparison` therefore refuses them.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from benches import stored
from benches.board import rows
from benches.board.layers import BoardLayer
from moereg.bench.inputs import ROUTINGS

__all__ = [
    "MARGIN_US",
    "OWN",
    "SHORT_US",
    "Comparison",
    "Place",
    "Timed",
    "geometric_mean",
    "judged",
    "missing",
    "of_board",
    "of_file",
    "planned",
]

# moereg's own kernels on a GPU; every other backend runs somebody else's.
OWN: Final = "triton"

# A launch takes its time however little there is to do, so a share of a roofline below SHORT_US is one of the roofline
# and MARGIN_US.
SHORT_US: Final = 20.0
MARGIN_US: Final = 10.0

_PLAIN: Final = "unquantized"

Row = dict[str, Any]


class Place(NamedTuple):
    """Names a row of a layer.

    Attributes:
        layer: The name in the tables.
        scheme: Of quantization, or the dtype of weights that are not quantized.
        routing, tokens: Of its calls.
    """

    layer: str
    scheme: str
    routing: str
    tokens: int

    @property
    def text(self) -> str:
        """In words."""
        return f"{self.layer} {self.scheme} {self.routing} T {self.tokens}"


class Timed(NamedTuple):
    """Time of a backend in a row.

    Attributes:
        name: The backend, with the class where that is not its first.
        time_us: None where it failed.
        process: Names the process in which it was timed.
    """

    name: str
    time_us: float | None
    process: str


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One row: own kernels beside those of others, timed in turns in one process.

    Attributes:
        place: Which row.
        own: What `triton` took.
        peers: What others took, those that failed left out.
        roofline_us: By the ceilings of that process; None where the file has none.
        clocks: Of the GPU right after the row; empty where the file has none.
    """

    place: Place
    own: Timed
    peers: tuple[Timed, ...]
    roofline_us: float | None
    clocks: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for peer in self.peers:
            if peer.process != self.own.process:
                raise ValueError(
                    f"a ratio takes two times of one process, and of {self.place.text} {self.own.name} was timed in "
                    f"{self.own.process}, {peer.name} in {peer.process}; measure both in one board"
                )

    @property
    def best(self) -> Timed | None:
        """The fastest peer; None if none ran."""
        return min(self.peers, key=lambda one: one.time_us or math.inf, default=None)

    @property
    def ratio(self) -> float | None:
        """Time of the best peer over our own: above 1 ours is the faster; None without both."""
        best = self.best
        if best is None or not best.time_us or not self.own.time_us:
            return None
        return best.time_us / self.own.time_us

    @property
    def outcome(self) -> str:
        """Whether the row is `won`, `tied` or `lost`, as it is where a peer alone is right; empty without a peer."""
        is_alone_right = self.best is not None and not self.own.time_us
        return "lost" if is_alone_right else stored.outcome(self.ratio)

    @property
    def is_short(self) -> bool:
        """Whether the share is of the roofline and a margin."""
        return self.roofline_us is not None and self.roofline_us < SHORT_US

    @property
    def share(self) -> float | None:
        """Share of the roofline, with its margin where it is short; None without both times."""
        if self.roofline_us is None or not self.own.time_us:
            return None
        return (self.roofline_us + (MARGIN_US if self.is_short else 0.0)) / self.own.time_us


def of_board(document: Row, file: str) -> list[Comparison]:
    """The rows of a board in which our own kernels took part; each row was timed in one process.

    Args:
        document: As `benches.board.store` writes it.
        file: Its name, for the names of processes.
    """
    found = []
    for standing in rows.standings(document):
        scheme = _scheme(document, standing.layer, standing.scheme)
        place = Place(standing.layer, scheme, standing.routing, standing.tokens)
        process = f"{file}: {place.text}"
        timed = [
            Timed(entry.name, entry.time_us, process) for entry in standing.entries.values() if not entry.is_variant
        ]
        own = [one for one in timed if _backend(one) == OWN]
        # The one that a user gets; where another backend is the default, the first class of ours.
        chosen = next((one for one in own if one.name == standing.default), own[0] if own else None)
        if chosen is not None:
            peers = tuple(one for one in timed if _backend(one) != OWN and one.time_us)
            found.append(Comparison(place, chosen, peers, standing.roofline_us, standing.clocks))
    return found


def of_file(path: pathlib.Path) -> list[Comparison]:
    """The comparisons of a board.

    Raises:
        ValueError: It is none, for example a table that divides by another run's times.
    """
    try:
        return of_board(stored.read(path), path.name)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"a comparison takes files whose rows have all times of one process, and {path} is no board; name a file "
            "of benches.board"
        ) from error


def judged(found: Iterable[Comparison]) -> list[Comparison]:
    """One comparison for each place: of several processes the one that is worst for us, each by its own times.

    Returns:
        By layer and scheme in the order in which they come, then by routing and tokens.
    """
    kept: dict[Place, Comparison] = {}
    for one in found:
        other = kept.get(one.place)
        if other is None or _standing(one) < _standing(other):
            kept[one.place] = one
    layers = list(dict.fromkeys((place.layer, place.scheme) for place in kept))
    return sorted(
        kept.values(),
        key=lambda one: (layers.index(one.place[:2]), ROUTINGS.index(one.place.routing), one.place.tokens),
    )


def _standing(one: Comparison) -> float:
    return 0.0 if one.outcome == "lost" and one.ratio is None else math.inf if one.ratio is None else one.ratio


def planned(layers: Sequence[BoardLayer]) -> list[Place]:
    """The rows that a board of these layers has once it is complete."""
    problems = {layer.name: layer.problem() for layer in layers}
    return [
        Place(layer.layer, problems[layer.name].dtype if layer.scheme == _PLAIN else layer.scheme, *point)
        for layer in layers
        for point in layer.points
    ]


def missing(layers: Sequence[BoardLayer], found: Iterable[Comparison]) -> list[Place]:
    """The planned rows that no comparison has."""
    there = {one.place for one in found}
    return [place for place in planned(layers) if place not in there]


def _scheme(document: Row, layer: str, scheme: str) -> str:
    if scheme != _PLAIN:
        return scheme
    known = document["layers"].get(f"{layer}:{scheme}".replace(" ", "-"))
    return str(known["problem"]["dtype"]) if known else "bfloat16"


def _backend(one: Timed) -> str:
    return one.name.partition(" (")[0]


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of positive numbers; NaN without any."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else math.nan
