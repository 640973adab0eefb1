"""Patterns of config files. They are untrusted programs, so they run under a time limit.

Real checkpoints use look-aheads and back references, which need a backtracking engine, and the limit needs one that can
be stopped. Python's own cannot.
"""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import regex

from moereg.errors import CheckpointError, shown

# Seconds of CPU time for all patterns of a file. 40 of them on 256 experts take a tenth of it.
_BUDGET_S: Final = 1.5
_LONGEST: Final = 4_096
_MOST: Final = 2_000
# Cannot backtrack, if a dot only matches a dot. Nearly every published list of modules is like this.
_PLAIN: Final = re.compile(r"[\w./-]*")

Match = Callable[[str], bool]
"""Whether a pattern matches a module, given its name in the checkpoint."""


class Patterns:
    """Compiles and runs the patterns of one config file, in an entry that errors call `field`.

    A pattern that is invalid or takes too long is a CheckpointError of every method and the functions they return.
    """

    def __init__(self, field: str) -> None:
        self._field = field
        self._num_compiled = 0
        self._end_s = time.thread_time() + _BUDGET_S

    def components(self, patterns: Iterable[str]) -> Match:
        """Makes a test whether any pattern names a module or one that contains it.

        A pattern is a regular expression for whole components of the name: `mlp.gate` matches neither `mlp.gate_proj`
        nor `xmlp.gate`. transformers' `should_convert_module` draws the same boundary.
        """
        names, expressions = _divide(patterns, lambda pattern: _PLAIN.fullmatch(pattern) is not None)
        # Before the first is compiled: on a slow machine the time would be up before the count.
        if (left := _MOST - self._num_compiled) < len(expressions):
            raise self._too_many(expressions[left], _MOST + 1)
        searches = [self.expression(text, rf"(?:^|\.)(?:{text})(?:\.|$)", is_anywhere=True) for text in expressions]
        return lambda module: _has_name(module, names, len(module)) or any(search(module) for search in searches)

    def wildcards(self, patterns: Iterable[str]) -> Match:
        """Makes a test whether any name, with wildcards as in file names, means a module or one that contains it."""
        names, globs = _divide(patterns, lambda pattern: not set(pattern) & set("*?["))
        # Modules inside a match are covered too. Translations end in `\Z` or `\z`, of which other engines may lack one.
        matches = [
            self.expression(glob, f"{fnmatch.translate(some)[:-2]}$(?!\\n)")
            for glob in globs
            for some in (glob, f"{glob}.*")
        ]
        return lambda module: _has_name(module, names, 1) or any(match(module) for match in matches)

    def expression(self, text: str, expression: str, is_anywhere: bool = False) -> Match:
        """Makes a test whether the regular expression that the config's text means matches a module.

        It may match beyond the start of the module's name if `is_anywhere`.
        """
        self._num_compiled += 1
        if self._num_compiled > _MOST or len(expression) > _LONGEST:
            raise self._too_many(text, self._num_compiled)
        compiled = self._run(text, lambda left_s: regex.compile(expression))
        find = compiled.search if is_anywhere else compiled.match
        return lambda module: self._run(text, lambda left_s: find(module, timeout=left_s)) is not None

    def _too_many(self, text: str, number: int) -> CheckpointError:
        return CheckpointError(
            f"{self._field} must hold at most {_MOST} regular expressions of up to {_LONGEST} characters, got "
            f"{shown(text)} of {len(text)} as number {number}; name modules without expressions"
        )

    def _run(self, text: str, work: Callable[[float], Any]) -> Any:
        try:
            if (left_s := self._end_s - time.thread_time()) <= 0:
                raise TimeoutError
            return work(left_s)
        except TimeoutError:
            raise CheckpointError(
                f"{self._field} must hold patterns that together match in {_BUDGET_S} s, got {shown(text)}, at which "
                "the time was up; write it without repeats inside repeats"
            ) from None
        except (regex.error, RecursionError, OverflowError, MemoryError, ValueError) as error:
            raise CheckpointError(
                f"{self._field} must hold names or regular expressions, got {shown(text)} "
                f"({str(error) or type(error).__name__}); correct it"
            ) from None


def _divide(patterns: Iterable[str], is_name: Callable[[str], bool]) -> tuple[frozenset[str], list[str]]:
    """Divides patterns into plain names and others, which keep their order."""
    unique = dict.fromkeys(patterns)
    names = frozenset(pattern for pattern in unique if is_name(pattern))
    return names, [pattern for pattern in unique if pattern not in names]


def _has_name(module: str, names: frozenset[str], num_starts: int) -> bool:
    """Whether consecutive components of a module's name, starting at one of its first ones, form one of the names."""
    parts = module.split(".") if names else []
    starts = range(min(num_starts, len(parts)))
    return any(".".join(parts[start:stop]) in names for start in starts for stop in range(start + 1, len(parts) + 1))
