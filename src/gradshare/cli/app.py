"""The command line. PyTorch is imported only by the commands that need it."""

from __future__ import annotations

import io
import os
import shlex
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from cyclopts import App, CycloptsError

from gradshare import __version__
from gradshare.cli.bench import bench
from gradshare.cli.data import data_app
from gradshare.cli.export import export
from gradshare.cli.grid import grid_app
from gradshare.cli.options import Arms, Given, Options
from gradshare.cli.waiting import bar, says_how_to_go_on, stoppable, stoppable_run
from gradshare.errors import (
    MOST_SEED,
    TOO_LITTLE_MEMORY,
    Unmet,
    UserError,
    check_range,
    out_of_memory,
    printable,
    say_warnings_plainly,
)
from gradshare.experiments.presets import CONTROLS
from gradshare.runs.config import RunConfig, read_config, run_config
from gradshare.runs.workers import one_of_several, side_by_side

if TYPE_CHECKING:
    from gradshare.engine.processes import Group

app = App(
    name="gradshare",
    version=__version__,
    help="Meta-learning that shares gradients between tasks. Start with: gradshare compare --out runs/first",
    suppress_keyboard_interrupt=False,  # main answers it
)
app.command(bench)
app.command(data_app)
app.command(export)
app.command(grid_app)


@app.command
def compare(
    options: Options = Given(),
    *,
    preset: str | None = None,
    out: Path = Path("runs/compare"),
    controls: bool = False,
    arms: Arms = ("original", "shared"),
    jobs: int = 0,
) -> None:
    """Train a method with and without sharing on the same tasks; then table, plots and report.

    Parameters
    ----------
    preset
        One of the paper's experiments, such as cub-5shot-5task-maml (gradshare grid list); options given win over it.
    out
        Folder for the runs and the report. Run the command again to go on where it stopped.
    controls
        Also train the four controls: half-rate, gate-only, batch-only, memory-only.
    arms
        Which arms to train.
    jobs
        Arms trained at a time, each in a process of its own; 0 is one for each core.
    """
    from gradshare import reports
    from gradshare.data.dataset import load_dataset
    from gradshare.experiments import comparison
    from gradshare.runs.build import setting, settle
    from gradshare.runs.display import screen

    check_range("jobs", jobs, 0)
    if one_of_several():
        raise UserError("compare starts its own processes; torchrun is for train")
    if "arm" in options.given:
        raise UserError("in a comparison, say --arms in place of --arm")
    config = options.over(preset and preset.partition("~")[0])  # a control's options are its own
    chosen = list(dict.fromkeys([*arms, *(CONTROLS if controls else ())]))
    if not chosen:
        raise UserError("there is no comparison without an arm: give at least one to --arms")
    with bar("building the data set, once", "images") as progress:  # once, before several processes want it
        load_dataset(config.dataset, config.pixels, progress)
    at_a_time, threads = side_by_side(jobs, len(chosen), settle(config).device)
    each = "" if at_a_time == 1 else f"{at_a_time} arms at a time, each "
    print(each + setting(settle(replace(config, threads=config.threads or threads))), flush=True)
    with says_how_to_go_on(_command()), screen(config) as shown:
        diverged = comparison.compare(config, chosen, out, jobs, shown, longer="epochs" in options.given)
    _show_report(reports.write_report(out, command=_command()), out)
    for arm, cause in diverged.items():
        print(printable(f"{arm} diverged and was stopped: {cause}"))


@app.command
def train(
    options: Options = Given(),
    *,
    preset: str | None = None,
    out: Path | None = None,
    resume: Path | None = None,
    timeout: float = 60.0,
) -> None:
    """Train one run: with sharing, unless --arm or the preset says otherwise.

    With torchrun --nproc-per-node N -m gradshare train ... the tasks of a batch are spread over N processes.

    Parameters
    ----------
    preset
        One of the paper's experiments, as cub-5shot-5task-maml+gs (gradshare grid list); options given win over it.
    out
        Folder for the run; it must not hold one already.
    resume
        Go on with the run in this folder; it has its own options, so give no others, but for more --epochs.
    timeout
        With torchrun: seconds that a process waits for another before it gives up.
    """
    if (out is None) == (resume is None):
        raise UserError(
            "say where the run goes with --out FOLDER, or which to go on with --resume FOLDER (one of them)"
        )
    if options.arm == "half-rate":
        raise UserError("half-rate is an arm of compare; here say --arm original and the --inner-lr you mean")
    folder = out or resume
    assert folder is not None
    if one_of_several():
        _train_in_group(options, preset, folder, resume, timeout)
        return
    _config(options, preset, resume)  # a mistake is told before PyTorch is loaded
    with stoppable_run(folder, _command(), f"gradshare {_going_on(options, folder, resume)}"):
        _train_in_group(options, preset, folder, resume, timeout)


def _train_in_group(options: Options, preset: str | None, folder: Path, resume: Path | None, timeout: float) -> None:
    from gradshare.runs.torchrun import command, ends_at_once, one_voice, processes

    with ends_at_once(), processes(timeout) as group:
        go_on = f"{command(group)} {_going_on(options, folder, resume)}"
        with one_voice(group, go_on):
            config = group.from_first(lambda: _config(options, preset, resume))
            _train(config, folder, resume is not None, group, go_on)


def _going_on(options: Options, folder: Path, resume: Path | None) -> str:
    more = f" --epochs {options.epochs}" if resume is not None and "epochs" in options.given else ""
    return f"train --resume {shlex.quote(str(folder))}{more}"


def _config(options: Options, preset: str | None, resume: Path | None) -> RunConfig:
    if resume is None:
        return options.over(preset)
    if set(options.given) - {"epochs"} or preset is not None:
        raise UserError(f"the run in {resume} has its own options: give --resume alone, or with more --epochs")
    own = run_config(read_config(resume), resume)
    return replace(own, **options.given)


def _train(config: RunConfig, folder: Path, resume: bool, group: Group, go_on: str) -> None:
    from gradshare.data.dataset import load_dataset
    from gradshare.runs.build import run, setting, settle
    from gradshare.runs.display import RunDisplay, Silent, screen
    from gradshare.runs.torchrun import first_of_machine_first

    group.share(config.tasks)  # refuses more processes than tasks
    with first_of_machine_first(group), bar("building the data set, once", "images") as progress:
        dataset = load_dataset(config.dataset, config.pixels, progress)
    settled = settle(config, group)
    if not group.first:
        run(config, folder, resume, Silent(), dataset, group)
        return
    print(setting(settled, group), flush=True)
    with says_how_to_go_on(go_on), screen(config) as shown:
        trained = run(config, folder, resume, RunDisplay(shown, config.arm), dataset, group)
    _print_summary(folder, trained.summary)


@app.command
def test(
    folder: Path, *, tasks: int = 600, seed: int | None = None, split: Literal["train", "val", "test"] = "test"
) -> None:
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
    from gradshare.method.episodes import Shape
    from gradshare.method.state import check_fit
    from gradshare.runs.build import decided, settle
    from gradshare.runs.evaluation import evaluate
    from gradshare.runs.saved import load_run

    if tasks < 2:
        raise UserError(f"an interval over tasks needs at least 2 tasks, not {tasks}")
    check_range("tasks", tasks, 2)
    check_range("seed", seed or 0, 0, MOST_SEED)
    saved = load_run(folder)
    config = settle(saved.run_config)
    dataset = load_dataset(config.dataset, config.pixels).to(config.device)
    learner = saved.learner().to(config.device, decided(config))
    shape = Shape(config.ways, config.shots, config.queries)
    states = [saved.state(epoch).to(config.device) for epoch in saved.best_epochs] or [saved.state()]
    for state in states:
        check_fit(learner.init().tensors(), state.tensors())
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
    _show_report(reports.write_report(folder, command=_command()), folder)


def _command() -> str:
    """The command as it was typed."""
    return f"gradshare {shlex.join(sys.argv[1:])}"


def _score(accuracy: float | None, interval: float | None, loss: float | None) -> str:
    if accuracy is not None:
        return f"{accuracy:.2%} ± {interval:.2%}"
    return "no finite loss" if loss is None else f"loss {loss:.4g}" + ("" if interval is None else f" ± {interval:.2g}")


def _print_summary(folder: Path, summary: dict[str, Any]) -> None:
    print(printable(f"best epoch {summary['best_epoch']}; run in {folder}"))
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
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a folder may have a name that is no text
    say_warnings_plainly()
    try:
        if any("\0" in word for word in sys.argv):
            raise UserError("a word of the command has a NUL byte in it")
        with nullcontext() if one_of_several() else stoppable(f"to go on: {_command()}"):
            app(sys.argv[1:], exit_on_error=False, print_error=False)
    except (CycloptsError, UserError) as error:
        _refuse(str(error), each=isinstance(error, Unmet))
    except OSError as error:
        _refuse(f"{error.strerror or error}{'' if error.filename is None else f': {error.filename}'}")
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        _refuse(TOO_LITTLE_MEMORY)


def _refuse(reason: str, each: bool = False) -> NoReturn:
    """Say it in one line, and end with exit code 2; of several processes the first says it, or each."""
    if not one_of_several() or os.environ["RANK"] == "0" or each:  # the others were given the same words
        print(f"gradshare: {printable(' '.join(reason.split()))}", file=sys.stderr)
    raise SystemExit(2) from None
