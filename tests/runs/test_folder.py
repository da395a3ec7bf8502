"""Run folders: what is in them is read as typed records, also in folders that earlier versions wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradshare.errors import UserError
from gradshare.runs.folder import Epoch, RunFolder, best_epochs, find_runs

ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).parent / "kept"


def test_every_run_of_the_results_opens() -> None:
    runs = find_runs(ROOT / "results")
    assert len(runs) == len([*(ROOT / "results").rglob("config.json")]) >= 47
    for run in runs:
        config, epochs = run.config(), run.epochs()
        assert config is not None
        assert [line.epoch for line in epochs] == [timing.epoch for timing in run.timings()]
        assert run.damage() == ""
        if run.status() == "done":
            summary = run.summary()
            assert summary is not None and summary.test is not None
            assert summary.best_epoch == best_epochs(epochs)[0] == summary.test.best.epochs[0]
            assert list(summary.test.ensemble.epochs) == best_epochs(epochs)
            assert len(epochs) == config.epochs
        else:
            assert run.status() == "stopped" and run.summary() is None


def test_a_finished_run() -> None:
    run = RunFolder(KEPT / "run")
    assert run.status() == "done" and run.damage() == "" and run.divergence() is None and run.holder() is None
    config, summary = run.config(), run.summary()
    assert config is not None and (config.arm, config.inner_lr, config.epochs) == ("shared", 0.1, 2)
    assert run.epochs()[1].m == (0.499454140663147, 0.5001296401023865)
    assert summary is not None and summary.best_epoch == 1 and summary.test is not None
    assert summary.test.best.epochs == (1,) and summary.test.ensemble.epochs == (1, 2)


def test_a_stopped_run_of_a_users_own_learner() -> None:
    run = RunFolder(KEPT / "stopped")
    assert run.status() == "stopped" and run.config() is None and run.options()["model"] == "mine"
    assert len(run.epochs()) == 1 and run.summary() is None
    assert [timing.epoch for timing in run.timings()] == [1]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert run.status() == "waiting" and not run.exists() and run.epochs() == run.timings() == []
    assert find_runs(tmp_path / "run") == []
    with pytest.raises(UserError, match=r"config\.json"):
        run.options()


@pytest.mark.parametrize(
    "line",
    ['{"epoch": 1', "[]", '{"val_loss": 1}', '{"epoch": 1, "val_loss": "x"}', '{"epoch": 1, "m": [NaN]}', "\x00"],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n' + line.replace('"epoch": 1', '"epoch": 2'))
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2"):
        RunFolder(tmp_path).epochs()


def test_epochs_increase(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 2}\n{"epoch": 2}\n')
    with pytest.raises(UserError, match="epoch 2 comes after epoch 2"):
        RunFolder(tmp_path).epochs()


def test_the_best_epochs() -> None:
    accuracies = [Epoch(number, val_accuracy=value) for number, value in enumerate((0.1, 0.3, 0.2, 0.3), 1)]
    assert best_epochs(accuracies, 3) == [2, 4, 3]
    losses = [Epoch(1, val_loss=0.1, val_diverged=1), Epoch(2, val_loss=9.0), Epoch(3)]
    assert best_epochs(losses) == [2, 3, 1]
    assert best_epochs([Epoch(number, train_loss=1.0) for number in range(1, 8)]) == [7, 6, 5, 4, 3]  # no validation
    assert best_epochs([Epoch(1, val_diverged=2), Epoch(2, val_diverged=1), Epoch(3, val_diverged=1)]) == [2, 3, 1]
