"""Training on a GPU, recorded as a CUDA graph, is training operation by operation. Needs a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gradshare as gs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SMALL: dict[str, Any] = dict(
    epochs=3, iterations=4, ways=3, shots=1, queries=2, tasks=4, val_tasks=4, test_tasks=4, eval_batch=2, display=False
)
OPTIMISERS: dict[str, dict[str, Any]] = {
    "ours": {},
    "SGD": {"optimiser": lambda leaves: torch.optim.SGD(leaves.values(), lr=0.01, momentum=0.9)},
    "AdamW": {"optimiser": lambda leaves: torch.optim.AdamW(leaves.values(), lr=0.01, capturable=True)},
    "parts": {"micro_batch": 3},
    "checkpoint": {"checkpoint": True},
    "inductive": {"norm_statistics": "support"},
}


def learner() -> gs.Learner:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    return gs.maml(nn.Sequential(*layers).double(), steps=2, sharing=gs.GradientSharing())


def source() -> gs.TaskSource:
    numbers = np.random.default_rng(0)
    return gs.tasks(torch.from_numpy(numbers.normal(size=(120, 6))), np.arange(120) % 12, splits=(6, 3, 3))


@pytest.mark.parametrize("options", OPTIMISERS.values(), ids=OPTIMISERS)
def test_a_recorded_run_is_the_run(options: dict[str, Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {**SMALL, **options, "device": "cuda"}
    if "optimiser" in options:
        given["schedule"] = lambda epoch: 0.5**epoch
    runs = [gs.train(learner(), source(), tmp_path / engine, engine=engine, **given) for engine in ("eager", "graph")]
    for eager, graph in zip(runs[0].metrics, runs[1].metrics, strict=True):
        for name in ("train_loss", "val_loss"):
            assert graph[name] == pytest.approx(eager[name], rel=1e-7)
    gs.train(learner(), source(), tmp_path / "resumed", engine="graph", **{**given, "epochs": 2})
    resumed = gs.train(learner(), source(), tmp_path / "resumed", engine="graph", resume=True, **given)
    assert resumed.metrics[-1]["val_loss"] == pytest.approx(runs[1].metrics[-1]["val_loss"], rel=1e-7)
    tested = gs.evaluate(resumed, tasks=4)
    assert tested.loss == pytest.approx(resumed.summary["test"]["best"]["loss"], rel=1e-6)
