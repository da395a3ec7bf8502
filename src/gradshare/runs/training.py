"""Training: epochs of meta-iterations, validation, checkpoints, test; interruptible at any moment and resumable.

A run folder holds `config.json`, `metrics.jsonl` (a line an epoch, the same bytes for the same run), `timings.jsonl`,
`checkpoints/`, `summary.json` and, at the end, `DONE`; or, where its numbers were no longer finite, `diverged.json`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gradshare.engine.cuda_graph import Engine, chosen_engine
from gradshare.engine.processes import ALONE, Group
from gradshare.errors import path_of
from gradshare.files import write_whole
from gradshare.learners.arguments import check_learner_and_source, draw
from gradshare.learners.graphs import GraphedPrediction, GraphedStep
from gradshare.learners.learner import Learner, Outcome, Precision
from gradshare.learners.outer import adam_tensors, cosine, meta_step, optimiser, restore_adam, set_rate
from gradshare.method.episodes import Episodes, Shape, TaskSource, task_key
from gradshare.method.state import MetaState
from gradshare.runs import checkpoints
from gradshare.runs.arguments import further_entries, training_of
from gradshare.runs.checkpoints import Progress
from gradshare.runs.config import Training, identity
from gradshare.runs.display import Display, Silent
from gradshare.runs.divergence import NOTE, Diverged, Divergence, Watch, refuse
from gradshare.runs.evaluation import Evaluation, evaluate, finite_mean
from gradshare.runs.finished import finish
from gradshare.runs.interruption import Interrupted, stop_requests
from gradshare.runs.locks import locked
from gradshare.runs.run_folder import (
    begun_in_vain,
    best_epochs,
    best_value,
    described,
    fill,
    gates,
    lengthen,
    load_epoch,
    load_state,
    next_free,
    open_folder,
    take_up,
    write_lines,
)


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    folder: Path
    state: MetaState  # after the last epoch
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]


def train(
    learner: Learner,
    dataset: TaskSource,
    folder: str | Path | None = None,
    resume: bool | None = False,
    display: Display | None = None,
    about: dict[str, Any] | None = None,
    device: str = "cpu",
    engine: Engine = "auto",
    precision: Precision = "float32",
    group: Group = ALONE,
    **options: Any,
) -> Trained:
    """Train a learner, with checkpoints, validation and test, in a run folder.

    Args:
        dataset: a `Dataset`, or anything with its method `sample`.
        folder: the run folder; it must not hold a run already, unless `resume`. None is the next free `runs/run-N`.
        resume: go on where the run in the folder stopped; a finished run is returned as it is, unless `epochs` asks for
            more than it has. None: if there is one.
        display: is told of the progress.
        about: further entries for `config.json`, such as a name for the model; what JSON can hold, or paths.
        device: `"cpu"` or `"cuda"`; the data set must give tasks there, or on the CPU.
        engine: `"graph"` records a meta-iteration as one CUDA graph; `"eager"` runs it operation by operation;
            `"auto"` is graph on a GPU, in one process.
        precision: `"float32"` for any model; `"tf32"` and `"bf16"` run `Conv4` by our GPU kernels, many times faster.
        group: processes, of `gs.processes()`, that the tasks of a batch are spread over; the first writes the folder.
        options: fields of `Training`: epochs, iterations, ways, shots, queries, tasks, outer_lr, seed, ...

    Example:
        >>> import gradshare as gs, tempfile
        >>> learner = gs.maml(gs.Conv4(filters=4, image=(1, 28, 28)), steps=1, sharing=gs.GradientSharing())
        >>> run = gs.train(learner, gs.load_dataset("glyphs"), tempfile.mkdtemp() + "/run", epochs=1, iterations=2,
        ...                val_tasks=4, test_tasks=4)
        >>> len(run.metrics)
        1
    """
    check_learner_and_source(learner, dataset)
    training = training_of(options)
    config = {**asdict(training), **further_entries(about)}
    engine = chosen_engine(engine, device, group.size)
    group.share(training.tasks)  # refuses more processes than tasks
    place = path_of(folder) if folder is not None else group.from_first(lambda: next_free(Path("runs")))
    learner = learner.to(device, precision).over(group)
    shown = display if display is not None and group.first else Silent()
    run = _Run(learner, dataset, place, training, shown, torch.device(device), engine)
    with ExitStack() as lock:
        group.from_first(lambda: lock.enter_context(locked(place)))
        if group.size == 1:
            lock.enter_context(begun_in_vain(place))
        run.open(config, resume, longer="epochs" in options)
        with stop_requests(patient=group.size > 1) as asked:
            run.stop = lambda: group.any(asked())
            return run.finish()


class _Run:
    """A run in progress: the impure edge around the pure core."""

    def __init__(
        self,
        learner: Learner,
        dataset: TaskSource,
        folder: Path,
        training: Training,
        display: Display,
        device: torch.device,
        engine: str,
    ) -> None:
        self.learner, self.dataset, self.folder, self.group = learner, dataset, folder, learner.group
        self.training, self.display, self.device = training, display, device
        self.shape = Shape(training.ways, training.shots, training.queries)
        self.state = learner.init(training.seed)
        self.adam = optimiser(self.state, training.outer_lr)
        self.progress, self.identity = Progress(), ""
        self.log = torch.zeros(2, training.iterations, device=device)  # loss and accuracy of the epoch's iterations
        self.watch = Watch(self.log, self.state.trainable())
        self.engine = engine
        self.predict = GraphedPrediction(learner) if engine == "graph" else None
        self.stepping: Learner | None = None  # the learner that `step` steps
        self.step: Callable[[Episodes], Outcome]
        self.started = 0.0
        self.stop: Callable[[], bool] = lambda: False  # asked by all processes at the same moments

    def open(self, config: dict[str, Any], resume: bool | None, longer: bool) -> None:
        """Start the folder, or take up what it holds."""
        self.identity, falls = identity(config), self.learner.final_outer_rate != 1
        found = self.group.from_first(
            lambda: open_folder(self.folder, config, resume, self._check_tasks, longer, falls)
        )
        if found is not None:
            self.progress, tensors = found
            load_state(self.state, tensors)
            restore_adam(self.state, self.adam, tensors)
            own = {"log": self.log, "faults": self.watch.faults}  # runs begun before 0.1 may have no faults
            fill(own, {"faults": self.watch.faults} | {name: tensors[name] for name in own if name in tensors})
        self.group.from_first(lambda: refuse(self.folder))
        self.group.from_first(lambda: lengthen(self.folder, config))
        if found is not None:
            self.group.from_first(lambda: take_up(self.folder, self.progress, self.training.epochs))

    def _check_tasks(self) -> None:
        for split in ("train", "val", "test") if self.training.test_tasks else ("train", "val"):
            draw(self.dataset, split, self.shape, 1, task_key(0, split))

    def finish(self) -> Trained:
        while self.progress.epoch < self.training.epochs:
            self._epoch()
        if not self.group.from_first((self.folder / "DONE").exists):
            summary = self._test()
            if self.group.first:
                finish(self.folder, summary)
        summary = self.group.from_first(lambda: json.loads((self.folder / "summary.json").read_text(encoding="utf-8")))
        return Trained(self.folder, self.state, self.progress.metrics, summary)

    def _epoch(self) -> None:
        epoch = self.progress.epoch
        self.started = time.monotonic() - self.progress.seconds
        learner = self.learner.at(epoch)
        rate = cosine(self.training.outer_lr, learner.final_outer_rate, epoch, self.training.epochs)
        set_rate(self.adam, rate)
        self._choose_step(learner)
        for iteration in range(self.progress.iteration, self.training.iterations):
            self._iterate(epoch, iteration)
        trained = time.monotonic()
        validation = self._evaluate("val", self.state, self.training.val_tasks)
        self._record(epoch + 1, validation, trained - self.started, time.monotonic() - trained)

    def _choose_step(self, learner: Learner) -> None:
        """One step of this epoch's learner: recorded as a CUDA graph, or run operation by operation."""
        if learner == self.stepping:
            return
        self.stepping = learner
        if self.engine == "graph":
            self.step = GraphedStep(learner, self.state, self.adam, self.training.gradient_clamp)
        else:
            clamp = self.training.gradient_clamp
            self.step = lambda episodes: meta_step(learner, self.state, self.adam, episodes, clamp)

    def _iterate(self, epoch: int, iteration: int) -> None:
        key = task_key(self.training.seed, "train", epoch, iteration)
        episodes = draw(self.dataset, "train", self.shape, self.training.tasks, key).to(self.device)
        outcome = self.step(episodes)
        self.watch.note(iteration, outcome)
        self.log[0, iteration] = outcome.loss.detach()
        self.log[1, iteration] = torch.nan if outcome.accuracy is None else outcome.accuracy.mean()
        last, stop = iteration + 1 == self.training.iterations, self.stop()
        if self.device.type == "cpu" or last or iteration % 20 == 0 or stop:  # reading a GPU's value makes it wait
            if (found := self.watch.diverged(epoch, iteration)) is not None:
                self._diverge(iteration + 1, found)
            loss, accuracy = self.log[:, iteration].tolist()
            self.display.iteration(epoch, iteration + 1, loss, None if outcome.accuracy is None else accuracy)
        if stop:
            self._stop(iteration + 1)

    def _diverge(self, iteration: int, found: Divergence) -> None:
        self.watch.settle()
        self._pause(iteration)
        found = found.saved(f"checkpoints/{self.progress.name}")
        if self.group.first:
            write_whole(self.folder / NOTE, found.text())
        self.group.any(False)  # no process ends before all is saved
        raise Diverged(f"{found}: training stopped; the weights before that are in {self.folder / found.checkpoint}")

    def _pause(self, iteration: int) -> None:
        self.progress = replace(self.progress, iteration=iteration, seconds=time.monotonic() - self.started)
        self._save()

    def _stop(self, iteration: int) -> None:
        self._pause(iteration)
        self.group.any(False)  # no process ends before all is saved
        raise Interrupted(self.folder, f"in epoch {self.progress.epoch + 1} after iteration {iteration}")

    def _evaluate(self, split: str, states: MetaState | list[MetaState], tasks: int) -> Evaluation:
        def between(done: int) -> None:
            self.display.evaluating(split, done, tasks)
            if self.stop():
                if split == "val":
                    self._stop(self.training.iterations)
                raise Interrupted(self.folder, "in the test after all epochs")

        seed, batch = self.training.seed, self.training.eval_batch
        return evaluate(
            self.learner, states, self.dataset, split, self.shape, tasks, seed, batch, between, self.group, self.predict
        )

    def _record(self, epoch: int, validation: Evaluation, train_seconds: float, val_seconds: float) -> None:
        loss, accuracy = map(finite_mean, self.log)
        classifies = validation.accuracy is not None
        metrics = {
            "epoch": epoch,
            "train_loss": loss,
            "train_accuracy": accuracy if classifies else None,
            "skipped": self.watch.skipped,
            "val_loss": validation.loss,
            "val_accuracy": validation.accuracy,
            "val_interval": validation.interval,
            "val_diverged": validation.diverged,
            **gates(self.state),
        }
        timing = {"epoch": epoch, "train_seconds": train_seconds, "val_seconds": val_seconds}
        self.watch.next_epoch()
        self.progress = Progress(
            epoch, metrics=[*self.progress.metrics, metrics], timings=[*self.progress.timings, timing]
        )
        self.group.check_same({**self.state.tensors(), **adam_tensors(self.state, self.adam)}, f"after epoch {epoch}")
        if self.group.first:
            self._save()  # first: the rest of the folder follows from it
            write_lines(self.folder, self.progress)
            checkpoints.prune(self.folder / "checkpoints", best_epochs(self.progress.metrics))
        self.display.epoch(metrics, train_seconds + val_seconds)

    def _save(self) -> None:
        if self.group.first:
            tensors = {**self.state.tensors(), **adam_tensors(self.state, self.adam), "log": self.log}
            tensors["faults"] = self.watch.faults
            checkpoints.save(self.folder / "checkpoints", replace(self.progress, run=self.identity), tensors)

    def _test(self) -> dict[str, Any]:
        epochs = best_epochs(self.progress.metrics)
        summary: dict[str, Any] = {"best_epoch": epochs[0], **best_value(self.progress.metrics), "test": None}
        if self.training.test_tasks:
            states = [self._load_epoch(epoch) for epoch in epochs]
            best = self._evaluate("test", states[0], self.training.test_tasks)
            ensemble = self._evaluate("test", states, self.training.test_tasks)
            summary["test"] = {
                "tasks": self.training.test_tasks,
                "best": {"epoch": epochs[0], **described(best)},
                "ensemble": {"epochs": epochs, **described(ensemble)},
            }
        return summary

    def _load_epoch(self, epoch: int) -> MetaState:
        state = self.learner.init(self.training.seed)
        load_state(state, self.group.from_first(lambda: load_epoch(self.folder, epoch)))
        return state
