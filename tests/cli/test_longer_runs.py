"""On the command line: patience, no validation, a log for TensorBoard, and options that are too large."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradshare.engine import networks
from gradshare.reports.model import read_runs
from gradshare.runs.folder import RunFolder
from tests.support.commands import SMALL, call, train_here

TINY = [*SMALL, "--iterations", 1]


def worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every validation be worse than the one before it."""
    from gradshare.runs import train as training

    record = training._Run._record

    def falling(self: Any, validation: Any, timing: Any) -> None:
        falls = type(validation)(validation.losses, validation.accuracies * 0 + 1 / timing.epoch)
        record(self, falls, timing)

    monkeypatch.setattr(training._Run, "_record", falling)


def test_patience_is_recorded_and_can_be_made_longer(
    blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worse(monkeypatch)
    run = tmp_path / "run"
    said = call("train", "--dataset", blobs, *TINY, "--epochs", 9, "--patience", 1, "--out", run).out
    assert "best epoch 1 (ended after epoch 2 of 9: validation had not improved for 1 epochs)" in said
    assert said.count("epoch 1/9") == said.count("epoch 2/9") == said.count("best epoch") == 1
    assert said.count("test, best: ") == said.count("test, ensemble: ") == 1
    assert "has patience = 1" in call("train", "--resume", run, "--patience", 0, code=2).err
    assert "ended after epoch 4 of 9" in call("train", "--resume", run, "--patience", 3).out
    assert "with more --epochs or --patience" in call("train", "--resume", run, "--seed", 3, code=2).err
    assert "go on with it (--resume)" in call("train", "--out", run, code=2).err
    call("report", run)
    assert [one.status for one in read_runs(run)] == ["done"]


def test_a_comparison_that_ended_early_is_done(blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_here(monkeypatch)
    worse(monkeypatch)
    arguments = ["compare", "--dataset", blobs, *TINY, "--epochs", 9, "--arms", "original", "--out", tmp_path]
    call(*arguments, "--patience", 1)
    before = (tmp_path / "original" / "DONE").stat().st_mtime_ns
    status = call("grid", "status", tmp_path).out
    assert "done" in status and "2/9" in status and "stopped" not in status
    call(*arguments, "--patience", 1)
    assert (tmp_path / "original" / "DONE").stat().st_mtime_ns == before  # nothing is left to train
    call(*arguments, "--patience", 2)
    assert len(RunFolder(tmp_path / "original").epochs()) == 3


def test_a_run_without_validation_from_start_to_report(blobs: Path, tmp_path: Path) -> None:
    sizes = [0 if before == "--val-tasks" else word for before, word in zip(["", *TINY], TINY, strict=False)]
    options = ["--dataset", blobs, *sizes, "--epochs", 2, "--out", tmp_path / "run"]
    said = call("train", *options).out
    assert "epoch 2/2  train " in said and "best epoch 2; run in" in said
    assert "best epoch 2: " in call("test", tmp_path / "run", "--tasks", 2).out
    call("export", tmp_path / "run", tmp_path / "model")
    assert "not finite" not in (tmp_path / "model" / "README.md").read_text()
    call("report", tmp_path / "run")
    assert "nan" not in (tmp_path / "run" / "table.md").read_text()


def test_a_comparison_without_validation(blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_here(monkeypatch)
    sizes = [0 if before == "--val-tasks" else word for before, word in zip(["", *TINY], TINY, strict=False)]
    said = call("compare", "--dataset", blobs, *sizes, "--epochs", 1, "--out", tmp_path).out
    assert "original" in said and "nan" not in said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("command", ["train", "compare"])
def test_a_log_for_tensorboard(command: str, blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train_here(monkeypatch)
    out, arms = (tmp_path / "run", []) if command == "train" else (tmp_path, ["--arms", "shared"])
    call(command, "--dataset", blobs, *TINY, "--epochs", 2, *arms, "--log", "tensorboard", "--out", out)
    run = out if command == "train" else out / "shared"
    read = EventAccumulator(str(run / "tensorboard"))
    read.Reload()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [one.step for one in read.Scalars("val_accuracy")] == [1, 2]
    assert [one.value for one in read.Scalars("train_loss")] == pytest.approx([line["train_loss"] for line in lines])
    assert "log" not in RunFolder(run).options()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ways", 300_000_000, "--filters", 2], "300000000-way tasks need 300000000 classes"),
        (["--iterations", 1_000_000_000], "iterations is 1000000000; it must be at most 1000000"),
    ],
)
def test_sizes_are_checked_before_anything_of_that_size_is_made(
    options: list[Any], message: str, blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4: the process was killed for memory."""
    monkeypatch.setattr(networks.Conv4, "__init__", lambda *_: pytest.fail("a network was built"))
    assert message in call("train", "--dataset", blobs, *options, "--out", tmp_path / "run", code=2).err
    assert not (tmp_path / "run").exists()
