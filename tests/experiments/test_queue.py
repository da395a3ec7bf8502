"""results/train_queue.py: the cells that are to be trained on a GPU, and where their runs go."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gradshare.engine import backends
from gradshare.experiments.presets import IMAGE
from gradshare.runs.build import build_learner, choice_for

RESULTS = Path(__file__).resolve().parents[2] / "results"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("train_queue", RESULTS / "train_queue.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_queue", module)  # its dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def test_every_cell_can_run_on_a_gpu(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(backends, "not_installed", lambda: None)
    queue = script.Queue(RESULTS / "queue.toml")
    assert len({cell.label for cell in queue.cells}) == len(queue.cells)
    assert {cell.part for cell in queue.cells} == set(script.PARTS)
    for cell in queue.cells:
        config = queue.config(cell)
        assert choice_for(config).precision == config.precision, cell  # an error where the kernels cannot run it
        with torch.device("meta"):
            build_learner(config, IMAGE)


def test_a_run_is_collected_in_the_folder_of_its_part(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = {part: tmp_path / home.name for part, home in script.PARTS.items()}
    for name, value in {
        "PARTS": homes,
        "PAPER": tmp_path / "paper",
        "EARLIER": tmp_path / "earlier",
        "COLLECTED": tmp_path / "collected",
        "MODELS": tmp_path / "models",
        "STATE": tmp_path / "state",
    }.items():
        monkeypatch.setattr(script, name, value)
    queue = script.Queue(RESULTS / "queue.toml")
    cells = [next(cell for cell in queue.cells if cell.part == part) for part in script.PARTS]
    for cell in cells:
        for at in (tmp_path / "runs", tmp_path / "runs" / "models"):
            (at / cell.label).mkdir(parents=True)
            (at / cell.label / "config.json").write_text(cell.label)
    files = [*(tmp_path / "runs").rglob("config.json")]
    (tmp_path / "out").mkdir()
    script.write_parts(tmp_path / "out", script.FINISHED, script.tar_of(files, tmp_path / "runs", "w:gz"))
    script.collect(queue, tmp_path / "out")
    for cell in cells:
        for at in (homes[cell.part], tmp_path / "models"):
            assert (at / cell.label / "config.json").read_text() == cell.label
    assert homes["evidence"].name == "evidence" and script.collected() == {cell.label for cell in cells}
