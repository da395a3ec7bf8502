"""The queue of the paper's experiments: what is trained comes back as runs and models, each in its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradshare as gs
from gradshare.engine import backends
from gradshare.experiments.presets import IMAGE
from gradshare.runs import export
from gradshare.runs.build import build_learner, choice_for
from results import train_queue
from results.changed_data import CHANGES
from results.train_queue import RESULTS, Queue, best, collect, pack, work
from tests.support.grids import SHARED, TINY

TEXT = """
[rule]
patience = 1
passed = 0.0
from_epoch = 1
[options]
{options}
[[first]]
experiments = ["cub-5shot-5task-maml"]
arms = ["shared"]
seeds = [0, 1]
[[evidence]]
called = "maml-momentum"
experiments = ["cub-5shot-5task-maml"]
arms = ["original"]
seeds = [0]
options = {{ inner = "momentum:0.9", epochs = 1 }}
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("PAPER", "EARLIER", "MODELS", "STATE"):
        monkeypatch.setattr(train_queue, name, tmp_path / name.lower())
    homes = {part: tmp_path / home.name for part, home in train_queue.PARTS.items()}
    monkeypatch.setattr(train_queue, "PARTS", homes)
    monkeypatch.setattr(export, "CHECKOUT", tmp_path / "models")
    return tmp_path


@pytest.fixture
def queue(places: Path, blobs: Path) -> Queue:
    options: dict[str, Any] = {**TINY, "dataset": str(blobs)}
    text = "\n".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    (places / "queue.toml").write_text(TEXT.format(options=text))
    return Queue(places / "queue.toml")


def test_runs_and_the_better_model_come_back(queue: Queue, places: Path) -> None:
    runs, first, second = places / "runs", *queue.cells[:2]
    assert queue.to_train() == queue.cells
    for cell in (first, second):
        assert work(queue, cell, runs, places) == 0
        pack(queue, runs, places / cell.label)
        collect(queue, places / cell.label)
        assert queue.ended(cell, train_queue.PAPER)
    assert queue.to_train() == queue.cells[2:]
    seeds = {cell: best(train_queue.PAPER, cell) for cell in (first, second)}
    learner, state = gs.from_pretrained(SHARED)
    card = (places / "models" / SHARED / "README.md").read_text()
    better = max(seeds, key=lambda cell: seeds[cell])
    assert seeds[first] != seeds[second] and f"| seed | `{better.seed}` |" in card and 'license: "mit"' in card
    trained = gs.load_run(runs / better.label).best.tensors()
    for name, tensor in state.tensors().items():
        assert tensor.equal(trained[name].bfloat16().float() if "ghat" in name else trained[name]), name
    assert learner.steps == 2


def test_a_finished_experiment_without_a_model_is_trained_again(queue: Queue, places: Path) -> None:
    for cell in queue.cells:
        assert work(queue, cell, cell.home, places) == 0
    again = max(queue.cells[:2], key=lambda cell: best(train_queue.PAPER, cell))
    assert queue.to_train() == [again]
    assert work(queue, again, places / "runs", places) == 0
    pack(queue, places / "runs", places / "out")
    collect(queue, places / "out")
    assert queue.to_train() == [] and not (places / "earlier").exists()  # the run is the same as before


def test_evidence_has_a_folder_of_its_own_and_no_model(queue: Queue, places: Path) -> None:
    runs, cell = places / "runs", queue.cells[2]
    assert work(queue, cell, runs, places) == 0
    pack(queue, runs, places / "out")
    collect(queue, places / "out")
    assert queue.ended(cell, places / "evidence") and cell not in queue.to_train() and not (places / "models").exists()
    assert (
        gs.load_run(places / "evidence" / "cub-5shot-5task-maml-momentum" / "seed-0").config["inner"] == "momentum:0.9"
    )


def test_changed_data_sets_are_made_from_others(
    queue: Queue, blobs: Path, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADSHARE_DATA", str(places))
    plain = gs.load_dataset(blobs)
    made = {}
    for change in CHANGES:
        queue.data[change] = {"from": str(blobs), "change": change}
        assert train_queue.lacking(queue, change, places) == []
        train_queue.ensure_data(queue, change, places)
        made[change] = gs.load_dataset(change)
    counts = {name: [data.index.images, len(data.index.classes)] for name, data in made.items()}
    assert counts == {"rotated": [4 * 240 + 240, 60], "augmented": [4 * 240 + 240, 24], "webp40": [480, 24]}
    rows = plain.images[:20]
    assert (made["rotated"].images[20:40] == np.rot90(rows, 1, axes=(1, 2))).all()
    assert (made["augmented"].images[0] == rows[0]).all() and (made["augmented"].images[1] == rows[0][:, ::-1]).all()
    tests = [data.images[-240:] for data in (plain, made["rotated"], made["augmented"])]  # validation and test
    assert all((one == tests[0]).all() for one in tests[1:])
    difference = np.abs(made["webp40"].images.astype(int) - plain.images.astype(int))
    assert 0 < difference.mean() < 60


def test_every_cell_can_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(backends, "not_installed", lambda: None)
    queue = Queue(RESULTS / "queue.toml")
    assert len({cell.label for cell in queue.cells}) == len(queue.cells)
    assert {cell.part for cell in queue.cells} == set(train_queue.PARTS)
    for cell in queue.cells:
        config = queue.config(cell)
        assert choice_for(config).precision == config.precision, cell  # an error where the kernels cannot run it
        with torch.device("meta"):
            build_learner(config, IMAGE)
