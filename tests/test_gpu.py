"""The same on a GPU. Run on one with: pytest tests/test_gpu.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_identities import every_algorithm, every_sharing, gradients, net, randomised, tasks
from test_training import TINY, learner

import gradshare as gs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@every_algorithm
@every_sharing
@pytest.mark.parametrize("backbone", ["user", "conv4"])
def test_the_gpu_gives_the_same_meta_gradients(algorithm: Any, sharing: Any, backbone: str) -> None:
    model = net() if backbone == "user" else gs.Conv4(ways=3, filters=4, image=(1, 16, 16)).double()
    episodes = tasks() if backbone == "user" else large_tasks()
    on_cpu = algorithm(model, steps=3, sharing=sharing)
    on_gpu, state = on_cpu.to("cuda"), randomised(on_cpu.init())
    for _ in range(2):
        expected, expected_gradients = gradients(on_cpu, state, episodes)
        found, found_gradients = gradients(on_gpu, state.to("cuda"), episodes.to("cuda"))
        assert found.loss.is_cuda
        torch.testing.assert_close(found.loss.cpu(), expected.loss, rtol=1e-10, atol=0)
        for name, gradient in expected_gradients.items():
            scale = gradient.abs().max().item() + 1e-12
            torch.testing.assert_close(found_gradients[name].cpu(), gradient, rtol=0, atol=1e-9 * scale + 1e-14)
        state.memory = expected.memory


def large_tasks() -> gs.Episodes:
    small = tasks()
    grow = (1, 1, 1, 2, 2)
    return gs.Episodes(small.support_x.repeat(grow), small.support_y, small.query_x.repeat(grow), small.query_y)


def test_tasks_drawn_on_the_gpu_are_the_same(dataset: gs.Dataset) -> None:
    here, there = (source.sample("train", gs.Shape(5, 2, 7), 3, (1, 2)) for source in (dataset, dataset.to("cuda")))
    assert there.query_x.is_cuda and there.support_y.is_cuda
    assert torch.equal(here.support_x, there.support_x.cpu()) and torch.equal(here.query_y, there.query_y.cpu())


def test_training_on_the_gpu_follows_the_cpu(dataset: gs.Dataset, tmp_path: Path) -> None:
    on_cpu = gs.train(learner(), dataset, tmp_path / "cpu", **TINY)
    on_gpu = gs.train(learner(), dataset.to("cuda"), tmp_path / "gpu", device="cuda", **TINY)
    for here, there in zip(on_cpu.metrics, on_gpu.metrics, strict=True):
        assert there["train_loss"] == pytest.approx(here["train_loss"], rel=1e-2)
    again = gs.train(learner(), dataset.to("cuda"), tmp_path / "gpu", device="cuda", resume=True, **TINY)
    assert again.summary == on_gpu.summary
