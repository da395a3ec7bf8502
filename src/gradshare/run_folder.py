"""A run folder: opening it, what it says of its epochs, and writing its files whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradshare import checkpoints
from gradshare.checkpoints import Progress, sync
from gradshare.config import config_text, read_config
from gradshare.errors import UserError
from gradshare.evaluation import Evaluation
from gradshare.learner import MetaState

ENSEMBLE = 5  # best epochs kept, and their number in the ensemble


def open_folder(
    folder: Path, config: dict[str, Any], resume: bool, check: Callable[[], None]
) -> tuple[Progress, dict[str, Tensor]] | None:
    """Start a run's folder, or take up the newest checkpoint that it holds, if there is one.

    Args:
        check: refuses what cannot be trained; called before the folder of a new run is made.
    """
    if not (folder / "config.json").exists():
        if resume:
            raise UserError(f"{folder} is not a run: it has no config.json")
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty and not a run; choose another folder")
        check()
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "config.json", config_text(config))
        return None
    if not resume:
        raise UserError(f"{folder} already holds a run; resume it, or choose another folder")
    stored = read_config(folder)
    for name in sorted(set(config) | set(stored)):
        if config.get(name) != stored.get(name):
            raise UserError(
                f"the run in {folder} has {name} = {stored.get(name)!r}, not {config.get(name)!r};"
                " resume with the same options, or choose another folder"
            )
    checkpoints.remove_unfinished(folder / "checkpoints")
    found = checkpoints.newest(folder / "checkpoints")
    write_lines(folder, Progress() if found is None else found[0])
    return found


def write_lines(folder: Path, progress: Progress) -> None:
    """The files with a line an epoch."""
    for name, lines in {"metrics": progress.metrics, "timings": progress.timings}.items():
        write_whole(folder / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def best_epochs(metrics: list[dict[str, Any]], count: int = ENSEMBLE) -> list[int]:
    """The epochs of the best validation, best first, the earlier first where two are equal."""
    ranked = sorted(
        metrics, key=lambda line: -line["val_accuracy"] if line["val_accuracy"] is not None else line["val_loss"]
    )
    return [line["epoch"] for line in ranked[:count]]


def best_value(metrics: list[dict[str, Any]]) -> dict[str, float]:
    """The best validation, by its name in the summary."""
    best = metrics[best_epochs(metrics)[0] - 1]
    name = "val_loss" if best["val_accuracy"] is None else "val_accuracy"
    return {f"best_{name}": best[name]}


def described(evaluation: Evaluation) -> dict[str, float | None]:
    return {"accuracy": evaluation.accuracy, "interval": evaluation.interval, "loss": evaluation.loss}


def gates(state: MetaState) -> dict[str, list[float] | None]:
    """sig(m) and sig(lam) of every inner step."""
    sharing = state.learned.get("sharing", {})
    return {name: sharing[name].sigmoid().tolist() if name in sharing else None for name in ("m", "lam")}


@torch.no_grad()
def load_state(state: MetaState, tensors: dict[str, Tensor]) -> None:
    """Fill a state of the same shape with the tensors of a checkpoint."""
    for name, tensor in state.tensors().items():
        if name not in tensors or tensors[name].shape != tensor.shape:
            found = list(tensors[name].shape) if name in tensors else "nothing"
            raise UserError(
                f"the checkpoint does not fit the learner: {name} is {list(tensor.shape)} here, {found} there"
            )
        tensor.copy_(tensors[name])


def next_free(parent: Path) -> Path:
    """The first of run-1, run-2, ... that is not there."""
    return next(path for number in count(1) if not (path := parent / f"run-{number}").exists())


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader, or a crash, finds the old content or the new."""
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    temporary.replace(path)
