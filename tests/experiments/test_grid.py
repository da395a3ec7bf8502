"""Grids: cells are skipped, resumed, retried and reported; here and on a real Ray."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_cli import SMALL, command, gradshare
from tests.support.runs import same_run

import gradshare as gs
from gradshare.experiments import status, work
from gradshare.experiments.cells import Cell, planned, read_state
from gradshare.experiments.driver import drive
from gradshare.experiments.estimate import estimates
from gradshare.experiments.presets import preset
from gradshare.reports import write_report
from gradshare.runs.config import taken_up
from gradshare.runs.interruption import Interrupted
from gradshare.runs.locks import holder, lock_of, locked

MAML, SHARED = "cub-5shot-5task-maml", "cub-5shot-5task-maml+gs"
WIDE = {"COLUMNS": "200"}
TINY: dict[str, Any] = dict(
    ways=3, shots=1, queries=3, tasks=2, steps=2, filters=3, val_tasks=6, test_tasks=6, iterations=4, epochs=2,
    threads=1, device="cpu",
)  # fmt: skip


def tiny(blobs: Path, epochs: int, iterations: int) -> list[object]:
    return ["--dataset", blobs, *SMALL, "--shots", 1, "--epochs", epochs, "--iterations", iterations]


def cell_of(grid: Path, blobs: Path, name: str = MAML, **options: Any) -> Cell:
    return Cell(grid, name, preset(name, **{**TINY, "dataset": str(blobs), **options}))


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[str] | None = None, seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not happened():
        if process is not None and process.poll() is not None:
            pytest.fail(f"ended with {process.returncode}: {process.communicate()}")
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)


def started(*words: object) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command(*words), start_new_session=True, **pipes)


def epochs_done(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def worker(folder: Path) -> int:
    """The process at work on a run; 0 while nobody is."""
    found = holder(folder)
    return found.pid if found else 0


@pytest.fixture(scope="module")
def whole(blobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of MAML that every interruption below has to end with."""
    folder = tmp_path_factory.mktemp("whole")
    assert work.train_cell(cell_of(folder, blobs, epochs=3, iterations=25)) == "done"
    return folder / MAML / "seed-0"


def test_a_killed_worker_goes_on_and_a_failing_cell_stops_nobody(blobs: Path, whole: Path, tmp_path: Path) -> None:
    thesis = tmp_path / "cub-5shot-5task-metasgd" / "seed-0" / "thesis.tex"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("years of work")
    words = ["grid", "run", "cub-5shot-5task-metasgd", MAML, *tiny(blobs, 3, 25), "--device", "cpu", "--jobs", 1]
    folder = tmp_path / MAML / "seed-0"
    with started(*words, "--out", tmp_path) as process:
        wait_for(lambda: epochs_done(folder) >= 1, process)
        killed = worker(folder)
        assert killed
        os.kill(killed, signal.SIGKILL)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 2 and "Traceback" not in errors
    assert f"{MAML}/seed-0: its worker ended (signal 9); try 2 of 3 goes on from the last checkpoint" in output
    assert output.count(f"{MAML}/seed-0  epoch 1/3") == 1  # not lost
    assert "1 of 2 cells failed" in errors and "metasgd/seed-0 is not empty and not a run" in errors
    assert thesis.read_text() == "years of work"
    same_run(whole, folder)
    table = gradshare("grid", "status", tmp_path, **WIDE).stdout
    assert "2 cells: 1 done, 1 failed" in table and "thesis" not in table
    row = next(line for line in table.splitlines() if line.startswith(f"{MAML}/seed-0")).split()
    assert row[1:3] == ["done", "3/3"] and row[3].endswith("%")
    again = gradshare(*words, "--out", tmp_path, code=2)
    assert "1 of 2 cells to train" in again.stdout and "epoch" not in again.stdout  # what is done stays as it is


@pytest.mark.parametrize("stop", ["Ctrl-C to all", "SIGKILL to the driver"])
def test_a_stopped_grid_goes_on(blobs: Path, whole: Path, tmp_path: Path, stop: str) -> None:
    words = ["grid", "run", MAML, *tiny(blobs, 3, 25), "--device", "cpu", "--out", tmp_path]
    folder = tmp_path / MAML / "seed-0"
    with started(*words) as process:
        wait_for(lambda: epochs_done(folder) >= 1, process)
        if stop == "Ctrl-C to all":
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.kill()
        message = process.communicate(timeout=60)[1]
    if "KILL" in stop:
        wait_for(lambda: not lock_of(folder).exists())  # the worker notices, saves and ends
    else:
        assert process.returncode == 3 and "Traceback" not in message
        assert f"to go on: gradshare grid run {MAML}" in message
    assert not (folder / "DONE").exists()
    assert "1 cell: 1 stopped" in gradshare("grid", "status", tmp_path, **WIDE).stdout
    result = gradshare(*words)
    assert "1 cell: 1 done" in result.stdout and "epoch 1/3" not in result.stdout
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert (folder / "summary.json").read_bytes() == (whole / "summary.json").read_bytes()


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install gradshare[ray]")
def test_ray_starts_a_killed_worker_again(blobs: Path, whole: Path, tmp_path: Path) -> None:
    words = ["grid", "run", MAML, SHARED, *tiny(blobs, 3, 25), "--device", "cpu", "--engine", "ray", "--gpus", 0]
    folder = tmp_path / MAML / "seed-0"
    with started(*words, "--out", tmp_path) as process:
        try:
            wait_for(lambda: epochs_done(folder) >= 1, process)
            killed = worker(folder)
            assert killed
            os.kill(killed, signal.SIGKILL)
            wait_for(lambda: worker(folder) not in (0, killed), process)
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert "2 cells: 2 done" in output and f"{SHARED}/seed-0  epoch 3/3" in output
    same_run(whole, folder)


def test_seeds_arms_and_options_are_in_the_run_folders(blobs: Path, tmp_path: Path) -> None:
    options = [*tiny(blobs, 1, 2), "--inner-lr", 0.4, "--run-engine", "eager"]
    words = ["grid", "run", SHARED, *options, "--seeds", 3, 1, "--arms", "half-rate", "--out", tmp_path]
    gradshare(*words)
    configs = {
        path.parent.relative_to(tmp_path).as_posix(): json.loads(path.read_text())
        for path in tmp_path.glob("*/*/config.json")
    }
    assert {label: (config["arm"], config["seed"], config["inner_lr"]) for label, config in configs.items()} == {
        f"{MAML}~half-rate/seed-1": ("half-rate", 1, 0.2),
        f"{MAML}~half-rate/seed-3": ("half-rate", 3, 0.2),
    }
    assert all(config["epochs"] == 1 and config["dataset"] == str(blobs) for config in configs.values())
    assert [cell.label for cell in planned(tmp_path)] == sorted(configs)
    changed = [7 if word == 0.4 else word for word in words]
    assert "was begun with inner_lr = 0.2, not 3.5" in gradshare(*changed, code=2).stderr


def test_cells_go_on_for_more_epochs(blobs: Path, whole: Path, tmp_path: Path) -> None:
    gradshare("grid", "run", MAML, *tiny(blobs, 2, 25), "--out", tmp_path)
    words = ["grid", "run", MAML, *tiny(blobs, 3, 25), "--out", tmp_path]
    assert "1 of 1 cells to train" in gradshare(*words).stdout
    same_run(whole, tmp_path / MAML / "seed-0")
    assert "0 of 1 cells to train" in gradshare(*words).stdout
    words.remove("--epochs")
    words.remove(3)
    assert "has 3 epochs, not 150; give --epochs with as many, or more" in gradshare(*words, code=2).stderr
    fewer = gradshare("grid", "run", MAML, *tiny(blobs, 2, 25), "--out", tmp_path, code=2).stderr
    assert "has 3 epochs, not 2" in fewer


def test_the_report_of_a_grid_compares_like_with_like(blobs: Path, tmp_path: Path) -> None:
    """Each arm with the original of its own seed, rate and tasks a batch."""
    for seed in (0, 1):
        for name in (MAML, SHARED, f"{MAML}~half-rate", f"{MAML}-10x", f"{SHARED}-10x"):
            assert work.train_cell(cell_of(tmp_path, blobs, name, seed=seed, iterations=1, test_tasks=0)) == "done"
    arms = write_report(tmp_path)["arms"]
    assert len(arms) == 10
    assert all((arm["against_original"] is None) == (arm["arm"] == "original") for arm in arms.values())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "say which experiments"),
        (["run", "zebra-*"], "no preset matches 'zebra-*'"),
        (["run", MAML, "--arm", "shared"], "say --arms in place of --arm"),
        (["run", MAML, "--seed", "1"], "say --seeds in place of --seed"),
        (["run", MAML, "--shots", "0"], "shots is 0"),
        (["run", MAML, "--jobs", "-1"], "jobs"),
        (["run", MAML, "--dataset", "nothing"], "there is no data set 'nothing'"),
        (["status", "nowhere"], "there is no grid in nowhere"),
        (["show", "zebra"], "there is no preset 'zebra'"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(words: list[str], message: str) -> None:
    result = gradshare("grid", *words, code=2)
    assert message in result.stderr and len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("words", [[], ["list"], ["run"], ["status"], ["show"]])
def test_help_needs_no_torch(words: list[str]) -> None:
    code = f"import sys; sys.argv = {['gradshare', 'grid', *words, '--help']}; from gradshare.cli.app import main\n"
    code += "try: main()\nexcept SystemExit as e: assert not e.code\nassert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "Usage" in result.stdout, result.stderr


def test_without_ray_the_extra_is_named(blobs: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['ray'] = None; from gradshare.cli.app import main\n"
    words = ["gradshare", "grid", "run", MAML, *map(str, tiny(blobs, 1, 1)), "--engine", "ray", "--out", str(tmp_path)]
    code += f"sys.argv = {words}\nmain()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "pip install gradshare[ray]" in result.stderr


def test_a_cell_tells_how_far_it_is(blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "PAUSE", 0.0)
    cell, states = cell_of(tmp_path, blobs), []
    assert read_state(cell).condition == "waiting"
    cell.plan()
    assert planned(tmp_path) == [cell]

    class Spying(work.ProgressNotes):
        def _note(self, **progress: Any) -> None:
            super()._note(**progress)
            states.append(read_state(cell))

    monkeypatch.setattr(work, "ProgressNotes", Spying)
    assert work.train_cell(cell) == "done"
    assert {state.condition for state in states} == {"running"}
    assert [state.now for state in states[:4]] == ["1/4", "2/4", "3/4", "4/4"] and states[4].now == "val 6/6"
    first, last = states[1], states[-1]
    assert (first.epoch, first.best, last.epoch) == (0, None, 2)
    assert first.epoch_seconds is not None and first.seconds_left == pytest.approx(1.5 * first.epoch_seconds)
    assert last.seconds_left == 0 and last.best is not None
    final = read_state(cell)
    assert (final.condition, final.epoch, final.seconds_left) == ("done", 2, None)
    assert not cell.note("progress.json").exists()


def test_the_live_table(blobs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done, waiting = cell_of(tmp_path, blobs, epochs=1), cell_of(tmp_path, blobs, SHARED)
    assert work.train_cell(done) == "done"
    status.watch([done])  # ends by itself when there is nothing more to come
    assert f"{MAML}/seed-0" in capsys.readouterr().out
    with status.LiveScreen([done, waiting]) as screen:
        screen.update()
        screen.say("[red]: is only a name")
    shown = capsys.readouterr().out
    assert "[red]: is only a name" in shown and "2 cells: 1 done, 1 waiting" in shown
    assert f"{MAML}/seed-0" not in shown  # only what is at work, or failed


def test_the_outcome_of_a_cell(blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cell_of(tmp_path, blobs)
    with locked(cell.folder):
        assert work.train_cell(cell) == "held"
    broken = replace(cell, config=replace(cell.config, ways=7))
    assert work.train_cell(broken) == "failed"
    assert "7-way tasks need 7 classes" in broken.failure and read_state(broken).condition == "failed"
    monkeypatch.setattr(work, "run", lambda *_, **__: 1 / 0)
    assert work.train_cell(cell) == "failed"
    assert cell.failure == "ZeroDivisionError: division by zero"
    assert "Traceback" in cell.note("failure.txt").read_text()
    monkeypatch.undo()
    assert work.train_cell(cell) == "done" and cell.failure == "" and cell.done


def test_a_begun_cell_keeps_what_it_settled(blobs: Path, tmp_path: Path) -> None:
    cell = cell_of(tmp_path, blobs, epochs=1)
    assert taken_up(cell.config, cell.folder) == cell.config
    assert work.train_cell(cell) == "done"
    open_ended = replace(cell.config, device="auto", engine="auto", threads=0)
    settled = taken_up(open_ended, cell.folder)
    assert (settled.device, settled.engine, settled.threads) == ("cpu", "eager", 1)
    with pytest.raises(gs.UserError, match="was begun with threads = 1, not 2"):
        taken_up(replace(cell.config, threads=2), cell.folder)
    longer = replace(cell.config, epochs=5)
    assert taken_up(longer, cell.folder, longer=True).epochs == 5
    with pytest.raises(gs.UserError, match="has 1 epochs, not 5"):
        taken_up(longer, cell.folder)


def test_a_cell_whose_rate_falls_is_not_made_longer(blobs: Path, tmp_path: Path) -> None:
    cell = cell_of(tmp_path, blobs, "cub-5shot-5task-mamlpp", epochs=1, recipe="paper", pixels="unit")
    assert cell.config.rate_falls and not replace(cell.config, final_outer_rate=1.0).rate_falls
    assert work.train_cell(cell) == "done"
    with pytest.raises(gs.UserError, match="falls over its 1 epochs, so one of 5 is another run"):
        taken_up(replace(cell.config, epochs=5), cell.folder, longer=True)
    assert cell.done


class Rehearsed:
    """An engine that trains nothing: every start ends as it was told to."""

    def __init__(self, outcomes: dict[str, list[str]], jobs: int = 2) -> None:
        self.outcomes, self.jobs = outcomes, jobs
        self.at_work: list[Cell] = []
        self.log: list[str] = []

    @property
    def busy(self) -> int:
        return len(self.at_work)

    @property
    def room(self) -> bool:
        return len(self.at_work) < self.jobs

    def start(self, cell: Cell) -> None:
        self.log.append(cell.name)
        self.at_work.append(cell)

    def ask_to_stop(self) -> None:
        self.log.append("stop")

    def ended(self) -> list[tuple[Cell, Any, str]]:
        ended = [(cell, self.outcomes[cell.name].pop(0)) for cell in self.at_work]
        self.at_work = []
        for cell, outcome in ended:
            if outcome == "done":
                cell.folder.mkdir(parents=True, exist_ok=True)
                (cell.folder / "DONE").touch()
            elif outcome == "failed":
                cell.write("failure.txt", "it had to\n")
        return [(cell, outcome, "signal 9") for cell, outcome in ended]


class Heard:
    def __init__(self) -> None:
        self.said: list[str] = []

    def update(self) -> None: ...

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("gradshare.experiments.driver.TICK", 0.01)
    yield


@pytest.mark.usefixtures("quick")
def test_the_driver_tries_again_and_gives_up(tmp_path: Path) -> None:
    names = [MAML, SHARED, "cub-5shot-5task-metasgd", "cub-5shot-5task-mamlpp"]
    cells = [Cell(tmp_path, name, preset(name)) for name in names]
    outcomes = [["died", "stopped", "done"], ["died", "died", "died"], ["failed"], ["held", "done"]]
    engine, screen = Rehearsed(dict(zip(names, outcomes, strict=True))), Heard()
    failed = drive(cells, engine, screen, 2, tmp_path)
    assert {cell.name: cell.failure for cell in failed} == {
        SHARED: "its worker ended (signal 9) and there are no more tries",
        "cub-5shot-5task-metasgd": "it had to",
    }
    assert [cells[0].done, cells[3].done] == [True, True] and engine.log.count(MAML) == 3
    assert sum("try 2 of 3" in line for line in screen.said) == 2


@pytest.mark.usefixtures("quick")
def test_two_drivers_share_the_work(tmp_path: Path) -> None:
    """A cell that another process trains is waited for: taken over if it goes, left alone if it is done by then."""
    mine, abandoned, finished = (Cell(tmp_path, name, preset(name)) for name in (MAML, SHARED, "mini-5shot-5task-maml"))
    engine, screen = Rehearsed({MAML: ["done"], SHARED: ["done"]}), Heard()
    others = [locked(abandoned.folder), locked(finished.folder)]
    for lock in others:
        lock.__enter__()

    class Until(Heard):
        ticks = 0

        def update(self) -> None:
            self.ticks += 1
            if self.ticks == 5:
                finished.folder.mkdir()
                (finished.folder / "DONE").touch()
                for lock in others:
                    lock.__exit__(None, None, None)

    screen = Until()
    assert drive([mine, abandoned, finished], engine, screen, 0, tmp_path) == []
    assert engine.log == [MAML, SHARED] and screen.ticks >= 5
    assert len([line for line in screen.said if "is being trained by process" in line]) == 2


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("impatient", [False, True])
def test_the_driver_stops_politely(tmp_path: Path, impatient: bool) -> None:
    class Stopping(Rehearsed):
        def ended(self) -> list[tuple[Cell, Any, str]]:
            if "stop" not in self.log:
                os.kill(os.getpid(), signal.SIGTERM)
                return []
            if impatient:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
            return super().ended()

    cells = [Cell(tmp_path, name, preset(name)) for name in (MAML, SHARED)]
    engine = Stopping({MAML: ["stopped"]}, jobs=1)
    with pytest.raises(Interrupted, match="stopped at once" if impatient else "stopped between iterations"):
        drive(cells, engine, Heard(), 2, tmp_path)
    assert engine.log == [MAML, "stop"]


def test_estimates_follow_the_work() -> None:
    names = ["cub-1shot-1task-maml", "cub-1shot-1task-maml-10x", "mini-1shot-1task-maml", "cub-1shot-1task-mamlpp"]
    small: dict[str, Any] = dict(ways=3, queries=3, steps=2, filters=3, threads=1, device="cpu", test_tasks=0)
    same, tenfold, longer, plus = estimates((preset(name, **small), (1, 16, 16)) for name in names)
    assert 0 < same == tenfold and longer == pytest.approx(same * 1250 / 750)
    assert plus > 0
