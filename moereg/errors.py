"""moereg's errors and warnings, and their shared wording."""

from __future__ import annotations

import difflib
import os
import reprlib
import signal
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final


class MoeregError(Exception):
    """Base class of every error that moereg raises on purpose."""


class MoeregWarning(UserWarning):
    """Base class of every warning that moereg issues."""


class ArgumentError(MoeregError, ValueError):
    """An argument, or a field of a mapping, has a wrong type or value."""


class RecordFileError(MoeregError, RuntimeError):
    """A file of this machine's records or measured times cannot be changed."""


class RecordFileWarning(MoeregWarning):
    """A file of this machine's records or measured times cannot be used, and counts as empty."""


class LedgerWarning(MoeregWarning):
    """A ledger cannot be read; its cells count as not verified."""


class AdmissionWarning(MoeregWarning):
    """A backend failed its first check on this machine, and another one was taken."""


class EmulationWarning(MoeregWarning):
    """Only an emulation fits: right numbers, not the speed of the scheme."""


class OldWeightsWarning(MoeregWarning):
    """An optimizer trains tensors of which a bare kernel holds a permuted copy."""


class RanksMeasuredWarning(MoeregWarning):
    """Ranks of a group have packs that choose differently, so none of them uses its own."""


class BackendError(MoeregError, RuntimeError):
    """The own code of a `backend`, whose distribution is `origin`, raised; `__cause__` is the original exception."""

    def __init__(self, message: str, backend: str = "", origin: str = "") -> None:
        super().__init__(message)
        self.backend = backend
        self.origin = origin


class CompiledCodeError(MoeregError, RuntimeError):
    """Compiled code came to a layer that is gone."""


class PicklingError(MoeregError, TypeError):
    """A layer whose weights are in one machine's layout cannot be pickled."""


class WorkerError(MoeregError, RuntimeError):
    """A process that checks or measures ended by itself, and no backend ran in it."""


class GradientError(MoeregError, RuntimeError):
    """A backward pass came to experts that moereg ran, for a gradient that it does not compute."""


class RegistrationError(MoeregError, ValueError):
    """A backend's registration is invalid; nothing was stored."""


class RequestError(MoeregError, ValueError):
    """A request contradicts itself, such as by requiring and denying the same name."""


class PluginError(MoeregError, RuntimeError):
    """A plugin requested by name could not be loaded."""


class PluginWarning(MoeregWarning):
    """A plugin did not load or could not describe this machine; everything else works."""


class CheckpointError(MoeregError, ValueError):
    """A checkpoint cannot be read as a Mixture-of-Experts layer.

    The message is one line without control characters, even if it quotes names from the files.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class GroupError(MoeregError, RuntimeError):
    """Ranks of a group could not exchange data: one ended, stalled, raised before or called another layer."""


class RanksDifferError(MoeregError, ValueError):
    """Ranks of a group disagree on a layer or on moving experts, or one could not continue; every rank raises."""


class LayoutMismatchError(MoeregError, ValueError):
    """Permuted weights do not have the layout that the experts class reads."""


class LayoutNotInvertibleError(MoeregError, ValueError):
    """An expert cannot be read back from permuted weights, because their layout loses information."""


class TooLargeError(MoeregError, MemoryError):
    """A layer would not fit in free memory."""


class UnknownNameError(MoeregError, ValueError):
    """A name is unknown; the message lists the known ones and the nearest."""


class UnknownBackendError(UnknownNameError):
    """No backend of that name is registered."""


class UnknownModelError(UnknownNameError):
    """No model shape has that name."""


class UnknownSchemeError(UnknownNameError):
    """No quantization scheme has that name."""


class UnknownPlatformError(UnknownNameError):
    """A platform's kind or architecture is unknown."""


class UnsupportedProblemError(MoeregError, NotImplementedError):
    """No backend fits the problem; its `selection` has every candidate's reasons."""

    def __init__(self, message: str, selection: Any) -> None:  # A `Selection`, which is above this module.
        super().__init__(message)
        self.selection = selection


def unknown_name_message(
    kind: str, name: object, known: Iterable[str], also_called: Mapping[str, Sequence[str]] = MappingProxyType({})
) -> str:
    """Words an unknown-name error in one line: the rule, the name found, the nearest and all known names.

    The nearest are the known names that begin with the one found, else those that contain it, else the one with the
    most similar spelling, else those within it. `also_called` has other names in use, in lower case, with the known
    names that they mean.
    """
    names = sorted(set(known))
    lowered = {known_name.lower(): known_name for known_name in names}
    # Comparing takes quadratic time, and a very long name is no typo.
    typed = name.lower() if isinstance(name, str) and len(name) <= _LONGEST_TYPED else ""
    near = [meant for meant in also_called.get(typed, ()) if meant in names] or _nearest(typed, lowered)
    words = ", ".join(map(repr, near))
    hint = "" if not near else f", did you mean {words}?" if len(near) == 1 else f", did you mean one of {words}?"
    return f"unknown {kind} {shown(name)}{hint} (known: {', '.join(names) or 'none'})"


def _nearest(typed: str, lowered: Mapping[str, str]) -> list[str]:
    for is_near, fewest_letters in ((str.startswith, 2), (str.__contains__, 3)):
        near = [name for lower, name in lowered.items() if is_near(lower, typed)]
        if near and len(typed) >= fewest_letters:
            return near
    close = difflib.get_close_matches(typed, lowered, n=1, cutoff=0.5)
    return [lowered[match] for match in close or [lower for lower in lowered if len(lower) > 2 and lower in typed]]


_LONGEST_TYPED: Final = 200
_LONGEST_SHOWN: Final = 200
_LONGEST_LINE: Final = 2000


class _ShortRepr(reprlib.Repr):
    """reprlib's shortening, safe for hostile values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _LONGEST_SHOWN

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to print integers of thousands of digits, which reprlib before 3.12 does not handle.
        return super().repr_int(x, level) if x.bit_length() < 1024 else f"<an integer of {x.bit_length()} bits>"


def shown(value: object) -> str:
    """A short, one-line repr of a user's value for an error; never raises."""
    try:
        return one_line(_ShortRepr().repr(value))
    except Exception:  # Reprs and lengths run a user's code.
        return f"<a {one_line(type(value).__qualname__, _LONGEST_SHOWN)} that cannot be shown>"


def one_line(text: str, longest: int = _LONGEST_LINE) -> str:
    """A text as one line that is safe to print: collapses white space, escapes unprintable characters."""
    line = " ".join(text.split())
    # An escape is longer than its character, so cut the text again after escaping.
    start = line[: longest + 1]
    if not start.isprintable():
        start = "".join(char if char.isprintable() else repr(char)[1:-1] for char in start)
    return start if len(start) <= longest else f"{start[: longest - 3]}..."


def index_ranges(indices: Iterable[int]) -> list[str]:
    """`1-3`, `5` for ascending indices 1, 2, 3, 5."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and ranges[-1][-1] == index - 1:
            ranges[-1][1:] = [index]
        else:
            ranges.append([index])
    return ["-".join(map(str, bounds)) for bounds in ranges]


def described(error: BaseException, package: str = "") -> str:
    """Type and message of a foreign error, as one line; never raises.

    Uses only the message's first paragraph, which says what is wrong; later ones give advice.

    Args:
        error: Any.
        package: The package or file whose last line on the error's way is named too.
    """
    try:
        text = str(error).strip()
        source, caret, cause = text.rpartition("^\n")
        # A compiler shows the source, and says below it what is wrong there.
        text = one_line(f"{source.partition(chr(10))[0]} {cause}" if caret else text.partition("\n\n")[0])
    except Exception:
        text = "a message that cannot be shown"
    place = ""
    for each in (error, error.__cause__):
        for frame, line in traceback.walk_tb(None if each is None else each.__traceback__):
            if package and str(frame.f_globals.get("__name__")).partition(".")[0] == package:
                place = f" ({os.path.basename(frame.f_code.co_filename)}:{line})"
    return f"{type(error).__name__}: {text or 'no message'}{place}"


_LACKS_OF_MEMORY: Final = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUDA error: out of memory",
)


def is_lack_of_memory(error: BaseException) -> bool:
    """Whether an error means out of memory, which is no code's fault.

    For GPUs torch raises its own type, recognized by name, since this module works without torch. For CPUs torch raises
    a RuntimeError that differs only in its text.
    """
    if isinstance(error, MemoryError) or any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    if not isinstance(error, RuntimeError):
        return False
    try:
        text = str(error)
    except Exception:
        return False
    return any(sign in text for sign in _LACKS_OF_MEMORY)


def stops_the_process(error: BaseException) -> bool:
    """Whether an error is a request from outside to stop the process, whatever code it passed through.

    Ctrl-C is, and so is an exception from a signal handler. SystemExit from a backend's own code is not. Python runs
    handlers only in the main thread, so other threads' code raises its errors itself.
    """
    if threading.current_thread() is not threading.main_thread():
        return False
    if isinstance(error, KeyboardInterrupt):
        return True
    if isinstance(error, Exception):
        return False
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))
