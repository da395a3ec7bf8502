"""Files that a crash leaves whole, JSON that carries its own checksum, and typed records from JSON.

Imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints
from uuid import uuid4

from gradshare.errors import UserError, short_repr

NEW = ".new"  # the end of the name of a file or folder that is being written; the name begins with a dot


def write_whole(path: Path, text: str | bytes) -> None:
    """Write a file so that a reader, or a crash, finds either the old content or the new one."""
    content = text.encode() if isinstance(text, str) else text
    with suppress(OSError, UserError):
        if read_bytes(path) == content:
            return
    temporary = path.with_name(f".{path.name}{NEW}")
    with writing(path):
        try:
            write_synced(temporary, content)
            temporary.replace(path)
            sync(path.parent)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_folder(folder: Path, content: dict[str, bytes]) -> None:
    """Write the files of a new folder, whole or not at all."""
    temporary = folder.with_name(f".{folder.name}.{uuid4().hex[:12]}{NEW}")  # another process may write there too
    with writing(folder):
        try:
            temporary.mkdir(parents=True)
            for name, file in content.items():
                write_synced(temporary / name, file)
            sync(temporary)
            temporary.rename(folder)
            sync(folder.parent)
            sync(folder.parent.parent)  # the parent may be new
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk. A file or link of that name is removed first, never followed."""
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def tidy(folder: Path) -> Iterator[None]:
    """After the block, remove `folder` and its parents if the block created them and they are empty."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    finally:
        for path in new:
            with suppress(OSError):  # it is not empty, or was never created
                path.rmdir()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError of the block, such as a full disk, into a UserError that names the path."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def reading(problem: str) -> Iterator[None]:
    """Turn whatever the block raises into a UserError that begins with `problem`: libraries raise many kinds."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise UserError(f"{problem}: {reason[:200]}") from None


def written_by_newer(what: str, version: object, known: int) -> str:
    return f"was written by a newer gradshare ({what} version {version}, this one reads {known}): update gradshare"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def add_checksum(content: dict[str, Any], name: str = "sha256") -> dict[str, Any]:
    """A JSON object with the SHA-256 of the rest as its last entry, of that name.

    Example:
        >>> verify_checksum(add_checksum({"seed": 0}))
        {'seed': 0}
    """
    plain = json.loads(json.dumps(content, default=str))
    return {**plain, name: _digest(plain)}


def verify_checksum(content: dict[str, Any], name: str = "sha256") -> dict[str, Any]:
    """The object that `add_checksum` got; ValueError if it was changed."""
    rest = {entry: value for entry, value in content.items() if entry != name}
    if content[name] != _digest(rest):
        raise ValueError("it does not match its checksum")
    return rest


def _digest(content: dict[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode())


def read_bytes(path: Path) -> bytes:
    """The content of a regular file. A pipe, which may never end, or a device raises a UserError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UserError(f"{path} is not a file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def read_text(path: Path) -> str:
    """The text of a regular file in UTF-8."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged: it is not UTF-8 text at byte {error.start}") from None


def read_json(path: Path) -> Any:
    """The content of a JSON file; a UserError names a file that is damaged."""
    try:
        return parse_json(read_text(path))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}") from None


def parse_json(text: str | bytes) -> Any:
    """A JSON value in which no object has a key twice; ValueError if it is not valid.

    Example:
        >>> parse_json('{"seed": 1, "seed": 2}')
        Traceback (most recent call last):
        ValueError: it has 'seed' twice
    """
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_not_json)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it has {short_repr(key)} twice")
        found[key] = value
    return found


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


T = TypeVar("T")


def record(kind: type[T], data: Any, where: str) -> T:
    """Build a dataclass from a JSON object; a missing field or a value of the wrong type raises a UserError.

    The type hints say what is valid: int, float, str, bool, Literal, `X | None`, `tuple[X, ...]` and dataclasses.
    A field with a default may be missing. Fields that the dataclass does not have are ignored.

    Args:
        where: the file, and the line if it has several, for the message.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Point:
        ...     x: float
        ...     name: str = ""
        >>> record(Point, {"x": 1}, "points.json")
        Point(x=1.0, name='')
        >>> record(Point, {"x": "1"}, "points.json")
        Traceback (most recent call last):
        gradshare.errors.UserError: points.json is damaged: x is '1', not a number
    """
    try:
        return cast(T, parse(kind, data, "it"))
    except ValueError as error:
        raise UserError(f"{where} is damaged: {error}") from None


NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def parse(kind: Any, value: Any, name: str) -> Any:
    """A JSON value as what a type hint says; ValueError, with the name of the value, if it is something else."""
    if is_dataclass(kind):
        return _parse_dataclass(kind, value, name)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else parse(inner[0], value, name)
    if origin is tuple and isinstance(value, list):
        return tuple(parse(inner[0], one, f"a value of {name}") for one in value)
    if origin is Literal:
        wanted, valid = f"one of {', '.join(map(str, inner))}", value in inner
    elif kind is float:
        wanted, valid = NAMES[float], type(value) in (int, float) and abs(value) <= sys.float_info.max
    else:
        wanted, valid = NAMES.get(kind, "a list"), type(value) is kind
    if not valid:
        raise ValueError(f"{name} is {short_repr(value)}, not {wanted}")
    return float(value) if kind is float else value


def _parse_dataclass(kind: Any, value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {short_repr(value)}, not a JSON object")
    hints, required = _fields_of(kind)
    if missing := required - value.keys():
        raise ValueError(f"{name} has no {', '.join(sorted(missing))}")
    return kind(**{field: parse(hint, value[field], field) for field, hint in hints.items() if field in value})


@cache  # a report reads tens of thousands of lines
def _fields_of(kind: Any) -> tuple[dict[str, Any], set[str]]:
    """The type hint of every field, and the fields without a default."""
    hints, own = get_type_hints(kind), fields(kind)
    return {field.name: hints[field.name] for field in own}, {one.name for one in own if one.default is MISSING}


def check_output(path: Path, beginning: bytes, kind: str) -> None:
    """Raise an error if `path` exists, unless it is an earlier file of the same kind by its first bytes."""
    if not os.path.lexists(path):
        return
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(beginning)) == beginning:
                return
    raise UserError(f"{path} exists already, and it is not {kind}: choose another name")
