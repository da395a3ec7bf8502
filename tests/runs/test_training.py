"""Training: the same run whatever interrupts it, and nothing lost."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradshare as gs
from gradshare.errors import DamageWarning
from gradshare.files import write_whole
from gradshare.runs import checkpoints
from gradshare.runs import folder as run_folder
from gradshare.runs.config import read_config
from gradshare.runs.folder import best_epochs
from gradshare.runs.interruption import Interrupted, stop_requests

TINY: dict[str, Any] = dict(epochs=3, iterations=4, tasks=2, ways=3, queries=3, val_tasks=6, test_tasks=6, eval_batch=4)


def learner(**options: Any) -> gs.Learner:
    model = gs.Conv4(ways=3, filters=3, image=(1, 16, 16))
    return gs.maml_plus_plus(model, **{"steps": 2, "sharing": gs.GradientSharing(), "multi_step_epochs": 2} | options)


def same_run(first: Path, second: Path) -> None:
    """Weights, memory, Adam's moments, metrics and summary to the last bit."""
    for name in ("config.json", "metrics.jsonl", "summary.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    found = [checkpoints.listing(folder / "checkpoints") for folder in (first, second)]
    assert [path.name for path in found[0]] == [path.name for path in found[1]]
    for paths in zip(*found, strict=True):
        one, other = (checkpoints.load(path)[1] for path in paths)
        assert one.keys() == other.keys()
        assert all(one[name].numpy().tobytes() == other[name].numpy().tobytes() for name in one)  # NaN too


def test_a_finished_run_goes_on_for_more_epochs(dataset: gs.Dataset, tmp_path: Path) -> None:
    """It is then the same run, to the last bit, as one that was asked for so many from the start."""
    whole = gs.train(learner(), dataset, tmp_path / "whole", **TINY | {"epochs": 4})
    gs.train(learner(), dataset, tmp_path / "longer", **TINY | {"epochs": 2})
    longer = gs.train(learner(), dataset, tmp_path / "longer", resume=True, **TINY | {"epochs": 4})
    same_run(whole.folder, longer.folder)
    assert longer.summary["test"] is not None and (longer.folder / "DONE").exists()
    with pytest.raises(gs.UserError, match="has epochs = 4, not 3; resume with the same options"):
        gs.train(learner(), dataset, tmp_path / "longer", resume=True, **TINY)


@pytest.mark.parametrize("cut", ["summary.json", "config.json", "metrics.jsonl"])
def test_a_run_killed_while_it_is_made_longer(
    cut: str, dataset: gs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is then as long as before, or as asked for, and never called done without having trained."""
    short = gs.train(learner(), dataset, tmp_path / "short", **TINY | {"epochs": 2})
    whole = gs.train(learner(), dataset, tmp_path / "whole", **TINY | {"epochs": 4})
    for wanted in (2, 4):
        folder = tmp_path / f"longer-{wanted}"
        gs.train(learner(), dataset, folder, **TINY | {"epochs": 2})
        with monkeypatch.context() as patch:
            fail_at(patch, cut)
            with pytest.raises(MemoryError):
                gs.train(learner(), dataset, folder, resume=True, **TINY | {"epochs": 4})
        assert not (folder / "DONE").exists()
        if wanted == 2 and read_config(folder)["epochs"] == 4:
            continue
        gs.train(learner(), dataset, folder, resume=True, **TINY | {"epochs": wanted})
        same_run((short if wanted == 2 else whole).folder, folder)


def fail_at(patch: pytest.MonkeyPatch, name: str) -> None:
    """The next time that a file of this name is written or removed, the process is as good as killed."""

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.name == name:
            raise MemoryError
        os.unlink(path) if path.exists() or not missing_ok else None

    def write(path: Path, content: Any, *more: Any) -> None:
        if path.name == name:
            raise MemoryError
        write_whole(path, content, *more)

    patch.setattr(Path, "unlink", unlink)
    patch.setattr(run_folder, "write_whole", write)


def test_a_run_is_made_longer_only_when_asked(dataset: gs.Dataset, tmp_path: Path) -> None:
    run = gs.train(learner(), dataset, tmp_path / "run", **TINY)
    before = {path.name: path.read_bytes() for path in run.folder.iterdir() if path.is_file()}
    without = {name: value for name, value in TINY.items() if name != "epochs"}
    with pytest.raises(gs.UserError, match="has epochs = 3, not 20; resume with the same options"):
        gs.train(learner(), dataset, run.folder, resume=True, **without)
    with pytest.raises(gs.UserError, match="does not fit"):
        gs.train(learner(steps=3), dataset, run.folder, resume=True, **TINY | {"epochs": 5})
    assert {path.name: path.read_bytes() for path in run.folder.iterdir() if path.is_file()} == before


def test_a_longer_run_that_is_stopped_has_no_test_yet(dataset: gs.Dataset, tmp_path: Path) -> None:
    run = gs.train(learner(), dataset, tmp_path / "run", **TINY)
    with pytest.raises(Interrupted):
        gs.train(learner(), dataset, run.folder, resume=True, display=StopAt(3, 2), **TINY | {"epochs": 5})
    assert not (run.folder / "summary.json").exists() and not (run.folder / "DONE").exists()


def test_a_run_whose_rate_falls_over_its_epochs_gets_no_more(dataset: gs.Dataset, tmp_path: Path) -> None:
    falling = learner(final_outer_rate=0.1)
    gs.train(falling, dataset, tmp_path / "run", **TINY)
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(gs.UserError, match="falls over its 3 epochs, so one of 5 is another run"):
        gs.train(falling, dataset, tmp_path / "run", resume=True, **TINY | {"epochs": 5})
    assert (tmp_path / "run" / "config.json").read_bytes() == before


class StopAt:
    """Sends this process a signal when a moment of the run has come."""

    def __init__(self, epoch: int, iteration: int, number: int = signal.SIGTERM, split: str | None = None) -> None:
        self.moment, self.number, self.split = (epoch, iteration), number, split
        self.now = (0, 0)

    def iteration(self, epoch: int, iteration: int, loss: float, accuracy: float | None) -> None:
        self.now = (epoch, iteration)
        if self.split is None and self.now == self.moment:
            os.kill(os.getpid(), self.number)

    def evaluating(self, split: str, done: int, total: int) -> None:
        if split == self.split and self.now == self.moment:
            self.split = None
            os.kill(os.getpid(), self.number)

    def epoch(self, metrics: dict[str, Any], seconds: float) -> None: ...


@pytest.fixture(scope="module")
def uninterrupted(dataset: gs.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    gs.train(learner(), dataset, folder, **TINY)
    return folder


def test_a_run_folder_holds_what_the_design_says(uninterrupted: Path) -> None:
    assert {path.name for path in uninterrupted.iterdir()} == {
        "config.json", "metrics.jsonl", "timings.jsonl", "checkpoints", "summary.json", "DONE"
    }  # fmt: skip
    lines = [json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3]
    assert all(0 <= line["val_accuracy"] <= 1 and line["val_interval"] >= 0 for line in lines)
    assert len(lines[0]["m"]) == len(lines[0]["lam"]) == 2
    summary = json.loads((uninterrupted / "summary.json").read_text())
    assert summary["best_epoch"] == best_epochs(lines)[0]
    assert sorted(summary["test"]["ensemble"]["epochs"]) == [1, 2, 3]


def test_two_runs_are_the_same_to_the_bit(uninterrupted: Path, dataset: gs.Dataset, tmp_path: Path) -> None:
    gs.train(learner(), dataset, tmp_path / "again", **TINY)
    same_run(uninterrupted, tmp_path / "again")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("epoch", "iteration", "split"),
    [(0, 1, None), (1, 2, None), (1, 4, None), (0, 4, "val"), (2, 4, "val"), (2, 4, "test")],
)
def test_stopped_and_resumed_is_uninterrupted(
    uninterrupted: Path, dataset: gs.Dataset, tmp_path: Path, epoch: int, iteration: int, split: str | None, number: int
) -> None:
    with pytest.raises(Interrupted, match="all is saved"):
        gs.train(learner(), dataset, tmp_path, display=StopAt(epoch, iteration, number, split), **TINY)
    assert not (tmp_path / "DONE").exists()
    gs.train(learner(), dataset, tmp_path, resume=True, **TINY)
    for path in checkpoints.listing(tmp_path / "checkpoints"):
        if not path.name.endswith("iteration-0000"):
            checkpoints.shutil.rmtree(path)  # the stop's own, kept among the newest
    same_run(uninterrupted, tmp_path)


def test_resuming_a_finished_run_changes_nothing(uninterrupted: Path, dataset: gs.Dataset) -> None:
    before = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*") if path.name != "metrics.jsonl"}
    run = gs.train(learner(), dataset, uninterrupted, resume=True, **TINY)
    assert run.summary["best_epoch"] == run.metrics[run.summary["best_epoch"] - 1]["epoch"]
    after = {path: path.stat().st_mtime_ns for path in uninterrupted.rglob("*") if path in before}
    changed = [path.name for path in before if before[path] != after.get(path)]
    assert set(changed) <= {"timings.jsonl"}


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    uninterrupted: Path, dataset: gs.Dataset, tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        gs.train(learner(), dataset, tmp_path, display=StopAt(2, 1), **TINY)
    newest = checkpoints.listing(tmp_path / "checkpoints")[-1] / "tensors.safetensors"
    content = bytearray(newest.read_bytes())
    content[-5] ^= 1
    newest.write_bytes(content)
    with pytest.raises(checkpoints.Damaged, match="does not match its checksum"):
        checkpoints.load(newest.parent)
    with pytest.warns(DamageWarning, match=f"{newest.parent.name} is damaged: .*epoch-0002-iteration-0000 is used"):
        gs.train(learner(), dataset, tmp_path, resume=True, **TINY)
    assert (tmp_path / "metrics.jsonl").read_bytes() == (uninterrupted / "metrics.jsonl").read_bytes()


def test_resuming_with_other_options_is_refused(uninterrupted: Path, dataset: gs.Dataset) -> None:
    with pytest.raises(gs.UserError, match="has tasks = 2, not 3"):
        gs.train(learner(), dataset, uninterrupted, resume=True, **TINY | {"tasks": 3})


def test_resuming_with_another_learner_is_refused(dataset: gs.Dataset, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        gs.train(learner(), dataset, tmp_path, display=StopAt(1, 1), **TINY)
    with pytest.raises(gs.UserError, match=r"does not fit the learner: learned/per_step/norms\.0\.bias is"):
        gs.train(learner(steps=3), dataset, tmp_path, resume=True, **TINY)


def test_folders_in_use_are_refused(uninterrupted: Path, dataset: gs.Dataset, tmp_path: Path) -> None:
    with pytest.raises(gs.UserError, match="already holds a run"):
        gs.train(learner(), dataset, uninterrupted, **TINY)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(gs.UserError, match="not empty and not a run"):
        gs.train(learner(), dataset, tmp_path, **TINY)
    with pytest.raises(gs.UserError, match=r"no config\.json"):
        gs.train(learner(), dataset, tmp_path, resume=True, **TINY)


def test_only_the_newest_and_the_best_checkpoints_are_kept(dataset: gs.Dataset, tmp_path: Path) -> None:
    run = gs.train(learner(), dataset, tmp_path, **TINY | {"epochs": 9, "iterations": 1, "test_tasks": 0})
    kept = {path.name for path in checkpoints.listing(tmp_path / "checkpoints")}
    expected = {*best_epochs(run.metrics), 8, 9}
    assert kept == {f"epoch-{epoch:04d}-iteration-0000" for epoch in expected}
    assert run.summary["test"] is None


def test_best_epochs_are_the_earliest_of_the_highest() -> None:
    accuracies = [0.3, 0.7, 0.5, 0.7, 0.6, 0.1, 0.2]
    lines = [{"epoch": i + 1, "val_accuracy": a, "val_loss": 0.0} for i, a in enumerate(accuracies)]
    assert best_epochs(lines) == [2, 4, 5, 3, 1]
    losses = [{"epoch": i + 1, "val_accuracy": None, "val_loss": a} for i, a in enumerate(accuracies)]
    assert best_epochs(losses)[:2] == [6, 7]


def test_training_learns(dataset: gs.Dataset, tmp_path: Path) -> None:
    model = gs.Conv4(ways=3, filters=6, image=(1, 16, 16))
    options = TINY | {"epochs": 2, "iterations": 25, "val_tasks": 40, "outer_lr": 0.01, "test_tasks": 0}
    for sharing in (None, gs.GradientSharing()):
        run = gs.train(gs.maml(model, steps=2, sharing=sharing), dataset, tmp_path / str(bool(sharing)), **options)
        assert run.metrics[-1]["val_accuracy"] > 0.75  # 45 % before training


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
        gs.train(learner(sharing=sharing), spy, tmp_path / str(bool(sharing)), **TINY)
    assert len(spies[0].seen) > 15 and torch.equal(torch.stack(spies[0].seen), torch.stack(spies[1].seen))


def test_the_outer_gradient_can_be_clamped(dataset: gs.Dataset) -> None:
    lr = gs.maml(nn.Sequential(nn.Flatten(), nn.Linear(256, 3)), steps=1)
    state, episodes = lr.init(), dataset.sample("train", gs.Shape(3, 1, 3), 2, (0,))
    adam = gs.optimiser(state, 1e-3)
    gs.meta_step(lr, state, adam, episodes, clamp=1e-4)
    assert max(leaf.grad.abs().max() for leaf in state.trainable().values()) == torch.tensor(1e-4)  # type: ignore[union-attr]


def test_the_clamp_leaves_learned_rates_and_gates_alone(dataset: gs.Dataset) -> None:
    lr = gs.maml_plus_plus(gs.Conv4(3, 4, (1, 16, 16)), steps=1, sharing=gs.GradientSharing())
    state, episodes = lr.init(seed=0), dataset.sample("train", gs.Shape(3, 1, 3), 2, (0,))
    gs.meta_step(lr, state, gs.optimiser(state, 1e-3), episodes, clamp=1e-5)
    largest = {name: leaf.grad.abs().max() for name, leaf in state.trainable().items() if leaf.grad is not None}
    inside = {name for name, value in largest.items() if value <= torch.tensor(1e-5)}
    assert {"params/head.weight", "params/convs.1.weight", "learned/per_step/norms.3.weight"} <= inside
    assert "learned/sharing/lam" not in inside and "learned/rates/head.weight" not in inside


def test_unknown_and_impossible_options_are_refused(dataset: gs.Dataset, tmp_path: Path) -> None:
    for options, message in [
        ({"iteration": 3}, "no option iteration"),
        ({"epochs": 0}, "epochs is 0; it must be at least 1"),
        ({"val_tasks": 1}, "val_tasks is 1; it must be at least 2"),
        ({"test_tasks": 1}, "test_tasks is 1; an interval over tasks needs at least 2"),
        ({"engine": "graph"}, "a CUDA graph needs a GPU"),
        ({"outer_lr": -1.0}, "outer_lr is -1.0; it must be above 0"),
        ({"ways": 7}, "7-way tasks need 7 classes; the val split of blobs has 6"),
        ({"shots": 10, "queries": 15}, "has 20 images; 10-shot with 15 queries needs 25"),
    ]:
        with pytest.raises(gs.UserError, match=message):
            gs.train(learner(), dataset, tmp_path / "run", **TINY | options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("about, reason", [
    ({"epochs": 9, "seed": 3}, "about has epochs, seed, which config.json has already"),
    ({"version": 9}, "about has version"), ({"sha256": "x"}, "about has sha256"),
    ({"method": "maml"}, "about has method, which config.json has for models of the command line"),
    ({"name": object()}, "about has name = <object .*, which config.json cannot hold"),
    ({"name": [float("nan")]}, r"about has name = \[nan\], which config.json cannot hold"),
    (3, "about is a dict"), ({3: "x"}, "about is a dict"),
])  # fmt: skip
def test_further_entries_that_cannot_be(dataset: gs.Dataset, tmp_path: Path, about: Any, reason: str) -> None:
    with pytest.raises(gs.UserError, match=reason):
        gs.train(learner(), dataset, tmp_path / "run", about=about)
    assert not (tmp_path / "run").exists()


def test_training_works_in_a_thread(dataset: gs.Dataset, tmp_path: Path) -> None:
    done: list[gs.training.Trained] = []  # type: ignore[name-defined]
    thread = threading.Thread(target=lambda: done.append(gs.train(learner(), dataset, tmp_path / "run", **TINY)))
    thread.start()
    thread.join(timeout=60)
    assert len(done) == 1


def test_a_second_interrupt_stops_at_once(dataset: gs.Dataset, tmp_path: Path) -> None:
    class Impatient(StopAt):
        def iteration(self, *values: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    with pytest.raises(KeyboardInterrupt):
        gs.train(learner(), dataset, tmp_path / "run", display=Impatient(0, 0), **TINY)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_a_folder_runs_are_numbered(
    dataset: gs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [gs.train(learner(), dataset, **TINY | {"epochs": 1, "test_tasks": 0}) for _ in range(2)]
    assert [run.folder for run in runs] == [Path("runs/run-1"), Path("runs/run-2")]


def test_what_a_killed_writer_left_is_cleared_away(dataset: gs.Dataset, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        gs.train(learner(), dataset, tmp_path, display=StopAt(1, 1), **TINY)
    (tmp_path / "checkpoints" / ".epoch-0002-iteration-0000-123").mkdir()
    gs.train(learner(), dataset, tmp_path, resume=True, **TINY)
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    """As in the children of a comparison, whose parent answers it: else its SIGTERM would be the second interrupt."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop()
    finally:
        signal.signal(signal.SIGINT, before)
