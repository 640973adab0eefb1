"""Guards standard output and standard error, which may be closed, full, or written by other code."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, Final, cast

_STDOUT: Final = 1
_STDERR: Final = 2


class OutputLostError(Exception):
    """Standard output refused a write.

    Not an OSError, which rich and typer would handle in their own ways.

    Attributes:
        cause: The system's error.
    """

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"standard output was lost: {cause.strerror or cause}")
        self.cause = cause


class _Guarded:
    """A text stream whose errors moereg handles."""

    def __init__(self, stream: IO[str], is_output: bool) -> None:
        self._stream = stream
        self._is_output = is_output
        self._lost: OutputLostError | None = None
        self._silenced: tuple[int, int] | None = None

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:
            # A character missing in the terminal's encoding must not end the command without a result.
            self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except (OSError, ValueError) as error:
            self._failed(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._failed(error)
        if self._lost is not None:
            # Raise again: click probes streams and swallows their errors.
            raise self._lost

    def close(self) -> None:
        """Only flushes: within a command standard output is standard error, and a plugin may close it."""
        self.flush()

    def _failed(self, error: OSError | ValueError) -> None:
        self._silence()
        # If standard error cannot be written, there is nowhere to report it. ValueError: the stream was closed.
        if self._is_output:
            self._lost = OutputLostError(error if isinstance(error, OSError) else OSError(str(error)))
            raise self._lost

    def _silence(self) -> None:
        """Discards buffered output, so that it does not fail again at interpreter exit."""
        if self._silenced is not None:
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):
            descriptor = self._stream.fileno()
            null = os.open(os.devnull, os.O_WRONLY)
            self._silenced = descriptor, os.dup(descriptor)
            os.dup2(null, descriptor)
            os.close(null)

    def restore(self) -> None:
        """Discards buffered output and restores the descriptor, since the process may outlive this command."""
        if self._silenced is None:
            return
        descriptor, saved = self._silenced
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()
        os.dup2(saved, descriptor)
        os.close(saved)
        self._silenced = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def guarded_streams() -> Iterator[None]:
    """Within this context, writes to standard error never fail, and to standard output only with `OutputLostError`.

    A stream that was closed before Python started discards everything.
    """
    for descriptor in (0, _STDOUT, _STDERR):
        try:
            os.fstat(descriptor)
        except OSError:
            # Takes the lowest free descriptor, which the next opened file would otherwise get.
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    guarded = [
        _Guarded(open(os.devnull, "w") if stream is None else stream, is_output)  # noqa: SIM115
        for stream, is_output in zip(before, (True, False), strict=True)
    ]
    sys.stdout, sys.stderr = cast(Any, guarded)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in guarded:
            stream.restore()


@contextlib.contextmanager
def others_print_to_stderr() -> Iterator[None]:
    """Within this context, standard output goes to standard error, even for C libraries and child processes.

    This redirects output of plugins, kernel libraries and compilers; results are written outside.
    """
    sys.stdout.flush()
    with contextlib.redirect_stdout(sys.stderr):
        saved = os.dup(_STDOUT)
        os.dup2(_STDERR, _STDOUT)
        try:
            yield
        finally:
            # Flush their buffers while the descriptor still points there.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                sys.__stdout__.flush()  # type: ignore[union-attr]
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(None).fflush(None)
            os.dup2(saved, _STDOUT)
            os.close(saved)
