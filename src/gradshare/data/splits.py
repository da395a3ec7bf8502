"""Splits: which classes are for training, validation and test, by their names.

The package has the standard splits: CUB as Torchmeta and "A closer look" use it, MiniImagenet by Ravi & Larochelle,
Omniglot by Vinyals et al., CIFAR-FS by Bertinetto et al., FC100 by Oreshkin et al.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from itertools import islice
from pathlib import Path

from gradshare.errors import UserError
from gradshare.files import parse_json, read_bytes, reading, record
from gradshare.method import SPLITS

STANDARD = ("cub", "mini", "omniglot", "cifar-fs", "fc100")
VAL_SHARE, TEST_SHARE = 0.16, 0.20  # of a seeded split, as in MiniImagenet; the rest is for training


@dataclass(frozen=True)
class Split:
    """Names of the classes of each split."""

    train: tuple[str, ...] = ()
    val: tuple[str, ...] = ()
    test: tuple[str, ...] = ()

    def by_class(self) -> dict[str, str]:
        """The split of each class.

        Example:
            >>> Split(train=("ant", "bee"), test=("cow",)).by_class()
            {'ant': 'train', 'bee': 'train', 'cow': 'test'}
        """
        return {spelling(name): split for split in SPLITS for name in getattr(self, split)}


@cache
def standard_split(name: str) -> Split:
    """The standard split of a data set.

    Example:
        >>> split = standard_split("cub")
        >>> len(split.train), len(split.val), len(split.test)
        (100, 50, 50)
    """
    if name not in STANDARD:
        raise UserError(f"there is no standard split '{name}'; there are {', '.join(STANDARD)}")
    content = (files("gradshare.data") / "splits" / f"{name}.json").read_text(encoding="utf-8")
    return record(Split, parse_json(content), f"{name}.json")


def read_split_file(path: Path) -> Split:
    """Read a user's split, a JSON file `{"train": [...], "val": [...], "test": [...]}`."""
    with reading(f"the split file {path} cannot be read"):
        content = parse_json(read_bytes(path).decode("utf-8-sig"))
    if not isinstance(content, dict) or not content or not set(content) <= set(SPLITS):
        raise UserError(f'the split file {path} is not of the form {{"train": [...], "val": [...], "test": [...]}}')
    split = record(Split, content, f"the split file {path}")
    counts = Counter(spelling(name) for own in SPLITS for name in getattr(split, own))
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise UserError(f"the split file {path} names {len(twice)} classes twice: {some(twice)}")
    return split


def seeded_split(classes: Collection[str], seed: int = 0) -> Split:
    """Divide classes at random: 64 % train, 16 % val, 20 % test.

    The order is that of the SHA-256 of seed and name. So every machine makes the same split, and a class that is added
    or removed moves few others.

    Example:
        >>> seeded_split(["ant", "bee", "cow", "dog", "elk"], seed=0)
        Split(train=('bee', 'cow', 'dog'), val=('ant',), test=('elk',))
    """
    if len(classes) < len(SPLITS):
        raise UserError(f"train, val and test need at least 3 classes; there are {len(classes)}")
    order = sorted(classes, key=lambda name: sha256(f"{seed}:{spelling(name)}".encode()).digest())
    val, test = (max(1, round(share * len(order))) for share in (VAL_SHARE, TEST_SHARE))
    train = len(order) - val - test
    parts = (order[:train], order[train : train + val], order[train + val :])
    return Split(*(tuple(sorted(names)) for names in parts))


def spelling(name: str) -> str:
    """One spelling of a name: some archives, as macOS writes them, have accents as characters of their own."""
    return unicodedata.normalize("NFC", name)


def some(names: Iterable[str]) -> str:
    """At most three names."""
    first = list(islice(names, 4))
    return ", ".join(first[:3]) + (", ..." if len(first) > 3 else "")
