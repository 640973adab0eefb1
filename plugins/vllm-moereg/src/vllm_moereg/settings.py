"""Settings of users: MOEREG_VLLM, and `moereg` in vLLM's `--additional-config`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["MODES", "HostError", "Settings", "read_mode"]

MODES: Final = ("auto", "off", "require")
"""`auto` leaves to vLLM what moereg declines, `require` makes that an error, `off` leaves all of it to vLLM."""

_KEY: Final = "moereg"
_NAMES: Final = ("require", "prefer", "deny")
_FLAGS: Final = ("deterministic", "batch_invariant", "exact_activations", "warm_up")


class HostError(RuntimeError):
    """moereg cannot serve a vLLM, a layer or its weights; says what, why and what to do."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of one engine.

    Attributes:
        mode: One of `MODES`.
        require, prefer, deny: As for `moereg.select_backend`; None where only the environment says something.
        deterministic, batch_invariant, exact_activations: Fields of `moereg.MoEProblem`. VLLM_BATCH_INVARIANT asks for
            the second too.
        warm_up: Whether to compile kernels for all sizes at load, on a GPU.
    """

    mode: str = "auto"
    require: str | tuple[str, ...] | None = None
    prefer: str | tuple[str, ...] | None = None
    deny: str | tuple[str, ...] | None = None
    deterministic: bool = False
    batch_invariant: bool = False
    exact_activations: bool = False
    warm_up: bool = True

    @classmethod
    def read(cls, environ: Mapping[str, str], additional_config: object) -> Settings:
        """Reads both sources; MOEREG_VLLM beats the configuration's mode.

        Args:
            environ: The environment.
            additional_config: vLLM's field of that name; anything but a mapping has no settings for moereg.

        Raises:
            HostError: A key or a value is unknown.
        """
        given = additional_config.get(_KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise HostError(f"{_KEY} in --additional-config must be an object, got {given!r}")
        values: dict[str, Any] = {}
        for key, value in given.items():
            values[key] = _checked(key, value)
        values["mode"] = read_mode(environ, values.get("mode", "auto"))
        if environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
            values["batch_invariant"] = True
        return cls(**values)


def read_mode(environ: Mapping[str, str], default: str = "auto") -> str:
    """The mode that MOEREG_VLLM names.

    Raises:
        HostError: It is not one of `MODES`.
    """
    mode = environ.get("MOEREG_VLLM") or default
    if mode not in MODES:
        raise HostError(f"MOEREG_VLLM must be one of {', '.join(MODES)}, got {mode!r}")
    return mode


def _checked(key: str, value: object) -> object:
    if key == "mode" and value in MODES:
        return value
    if key in _FLAGS and isinstance(value, bool):
        return value
    if key in _NAMES and isinstance(value, str):
        return value
    if key in _NAMES and isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value):
        return tuple(value)
    raise HostError(
        f"{_KEY} in --additional-config takes mode ({', '.join(MODES)}), {', '.join(_NAMES)} (names) and "
        f"{', '.join(_FLAGS)} (true or false), got {key!r}: {value!r}"
    )
