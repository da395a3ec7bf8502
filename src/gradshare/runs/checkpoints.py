"""Checkpoints: tensors as safetensors, progress as JSON, checksums on both, never half-written.

A checkpoint is a folder `epoch-0007-iteration-0000` with `tensors.safetensors` and `checkpoint.json`. It is written
under another name, synced and renamed. No pickle is read or written.

Every version keeps `version`, and `sha256` over all the rest, in `checkpoint.json`: so a checkpoint of a newer version
can be told from a damaged one. PyTorch is imported when tensors are read or written, not before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from gradshare.errors import DamageWarning, UserError
from gradshare.files import (
    add_checksum,
    parse_json,
    read_bytes,
    record,
    sha256,
    verify_checksum,
    write_folder,
    written_by_newer,
)
from gradshare.runs.records import Progress

if TYPE_CHECKING:
    from torch import Tensor

    Checkpoint = tuple[Progress, dict[str, Tensor]]

NAME = re.compile(r"epoch-(\d+)-iteration-(\d+)")
VERSION = 1
TRAINED = ("params/", "learned/")  # how the names of tensors begin that have gradients


class Damaged(UserError):
    """A checkpoint that was changed since it was written."""


class Newer(UserError):
    """A checkpoint of a later version of gradshare."""


def save(folder: Path, progress: Progress, tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint below `folder`, whole or not at all.

    One of this moment that is there already has the same content: the run was resumed from it and went no further.
    """
    from safetensors import torch as safetensors

    final = folder / progress.name
    if final.exists():
        return final
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = safetensors.save(plain)
    about = add_checksum({"version": VERSION, "tensors_sha256": sha256(content), **progress.as_json()})
    write_folder(final, {"tensors.safetensors": content, "checkpoint.json": json.dumps(about).encode()})
    return final


def load(path: Path, run: str = "") -> Checkpoint:
    """Read a checkpoint, or raise `Damaged` or `Newer`.

    Args:
        run: the run that it must belong to; "": any.
    """
    from safetensors import SafetensorError
    from safetensors import torch as safetensors

    try:
        content = verify_checksum(parse_json(read_bytes(path / "checkpoint.json")))
        version = content.pop("version")
        if version > VERSION:
            raise Newer(f"{path} {written_by_newer('checkpoint', version, VERSION)}")
        tensors = read_bytes(path / "tensors.safetensors")
        if content.pop("tensors_sha256") != sha256(tensors):
            raise ValueError("tensors.safetensors does not match its checksum")
        progress = record(Progress, content, "checkpoint.json")
        _check(progress, path, run)
        found = dict(sorted(safetensors.load(tensors).items()))  # their own order changes
        if odd := [name for name, one in found.items() if name.startswith(TRAINED) and not one.is_floating_point()]:
            raise ValueError(f"{odd[0]} is {found[odd[0]].dtype}, which cannot be trained")
        return progress, found
    except Newer:
        raise
    except PermissionError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise Damaged(f"checkpoint {path} is damaged: {_reason(error)}") from None


def _check(progress: Progress, path: Path, run: str) -> None:
    """Raise an error for a checkpoint that is not of this moment, or not of this run."""
    if progress.name != path.name:
        raise ValueError(f"it holds {progress.name}")
    epochs = [line.epoch for line in progress.metrics]
    if epochs != [*range(1, progress.epoch + 1)]:
        raise ValueError(f"it is of epoch {progress.epoch}, with the metrics of epochs {str(epochs)[:60]}")
    if run and progress.run not in ("", run):
        raise ValueError("it is of a run with other options than config.json has")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror}: {os.path.basename(error.filename or '')}"
    other = isinstance(error, KeyError | TypeError | AttributeError)
    return f"checkpoint.json does not have the entries of a checkpoint ({error})" if other else str(error)


def newest(folder: Path, run: str = "") -> Checkpoint | None:
    """The newest checkpoint of a run that is not damaged; None if there are none at all.

    A `DamageWarning` names each damaged one that is passed over. `Damaged` if all are; `Newer` if one is.
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
            f"{damaged[0]}; all {len(damaged)} in {folder} are damaged: restore one from a copy,"
            " or start the run again in another folder"
        )
    return None


def listing(folder: Path) -> list[Path]:
    """The checkpoints below `folder`, oldest first."""
    found = [path for path in folder.iterdir() if NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=_moment)


def prune(folder: Path, best_epochs: list[int]) -> None:
    """Keep the two newest checkpoints and those of the best epochs; remove the rest."""
    for path in listing(folder)[:-2]:
        epoch, iteration = _moment(path)
        if iteration or epoch not in best_epochs:
            _remove(path.rename(path.with_name(f".{path.name}")))  # half removed it would look damaged


def recover(folder: Path) -> None:
    """Remove what a process that was killed while writing left behind."""
    for path in folder.glob(".epoch-*"):
        _remove(path)


def set_aside(folder: Path, progress: Progress) -> None:
    """Rename the checkpoints after this one, which `newest` found damaged, so that the run can write them again."""
    for path in listing(folder):
        if _moment(path) > (progress.epoch, progress.iteration):
            aside = path.with_name(f"{path.name}.damaged")
            _remove(aside)
            path.rename(aside)


def of_epoch(folder: Path, epoch: int) -> Path:
    """The path of the checkpoint at the end of an epoch."""
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
