"""`gradshare test`: one run, or every run below a folder, on new tasks. Heavy modules are imported by the command."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from gradshare.cli.options import SEVERAL, own_code
from gradshare.cli.waiting import bar, load_data
from gradshare.errors import MOST_SEED, UserError, check_range, printable, say
from gradshare.runs.config import NORM_STATISTICS
from gradshare.runs.display import score_text
from gradshare.runs.folder import find_runs

if TYPE_CHECKING:
    from gradshare.method.state import MetaState
    from gradshare.runs.evaluate import Evaluation

OwnArms = Annotated[tuple[str, ...], SEVERAL, Parameter(show_default=False)]
WORDS = {"batch": "transductive", "support": "inductive"}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TestTasks:
    """Which tasks a run is tested on, and how; what is None is as in the run."""

    tasks: int = 600
    """How many tasks."""
    seed: int | None = None
    """Which tasks; by default those of the run's own test."""
    split: Literal["train", "val", "test"] = "test"
    """train, val or test."""
    ways: int | None = None
    """Classes in a task, by default as in training; at most as many as the network has outputs, but for protomaml."""
    shots: int | None = None
    """Support examples of each class; by default as in training."""
    queries: int | None = None
    """Query examples of each class; by default as in training."""
    steps: int | None = None
    """Inner steps; by default as in training. protomaml also takes 0."""
    dataset: str | None = None
    """Another data set than the run's own, by name or folder. Its images must fit the network."""
    norm_statistics: Literal["batch", "support"] | None = None
    """Batch norm: statistics of the query batch (transductive), or of the support set (inductive); by default as the
    run has it."""
    __test__ = False  # pytest would take the class for a test

    def check(self) -> None:
        if self.tasks < 2:
            raise UserError(f"an interval over tasks needs at least 2 tasks, not {self.tasks}")
        check_range("tasks", self.tasks, 2)
        check_range("seed", self.seed or 0, 0, MOST_SEED)
        for name in ("ways", "shots", "queries", "steps"):
            if (value := getattr(self, name)) is not None:
                check_range(name, value, 0 if name == "steps" else 1)  # no step: the prototypes of protomaml


@dataclass(frozen=True)
class Tested:
    """The result of one run."""

    label: str
    epochs: list[int]  # the best ones, best first
    best: Evaluation
    ensemble: Evaluation
    about: str  # the tasks, in words

    @property
    def kind(self) -> str:
        return f"{self.about}, {WORDS[self.best.norm_statistics]}"

    @property
    def row(self) -> list[str]:
        ensemble = f"{score_text(self.ensemble)} ({len(self.epochs)})"
        return [self.label, str(self.epochs[0]), score_text(self.best), ensemble]


def test(folder: Path, options: TestTasks = TestTasks(), *, arm: OwnArms = (), backbone: str | None = None) -> None:
    """Test a trained run on new tasks: its best epoch, and the ensemble of its five best.

    For a comparison, a grid, or any folder of runs: a table with a row for each run.

    Parameters
    ----------
    folder
        A run folder, or a folder of runs.
    arm
        The arm of a run, if it is your own, package.module:Class: a name in a run folder is not imported.
    backbone
        The same for its network.
    """
    options.check()
    own = own_code(arm, backbone)
    runs = find_runs(folder)
    if len(runs) < 2:
        _print_one(_test(runs[0].path if runs else folder, "the run", options, own), options)
        return
    results, failures = [], []
    for run in runs:
        label = run.path.relative_to(folder).as_posix()
        try:
            results.append(_test(run.path, label, options, own))
        except UserError as error:
            failures.append(f"{label}: {error}")
    if results:
        _print_table(results, options)
    if failures:
        raise UserError(f"{len(failures)} of {len(runs)} runs were not tested. {'; '.join(failures)}")


def _test(folder: Path, label: str, options: TestTasks, own: Sequence[str]) -> Tested:
    from gradshare.engine.choose import apply
    from gradshare.method.episodes import Shape
    from gradshare.runs.evaluate import evaluate
    from gradshare.runs.export import load_run

    saved = load_run(folder)
    config = saved.run_config
    if config.device == "cuda" and not saved.choice.on_gpu:
        say(f"{label} was trained on a GPU, and there is none here: it is tested {saved.choice}")
    apply(saved.choice)
    other = None if options.dataset is None else load_data(options.dataset, config.pixels)
    learner, dataset, training = saved.parts(other, own)
    shape = Shape(options.ways or training.ways, options.shots or training.shots, options.queries or training.queries)
    steps = config.steps if options.steps is None else options.steps
    norm = options.norm_statistics or training.norm_statistics
    seed = training.seed if options.seed is None else options.seed
    states = [saved.state(epoch).to(saved.choice.device) for epoch in saved.best_epochs]
    which = (dataset, options.split, shape, options.tasks, seed, training.eval_batch)
    with bar(f"testing {label}, its best epoch and an ensemble", "tasks") as progress:

        def tested(states: Sequence[MetaState], before: int) -> Evaluation:
            def between(done: int) -> None:
                progress(before + done, 2 * options.tasks)

            return evaluate(learner, states, *which, between, steps=steps, norm_statistics=norm)

        best, ensemble = tested(states[:1], 0), tested(states, options.tasks)
    data = Path(options.dataset or config.dataset).name
    about = f"{shape.ways}-way {shape.shots}-shot, {shape.queries} queries, inner steps: {steps}"
    return Tested(label, saved.best_epochs, best, ensemble, f"{data}, {about}")


def _print_one(result: Tested, options: TestTasks) -> None:
    over = f"over {options.tasks} {options.split} tasks"
    say(f"best epoch {result.epochs[0]}: {score_text(result.best)} {over}")
    say(f"ensemble of {len(result.epochs)}: {score_text(result.ensemble)} {over}")
    say(f"{result.about}. {NORM_STATISTICS[result.best.norm_statistics]}")


def _print_table(results: Sequence[Tested], options: TestTasks) -> None:
    """A row for each run; what all have in common is below it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    several = len({one.kind for one in results}) > 1
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("Run", "Epoch", "Best epoch", "Ensemble (epochs)", *(["Tasks"] if several else [])):
        table.add_column(name, justify="left" if name in ("Run", "Tasks") else "right", overflow="fold")
    for one in results:
        table.add_row(*(Text(printable(cell)) for cell in [*one.row, *([one.kind] if several else [])]))
    Console().print(table)
    say(f"Over {options.tasks} {options.split} tasks" + ("" if several else f" of {results[0].about}") + ".")
    for norm in sorted({one.best.norm_statistics for one in results}):
        say(NORM_STATISTICS[norm])
