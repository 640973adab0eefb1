"""Files of records: JSON of one schema, cached until they change."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import os
import stat
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from typing_extensions import Self

from moereg.errors import described, shown

T = TypeVar("T")
R = TypeVar("R", bound="Record")

_LOCK_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Record:
    """Base class of records, which are dataclasses."""

    @classmethod
    def from_dict(cls, values: object) -> Self:
        """Reads a record; unknown keys are ignored.

        Raises:
            ValueError: A key is missing, or its value has another type.
        """
        if not isinstance(values, Mapping):
            raise ValueError(f"a record must be an object, got {shown(values)}")
        checked: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if field.name in values:
                checked[field.name] = _checked(field.name, values[field.name])
            elif field.default is dataclasses.MISSING:
                raise ValueError(f"a record must say its {field.name}")
        make: Callable[..., Self] = cls
        return make(**checked)


def _checked(name: str, value: object) -> object:
    if name == "cases":
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"cases must be an integer of at least 1, got {shown(value)}")
        return value
    if name == "versions":
        if not isinstance(value, Mapping):
            raise ValueError(f"versions must be an object of texts, got {shown(value)}")
        return {_text("versions", key): _text(f"versions[{key!r}]", version) for key, version in value.items()}
    if name == "schemes":
        if not isinstance(value, list) or not value:
            raise ValueError(f"schemes must be a list of names, got {shown(value)}")
        return tuple(_text("schemes", scheme) for scheme in value)
    if name in ("error", "bound"):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a finite number of at least 0, got {shown(value)}")
        return float(value)
    text = _text(name, value)
    if name == "date":
        datetime.date.fromisoformat(text)
    return text


def _text(name: str, value: object) -> str:
    # A terminal would interpret unprintable characters.
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError(f"{name} must be printable text, got {shown(value)}")
    return value


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
    records = []
    for number, values in enumerate(document["records"]):
        try:
            records.append(kind.from_dict(values))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"records[{number}]: {error}") from error
    return tuple(records)


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
