"""`gradshare test`: a run, a comparison, other tasks and other data; and names that a terminal must not obey."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path

import pytest

import gradshare
import gradshare as gs
from gradshare.runs.display import Silent
from tests.conftest import write_blobs
from tests.support.commands import SMALL, call, mistake, train_here
from tests.support.runs import TINY, learner

HOSTILE = "a\x1b]0;pwned\x07\u202e[red]"


@pytest.fixture(scope="module")
def comparison(blobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("comparison") / HOSTILE
    with pytest.MonkeyPatch.context() as patch:
        train_here(patch)
        words = ["--dataset", blobs, *SMALL, "--epochs", 2, "--iterations", 2, "--out", out]
        shown = call("compare", *words, "--norm-statistics", "support")
    assert "Evaluation is inductive" in shown.out
    harmless(shown.out + shown.err)
    return out


def harmless(shown: str) -> None:
    assert "pwned" in shown and {one for one in shown if not one.isprintable()} <= {"\n"}


def percent(result: gs.Evaluation) -> str:
    return f"{result.accuracy:.2%} ± {result.interval:.2%}"


def test_one_run(comparison: Path) -> None:
    run = gs.load_run(comparison / "shared")
    lines = call("test", run.folder, "--tasks", 8).out.splitlines()
    best, ensemble, about = lines[-3:]
    assert best == f"best epoch {run.best_epochs[0]}: {percent(gs.evaluate(run, tasks=8))} over 8 test tasks"
    states = [run.state(epoch) for epoch in run.best_epochs]
    assert ensemble == f"ensemble of 2: {percent(gs.evaluate(run, states, tasks=8))} over 8 test tasks"
    assert about.startswith("blobs, 3-way 1-shot, 3 queries, inner steps: 2. Evaluation is inductive")


def test_other_tasks_steps_and_statistics(comparison: Path) -> None:
    run = gs.load_run(comparison / "shared")
    words = ["--ways", 2, "--shots", 4, "--queries", 5, "--steps", 4, "--norm-statistics", "batch", "--seed", 7]
    shown = call("test", run.folder, "--tasks", 6, "--split", "val", *words).out
    shape = gs.Shape(2, 4, 5)
    result = gs.evaluate(run, split="val", shape=shape, tasks=6, seed=7, steps=4, norm_statistics="batch")
    assert f"{percent(result)} over 6 val tasks" in shown
    assert "2-way 4-shot, 5 queries, inner steps: 4. Evaluation is transductive" in shown
    for option in ("--ways", "--shots", "--queries", "--steps"):
        assert "must be at least 1" in mistake("test", run.folder, option, 0)
    assert "outputs" in mistake("test", run.folder, "--ways", 4, "--tasks", 2)


def test_other_data(comparison: Path, tmp_path: Path) -> None:
    run = comparison / "original"
    other = write_blobs(tmp_path / "other", {"train": 3, "test": 5}, size=20)
    result = gs.evaluate(gs.load_run(run), dataset=gs.load_dataset(other), tasks=4)
    assert percent(result) in call("test", run, "--tasks", 4, "--dataset", other).out
    large = write_blobs(tmp_path / "large", {"test": 5}, size=40)
    assert "images of 1 x 40 x 40" in mistake("test", run, "--dataset", large)
    assert "data set" in mistake("test", run, "--dataset", "unheard-of")


def test_a_comparison_is_a_table(comparison: Path) -> None:
    shown = call("test", comparison, "--tasks", 6).out
    for arm in ("original", "shared"):
        run = gs.load_run(comparison / arm)
        assert re.search(rf"^{arm} +{run.best_epochs[0]} +{percent(gs.evaluate(run, tasks=6))}", shown, re.M)
    assert "Over 6 test tasks of blobs, 3-way 1-shot" in shown and shown.count("Evaluation is inductive") == 1


def test_runs_that_differ_and_runs_that_cannot_be_tested(
    comparison: Path, dataset: gs.Dataset, blobs: Path, tmp_path: Path
) -> None:
    runs = shutil.copytree(comparison, tmp_path / "runs")
    sizes = ["--dataset", blobs, *SMALL, "--epochs", 1, "--iterations", 1, "--shots", 2]
    call("train", *sizes, "--out", runs / "two")
    shown = call("test", runs, "--tasks", 4).out
    assert "1-shot" in shown and "2-shot" in shown and "Over 4 test tasks.\n" in shown
    assert "Evaluation is inductive" in shown and "Evaluation is transductive" in shown
    gs.train(learner(), dataset, runs / "own", display=Silent(), **{**TINY, "epochs": 1, "iterations": 1})
    shown, said = call("test", runs, "--tasks", 4, code=2)
    assert "shared" in shown and "1 of 4 runs were not tested. own: the run in " in said
    assert "gs.evaluate(gs.load_run(" in mistake("test", runs / "own")
    assert "is not a run" in mistake("test", tmp_path / "nothing")


# Names from strangers


def test_no_name_reaches_the_terminal_raw(comparison: Path, tmp_path: Path) -> None:
    harmless("".join(call("report", comparison)))
    harmless("".join(call("export", comparison / "shared", tmp_path / HOSTILE)))
    harmless("".join(call("grid", "status", tmp_path / HOSTILE, code=2)))
    harmless("".join(call("test", tmp_path / HOSTILE, code=2)))
    runs = shutil.copytree(comparison / "shared", tmp_path / "runs" / HOSTILE)
    shutil.copytree(runs, tmp_path / "runs" / "b")
    harmless("".join(call("test", tmp_path / "runs", "--tasks", 2)))
    harmless("".join(call("train", "--resume", runs)))
    harmless("".join(call("data", "import", "folder", tmp_path / HOSTILE, code=2)))


def test_all_print_by_one_function() -> None:
    for path in Path(gradshare.__file__).parent.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        prints = sum(isinstance(called, ast.Name) and called.id == "print" for called in calls)
        assert prints == (path.name == "errors.py"), f"{path}: print with gradshare.errors.say"
