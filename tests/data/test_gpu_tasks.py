"""Drawing tasks on a GPU: the same tasks as on a CPU, and the CPU never waits for the GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gradshare as gs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
X, Y = torch.randn(400, 3, 8), np.arange(400) % 20


def sources(dataset: gs.Dataset) -> list[Any]:
    by_class = gs.tasks({"a": X, "b": X.double().numpy()}, Y)
    by_group = gs.tasks(X.numpy(), np.random.default_rng(0).normal(size=(400, 2)), groups=Y)
    return [dataset, gs.tasks(X, Y), by_class, by_group]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("number", range(4))
def test_tasks_are_the_same_and_drawn_without_waiting(dataset: gs.Dataset, number: int) -> None:
    source, shape = sources(dataset)[number], gs.Shape(3, 2, 5)
    moved = source.to("cuda")
    moved.sample("train", shape, 4, (0,))  # makes what is made once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = moved.sample("train", shape, 4, (1, 2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = source.sample("train", shape, 4, (1, 2))
    for one, other in zip(found.tensors(), expected.tensors(), strict=True):
        assert one.is_cuda and one.dtype == other.dtype
        torch.testing.assert_close(one.cpu(), other)


def test_train_moves_its_data_once(tmp_path: Any) -> None:
    source, learner = gs.tasks(X, Y), gs.maml(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(24, 3)), steps=1)
    options: dict[str, Any] = {"ways": 3, "queries": 3, "tasks": 2, "val_tasks": 2, "test_tasks": 2, "iterations": 3}
    runs = [
        gs.train(learner, source, tmp_path / device, device=device, epochs=1, display=False, **options)  # type: ignore[arg-type]
        for device in ("cpu", "cuda")
    ]
    losses = [run.metrics[0]["train_loss"] for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
