"""JSON files at the border: parsed and checked, or refused with the file, the line and the reason."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from gradshare.errors import MOST, UserError, shown
from gradshare.files import parse_json, read_bytes

LARGEST = 1e100  # sums and squares of such numbers are still numbers
Json = dict[str, Any]


class Record(NamedTuple):
    """One JSON object, and where it stands, for messages."""

    values: Json
    where: str

    def number(self, key: str) -> float:
        """The number under `key`; NaN where it is absent or null, and infinite beyond what can be computed with."""
        value = self.values.get(key)
        if value is None:
            return math.nan
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"{self.where}: {key} is {shown(value)}, and a number or null is needed")
        return float(value) if not abs(value) > LARGEST else math.inf if value > 0 else -math.inf

    def fraction(self, key: str) -> float:
        value = self.number(key)
        if value < 0 or value > 1:
            raise UserError(f"{self.where}: {key} is {value:g}, and a value between 0 and 1 is needed")
        return value

    def count(self, key: str, least: int = 1) -> int:
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise UserError(f"{self.where}: {key} is {shown(value)}, and a whole number from {least} on is needed")
        return value

    def count_or_none(self, key: str) -> int:
        """A number of things that may be none; lines of older runs do not have it, and mean none."""
        return self.count(key, least=0) if key in self.values else 0

    def numbers(self, key: str) -> list[float] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list):
            raise UserError(f"{self.where}: {key} is {shown(value)}, and a list of numbers is needed")
        return [Record({key: item}, self.where).number(key) for item in value]

    def inner(self, key: str) -> Record | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise UserError(f"{self.where}: {key} is {shown(value)}, and an object or null is needed")
        return Record(value, f"{self.where}, {key}")


def read_object(path: Path) -> Record:
    return _parse(_text(path), str(path))


def read_lines(path: Path) -> list[Record]:
    """The records of a .jsonl file whose epochs increase; none where the file is absent."""
    if not path.exists():
        return []
    lines = enumerate(_text(path).split("\n"), start=1)
    records = [_parse(line, f"{path}, line {number}") for number, line in lines if line.strip()]
    epochs = [record.count("epoch") for record in records]
    for before, epoch, record in zip(epochs, epochs[1:], records[1:], strict=False):
        if epoch <= before:
            raise UserError(f"{record.where}: epoch {epoch} comes after epoch {before}")
    return records


def _text(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}: the file is damaged") from error


def _parse(text: str, where: str) -> Record:
    try:
        values = parse_json(text)
    except ValueError as error:
        reason = getattr(error, "msg", error)
        raise UserError(f"{where}: not complete JSON ({reason}): the file is damaged or cut") from error
    if not isinstance(values, dict):
        raise UserError(f"{where}: a JSON object is needed, not {type(values).__name__}")
    return Record(values, where)
