"""Training: epochs of meta-iterations, validation, checkpoints and a test; it can be stopped and resumed at any moment.

`gradshare.runs.folder` lists the files of a run. A run that is stopped and resumed gives the same bits as one that is
not.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradshare.data.tasks import on_device
from gradshare.engine.backends import Precision
from gradshare.engine.choose import Engine, choose
from gradshare.engine.processes import ALONE, Group, PeerLost
from gradshare.engine.traced import announced
from gradshare.errors import UserError, check_number, path_of, say, short_repr
from gradshare.learners.fingerprint import fingerprint
from gradshare.learners.graphs import GraphedPrediction, GraphedStep
from gradshare.learners.learner import Learner, Outcome
from gradshare.learners.optimisers import (
    capturable,
    check_optimiser,
    cosine,
    optimiser_tensors,
    restore_optimiser,
    set_rate,
)
from gradshare.learners.optimisers import optimiser as adam
from gradshare.learners.outer import meta_step
from gradshare.learners.start import started
from gradshare.method.episodes import Episodes, Shape, TaskSource, draw, task_key
from gradshare.method.network import NormStatistics
from gradshare.method.state import MetaState, check_fit
from gradshare.runs.config import FINGERPRINT, TRAINING, Training, check_further_entries, identity, recorded
from gradshare.runs.display import Display, Silent, check_display, shown
from gradshare.runs.divergence import Diverged, Watch
from gradshare.runs.evaluate import Evaluable, Evaluation, Parts, check_learner_and_source, evaluate, finite_mean
from gradshare.runs.folder import RunFolder, next_free
from gradshare.runs.locks import locked
from gradshare.runs.records import (
    Divergence,
    Epoch,
    Progress,
    Score,
    Summary,
    Test,
    Timing,
    best_epochs,
    out_of_patience,
)
from gradshare.runs.trackers import Tracker, Trackers, as_trackers, tracking
from gradshare.runs.workers import Interrupted, stop_requests

Factory = Callable[[dict[str, Tensor]], torch.optim.Optimizer]
"""Makes the outer optimiser from what the outer loop learns, by name: `params/head.weight`, `learned/sharing/m`, ..."""
COMPARED = 100  # epochs of a schedule that a resumed run must have in common with the one before
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

    def __repr__(self) -> str:
        return f"Trained({str(self.folder)!r}, {len(self.metrics)} epochs, the best is {self.summary['best_epoch']})"


def train(
    learner: Learner,
    dataset: TaskSource,
    folder: str | Path | None = None,
    resume: bool | None = False,
    display: Display | bool | None = None,
    about: dict[str, Any] | None = None,
    device: str = "cpu",
    engine: Engine = "auto",
    precision: Precision = "float32",
    group: Group = ALONE,
    trackers: Tracker | Iterable[Tracker] | None = (),
    optimiser: Factory | None = None,
    schedule: Callable[[int], float] | None = None,
    *,
    start: str | Path | Mapping[str, Tensor] | None = None,
    epochs: int | None = None,
    iterations: int = Training.iterations,
    ways: int = Training.ways,
    shots: int = Training.shots,
    queries: int = Training.queries,
    tasks: int = Training.tasks,
    outer_lr: float = Training.outer_lr,
    gates: float = Training.gates,
    gradient_clamp: float = Training.gradient_clamp,
    val_tasks: int = Training.val_tasks,
    test_tasks: int = Training.test_tasks,
    eval_batch: int = Training.eval_batch,
    seed: int = Training.seed,
    patience: int = Training.patience,
    norm_statistics: NormStatistics = Training.norm_statistics,
    micro_batch: int | None = Training.micro_batch,
    checkpoint: bool = Training.checkpoint,
) -> Trained:
    """Train a learner, with checkpoints, validation and test, in a run folder.

    Args:
        learner: from `gs.maml` or one of its siblings.
        dataset: from `gs.load_dataset` or `gs.tasks`, or anything with their method `sample`.
        folder: the run folder; it must not hold a run already, unless `resume`. None is the next free `runs/run-N`.
        resume: continue the run in the folder, with the same learner and options; a finished run is returned as it is,
            unless `epochs` or `patience` ask for more than it has. None: continue if there is one, else start.
        display: False shows nothing; None and True show the progress: a live table on a terminal, else a line for each
            epoch. Or your own, with the methods of `gradshare.runs.display.Display`.
        about: further entries for `config.json`, such as a name for the model: JSON values, or paths.
        device: `"cpu"` or `"cuda"`; a data set of ours is moved there, another gives tasks there, or on the CPU.
        engine: `"graph"` records a meta-iteration as one CUDA graph; `"eager"` runs it operation by operation;
            `"auto"` is graph on a GPU, in one process. `"compiled"`, on a CPU, makes programs of the model first.
        precision: `"float32"`; `"tf32"` and `"bf16"` are faster on a GPU: `Conv4` by our kernels, others compiled.
            `"bf16"` is also for a CPU that has instructions for it.
        group: processes, from `gs.processes()`, that share the tasks of a batch; the first one writes the folder.
        trackers: one object or several with the methods `log_hyperparams(params)`, `log_metrics(metrics, step)` and
            `finalize(status)`, as Lightning's loggers for TensorBoard, W&B and MLflow have them. They get the options,
            and the numbers of every epoch. One that raises an error is named on stderr, and the run goes on.
        optimiser: a function from what the outer loop learns, by name, to an optimiser of PyTorch, such as
            `lambda leaves: torch.optim.SGD(leaves.values(), lr=0.1)`. None is Adam with `outer_lr`.
        schedule: a function from the epoch, from 0, to a factor on the rates of the optimiser.
        start: weights that a new run begins with: a state_dict of the model, or a file of one, of safetensors or of
            `torch.save`. All names and shapes must fit. Only the head may differ, or be absent: then it begins as
            without `start`, and a warning says so. None: as `learner.init(seed)` has them.
        epochs: how many to train in all; None is 20, or what the run has that is resumed.
        iterations, ways, shots, queries, tasks, outer_lr, gates, gradient_clamp, val_tasks, test_tasks, eval_batch,
            seed, patience, norm_statistics, micro_batch, checkpoint: as `gs.Training` has them.

    Example:
        >>> import gradshare as gs, tempfile
        >>> learner = gs.maml(gs.Conv4(filters=4, image=(1, 28, 28)), steps=1, sharing=gs.GradientSharing())
        >>> run = gs.train(learner, gs.load_dataset("glyphs"), tempfile.mkdtemp() + "/run", epochs=1, iterations=2,
        ...                val_tasks=4, test_tasks=4, display=False)
        >>> len(run.metrics)
        1
    """
    given = {name: value for name, value in locals().items() if name in TRAINING}  # before any other name is set
    check_learner_and_source(learner, dataset)
    check_display(display)
    followers = as_trackers(trackers)
    place = path_of(folder) if folder is not None else group.from_first(lambda: next_free(Path("runs")))
    training = Training(**{**given, "epochs": _epochs(epochs, place, resume, group)})
    options = {**recorded(asdict(training)), **check_further_entries(about)}
    chosen = choose(device, engine, processes=group.size, local_processes=group.local_size).engine
    group.share(training.tasks)  # raises an error if there are more processes than tasks
    if start is not None and not (resume is not False and group.from_first(RunFolder(place).has_checkpoint)):
        learner, first = started(learner, start, training.seed, quiet=not group.first), None
    else:
        first = training.seed
    learner = learner.to(device, precision, compiled=chosen == "compiled").over(group)
    state = learner.init(first)
    outer = _outer(optimiser, schedule, state, training)
    if "method" not in options:  # the options of the command line describe the learner
        factors = None if schedule is None else [outer.factor(epoch) for epoch in range(min(training.epochs, COMPARED))]
        tasks_of = getattr(dataset, "fingerprint", None)
        options[FINGERPRINT] = fingerprint(learner, outer.optimiser if optimiser else None, factors, tasks_of)
    how = _recordable(chosen, engine, outer.optimiser)
    data = on_device(dataset, torch.device(device))  # once, so that tasks are drawn there
    run = _Run(learner, data, RunFolder(place), training, state, outer, torch.device(device), how)
    with ExitStack() as stack:
        group.from_first(lambda: stack.enter_context(locked(place)))
        if group.size == 1:
            stack.enter_context(run.folder.remove_if_nothing_to_resume())
        run.open(options, resume)
        if group.first:
            name = str(options.get("arm", place.resolve().name))
            run.display = stack.enter_context(shown(display, name, run.folder, training))
            run.trackers = stack.enter_context(tracking(followers, options))
            if display is not False:
                stack.enter_context(announced(say))
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


class _Outer(NamedTuple):
    """How the outer loop moves."""

    optimiser: torch.optim.Optimizer
    schedule: Callable[[int], float] | None

    def factor(self, epoch: int) -> float:
        """On the optimiser's rates in an epoch."""
        found = 1.0 if self.schedule is None else self.schedule(epoch)
        check_number(f"schedule({epoch})", found, 0)
        return float(found)


def _outer(optimiser: Any, schedule: Any, state: MetaState, training: Training) -> _Outer:
    if schedule is not None and not callable(schedule):
        raise UserError(f"schedule is a function from an epoch to a factor on the rates, not {short_repr(schedule)}")
    if optimiser is not None and (isinstance(optimiser, type) or not callable(optimiser)):
        example = "lambda leaves: torch.optim.SGD(leaves.values(), lr=0.1)"
        raise UserError(f"optimiser is a function from the named leaves, {example}, not {short_repr(optimiser)}")
    own = [name for name in ("outer_lr", "gates") if getattr(training, name) != getattr(Training, name)]
    if optimiser is not None and own:
        raise UserError(f"{own[0]} is for the built-in Adam: leave it out, your optimiser has rates of its own")
    made = adam(state, training.outer_lr, training.gates) if optimiser is None else optimiser(state.trainable())
    check_optimiser(made, state)
    return _Outer(made, schedule)


def _recordable(chosen: str, asked: str, optimiser: torch.optim.Optimizer) -> str:
    """The engine: a CUDA graph only with an optimiser whose steps can be recorded."""
    if chosen != "graph" or capturable(optimiser):
        return chosen
    if asked == "graph":
        raise UserError(f"a step of this {type(optimiser).__name__} cannot be recorded: make it with capturable=True")
    return "eager"


@dataclass(eq=False)
class _Run:
    """A run in progress."""

    learner: Learner
    dataset: TaskSource
    folder: RunFolder
    training: Training
    state: MetaState
    outer: _Outer
    device: torch.device
    engine: str
    progress: Progress = field(default_factory=Progress)
    identity: str = ""
    started: float = 0.0
    stepping: Learner | None = None  # the learner that `step` steps
    step: Callable[[Episodes], Outcome] = field(init=False)
    stop: Callable[[], bool] = lambda: False  # asked by all processes at the same moments
    display: Display = field(default_factory=Silent)
    trackers: Trackers = field(default_factory=Trackers)

    def __post_init__(self) -> None:
        training, self.group, self.optimiser = self.training, self.learner.group, self.outer.optimiser
        self.shape = Shape(training.ways, training.shots, training.queries)
        self.log = torch.zeros(2, training.iterations, device=self.device)  # loss and accuracy of each iteration
        self.watch = Watch(self.log, self.state.trainable())
        self.predict = GraphedPrediction(self.learner, training.norm_statistics) if self.engine == "graph" else None

    def open(self, options: dict[str, Any], resume: bool | None) -> None:
        """Start the folder, or continue from its newest checkpoint."""
        self.identity, falls = identity(options), self.learner.final_outer_rate != 1
        found = self.group.from_first(lambda: self.folder.open(options, resume, self._check_tasks, rate_falls=falls))
        if found is not None:
            self.progress, tensors = found
            self._restore(tensors)
        self.group.from_first(self.folder.check_not_diverged)
        self.group.from_first(lambda: self.folder.extend(options))
        if found is not None:
            self.group.from_first(lambda: self.folder.roll_back_to(self.progress, self._over))

    def _check_tasks(self) -> None:
        tasks = {"train": self.training.tasks, "val": self.training.val_tasks, "test": self.training.test_tasks}
        for split in (split for split, wanted in tasks.items() if wanted):
            draw(self.dataset, split, self.shape, 1, task_key(0, split))

    def _restore(self, tensors: dict[str, Tensor]) -> None:
        load_state(self.state, tensors)
        restore_optimiser(self.state, self.optimiser, tensors)
        own = {"log": self.log, "faults": self.watch.faults}  # checkpoints from before 0.1 may have no faults
        _fill(own, {"faults": self.watch.faults} | {name: tensors[name] for name in own if name in tensors})

    def finish(self) -> Trained:
        while not self._over:
            self._epoch()
        if not self.group.from_first(lambda: self.folder.done):
            summary = self._test()
            if self.group.first:
                self.folder.finish(summary, self.identity)
        result = self.group.from_first(self.folder.summary)
        assert result is not None
        metrics = [line.as_json() for line in self.progress.metrics]
        parts = (self.learner, self.dataset, self.training)
        return Trained(self.folder.path, self.state, metrics, result.as_json(), *parts)

    @property
    def _over(self) -> bool:
        """Whether no epoch is left to train."""
        done = self.progress.epoch >= self.training.epochs
        return done or out_of_patience(self.progress.metrics, self.training.patience)

    def _epoch(self) -> None:
        epoch = self.progress.epoch
        self.started = time.monotonic() - self.progress.seconds
        learner = self.learner.at(epoch)
        set_rate(
            self.optimiser, self.outer.factor(epoch) * cosine(learner.final_outer_rate, epoch, self.training.epochs)
        )
        self._choose_step(learner)
        for iteration in range(self.progress.iteration, self.training.iterations):
            self._iterate(epoch, iteration)
        trained = time.monotonic()
        validation = self._evaluate("val", self.state, self.training.val_tasks) if self.training.val_tasks else None
        self._record(validation, Timing(epoch + 1, trained - self.started, time.monotonic() - trained))

    def _choose_step(self, learner: Learner) -> None:
        """One step of this epoch's learner: recorded as a CUDA graph, or run operation by operation."""
        if learner == self.stepping:
            return
        self.stepping = learner
        options = (self.training.gradient_clamp, self.training.micro_batch, self.training.checkpoint)
        if self.engine == "graph":
            self.step = GraphedStep(learner, self.state, self.optimiser, *options)
        else:
            self.step = lambda episodes: meta_step(learner, self.state, self.optimiser, episodes, *options)

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

    def _record(self, validation: Evaluation | None, timing: Timing) -> None:
        """End an epoch: a checkpoint, from which the other files follow."""
        loss, accuracy = map(finite_mean, self.log)
        names = ("loss", "accuracy", "interval", "diverged")
        scores = {} if validation is None else {f"val_{name}": getattr(validation, name) for name in names}
        line = Epoch(timing.epoch, loss, accuracy, self.watch.skipped, **scores, **_gates(self.state))
        self.watch.next_epoch()
        self.progress = Progress(
            line.epoch, metrics=(*self.progress.metrics, line), timings=(*self.progress.timings, timing)
        )
        tensors = {**self.state.tensors(), **optimiser_tensors(self.state, self.optimiser)}
        self.group.check_same(tensors, f"after epoch {line.epoch}")
        self._save()
        if self.group.first:
            self.folder.write_epoch(self.progress)
        self.display.epoch(line, timing.train_seconds + timing.val_seconds)
        self.trackers.epoch(line)

    def _save(self) -> None:
        if self.group.first:
            tensors = {**self.state.tensors(), **optimiser_tensors(self.state, self.optimiser)}
            tensors |= {"log": self.log, "faults": self.watch.faults}
            self.folder.save(replace(self.progress, run=self.identity), tensors)

    def _test(self) -> Summary:
        """Test the best epoch alone, and the best ones together."""
        epochs = best_epochs(self.progress.metrics)
        best = self.progress.metrics[epochs[0] - 1]
        summary = Summary(best.epoch, best.val_accuracy, best.val_loss, ended=self._why_ended())
        if not self.training.test_tasks:
            return summary
        states = [self._load_epoch(epoch) for epoch in epochs]
        alone = self._evaluate("test", states[0], self.training.test_tasks)
        ensemble = self._evaluate("test", states, self.training.test_tasks)
        scores = _score(alone, epochs[:1]), _score(ensemble, epochs)
        test = Test(self.training.test_tasks, *scores)
        self.trackers.test(test, self.progress.epoch)
        return replace(summary, test=test)

    def _why_ended(self) -> str | None:
        """Why the run ended before its last epoch; None if it did not."""
        if self.progress.epoch == self.training.epochs:
            return None
        return (
            f"ended after epoch {self.progress.epoch} of {self.training.epochs}:"
            f" validation had not improved for {self.training.patience} epochs"
        )

    def _load_epoch(self, epoch: int) -> MetaState:
        state = self.learner.init(self.training.seed)
        load_state(state, self.group.from_first(lambda: self.folder.load_epoch(epoch)))
        return state


def _score(evaluation: Evaluation, epochs: list[int]) -> Score:
    return Score(evaluation.accuracy, evaluation.interval, evaluation.loss, evaluation.diverged, tuple(epochs))


def _gates(state: MetaState) -> dict[str, Any]:
    """sig(m) and sig(lam) of every inner step; of conditioned sharing, also the weight of the agreement.

    A rule of the user's own may have learned values of these names and another shape: they are left out.
    """
    learned = state.learned.get("sharing", {})
    sharing = {name: value for name, value in learned.items() if isinstance(value, Tensor) and value.dim() == 1}
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
