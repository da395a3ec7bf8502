"""Checkpoints: damage is named and never taken for data, and no crash loses what was there."""

from __future__ import annotations

import errno
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import torch as safetensors

import gradshare as gs
from gradshare.errors import DamageWarning
from gradshare.files import write_whole
from gradshare.runs import checkpoints
from gradshare.runs.checkpoints import Damaged, Newer
from gradshare.runs.records import Epoch, Progress, Timing
from tests.support.runs import Unpickled, flip, rewrite, rewrite_tensors


def progress(epoch: int, iteration: int = 0) -> Progress:
    lines = tuple(Epoch(number, val_accuracy=0.5, val_loss=1.0, val_interval=0.1) for number in range(1, epoch + 1))
    return Progress(epoch, iteration, 0.5, lines, tuple(Timing(line.epoch, 1.0, 2.0) for line in lines))


def save(folder: Path, epoch: int, iteration: int = 0, value: float | None = None) -> Path:
    tensor = torch.full((4, 3), float(epoch) if value is None else value)
    return checkpoints.save(folder, progress(epoch, iteration), {"params/w": tensor, "seen": torch.tensor(True)})


def lines(**values: Any) -> list[dict[str, Any]]:
    return [{**line.as_json(), **values} for line in progress(2).metrics]


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    found, tensors = checkpoints.load(save(tmp_path / "new" / "checkpoints", 3, 7))
    assert found == progress(3, 7)
    assert torch.equal(tensors["params/w"], torch.full((4, 3), 3.0)) and tensors["seen"].item() is True


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of a weight": lambda path: flip(path / "tensors.safetensors", -5),
    "a bit of a shape": lambda path: flip(path / "tensors.safetensors", 40),
    "tensors cut": lambda path: os.truncate(path / "tensors.safetensors", 90),
    "no tensors": lambda path: (path / "tensors.safetensors").unlink(),
    "a bit of the progress": lambda path: flip(path / "checkpoint.json", 120),
    "a digit of the version": lambda path: flip(path / "checkpoint.json", 12, 2),
    "progress cut": lambda path: os.truncate(path / "checkpoint.json", 100),
    "progress empty": lambda path: os.truncate(path / "checkpoint.json", 0),
    "progress of another kind": lambda path: (path / "checkpoint.json").write_text("[1]"),
    "progress nested": lambda path: (path / "checkpoint.json").write_text("[" * 100_000),
    "progress without checksum": lambda path: (path / "checkpoint.json").write_text('{"version": 1}'),
    "nothing": lambda path: (shutil.rmtree(path), path.mkdir()),
    "a file": lambda path: (shutil.rmtree(path), path.touch()),
    "another moment": lambda path: shutil.copytree(path.with_name(Progress(1).name), path, dirs_exist_ok=True),
    "epochs that do not add up": lambda path: rewrite(path / "checkpoint.json", metrics=lines()[::-1]),
    "metrics of another kind": lambda path: rewrite(path / "checkpoint.json", metrics=[1, 2]),
    "a value that is text": lambda path: rewrite(path / "checkpoint.json", metrics=lines(val_accuracy="0.5")),
    "a value that is no number": lambda path: rewrite(path / "checkpoint.json", metrics=lines(m=[float("nan")])),
    "seconds that are text": lambda path: rewrite(path / "checkpoint.json", seconds="1"),
    "whole numbers as weights": lambda path: rewrite_tensors(path, safetensors.save({"params/w": torch.ones(4).int()})),
    "a pickle": lambda path: rewrite_tensors(path, pickle.dumps(Unpickled())),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    DAMAGES[damage](newest)
    with pytest.raises(Damaged, match="epoch-0002-iteration-0000"):
        checkpoints.load(newest)
    with pytest.warns(DamageWarning, match=r"epoch-0002-\S+ .*; epoch-0001-"):
        found = checkpoints.newest(tmp_path)
    assert found is not None and found[0] == progress(1) and found[1]["params/w"][0, 0] == 1
    assert not Path("pickles-ran").exists()
    shutil.rmtree(tmp_path / "epoch-0001-iteration-0000")
    with pytest.raises(Damaged, match="all 1 in"):
        checkpoints.newest(tmp_path)


def test_a_newer_checkpoint_is_neither_damaged_nor_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    rewrite(save(tmp_path, 2) / "checkpoint.json", version=7)
    with pytest.raises(Newer, match="version 7, this one reads 1"):
        checkpoints.newest(tmp_path)


def test_one_that_may_not_be_read_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    save(tmp_path, 1)
    monkeypatch.setattr(checkpoints, "read_bytes", refuse)
    with pytest.raises(gs.UserError, match="Permission denied") as raised:
        checkpoints.newest(tmp_path)
    assert not isinstance(raised.value, Damaged)


class Crash(BaseException):
    """Like a SIGKILL: nothing of ours handles it."""


def test_a_crash_while_a_checkpoint_is_written_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step on the disk, the one before survives, and the new one is whole or not there."""
    moment = 1
    while crashes_at(moment, tmp_path / str(moment), monkeypatch):
        moment += 1
    assert moment > 7


def test_a_checkpoint_of_the_same_moment_is_the_same(tmp_path: Path) -> None:
    written = [path.stat().st_mtime_ns for path in save(tmp_path, 1).iterdir()]
    assert [path.stat().st_mtime_ns for path in save(tmp_path, 1, value=6.0).iterdir()] == written


def crashes_at(moment: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    save(folder, 1, value=5.0)
    left = [moment]

    def counted(usual: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] <= 0:
                raise Crash
            return usual(*arguments, **named)

        return step

    for name in ("mkdir", "fsync", "rename", "open"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    monkeypatch.setattr(checkpoints.shutil, "rmtree", counted(shutil.rmtree))
    try:
        save(folder, 2, value=6.0)
        crashed = False
    except Crash:
        crashed = True
    monkeypatch.undo()
    checkpoints.recover(folder)
    found = checkpoints.newest(folder)
    assert found is not None and found[1]["params/w"][0, 0] == found[0].epoch + 4
    assert crashed or found[0].epoch == 2
    names = ["epoch-0001-iteration-0000", "epoch-0002-iteration-0000"]
    assert sorted(path.name for path in folder.iterdir()) == names[: found[0].epoch]
    return crashed


def test_files_are_synced_before_they_get_their_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    usual = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        done.append("sync " + re.sub(r"\.\w{12}\.new", ".new", name))
        usual["fsync"](descriptor)

    def named(kind: str) -> Callable[..., None]:
        def rename(source: Any, target: Any) -> None:
            done.append(f"name {Path(target).name}")
            usual[kind](source, target)

        return rename

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", named("rename"))
    monkeypatch.setattr(os, "replace", named("replace"))
    name = save(tmp_path / "checkpoints", 1).name
    inside = ["sync tensors.safetensors", "sync checkpoint.json", f"sync .{name}.new"]
    assert done == [*inside, f"name {name}", "sync checkpoints", f"sync {tmp_path.name}"]
    done.clear()
    write_whole(tmp_path / "metrics.jsonl", "{}\n")
    assert done == ["sync .metrics.jsonl.new", "name metrics.jsonl", f"sync {tmp_path.name}"]


@pytest.mark.parametrize("step", ["fsync", "replace", "rename"])
def test_a_full_disk_raises_an_error_and_leaves_what_was_there(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save(tmp_path / "checkpoints", 1, value=5.0)
    (tmp_path / "summary.json").write_text("before")
    monkeypatch.setattr(os, step, full)
    if step != "replace":
        with pytest.raises(gs.UserError, match="epoch-0002-iteration-0000: No space left"):
            save(tmp_path / "checkpoints", 2)
    if step != "rename":
        with pytest.raises(gs.UserError, match=r"summary\.json: No space left"):
            write_whole(tmp_path / "summary.json", "after")
    monkeypatch.undo()
    assert (tmp_path / "summary.json").read_text() == "before"
    written = [path.name for path in tmp_path.rglob("*") if path.name.startswith((".", "epoch"))]
    assert written == ["epoch-0001-iteration-0000"]
