"""The short runs that are disturbed, and the same runs undisturbed, to compare with to the last bit."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradshare.cli.app import main
from gradshare.data.store import ClassEntry, Index, write_store

from .children import Broken, Ended, gradshare
from .moments import Moment, Trap, recorded

SIZES = {"ways": 2, "queries": 2, "tasks": 2, "filters": 2, "val-tasks": 2, "test-tasks": 2, "eval-batch": 2}
SIZES |= {"iterations": 2, "threads": 1}
LEARNERS = {
    "maml, shared": {"method": "maml", "arm": "shared", "steps": 1},
    "maml++, shared": {"method": "mamlpp", "arm": "shared", "norm": "tensor", "steps": 2, "first-order-epochs": 1},
    "meta-sgd, memory only": {"method": "metasgd", "arm": "memory-only", "steps": 1},
    "anil, original": {"method": "anil", "arm": "original", "steps": 1},
}


@dataclass(frozen=True)
class Run:
    """A run by its options, done once without disturbance."""

    name: str
    options: tuple[str, ...]
    whole: Path  # its folder
    seconds: float  # it took
    moments: list[Moment]  # it had

    def start(self, folder: Path) -> tuple[str, ...]:
        """What a user types to start it, or to go on."""
        if (folder / "config.json").exists():
            return ("train", "--resume", str(folder))
        return ("train", *self.options, "--out", str(folder))

    def finish(self, folder: Path, words: tuple[str, ...] = ()) -> Ended:
        """Start or go on, undisturbed, by these words or those of `start`: it must end well, and be the same run."""
        ended = gradshare(*(words or self.start(folder)))
        ended.must_be_tidy()
        ended.must(ended.code == 0, "a disturbed run could not be finished")
        self.must_equal(folder)
        return ended

    def must_equal(self, folder: Path) -> None:
        """Weights, memory, Adam's moments, metrics and summary to the last bit, and nothing left behind."""
        for name in ("config.json", "metrics.jsonl", "summary.json"):
            _same_bytes(self.whole / name, folder / name)
        kept = sorted(path.parent.name for path in self.whole.glob("checkpoints/*/*.safetensors"))
        there = sorted(path.parent.name for path in folder.glob("checkpoints/*/*.safetensors"))
        missing = set(kept) - set(there)
        if missing or any(name.endswith("-iteration-0000") for name in set(there) - set(kept)):
            raise Broken(f"{folder} has the checkpoints {there}, not {kept}")
        for name in kept:
            _same_bytes(
                *(f / "checkpoints" / name / "tensors.safetensors" for f in (self.whole, folder)),
            )
        left = [*folder.rglob(".*"), *folder.parent.glob(f".{folder.name}*")]
        if left or not (folder / "DONE").exists():
            raise Broken(f"left behind in {folder}: {left}; done: {(folder / 'DONE').exists()}")


def _same_bytes(first: Path, second: Path) -> None:
    if not second.exists() or first.read_bytes() != second.read_bytes():
        raise Broken(f"{second} is not the same as {first}")


def _words(options: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(word) for option, value in options.items() for word in (f"--{option}", value))


def make_data(folder: Path) -> Path:
    """A data set of random images."""
    generator = np.random.default_rng(0)
    entries = [ClassEntry(f"{split}-{i}", split, 6) for split in ("train", "val", "test") for i in range(4)]
    images = generator.integers(0, 256, (len(entries) * 6, 16, 16, 1), dtype=np.uint8)
    write_store(folder, Index("noise", (16, 16, 1), tuple(entries), "none", "made by the chaos suite"), iter(images))
    return folder


def prepare(folder: Path, data: Path, seed: int) -> list[Run]:
    """Every run once, undisturbed, and once more with its moments recorded."""
    runs = []
    for number, (name, learner) in enumerate(LEARNERS.items()):
        options = {"dataset": data, **SIZES, "epochs": 3, **learner, "seed": seed + number}
        words = _words(options)
        whole, again, record = (folder / f"{kind}-{number}" for kind in ("whole", "again", "moments"))
        again.mkdir()
        undisturbed = gradshare("train", *words, "--out", whole)
        undisturbed.must(undisturbed.code == 0, "an undisturbed run failed")
        watched = gradshare("train", *words, "--out", again / "run", before=Trap(again, record=record).set)
        watched.must(watched.code == 0, "a run that is only watched failed")
        run = Run(name, words, whole, undisturbed.seconds, recorded(record))
        run.must_equal(again / "run")
        shutil.rmtree(again)
        runs.append(run)
    return runs


def warm_up(folder: Path, data: Path) -> None:
    """A run in this process itself: its children then find everything imported."""
    before = sys.argv
    sys.argv = ["gradshare", "train", "--dataset", str(data), *_words(SIZES), "--epochs", "1", "--out", str(folder)]
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
    sys.argv = before
    if threading.active_count() > 1:
        raise RuntimeError("a process with threads cannot be forked")
