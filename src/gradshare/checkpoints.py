"""Checkpoints: tensors as safetensors, progress as JSON, checksums on both, never half-written.

A checkpoint is a folder `epoch-0007-iteration-0000` with `tensors.safetensors` and `checkpoint.json`. It is written
under another name, synced and renamed. No pickle is read or written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from gradshare.errors import UserError

NAME = re.compile(r"epoch-(\d+)-iteration-(\d+)")
VERSION = 1


class Damaged(UserError):
    """A checkpoint that does not match its checksums."""


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    epoch: int = 0  # epochs finished
    iteration: int = 0  # iterations finished in the epoch after that
    seconds: float = 0.0  # spent in that epoch so far
    metrics: list[dict[str, Any]] = field(default_factory=list)  # a line for each epoch finished
    timings: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"epoch-{self.epoch:04d}-iteration-{self.iteration:04d}"


def save(folder: Path, progress: Progress, tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint below `folder`, whole or not at all."""
    final = folder / progress.name
    temporary = folder / f".{progress.name}-{os.getpid()}"
    temporary.mkdir(parents=True)
    try:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(plain, temporary / "tensors.safetensors")
        content = {"version": VERSION, "tensors_sha256": _sha256(temporary / "tensors.safetensors"), **asdict(progress)}
        content["sha256"] = _digest(content)
        (temporary / "checkpoint.json").write_text(json.dumps(content), encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        if final.exists():  # the same moment reached again after a resume: what is there is replaced, not mixed
            shutil.rmtree(final)
        temporary.rename(final)
        sync(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def load(path: Path) -> tuple[Progress, dict[str, Tensor]]:
    """Read a checkpoint, or raise `Damaged`."""
    try:
        content = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
        if content.pop("sha256") != _digest(content):
            raise Damaged(f"checkpoint {path} is damaged: checkpoint.json does not match its checksum")
        if content.pop("version") != VERSION:
            raise UserError(f"checkpoint {path} is of another version of gradshare")
        if content.pop("tensors_sha256") != _sha256(path / "tensors.safetensors"):
            raise Damaged(f"checkpoint {path} is damaged: tensors.safetensors does not match its checksum")
        return Progress(**content), load_file(path / "tensors.safetensors")
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"checkpoint {path} is damaged: {error}") from None


def newest(folder: Path) -> tuple[Progress, dict[str, Tensor]] | None:
    """The newest sound checkpoint; None if there are none at all; `Damaged` if all are damaged."""
    damaged: Damaged | None = None
    for path in reversed(listing(folder)):
        try:
            return load(path)
        except Damaged as error:
            damaged = damaged or error
    if damaged is not None:
        raise damaged
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
            shutil.rmtree(path)


def remove_unfinished(folder: Path) -> None:
    """Clear away what a process that was killed while writing left behind."""
    for path in folder.glob(".epoch-*"):
        shutil.rmtree(path)


def of_epoch(folder: Path, epoch: int) -> Path:
    """Where the checkpoint at the end of an epoch is."""
    return folder / Progress(epoch).name


def sync(path: Path) -> None:
    """Have the system write a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _moment(path: Path) -> tuple[int, int]:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
