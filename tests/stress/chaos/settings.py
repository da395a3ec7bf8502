"""What the parts of the suite share: runs, chance, places, time, and the counts."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

from .children import Broken
from .runs import Run


class TimeIsUp(Exception):
    """The minutes given are over."""


@dataclass
class Chaos:
    """A chaos in progress."""

    folder: Path
    runs: list[Run]
    kills: int  # wanted
    damaged: int  # files wanted
    thorough: bool  # every moment, or some of every kind
    deadline: float  # of time.monotonic
    random: Random = field(default_factory=Random)
    tried: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)  # of these, with every promise
    outcomes: Counter[str] = field(default_factory=Counter)  # how
    skipped: dict[str, str] = field(default_factory=dict)  # what, and why
    _numbers: Iterator[int] = field(default_factory=count)

    @contextmanager
    def trying(self, what: str, how: str) -> Iterator[Path]:
        """One try: a place of its own for a run folder; counted if it ends well, kept to be looked at if not."""
        if time.monotonic() > self.deadline:
            raise TimeIsUp(f"time is up in: {what}")
        self.tried[what] += 1
        place = self.folder / f"try-{next(self._numbers)}"
        place.mkdir()
        try:
            yield place
        except Broken as error:
            raise Broken(f"{what}: {how}\n{error}\n  the folder: {place}") from None
        self.kept[what] += 1
        shutil.rmtree(place)
