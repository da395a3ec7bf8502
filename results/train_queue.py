"""Trains the cells of results/queue.toml in order, several at once on one GPU, in calls of a few minutes.

    python results/train_queue.py --status            what is finished, and what is still to train
    python results/train_queue.py --minutes 9.3 --workers 4 --out $OUT --state carry/queue_state    on the GPU machine
    python results/train_queue.py --collect FOLDER    put what a call brought back in its place: results/paper, models

A cell is finished when its best validation is 25 epochs back (counted once validation has passed 30 %, or from epoch
75 on), or at the paper's own length. It is trained to the first epoch at which that can be so (`due`) and made longer
from there, so a finished run has the epochs that it needed and no others.
(Not called queue.py: Python would find it in place of its own module of that name.)
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from gradshare.experiments.presets import Experiment, experiment, preset
from gradshare.runs.config import RunConfig
from gradshare.runs.display import Silent
from gradshare.runs.folder import RunFolder
from gradshare.runs.records import Epoch

RESULTS = Path(__file__).resolve().parent
PAPER, EARLIER = RESULTS / "paper", RESULTS / "earlier"
# The parts of a queue, in order, and where their runs go.
PARTS = {"first": PAPER, "gap": RESULTS / "gap", "then": PAPER, "evidence": RESULTS / "evidence"}
PARTS |= dict.fromkeys(("choose", "confirm"), RESULTS / "accelerate")
MODELS, STATE = RESULTS.parent / "models", RESULTS.parent / "carry" / "queue_state"
FINISHED, UNFINISHED = "finished.tar.gz", "unfinished.tar"
PART, MOST_BACK = 15 * 2**20, 60 * 2**20  # bytes: of a file that comes back, and of all of them
PACKING = 20.0  # seconds kept at the end for stopping and packing
BEST = 5  # epochs in the ensemble of the test
LICENCE = "mit"  # of the models; their cards say the terms of the data


class Rule(NamedTuple):
    """When a cell is finished."""

    patience: int  # epochs without a better validation,
    passed: float  # counted once validation has passed this,
    from_epoch: int  # or from this epoch on


def due(accuracies: list[float], rule: Rule, length: int) -> int:
    """The first epoch at which a cell with these validations, one an epoch, can be finished; it never goes down."""
    best = max(accuracies, default=0.0)
    best_epoch = accuracies.index(best) + 1 if accuracies else 1
    if best > rule.passed:
        return min(best_epoch + rule.patience, length)
    if_the_next_passes = len(accuracies) + 1 + rule.patience
    return min(max(best_epoch + rule.patience, rule.from_epoch), if_the_next_passes, length)


def accuracies_in(folder: Path) -> list[float]:
    """The validation accuracy of every epoch of a run."""
    return [line.val_accuracy or 0.0 for line in RunFolder(folder).epochs()]


@dataclass(frozen=True)
class Cell:
    """An experiment with a seed."""

    name: str  # of its folder
    seed: int
    part: str  # one of PARTS
    preset: str
    options: tuple[tuple[str, Any], ...]  # beside the preset and the options of all cells

    @property
    def label(self) -> str:
        return f"{self.name}/seed-{self.seed}"

    @property
    def home(self) -> Path:
        """The folder that its run is collected in."""
        return PARTS[self.part]


class Queue:
    """The cells of a queue file, and what their run folders say of them."""

    def __init__(self, path: Path) -> None:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        self.rule, self.options, self.data = Rule(**content["rule"]), content["options"], content.get("data", {})
        self.cells = [
            cell_of(experiment(name)._replace(arm=arm), seed, part, group)
            for part in PARTS
            for group in content.get(part, [])
            for seed in group["seeds"]
            for name in group["experiments"]
            for arm in group["arms"]
        ]

    def config(self, cell: Cell) -> RunConfig:
        return preset(cell.preset, **{**self.options, **dict(cell.options), "seed": cell.seed})

    def due(self, cell: Cell, runs: Path) -> int:
        return due(accuracies_in(runs / cell.label), self.rule, self.config(cell).epochs)

    def ended(self, cell: Cell, runs: Path) -> bool:
        """Whether the run of a cell below `runs` is finished by the rule and tested, or has diverged."""
        run = RunFolder(runs / cell.label)
        enough = run.done and len(accuracies_in(run.path)) >= self.due(cell, runs)
        return enough or run.divergence() is not None

    def complete(self, cell: Cell, runs: Path) -> bool:
        """Whether a run on this machine has ended, and its model is there."""
        has_model, diverged = (runs / "models" / cell.label).exists(), RunFolder(runs / cell.label).divergence()
        return self.ended(cell, runs) and (has_model or diverged is not None)

    def to_train(self) -> list[Cell]:
        """What results/ lacks, part by part: curves; then the best seed of experiments without a model."""
        order: list[Cell] = []
        for part, home in PARTS.items():
            cells = [cell for cell in self.cells if cell.part == part]
            order += [cell for cell in cells if not self.ended(cell, home)]
            for name in dict.fromkeys(cell.name for cell in cells if home == PAPER):
                if not (MODELS / name).exists() and not any(cell.name == name for cell in order):
                    order.append(max((cell for cell in cells if cell.name == name), key=lambda cell: best(PAPER, cell)))
        return order


def cell_of(one: Experiment, seed: int, part: str, group: dict[str, Any]) -> Cell:
    """A cell of a group; `called` stands for the method in the name of its folder where `options` make it another."""
    name = one._replace(method=group.get("called", one.method)).name
    return Cell(name, seed, part, one.name, tuple(group.get("options", {}).items()))


def best(runs: Path, cell: Cell) -> float:
    """The best validation accuracy of a cell's run."""
    return max(accuracies_in(runs / cell.label), default=0.0)


# A worker: one cell, in a process of its own.


class Longer(Exception):
    """A cell has all the epochs that it was given, and is not finished."""


class Watch(Silent):
    """The display of a run: prints a line an epoch, and asks for more epochs where the rule does."""

    def __init__(self, label: str, accuracies: list[float], until: int, rule: Rule, length: int) -> None:
        self.label, self.accuracies, self.until, self.rule, self.length = label, accuracies, until, rule, length

    def epoch(self, line: Epoch, seconds: float) -> None:
        self.accuracies[line.epoch - 1 :] = [line.val_accuracy or 0.0]
        best = max(self.accuracies)
        values = f"val {100 * self.accuracies[-1]:.1f} %, best {100 * best:.1f} % ({self.accuracies.index(best) + 1})"
        print(f"{self.label}  epoch {line.epoch}  {values}  {seconds:.1f} s", flush=True)
        if line.epoch == self.until < due(self.accuracies, self.rule, self.length):
            raise Longer  # all is saved: the run goes on from here, untested


def work(queue: Queue, cell: Cell, runs: Path, archives: Path) -> int:
    """Train a cell until it is finished, or until SIGTERM; returns the exit status."""
    from gradshare.runs.divergence import Diverged
    from gradshare.runs.workers import Interrupted

    note = note_of(cell, runs)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.unlink(missing_ok=True)
    try:
        train(queue, cell, runs, archives)
    except (Interrupted, Diverged) as how:
        print(f"{cell.label}: {how}", flush=True)
    except Exception as error:
        note.write_text(f"{type(error).__name__}: {error}".partition("\n")[0], encoding="utf-8")
        print(f"{cell.label}: FAILED\n{traceback.format_exc()}", flush=True)
        return 1
    return 0


def note_of(cell: Cell, runs: Path) -> Path:
    """Where a worker says why it failed."""
    return runs / "notes" / f"{cell.label}.txt"


def train(queue: Queue, cell: Cell, runs: Path, archives: Path) -> None:
    from gradshare.data.dataset import load_dataset
    from gradshare.runs.build import run
    from gradshare.runs.export import load_run

    config, folder = queue.config(cell), runs / cell.label
    ensure_data(queue, config.dataset, archives)
    data = load_dataset(config.dataset, config.pixels).to(config.device)
    while not queue.ended(cell, runs):
        accuracies, until = accuracies_in(folder), queue.due(cell, runs)
        watch = Watch(cell.label, accuracies, until, queue.rule, config.epochs)
        with suppress(Longer):
            run(replace(config, epochs=until), folder, None, watch, data)
    if not (runs / "models" / cell.label).exists():
        load_run(folder).save_pretrained(runs / "models" / cell.label, license=LICENCE, half_memory=True)
    summary = RunFolder(folder).summary()
    assert summary is not None and summary.test is not None
    best, ensemble = (100 * (score.accuracy or 0.0) for score in (summary.test.best, summary.test.ensemble))
    tested = f"test {best:.1f} %, ensemble {ensemble:.1f} %"
    print(f"{cell.label}: finished after {len(accuracies_in(folder))} epochs; {tested}", flush=True)


def ensure_data(queue: Queue, name: str, archives: Path) -> None:
    """Make a data set that is not there, from its archives or from another one; other workers that need it wait."""
    target = Path(os.environ["GRADSHARE_DATA"]) / name
    if name not in queue.data or target.exists():
        return
    about, began = queue.data[name], time.monotonic()
    if "change" in about:
        ensure_data(queue, about["from"], archives)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / f".{name}.importing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return
        if "change" in about:
            command = [sys.executable, RESULTS / "changed_data.py", about["from"], about["change"], name]
            subprocess.run(command, check=True)
        else:
            paths = [archive(archives, file, digest) for file, digest in about["archives"].items()]
            from gradshare.data.sources import import_dataset

            import_dataset(about["kind"], paths, about["transform"], name)
        print(f"made {name} in {time.monotonic() - began:.1f} s", flush=True)


def archive(folder: Path, name: str, digest: str) -> Path:
    """An archive, whole; joined from its parts NAME.00, NAME.01, ... if it came in several calls."""
    path, parts = folder / name, sorted(folder.glob(f"{name}.[0-9][0-9]"))
    content = path.read_bytes() if path.exists() else b"".join(part.read_bytes() for part in parts)
    if hashlib.sha256(content).hexdigest() != digest:
        raise FileNotFoundError(f"{name} is not in {folder}, or not whole ({len(parts)} parts, {len(content):,} bytes)")
    if not path.exists():
        path.write_bytes(content)
    return path


# A call: the workers, the clock, and what comes back.


def advance(queue: Queue, given: argparse.Namespace) -> int:
    began, asked = time.monotonic(), list[int]()
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    runs: Path = given.runs
    runs.mkdir(parents=True, exist_ok=True)
    keep_archives(given.carried, given.archives)
    unpack(given.state, runs)
    has_mps = start_mps()
    waiting, begun = plan(queue, given)
    print(f"{len(waiting)} cells to train, {len(begun)} of them begun; {given.workers} at a time", flush=True)
    at_work: dict[str, subprocess.Popen[bytes]] = {}
    started: list[Cell] = []
    failed = 0
    while (waiting or at_work) and not asked:
        minutes = (time.monotonic() - began) / 60
        if minutes > given.minutes - PACKING / 60:
            break
        for label in [label for label, process in at_work.items() if process.poll() is not None]:
            code = at_work.pop(label).returncode
            failed += code != 0
            print(f"{label}: its worker ended with status {code} after {60 * minutes:.0f} s of the call", flush=True)
        if failed >= 2 * given.workers and not any(queue.ended(cell, runs) for cell in started):
            print("the first cells all failed: no more are started", flush=True)
            waiting = []
        if minutes > given.start_until:
            waiting = [cell for cell in waiting if cell.label in begun]
        while waiting and len(at_work) < given.workers:
            started.append(waiting.pop(0))
            at_work[started[-1].label] = start_worker(given, started[-1])
            print(f"{started[-1].label}: starts after {60 * minutes:.0f} s of the call", flush=True)
        time.sleep(0.2)
    stop(at_work)
    pack(queue, runs, given.out)
    show(queue, runs, started)
    if has_mps:
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", timeout=5, check=False)
    print(f"{time.monotonic() - began:.0f} s in all", flush=True)
    return 0


def plan(queue: Queue, given: argparse.Namespace) -> tuple[list[Cell], set[str]]:
    """What to train now, and which of it was begun: that comes first, the nearest to its end before the others."""
    runs: Path = given.runs
    asked = [
        cell for cell in queue.to_train() if cell.part in given.parts and (not given.only or cell.name in given.only)
    ]
    waiting = [cell for cell in asked if not queue.complete(cell, runs)]
    data = {name: lacking(queue, name, given.archives) for name in {queue.config(cell).dataset for cell in waiting}}
    for name, reasons in data.items():
        if reasons:
            print(f"the cells of {name} wait for their data: {'; '.join(reasons)}", flush=True)
    waiting = [cell for cell in waiting if not data[queue.config(cell).dataset]]
    left = {cell: queue.due(cell, runs) - len(accuracies_in(runs / cell.label)) for cell in waiting}
    begun = {cell.label for cell in waiting if RunFolder(runs / cell.label).exists()}
    return sorted(waiting, key=lambda cell: left[cell] if cell.label in begun else sys.maxsize), begun


def lacking(queue: Queue, name: str, archives: Path) -> list[str]:
    """Why a data set can neither be read nor imported here."""
    if name not in queue.data or (Path(os.environ["GRADSHARE_DATA"]) / name).exists():
        return []
    if "change" in queue.data[name]:
        return lacking(queue, queue.data[name]["from"], archives)
    reasons = []
    for file, digest in queue.data[name]["archives"].items():
        try:
            archive(archives, file, digest)
        except FileNotFoundError as error:
            reasons.append(str(error))
    return reasons


def start_worker(given: argparse.Namespace, cell: Cell) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--queue", given.queue, "--runs", given.runs, "--archives", given.archives]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    # A group of its own: a signal to this script's group must not reach the workers beside the one that `stop` sends.
    return subprocess.Popen([*command, "--cell", cell.label], env=environment, process_group=0)


def stop(at_work: dict[str, subprocess.Popen[bytes]], patience: float = 12.0) -> None:
    """Ask all workers to save and stop. Kill those that do not: their last whole checkpoint is kept."""
    for process in at_work.values():
        process.terminate()
    until = time.monotonic() + patience
    for label, process in at_work.items():
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            print(f"{label}: did not stop within {patience:.0f} s and is killed", flush=True)
            process.kill()
            process.wait()


def start_mps() -> bool:
    """Start NVIDIA's MPS, so that the workers share the GPU; says so where it cannot."""
    folder = Path(tempfile.gettempdir()) / "queue-mps"  # a short path: it holds sockets
    names = {"CUDA_MPS_PIPE_DIRECTORY": folder / "pipe", "CUDA_MPS_LOG_DIRECTORY": folder / "log"}
    for name, path in names.items():
        path.mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(path)
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], timeout=20, check=False)  # fails where it runs already
        subprocess.run(["nvidia-cuda-mps-control"], input=b"get_server_list\n", timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"MPS could not be started ({error}): the workers take turns on the GPU", flush=True)
        for name in names:
            del os.environ[name]
        return False
    print("MPS runs", flush=True)
    return True


def keep_archives(carried: Path, archives: Path) -> None:
    """Copy what this call carried to where it stays as long as the machine does."""
    archives.mkdir(parents=True, exist_ok=True)
    for path in files_in(carried):
        shutil.copy2(path, archives / path.name)


def unpack(state: Path, runs: Path) -> None:
    """Put the unfinished cells of an earlier call in their place, where this machine does not have them."""
    content = read_parts(state, UNFINISHED)
    if not content:
        return
    with tempfile.TemporaryDirectory(dir=runs) as temporary, tarfile.open(fileobj=io.BytesIO(content)) as tar:
        tar.extractall(temporary, filter="data")
        for folder in sorted(Path(temporary).glob("*/seed-*")):
            label = f"{folder.parent.name}/{folder.name}"
            if not RunFolder(runs / label).exists():
                move(folder, runs / label)
                print(f"{label}: continues from {state}", flush=True)


def pack(queue: Queue, runs: Path, out: Path) -> None:
    """Write what comes back: finished cells with their models, and unfinished ones to go on from."""
    out.mkdir(parents=True, exist_ok=True)
    there = [cell for cell in dict.fromkeys(queue.cells) if RunFolder(runs / cell.label).exists()]
    wanted = queue.to_train()
    done = [cell for cell in there if queue.complete(cell, runs) and cell in wanted]
    files = [path for cell in done for at in (runs, runs / "models") for path in files_in(at / cell.label)]
    left = MOST_BACK - write_parts(out, FINISHED, tar_of(files, runs, "w:gz") if files else b"")
    files = []
    going = [cell for cell in there if not queue.complete(cell, runs) and accuracies_in(runs / cell.label)]
    for cell in sorted(going, key=lambda cell: -len(accuracies_in(runs / cell.label))):
        own = state_files(runs / cell.label)
        size = sum(path.stat().st_size + 1024 for path in own)
        if size > left:
            print(f"{cell.label}: its state does not come back: {size:,} bytes, and there is room for {left:,}")
        else:
            left, files = left - size, files + own
    write_parts(out, UNFINISHED, tar_of(files, runs, "w") if files else b"")


def state_files(folder: Path) -> list[Path]:
    """What a run goes on from: its newest checkpoint, those of its best epochs, and its small files."""
    checkpoints, accuracies = sorted((folder / "checkpoints").glob("epoch-*-iteration-*")), accuracies_in(folder)
    best = sorted(range(1, len(accuracies) + 1), key=lambda epoch: -accuracies[epoch - 1])[:BEST]
    names = {f"epoch-{epoch:04d}-iteration-0000" for epoch in best} | {checkpoints[-1].name}
    return files_in(folder) + [path for one in checkpoints if one.name in names for path in files_in(one)]


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.is_file())


def tar_of(files: Iterable[Path], below: Path, mode: Any) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode=mode) as tar:
        for path in files:
            tar.add(path, path.relative_to(below))
    return content.getvalue()


def write_parts(folder: Path, name: str, content: bytes) -> int:
    """Write a file, as NAME.00, NAME.01, ... where it is too large for one; returns its size."""
    parts = [content[start : start + PART] for start in range(0, len(content), PART)]
    for number, part in enumerate(parts):
        (folder / (name if len(parts) == 1 else f"{name}.{number:02d}")).write_bytes(part)
    return len(content)


def read_parts(folder: Path, name: str) -> bytes:
    paths = [folder / name] if (folder / name).exists() else sorted(folder.glob(f"{name}.[0-9][0-9]"))
    return b"".join(path.read_bytes() for path in paths)


# On the machine of the checkout.


def show(queue: Queue, runs: Path | None, cells: Iterable[Cell]) -> None:
    """How far cells are, in a folder of runs; None: each where it is collected."""
    print(f"{'cell':<46} {'epochs':>6} {'best %':>7} {'epoch':>5} {'seconds':>8}  state")
    for cell in dict.fromkeys(cells):
        at = runs or cell.home
        accuracies, note = accuracies_in(at / cell.label), note_of(cell, at)
        seconds = sum(line.train_seconds + line.val_seconds for line in RunFolder(at / cell.label).timings())
        best = max(accuracies, default=0.0)
        values = f"{100 * best:>7.1f} {accuracies.index(best) + 1:>5}" if accuracies else f"{'-':>7} {'-':>5}"
        print(f"{cell.label:<46} {len(accuracies):>6} {values} {seconds:>8.0f}  {state_of(queue, cell, at, note)}")


def state_of(queue: Queue, cell: Cell, runs: Path, note: Path) -> str:
    if note.exists():
        return f"FAILED: {note.read_text(encoding='utf-8')}"
    if RunFolder(runs / cell.label).divergence() is not None:
        return "diverged"
    return "finished" if queue.ended(cell, runs) else f"not finished before epoch {queue.due(cell, runs)}"


def status(queue: Queue) -> int:
    show(queue, None, queue.cells)
    first = [cell for cell in queue.cells if cell.part == "first"]
    ended = {cell for cell in queue.cells if queue.ended(cell, cell.home)}
    print(f"\nfinished: {len(ended.intersection(first))} of the first {len(first)}, {len(ended)} of {len(queue.cells)}")
    print("to train from the first epoch on, in this order (*: has a finished curve, and needs a model):")
    print("\n".join(f"  {cell.label}{' *' * (cell in ended)}" for cell in queue.to_train()))
    return 0


def collect(queue: Queue, folder: Path) -> int:
    """Put finished runs and models in their place. Replaced runs go to results/earlier, replaced models go."""
    content, cells = read_parts(folder, FINISHED), {cell.label: cell for cell in queue.cells}
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(temporary)
        if content:
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                tar.extractall(runs, filter="data")
        for run in sorted(runs.glob("*/seed-*")):
            cell = cells[f"{run.parent.name}/{run.name}"]
            if cell.home == PAPER:
                keep_model(runs, cell)  # before its run moves
            if accuracies_in(cell.home / cell.label) == accuracies_in(run):
                print(f"{cell.label}: is there already, with the same validations")
                continue
            if (cell.home / cell.label).exists():
                print(f"{cell.label}: the run before it goes to {move(cell.home / cell.label, EARLIER / cell.label)}")
            print(f"{cell.label}: in {move(run, cell.home / cell.label)}")
    shutil.rmtree(STATE, ignore_errors=True)
    STATE.mkdir(parents=True)
    for path in sorted(folder.glob(f"{UNFINISHED}*")):
        print(f"unfinished cells: in {shutil.copyfile(path, STATE / path.name)}")
    return 0


def keep_model(runs: Path, cell: Cell) -> None:
    """Put a cell's model into models/, unless the model of another seed that is there validated better."""
    model, place = runs / "models" / cell.label, MODELS / cell.name
    if not model.exists():
        return
    if place.exists():
        kept = replace(cell, seed=json.loads((place / "config.json").read_text())["model"]["options"]["seed"])
        if best(PAPER, kept) >= best(runs, cell):
            print(f"{cell.label}: the model of seed {kept.seed} validated better and stays")
            return
        shutil.rmtree(place)
    print(f"{cell.label}: model in {move(model, place)}")


def move(source: Path, target: Path) -> Path:
    """Move a folder; where there is one of that name, to NAME-2, NAME-3, ..."""
    number, place = 2, target
    while place.exists():
        place, number = target.with_name(f"{target.name}-{number}"), number + 1
    place.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.move(source, place))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--status", action="store_true", help="show the queue, and train nothing")
    parser.add_argument("--collect", type=Path, metavar="FOLDER", help="where the files of a call are")
    parser.add_argument("--minutes", type=float, default=9.3, help="the call is over by then")
    parser.add_argument("--start-until", type=float, default=1e9, help="begin no new cell after so many minutes")
    parser.add_argument("--workers", type=int, default=4, help="cells at once")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="parts of the queue to train")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="cells of these names alone, such as mini-1shot-5task-maml"
    )
    parser.add_argument("--out", type=Path, default=Path("scratch/out"), help="where the files to bring back go")
    parser.add_argument("--state", type=Path, default=STATE, help="unfinished cells of an earlier call")
    parser.add_argument("--carried", type=Path, default=Path("carry/data"), help="archives, or parts, of this call")
    parser.add_argument("--archives", type=Path, default=Path("scratch/archives"), help="where archives stay")
    parser.add_argument("--runs", type=Path, default=Path("scratch/queue"), help="where runs stay")
    parser.add_argument("--queue", type=Path, default=RESULTS / "queue.toml")
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # what a worker trains
    given = parser.parse_args()
    os.environ.setdefault("GRADSHARE_DATA", str(Path("scratch/data").resolve()))
    queue = Queue(given.queue)
    if given.collect:
        return collect(queue, given.collect)
    if given.cell:
        cell = next(cell for cell in queue.cells if cell.label == given.cell)
        return work(queue, cell, given.runs, given.archives)
    return status(queue) if given.status else advance(queue, given)


if __name__ == "__main__":
    sys.exit(main())
