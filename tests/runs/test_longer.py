"""Runs that end early, have no validation, become longer, or lose their folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import gradshare as gs
from gradshare.runs import train as training
from gradshare.runs.config import LATER, RunConfig, Training, check_same_options, recorded
from gradshare.runs.display import Silent
from gradshare.runs.evaluate import Evaluation
from gradshare.runs.folder import RunFolder
from gradshare.runs.records import Epoch, out_of_patience
from gradshare.runs.workers import Interrupted
from tests.support.runs import TINY, StopAt, learner, same_run

SHORT = TINY | {"iterations": 1, "test_tasks": 2, "display": False}


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The validation accuracies of the epochs, which the test sets; the training is the real one."""
    wanted: list[float] = []
    evaluate = training.evaluate

    def scored(learner: Any, states: Any, dataset: Any, split: str, *more: Any, **named: Any) -> Evaluation:
        found = evaluate(learner, states, dataset, split, *more, **named)
        if split != "val":
            return found
        return Evaluation(found.losses, torch.full_like(found.losses, wanted.pop(0)))

    monkeypatch.setattr(training, "evaluate", scored)
    return wanted


def epochs_of(*accuracies: float) -> list[Epoch]:
    return [Epoch(number, val_accuracy=value) for number, value in enumerate(accuracies, 1)]


@pytest.mark.parametrize(
    ("accuracies", "patience", "over"),
    [
        ((), 1, False),
        ((0.5,), 1, False),
        ((0.5, 0.5), 1, True),  # as good is not better
        ((0.5, 0.6), 1, False),
        ((0.5, 0.4), 2, False),
        ((0.5, 0.4, 0.4), 2, True),
        ((0.5, 0.4, 0.4), 0, False),
    ],
)
def test_patience(accuracies: Sequence[float], patience: int, over: bool) -> None:
    assert out_of_patience(epochs_of(*accuracies), patience) is over


def test_a_run_ends_when_validation_does_not_improve(scores: list[float], dataset: gs.Dataset, tmp_path: Path) -> None:
    scores += [0.4, 0.5, 0.3, 0.5]
    run = gs.train(learner(), dataset, tmp_path / "run", **SHORT | {"epochs": 9, "patience": 2})
    assert [line["val_accuracy"] for line in run.metrics] == pytest.approx([0.4, 0.5, 0.3, 0.5])
    assert run.summary["best_epoch"] == 2
    assert run.summary["ended"] == "ended after epoch 4 of 9: validation had not improved for 2 epochs"
    folder = RunFolder(tmp_path / "run")
    assert folder.status() == "done" and folder.damage() == "" and folder.options()["patience"] == 2
    done = (tmp_path / "run" / "DONE").stat().st_mtime_ns
    again = gs.train(learner(), dataset, tmp_path / "run", True, **SHORT | {"epochs": 9, "patience": 2})
    assert again.summary == run.summary  # nothing is trained: there are no more scores
    assert (tmp_path / "run" / "DONE").stat().st_mtime_ns == done  # and nothing tested


def test_more_patience_goes_on_as_if_it_had_been_so_from_the_start(
    scores: list[float], dataset: gs.Dataset, tmp_path: Path
) -> None:
    values = [0.4, 0.3, 0.5, 0.2, 0.2, 0.2, 0.2]
    scores += values
    whole = SHORT | {"epochs": 6, "patience": 3}
    gs.train(learner(), dataset, tmp_path / "whole", **whole)
    scores[:] = values
    gs.train(learner(), dataset, tmp_path / "grown", **SHORT | {"epochs": 4, "patience": 1})
    assert len(RunFolder(tmp_path / "grown").epochs()) == 2
    gs.train(learner(), dataset, tmp_path / "grown", True, **SHORT | {"epochs": 4, "patience": 2})
    assert len(RunFolder(tmp_path / "grown").epochs()) == 4
    with pytest.raises(Interrupted):  # in the middle of an epoch after that
        stop = StopAt(4, 1)
        gs.train(learner(), dataset, tmp_path / "grown", True, **whole | {"display": stop})
    gs.train(learner(), dataset, tmp_path / "grown", True, **whole)
    same_run(tmp_path / "whole", tmp_path / "grown")


def test_less_patience_is_another_run(dataset: gs.Dataset, tmp_path: Path) -> None:
    gs.train(learner(), dataset, tmp_path / "run", **SHORT | {"epochs": 1, "patience": 5})
    for other in (4, 0):
        with pytest.raises(gs.UserError, match=rf"has patience = 5, not {other}: .* \(patience may be more\)"):
            gs.train(learner(), dataset, tmp_path / "run", True, **SHORT | {"epochs": 1, "patience": other})


def test_a_run_without_validation(dataset: gs.Dataset, tmp_path: Path) -> None:
    without = SHORT | {"val_tasks": 0}
    run = gs.train(learner(), dataset, tmp_path / "run", **without)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert not any(name.startswith("val") for name in first) and 0 <= first["train_accuracy"] <= 1
    assert run.summary["best_epoch"] == 3 and run.summary["test"]["ensemble"]["epochs"] == [3, 2, 1]
    again = gs.train(learner(), dataset, tmp_path / "run", resume=True, **without | {"epochs": 4})
    assert again.summary["best_epoch"] == 4 and gs.load_run(tmp_path / "run").best_epochs[0] == 4
    validated = gs.train(learner(), dataset, tmp_path / "validated", **SHORT)
    same = ("train_loss", "train_accuracy", "m", "lam")
    assert [[line[name] for name in same] for line in run.metrics] == [
        [line[name] for name in same] for line in validated.metrics
    ]


def test_a_report_of_a_run_without_validation(dataset: gs.Dataset, tmp_path: Path) -> None:
    from gradshare import reports
    from gradshare.reports.model import read_runs

    gs.train(learner(), dataset, tmp_path / "run", **SHORT | {"val_tasks": 0, "epochs": 1})
    (run,) = read_runs(tmp_path / "run")
    assert run.measure == "accuracy" and run.best_val is None and run.status == "done"
    reports.write_report(tmp_path / "run")
    assert "nan" not in (tmp_path / "run" / "table.md").read_text().lower()


class OnlyTrain:
    """A source with training tasks alone."""

    def __init__(self, dataset: gs.Dataset) -> None:
        self.dataset = dataset

    def sample(self, split: str, *more: Any) -> gs.Episodes:
        assert split == "train"
        return self.dataset.sample(split, *more)


def test_no_validation_and_no_test_need_no_tasks_for_them(dataset: gs.Dataset, tmp_path: Path) -> None:
    run = gs.train(learner(), OnlyTrain(dataset), tmp_path / "run", **SHORT | {"val_tasks": 0, "test_tasks": 0})
    assert run.summary == {"best_epoch": 3, "best_val_loss": None, "test": None}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_tasks": 0, "patience": 1}, "patience needs validation"),
        ({"val_tasks": 1}, "0 means no validation"),
        ({"iterations": 1_000_001}, "iterations is 1000001; it must be at most 1000000"),
        ({"patience": -1}, "patience"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"norm_statistics": "query"}, "norm_statistics is 'query', not one of batch, support"),
        ({"checkpoint": 1}, "checkpoint"),
    ],
)
def test_options_that_cannot_be(
    options: dict[str, Any], message: str, dataset: gs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a model is made, or anything of their size."""
    monkeypatch.setattr(gs.Learner, "init", None)
    with pytest.raises(gs.UserError, match=message):
        gs.train(learner(), dataset, tmp_path / "run", **SHORT | options)
    assert not (tmp_path / "run").exists()


def test_options_that_older_versions_lack_are_recorded_only_where_they_differ() -> None:
    later = {"deterministic", "patience", "norm_statistics", "micro_batch", "checkpoint"}
    later |= {"inner", "backbone", "start", "adapt", "head_start", "gates"}
    assert set(LATER) == later
    assert not set(recorded(vars(RunConfig()))) & set(LATER)
    assert recorded(vars(RunConfig(patience=3, micro_batch=2))).items() >= {"patience": 3, "micro_batch": 2}.items()
    stored, wanted = recorded(vars(Training())), recorded(vars(Training(norm_statistics="support")))
    with pytest.raises(gs.UserError, match="norm_statistics = 'batch', not 'support'"):
        check_same_options(Path("r"), stored, wanted, longer=True, rate_falls=False)


@pytest.mark.parametrize("options", [{"micro_batch": 1}, {"checkpoint": True}, {"norm_statistics": "support"}])
def test_options_reach_the_step_and_the_evaluation(
    options: dict[str, Any], dataset: gs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []
    step, evaluate = training.meta_step, training.evaluate

    def stepping(*given: Any) -> Any:
        seen.append(dict(zip(("clamp", "micro_batch", "checkpoint"), given[4:], strict=True)))
        return step(*given)

    def evaluating(*given: Any, **named: Any) -> Evaluation:
        seen.append(named)
        return evaluate(*given, **named)

    monkeypatch.setattr(training, "meta_step", stepping)
    monkeypatch.setattr(training, "evaluate", evaluating)
    plain = gs.train(learner(), dataset, tmp_path / "plain", **SHORT)
    seen.clear()
    run = gs.train(learner(), dataset, tmp_path / "run", **SHORT, **options)
    ((name, value),) = options.items()
    assert [one[name] for one in seen if name in one] == [value] * (5 if name == "norm_statistics" else 3)
    assert RunFolder(tmp_path / "run").options()[name] == value
    losses = [[line["train_loss"] for line in one.metrics] for one in (plain, run)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    changed = run.metrics[-1]["val_loss"] != pytest.approx(plain.metrics[-1]["val_loss"], rel=1e-4)
    assert changed == (name == "norm_statistics")
    with pytest.raises(gs.UserError, match=f"has {name} = "):
        gs.train(learner(), dataset, tmp_path / "run", True, **SHORT)


class Gone(Silent):
    """Takes the folder away in an epoch, and may put another run in its place."""

    def __init__(self, folder: Path, other: Path | None) -> None:
        self.folder, self.other = folder, other

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None:
        if epoch == 1 and self.folder.exists() and iteration == 1:
            shutil.move(self.folder, self.folder.with_name("moved"))
            if self.other is not None:
                shutil.copytree(self.other, self.folder)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_whose_folder_is_gone_stops_within_an_epoch(replaced: bool, dataset: gs.Dataset, tmp_path: Path) -> None:
    """D6: it trained on, and wrote into a new folder, or into that of another run."""
    other = tmp_path / "other"
    gs.train(learner(), dataset, other, **SHORT | {"epochs": 1, "seed": 1})
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    run = tmp_path / "run"
    display = Gone(run, other if replaced else None)
    with pytest.raises(gs.UserError, match="was moved or deleted while its run trained"):
        gs.train(learner(), dataset, run, **SHORT | {"display": display})
    left = {other / path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert left == (before if replaced else {})
    gs.train(learner(), dataset, tmp_path / "moved", True, **SHORT)
    gs.train(learner(), dataset, tmp_path / "whole", **SHORT)
    same_run(tmp_path / "whole", tmp_path / "moved")


def test_a_folder_that_is_gone_before_the_result_is_an_error(dataset: gs.Dataset, tmp_path: Path) -> None:
    class Removed(Silent):
        def evaluating(self, split: str, done: int, total: int) -> None:
            if split == "test" and (tmp_path / "run" / "config.json").exists():
                (tmp_path / "run" / "config.json").unlink()

    with pytest.raises(gs.UserError, match="was moved or deleted"):
        gs.train(learner(), dataset, tmp_path / "run", **SHORT | {"epochs": 1, "display": Removed()})
    assert not (tmp_path / "run" / "DONE").exists()
