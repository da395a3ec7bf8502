"""Trackers: the three methods of Lightning Fabric's loggers, and none of them can end a run."""

from __future__ import annotations

import builtins
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradshare as gs
from gradshare.runs.display import Silent
from gradshare.runs.divergence import Diverged
from gradshare.runs.records import Epoch
from gradshare.runs.trackers import TensorBoard, as_trackers, epoch_numbers
from gradshare.runs.workers import Interrupted
from tests.support.runs import TINY, StopAt, learner

SHORT = TINY | {"epochs": 2, "iterations": 1, "test_tasks": 2, "display": False}


class FabricLogger:
    """As `lightning.fabric.loggers.Logger` has it: keyword names, a property and a method that `train` does not use."""

    def __init__(self) -> None:
        self.hyperparams: list[dict[str, Any]] = []
        self.metrics: list[tuple[int | None, dict[str, float]]] = []
        self.ended: list[str] = []

    @property
    def name(self) -> str:
        return "fabric"

    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.hyperparams.append(params)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.metrics.append((step, metrics))

    def finalize(self, status: str) -> None:
        self.ended.append(status)


def test_a_tracker_gets_the_options_every_epoch_and_the_test(dataset: gs.Dataset, tmp_path: Path) -> None:
    one, other = FabricLogger(), FabricLogger()
    run = gs.train(learner(), dataset, tmp_path / "run", trackers=[one, other], about={"model": "small"}, **SHORT)
    assert [step for step, _ in one.metrics] == [1, 2, 2] and one.ended == ["success"]
    (options,) = one.hyperparams
    assert options["epochs"] == 2 and options["algorithm"] == "maml_plus_plus" and options["model"] == "small"
    assert options["inner_lr"] == 0.1 and not any(isinstance(value, dict) for value in options.values())
    for line, (_, numbers) in zip(run.metrics, one.metrics, strict=False):
        assert {name: numbers[name] for name in ("train_loss", "val_accuracy", "skipped")}.items() <= line.items()
        assert numbers["m/2"] == line["m"][1] and all(math.isfinite(value) for value in numbers.values())
    assert one.metrics[-1][1]["test_accuracy"] == run.summary["test"]["best"]["accuracy"]
    assert (other.metrics, other.ended) == (one.metrics, one.ended)


def test_one_tracker_needs_no_list_and_a_resumed_run_goes_on(dataset: gs.Dataset, tmp_path: Path) -> None:
    first, second = FabricLogger(), FabricLogger()
    stop = StopAt(1, 1, signal.SIGINT)
    with pytest.raises(Interrupted):
        gs.train(learner(), dataset, tmp_path / "run", trackers=first, **SHORT | {"iterations": 2, "display": stop})
    gs.train(learner(), dataset, tmp_path / "run", resume=True, trackers=second, **SHORT | {"iterations": 2})
    assert [step for step, _ in first.metrics] == [1] and first.ended == ["aborted"]
    assert [step for step, _ in second.metrics] == [2, 2] and second.ended == ["success"]


class Breaking(FabricLogger):
    """Raises an error in one method."""

    def __init__(self, method: str, error: Exception) -> None:
        super().__init__()
        self.calls = 0

        def fail(*arguments: Any) -> None:
            self.calls += 1
            raise error

        setattr(self, method, fail)


@pytest.mark.parametrize("method", ["log_hyperparams", "log_metrics", "finalize"])
def test_a_tracker_that_fails_ends_no_run_and_is_not_called_again(
    method: str, dataset: gs.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, whole = Breaking(method, ConnectionError("no\nroute")), FabricLogger()
    run = gs.train(learner(), dataset, tmp_path / "run", trackers=[broken, whole], **SHORT)
    line = f"gradshare: Breaking.{method} raised ConnectionError, and is left out: no route\n"
    assert capsys.readouterr().err == line
    assert broken.calls == 1 and len(run.metrics) == 2 and whole.ended == ["success"]
    assert method == "finalize" or broken.ended == []


def test_a_method_that_a_logger_does_not_have_is_left_out(dataset: gs.Dataset, tmp_path: Path) -> None:
    """Lightning's CSVLogger raises NotImplementedError in `log_hyperparams`, and logs metrics."""
    logger = Breaking("log_hyperparams", NotImplementedError())
    gs.train(learner(), dataset, tmp_path / "run", trackers=logger, **SHORT)
    assert len(logger.metrics) == 3 and logger.ended == ["success"]


class Failing(Silent):
    def epoch(self, line: Epoch, seconds: float) -> None:
        raise RuntimeError("in the display")


def test_an_error_and_a_divergence_have_failed(dataset: gs.Dataset, tmp_path: Path) -> None:
    failed, diverged = FabricLogger(), FabricLogger()
    with pytest.raises(RuntimeError, match="in the display"):
        gs.train(learner(), dataset, tmp_path / "failed", trackers=failed, **SHORT | {"display": Failing()})
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 3))
    with torch.no_grad():
        model[1].weight.fill_(torch.nan)
    with pytest.raises(Diverged):
        gs.train(gs.maml(model, steps=1), dataset, tmp_path / "run", trackers=diverged, **SHORT | {"iterations": 30})
    assert failed.ended == diverged.ended == ["failed"]


class Emptying(FabricLogger):
    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        params.clear()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        metrics.clear()


def test_a_tracker_that_changes_what_it_gets(dataset: gs.Dataset, tmp_path: Path) -> None:
    other = FabricLogger()
    gs.train(learner(), dataset, tmp_path / "run", trackers=[Emptying(), other], **SHORT)
    assert other.hyperparams[0]["epochs"] == 2 and all("train_loss" in numbers for _, numbers in other.metrics[:2])


def test_no_tracker_may_be_none_or_empty() -> None:
    assert as_trackers(None) == as_trackers(()) == []


@pytest.mark.parametrize("trackers", [object(), [FabricLogger], "tensorboard", 3])
def test_what_is_no_tracker_is_an_error_at_once(trackers: Any, dataset: gs.Dataset, tmp_path: Path) -> None:
    with pytest.raises(gs.UserError, match="a tracker has the methods log_hyperparams, log_metrics, finalize"):
        gs.train(learner(), dataset, tmp_path / "run", trackers=trackers, **SHORT)
    assert not (tmp_path / "run").exists()


def test_numbers_that_are_not_finite_stay_out() -> None:
    assert epoch_numbers(Epoch(1, train_loss=math.inf, val_loss=0.5)) == {
        "skipped": 0, "val_loss": 0.5, "val_diverged": 0
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_what_we_write(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path)
    board.log_hyperparams({"epochs": 2})
    assert os.listdir(tmp_path) == []  # before an epoch is finished
    board.log_metrics({"val_accuracy": 0.25}, 1)
    board.log_metrics({"val_accuracy": 0.5}, 2)
    board.finalize("success")
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(one.step, one.value) for one in read.Scalars("val_accuracy")] == [(1, 0.25), (2, 0.5)]
    assert read.Tags()["tensors"] == ["options/text_summary"]


def test_without_tensorboard_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.__import__

    def missing(name: str, *more: Any) -> Any:
        if name.startswith("torch.utils.tensorboard"):
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return usual(name, *more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(gs.UserError, match=r"pip install .gradshare\[tensorboard\]"):
        TensorBoard(tmp_path)
