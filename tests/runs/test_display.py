"""What a run shows while it trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import gradshare as gs
from gradshare.runs.display import Silent, View, epoch_text, result_lines
from gradshare.runs.records import Epoch, Score, Summary, Test
from tests.support.runs import TINY, learner

SHORT = TINY | {"epochs": 2, "iterations": 1, "test_tasks": 2}


@pytest.mark.parametrize("display", [None, True])
def test_progress_is_shown_by_default(
    display: bool | None, dataset: gs.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line for every epoch where there is no terminal, and the result, each once."""
    gs.train(learner(), dataset, tmp_path / "mine", display=display, **SHORT)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:24] for line in lines[:2]] == ["mine         epoch 1/2  ", "mine         epoch 2/2  "]
    assert [line.partition(":")[0] for line in lines[3:]] == ["test, best", "test, ensemble"]
    assert lines[2].startswith("best epoch ") and len(lines) == 5


def test_display_false_is_silent(dataset: gs.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = gs.train(learner(), dataset, tmp_path / "run", display=False, **SHORT)
    assert capsys.readouterr() == ("", "")
    assert len(repr(run)) < 200 and str(tmp_path) in repr(run)


class Counting(Silent):
    def __init__(self) -> None:
        self.epochs: list[int] = []

    def epoch(self, line: Epoch, seconds: float) -> None:
        self.epochs.append(line["epoch"])


def test_a_display_of_ones_own_is_all_there_is(
    dataset: gs.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Counting()
    gs.train(learner(), dataset, tmp_path / "run", display=own, **SHORT)
    assert own.epochs == [1, 2] and capsys.readouterr().out == ""


@pytest.mark.parametrize("display", [1, "yes", object()])
def test_what_is_no_display_is_an_error_before_anything_is_written(
    display: Any, dataset: gs.Dataset, tmp_path: Path
) -> None:
    with pytest.raises(gs.UserError, match="display is True, False, or an object with the methods iteration"):
        gs.train(learner(), dataset, tmp_path / "run", display=display, **SHORT)
    assert not (tmp_path / "run").exists()


def test_a_terminal_gets_a_live_table(
    dataset: gs.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    entered: list[bool] = []
    enter = View.__enter__
    monkeypatch.setattr(View, "__enter__", lambda self: (enter(self), entered.append(self.live is not None))[0])
    gs.train(learner(), dataset, tmp_path / "run", **SHORT)
    assert entered == [True] and "best epoch" in capsys.readouterr().out


def test_the_result_says_why_a_run_ended() -> None:
    scores = Score(0.5, 0.1, 1.0, epochs=(3,)), Score(None, None, None)
    summary = Summary(3, 0.5, None, Test(2, *scores), ended="ended after epoch 5")
    assert result_lines(summary, Path("r")) == [
        "best epoch 3 (ended after epoch 5); run in r",
        "test, best: 50.00% ± 10.00%",
        "test, ensemble: no finite loss",
    ]
    assert "ended" not in Summary(3, 0.5).as_json() and summary.as_json()["ended"] == "ended after epoch 5"


def test_an_epoch_without_validation_shows_its_training() -> None:
    assert epoch_text(Epoch(1, train_loss=0.5)) == "train loss 0.5"
    assert epoch_text(Epoch(1)) == "train no finite loss"
    assert epoch_text(Epoch(1, train_loss=0.5, val_diverged=3)) == "no finite val loss"
