"""--backbone and --start: networks of ours and of a user's own, trained, resumed, compared, tested, exported.

The name of a user's own network is recorded, and imported only if it is given on the command line.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch

import gradshare as gs
from gradshare.engine import backends
from gradshare.errors import LineWarning
from gradshare.runs import build
from gradshare.runs.build import build_learner, build_network, check_memory_for, choice_for
from gradshare.runs.config import BACKBONES, RunConfig
from tests.support.commands import SMALL, call, mistake, train_here

OWN = "my_nets:Mine"
MODULE = """
import gradshare as gs
from torch import nn

class Mine(nn.Sequential):
    def __init__(self, ways, image):
        channels, height, width = image
        super().__init__(nn.Flatten(), nn.Linear(channels * height * width, 4), nn.Tanh(), nn.Linear(4, ways))

def factory(ways, image):
    return gs.ResNet12(ways, (2, 2, 3, 3), image)  # a function does as well

def without_image(ways):
    return nn.Linear(ways, ways)

def nothing(ways, image):
    return ways
"""
FILTERS = SMALL.index("--filters")
TINY = [*SMALL[:FILTERS], *SMALL[FILTERS + 2 :], "--epochs", "1", "--iterations", "2"]


def forget() -> None:
    sys.modules.pop("my_nets", None)


def imported() -> bool:
    return "my_nets" in sys.modules


def test_a_network_of_ones_own_from_training_to_export(blobs: Path, place: Path) -> None:
    words = ["train", "--dataset", str(blobs), *TINY, "--backbone", OWN]
    call(*words, "--out", "run")
    call(*words, "--out", "again")
    assert json.loads(Path("run/config.json").read_text())["backbone"] == OWN
    assert Path("run/metrics.jsonl").read_bytes() == Path("again/metrics.jsonl").read_bytes()  # weights by the seed
    initial = [build_learner(RunConfig(backbone=OWN, seed=seed), (1, 16, 16), {OWN}).init() for seed in (0, 1)]
    assert not torch.equal(*(state.params["1.weight"] for state in initial))

    forget()
    assert OWN in mistake("train", "--resume", "run", "--epochs", 2)
    assert OWN in mistake("train", "--resume", "run", "--epochs", 2, "--backbone", "vit")
    assert OWN in mistake("test", "run")
    with pytest.raises(gs.UserError, match=OWN):
        gs.load_run("run").learner()
    call("export", "run", "model")
    assert OWN in Path("model/README.md").read_text()
    with pytest.raises(gs.UserError, match="hand over the learner"):
        gs.from_pretrained("model")
    assert not imported()

    call("train", "--resume", "run", "--epochs", 2, "--backbone", OWN)
    assert "over 6 test tasks" in call("test", "run", "--tasks", 6, "--backbone", OWN).out
    learner, state = gs.from_pretrained("model", gs.load_run("run").learner(allowed={OWN}))
    assert learner.adapt(state, torch.rand(1, 3, 1, 16, 16), torch.arange(3)[None])

    forget()
    Path("my_nets.py").unlink()
    call("report", "run")
    assert f"with {OWN}" in Path("run/report.html").read_text() and not imported()


def test_comparisons_and_grids(blobs: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--dataset", str(blobs), *TINY, "--backbone", OWN]
    train_here(monkeypatch)
    call("compare", *options, "--out", "compare")
    weights = {name: weight.clone() for name, weight in gs.load_run("compare/shared").best.params.items()}
    safetensors.torch.save_file(weights, "start.safetensors")
    grid = ["grid", "run", "cub-5shot-5task-maml", *options, "--shots", 1, "--out", "grid"]
    call(*grid, "--start", "start.safetensors")
    config = gs.load_run("grid/cub-5shot-5task-maml/seed-0").run_config
    assert (config.backbone, config.start) == (OWN, str(place / "start.safetensors"))
    assert "missing" in mistake(*grid[:-1], "other", "--start", "missing")
    assert "all 1" in call("grid", "list", *grid[2:-2]).out  # times the real training


@pytest.mark.parametrize(("backbone", "words"), [("vit", "vision transformer"), ("resnet12", "ResNet-12")])
def test_networks_of_ours_from_a_file_to_a_model_that_needs_no_code(
    backbone: str, words: str, blobs: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "ViT", partial(gs.ViT, width=8, depth=1, heads=2))
    monkeypatch.setattr(build, "ResNet12", partial(gs.ResNet12, widths=(2, 3, 4, 5)))
    torch.save(build_network(RunConfig(backbone=backbone, ways=7), (1, 16, 16)).state_dict(), "pretrained.pt")
    sizes = {"ways": 3, "queries": 1, "tasks": 2, "steps": 1, "epochs": 1, "iterations": 1, "val-tasks": 0}
    options = [
        word for name, value in {**sizes, "test-tasks": 0, "threads": 1}.items() for word in (f"--{name}", value)
    ]
    with pytest.warns(LineWarning, match=r"head.weight, head.bias begin as without pretrained.pt, .* is \[7, "):
        call("train", "--dataset", blobs, *options, "--backbone", backbone, "--start", "pretrained.pt", "--out", "run")
    Path("pretrained.pt").unlink()
    assert json.loads(Path("run/config.json").read_text())["start"] == "pretrained.pt"
    call("export", "run", "model")
    assert f"A {words} that learns" in Path("model/README.md").read_text()
    assert "filters" not in Path("model/README.md").read_text()
    learner, state = gs.from_pretrained("model")
    assert type(learner.module).__name__.lower() == backbone
    assert torch.equal(state.params["head.weight"], gs.load_run("run").best.params["head.weight"])
    assert "over 2 test tasks" in call("test", "run", "--tasks", 2).out  # without the file


def test_what_a_backbone_can_be(blobs: Path, place: Path) -> None:
    words = ["train", "--dataset", str(blobs), *TINY, "--out", "x", "--backbone"]
    for name, message in {
        "resnet": "conv4, resnet12, vit, or package.module:Class",
        "my_nets:Missing": "cannot be imported",
        "my_nets:without_image": "(ways, image)",
        "my_nets:nothing": "makes 3, not a torch.nn.Module",
    }.items():
        assert message in mistake(*words, name)
    assert "filters is 3, and only conv4" in mistake(*words, OWN, "--filters", 3)
    assert not Path("x").exists()
    small = build_learner(RunConfig(backbone="my_nets:factory"), (1, 16, 16), {"my_nets:factory"})
    assert isinstance(small.module, gs.ResNet12)


def test_presets_of_other_papers() -> None:
    said = call("grid", "show", "conv64-cub-1shot-fomaml", "--tasks", 8).out
    assert "filters         64 " in said and "tasks           8           the command line" in said
    assert "conv64-cub-1shot-fomaml" in mistake("train", "--preset", "conv64-cub-1shot-formaml", "--out", "x")


@pytest.mark.parametrize("backbone", BACKBONES)
def test_backbones_of_ours(backbone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(backbone=backbone, ways=7)
    with torch.device("meta"):
        learner = build_learner(config, (1, 28, 28))
    assert type(learner.module).__name__.lower() == backbone
    assert learner.module.get_parameter("head.bias").shape == (7,)

    counted = []
    monkeypatch.setattr(build, "check_memory", lambda numbers, device: counted.append(numbers))
    check_memory_for(config, (1, 28, 28), "cpu")
    check_memory_for(replace(config, steps=config.steps + 1), (1, 28, 28), "cpu")
    adapted = sum(learner.module.get_parameter(name).numel() for name in learner.adapted)
    assert counted[1] - counted[0] == config.tasks * adapted

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(backends, "not_installed", lambda: None)
    line = str(choice_for(config))
    kernels = "our kernels in tf32" if backbone == "conv4" else "PyTorch's operations in float32, not our kernels"
    assert kernels in line and (backbone == "conv4" or backbone in line)
