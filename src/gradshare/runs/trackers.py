"""Trackers: where the options and the numbers of a run go beside its folder, such as TensorBoard, W&B or MLflow.

A tracker has the three methods of Lightning Fabric's loggers, so those can be used as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

from gradshare.errors import UserError, has_methods, say, short_repr
from gradshare.runs.config import Log, flat
from gradshare.runs.records import Epoch, Test
from gradshare.runs.workers import Interrupted

METHODS = ("log_hyperparams", "log_metrics", "finalize")


class Tracker(Protocol):
    """What `train` calls beside writing its folder. A tracker that raises an error is not called again."""

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        """Once, before training: the options of the run."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """After an epoch, with its number, from 1: the finite numbers of its line in metrics.jsonl. After the test."""

    def finalize(self, status: str) -> None:
        """At the end: `success`, `failed` (an error, or the run diverged) or `aborted` (Ctrl-C)."""


def as_trackers(trackers: Any) -> list[Tracker]:
    """None, one tracker or several, as a list; an error for what is no tracker."""
    if trackers is None:
        return []
    found = [trackers] if has_methods(trackers, METHODS) or not isinstance(trackers, Iterable) else list(trackers)
    for tracker in found:
        if not has_methods(tracker, METHODS):
            raise UserError(f"a tracker has the methods {', '.join(METHODS)}; {short_repr(tracker)} does not")
    return found


class Trackers:
    """The trackers of a run. One that raises an error is named on stderr, and left out from then on."""

    def __init__(self, trackers: Iterable[Tracker] = ()) -> None:
        self.trackers = list(trackers)

    def epoch(self, line: Epoch) -> None:
        self.call("log_metrics", epoch_numbers(line), line.epoch)

    def test(self, test: Test, epoch: int) -> None:
        self.call("log_metrics", test_numbers(test), epoch)

    def call(self, method: str, *arguments: Any) -> None:
        for tracker in list(self.trackers):
            try:
                getattr(tracker, method)(*deepcopy(arguments))  # one may change what it gets
            except NotImplementedError:  # such as `log_hyperparams` of Lightning's CSVLogger: the others work
                continue
            except Exception as error:
                self.trackers.remove(tracker)
                reason = " ".join(f"raised {type(error).__name__}, and is left out: {error}".split())
                say(f"gradshare: {type(tracker).__name__}.{method} {reason}", error=True)


@contextmanager
def tracking(trackers: Iterable[Tracker], options: Mapping[str, Any]) -> Iterator[Trackers]:
    """Tell trackers the options of a run at its start, and how it ended."""
    found = Trackers(trackers)
    found.call("log_hyperparams", flat(options))
    try:
        yield found
    except (Interrupted, KeyboardInterrupt):
        found.call("finalize", "aborted")
        raise
    except BaseException:
        found.call("finalize", "failed")
        raise
    found.call("finalize", "success")


def epoch_numbers(line: Epoch) -> dict[str, float]:
    """The finite numbers of an epoch; a gate has one for each inner step.

    Example:
        >>> epoch_numbers(Epoch(3, train_loss=1.5, m=(0.25, 0.75)))
        {'train_loss': 1.5, 'skipped': 0, 'm/1': 0.25, 'm/2': 0.75}
    """
    found: dict[str, float | None] = {}
    for name, value in line.as_json().items():
        found |= (
            {f"{name}/{step}": one for step, one in enumerate(value, 1)} if isinstance(value, list) else {name: value}
        )
    del found["epoch"]
    return _finite(found)


def test_numbers(test: Test) -> dict[str, float]:
    """The finite numbers of a test."""
    scores = {"test": test.best, "test_ensemble": test.ensemble}
    names = ("accuracy", "loss", "interval")
    return _finite({f"{kind}_{name}": getattr(score, name) for kind, score in scores.items() for name in names})


def _finite(numbers: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}


class TensorBoard:
    """Writes to the folder `tensorboard` of a run, for `tensorboard --logdir FOLDER`."""

    def __init__(self, run: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                'TensorBoard is not installed: pip install "gradshare[tensorboard]", or pip install tensorboard'
            ) from None
        self._open = lambda: SummaryWriter(str(run / "tensorboard"))
        self._writer: SummaryWriter | None = None
        self._options = ""

    def log_hyperparams(self, params: dict[str, Any]) -> None:
        self._options = "\n".join(["| option | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in params.items())])

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self._writer is None:  # only now: a run that cannot begin leaves no folder
            self._writer = self._open()
            self._writer.add_text("options", self._options)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finalize(self, status: str) -> None:
        if self._writer is not None:
            self._writer.close()


def trackers_for(log: Log | None, run: Path) -> list[Tracker]:
    """The tracker that `--log` names, for a run in a folder."""
    return [] if log is None else [TensorBoard(run)]
