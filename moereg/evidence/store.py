"""Files of records: JSON of one schema, cached until they change.

Reading raises ArgumentError where it cannot; where `is_own`, only this user or root may have write access.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from moereg.errors import ArgumentError, RecordFileError, described, shown
from moereg.runtime.files import open_regular
from moereg.runtime.json_types import decode

T = TypeVar("T")
R = TypeVar("R")

_LOCK_SECONDS = 10.0


class _File(msgspec.Struct, Generic[R]):
    records: tuple[R, ...]


def read_once(path: Path, read: Callable[..., T], nothing: T, *arguments: object) -> T:
    """Caches `read(path, ...)` until the file changes; `nothing` if there is no file."""
    stamp: tuple[int, ...] = ()
    try:
        status = os.stat(path)
        stamp = status.st_mtime_ns, status.st_size, status.st_ino
    except (FileNotFoundError, NotADirectoryError):
        return nothing
    except (OSError, ValueError):
        pass  # Reading raises the error.
    answer: T = _read_once(path, read, arguments, stamp)
    return answer


@functools.lru_cache(maxsize=256)
def _read_once(path: Path, read: Callable[..., Any], arguments: tuple[object, ...], _stamp: tuple[int, ...]) -> Any:
    return read(path, *arguments)


def read_records(path: Path, kind: type[R], schema: int, is_own: bool = False) -> tuple[R, ...]:
    """Reads the records of a class from a file of that schema."""
    file: _File[R] = decode_file(read_content(path, is_own), _File[kind], schema)  # type: ignore[valid-type]
    return file.records


class OlderFileError(ArgumentError):
    """A file of an older schema, which counts as empty."""


class _Schema(msgspec.Struct):
    schema: Any = None


def decode_file(content: bytes | str, kind: Any, schema: int) -> Any:
    """Reads the JSON of a file that names its schema; an older one is an OlderFileError."""
    check_schema(decode(content, _Schema, "it").schema, schema)
    return decode(content, kind, "it")


def check_schema(found: object, schema: int) -> None:
    """Checks the schema of a file; an older one is an OlderFileError."""
    if type(found) is int and 0 < found < schema:
        raise OlderFileError(f"it was made by an older moereg (schema {found}, now {schema}) and is ignored")
    if type(found) is not int or found != schema:
        raise ArgumentError(f"schema must be {schema}, got {shown(found)}")


def read_content(path: Path, is_own: bool = False) -> bytes:
    """Reads a file."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            status = os.fstat(file.fileno())
            others_write = status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if is_own and others_write:
                raise PermissionError("it must belong to this user or to root, and nobody else may write to it")
            return file.read()
    except (OSError, ValueError) as error:
        raise ArgumentError(f"it must be readable JSON, got {described(error)}") from error


def read_document(path: Path) -> Any:
    """Reads a file of JSON."""
    return decode(read_content(path), Any, "it")


def unusable(what: str, path: Path, error: Exception, variable: str) -> str:
    """Words an error about a file of this machine, with a cure that loses nothing but what cannot be read anyway.

    `variable` is the environment variable that names another file.
    """
    cause = error.__cause__ or error
    number = getattr(cause, "errno", None)
    if isinstance(cause, TimeoutError):
        cure = "wait for the process that holds its lock or end it, or "
    elif isinstance(cause, PermissionError) or number == errno.EROFS:
        cure = "let this user, and nobody else, write to it and its folder, or "
    elif number in (errno.ENOSPC, errno.EDQUOT):
        cure = "free space on its disk, or "
    elif isinstance(cause, (msgspec.DecodeError, UnicodeError, RecursionError)):
        cure = "delete it, or "
    else:
        cure = "" if isinstance(cause, OSError) else "move it away, or "
    text = described(error) if isinstance(error, OSError) else str(error)
    return f"{what} {shown(str(path))} cannot be used: {text}; {cure}name another file in {variable}"


def records_text(schema: int, records: Iterable[Any]) -> str:
    """The text of a file of records."""
    document = {"schema": schema, "records": [dataclasses.asdict(record) for record in records]}
    return json.dumps(document, indent=1) + "\n"


def change_file(named: Path, changed: Callable[[Path], str], what: str, variable: str) -> None:
    """Replaces a file of the user's atomically by `changed(path)`, its path without links; writers take turns.

    A RecordFileError if it cannot be read, or it or its lock cannot be written.
    """
    try:
        _change(Path(os.path.realpath(named)), changed)
    except (OSError, ValueError) as error:
        raise RecordFileError(unusable(what, named, error, variable)) from error


def _change(path: Path, changed: Callable[[Path], str]) -> None:
    import filelock

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with filelock.FileLock(f"{path}.lock", timeout=_LOCK_SECONDS):
        text = changed(path)
        handle, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
