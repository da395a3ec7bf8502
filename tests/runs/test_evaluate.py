"""Evaluation: a run as it was trained, other shapes and steps, and which statistics batch norm uses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import gradshare as gs
from gradshare.runs.build import run as run_config
from gradshare.runs.display import Silent
from gradshare.runs.export import SavedRun
from gradshare.runs.folder import RunFolder
from gradshare.runs.train import Trained
from tests.conftest import write_blobs
from tests.support.runs import TINY, learner

OPTIONS: dict[str, Any] = {**TINY, "epochs": 4, "shots": 2, "seed": 4, "outer_lr": 0.05, "test_tasks": 10}
SHAPE = gs.Shape(ways=3, shots=2, queries=3)


class Asked:
    """A data set that notes which tasks it is asked for."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.calls = dataset, []

    def sample(self, split: str, shape: gs.Shape, tasks: int, key: tuple[int, ...]) -> gs.Episodes:
        self.calls.append((split, shape, tasks, key))
        return self.dataset.sample(split, gs.Shape(3, shape.shots, 3), tasks, key)


@pytest.fixture(scope="module")
def trained(dataset: gs.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return gs.train(learner(), dataset, tmp_path_factory.mktemp("evaluate") / "run", display=Silent(), **OPTIONS)


@pytest.fixture(scope="module")
def saved(blobs: Path, tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """A run of the command line."""
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    small = {"filters": 3, "steps": 2, "threads": 1, "device": "cpu", **OPTIONS, "norm_statistics": "support"}
    run_config(gs.RunConfig(dataset=str(blobs), **small), folder, False, Silent())
    return gs.load_run(folder)


def same(first: gs.Evaluation, second: gs.Evaluation) -> bool:
    return torch.equal(first.losses, second.losses) and first.norm_statistics == second.norm_statistics


def same_state(first: gs.MetaState, second: gs.MetaState) -> bool:
    one, other = first.tensors(), second.tensors()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_is_evaluated_as_it_was_trained(trained: Trained, dataset: gs.Dataset) -> None:
    source = Asked(dataset)
    result = gs.evaluate(replace(trained, dataset=source), tasks=10)
    keys = [(4, 2, 0, number) for number in range(3)]
    assert source.calls == [("test", SHAPE, tasks, key) for tasks, key in zip((4, 4, 2), keys, strict=True)]
    best = trained.summary["test"]["best"]
    assert (result.accuracy, result.loss) == (best["accuracy"], best["loss"]) and result.norm_statistics == "batch"
    by_hand = gs.evaluate(trained.learner, trained.best, dataset, shape=SHAPE, tasks=10, seed=4, batch=4)
    assert same(result, by_hand) and len(gs.evaluate(trained, split="val").losses) == 600


def test_the_best_and_the_last_state(trained: Trained, dataset: gs.Dataset) -> None:
    folder = gs.load_run(trained.folder)
    assert trained.summary["best_epoch"] != 4, "choose options whose best epoch is not the last"
    assert trained.last is trained.state and trained.best is trained.best and folder.best is folder.best
    assert same_state(trained.best, folder.best) and same_state(trained.last, folder.last)
    assert not same_state(trained.best, trained.last)
    assert all(tensor.requires_grad for tensor in trained.best.trainable().values())
    last = gs.evaluate(trained, trained.last, tasks=8)
    both = gs.evaluate(trained, [trained.best, trained.last], tasks=8)
    assert len({result.loss for result in (last, both, gs.evaluate(trained, tasks=8))}) == 3


def test_a_run_of_the_command_line_needs_nothing_else(saved: SavedRun, blobs: Path) -> None:
    summary = RunFolder(saved.folder).summary()
    assert summary is not None and summary.test is not None
    result = gs.evaluate(saved, tasks=10)
    assert (result.accuracy, result.loss) == (summary.test.best.accuracy, summary.test.best.loss)
    assert result.norm_statistics == "support"
    assert gs.evaluate(saved, tasks=10, norm_statistics="batch").loss != result.loss
    other = gs.load_dataset(write_blobs(saved.folder.parent / "other", {"test": 4}, size=20))
    assert gs.evaluate(saved, dataset=other, tasks=4).accuracy is not None  # 20 x 20 ends as 1 x 1 too
    large = gs.load_dataset(write_blobs(saved.folder.parent / "large", {"test": 4}, size=40))
    with pytest.raises(gs.UserError, match="with images of 1 x 40 x 40, does not fit the learner"):
        gs.evaluate(saved, dataset=large)


def test_a_run_from_python_is_opened_with_its_learner(trained: Trained, dataset: gs.Dataset) -> None:
    opened = gs.load_run(trained.folder, learner(), dataset)
    assert same(gs.evaluate(opened, tasks=10), gs.evaluate(trained, tasks=10))
    assert opened.learner() is not None and opened.dataset() is dataset
    with pytest.raises(gs.UserError, match=r"gs\.evaluate\(gs\.load_run\('.*run', learner, dataset\)\)"):
        gs.evaluate(gs.load_run(trained.folder))
    with pytest.raises(gs.UserError, match="was trained with another learner: steps 2, not 3"):
        gs.load_run(trained.folder, learner(steps=3), dataset)
    with pytest.raises(gs.UserError, match="a learner is what"):
        gs.load_run(trained.folder, "maml")  # type: ignore[arg-type]


def test_the_form_without_a_run(trained: Trained, dataset: gs.Dataset) -> None:
    source = Asked(dataset)
    gs.evaluate(trained.learner, trained.last, source)
    assert source.calls == [("test", gs.Shape(5, 1, 15), 25, (0, 2, 0, number)) for number in range(24)]
    source.calls.clear()
    done: list[int] = []
    gs.evaluate(trained.learner, trained.last, source, "val", gs.Shape(3, 1, 2), 5, 9, 3, done.append)
    assert source.calls == [("val", gs.Shape(3, 1, 2), 3, (9, 1, 0, 0)), ("val", gs.Shape(3, 1, 2), 2, (9, 1, 0, 1))]
    assert done == [3, 5]
    for words in ((trained.learner,), (trained.learner, trained.last)):
        with pytest.raises(gs.UserError, match=r"gs\.evaluate\(run\), or gs\.evaluate\(learner, state, dataset\)"):
            gs.evaluate(*words)
    with pytest.raises(gs.UserError, match="a learner is what"):
        gs.evaluate("runs/own")  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", ["batch", "support"])
@pytest.mark.parametrize("steps", [1, 4])
def test_other_steps_shots_and_statistics(trained: Trained, dataset: gs.Dataset, steps: int, norm: Any) -> None:
    result = gs.evaluate(trained, shape=gs.Shape(2, 5, 3), tasks=4, steps=steps, norm_statistics=norm)
    tasks = dataset.sample("test", gs.Shape(2, 5, 3), 4, (4, 2, 0, 0))
    own = trained.learner
    fast = own.adapt(trained.best, tasks.support_x, tasks.support_y, steps=steps)
    logits = own.predict(fast, tasks.query_x, norm_statistics=norm)
    assert torch.equal(result.losses, own.losses(logits, tasks.query_y)) and result.norm_statistics == norm


def test_a_run_with_statistics_of_the_support_set(dataset: gs.Dataset, tmp_path: Path) -> None:
    options = {**OPTIONS, "epochs": 1, "norm_statistics": "support"}
    run = gs.train(learner(), dataset, tmp_path / "run", display=Silent(), **options)
    test = run.summary["test"]["best"]
    assert gs.evaluate(run, tasks=10).loss == test["loss"] and gs.evaluate(run, tasks=10).norm_statistics == "support"
    assert gs.evaluate(run, tasks=10, norm_statistics="batch").loss != test["loss"]
    model = gs.load_run(run.folder).save_pretrained(tmp_path / "model")
    card = (model / "README.md").read_text()
    assert "Evaluation is inductive" in card and 'predict(fast, query_x, norm_statistics="support")' in card


def test_a_run_without_validation(dataset: gs.Dataset, tmp_path: Path) -> None:
    run = gs.train(learner(), dataset, tmp_path / "run", display=Silent(), **{**OPTIONS, "epochs": 2, "val_tasks": 0})
    opened = gs.load_run(run.folder, learner(), dataset)
    assert same_state(run.best, run.last) and same_state(opened.best, run.last)
    assert gs.evaluate(opened, tasks=10).loss == run.summary["test"]["best"]["loss"]
    card = (opened.save_pretrained(tmp_path / "model") / "README.md").read_text()
    assert "| validation |" not in card and "| test |" in card and "Evaluation is transductive" in card


class Padded:
    """The tasks of a data set with one more query and support example each, which are not real."""

    def __init__(self, dataset: gs.Dataset) -> None:
        self.dataset = dataset

    def sample(self, split: str, shape: gs.Shape, tasks: int, key: tuple[int, ...]) -> gs.Episodes:
        real = self.dataset.sample(split, shape, tasks, key)
        masks = [torch.ones(tasks, y.shape[1] + 1, dtype=torch.bool) for y in (real.support_y, real.query_y)]
        for mask in masks:
            mask[:, -1] = False
        more = real.map(lambda part: torch.cat([part, torch.ones_like(part[:, :1])], 1))
        return replace(more, support_mask=masks[0], query_mask=masks[1])


def test_examples_that_are_not_real_do_not_count(trained: Trained, dataset: gs.Dataset) -> None:
    plain, padded = (gs.evaluate(trained, dataset=source, tasks=6) for source in (dataset, Padded(dataset)))
    assert plain.accuracies is not None and padded.accuracies is not None
    assert torch.equal(plain.accuracies, padded.accuracies)
    assert torch.allclose(plain.losses, padded.losses, rtol=1e-4)


def test_a_run_and_a_result_print_short(trained: Trained, saved: SavedRun) -> None:
    assert repr(saved) == f"SavedRun('{saved.folder}', 4 of 4 epochs)"
    result = gs.Evaluation(torch.tensor([1.0, 3.0]), torch.tensor([0.25, 0.75]), "support")
    shown = f"Evaluation(accuracy=0.5, loss=2, interval={1.96 * math.sqrt(0.125 / 2):.4g}, tasks=2"
    assert repr(result) == f"{shown}, norm_statistics='support')"
    assert "tensor" not in repr(gs.Evaluation(torch.tensor([math.nan]), None))
