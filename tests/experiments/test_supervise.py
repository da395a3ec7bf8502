"""The supervisor: cells are started, waited for, retried and reported; workers end with their parent."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradshare.experiments import supervise
from gradshare.experiments.grid import Cell, planned, read_state
from gradshare.experiments.presets import experiment, preset
from gradshare.experiments.supervise import Ended, Failure, train_cell
from gradshare.runs.locks import locked
from gradshare.runs.workers import Interrupted
from tests.support.commands import SMALL, call, epochs_done, started, wait_for, worker
from tests.support.grids import MAML, SHARED, cell_of

METASGD, PLUS = "cub-5shot-5task-metasgd", "cub-5shot-5task-mamlpp"


class Rehearsed:
    """An engine that trains nothing: every start ends as it was told to."""

    def __init__(self, outcomes: dict[str, list[Any]], jobs: int = 2) -> None:
        self.outcomes, self.jobs = outcomes, jobs
        self.at_work: list[Cell] = []
        self.log: list[str] = []

    @property
    def busy(self) -> list[Cell]:
        return self.at_work

    @property
    def room(self) -> bool:
        return len(self.at_work) < self.jobs

    def start(self, cell: Cell) -> None:
        self.log.append(cell.name)
        self.at_work.append(cell)

    def ask_to_stop(self) -> None:
        self.log.append("stop")

    def ended(self) -> list[Ended]:
        ended = [Ended(cell, self.outcomes[cell.name].pop(0), "signal 9") for cell in self.at_work]
        self.at_work = []
        for cell, outcome, _ in ended:
            if outcome == "done":
                finish(cell)
            elif outcome in ("failed", "refused"):
                cell.write("failure.txt", "it had to\n")
        return ended


def finish(cell: Cell) -> None:
    """The files by which a run is done."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    (cell.folder / "config.json").write_text('{"version": 1, "epochs": 1000000}')
    (cell.folder / "DONE").touch()


class Heard:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.updates = 0

    def update(self, names: Iterable[str]) -> None:
        self.updates += 1

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(supervise, "TICK", 0.01)
    yield


def cells_of(place: Path, *names: str) -> list[Cell]:
    return [Cell.of_preset(place, experiment(name), preset(name)) for name in names]


def test_a_cell_whose_worker_dies_is_tried_again_and_then_named(tmp_path: Path) -> None:
    cells = cells_of(tmp_path, MAML, SHARED, METASGD, PLUS, f"{MAML}-10x")
    outcomes = [["died", "stopped", "done"], ["died", "died", "died"], ["refused"], ["held", "done"], ["failed"]]
    names = [cell.name for cell in cells]
    engine, screen = Rehearsed(dict(zip(names, outcomes, strict=True))), Heard()
    failures = supervise.supervise(cells, engine, screen, 2, tmp_path)
    assert {failure.cell.name: failure.mendable for failure in failures} == {
        SHARED: False,
        METASGD: True,
        f"{MAML}-10x": False,
    }
    reasons = {failure.cell.name: failure.reason for failure in failures}
    assert "signal 9" in reasons[SHARED] and reasons[METASGD] == "it had to"
    assert all(failure.reason == failure.cell.failure for failure in failures)
    assert [cells[0].ended, cells[3].ended] == [True, True] and engine.log.count(MAML) == 3
    assert sum("try 2 of 3" in line for line in screen.said) == 2


@pytest.mark.parametrize(("mendable", "code"), [([True, True], 2), ([True, False], 1)])
def test_failures_are_named_in_one_line(
    tmp_path: Path, mendable: list[bool], code: int, blobs: Path, monkeypatch: Any
) -> None:
    def fail(cells: list[Cell], *_: object) -> list[Failure]:
        return [Failure(cell, "it had to", one) for cell, one in zip(cells, mendable, strict=True)]

    monkeypatch.setattr(supervise, "supervise", fail)
    for words in (["compare"], ["grid", "run", MAML, SHARED]):
        said = call(*words, "--dataset", blobs, *SMALL, "--shots", 1, "--out", tmp_path / words[0], code=code).err
        assert said.startswith("gradshare: 2 of 2 ") and said.count("it had to") == 2 and said.count("\n") == 1
    assert not (tmp_path / "compare").exists() and len(planned(tmp_path / "grid")) == 2


def test_two_supervisors_share_the_work(tmp_path: Path) -> None:
    """A cell that another process trains is waited for: taken over if it ends, left alone if it is done by then."""
    mine, abandoned, finished = cells_of(tmp_path, MAML, SHARED, "mini-5shot-5task-maml")
    engine = Rehearsed({MAML: ["done"], SHARED: ["done"]})
    others = [locked(abandoned.folder), locked(finished.folder)]
    for lock in others:
        lock.__enter__()

    class Until(Heard):
        def update(self, names: Iterable[str]) -> None:
            super().update(names)
            if self.updates == 8:
                finish(finished)
                for lock in others:
                    lock.__exit__(None, None, None)

    screen = Until()
    assert supervise.supervise([mine, abandoned, finished], engine, screen, 0, tmp_path) == []
    assert engine.log == [MAML, SHARED] and screen.updates >= 8
    assert len([line for line in screen.said if str(os.getpid()) in line]) == 2


@pytest.mark.parametrize("impatient", [False, True])
def test_a_polite_stop(tmp_path: Path, impatient: bool) -> None:
    class Stopping(Rehearsed):
        def ended(self) -> list[Ended]:
            if "stop" not in self.log:
                os.kill(os.getpid(), signal.SIGTERM)
                return []
            if impatient:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1)
            return super().ended()

    engine = Stopping({MAML: ["stopped"]}, jobs=1)
    with pytest.raises(Interrupted, match="at once" if impatient else "between iterations"):
        supervise.supervise(cells_of(tmp_path, MAML, SHARED), engine, Heard(), 2, tmp_path)
    assert engine.log == [MAML, "stop"]


def test_the_outcome_of_a_cell(blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cell_of(tmp_path, blobs, epochs=1)
    with locked(cell.folder):
        assert train_cell(cell) == "held"
    broken = replace(cell, config=replace(cell.config, ways=7))
    assert train_cell(broken) == "refused"
    assert "7" in broken.failure and read_state(broken).status == "failed"
    for error, outcome in ((ZeroDivisionError("by zero"), "failed"), (MemoryError(), "refused")):

        def fail(*_: object, error: Exception = error, **__: object) -> None:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(supervise, "run", fail)
            assert train_cell(cell) == outcome
        assert ("Traceback" in cell.note("failure.txt").read_text()) == (outcome == "failed")
        assert cell.failure and read_state(cell).reason == cell.failure
    assert train_cell(cell) == "done" and cell.failure == "" and cell.ended


@pytest.fixture(scope="module")
def whole(blobs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that every interruption below has to end with."""
    out = tmp_path_factory.mktemp("whole")
    assert train_cell(cell_of(out, blobs, epochs=3, iterations=25)) == "done"
    return out / MAML / "seed-0"


def compare_words(blobs: Path, out: Path) -> list[object]:
    sizes = [*SMALL, "--epochs", 3, "--iterations", 25, "--device", "cpu", "--jobs", 2]
    return ["compare", "--preset", MAML, "--dataset", blobs, *sizes, "--shots", 1, "--arms", "original", "--out", out]


def must_equal(whole: Path, run: Path) -> None:
    for name in ("metrics.jsonl", "summary.json"):
        assert (whole / name).read_bytes() == (run / name).read_bytes()


def test_arms_save_and_end_when_their_parent_is_killed(blobs: Path, whole: Path, tmp_path: Path) -> None:
    words, run = compare_words(blobs, tmp_path), tmp_path / "original"
    with started(*words) as process:
        wait_for(lambda: epochs_done(run) >= 1, process)
        process.kill()
        saved = [path.name for path in (run / "checkpoints").iterdir()]
    wait_for(lambda: not worker(run))
    assert not (run / "DONE").exists()
    assert any(
        not name.endswith("-0000") for name in {path.name for path in (run / "checkpoints").iterdir()} - set(saved)
    )
    said = call(*words).out
    assert "epoch 3/3" in said and "epoch 1/3" not in said
    must_equal(whole, run)


def test_a_killed_worker_goes_on_from_its_checkpoint(blobs: Path, whole: Path, tmp_path: Path) -> None:
    run, killed = tmp_path / "original", []

    def kill() -> None:
        wait_for(lambda: epochs_done(run) >= 1 and worker(run))
        killed.append(worker(run))
        os.kill(killed[0], signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    said = call(*compare_words(blobs, tmp_path))
    killing.join()
    assert killed and said.out.count("try 2 of 3") == 1 and said.err == ""
    assert said.out.count("epoch 1/3") == 1  # it was not lost
    must_equal(whole, run)
