"""Splits: which classes are for training, validation and test. Class names only.

The standard splits are packaged: CUB as Torchmeta and "A closer look" use it, MiniImagenet by Ravi & Larochelle,
Omniglot by Vinyals et al., CIFAR-FS by Bertinetto et al., FC100 by Oreshkin et al.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

from gradshare.errors import UserError
from gradshare.files import parse_json, read_bytes
from gradshare.method import SPLITS

Split = dict[str, list[str]]  # train, val and test: the names of their classes
STANDARD = ("cub", "mini", "omniglot", "cifar-fs", "fc100")
SHARES = {"train": 0.64, "val": 0.16, "test": 0.20}  # of a seeded split, as MiniImagenet has them
MAX_SPLIT_FILE = 64 * 2**20  # bytes


@cache
def standard_split(name: str) -> Split:
    """The standard split of a data set.

    Example:
        >>> {split: len(classes) for split, classes in standard_split("cub").items()}
        {'train': 100, 'val': 50, 'test': 50}
    """
    if name not in STANDARD:
        raise UserError(f"there is no standard split '{name}'; there are {', '.join(STANDARD)}")
    return json.loads((files("gradshare.data") / "splits" / f"{name}.json").read_text(encoding="utf-8"))


def read_split_file(path: Path) -> Split:
    """Read a split of one's own, a JSON file `{"train": [...], "val": [...], "test": [...]}`."""
    try:
        if path.stat().st_size > MAX_SPLIT_FILE:
            raise UserError(f"the split file {path} is larger than {MAX_SPLIT_FILE >> 20} MiB")
        content = parse_json(read_bytes(path).decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"the split file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"the split file {path} is not JSON: {error}") from None
    return _checked(content, f"the split file {path}")


def _checked(content: Any, what: str) -> Split:
    if not isinstance(content, dict) or not content or not set(content) <= set(SPLITS):
        raise UserError(f'{what} is not of the form {{"train": [...], "val": [...], "test": [...]}}')
    split = {name: content.get(name, []) for name in SPLITS}
    for name, classes in split.items():
        if not isinstance(classes, list) or not all(isinstance(each, str) for each in classes):
            raise UserError(f"'{name}' in {what} is not a list of class names")
    return split_by_class_inverse(split_by_class(split, what))


def split_by_class(split: Mapping[str, Iterable[str]], what: str) -> dict[str, str]:
    """Turn a split round, class name to split; a class that stands in two splits, or twice, is refused."""
    by_class: dict[str, str] = {}
    for name, classes in split.items():
        for each in map(spelling, classes):
            if each in by_class:
                where = f"twice in {name}" if by_class[each] == name else f"in both {by_class[each]} and {name}"
                raise UserError(f"class '{each}' is {where} in {what}")
            by_class[each] = name
    return by_class


def split_by_class_inverse(by_class: Mapping[str, str]) -> Split:
    """Class name to split, turned back into the classes of each split."""
    return {split: sorted(name for name, own in by_class.items() if own == split) for split in SPLITS}


def seeded_split(classes: Collection[str], seed: int = 0) -> Split:
    """Share classes out, 64 % train, 16 % val and 20 % test, in the order of the SHA-256 of seed and name.

    The order depends on nothing else, so every machine and version makes the same split, and a class that is added
    or taken away moves few others.

    Example:
        >>> seeded_split(["ant", "bee", "cow", "dog", "elk"], seed=0)
        {'train': ['bee', 'cow', 'dog'], 'val': ['ant'], 'test': ['elk']}
    """
    if len(classes) < len(SPLITS):
        raise UserError(f"train, val and test need at least 3 classes; there are {len(classes)}")
    order = sorted(classes, key=lambda name: sha256(f"{seed}:{spelling(name)}".encode()).digest())
    val, test = (max(1, round(SHARES[split] * len(order))) for split in ("val", "test"))
    train = len(order) - val - test
    parts = {"train": order[:train], "val": order[train : train + val], "test": order[train + val :]}
    return {split: sorted(names) for split, names in parts.items()}


def spelling(name: str) -> str:
    """One spelling of a name, however an archive wrote its accents (macOS takes them apart)."""
    return unicodedata.normalize("NFC", name)


def require_all(found: Collection[str], wanted: Collection[str], what: str, of: str) -> None:
    """Refuse missing classes: how many, and three of them."""
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise UserError(f"{len(missing)} of the {len(wanted)} classes of {of} are not in {what}: {some(missing)}")


def refuse_others(found: Collection[str], wanted: Collection[str], what: str, of: str) -> None:
    """Refuse classes that a standard split does not know."""
    others = sorted(set(found) - set(wanted))
    if others:
        raise UserError(
            f"{len(others)} classes in {what} are not in {of}: {some(others)}; import other data as a folder"
        )


def some(names: list[str]) -> str:
    """At most three names, and whether there are more."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
