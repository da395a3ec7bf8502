"""When does sharing gradients help, and what does better? Regimes x rules x inner rates x seeds, in small trainings.

    python benchmarks/accelerate.py                                   the regimes of a CPU
    python benchmarks/accelerate.py --regime sinusoid --rules core    one regime, the method and its controls
    python benchmarks/accelerate.py --status                          what is done
    python benchmarks/accelerate.py --report                          only write the report

Each rule is trained at each rate (a factor on the regime's inner rate) with seeds 0 and 1. The rate with the best last
validation is trained again with five fresh seeds, 10 to 14, and those are compared: paired differences with 95 %
intervals over seeds. A cell is one training. Its measures are appended to results/accelerate/runs.csv (regime, rule,
rate, seed, measure, value) when it has ended, and a cell that is there is not trained again: stop the command at any
time, and start it again.

The paper's CUB and MiniImagenet are trained on a GPU by results/train_queue.py: choose with seeds 0 to 2 (24 cells of 8
epochs, about 11 minutes of an H200), then confirm what was chosen and gate-only with fresh seeds (10 cells of 20
epochs, 11 minutes), by the times of docs/log.md. A call ends after 9.3 minutes, and the next one goes on.
cub-crop84.zip is in carry/data, and for the cells of MiniImagenet its two archives, in two calls to one machine:

    python results/train_queue.py --parts choose --minutes 9.3 --workers 4 --out $OUT        on the GPU machine
    python results/train_queue.py --collect FOLDER                                           where $OUT came back
    python benchmarks/accelerate.py --report                                                 choose by cub-1shot
    python results/train_queue.py --parts confirm --minutes 9.3 --workers 4 --out $OUT \\
        --only cub-1shot-5task-maml~gate-only cub-1shot-5task-CHOSEN~gate-only mini-1shot-5task-CHOSEN~gate-only

Their run folders are in results/accelerate, and the report reads them there.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import NamedTuple

import accelerate_report as report
import regimes
import together
import torch

from gradshare.runs.folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "results" / "accelerate"
COLUMNS = ("regime", "rule", "rate", "seed", "measure", "value")
CONFIRM = (10, 11, 12, 13, 14)
CORE = ("original", "shared", "half-rate", "gate-only", "tensor-gates", "batch-only", "memory-only")
NEW = (
    *(
        "additive",
        "mean-length",
        "length-keeping",
        "retrieval",
        "body-only",
        "not-first",
        "not-last",
        "equivariant/zero",
    ),
    *("shared-tensor-gates", "shared/gates10", "gate-only/gates10", "tensor-gates/gates10", "additive/gates10"),
    *("original/zero-init", "gate-only/zero-init", "tensor-gates/zero-init"),
)
RECIPES = (
    *("original/head4", "gate-only/head4", "tensor-gates/head4", "original/zero-init", "gate-only/zero-init"),
    *("gate-only/zero-init/head4", "gate-only/zero-init/head4/first"),
)
SETS = {"core": CORE, "new": NEW, "all": (*CORE, *NEW), "recipes": RECIPES}
LAST = "seconds"  # the measure that ends a cell


class Cell(NamedTuple):
    """One training."""

    regime: str
    rule: str
    rate: float  # factor on the regime's inner rate
    seed: int


Results = dict[Cell, dict[str, float]]


# The file of results


def read(path: Path) -> Results:
    """The cells that have ended."""
    found: Results = defaultdict(dict)
    if path.exists():
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0]  # a kill may have torn the last line
        for row in csv.DictReader(whole.splitlines()):
            cell = Cell(row["regime"], row["rule"], float(row["rate"]), int(row["seed"]))
            found[cell][row["measure"]] = float(row["value"])
    return {cell: measures for cell, measures in found.items() if LAST in measures}


def append(path: Path, cell: Cell, measures: dict[str, float]) -> None:
    """Add the rows of a cell in one write; LAST is the last of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = {**{name: value for name, value in measures.items() if name != LAST}, LAST: measures[LAST]}
    rows = "".join(f"{','.join(map(str, cell))},{name},{value:.6g}\n" for name, value in ordered.items())
    with path.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if file.tell() == 0:
            rows = ",".join(COLUMNS) + "\n" + rows
        else:
            file.seek(-1, os.SEEK_END)
            rows = rows if file.read(1) == b"\n" else "\n" + rows
        file.write(rows.encode())


def full_size(folder: Path) -> Results:
    """The runs of the paper's size that results/train_queue.py has collected."""
    found: Results = {}
    for path in folder.glob("*-1shot-5task-*/seed-*"):
        run = RunFolder(path)
        config, summary = json.loads((path / "config.json").read_text(encoding="utf-8")), run.summary()
        if summary is None or summary.test is None:
            continue
        start = f"/{config['head_start']}" if "head_start" in config else ""
        inner = f"/{config['inner'].replace(':', '')}" if "inner" in config else ""
        gates = f"/gates{config['gates']:g}" if "gates" in config else ""
        rule = f"{config['arm']}{start}{inner}{gates}"
        cell = Cell(path.parent.name.partition("-5task")[0], rule, 1.0, config["seed"])
        lines, times = run.epochs(), run.timings()
        found[cell] = {f"val@{line.epoch}": 100 * (line.val_accuracy or 0.0) for line in lines}
        found[cell] |= {"test": 100 * (summary.test.ensemble.accuracy or 0.0)}
        found[cell] |= {LAST: sum(line.train_seconds + line.val_seconds for line in times)}
    return found


# What to train


def to_do(results: Results, name: str, rules: Iterable[str], given: argparse.Namespace) -> list[Cell]:
    """Cells that can be trained now and are not there: the sweep of each rule, then the seeds at its best rate."""
    cells, rates = [], given.rates or regimes.KNOWN[name].rates
    for rule in rules:
        sweep = [Cell(name, rule, rate, seed) for rate in rates for seed in report.SWEEP] if len(rates) > 1 else []
        best = report.best_rate(results, name, rule, rates) if sweep else rates[0]
        confirm = [] if best is None else [Cell(name, rule, best, seed) for seed in given.seeds]
        cells += [cell for cell in (*sweep, *confirm) if cell not in results]
    return cells


def same_training(cell: Cell) -> Cell:
    """The original at half the rate is half-rate: trained once."""
    variant, slash, options = cell.rule.partition("/")
    return cell._replace(rule=f"original{slash}{options}", rate=cell.rate / 2) if variant == "half-rate" else cell


# Training


def train(cells: list[Cell], small: bool) -> list[dict[str, float]]:
    """Train cells of one regime and program; returns the measures of each."""
    torch.set_num_threads(1)
    regime = regimes.KNOWN[cells[0].regime]
    regime = regimes.tiny(regime) if small else regime
    arms = [(regimes.Arm(cell.rule), cell.rate, cell.seed) for cell in cells]
    return (
        together.train(regime, arms)
        if regime.at_once > 1
        else [dict(regimes.train_small(regime, *one)) for one in arms]
    )


def advance(given: argparse.Namespace) -> bool:
    """Train what is missing until the budget ends; returns whether all is done. What fails is left out."""
    until, done = time.monotonic() + 60 * given.budget_minutes, True
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped: the same command goes on"))
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        try:
            for name in given.regime:
                done = advance_regime(name, given, pool, until) and done
        finally:
            for worker in active_children():  # at a stop they would go on to the end of their cells
                worker.terminate()
    return done


def advance_regime(name: str, given: argparse.Namespace, pool: ProcessPoolExecutor, until: float) -> bool:
    path, failed = given.out / "runs.csv", set[Cell]()
    running: dict[Future[list[dict[str, float]]], list[Cell]] = {}
    while True:
        results = read(path)
        waiting = to_do(results, name, given.rules, given)
        if known := [cell for cell in waiting if same_training(cell) in results]:
            for cell in known:
                append(path, cell, results[same_training(cell)])
            continue
        begun = failed.union(*running.values())
        twins = {
            cell for cell in waiting if same_training(cell) != cell and same_training(cell) in begun.union(waiting)
        }
        left = [cell for cell in waiting if cell not in begun | twins]
        while left and len(running) < given.jobs and time.monotonic() < until:
            program = regimes.Arm(left[0].rule).program
            cells = [cell for cell in left if regimes.Arm(cell.rule).program == program][: regimes.KNOWN[name].at_once]
            left = [cell for cell in left if cell not in cells]
            running[pool.submit(train, cells, given.tiny)] = cells
        if not running:
            if left:
                print(f"the budget of {given.budget_minutes:g} minutes is spent: the same command goes on", flush=True)
            return not waiting
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            cells = running.pop(future)
            try:
                found = future.result()
            except Exception as error:  # the other cells can be trained
                failed.update(cells)
                print(f"FAILED: {'; '.join(map(shown, cells))}: {error!r}", flush=True)
                continue
            for cell, measures in zip(cells, found, strict=True):
                append(path, cell, measures)
                print(f"{shown(cell)}  test {measures['test']:.4g}  {measures[LAST]:.1f} s", flush=True)
            print(f"{name}: at least {len(left) + sum(map(len, running.values()))} cells left", flush=True)


def shown(cell: Cell) -> str:
    return f"{cell.regime}  {cell.rule}  rate x{cell.rate:g}  seed {cell.seed}"


def status(given: argparse.Namespace) -> Iterator[str]:
    results = read(given.out / "runs.csv")
    for name in given.regime:
        have = [cell for cell in results if cell.regime == name]
        seconds = sum(results[cell][LAST] for cell in have)
        left = to_do(results, name, given.rules, given)
        confirmed = {cell.rule for cell in have if all(cell._replace(seed=seed) in results for seed in given.seeds)}
        yield (
            f"{name}: {len(have)} cells in {seconds / 60:.0f} min; confirmed {', '.join(sorted(confirmed)) or 'none'};"
            f" {len(left)} cells to train before the next choice"
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--regime", nargs="+", metavar="NAME", help="default: all of a CPU whose data are here")
    options.add_argument(
        "--rules", nargs="+", default=["core"], help="core, new, all, or rules such as additive/gates10"
    )
    options.add_argument("--rates", nargs="+", type=float, help="instead of the regime's sweep; one rate: no sweep")
    options.add_argument("--seeds", nargs="+", type=int, default=list(CONFIRM), help="at the chosen rate")
    options.add_argument("--jobs", type=int, default=1, help="trainings side by side, one thread each")
    options.add_argument("--budget-minutes", type=float, default=math.inf, help="start no cell after this")
    options.add_argument("--out", type=Path, default=OUT)
    options.add_argument("--tiny", action="store_true", help="everything in seconds, to see that it runs; with --out")
    options.add_argument("--status", action="store_true")
    options.add_argument("--report", action="store_true")
    given = options.parse_args()
    given.regime = given.regime or [one.name for one in regimes.REGIMES if not one.missing]
    if unknown := [name for name in given.regime if name not in regimes.KNOWN]:
        options.error(f"no regime {unknown[0]}: one of {', '.join(regimes.KNOWN)}")
    given.rules = list(dict.fromkeys(rule for name in given.rules for rule in SETS.get(name, (name,))))
    for rule in given.rules:
        regimes.Arm(rule).check()
    if given.status:
        print(*status(given), sep="\n")
        return
    missing = {name: regimes.KNOWN[name].missing for name in given.regime if not given.tiny}
    if not given.report:
        for name, command in missing.items():
            if command:
                options.error(f"{name} is not for here, or needs a data set that is not here: {command}")
        advance(given)
    results = read(given.out / "runs.csv")
    for cell, measures in full_size(given.out).items():
        if cell not in results:
            append(given.out / "runs.csv", cell, measures)
    page = ROOT / "docs" / "when-to-share.md" if given.out == OUT else None
    print(f"report: {report.write(read(given.out / 'runs.csv'), given.out, page)}")


if __name__ == "__main__":
    main()
