"""Files that others may have made: read whole and never waited for, JSON without surprises. Imports nothing heavy."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from gradshare.errors import UserError

DEEPEST = 50  # levels of nesting; nothing of ours has more than 5


def read_bytes(path: Path) -> bytes:
    """The content of a regular file. A pipe, which may never end, or a device is refused."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UserError(f"{path} is not a file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    except (MemoryError, OverflowError):
        raise UserError(f"{path} is too large to read: {os.fstat(descriptor).st_size:,} bytes") from None
    finally:
        os.close(descriptor)


def read_text(path: Path) -> str:
    """The text of a regular file, in UTF-8."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged: it is not UTF-8 text at byte {error.start}") from None


def parse_json(text: str | bytes) -> Any:
    """A JSON value with each key once and little nesting; ValueError says in a few words what is wrong.

    Example:
        >>> parse_json('{"seed": 1, "seed": 2}')
        Traceback (most recent call last):
        ValueError: 'seed' is there twice
    """
    try:
        value = json.loads(text, object_pairs_hook=_each_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for one in level for inner in _within(one)]
        if not level:
            return value
    raise ValueError("it is nested too deeply")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key[:60]!r} is there twice")
        found[key] = value
    return found


def _within(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
