"""Files of records: JSON of one schema, cached until they change."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import Self

from moereg.arguments import check_object
from moereg.errors import described, shown

T = TypeVar("T")
R = TypeVar("R", bound="Record")

_LOCK_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Record:
    """Base class of records, which are dataclasses."""

    @classmethod
    def from_dict(cls, values: object, name: str = "a record") -> Self:
        """Inverse of `dataclasses.asdict`; raises ArgumentError, with the field's path from `name` on."""
        return check_object(name, values, cls)


def read_once(path: Path, read: Callable[..., T], nothing: T, *arguments: str) -> T:
    """Caches `read(path, ...)` until the file changes.

    Returns:
        `nothing` if there is no file.
    """
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
def _read_once(path: Path, read: Callable[..., Any], arguments: tuple[str, ...], _stamp: tuple[int, ...]) -> Any:
    return read(path, *arguments)


def read_records(path: Path, kind: type[R], schema: int, is_own: bool = False) -> tuple[R, ...]:
    """Reads the records of a file.

    Args:
        path: The file.
        kind: The records' class.
        schema: The required schema.
        is_own: Whether only this user or root may have write access.

    Raises:
        ValueError: It cannot be read, others may write to it, or it does not hold records of this schema.
    """
    document = read_document(path, is_own)
    if not isinstance(document, Mapping) or document.get("schema") != schema:
        found = document.get("schema") if isinstance(document, Mapping) else type(document).__name__
        raise ValueError(f"it must be an object of schema {schema}, got {shown(found)}")
    if not isinstance(document.get("records"), list):
        raise ValueError("its records must be a list")
    return tuple(kind.from_dict(values, f"records[{number}]") for number, values in enumerate(document["records"]))


def read_document(path: Path, is_own: bool = False) -> Any:
    """Reads a file of JSON.

    Args:
        path: The file.
        is_own: Whether only this user or root may have write access.

    Raises:
        ValueError: It cannot be read, or others may write to it.
    """
    try:
        with open(path, encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            others_write = status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if is_own and others_write:
                raise ValueError("it must belong to this user or to root, and nobody else may write to it")
            return json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"it must be readable JSON, got {described(error)}") from error


def records_text(schema: int, records: Iterable[Any]) -> str:
    """The text of a file of records."""
    document = {"schema": schema, "records": [dataclasses.asdict(record) for record in records]}
    return json.dumps(document, indent=1) + "\n"


def change_file(path: Path, changed: Callable[[Path], str]) -> None:
    """Replaces a file of the user's atomically by `changed(path)`; concurrent writers take turns.

    Raises:
        OSError: It or its lock cannot be written.
    """
    import filelock

    path = Path(os.path.realpath(path))
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
