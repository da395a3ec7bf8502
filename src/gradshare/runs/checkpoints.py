"""Checkpoints: tensors as safetensors, progress as JSON, checksums on both, never half-written.

A checkpoint is a folder `epoch-0007-iteration-0000` with `tensors.safetensors` and `checkpoint.json`. It is written
under another name, synced and renamed. No pickle is read or written.

Whatever a later version changes, `checkpoint.json` keeps `version`, and `sha256` over all the rest: so a newer
checkpoint is told from a damaged one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors import torch as safetensors
from torch import Tensor

from gradshare.errors import DamageWarning, UserError
from gradshare.files import (
    NEW,
    opened,
    parse_json,
    read_bytes,
    sealed,
    sha256,
    sync,
    write_synced,
    writing,
    written_by_newer,
)

NAME = re.compile(r"epoch-(\d+)-iteration-(\d+)")
VERSION = 1
TRAINED = ("params/", "learned/")  # how the names of tensors begin that have gradients
REPLACED = ".replaced"  # how the name of a checkpoint ends while another takes its place; it begins with a dot


class Damaged(UserError):
    """A checkpoint that is not as it was written."""


class Newer(UserError):
    """A checkpoint of a later version of gradshare."""


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    epoch: int = 0  # epochs finished
    iteration: int = 0  # iterations finished in the epoch after that
    seconds: float = 0.0  # spent in that epoch so far
    metrics: list[dict[str, Any]] = field(default_factory=list)  # a line for each epoch finished
    timings: list[dict[str, Any]] = field(default_factory=list)
    run: str = ""  # which run, as `config.identity` tells them apart; "" is not known

    @property
    def name(self) -> str:
        return f"epoch-{self.epoch:04d}-iteration-{self.iteration:04d}"


def save(folder: Path, progress: Progress, tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint below `folder`, whole or not at all."""
    final, temporary = folder / progress.name, folder / f".{progress.name}{NEW}"
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = safetensors.save(plain)
    about = sealed({"version": VERSION, "tensors_sha256": sha256(content), **asdict(progress)})
    with writing(final):
        try:
            temporary.mkdir(parents=True)
            write_synced(temporary / "tensors.safetensors", content)
            write_synced(temporary / "checkpoint.json", json.dumps(about).encode())
            sync(temporary)
            _put(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return final


def _put(temporary: Path, final: Path) -> None:
    """Give a checkpoint its name; the one that has it already is there, or put back by `recover`, until it has."""
    folder, replaced = final.parent, final.with_name(f".{final.name}{REPLACED}")
    if final.exists():  # the same moment reached again after a resume
        final.rename(replaced)
    temporary.rename(final)
    sync(folder)
    sync(folder.parent)  # where the folder of checkpoints is new
    shutil.rmtree(replaced, ignore_errors=True)


def load(path: Path, run: str = "") -> tuple[Progress, dict[str, Tensor]]:
    """Read a checkpoint of a run ("": of any), or raise `Damaged` or `Newer`."""
    try:
        content = opened(parse_json(read_bytes(path / "checkpoint.json")))
        version = content.pop("version")
        if version > VERSION:
            raise Newer(f"{path} {written_by_newer('checkpoint', version, VERSION)}")
        tensors = read_bytes(path / "tensors.safetensors")
        if content.pop("tensors_sha256") != sha256(tensors):
            raise ValueError("tensors.safetensors does not match its checksum")
        progress = Progress(**content)
        if version != VERSION or progress.name != path.name:
            raise ValueError(f"it holds version {version} of {progress.name}")
        _check_lines(progress)
        if run and progress.run not in ("", run):
            raise ValueError("it is of a run with other options than config.json has")
        found = dict(sorted(safetensors.load(tensors).items()))  # whose own order changes
        if odd := [name for name, one in found.items() if name.startswith(TRAINED) and not one.is_floating_point()]:
            raise ValueError(f"{odd[0]} is {found[odd[0]].dtype}, which nothing trains")
        return progress, found
    except Newer:
        raise
    except PermissionError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
        raise Damaged(f"checkpoint {path} is damaged: {_reason(error)}") from None


def _check_lines(progress: Progress) -> None:
    """Refuse lines that a run could not go on from."""
    epochs = [line["epoch"] for line in progress.metrics]
    if len(epochs) != progress.epoch or epochs != [*range(1, len(epochs) + 1)]:
        raise ValueError(f"it is of epoch {progress.epoch}, with the metrics of epochs {str(epochs)[:60]}")
    json.dumps(asdict(progress), allow_nan=False)  # else it could not be written either
    values = [line[name] for line in progress.metrics for name in ("val_accuracy", "val_loss", "val_interval")]
    values += [line.get("val_diverged") for line in progress.metrics]
    counts = (progress.seconds, *(value for value in values if value is not None))
    if not all(type(value) in (int, float) for value in counts):
        raise ValueError("a number in it is none")
    if not (isinstance(progress.timings, list) and all(isinstance(line, dict) for line in progress.timings)):
        raise ValueError("its timings are no lines")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror}: {os.path.basename(error.filename or '')}"
    unlike_ours = isinstance(error, KeyError | TypeError | AttributeError)
    return f"checkpoint.json is not as gradshare writes it ({error})" if unlike_ours else str(error)


def newest(folder: Path, run: str = "") -> tuple[Progress, dict[str, Tensor]] | None:
    """The newest sound checkpoint of a run; None if there are none at all.

    A damaged one that is passed over is named in a `DamageWarning`. `Damaged` if all are; `Newer` if one is.
    """
    damaged: list[Damaged] = []
    for path in reversed(listing(folder)):
        try:
            found = load(path, run)
        except Damaged as error:
            damaged.append(error)
            continue
        for reason in damaged:
            warnings.warn(f"{reason}; {path.name} is used in its place", DamageWarning, stacklevel=2)
        return found
    if damaged:
        raise Damaged(
            f"{damaged[0]}; none of the {len(damaged)} in {folder} is sound: restore one from a copy,"
            " or start the run again in another folder"
        )
    return None


def listing(folder: Path) -> list[Path]:
    """The checkpoints below `folder`, oldest first."""
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=_moment)


def prune(folder: Path, best_epochs: list[int], latest: int = 2) -> None:
    """Keep the newest checkpoints and those of the best epochs; remove the rest."""
    for path in listing(folder)[:-latest]:
        epoch, iteration = _moment(path)
        if iteration or epoch not in best_epochs:
            _remove(path.rename(path.with_name(f".{path.name}")))  # half removed it would pass for a damaged one


def recover(folder: Path) -> None:
    """Clear away what a process that was killed while writing left behind."""
    for path in folder.glob(f".epoch-*{REPLACED}"):
        final = path.with_name(path.name[1 : -len(REPLACED)])
        if not final.exists():
            path.rename(final)
    for path in folder.glob(".epoch-*"):
        _remove(path)


def set_aside(folder: Path, progress: Progress) -> None:
    """Rename the checkpoints after this one, which `newest` found damaged, so that the run can pass them again."""
    for path in listing(folder):
        if _moment(path) > (progress.epoch, progress.iteration):
            aside = path.with_name(f"{path.name}.damaged")
            _remove(aside)
            path.rename(aside)


def of_epoch(folder: Path, epoch: int) -> Path:
    """Where the checkpoint at the end of an epoch is."""
    return folder / Progress(epoch).name


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _moment(path: Path) -> tuple[int, int]:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])
