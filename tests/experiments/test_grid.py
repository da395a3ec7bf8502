"""Cells of a grid: how far each one is, from files alone; the live display; the estimates."""

from __future__ import annotations

import io
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradshare.errors import UserError
from gradshare.experiments import estimate, grid
from gradshare.experiments.grid import Cell, failure_of, planned, read_state
from gradshare.experiments.presets import preset
from gradshare.experiments.supervise import train_cell
from gradshare.runs import display as run_display
from gradshare.runs.config import RunConfig
from gradshare.runs.display import Activity, State, View, counts, status_table
from gradshare.runs.records import Epoch
from gradshare.runs.workers import Interrupted
from tests.support.grids import MAML, SHARED, cell_of


def test_a_grid_remembers_what_was_planned(blobs: Path, tmp_path: Path) -> None:
    assert planned(tmp_path) == []
    cells = [
        cell_of(tmp_path, blobs, name, seed=seed) for name in (MAML, SHARED, f"{MAML}~half-rate") for seed in (1, 2)
    ]
    own = Cell.of_arm(tmp_path, RunConfig(arm="my_rules:Additive"))
    for cell in reversed([*cells, own]):
        cell.plan()
    assert planned(tmp_path) == [*cells, own]
    assert own.label == "my_rules.Additive" and cells[0].folder == tmp_path / MAML / "seed-1"
    cells[0].write("failure.txt", "it had to\n\na traceback")
    assert failure_of(cells[0].folder) == cells[0].failure == "it had to" and failure_of(own.folder) == ""
    own.withdraw()
    assert planned(tmp_path) == cells
    cells[0].note("plan.json").write_text('{"ways": -1}')
    with pytest.raises(UserError, match=r"plan\.json"):
        planned(tmp_path)


def test_a_cell_says_how_far_it_is(blobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_display.Follower, "PAUSE", 0.0)
    cell, states = cell_of(tmp_path, blobs), []
    assert read_state(cell).status == "waiting"
    write = Cell.write

    def spy(self: Cell, kind: grid.Note, text: str) -> None:
        write(self, kind, text)
        states.append(read_state(self))

    monkeypatch.setattr(Cell, "write", spy)
    assert train_cell(cell) == "done"
    assert {state.status for state in states} == {"running"}
    assert [state.activity.now for state in states[:5]] == ["1/4", "2/4", "3/4", "4/4", "val 6/6"]
    first, last = states[1], states[-1]
    assert (first.epochs, first.best, len(last.epochs)) == ((), None, 2)
    assert first.epoch_seconds is not None and first.seconds_left == pytest.approx(1.5 * first.epoch_seconds)
    assert last.seconds_left == 0 and last.best is not None
    final = read_state(cell)
    assert (final.status, len(final.epochs), final.seconds_left) == ("done", 2, None)
    assert not cell.note("progress.json").exists() and cell.ended
    longer = replace(cell, config=replace(cell.config, epochs=5))
    assert longer.status == "stopped" and not longer.ended
    assert read_state(longer).seconds_left == pytest.approx(3 * (final.epoch_seconds or 0))


@pytest.mark.parametrize("text", ["", "[]", '{"share": "half"}', "\xff"])
def test_a_damaged_note_on_progress_stops_no_display(text: str, blobs: Path, tmp_path: Path) -> None:
    cell = cell_of(tmp_path, blobs)
    cell.write("progress.json", text)
    assert grid._read_activity(cell.note("progress.json")) == Activity()


@pytest.mark.parametrize("name", ["metrics.jsonl", "timings.jsonl", "diverged.json", "config.json"])
def test_damaged_files_stop_no_table(name: str, blobs: Path, tmp_path: Path) -> None:
    cell = cell_of(tmp_path, blobs)
    cell.folder.mkdir(parents=True)
    (cell.folder / "config.json").touch()
    if name == "config.json":
        (cell.folder / "DONE").touch()  # only then the number of epochs matters
    (cell.folder / name).write_text('{"epoch"')
    state = read_state(cell)
    assert state.status == "failed" and name in state.reason
    if name.endswith("jsonl"):
        assert name in run_display.read_run(cell.run, 3, Activity()).reason


def epoch(number: int, **values: Any) -> Epoch:
    return Epoch(number, **{"val_accuracy": 0.5 + number / 100, "val_interval": 0.02, **values})


class Told:
    """A run whose state is told."""

    def __init__(self, *epochs: Epoch, wanted: int = 3) -> None:
        self.wanted = wanted
        self.set(*epochs)

    def set(self, *epochs: Epoch) -> None:
        self.state = State("running", epochs, tuple(1.0 for _ in epochs), self.wanted)

    def __call__(self) -> State:
        return self.state


def test_lines_of_epochs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each epoch once, without those that were there before; a saturated gate is named once."""
    monkeypatch.setattr(run_display, "REFRESH", 0.0)
    one, other = Told(epoch(1)), Told()
    with View({"one": one, "other": other}) as view:
        view.update(["one", "other"])
        assert capsys.readouterr().out == ""
        one.set(epoch(1), epoch(2, lam=(0.999,)))
        other.set(epoch(1))
        view.update(["one"])
        assert "one          epoch 2/3  val 52.0%" in (said := capsys.readouterr().out) and "other" not in said
        assert said.count("saturated after epoch 2") == 1
        one.set(epoch(1), epoch(2, lam=(0.999,)), epoch(3, lam=(0.999,)))
    said = capsys.readouterr().out  # the rest comes at the end
    assert "one          epoch 3/3" in said and "other        epoch 1/3" in said and "saturated" not in said


def test_the_live_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    runs = {"busy": Told(epoch(1)), "done": Told(epoch(1))}
    runs["done"].state = State("done", (epoch(1),), (1.0,), 1)
    with View(runs, only=grid.AT_WORK) as view:
        view.say("[red]: is only a name")
        view.update(runs)
    shown = capsys.readouterr().out
    assert "[red]: is only a name" in shown and "2 runs: 1 running, 1 done" in shown
    assert "busy" in shown and "done  " not in shown
    assert counts([]) == "0 runs: "


def test_the_table_of_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {
        "a/seed-0": State("done", (epoch(1), epoch(2)), (60.0, 70.0), 2),
        "b/seed-0": State("running", (epoch(1),), (3.0,), 4, Activity(0.5, "3/6", None)),
        "c/seed-0": State("failed", (), (), 2, reason="\x1b[31m it had to"),
    }
    for width, shows_last in ((92, False), (140, True)):
        monkeypatch.setenv("COLUMNS", str(width))
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(status_table(states))
        text = console.export_text()
        rows = {line.split()[0]: line.split() for line in text.splitlines()}
        assert rows["a/seed-0"][1:3] == ["done", "2/2"] and rows["a/seed-0"][-3:] == ["1m", "05s", "–"]
        assert rows["b/seed-0"][1:4] == ["running", "3/6", "1/4"] and rows["b/seed-0"][-2:] == ["7.5", "s"]
        assert "c/seed-0: \\x1b[31m it had to" in text and ("val 52.0%" in text) == shows_last


def test_the_table_of_a_grid_has_curves_on_one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*values: float | None, wanted: int = 4) -> State:
        epochs = tuple(Epoch(at + 1, val_accuracy=value) for at, value in enumerate(values))
        return State("running", epochs, (1.0,) * len(epochs), wanted)

    states = {
        "low": run(0.2, 0.3, 0.4),
        "high": run(0.5, None, 0.9),
        "long": run(*(0.2 for _ in range(30)), *(0.9 for _ in range(10)), wanted=80),
        "new": run(),
    }
    for width in (75, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(status_table(states))
        curves = {line.split()[0]: re.findall("[▁-█][▁-█ ]*[▁-█]", line) for line in console.export_text().splitlines()}
        assert "Per epoch" not in console.export_text()
        if width == 75:
            assert not any(curves.values())
        else:
            assert curves["low"] == ["▁▂▃"] and curves["high"] == ["▄ █"] and curves["new"] == []
            assert curves["long"] == ["▁" * 7 + "▅" + "██"]  # 4 epochs a bar: half of its room


def test_watching_ends_when_there_is_nothing_more_to_come(blobs: Path, tmp_path: Path) -> None:
    cell = cell_of(tmp_path, blobs, epochs=1)
    cell.write("failure.txt", "it had to\n")
    grid.watch([cell])
    assert read_state(cell).reason == "it had to"


def test_an_old_plan_is_read(tmp_path: Path, blobs: Path) -> None:
    """A plan as version 0.1 wrote it, before runs could be deterministic."""
    options = {k: v for k, v in asdict(cell_of(tmp_path, blobs).config).items() if k != "deterministic"}
    path = tmp_path / ".grid" / MAML / "seed-0.plan.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(options, indent=1))
    assert planned(tmp_path) == [cell_of(tmp_path, blobs)]


SHAPE: dict[str, Any] = dict(ways=3, queries=3, steps=2, filters=3, threads=1, device="cpu", test_tasks=0)


def test_estimates_follow_the_work() -> None:
    names = ["cub-1shot-1task-maml", "cub-1shot-1task-maml-10x", "mini-1shot-1task-maml", "cub-1shot-1task-mamlpp"]
    same, tenfold, longer, plus = estimate.estimates((preset(name, **SHAPE), (1, 16, 16)) for name in names)
    assert 0 < same == tenfold and longer == pytest.approx(same * 1250 / 750)
    assert plus > 0


def test_ctrl_c_while_an_estimate_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **options: object) -> None:
        raise Interrupted(Path("a temporary folder"), "between iterations")

    monkeypatch.setattr(estimate, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        estimate.estimates([(preset("cub-1shot-1task-maml", **SHAPE), (1, 16, 16))])
