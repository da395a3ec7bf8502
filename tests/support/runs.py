"""Small runs for tests, a display that stops them, and ways to damage and to compare their folders."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import gradshare as gs
from gradshare.files import add_checksum, verify_checksum
from gradshare.runs import checkpoints
from gradshare.runs.display import Silent

TINY: dict[str, Any] = dict(epochs=3, iterations=4, tasks=2, ways=3, queries=3, val_tasks=6, test_tasks=6, eval_batch=4)


def learner(**options: Any) -> gs.Learner:
    model = gs.Conv4(ways=3, filters=3, image=(1, 16, 16))
    return gs.maml_plus_plus(model, **{"steps": 2, "sharing": gs.GradientSharing(), "multi_step_epochs": 2} | options)


def same_run(first: Path, second: Path) -> None:
    """Weights, memory, Adam's moments after every epoch, metrics and summary to the last bit."""
    for name in ("config.json", "metrics.jsonl", "summary.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    found = [[*sorted((folder / "checkpoints").glob("epoch-*-iteration-0000"))] for folder in (first, second)]
    assert [path.name for path in found[0]] == [path.name for path in found[1]]
    for paths in zip(*found, strict=True):
        one, other = (checkpoints.load(path)[1] for path in paths)
        assert one.keys() == other.keys()
        assert all(one[name].numpy().tobytes() == other[name].numpy().tobytes() for name in one)  # NaN too


class StopAt(Silent):
    """Sends this process a signal at one moment of a run."""

    def __init__(self, epoch: int, iteration: int, number: int = signal.SIGTERM, split: str | None = None) -> None:
        self.moment, self.number, self.split = (epoch, iteration), number, split
        self.now = (0, 0)

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None:
        self.now = (epoch, iteration)
        if self.split is None and self.now == self.moment:
            os.kill(os.getpid(), self.number)

    def evaluating(self, split: str, done: int, total: int) -> None:
        if split == self.split and self.now == self.moment:
            self.split = None
            os.kill(os.getpid(), self.number)


class Unpickled:
    """Leaves a folder behind if somebody unpickles it."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("pickles-ran",)


def flip(path: Path, at: int, bit: int = 1) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


def rewrite(path: Path, **different: Any) -> None:
    """A JSON file with other content and the checksum that belongs to it."""
    path.write_text(json.dumps(add_checksum({**verify_checksum(json.loads(path.read_text())), **different})))


def rewrite_tensors(checkpoint: Path, content: bytes) -> None:
    """A checkpoint with other tensors and the checksums that belong to them."""
    (checkpoint / "tensors.safetensors").write_bytes(content)
    rewrite(checkpoint / "checkpoint.json", tensors_sha256=hashlib.sha256(content).hexdigest())


class Poisoned:
    """A data set in which some batches of a split have a task, the last one, whose query inputs are not numbers."""

    def __init__(self, dataset: gs.Dataset, split: str, which: Callable[..., bool]) -> None:
        """`which` says which batches, by epoch and iteration (in validation and test, by the number of the batch)."""
        self.dataset, self.split, self.which = dataset, split, which

    def sample(self, split: str, shape: gs.Shape, tasks: int, key: tuple[int, ...]) -> gs.Episodes:
        episodes = self.dataset.sample(split, shape, tasks, key)
        if split == self.split and self.which(*key[2:]):
            episodes.query_x[-1] = torch.nan
        return episodes
