"""`gradshare grid`: the paper's experiments, many at a time. Heavy modules are imported by the commands."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter, default_name_transform

from gradshare.cli.options import Arms, Given
from gradshare.cli.waiting import bar, says_how_to_go_on
from gradshare.errors import MOST, MOST_SEED, UserError, check_range
from gradshare.experiments.presets import CONTROLS, IMAGE, described, select
from gradshare.runs.config import Arm, RunConfig, taken_up

if TYPE_CHECKING:
    from gradshare.experiments.cells import Cell
    from gradshare.experiments.local import Local
    from gradshare.experiments.on_ray import OnRay

grid_app = App(name="grid", help="The paper's 96 experiments: list them, run any of them, see how far they are.")


def _option(field: str) -> str:
    """The name of a run's option here, where --engine says where cells are trained."""
    return "run-engine" if field == "engine" else default_name_transform(field)


Options = Annotated[Given, Parameter(name="*", show_default=False, name_transform=_option)]
Seeds = Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())]


@grid_app.command(name="list")
def list_presets(
    *patterns: str, options: Options = Given(), arms: Arms = (), controls: bool = False, hours: bool = True
) -> None:
    """The experiments, with their meta-iterations and the hours that each will take on this machine.

    The hours are as grid run trains: a core for each run, or one at a time on a GPU. The real training is timed, for as
    many shapes (method, shots, tasks) as fit into 10 seconds or so, the smallest first; others are scaled from those
    by the number of images that go through the network, which is right to about a third.

    Parameters
    ----------
    patterns
        Names, with `*` for anything: `cub-*-5task-*`. All, if there are none.
    arms
        These arms of every experiment that matches, in place of the original and sharing.
    controls
        The four controls too: half-rate, gate-only, batch-only, memory-only.
    hours
        Whether to estimate the hours.
    """
    configs = {name: _configured(name, options) for name in select(patterns or ("*",), _arms(arms, controls))}
    jobs, seconds = _estimated(list(configs.values()), options) if hours else (0, [])
    print(f"{'preset':<41} {'data':<11} {'epochs':>6} {'iterations':>11} {'hours' if hours else '':>8}".rstrip())
    for number, (name, config) in enumerate(configs.items()):
        time = f"{seconds[number] / 3600:>9,.1f}" if hours else ""
        print(f"{name:<41} {config.dataset:<11} {config.epochs:>6} {config.epochs * config.iterations:>11,}{time}")
    total = sum(config.epochs * config.iterations for config in configs.values())
    time = f"{sum(seconds) / 3600:>9,.1f}, {jobs} at a time: {sum(seconds) / 3600 / jobs:,.1f}" if hours else ""
    print(f"{f'all {len(configs)}':<60} {total:>11,}{time}")


def _estimated(configs: list[RunConfig], options: Given) -> tuple[int, list[float]]:
    """How many runs at a time, and the seconds of each."""
    from gradshare.data.dataset import load_dataset
    from gradshare.experiments.estimate import estimates
    from gradshare.runs.build import settle
    from gradshare.runs.workers import side_by_side

    image = load_dataset(options.dataset).image if "dataset" in options.given else IMAGE
    jobs, threads = side_by_side(0, len(configs), settle(RunConfig(device=options.device)).device)
    print("timing meta-iterations on this machine, about 10 s ...", file=sys.stderr, flush=True)
    return jobs, estimates((replace(config, threads=options.threads or threads), image) for config in configs)


@grid_app.command
def show(name: str, options: Options = Given()) -> None:
    """Every option of an experiment, and where it comes from.

    Parameters
    ----------
    name
        A preset, such as cub-5shot-5task-maml+gs.
    """
    config, sources = _configured(name, options), described(name)
    for option, (_, source) in sources.items():
        source = "the command line" if option in options.given else source
        print(f"{option:<15} {getattr(config, option)!s:<11} {source}")


@grid_app.command
def run(
    *patterns: str,
    options: Options = Given(),
    out: Path = Path("runs/grid"),
    seeds: Seeds = (0,),
    arms: Arms = (),
    controls: bool = False,
    jobs: int = 0,
    retries: int = 2,
    engine: Literal["local", "ray"] = "local",
    address: Annotated[str | None, Parameter(env_var="RAY_ADDRESS")] = None,
    cpus: float = 1,
    gpus: float | None = None,
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
    arms
        These arms of every experiment that matches, in place of those that the names say.
    controls
        The four controls too: half-rate, gate-only, batch-only, memory-only.
    jobs
        Cells trained at a time on this machine; 0 is one for each core, or one where there is a GPU.
    retries
        How often a cell whose worker was killed goes on from its last checkpoint.
    engine
        This machine, or a Ray cluster (pip install gradshare[ray]) whose machines share the disk.
    address
        The Ray cluster, as auto or HOST:PORT; without it Ray is started on this machine.
    cpus
        With Ray: CPUs of a cell.
    gpus
        With Ray: GPUs of a cell; by default 1 where the cluster has any.
    """
    if not patterns:
        raise UserError("say which experiments: gradshare grid run 'cub-5shot-5task-maml*'; gradshare grid list")
    if not seeds:
        raise UserError("there is no run without a seed: give at least one to --seeds")
    numbers = {"seeds": min(seeds), "jobs": jobs, "retries": retries, "cpus": cpus, "gpus": gpus or 0}
    for name, value in numbers.items():
        check_range(name, value, 0, MOST_SEED if name == "seeds" else MOST)
    cells = [
        _cell(
            Path(os.path.realpath(out)),
            name,
            replace(_configured(name, options), seed=seed),
            engine == "ray" and gpus == 0,
            longer="epochs" in options.given,
        )
        for name in select(patterns, _arms(arms, controls))
        for seed in sorted(set(seeds))
    ]
    from gradshare.experiments.cells import read_state
    from gradshare.experiments.driver import drive
    from gradshare.experiments.status import counted, screen

    _load_data(cells)
    trainer, threads = _engine(engine, jobs, len(cells), options, (address, cpus, gpus, retries))
    cells = [replace(cell, config=replace(cell.config, threads=cell.config.threads or threads)) for cell in cells]
    left = [cell for cell in cells if not cell.ended]
    print(f"{len(left)} of {len(cells)} cells to train, in {out}", flush=True)
    failed: list[Cell] = []
    with says_how_to_go_on(f"gradshare {shlex.join(sys.argv[1:])}"), trainer if left else nullcontext():
        for cell in cells:
            cell.plan()
        if left:
            with screen(left) as shown:
                failed = drive(left, trainer, shown, retries if engine == "local" else 0, out)
    print(
        f"{counted(read_state(cell) for cell in cells)}; for tables and plots: gradshare report {shlex.quote(str(out))}"
    )
    if failed:
        reasons = "; ".join(f"{cell.label}: {cell.failure}" for cell in failed)
        raise UserError(f"{len(failed)} of {len(cells)} cells failed, and the same command tries them again. {reasons}")


@grid_app.command
def status(folder: Path = Path("runs/grid"), *patterns: str, watch: bool = False) -> None:
    """How far the cells of a grid are: state, epochs, best validation accuracy, time of an epoch, time left.

    Parameters
    ----------
    folder
        The folder of the grid: --out of grid run.
    patterns
        Which cells: names, with * for anything. All, if there are none.
    watch
        Show it until all is done, or a Ctrl-C.
    """
    from rich.console import Console

    from gradshare.experiments import status as shown
    from gradshare.experiments.cells import planned, read_state

    names = select(patterns) if patterns else None
    cells = [cell for cell in planned(folder) if names is None or cell.name in names]
    if not watch:
        Console().print(shown.status_table([(cell, read_state(cell)) for cell in cells]))
        return
    try:
        shown.watch(cells)
    except KeyboardInterrupt:
        return


def _arms(arms: Sequence[Arm], controls: bool) -> list[Arm]:
    chosen: list[Arm] = [*arms] or (["original", "shared"] if controls else [])
    return [*chosen, *(CONTROLS if controls else ())]


def _configured(name: str, options: Given) -> RunConfig:
    for field, instead in {"arm": "--arms", "seed": "--seeds"}.items():
        if field in options.given:
            raise UserError(f"in a grid, say {instead} in place of --{field}")
    config = options.over(name)
    if "dataset" in options.given and Path(config.dataset).is_dir():
        return replace(config, dataset=str(Path(config.dataset).resolve()))  # workers may be in another folder
    return config


def _cell(out: Path, name: str, config: RunConfig, cpu: bool, longer: bool) -> Cell:
    """A cell as it will be trained: with what it settled if it was begun; without a GPU if it gets none."""
    from gradshare.experiments.cells import Cell

    cell = Cell(out, name, replace(config, device="cpu") if cpu and config.device == "auto" else config)
    return replace(cell, config=taken_up(cell.config, cell.folder, longer))


def _load_data(cells: list[Cell]) -> None:
    """Find that a data set is missing, and build one that is built in, before several processes want it."""
    from gradshare.data.dataset import load_dataset

    for dataset, pixels in dict.fromkeys((cell.config.dataset, cell.config.pixels) for cell in cells):
        with bar("building the data set, once", "images") as progress:
            load_dataset(dataset, pixels, progress)


def _engine(
    engine: str, jobs: int, cells: int, options: Given, cluster: tuple[str | None, float, float | None, int]
) -> tuple[Local | OnRay, int]:
    """Who trains the cells, and with how many threads each."""
    if engine == "ray":
        from gradshare.experiments.on_ray import OnRay

        return OnRay(*cluster), max(1, int(cluster[1]))
    from gradshare.experiments.local import Local
    from gradshare.runs.build import settle
    from gradshare.runs.workers import side_by_side

    jobs, threads = side_by_side(jobs, cells, settle(RunConfig(device=options.device)).device)
    return Local(jobs), threads
