"""Keys of packs: the layer and the machine that were measured. Writers and readers make them here."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

from moereg.errors import one_line
from moereg.platforms import Platform, probe_settings
from moereg.runtime.json_types import Text, Whole
from moereg.spec.problem import MoEProblem


def problem_key(problem: MoEProblem) -> dict[str, Any]:
    """A layer as a pack names it: its fields as JSON values, without `max_num_tokens`."""
    values = problem.to_dict()
    values.pop("max_num_tokens", None)
    return values


def key_text(key: Mapping[str, Any]) -> str:
    """A key as one text: equal keys have equal texts."""
    return json.dumps(key, sort_keys=True)


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine whose times a pack holds.

    Attributes:
        platform: Such as `cuda:sm90`.
        device: The driver's name of the device.
        units: Cores of a GPU as NVML counts them, processors that this process may use on a CPU, else 0.
        power_limit_w: The enforced power limit of a GPU in W; 0 if there is none.
        mig: Whether a GPU is divided into instances.
        driver: Major version of a GPU's driver, else empty.
    """

    platform: Text
    device: Text
    units: Whole
    power_limit_w: Whole
    mig: bool
    driver: Text

    def differences(self, here: Machine) -> tuple[str, ...]:
        """The fields that differ on this machine, such as `driver 570, here 580`; of another device that alone."""
        now, then = dataclasses.asdict(here), dataclasses.asdict(self)
        names = [name for name in then if then[name] != now[name]]
        names = ["device"] if "device" in names else names
        return tuple(f"{name} {str(then[name]) or 'none'}, here {str(now[name]) or 'none'}" for name in names)


@functools.lru_cache(maxsize=8)
def machine_of(platform: Platform) -> Machine:
    """The machine at hand, which a probed platform describes; asked once a process. Does not initialize CUDA."""
    units, power_limit_w, mig, driver = probe_settings(platform)
    return Machine(
        str(platform), one_line(platform.device_name), units, power_limit_w, mig, one_line(driver).partition(".")[0]
    )
