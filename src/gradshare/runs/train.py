"""Training: epochs of meta-iterations, validation, checkpoints and a test; it can be stopped and resumed at any moment.

`gradshare.runs.folder` lists the files of a run. A run that is stopped and resumed gives the same bits as one that is
not.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from gradshare.data.tasks import on_device
from gradshare.engine.backends import Precision
from gradshare.engine.choose import Engine, choose
from gradshare.engine.processes import ALONE, Group, PeerLost
from gradshare.errors import path_of
from gradshare.learners.graphs import GraphedPrediction, GraphedStep
from gradshare.learners.learner import Learner, Outcome
from gradshare.learners.optimisers import cosine, optimiser, optimiser_tensors, restore_optimiser, set_rate
from gradshare.learners.outer import meta_step
from gradshare.method.episodes import Episodes, Shape, TaskSource, draw, task_key
from gradshare.method.state import MetaState, check_fit
from gradshare.runs.config import Training, check_further_entries, identity, recorded
from gradshare.runs.display import Display, Silent
from gradshare.runs.divergence import Diverged, Watch
from gradshare.runs.evaluate import Evaluable, Evaluation, Parts, check_learner_and_source, evaluate, finite_mean
from gradshare.runs.folder import RunFolder, next_free
from gradshare.runs.locks import locked
from gradshare.runs.records import Divergence, Epoch, Progress, Score, Summary, Test, Timing, best_epochs
from gradshare.runs.workers import Interrupted, stop_requests

STATE = ("params/", "learned/", "memory/")  # how the names of a state's tensors begin in a checkpoint


@dataclass(frozen=True)
class Trained(Evaluable):
    """A finished run. `gs.evaluate(run)` evaluates its best epoch."""

    folder: Path
    state: MetaState  # after the last epoch
    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl
    summary: dict[str, Any]  # summary.json
    learner: Learner  # as it was trained, on its device
    dataset: TaskSource
    training: Training

    @cached_property
    def best(self) -> MetaState:
        """The state after the best epoch by validation; without validation, after the last one."""
        tensors = RunFolder(self.folder).load_epoch(self.summary["best_epoch"])
        state = self.learner.init()
        load_state(state, tensors)
        return state

    @property
    def last(self) -> MetaState:
        """The state after the last epoch."""
        return self.state

    def parts(self, dataset: TaskSource | None = None) -> Parts:
        return Parts(self.learner, self.dataset if dataset is None else dataset, self.training)


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
    *,
    epochs: int | None = None,
    iterations: int = Training.iterations,
    ways: int = Training.ways,
    shots: int = Training.shots,
    queries: int = Training.queries,
    tasks: int = Training.tasks,
    outer_lr: float = Training.outer_lr,
    gradient_clamp: float = Training.gradient_clamp,
    val_tasks: int = Training.val_tasks,
    test_tasks: int = Training.test_tasks,
    eval_batch: int = Training.eval_batch,
    seed: int = Training.seed,
    patience: int = Training.patience,
    norm_statistics: Literal["batch", "support"] = Training.norm_statistics,
    micro_batch: int | None = Training.micro_batch,
    checkpoint: bool = Training.checkpoint,
) -> Trained:
    """Train a learner, with checkpoints, validation and test, in a run folder.

    Args:
        dataset: from `gs.load_dataset` or `gs.tasks`, or anything with their method `sample`.
        folder: the run folder; it must not hold a run already, unless `resume`. None is the next free `runs/run-N`.
        resume: continue the run in the folder; a finished run is returned as it is, unless `epochs` asks for more than
            it has. None: continue if there is one, else start.
        display: shows the progress; see `gradshare.runs.display.Display`.
        about: further entries for `config.json`, such as a name for the model: JSON values, or paths.
        device: `"cpu"` or `"cuda"`; a data set of ours is moved there, another gives tasks there, or on the CPU.
        engine: `"graph"` records a meta-iteration as one CUDA graph; `"eager"` runs it operation by operation;
            `"auto"` is graph on a GPU, in one process.
        precision: `"float32"` for any model; `"tf32"` and `"bf16"` run `Conv4` by our GPU kernels, many times faster.
        group: processes, from `gs.processes()`, that share the tasks of a batch; the first one writes the folder.
        epochs: how many to train in all; None is 20, or what the run has that is resumed.
        iterations: meta-iterations in an epoch.
        ways, shots, queries: classes in a task; support and query examples of each class.
        tasks: tasks in a batch (the paper's T).
        outer_lr: rate of the outer Adam.
        gradient_clamp: clamp the outer gradient of the network's weights to plus or minus this; 0 is off.
        val_tasks, test_tasks: validation tasks after each epoch, test tasks at the end; 0 test tasks: no test.
        eval_batch: tasks evaluated at a time.
        seed: determines the initial weights and the tasks.

    Example:
        >>> import gradshare as gs, tempfile
        >>> learner = gs.maml(gs.Conv4(filters=4, image=(1, 28, 28)), steps=1, sharing=gs.GradientSharing())
        >>> run = gs.train(learner, gs.load_dataset("glyphs"), tempfile.mkdtemp() + "/run", epochs=1, iterations=2,
        ...                val_tasks=4, test_tasks=4)
        >>> len(run.metrics)
        1
    """
    check_learner_and_source(learner, dataset)
    place = path_of(folder) if folder is not None else group.from_first(lambda: next_free(Path("runs")))
    training = Training(
        epochs=_epochs(epochs, place, resume, group),
        iterations=iterations,
        ways=ways,
        shots=shots,
        queries=queries,
        tasks=tasks,
        outer_lr=outer_lr,
        gradient_clamp=gradient_clamp,
        val_tasks=val_tasks,
        test_tasks=test_tasks,
        eval_batch=eval_batch,
        seed=seed,
        patience=patience,
        norm_statistics=norm_statistics,
        micro_batch=micro_batch,
        checkpoint=checkpoint,
    )
    options = {**recorded(asdict(training)), **check_further_entries(about)}
    chosen = choose(device, engine, processes=group.size, local_processes=group.local_size).engine
    group.share(training.tasks)  # raises an error if there are more processes than tasks
    learner = learner.to(device, precision).over(group)
    shows = display if display is not None and group.first else Silent()
    data = on_device(dataset, torch.device(device))  # once, so that tasks are drawn there
    run = _Run(learner, data, RunFolder(place), training, shows, torch.device(device), chosen)
    with ExitStack() as stack:
        group.from_first(lambda: stack.enter_context(locked(place)))
        if group.size == 1:
            stack.enter_context(run.folder.remove_if_out_of_memory())
        run.open(options, resume)
        try:
            with stop_requests(patient=group.size > 1) as asked:
                run.stop = lambda: group.any(asked())
                return run.finish()
        except PeerLost:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from torchrun: the others report the loss first
            raise


def _epochs(given: int | None, place: Path, resume: bool | None, group: Group) -> int:
    """The number of epochs: as given; else that of the run that is resumed; else the default."""
    if given is not None:
        return given
    if resume is False or not group.from_first(RunFolder(place).exists):
        return Training.epochs
    return int(group.from_first(RunFolder(place).options)["epochs"])


class _Run:
    """A run in progress."""

    def __init__(
        self,
        learner: Learner,
        dataset: TaskSource,
        folder: RunFolder,
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
        self.predict = GraphedPrediction(learner, training.norm_statistics) if engine == "graph" else None
        self.stepping: Learner | None = None  # the learner that `step` steps
        self.step: Callable[[Episodes], Outcome]
        self.started = 0.0
        self.stop: Callable[[], bool] = lambda: False  # asked by all processes at the same moments

    def open(self, options: dict[str, Any], resume: bool | None) -> None:
        """Start the folder, or continue from its newest checkpoint."""
        self.identity, falls = identity(options), self.learner.final_outer_rate != 1
        found = self.group.from_first(lambda: self.folder.open(options, resume, self._check_tasks, rate_falls=falls))
        if found is not None:
            self.progress, tensors = found
            self._restore(tensors)
        self.group.from_first(self.folder.check_not_diverged)
        self.group.from_first(lambda: self.folder.extend_epochs(options))
        if found is not None:
            self.group.from_first(lambda: self.folder.roll_back_to(self.progress, self.training.epochs))

    def _check_tasks(self) -> None:
        for split in ("train", "val", "test") if self.training.test_tasks else ("train", "val"):
            draw(self.dataset, split, self.shape, 1, task_key(0, split))

    def _restore(self, tensors: dict[str, Tensor]) -> None:
        load_state(self.state, tensors)
        restore_optimiser(self.state, self.adam, tensors)
        own = {"log": self.log, "faults": self.watch.faults}  # checkpoints from before 0.1 may have no faults
        _fill(own, {"faults": self.watch.faults} | {name: tensors[name] for name in own if name in tensors})

    def finish(self) -> Trained:
        while self.progress.epoch < self.training.epochs:
            self._epoch()
        if not self.group.from_first(lambda: self.folder.done):
            summary = self._test()
            if self.group.first:
                self.folder.finish(summary)
        result = self.group.from_first(self.folder.summary)
        assert result is not None
        metrics = [line.as_json() for line in self.progress.metrics]
        parts = (self.learner, self.dataset, self.training)
        return Trained(self.folder.path, self.state, metrics, result.as_json(), *parts)

    def _epoch(self) -> None:
        epoch = self.progress.epoch
        self.started = time.monotonic() - self.progress.seconds
        learner = self.learner.at(epoch)
        set_rate(self.adam, cosine(learner.final_outer_rate, epoch, self.training.epochs))
        self._choose_step(learner)
        for iteration in range(self.progress.iteration, self.training.iterations):
            self._iterate(epoch, iteration)
        trained = time.monotonic()
        validation = self._evaluate("val", self.state, self.training.val_tasks)
        self._record(validation, Timing(epoch + 1, trained - self.started, time.monotonic() - trained))

    def _choose_step(self, learner: Learner) -> None:
        """One step of this epoch's learner: recorded as a CUDA graph, or run operation by operation."""
        if learner == self.stepping:
            return
        self.stepping = learner
        clamp = self.training.gradient_clamp
        if self.engine == "graph":
            self.step = GraphedStep(learner, self.state, self.adam, clamp)
        else:
            self.step = lambda episodes: meta_step(learner, self.state, self.adam, episodes, clamp)

    def _iterate(self, epoch: int, iteration: int) -> None:
        key = task_key(self.training.seed, "train", epoch, iteration)
        episodes = draw(self.dataset, "train", self.shape, self.training.tasks, key).to(self.device)
        outcome = self.step(episodes)
        self.watch.note(iteration, outcome)
        self.log[0, iteration] = outcome.loss.detach()
        self.log[1, iteration] = torch.nan if outcome.accuracy is None else outcome.accuracy.mean()
        last, stop = iteration + 1 == self.training.iterations, self.stop()
        if self.device.type == "cpu" or last or iteration % 20 == 0 or stop:  # reading a value makes a GPU wait
            if (found := self.watch.diverged(epoch, iteration)) is not None:
                self._diverge(iteration + 1, found)
            loss, accuracy = self.log[:, iteration].tolist()
            self.display.iteration(epoch, iteration + 1, loss, None if outcome.accuracy is None else accuracy)
        if stop:
            self._stop(iteration + 1)

    def _diverge(self, iteration: int, found: Divergence) -> None:
        self.watch.mark_reported()
        self._pause(iteration)
        found = replace(found, checkpoint=f"checkpoints/{self.progress.name}")
        if self.group.first:
            self.folder.write_divergence(found)
        self.group.any(False)  # no process exits before all is saved
        kept = self.folder.path / found.checkpoint
        raise Diverged(f"{found}: training stopped; the weights before that are in {kept}")

    def _stop(self, iteration: int) -> None:
        self._pause(iteration)
        self.group.any(False)  # no process exits before all is saved
        raise Interrupted(self.folder.path, f"in epoch {self.progress.epoch + 1} after iteration {iteration}")

    def _pause(self, iteration: int) -> None:
        """Save in the middle of an epoch."""
        self.progress = replace(self.progress, iteration=iteration, seconds=time.monotonic() - self.started)
        self._save()

    def _evaluate(self, split: str, states: MetaState | list[MetaState], tasks: int) -> Evaluation:
        def between(done: int) -> None:
            self.display.evaluating(split, done, tasks)
            if self.stop():
                if split == "val":
                    self._stop(self.training.iterations)
                raise Interrupted(self.folder.path, "in the test after all epochs")

        seed, batch, norm = self.training.seed, self.training.eval_batch, self.training.norm_statistics
        which = (self.dataset, split, self.shape, tasks, seed, batch)
        return evaluate(self.learner, states, *which, between, self.group, self.predict, norm_statistics=norm)

    def _record(self, validation: Evaluation, timing: Timing) -> None:
        """End an epoch: a checkpoint, from which the other files follow."""
        loss, accuracy = map(finite_mean, self.log)
        line = Epoch(
            timing.epoch,
            train_loss=loss,
            train_accuracy=None if validation.accuracy is None else accuracy,
            skipped=self.watch.skipped,
            val_loss=validation.loss,
            val_accuracy=validation.accuracy,
            val_interval=validation.interval,
            val_diverged=validation.diverged,
            **_gates(self.state),
        )
        self.watch.next_epoch()
        self.progress = Progress(
            line.epoch, metrics=(*self.progress.metrics, line), timings=(*self.progress.timings, timing)
        )
        tensors = {**self.state.tensors(), **optimiser_tensors(self.state, self.adam)}
        self.group.check_same(tensors, f"after epoch {line.epoch}")
        self._save()
        if self.group.first:
            self.folder.write_epoch(self.progress)
        self.display.epoch(line, timing.train_seconds + timing.val_seconds)

    def _save(self) -> None:
        if self.group.first:
            tensors = {**self.state.tensors(), **optimiser_tensors(self.state, self.adam)}
            tensors |= {"log": self.log, "faults": self.watch.faults}
            self.folder.save(replace(self.progress, run=self.identity), tensors)

    def _test(self) -> Summary:
        """Test the best epoch alone, and the best ones together."""
        epochs = best_epochs(self.progress.metrics)
        best = self.progress.metrics[epochs[0] - 1]
        summary = Summary(best.epoch, best.val_accuracy, best.val_loss)
        if not self.training.test_tasks:
            return summary
        states = [self._load_epoch(epoch) for epoch in epochs]
        alone = self._evaluate("test", states[0], self.training.test_tasks)
        ensemble = self._evaluate("test", states, self.training.test_tasks)
        scores = _score(alone, epochs[:1]), _score(ensemble, epochs)
        return replace(summary, test=Test(self.training.test_tasks, *scores))

    def _load_epoch(self, epoch: int) -> MetaState:
        state = self.learner.init(self.training.seed)
        load_state(state, self.group.from_first(lambda: self.folder.load_epoch(epoch)))
        return state


def _score(evaluation: Evaluation, epochs: list[int]) -> Score:
    return Score(evaluation.accuracy, evaluation.interval, evaluation.loss, evaluation.diverged, tuple(epochs))


def _gates(state: MetaState) -> dict[str, tuple[float, ...] | None]:
    """sig(m) and sig(lam) of every inner step; of conditioned sharing, also the weight of the agreement."""
    sharing = state.learned.get("sharing", {})
    found = {name: tuple(sharing[name].sigmoid().tolist()) for name in ("m", "lam") if name in sharing}
    return {**found, "agreement": tuple(sharing["agreement"].tolist())} if "agreement" in sharing else {**found}


def load_state(state: MetaState, tensors: dict[str, Tensor]) -> None:
    """Fill a state with the tensors of a checkpoint or a model; they must fit."""
    _fill(state.tensors(), {name: tensor for name, tensor in tensors.items() if name.startswith(STATE)})


@torch.no_grad()
def _fill(places: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """Copy values into tensors of the same names and shapes."""
    check_fit(places, values)
    for name, place in places.items():
        place.copy_(values[name])
