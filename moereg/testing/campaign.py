"""Many drawn layers of a cell where compiling takes the time: few configurations, and many sizes in each."""

from __future__ import annotations

import dataclasses
import random
import time

from moereg.registry import BackendCell
from moereg.testing.checks import check_layer
from moereg.testing.drawing import Limits, draw_layer, redraw

__all__ = ["Tally", "run_campaign"]


@dataclasses.dataclass
class Tally:
    """The outcome of drawn layers.

    Attributes:
        num_layers: Layers that were run.
        num_configurations: Configurations of these layers.
        failures: Messages, each of which begins with the line that names its layer.
        seconds: Time that they took.
    """

    num_layers: int = 0
    num_configurations: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        """Adds the outcome of other layers."""
        self.num_layers += other.num_layers
        self.num_configurations += other.num_configurations
        self.failures += other.failures
        self.seconds += other.seconds

    def __str__(self) -> str:
        return (
            f"{self.num_layers} layers of {self.num_configurations} configurations, {len(self.failures)} failures, "
            f"{self.seconds:.1f} s"
        )


def run_campaign(
    cell: BackendCell, num_layers: int, num_configurations: int, limits: Limits, seed: int, num_calls: int = 2
) -> Tally:
    """Runs drawn layers of a cell under guard bands and goes on after a failure.

    Args:
        cell: A cell that runs here.
        num_layers: Number of layers in all.
        num_configurations: Number of configurations (scheme, dtype, activation and whatever else kernels are compiled
            for); each gets equally many layers.
        limits: Largest sizes.
        seed: Equal seeds draw equal layers.
        num_calls: Calls of each layer; the second one replays launches that a backend recorded.
    """
    choose = random.Random(f"{seed}/{cell.name}/{cell.class_name}/{cell.rules[0].text}/{cell.schemes[0].name}").choice
    start = time.monotonic()
    tally = Tally()
    for configuration in range(num_configurations):
        first = layer = draw_layer(cell, choose, limits)
        tally.num_configurations += 1
        for number in range(configuration, num_layers, num_configurations):
            if number != configuration:
                layer = redraw(first, choose, limits)
            try:
                # Layers that do not run here do not count.
                tally.num_layers += check_layer(layer, num_calls)
            except AssertionError as error:
                tally.num_layers += 1
                tally.failures.append(str(error))
    tally.seconds = time.monotonic() - start
    return tally
