"""`gradshare compare` and `gradshare grid`: several runs, trained side by side. A comparison is a grid of arms.

Heavy modules are imported by the commands.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from gradshare.cli.options import SEVERAL, Arms, Controls, Given, GridOptions, Options, own_code, with_controls
from gradshare.cli.waiting import load_data, says_how_to_go_on, typed_command
from gradshare.errors import MOST_SEED, UserError, check_range, say
from gradshare.experiments.presets import IMAGE, Experiment, described, matches, preset, select
from gradshare.files import tidy
from gradshare.runs.config import MAY_GROW, Log, RunConfig, with_arm
from gradshare.runs.folder import merge_with_saved
from gradshare.runs.workers import one_of_several

if TYPE_CHECKING:
    from gradshare.experiments.grid import Cell
    from gradshare.experiments.ray import Ray
    from gradshare.experiments.supervise import Failure, Local
    from gradshare.runs.records import Status


def compare(
    options: Options = Given(),
    *,
    preset: str | None = None,
    out: Path = Path("runs/compare"),
    controls: Controls = False,
    arms: Arms = ("original", "shared"),
    jobs: int = 0,
    log: Log | None = None,
) -> None:
    """Train a method with and without sharing on the same tasks; then table, plots and report.

    Parameters
    ----------
    preset
        One of the paper's experiments, such as cub-5shot-5task-maml (gradshare grid list), or of other papers, such as
        conv32-mini-1shot-maml; options given win over it.
    out
        Folder for the runs and the report. Run the command again to go on where it stopped.
    jobs
        Arms trained at a time, each in a process of its own; 0 is one for each core, or one with a GPU.
    log
        Also write the numbers of every epoch to OUT/ARM/tensorboard (pip install "gradshare[tensorboard]").
    """
    check_range("jobs", jobs, 0)
    if one_of_several():
        raise UserError("compare starts its own processes; torchrun is for train")
    if "arm" in options.given:
        raise UserError("a comparison has several arms: give --arms instead of --arm")
    chosen = with_controls(arms, controls)
    if not chosen:
        raise UserError("there is no comparison without an arm: give at least one to --arms")
    config = options.over(preset and preset.partition("~")[0])  # each arm has its own options
    own = own_code(chosen, config.backbone)
    from gradshare.engine.choose import side_by_side
    from gradshare.experiments.grid import Cell
    from gradshare.experiments.supervise import Local
    from gradshare.runs.build import choice_for
    from gradshare.runs.trackers import trackers_for

    trackers_for(log, out)  # raises an error if it is not installed
    cells = _as_begun([Cell.of_arm(out, with_arm(config, arm)) for arm in chosen], options)
    _check_before_training(cells, own)
    at_a_time, threads = side_by_side(jobs, len(cells), choice_for(config).device)
    cells = _with_threads(cells, threads)
    each = "" if at_a_time == 1 else f"{at_a_time} arms at a time, each "
    say(f"{each}{choice_for(cells[0].config)}")
    with tidy(out):
        failures = _train(cells, Local(at_a_time, own, log), out)
        for failure in failures:
            failure.cell.withdraw()
    _end_if_failed(failures, len(cells))
    diverged = {cell.label: cell.divergence for cell in cells if cell.divergence}
    show_report(out)
    for label, reason in diverged.items():
        say(f"{label} diverged and was stopped: {reason}")


def show_report(folder: Path) -> None:
    """Write the report of the runs in a folder, and print its tables."""
    from rich.console import Console

    from gradshare import reports

    comparison = reports.write_report(folder, command=typed_command())
    Console().print(reports.rich_table(comparison))
    say(f"report: {folder / 'report.html'}")


grid_app = App(name="grid", help="The paper's 96 experiments: list them, run any of them, see how far they are.")


@grid_app.command(name="list")
def list_presets(
    *patterns: str, options: GridOptions = Given(), arms: Arms = (), controls: Controls = False, hours: bool = True
) -> None:
    """The experiments, with their meta-iterations and the hours that each will take on this machine.

    The hours are as grid run trains: a core for each run, or one at a time on a GPU. The real training is timed, for as
    many shapes (method, shots, tasks) as fit into 10 seconds or so, the smallest first; others are scaled from those
    by the number of images that go through the network, which is right to about a third.

    Parameters
    ----------
    patterns
        Names, with `*` for anything: `cub-*-5task-*`. All, if there are none.
    hours
        Whether to estimate the hours.
    """
    configs = {one.name: _configured(one, options) for one in _select(patterns or ("*",), arms, controls)}
    jobs, seconds = _estimated(list(configs.values()), options) if hours else (0, [])
    say(f"{'preset':<41} {'data':<11} {'epochs':>6} {'iterations':>11} {'hours' if hours else '':>8}".rstrip())
    for number, (name, config) in enumerate(configs.items()):
        time = f"{seconds[number] / 3600:>9,.1f}" if hours else ""
        say(f"{name:<41} {config.dataset:<11} {config.epochs:>6} {config.epochs * config.iterations:>11,}{time}")
    total = sum(config.epochs * config.iterations for config in configs.values())
    time = f"{sum(seconds) / 3600:>9,.1f}, {jobs} at a time: {sum(seconds) / 3600 / jobs:,.1f}" if hours else ""
    say(f"{f'all {len(configs)}':<60} {total:>11,}{time}")


def _estimated(configs: list[RunConfig], options: Given) -> tuple[int, list[float]]:
    """How many runs at a time, and the seconds of each."""
    from gradshare.data.dataset import load_dataset
    from gradshare.engine.choose import choose, side_by_side
    from gradshare.experiments.estimate import estimates

    image = load_dataset(options.dataset).image if "dataset" in options.given else IMAGE
    jobs, threads = side_by_side(0, len(configs), choose(options.device).device)
    say("timing meta-iterations on this machine, about 10 s ...", error=True)
    sized = ((replace(config, threads=options.threads or threads), image) for config in configs)
    return jobs, estimates(sized, own_code((), options.backbone))


@grid_app.command
def show(name: str, options: GridOptions = Given()) -> None:
    """Every option of an experiment, and its source.

    Parameters
    ----------
    name
        A preset, such as cub-5shot-5task-maml+gs.
    """
    config = _configured(name, options)
    for option, (_, source) in described(name).items():
        source = "the command line" if option in options.given else source
        say(f"{option:<15} {getattr(config, option)!s:<11} {source}")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Workers:
    """What trains the runs of a grid."""

    jobs: int = 0
    """Runs trained at a time on this machine; 0 is one for each core, or one with a GPU."""
    retries: int = 2
    """How often a run whose worker was killed goes on from its last checkpoint."""
    engine: Literal["local", "ray"] = "local"
    """This machine, or a Ray cluster (pip install 'gradshare[ray]') whose machines share the disk."""
    address: Annotated[str | None, Parameter(env_var="RAY_ADDRESS")] = None
    """The Ray cluster, as auto or HOST:PORT; without it Ray is started on this machine."""
    cpus: float = 1
    """With Ray: CPUs for each run."""
    gpus: float | None = None
    """With Ray: GPUs for each run; by default 1 if the cluster has any."""

    def check(self) -> None:
        for name in ("jobs", "retries", "cpus", "gpus"):
            check_range(name, getattr(self, name) or 0, 0)

    @property
    def without_gpu(self) -> bool:
        return self.engine == "ray" and self.gpus == 0

    def start(self, cells: int, device: str, own: Sequence[str]) -> tuple[Local | Ray, int]:
        """The engine that trains so many cells, and the threads for each."""
        if self.engine == "ray":
            from gradshare.experiments.ray import Ray

            return Ray(self.address, self.cpus, self.gpus, self.retries, own), max(1, int(self.cpus))
        from gradshare.engine.choose import choose, side_by_side
        from gradshare.experiments.supervise import Local

        jobs, threads = side_by_side(self.jobs, cells, choose(device).device)
        return Local(jobs, own), threads


@grid_app.command
def run(
    *patterns: str,
    options: GridOptions = Given(),
    out: Path = Path("runs/grid"),
    seeds: Annotated[tuple[int, ...], SEVERAL] = (0,),
    arms: Arms = (),
    controls: Controls = False,
    workers: Workers = Workers(),
) -> None:
    """Train experiments. The same command again skips what is done or diverged and goes on with the rest.

    Parameters
    ----------
    patterns
        Which: names, with `*` for anything: `'cub-*-5task-*'` (in quotes).
    out
        Folder of the grid; a run goes to OUT/NAME/seed-N.
    seeds
        Each experiment with each of these seeds.
    """
    if not patterns:
        raise UserError(
            "which experiments? For example gradshare grid run 'cub-5shot-5task-maml*'; gradshare grid list"
        )
    if not seeds:
        raise UserError("there is no run without a seed: give at least one to --seeds")
    check_range("seeds", min(seeds), 0, MOST_SEED)
    workers.check()
    chosen = _select(patterns, arms, controls)
    own = own_code({one.arm for one in chosen}, options.backbone)
    from gradshare.experiments.grid import AT_WORK, read_state
    from gradshare.runs.display import counts

    cells = _planned(Path(os.path.realpath(out)), chosen, options, seeds, workers.without_gpu)
    _check_before_training(cells, own)
    engine, threads = workers.start(len(cells), options.device, own)
    retries = workers.retries if workers.engine == "local" else 0  # Ray has its own
    say(f"{sum(not cell.ended for cell in cells)} of {len(cells)} runs to train, in {out}")
    failures = _train(_with_threads(cells, threads), engine, out, retries, AT_WORK)
    report = f"for tables and plots: gradshare report {shlex.quote(str(out))}"
    say(f"{counts(map(read_state, cells))}; {report}")
    _end_if_failed(failures, len(cells))


@grid_app.command
def status(folder: Path = Path("runs/grid"), *patterns: str, watch: bool = False) -> None:
    """How far the runs of a grid or a comparison are: state, epochs, best validation accuracy, time left.

    Parameters
    ----------
    folder
        The folder of the grid or the comparison: its --out.
    patterns
        Which runs: names, with * for anything. All, if there are none.
    watch
        Show it until all is done, or a Ctrl-C.
    """
    from rich.console import Console

    from gradshare.experiments import grid
    from gradshare.runs.display import status_table

    cells = grid.planned(folder)
    if not cells:
        raise UserError(f"there is no grid in {folder}: gradshare grid run PATTERN --out {folder} makes one")
    if patterns:
        cells = [cell for cell in cells if any(matches(cell.name, pattern) for pattern in patterns)]
    if not cells:
        raise UserError(f"no run in {folder} matches {' '.join(patterns)}")
    if not watch:
        Console().print(status_table({cell.label: grid.read_state(cell) for cell in cells}))
        return
    try:
        grid.watch(cells)
    except KeyboardInterrupt:
        return


def _select(patterns: Iterable[str], arms: Sequence[str], controls: bool) -> list[Experiment]:
    return select(patterns, with_controls(arms or (("original", "shared") if controls else ()), controls))


def _configured(one: Experiment | str, options: Given) -> RunConfig:
    for field in ("arm", "seed"):
        if field in options.given:
            raise UserError(f"a grid has several {field}s: give --{field}s instead of --{field}")
    config = preset(one, **options.given)
    # A worker may have another directory.
    if "dataset" in options.given and Path(config.dataset).is_dir():
        config = replace(config, dataset=str(Path(config.dataset).resolve()))
    return config if config.start is None else replace(config, start=str(Path(config.start).resolve()))


def _planned(
    grid: Path, chosen: Sequence[Experiment], options: Given, seeds: Sequence[int], without_gpu: bool
) -> list[Cell]:
    """The cells of a grid, one for each experiment and seed."""
    from gradshare.experiments.grid import Cell

    cells = []
    for one in chosen:
        config = _configured(one, options)
        if without_gpu and config.device == "auto":
            config = replace(config, device="cpu")
        cells += [Cell.of_preset(grid, one, replace(config, seed=seed)) for seed in sorted(set(seeds))]
    return _as_begun(cells, options)


def _as_begun(cells: Iterable[Cell], options: Given) -> list[Cell]:
    """Cells with the device, threads, ... that they were begun with; longer than that if the options ask for it."""
    longer = any(name in options.given for name in MAY_GROW)
    return [replace(cell, config=merge_with_saved(cell.config, cell.folder, longer)) for cell in cells]


def _with_threads(cells: Iterable[Cell], threads: int) -> list[Cell]:
    return [replace(cell, config=replace(cell.config, threads=cell.config.threads or threads)) for cell in cells]


def _check_before_training(cells: Sequence[Cell], own: Sequence[str]) -> None:
    """Find what is missing or cannot be trained, and build the data, once, before several processes need it."""
    from gradshare.runs.build import learner_of_shapes

    start = cells[0].config.start
    if start is not None and not Path(start).is_file():
        raise UserError(f"there is no file {start} with weights to start from")
    named = [(cell.config.dataset, cell.config.pixels) for cell in cells]
    images = {names: load_data(*names).image for names in dict.fromkeys(named)}
    for cell, names in zip(cells, named, strict=True):
        learner_of_shapes(cell.config, images[names], own)


def _train(
    cells: Sequence[Cell], engine: Local | Ray, out: Path, retries: int = 2, rows: Sequence[Status] = ()
) -> list[Failure]:
    """Train the cells that have not ended; `rows`: the status of those with a row in the live table."""
    from gradshare.experiments.grid import view
    from gradshare.experiments.supervise import supervise

    left = [cell for cell in cells if not cell.ended]
    with says_how_to_go_on(typed_command()), engine if left else nullcontext():
        for cell in cells:
            cell.plan()
        if not left:
            return []
        with view(left, rows) as screen:
            return supervise(left, engine, screen, retries, out)


def _end_if_failed(failures: Sequence[Failure], runs: int) -> None:
    """Name the runs that failed, in one line: exit code 2 if the user can mend all of them, otherwise 1."""
    if not failures:
        return
    reasons = "; ".join(f"{failure.cell.label}: {failure.reason}" for failure in failures)
    line = f"{len(failures)} of {runs} runs failed, and the same command tries them again. {reasons}"
    if all(failure.mendable for failure in failures):
        raise UserError(line)
    say(f"gradshare: {line}", error=True)
    raise SystemExit(1)
