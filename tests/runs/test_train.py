"""Training: the same run whatever interrupts it, and nothing lost."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import signal
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradshare as gs
from gradshare.cli.waiting import stoppable
from gradshare.files import write_whole
from gradshare.runs import checkpoints
from gradshare.runs import folder as folders
from gradshare.runs.config import Training
from gradshare.runs.folder import RunFolder
from gradshare.runs.workers import HardStop, Interrupted, stop_requests
from tests.support.runs import TINY, StopAt, learner, same_run

SHORT = TINY | {"epochs": 1, "iterations": 1, "test_tasks": 0}


@pytest.fixture(scope="module")
def uninterrupted(dataset: gs.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    gs.train(learner(), dataset, folder, **TINY)
    return folder


def test_the_signature_has_every_option_with_its_default() -> None:
    parameters = inspect.signature(gs.train).parameters
    for field in fields(Training):
        assert parameters[field.name].default == (None if field.name == "epochs" else field.default)
    assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())


def test_the_files_of_a_run(uninterrupted: Path) -> None:
    assert {path.name for path in uninterrupted.iterdir()} == {
        "config.json", "metrics.jsonl", "timings.jsonl", "checkpoints", "summary.json", "DONE"
    }  # fmt: skip
    run = RunFolder(uninterrupted)
    lines, summary = run.epochs(), run.summary()
    assert [line.epoch for line in lines] == [1, 2, 3]
    assert all(line.val_accuracy is not None and line.val_interval is not None for line in lines)
    assert all(line.m is not None and line.lam is not None and len(line.m) == len(line.lam) == 2 for line in lines)
    assert summary is not None and summary.test is not None and sorted(summary.test.ensemble.epochs) == [1, 2, 3]


def test_two_runs_are_the_same_to_the_bit(uninterrupted: Path, dataset: gs.Dataset, tmp_path: Path) -> None:
    gs.train(learner(), dataset, tmp_path / "again", **TINY)
    same_run(uninterrupted, tmp_path / "again")


@pytest.mark.parametrize(
    ("epoch", "iteration", "split", "number"),
    [
        (0, 1, None, signal.SIGINT),
        (1, 4, None, signal.SIGTERM),
        (0, 4, "val", signal.SIGTERM),
        (2, 4, "test", signal.SIGINT),
    ],
)
def test_stopped_and_resumed_is_uninterrupted(
    uninterrupted: Path, dataset: gs.Dataset, tmp_path: Path, epoch: int, iteration: int, split: str | None, number: int
) -> None:
    with pytest.raises(Interrupted, match="all is saved"):
        gs.train(learner(), dataset, tmp_path, None, display=StopAt(epoch, iteration, number, split), **TINY)
    assert RunFolder(tmp_path).status() == "stopped"
    gs.train(learner(), dataset, tmp_path, resume=None if split else True, **TINY)
    same_run(uninterrupted, tmp_path)


def test_resuming_a_finished_run_changes_nothing(uninterrupted: Path, dataset: gs.Dataset) -> None:
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")}
    options = {name: value for name, value in TINY.items() if name != "epochs"}
    run = gs.train(learner(), dataset, uninterrupted, resume=True, **options)
    assert len(run.metrics) == 3 and run.summary["best_epoch"] in (1, 2, 3)
    assert {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*")} == before


def test_a_finished_run_continues_for_more_epochs(dataset: gs.Dataset, tmp_path: Path) -> None:
    """It is then the same run, to the last bit, as one with so many epochs from the start."""
    whole = gs.train(learner(), dataset, tmp_path / "whole", **TINY | {"epochs": 4})
    gs.train(learner(), dataset, tmp_path / "longer", **TINY | {"epochs": 2})
    with pytest.raises(Interrupted):
        stop = StopAt(2, 2)
        gs.train(learner(), dataset, tmp_path / "longer", resume=True, display=stop, **TINY | {"epochs": 4})
    assert RunFolder(tmp_path / "longer").summary() is None and not RunFolder(tmp_path / "longer").done
    longer = gs.train(learner(), dataset, tmp_path / "longer", resume=True, **TINY | {"epochs": 4})
    same_run(whole.folder, longer.folder)
    with pytest.raises(gs.UserError, match="epochs = 4, not 3"):
        gs.train(learner(), dataset, tmp_path / "longer", resume=True, **TINY)


@pytest.mark.parametrize("cut", ["summary.json", "config.json", "metrics.jsonl"])
def test_a_run_killed_while_it_gets_more_epochs(
    cut: str, dataset: gs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has as many epochs as before, or as asked for, and is never done without having trained them."""
    options = TINY | {"iterations": 1, "test_tasks": 2}
    gs.train(learner(), dataset, tmp_path / "run", **options | {"epochs": 1})
    with monkeypatch.context() as patch:
        fail_at(patch, cut)
        with pytest.raises(MemoryError):
            gs.train(learner(), dataset, tmp_path / "run", resume=True, **options | {"epochs": 2})
    run = RunFolder(tmp_path / "run")
    assert not run.done and run.options()["epochs"] == (2 if cut == "metrics.jsonl" else 1)
    gs.train(learner(), dataset, tmp_path / "run", resume=True, **options | {"epochs": 2})
    gs.train(learner(), dataset, tmp_path / "whole", **options | {"epochs": 2})
    same_run(tmp_path / "whole", tmp_path / "run")


def fail_at(patch: pytest.MonkeyPatch, name: str) -> None:
    """When a file of this name is written or removed, the process is as good as killed."""

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == name:
            raise MemoryError
        os.unlink(path) if path.exists() or not missing_ok else None

    def write(path: Path, content: Any, *more: Any) -> None:
        if path.name == name:
            raise MemoryError
        write_whole(path, content, *more)

    patch.setattr(Path, "unlink", unlink)
    patch.setattr(folders, "write_whole", write)


def test_a_run_whose_rate_falls_over_its_epochs_gets_no_more(dataset: gs.Dataset, tmp_path: Path) -> None:
    falling = learner(final_outer_rate=0.1)
    gs.train(falling, dataset, tmp_path / "run", **SHORT)
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(gs.UserError, match="falls over its 1 epochs"):
        gs.train(falling, dataset, tmp_path / "run", resume=True, **SHORT | {"epochs": 5})
    assert (tmp_path / "run" / "config.json").read_bytes() == before


def test_other_options_and_other_learners_do_not_resume_a_run(uninterrupted: Path, dataset: gs.Dataset) -> None:
    before = {path: path.read_bytes() for path in uninterrupted.rglob("*") if path.is_file()}
    with pytest.raises(gs.UserError, match="has tasks = 2, not 3"):
        gs.train(learner(), dataset, uninterrupted, resume=True, **TINY | {"tasks": 3})
    with pytest.raises(gs.UserError, match="another learner: steps 2, not 3"):
        gs.train(learner(steps=3), dataset, uninterrupted, resume=True, **TINY | {"epochs": 5})
    assert {path: path.read_bytes() for path in uninterrupted.rglob("*") if path.is_file()} == before


def test_folders_that_hold_something_else(uninterrupted: Path, dataset: gs.Dataset, tmp_path: Path) -> None:
    with pytest.raises(gs.UserError, match="already holds a run"):
        gs.train(learner(), dataset, uninterrupted, **TINY)
    (tmp_path / "thesis.tex").write_text("years of work")
    for folder, resume, message in (
        (tmp_path, False, "not empty and not a run"),
        (tmp_path, True, r"no config\.json"),
        (tmp_path / "thesis.tex", False, "is a file"),
        ("a\0b", False, "cannot have the character"),
    ):
        with pytest.raises(gs.UserError, match=message):
            gs.train(learner(), dataset, folder, resume, **TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_only_the_newest_and_the_best_checkpoints_are_kept(dataset: gs.Dataset, tmp_path: Path) -> None:
    run = gs.train(learner(), dataset, tmp_path, **SHORT | {"epochs": 9})
    kept = {path.name for path in checkpoints.listing(tmp_path / "checkpoints")}
    best = sorted(run.metrics, key=lambda line: -line["val_accuracy"])[:5]
    assert kept == {f"epoch-{epoch:04d}-iteration-0000" for epoch in {*(line["epoch"] for line in best), 8, 9}}
    assert run.summary["test"] is None


def test_training_learns(dataset: gs.Dataset, tmp_path: Path) -> None:
    model = gs.Conv4(ways=3, filters=6, image=(1, 16, 16))
    options = TINY | {"epochs": 1, "iterations": 30, "val_tasks": 40, "outer_lr": 0.01, "test_tasks": 0}
    for sharing in (None, gs.GradientSharing()):
        run = gs.train(gs.maml(model, steps=2, sharing=sharing), dataset, tmp_path / str(bool(sharing)), **options)
        assert run.metrics[-1]["val_accuracy"] > 0.7  # 45 % before training


def test_two_methods_with_one_seed_see_the_same_tasks(dataset: gs.Dataset, tmp_path: Path) -> None:
    class Spy:
        def __init__(self) -> None:
            self.seen: list[torch.Tensor] = []

        def sample(self, *args: Any) -> gs.Episodes:
            episodes = dataset.sample(*args)
            self.seen.append(episodes.query_x.sum())
            return episodes

    spies = [Spy(), Spy()]
    for spy, sharing in zip(spies, (None, gs.GradientSharing()), strict=True):
        gs.train(learner(sharing=sharing), spy, tmp_path / str(bool(sharing)), **TINY | {"epochs": 1})
    assert len(spies[0].seen) > 7 and torch.equal(torch.stack(spies[0].seen), torch.stack(spies[1].seen))


def test_the_outer_gradient_can_be_clamped(dataset: gs.Dataset) -> None:
    """Of the network's weights; learned rates and gates are left alone."""
    lr = gs.maml_plus_plus(gs.Conv4(3, 4, (1, 16, 16)), steps=1, sharing=gs.GradientSharing())
    state, episodes = lr.init(seed=0), dataset.sample("train", gs.Shape(3, 1, 3), 2, (0,))
    gs.meta_step(lr, state, gs.optimiser(state, 1e-3), episodes, clamp=1e-5)
    largest = {name: leaf.grad.abs().max() for name, leaf in state.trainable().items() if leaf.grad is not None}
    inside = {name for name, value in largest.items() if value <= torch.tensor(1e-5)}
    assert {"params/head.weight", "params/convs.1.weight", "learned/per_step/norms.3.weight"} <= inside
    assert "learned/sharing/lam" not in inside and "learned/rates/head.weight" not in inside


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs is 0"),
        ({"test_tasks": 1}, "at least 2"),
        ({"engine": "graph"}, "needs a GPU"),
        ({"device": "mps"}, "cpu or cuda"),
        ({"outer_lr": -1.0}, "above 0"),
        ({"ways": 7}, "the val split of blobs has 6"),
        ({"shots": 10, "queries": 15}, "needs 25"),
        ({"about": {"epochs": 9}}, "about has epochs"),
        ({"about": {"method": "maml"}}, "about has method"),
        ({"about": {"name": [float("nan")]}}, "cannot hold"),
        ({"about": {"name": object()}}, "cannot hold"),
        ({"about": 3}, "about is a dict"),
    ],
)
def test_impossible_options_leave_no_folder(
    dataset: gs.Dataset, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(gs.UserError, match=message):
        gs.train(learner(), dataset, tmp_path / "new" / "run", **TINY | options)
    assert not list(tmp_path.iterdir())


def test_further_entries_are_compared_when_a_run_is_resumed(dataset: gs.Dataset, tmp_path: Path) -> None:
    about = {"model": Path("a/b"), "sizes": (1, 2)}
    gs.train(learner(), dataset, tmp_path / "run", about=about, **SHORT)
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"] == "a/b"
    gs.train(learner(), dataset, tmp_path / "run", resume=True, about=about, **SHORT)
    with pytest.raises(gs.UserError, match="has model = 'a/b', not 'c'"):
        gs.train(learner(), dataset, tmp_path / "run", resume=True, about=about | {"model": "c"}, **SHORT)


@pytest.mark.parametrize("problem", [MemoryError(), gs.UserError("the model is another one"), OSError("no more data")])
def test_a_new_run_that_fails_before_its_first_checkpoint_leaves_no_folder(
    dataset: gs.Dataset, tmp_path: Path, problem: Exception
) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(256, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                raise problem
            return self.head(x.flatten(1))

    with pytest.raises(type(problem)):
        gs.train(gs.maml(Failing(), steps=1), dataset, tmp_path / "runs" / "run", **SHORT)
    assert not list(tmp_path.iterdir())  # so that the same line works once the model is mended


def test_without_a_folder_runs_are_numbered(
    dataset: gs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [gs.train(learner(), dataset, **SHORT) for _ in range(2)]
    assert [run.folder for run in runs] == [Path("runs/run-1"), Path("runs/run-2")]


def test_training_works_in_a_thread(dataset: gs.Dataset, tmp_path: Path) -> None:
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(gs.train(learner(), dataset, tmp_path / "run", **SHORT)))
    thread.start()
    thread.join(timeout=60)
    assert len(done) == 1


def test_a_second_interrupt_stops_at_once(dataset: gs.Dataset, tmp_path: Path) -> None:
    class Impatient(StopAt):
        def iteration(self, *values: Any) -> None:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)

    with pytest.raises(HardStop):
        gs.train(learner(), dataset, tmp_path / "run", display=Impatient(0, 0), **TINY)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_stop_inside_a_finaliser_is_not_lost() -> None:
    """Python prints what a handler raises there, and goes on: a run once went on to its end so."""

    class Finalised:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)
            sum(range(10))

    with pytest.raises(HardStop), stop_requests() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop()
        Finalised()
        begun = time.monotonic()
        time.sleep(5)
    assert time.monotonic() - begun < 4  # the sleep was ended
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_stop_inside_an_import_waits_for_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules drop what a handler raises, or make another error of it."""
    lines = [
        "import signal",
        "try:",
        "    signal.raise_signal(signal.SIGTERM)",
        "except BaseException:",
        "    broken = 1",
    ]
    (tmp_path / "that_drops_it.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as stopped, stoppable("nothing was begun"):
        module = importlib.import_module("that_drops_it")
        time.sleep(5)
    assert stopped.value.code == 3 and not hasattr(module, "broken")


def test_a_stop_that_comes_out_as_another_error_is_a_stop() -> None:
    with pytest.raises(SystemExit) as stopped, stoppable("nothing was begun"):
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise ValueError("as NumPy does") from None
    assert stopped.value.code == 3


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    """As in the workers of a grid, whose parent answers it: else its SIGTERM would be the second interrupt."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop()
    finally:
        signal.signal(signal.SIGINT, before)


class GatesByTensor:
    """A rule of one's own whose learned values have the paper's name and another shape."""

    name = "sharing"

    def init(self, weights: Any, steps: int) -> Any:
        return {"lam": {name: weight.new_zeros(steps) for name, weight in weights.items()}}, {}

    def update(self, at: gs.InnerStep) -> gs.Moved:
        gates = {name: at.now(at.learned["lam"][name]).sigmoid() for name in at.gradients}
        return gs.Moved({name: gates[name] * own for name, own in at.gradients.items()})


def test_a_rule_with_gates_of_another_shape_is_trained(dataset: gs.Dataset, tmp_path: Path) -> None:
    own = gs.maml(gs.Conv4(ways=3, filters=3, image=(1, 16, 16)), steps=2, sharing=GatesByTensor())
    run = gs.train(own, dataset, tmp_path / "run", display=False, **TINY)
    assert all(line["lam"] is None for line in run.metrics) and "head.bias" in run.last.learned["sharing"]["lam"]
