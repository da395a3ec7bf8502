"""A run folder: opening it, what it says of its epochs, and writing its files whole."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradshare.errors import DamageWarning, UserError, out_of_memory
from gradshare.files import NEW, sync, tidy, write_whole, writing
from gradshare.method.state import MetaState, check_fit
from gradshare.runs import checkpoints
from gradshare.runs.checkpoints import Progress
from gradshare.runs.config import another_run, config_text, identity, read_config
from gradshare.runs.evaluation import Evaluation
from gradshare.runs.finished import damage

STATE = ("params", "learned", "memory")  # how the names of a state's tensors begin
ENSEMBLE = 5  # best epochs kept, and their number in the ensemble


def open_folder(
    folder: Path,
    config: dict[str, Any],
    resume: bool | None,
    check: Callable[[], None],
    longer: bool = False,
    rate_falls: bool = False,
) -> tuple[Progress, dict[str, Tensor]] | None:
    """Start a run's folder, or find the newest sound checkpoint that it holds, if there is one.

    Args:
        resume: whether it must hold a run, or must not; None leaves that open.
        check: refuses what cannot be trained; called before the folder of a new run is made.
        longer: whether the run may have more epochs now than it was begun with; `lengthen` then makes it so.
        rate_falls: whether the outer rate of an epoch depends on how many there are.
    """
    begun = (folder / "config.json").exists()
    if begun and resume is False:
        raise UserError(f"{folder} already holds a run: go on with it (train --resume), or choose another folder")
    if begun or resume:
        return _find(folder, config, longer, rate_falls)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another folder")
    if folder.exists() and any(path.name != f".config.json{NEW}" for path in folder.iterdir()):
        raise UserError(f"{folder} is not empty and not a run; choose another folder")
    check()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
    write_whole(folder / "config.json", config_text(config))
    return None


def _find(
    folder: Path, config: dict[str, Any], longer: bool, rate_falls: bool
) -> tuple[Progress, dict[str, Tensor]] | None:
    stored, wanted = read_config(folder), json.loads(json.dumps(config, default=str))
    more = longer and type(stored.get("epochs")) is int and wanted["epochs"] > stored["epochs"]
    if more and rate_falls:
        raise another_run(folder, stored["epochs"], wanted["epochs"])
    for name in sorted(set(wanted) | set(stored)):
        if wanted.get(name) != stored.get(name) and not (name == "epochs" and more):
            raise UserError(
                f"the run in {folder} has {name} = {stored.get(name)!r}, not {wanted.get(name)!r};"
                " resume with the same options, or choose another folder"
            )
    with writing(folder):
        checkpoints.recover(folder / "checkpoints")
    found = checkpoints.newest(folder / "checkpoints", identity(stored))
    if found is not None and found[0].iteration > stored["iterations"]:
        raise UserError(f"{found[0].name} in {folder} is after the {stored['iterations']} iterations of an epoch")
    metrics = folder / "metrics.jsonl"
    if found is None and ((metrics.exists() and metrics.stat().st_size) or (folder / "DONE").exists()):
        raise UserError(
            f"the run in {folder} has trained, but its checkpoints are gone: restore them from a copy,"
            " or start the run again in another folder"
        )
    return found


@contextmanager
def begun_in_vain(folder: Path) -> Iterator[None]:
    """A run that its first memory is too much for leaves no folder: it has to be begun with other options."""
    new = not (folder / "config.json").exists()
    with tidy(folder):
        try:
            yield
        except Exception as error:
            if new and out_of_memory(error) and not (folder / "checkpoints").exists():
                (folder / "config.json").unlink(missing_ok=True)
            raise


def lengthen(folder: Path, config: dict[str, Any]) -> None:
    """Have a run's `config.json` say that it is to have more epochs, if it is.

    What the run said of its end goes first: killed in between, it is an unfinished run of so many epochs as before.
    """
    if read_config(folder)["epochs"] == config["epochs"]:
        return
    with writing(folder):
        for name in ("DONE", "summary.json"):
            (folder / name).unlink(missing_ok=True)
            sync(folder)
    write_whole(folder / "config.json", config_text(config))


def take_up(folder: Path, progress: Progress, epochs: int) -> None:
    """Bring everything in a run's folder to where the checkpoint is that the run goes on from."""
    with writing(folder):
        checkpoints.set_aside(folder / "checkpoints", progress)
        checkpoints.prune(folder / "checkpoints", best_epochs(progress.metrics))
        for left in folder.glob(f".*{NEW}"):
            left.unlink()
        write_lines(folder, progress)
        done = (folder / "DONE").exists()
        reason = damage(folder)
        if done and (reason or progress.epoch < epochs):
            (folder / "DONE").unlink()
    if reason and progress.epoch == epochs:
        warnings.warn(f"the run in {folder} is damaged: {reason}; it is tested again", DamageWarning, stacklevel=2)
    if not (folder / "DONE").exists():
        _tell_lost(folder, best_epochs(progress.metrics))


def _tell_lost(folder: Path, epochs: list[int]) -> None:
    """Say which of the best epochs have no checkpoint any more, while there is time to bring it back."""
    lost = [epoch for epoch in sorted(epochs) if not checkpoints.of_epoch(folder / "checkpoints", epoch).exists()]
    if lost:
        warnings.warn(
            f"the run in {folder} has lost checkpoints of its best epochs so far ({', '.join(map(str, lost))}): unless"
            " others become better, the test will need them, so restore them from a copy",
            DamageWarning,
            stacklevel=3,
        )


def write_lines(folder: Path, progress: Progress) -> None:
    """The files with a line an epoch."""
    for name, lines in {"metrics": progress.metrics, "timings": progress.timings}.items():
        write_whole(folder / f"{name}.jsonl", "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))


def best_epochs(metrics: list[dict[str, Any]], count: int = ENSEMBLE) -> list[int]:
    """The epochs of the best validation, best first, the earlier first where two are equal.

    By accuracy; where there is none by loss, with epochs in which fewer tasks diverged before all others.
    """

    def rank(line: dict[str, Any]) -> tuple[float, float]:
        if line["val_accuracy"] is not None:
            return 0, -line["val_accuracy"]
        return line.get("val_diverged", 0), math.inf if line["val_loss"] is None else line["val_loss"]

    return [line["epoch"] for line in sorted(metrics, key=rank)[:count]]


def best_value(metrics: list[dict[str, Any]]) -> dict[str, float | None]:
    """The best validation, by its name in the summary."""
    best = metrics[best_epochs(metrics)[0] - 1]
    name = "val_loss" if best["val_accuracy"] is None else "val_accuracy"
    return {f"best_{name}": best[name]}


def described(evaluation: Evaluation) -> dict[str, float | None]:
    return {
        "accuracy": evaluation.accuracy,
        "interval": evaluation.interval,
        "loss": evaluation.loss,
        "diverged": evaluation.diverged,
    }


def gates(state: MetaState) -> dict[str, list[float] | None]:
    """sig(m) and sig(lam) of every inner step; where the gates are conditioned on the task, by how much."""
    sharing = state.learned.get("sharing", {})
    found = {name: sharing[name].sigmoid().tolist() if name in sharing else None for name in ("m", "lam")}
    return {**found, "agreement": sharing["agreement"].tolist()} if "agreement" in sharing else found


def load_state(state: MetaState, tensors: dict[str, Tensor]) -> None:
    """Fill a state of the same shape with the tensors of a checkpoint."""
    fill(state.tensors(), {name: tensor for name, tensor in tensors.items() if name.partition("/")[0] in STATE})


@torch.no_grad()
def fill(places: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Give tensors the values that a checkpoint has for just these, once all of them fit."""
    check_fit(places, tensors)
    for name, place in places.items():
        place.copy_(tensors[name])


def load_epoch(folder: Path, epoch: int) -> dict[str, Tensor]:
    """The tensors of a run at the end of an epoch."""
    path = checkpoints.of_epoch(folder / "checkpoints", epoch)
    if not path.exists():
        kept = ", ".join(path.name for path in checkpoints.listing(folder / "checkpoints")) or "none"
        raise UserError(f"the checkpoint of epoch {epoch} of the run in {folder} is not kept; there are {kept}")
    try:
        return checkpoints.load(path, identity(read_config(folder)))[1]
    except checkpoints.Damaged as error:
        raise checkpoints.Damaged(
            f"{error}; the test needs epoch {epoch}: restore it from a copy, or start the run again in another folder"
        ) from None


def next_free(parent: Path) -> Path:
    """The first of run-1, run-2, ... that is not there."""
    return next(path for number in count(1) if not (path := parent / f"run-{number}").exists())
