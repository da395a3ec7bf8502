"""Checkpoints and run folders: damage is named and never taken for data, and no crash loses what was there."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import torch as safetensors
from tests.runs.test_training import TINY, StopAt, learner, same_run

import gradshare as gs
from gradshare.cli.app import main
from gradshare.errors import DamageWarning
from gradshare.experiments import comparison
from gradshare.files import opened, sealed, write_whole
from gradshare.runs import checkpoints, training
from gradshare.runs.checkpoints import Damaged, Newer, Progress
from gradshare.runs.config import read_config
from gradshare.runs.display import PlainScreen
from gradshare.runs.interruption import Interrupted


def progress(epoch: int, iteration: int = 0) -> Progress:
    values = {"val_accuracy": 0.5, "val_loss": 1.0, "val_interval": 0.1}
    return Progress(epoch, iteration, 0.5, [{"epoch": e + 1, **values} for e in range(epoch)], [{}] * epoch)


def save(folder: Path, epoch: int, iteration: int = 0, value: float | None = None) -> Path:
    tensor = torch.full((4, 3), float(epoch) if value is None else value)
    return checkpoints.save(folder, progress(epoch, iteration), {"params/w": tensor, "seen": torch.tensor(True)})


def reseal(path: Path, **different: Any) -> None:
    """A JSON file with other content and the checksum that belongs to it."""
    path.write_text(json.dumps(sealed({**opened(json.loads(path.read_text())), **different})))


def flip(path: Path, at: int, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


def lines(**values: Any) -> list[dict[str, Any]]:
    return [{**line, **values} for line in progress(2).metrics]


def rehash(path: Path, content: bytes) -> None:
    (path / "tensors.safetensors").write_bytes(content)
    reseal(path / "checkpoint.json", tensors_sha256=hashlib.sha256(content).hexdigest())


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    found, tensors = checkpoints.load(save(tmp_path / "new" / "checkpoints", 3, 7))
    assert found == progress(3, 7)
    assert torch.equal(tensors["params/w"], torch.full((4, 3), 3.0)) and tensors["seen"].item() is True


class Unpickled:
    def __reduce__(self) -> Any:
        return os.mkdir, ("pickles-ran",)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of a weight": lambda path: flip(path / "tensors.safetensors", -5),
    "a bit of a shape": lambda path: flip(path / "tensors.safetensors", 40),
    "tensors cut": lambda path: os.truncate(path / "tensors.safetensors", 90),
    "tensors empty": lambda path: os.truncate(path / "tensors.safetensors", 0),
    "no tensors": lambda path: (path / "tensors.safetensors").unlink(),
    "a digit of the progress": lambda path: (path / "checkpoint.json").write_text(
        (path / "checkpoint.json").read_text().replace('"seconds": 0.5', '"seconds": 0.7')
    ),
    "a digit of the version": lambda path: (path / "checkpoint.json").write_text(
        (path / "checkpoint.json").read_text().replace('"version": 1', '"version": 3')
    ),
    "progress cut": lambda path: os.truncate(path / "checkpoint.json", 100),
    "progress empty": lambda path: os.truncate(path / "checkpoint.json", 0),
    "progress of another kind": lambda path: (path / "checkpoint.json").write_text("[1]"),
    "progress nested": lambda path: (path / "checkpoint.json").write_text("[" * 100_000),
    "progress without checksum": lambda path: (path / "checkpoint.json").write_text('{"version": 1}'),
    "no progress": lambda path: (path / "checkpoint.json").unlink(),
    "nothing": lambda path: (shutil.rmtree(path), path.mkdir()),
    "a file": lambda path: (shutil.rmtree(path), path.touch()),
    "another moment": lambda path: shutil.copytree(path.with_name(Progress(1).name), path, dirs_exist_ok=True),
    "epochs that do not add up": lambda path: reseal(path / "checkpoint.json", metrics=[{"epoch": 2}, {"epoch": 1}]),
    "metrics of another kind": lambda path: reseal(path / "checkpoint.json", metrics=[1, 2]),
    "metrics without a value": lambda path: reseal(path / "checkpoint.json", metrics=[{"epoch": 1}, {"epoch": 2}]),
    "a value that is text": lambda path: reseal(path / "checkpoint.json", metrics=lines(val_accuracy="0.5")),
    "a value that is no number": lambda path: reseal(path / "checkpoint.json", metrics=lines(m=[float("nan")])),
    "a count that is a list": lambda path: reseal(path / "checkpoint.json", metrics=lines(val_diverged=[1])),
    "timings of another kind": lambda path: reseal(path / "checkpoint.json", timings=5),
    "seconds that are text": lambda path: reseal(path / "checkpoint.json", seconds="1"),
    "whole numbers as weights": lambda path: rehash(path, safetensors.save({"params/w": torch.ones(4, 3).int()})),
    "progress unknown": lambda path: reseal(path / "checkpoint.json", colour="red"),
    "a version that never was": lambda path: reseal(path / "checkpoint.json", version=0),
    "a pickle": lambda path: rehash(path, pickle.dumps(Unpickled())),
    "no safetensors": lambda path: rehash(path, b"\xff" * 200),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    DAMAGES[damage](newest)
    with pytest.raises(Damaged, match=r"epoch-0002-iteration-0000 is damaged: \w+"):
        checkpoints.load(newest)
    with pytest.warns(DamageWarning, match=r"epoch-0002-\S+ is damaged: .*; epoch-0001-\S+ is used in its place"):
        found = checkpoints.newest(tmp_path)
    assert found is not None and found[0] == progress(1) and found[1]["params/w"][0, 0] == 1
    assert not Path("pickles-ran").exists()
    shutil.rmtree(tmp_path / "epoch-0001-iteration-0000")
    with pytest.raises(Damaged, match=r"none of the 1 in .* is sound: restore one"):
        checkpoints.newest(tmp_path)


def test_an_epoch_beyond_all_lines_costs_nothing(tmp_path: Path) -> None:
    far = save(tmp_path, 1).rename(tmp_path / Progress(10**12).name)
    reseal(far / "checkpoint.json", epoch=10**12)
    with pytest.raises(Damaged, match=r"it is of epoch 1000000000000, with the metrics of epochs \[1\]"):
        checkpoints.load(far)


def test_a_file_that_memory_is_too_small_for_is_named_and_the_checkpoint_before_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TooLarge:
        def __enter__(self) -> TooLarge:
            return self

        def __exit__(self, *_: object) -> None: ...

        def read(self) -> bytes:
            raise MemoryError

    whole = os.fdopen
    large = {(save(tmp_path, 2) / "tensors.safetensors").stat().st_ino}
    save(tmp_path, 1)
    monkeypatch.setattr(
        "gradshare.files.os.fdopen",
        lambda file, *rest, **more: TooLarge() if os.fstat(file).st_ino in large else whole(file, *rest, **more),
    )
    with pytest.warns(
        DamageWarning, match=r"tensors\.safetensors is too large to read: \d+ bytes; epoch-0001-\S+ is used"
    ):
        found = checkpoints.newest(tmp_path)
    assert found is not None and found[0] == progress(1)


def test_a_newer_checkpoint_is_neither_damaged_nor_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    reseal(save(tmp_path, 2) / "checkpoint.json", version=7)
    message = r"epoch-0002-\S+ was written by a newer gradshare \(checkpoint version 7, this one reads 1\): update"
    with pytest.raises(Newer, match=message):
        checkpoints.newest(tmp_path)


def test_one_that_may_not_be_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    save(tmp_path, 1)
    monkeypatch.setattr(checkpoints, "read_bytes", refused)
    with pytest.raises(gs.UserError, match=r"cannot read .*checkpoint\.json: Permission denied") as raised:
        checkpoints.newest(tmp_path)
    assert not isinstance(raised.value, Damaged)


class Crash(BaseException):
    """As a SIGKILL: nothing of ours handles it."""


@pytest.mark.parametrize("moment", range(1, 12))
def test_a_crash_while_a_moment_is_written_again_loses_nothing(
    tmp_path: Path, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every step of the disk's work, whatever survives is the old checkpoint or the new."""
    save(tmp_path, 1, value=5.0)
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
        save(tmp_path, 1, value=6.0)
        crashed = False
    except Crash:
        crashed = True
    monkeypatch.undo()
    checkpoints.recover(tmp_path)
    found = checkpoints.newest(tmp_path)
    assert found is not None and found[1]["params/w"][0, 0] in ((5, 6) if crashed else (6,))
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-0001-iteration-0000"]
    assert crashed == (moment <= 11), "count the steps again"


def test_files_are_synced_before_they_get_their_name_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    usual = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
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
def test_a_full_disk_is_told_with_the_file_and_leaves_what_was_there(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save(tmp_path / "checkpoints", 1, value=5.0)
    (tmp_path / "summary.json").write_text("before")
    monkeypatch.setattr(os, step, full)
    if step != "replace":
        with pytest.raises(gs.UserError, match=r"cannot write .*epoch-0002-iteration-0000: No space left on device"):
            save(tmp_path / "checkpoints", 2)
    if step != "rename":
        with pytest.raises(gs.UserError, match=r"cannot write .*summary\.json: No space left on device"):
            write_whole(tmp_path / "summary.json", "after")
    monkeypatch.undo()
    assert (tmp_path / "summary.json").read_text() == "before"
    assert sorted(path.name for path in tmp_path.rglob("*") if path.name.startswith((".", "epoch"))) == [
        "epoch-0001-iteration-0000"
    ]


# Run folders


@pytest.fixture(scope="module")
def finished(dataset: gs.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    gs.train(learner(), dataset, folder, **TINY)
    return folder


@pytest.fixture(scope="module")
def stopped(dataset: gs.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "stopped"
    with pytest.raises(Interrupted):
        gs.train(learner(), dataset, folder, display=StopAt(1, 1), **TINY)
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def test_a_finished_run_can_be_checked_with_sha256sum(finished: Path) -> None:
    sums = [line.split("  ") for line in (finished / "DONE").read_text().splitlines()]
    assert [name for _, name in sums] == ["config.json", "metrics.jsonl", "summary.json"]
    assert all(hashlib.sha256((finished / name).read_bytes()).hexdigest() == sum_ for sum_, name in sums)


@pytest.mark.parametrize("damage", ["{", "", None, "changed"])
def test_a_finished_run_with_a_damaged_summary_is_tested_again(
    finished: Path, copy: Path, dataset: gs.Dataset, damage: str | None
) -> None:
    path = copy / "summary.json"
    if damage is None:
        path.unlink()
    else:
        path.write_text(path.read_text().replace("0.", "1.", 1) if damage == "changed" else damage)
    with pytest.warns(DamageWarning, match=r"the run in .* is damaged: .*; it is tested again"):
        gs.train(learner(), dataset, copy, resume=True, **TINY)
    same_run(finished, copy)
    assert (copy / "DONE").read_bytes() == (finished / "DONE").read_bytes()


def test_damaged_metrics_are_made_again(finished: Path, copy: Path, dataset: gs.Dataset) -> None:
    os.truncate(copy / "metrics.jsonl", 300)
    (copy / ".metrics.jsonl.new").write_text("half a li")
    (copy / "checkpoints" / ".epoch-0003-iteration-0000").mkdir()  # half removed
    gs.train(learner(), dataset, copy, resume=True, **TINY)
    same_run(finished, copy)
    assert not list(copy.rglob(".*"))


def test_a_finished_run_whose_last_checkpoint_is_damaged_trains_that_epoch_again(
    finished: Path, copy: Path, dataset: gs.Dataset
) -> None:
    flip(copy / "checkpoints" / "epoch-0003-iteration-0000" / "tensors.safetensors", -1)
    with pytest.warns(DamageWarning, match="epoch-0002-iteration-0000 is used in its place"):
        run = gs.load_run(copy)
    assert len(run.metrics) == 2 and (copy / "DONE").exists()  # to look at a run changes nothing
    with pytest.warns(DamageWarning):
        gs.train(learner(), dataset, copy, resume=True, **TINY)
    assert (copy / "checkpoints" / "epoch-0003-iteration-0000.damaged").is_dir()
    same_run(finished, copy)
    gs.train(learner(), dataset, copy, resume=True, **TINY)  # without a word


def test_a_damaged_best_epoch_stops_the_test(copy: Path, dataset: gs.Dataset) -> None:
    flip(copy / "checkpoints" / "epoch-0001-iteration-0000" / "tensors.safetensors", -1)
    (copy / "DONE").unlink()
    (copy / "summary.json").unlink()
    message = r"epoch-0001-\S+ is damaged: .*; the test needs epoch 1: restore it from a copy"
    with pytest.raises(Damaged, match=message):
        gs.train(learner(), dataset, copy, resume=True, **TINY)
    assert not (copy / "DONE").exists() and not (copy / "summary.json").exists()
    with pytest.raises(Damaged, match=message):
        gs.load_run(copy).state(1)
    gs.load_run(copy).state(2)


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.pop(name)


def as_if(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


MOMENT = "adam/exp_avg/params/head.weight"
UNFIT: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no log": (without("log"), "log is nothing"),
    "a longer log": (as_if("log", lambda log: log.repeat(1, 2)), r"log is float32 \[2, \d+\]"),
    "faults of another shape": (as_if("faults", lambda faults: faults[None]), "faults is"),
    "weights of another type": (as_if("params/head.weight", lambda w: w.double()), "params/head.weight is float64"),
    "a moment of another shape": (as_if(MOMENT, lambda moment: moment.flatten()), "exp_avg is float32"),
    "a moment without its step": (without(MOMENT.replace("exp_avg", "step")), "step is nothing"),
    "a moment that is not finite": (as_if(MOMENT, lambda moment: moment * torch.nan), "is not finite"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_tensors_that_do_not_fit_are_refused_before_any_is_used(
    copy: Path, dataset: gs.Dataset, kind: str, tmp_path: Path
) -> None:
    """Of a checkpoint whose checksums are right: somebody else wrote it."""
    change, message = UNFIT[kind]
    newest = copy / "checkpoints" / Progress(3).name
    tensors = safetensors.load_file(newest / "tensors.safetensors")
    change(tensors)
    rehash(newest, safetensors.save(tensors))
    with pytest.raises(gs.UserError, match=message):
        gs.train(learner(), dataset, copy, resume=True, **TINY | {"epochs": 4})


def test_a_checkpoint_after_the_end_of_its_epoch_is_refused(copy: Path, dataset: gs.Dataset) -> None:
    newest = copy / "checkpoints" / Progress(3).name
    reseal(newest / "checkpoint.json", iteration=99)
    newest.rename(newest.with_name(Progress(3, 99).name))
    with pytest.raises(gs.UserError, match=r"epoch-0003-iteration-0099 in .* is after the \d+ iterations of an epoch"):
        gs.train(learner(), dataset, copy, resume=True, **TINY | {"epochs": 4})


@pytest.mark.parametrize("plant", ["link", "pipe"])
@pytest.mark.parametrize("begun", [False, True])
def test_nothing_planted_where_we_write_is_written_through(
    copy: Path, dataset: gs.Dataset, tmp_path: Path, plant: str, begun: bool
) -> None:
    folder = copy if begun else tmp_path / "new"
    folder.mkdir(exist_ok=True)
    (tmp_path / "thesis").write_text("years of work")
    if plant == "link":
        (folder / ".config.json.new").symlink_to(tmp_path / "thesis")
    else:
        os.mkfifo(folder / ".config.json.new")
    gs.train(learner(), dataset, folder, resume=begun, **TINY | {"epochs": 4 if begun else 1})
    assert (tmp_path / "thesis").read_text() == "years of work"
    assert not (folder / "config.json").is_symlink() and not (folder / ".config.json.new").exists()


@pytest.mark.parametrize(
    "summary", ['{"best_epoch": 9, "test": null}', "{}", '{"best_epoch": "\\u001b", "test": null}']
)
def test_an_empty_done_vouches_for_nothing(finished: Path, copy: Path, dataset: gs.Dataset, summary: str) -> None:
    (copy / "DONE").write_text("")
    (copy / "summary.json").write_text(summary)
    with pytest.warns(DamageWarning, match=r"is damaged: .*; it is tested again"):
        gs.train(learner(), dataset, copy, resume=True, **TINY)
    same_run(finished, copy)


def test_a_lost_best_epoch_is_told_as_soon_as_the_run_goes_on(
    copy: Path, dataset: gs.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(copy / "checkpoints" / Progress(1).name)
    gs.train(learner(), dataset, copy, resume=True, **TINY)  # finished and tested: nothing needs it
    message = r"has lost checkpoints of its best epochs so far \(1\): unless others become better, the test will need"
    with monkeypatch.context() as patched, pytest.warns(DamageWarning, match=message):
        patched.setattr(training._Run, "finish", lambda self: None)  # before any more training
        gs.train(learner(), dataset, copy, resume=True, **TINY | {"epochs": 4})
    with (
        pytest.warns(DamageWarning, match=message),
        pytest.raises(gs.UserError, match=r"checkpoint of epoch 1 .* not kept"),
    ):
        gs.train(learner(), dataset, copy, resume=True, **TINY | {"epochs": 4})


def test_a_checkpoint_of_another_run_is_not_taken_for_ours(
    finished: Path, copy: Path, dataset: gs.Dataset, tmp_path: Path
) -> None:
    gs.train(learner(), dataset, tmp_path / "other", **TINY | {"seed": 1})
    shutil.rmtree(copy / "checkpoints" / Progress(3).name)
    shutil.copytree(tmp_path / "other" / "checkpoints" / Progress(3).name, copy / "checkpoints" / Progress(3).name)
    with pytest.warns(DamageWarning, match=r"epoch-0003-\S+ is damaged: it is of a run with .*; epoch-0002-"):
        gs.train(learner(), dataset, copy, resume=True, **TINY)
    same_run(finished, copy)
    shutil.rmtree(copy / "checkpoints" / Progress(1).name)
    shutil.copytree(tmp_path / "other" / "checkpoints" / Progress(1).name, copy / "checkpoints" / Progress(1).name)
    with pytest.raises(Damaged, match=r"with other options than config\.json has; the test needs epoch 1"):
        gs.load_run(copy).state(1)


def test_whatever_lies_where_a_writer_would_leave_something_is_cleared_away(
    finished: Path, copy: Path, dataset: gs.Dataset
) -> None:
    place = copy / "checkpoints"
    os.mkfifo(place / ".epoch-0001-iteration-0000")
    (place / ".epoch-0001-iteration-0001").symlink_to(finished)
    (place / ".epoch-0001-iteration-0002").touch()
    gs.train(learner(), dataset, copy, resume=True, **TINY)
    assert not list(copy.rglob(".*"))
    same_run(finished, copy)


def test_a_run_without_its_checkpoints_is_not_begun_again(copy: Path, dataset: gs.Dataset) -> None:
    shutil.rmtree(copy / "checkpoints")
    before = {path: path.read_bytes() for path in copy.iterdir()}
    with pytest.raises(gs.UserError, match="has trained, but its checkpoints are gone"):
        gs.train(learner(), dataset, copy, resume=True, **TINY)
    assert {path: path.read_bytes() for path in copy.iterdir()} == before


def test_all_checkpoints_damaged_is_a_clear_stop(copy: Path, dataset: gs.Dataset) -> None:
    for path in checkpoints.listing(copy / "checkpoints"):
        flip(path / "checkpoint.json", 30)
    before = sorted(path.name for path in copy.rglob("*"))
    with pytest.raises(Damaged, match="none of the 3 in"):
        gs.train(learner(), dataset, copy, resume=True, **TINY)
    assert sorted(path.name for path in copy.rglob("*")) == before


def test_no_flipped_bit_of_the_configuration_goes_unnoticed(copy: Path) -> None:
    whole, right = (copy / "config.json").read_bytes(), read_config(copy)
    unnoticed = []
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << (at * 5 % 7)
        (copy / "config.json").write_bytes(flipped)
        try:
            content = read_config(copy)
        except gs.UserError:
            continue
        if content != right and set(content) == set(right):  # an option with another name is refused later
            unnoticed.append(at)
    assert not unnoticed, unnoticed


def test_a_killed_start_can_be_started_again(dataset: gs.Dataset, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.json.new").write_text('{"ver')
    gs.train(learner(), dataset, tmp_path / "run", **TINY | {"epochs": 1, "test_tasks": 0})
    assert not list((tmp_path / "run").rglob(".*"))


def test_further_entries_may_be_of_any_kind(dataset: gs.Dataset, tmp_path: Path) -> None:
    options = TINY | {"epochs": 1, "test_tasks": 0, "about": {"model": Path("a/b"), "sizes": (1, 2)}}
    gs.train(learner(), dataset, tmp_path / "run", **options)
    gs.train(learner(), dataset, tmp_path / "run", resume=True, **options)


def test_resume_none_is_whichever_the_folder_asks_for(finished: Path, dataset: gs.Dataset, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        gs.train(learner(), dataset, tmp_path / "run", None, display=StopAt(1, 1), **TINY)
    gs.train(learner(), dataset, tmp_path / "run", None, **TINY)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


# The command line


def gradshare(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr("sys.argv", ["gradshare", *map(str, words)])
    try:
        main()
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code
    return 0


@pytest.fixture(scope="module")
def by_command(blobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stopped run of the command line's."""
    folder = tmp_path_factory.mktemp("commands") / "run"
    config = gs.RunConfig(dataset=str(blobs), filters=3, steps=2, threads=1, device="cpu", **TINY)
    with pytest.raises(Interrupted):
        gs.runs.run(config, folder, False, StopAt(1, 1))  # type: ignore[attr-defined]
    return folder


FOLDERS: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "an unfinished run": (lambda run: None, 0, ""),
    "a damaged one": (
        lambda run: flip(checkpoints.listing(run / "checkpoints")[-1] / "tensors.safetensors", -1), 0,
        "gradshare: checkpoint .* is damaged: tensors.safetensors does not match its checksum; epoch-0001.* is used",
    ),
    "one with nothing sound": (
        lambda run: [flip(path / "checkpoint.json", 30) for path in checkpoints.listing(run / "checkpoints")], 2,
        "none of the 2 in .* is sound",
    ),
    "a newer checkpoint": (
        lambda run: reseal(checkpoints.listing(run / "checkpoints")[-1] / "checkpoint.json", version=7), 2,
        r"newer gradshare \(checkpoint version 7, this one reads 1\): update gradshare",
    ),
    "a newer configuration": (
        lambda run: reseal(run / "config.json", version=7), 2,
        r"newer gradshare \(configuration version 7, this one reads 1\): update gradshare",
    ),
    "a changed rate": (
        lambda run: (run / "config.json").write_text((run / "config.json").read_text().replace("0.1,", "0.3,")), 2,
        "was changed or is damaged: it does not match its checksum",
    ),
    "somebody else's model": (
        lambda run: (run / "config.json").write_text('{"model_type": "bert"}'), 2, "not a run's configuration",
    ),
    "somebody else's folder": (lambda run: (run / "config.json").rename(run / "thesis.tex"), 2, "has no config.json"),
    "an empty folder": (lambda run: (shutil.rmtree(run), run.mkdir()), 2, "has no config.json"),
    "a file": (lambda run: (shutil.rmtree(run), run.touch()), 2, "is not a run: it is a file"),
    "nothing": (shutil.rmtree, 2, "has no config.json"),
}  # fmt: skip


@pytest.mark.filterwarnings("always::gradshare.errors.DamageWarning")
@pytest.mark.parametrize("kind", FOLDERS)
def test_resume_of_every_kind_of_folder(
    by_command: Path,
    blobs: Path,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = shutil.copytree(by_command, tmp_path / "run")
    change, code, message = FOLDERS[kind]
    change(run)
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    monkeypatch.setattr("warnings.showwarning", _to_stderr)
    assert gradshare(monkeypatch, "train", "--resume", run) == code
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert len(lines) == bool(message) and all(line.startswith("gradshare: ") for line in lines)
    assert re.search(message, said.err), said.err
    if code:
        assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before
    else:
        assert "test, ensemble" in said.out and (run / "DONE").exists()
        assert gradshare(monkeypatch, "train", "--resume", run) == 0  # a finished one
        again = capsys.readouterr()
        assert "epoch 3/3" not in again.out and "test, ensemble" in again.out and again.err == ""
        assert gradshare(monkeypatch, "train", "--dataset", blobs, "--out", run) == 2
        assert "already holds a run" in capsys.readouterr().err


def _to_stderr(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))


def test_a_comparison_goes_on_with_the_threads_it_began_with(
    blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gs.RunConfig(dataset=str(blobs), filters=3, steps=1, device="auto", **TINY | {"epochs": 1})
    threads = torch.get_num_threads()
    try:
        for cores in (1, 2):
            monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
            comparison.compare(config, ["original"], tmp_path, 1, PlainScreen(config))
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    with pytest.raises(gs.UserError, match=r"was begun with inner_lr = 0\.1, not 0\.2"):
        comparison.compare(replace(config, inner_lr=0.2), ["original"], tmp_path, 1, PlainScreen(config))
