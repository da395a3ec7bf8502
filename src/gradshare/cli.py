"""The command line. PyTorch is imported only by the commands that need it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from gradshare import __version__
from gradshare.cli_data import data_app
from gradshare.config import Arm, RunConfig, read_config, run_config
from gradshare.errors import UserError

app = App(
    name="gradshare",
    version=__version__,
    help="Meta-learning that shares gradients between tasks. Start with: gradshare compare --out runs/first",
)
app.command(data_app)

Options = Annotated[RunConfig, Parameter(name="*")]


@app.command
def compare(
    config: Options = RunConfig(),
    *,
    out: Path = Path("runs/compare"),
    controls: bool = False,
    arms: tuple[Arm, ...] = ("original", "shared"),
    jobs: int = 0,
) -> None:
    """Train a method with and without sharing on the same tasks; then table, plots and report.

    Parameters
    ----------
    out
        Folder for the runs and the report. Run the command again to go on where it stopped.
    controls
        Also train the four controls: half-rate, gate-only, batch-only, memory-only.
    arms
        Which arms to train.
    jobs
        Arms trained at a time, each in a process of its own; 0 is one for each core.
    """
    from gradshare import comparison, reports
    from gradshare.data.dataset import load_dataset
    from gradshare.display import screen
    from gradshare.waiting import bar

    chosen = list(dict.fromkeys([*arms, *(comparison.CONTROLS if controls else ())]))
    with bar("building the data set, once", "classes") as progress:  # once, before several processes want it
        load_dataset(config.dataset, config.pixels, progress)
    with _interruptible(f"gradshare {shlex.join(sys.argv[1:])}"), screen(config) as shown:
        comparison.compare(config, chosen, out, jobs, shown)
    _show_report(reports.write_report(out, command=f"gradshare {shlex.join(sys.argv[1:])}"), out)


@app.command
def train(config: Options = RunConfig(), *, out: Path | None = None, resume: Path | None = None) -> None:
    """Train one run: with sharing, unless --arm says otherwise.

    Parameters
    ----------
    out
        Folder for the run; it must not hold one already.
    resume
        Go on with the unfinished run in this folder; it has its own options, so give no others.
    """
    if (out is None) == (resume is None):
        raise UserError(
            "say where the run goes with --out FOLDER, or which to go on with --resume FOLDER (one of them)"
        )
    if resume is not None:
        if config != RunConfig():
            raise UserError(f"the run in {resume} has its own options: give --resume alone")
        config = run_config(read_config(resume), resume)
    elif config.arm == "half-rate":
        raise UserError("half-rate is an arm of compare; here say --arm original and the --inner-lr you mean")
    from gradshare.data.dataset import load_dataset
    from gradshare.display import RunDisplay, screen
    from gradshare.runs import run
    from gradshare.waiting import bar

    folder = out or resume
    assert folder is not None
    with bar("building the data set, once", "classes") as progress:
        dataset = load_dataset(config.dataset, config.pixels, progress)
    with _interruptible(f"gradshare train --resume {shlex.quote(str(folder))}"), screen(config) as shown:
        trained = run(config, folder, resume is not None, RunDisplay(shown, config.arm), dataset)
    _print_summary(folder, trained.summary)


@app.command
def test(folder: Path, *, tasks: int = 600, seed: int | None = None, split: str = "test") -> None:
    """Test a trained run on new tasks: its best epoch, and the ensemble of its five best.

    Parameters
    ----------
    folder
        A run folder.
    tasks
        How many tasks.
    seed
        Which tasks; by default those of the run's own test.
    split
        train, val or test.
    """
    from gradshare.data.dataset import load_dataset
    from gradshare.episodes import Shape
    from gradshare.evaluation import evaluate
    from gradshare.runs import load_run, settle

    if tasks < 2:
        raise UserError(f"an interval over tasks needs at least 2 tasks, not {tasks}")
    saved = load_run(folder)
    config = settle(saved.run_config)
    dataset = load_dataset(config.dataset, config.pixels).to(config.device)
    learner, shape = saved.learner().to(config.device), Shape(config.ways, config.shots, config.queries)
    states = [saved.state(epoch).to(config.device) for epoch in saved.best_epochs] or [saved.state()]
    for name, chosen in {
        f"best epoch {saved.best_epochs[0]}": states[:1],
        f"ensemble of {len(states)}": states,
    }.items():
        result = evaluate(
            learner, chosen, dataset, split, shape, tasks, config.seed if seed is None else seed, config.eval_batch
        )
        print(f"{name}: {_score(result.accuracy, result.interval, result.loss)} over {tasks} {split} tasks")


@app.command
def report(folder: Path) -> None:
    """Write table, plots and report.html for a run, or for all runs below a folder.

    Parameters
    ----------
    folder
        A run folder, or a folder of runs.
    """
    from gradshare import reports

    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    _show_report(reports.write_report(folder, command=f"gradshare {shlex.join(sys.argv[1:])}"), folder)


class _interruptible:  # noqa: N801: reads as a verb in a with statement
    """Turns a polite stop into a message that says how to go on, and exit code 3."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from gradshare.interruption import Interrupted

        if isinstance(error, Interrupted):
            print(f"{error}\nto go on: {self.command}", file=sys.stderr)
            raise SystemExit(3) from None


def _score(accuracy: float | None, interval: float, loss: float) -> str:
    return f"loss {loss:.4g} ± {interval:.2g}" if accuracy is None else f"{accuracy:.2%} ± {interval:.2%}"


def _print_summary(folder: Path, summary: dict[str, Any]) -> None:
    print(f"best epoch {summary['best_epoch']}; run in {folder}")
    if summary["test"]:
        for name in ("best", "ensemble"):
            part = summary["test"][name]
            print(f"test, {name}: {_score(part['accuracy'], part['interval'], part['loss'])}")


def _show_report(comparison: dict[str, Any], folder: Path) -> None:
    from rich.console import Console

    from gradshare import reports

    console, reached = Console(), reports.rich_thresholds(comparison)
    console.print(reports.rich_table(comparison))
    if reached is not None:
        console.print("", reached)
    print(f"report: {folder / 'report.html'}")


def main() -> None:
    """Run the command line: 0 done, 2 something the user can mend, 3 stopped and saved."""
    try:
        app(exit_on_error=False, print_error=False)
    except (CycloptsError, UserError) as error:
        print(f"gradshare: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        print(f"gradshare: {error.strerror}: {error.filename}", file=sys.stderr)
        raise SystemExit(2) from None
