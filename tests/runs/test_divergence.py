"""Runs whose numbers are not finite: steps are skipped and counted, a row of them stops the run; saturated gates."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradshare as gs
from gradshare.runs import checkpoints
from gradshare.runs.display import epoch_text
from gradshare.runs.divergence import LIMIT, Diverged, saturated
from gradshare.runs.folder import RunFolder
from gradshare.runs.records import Divergence, Epoch
from gradshare.runs.workers import Interrupted
from tests.support.runs import TINY, Poisoned, StopAt, learner, same_run

TOO_HIGH = 1e20  # an inner rate at which every loss is NaN; batch norm keeps them finite at 1e12


def strict(text: str) -> Any:
    """JSON as the standard has it, without NaN and Infinity."""

    def fail(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=fail)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def quick() -> gs.Learner:
    torch.manual_seed(0)
    return gs.maml(nn.Sequential(nn.Flatten(), nn.Linear(256, 3)), steps=1, sharing=gs.GradientSharing())


def test_a_run_that_diverges_is_stopped_with_its_last_good_state(dataset: gs.Dataset, tmp_path: Path) -> None:
    options = TINY | {"iterations": 30}
    with pytest.raises(Diverged, match="the outer loss was not finite in epoch 1, iteration 1"):
        gs.train(learner(inner_lr=TOO_HIGH), dataset, tmp_path, **options)
    run = RunFolder(tmp_path)
    assert run.divergence() == Divergence(1, 1, "the outer loss", LIMIT, "checkpoints/epoch-0000-iteration-0020")
    assert run.status() == "diverged"
    _, saved = checkpoints.load(tmp_path / "checkpoints" / "epoch-0000-iteration-0020")
    first = learner(inner_lr=TOO_HIGH).init(0).tensors()
    assert all(torch.equal(saved[name], tensor) for name, tensor in first.items())
    with pytest.raises(Diverged, match=r"delete .*diverged\.json"):
        gs.train(learner(inner_lr=TOO_HIGH), dataset, tmp_path, resume=True, **options)


def test_without_the_note_the_run_continues_with_other_tasks(dataset: gs.Dataset, tmp_path: Path) -> None:
    breaks = Poisoned(dataset, "train", lambda epoch, iteration: 5 <= iteration < 26)
    options = TINY | {"iterations": 30, "epochs": 1, "test_tasks": 0}
    with pytest.raises(Diverged, match="epoch 1, iteration 6,"):
        gs.train(quick(), breaks, tmp_path, **options)
    (tmp_path / "diverged.json").unlink()
    gs.train(quick(), breaks, tmp_path, resume=True, **options)
    assert [line["skipped"] for line in lines(tmp_path)] == [21]
    assert RunFolder(tmp_path).status() == "done" and RunFolder(tmp_path).divergence() is None


def test_a_row_of_19_over_several_epochs_stops_no_run(dataset: gs.Dataset, tmp_path: Path) -> None:
    def in_row(epoch: int, iteration: int) -> bool:  # 4 iterations an epoch
        return 2 <= 4 * epoch + iteration < 21 or 22 <= 4 * epoch + iteration < 24

    options = TINY | {"epochs": 7, "test_tasks": 0}
    run = gs.train(quick(), Poisoned(dataset, "train", in_row), tmp_path, **options)
    assert [line["skipped"] for line in lines(tmp_path)] == [2, 4, 4, 4, 4, 3, 0]
    assert [line["train_loss"] is None for line in lines(tmp_path)] == [False, True, True, True, True, False, False]
    assert all(math.isfinite(line["val_loss"]) for line in run.metrics)


def test_a_row_of_20_is_counted_over_epochs_and_interruptions(dataset: gs.Dataset, tmp_path: Path) -> None:
    breaks = Poisoned(dataset, "train", lambda epoch, iteration: 4 * epoch + iteration >= 2)
    options = TINY | {"epochs": 7}
    folders = tmp_path / "whole", tmp_path / "stopped"
    with pytest.raises(Diverged, match="epoch 1, iteration 3, and 19 more"):
        gs.train(quick(), breaks, folders[0], **options)
    for moment in ((1, 1), (3, 4)):
        with pytest.raises(Interrupted):
            gs.train(quick(), breaks, folders[1], resume=None, display=StopAt(*moment), **options)
    with pytest.raises(Diverged):
        gs.train(quick(), breaks, folders[1], resume=True, **options)
    found = RunFolder(folders[0]).divergence()
    assert found is not None and found == RunFolder(folders[1]).divergence()
    assert found.checkpoint == "checkpoints/epoch-0005-iteration-0002"
    ends = [checkpoints.load(folder / found.checkpoint)[1] for folder in folders]
    assert all(torch.equal(ends[0][name].nan_to_num(-1), tensor.nan_to_num(-1)) for name, tensor in ends[1].items())


def test_the_cause_names_what_was_not_finite_first(dataset: gs.Dataset, tmp_path: Path) -> None:
    class Bent(nn.Module):
        """Its loss is finite, and its gradient with respect to `bend`, which is not adapted, is not."""

        def __init__(self) -> None:
            super().__init__()
            self.bend = nn.Parameter(torch.zeros(()))
            self.head = nn.Linear(256, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.flatten(1) + self.bend.sqrt())

    with pytest.raises(Diverged, match="the gradient of the weights bend was not finite"):
        gs.train(gs.anil(Bent(), head="head"), dataset, tmp_path, **TINY | {"iterations": 20, "epochs": 1})


def test_a_run_with_skipped_steps_is_resumed_to_the_same_bits(dataset: gs.Dataset, tmp_path: Path) -> None:
    breaks = Poisoned(dataset, "train", lambda epoch, iteration: iteration in (0, 2))
    options = TINY | {"epochs": 2}
    gs.train(quick(), breaks, tmp_path / "whole", **options)
    with pytest.raises(Interrupted):
        gs.train(quick(), breaks, tmp_path / "stopped", display=StopAt(1, 3), **options)
    gs.train(quick(), breaks, tmp_path / "stopped", resume=True, **options)
    same_run(tmp_path / "whole", tmp_path / "stopped")
    assert [line["skipped"] for line in lines(tmp_path / "stopped")] == [2, 2]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"epoch": "x", "iteration": 1, "cause": "", "steps": 2}'])
def test_a_damaged_note_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "diverged.json").write_text(text)
    with pytest.raises(gs.UserError, match=r"diverged\.json is damaged"):
        RunFolder(tmp_path).divergence()


@pytest.mark.parametrize("split", ["val", "test"])
def test_tasks_that_diverge_in_evaluation_are_counted(dataset: gs.Dataset, tmp_path: Path, split: str) -> None:
    options = TINY | {"epochs": 1}
    run = gs.train(quick(), Poisoned(dataset, split, lambda *batch: True), tmp_path / "run", **options)
    summary = RunFolder(tmp_path / "run").summary()
    assert summary is not None and summary.test is not None
    lost = {"val": 0, "test": 0} | {split: 2}  # the last of each batch of 4 and 2
    assert run.metrics[0]["val_diverged"] == lost["val"] and math.isfinite(run.metrics[0]["val_loss"])
    assert summary.test.best.diverged == summary.test.ensemble.diverged == lost["test"]
    assert summary.test.best.loss is not None and summary.test.best.interval is not None


def test_without_any_finite_loss_it_is_null(tmp_path: Path) -> None:
    class Regression:
        def sample(self, split: str, shape: gs.Shape, tasks: int, key: tuple[int, ...]) -> gs.Episodes:
            x = torch.randn(tasks, 4, 2, generator=torch.Generator().manual_seed(sum(key)))
            return gs.Episodes(x, x[..., :1], x * (math.nan if split == "val" else 1.0), x[..., :1])

    gs.train(gs.maml(nn.Linear(2, 1), steps=1, loss="mse"), Regression(), tmp_path, **TINY)
    assert [(line["val_loss"], line["val_interval"]) for line in lines(tmp_path)] == [(None, None)] * 3
    assert [epoch_text(line) for line in RunFolder(tmp_path).epochs()] == ["no finite val loss"] * 3
    summary = strict((tmp_path / "summary.json").read_text())
    assert summary["best_val_loss"] is None and summary["test"]["best"]["diverged"] == 0


@pytest.mark.parametrize(
    ("gate", "value", "meaning"),
    [
        ("m", 0.99, "overwrites the memory"),
        ("m", 0.01, "nothing new"),
        ("lam", 0.995, "own gradient is left"),
        ("lam", 0.0, "own gradient unchanged"),
    ],
)
def test_what_a_saturated_gate_means(gate: str, value: float, meaning: str) -> None:
    other = "lam" if gate == "m" else "m"
    found = saturated(Epoch(1, **{gate: (0.5, value), other: (0.011, 0.989)}))  # type: ignore[arg-type]
    assert found.startswith(f"σ({'λ' if gate == 'lam' else 'm'}) of inner step 2 is") and meaning in found
    assert saturated(Epoch(1)) == ""
