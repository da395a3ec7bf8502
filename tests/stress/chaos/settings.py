"""What the parts of the suite share: runs, folders, time and counts."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
    """The state of the suite while it runs."""

    folder: Path
    runs: list[Run]
    kills: int  # wanted
    damaged: int  # files wanted
    deadline: float  # of time.monotonic
    tried: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)  # tries that kept every promise
    outcomes: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)  # what was skipped: why
    _numbers: Iterator[int] = field(default_factory=count)

    @contextmanager
    def trying(self, what: str, how: str) -> Iterator[Path]:
        """One try, in a folder of its own. The folder is kept if a promise is broken."""
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


Kind = Callable[[Chaos, Random], Iterator[None]]
"""One kind of disturbance: a generator that stops after every try, so that kinds can take turns."""
