"""The same on a GPU. Run on one with: pytest tests/test_gpu.py"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from test_identities import every_algorithm, every_sharing, gradients, net, randomised, tasks
from test_training import TINY, learner

import gradshare as gs
from gradshare.graphs import GraphedStep

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


@contextmanager
def default_dtype(kind: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(kind)
    yield
    torch.set_default_dtype(before)


def large_tasks() -> gs.Episodes:
    small = tasks()
    grow = (1, 1, 1, 2, 2)
    return gs.Episodes(small.support_x.repeat(grow), small.support_y, small.query_x.repeat(grow), small.query_y)


def test_tasks_drawn_on_the_gpu_are_the_same(dataset: gs.Dataset) -> None:
    here, there = (source.sample("train", gs.Shape(5, 2, 7), 3, (1, 2)) for source in (dataset, dataset.to("cuda")))
    assert there.query_x.is_cuda and there.support_y.is_cuda
    torch.testing.assert_close(here.support_x, there.support_x.cpu(), rtol=2e-7, atol=0)  # a GPU rounds x / 255 its way
    assert torch.equal(here.query_y, there.query_y.cpu())


@every_algorithm
def test_a_recorded_step_is_the_step(algorithm: Any, dataset: gs.Dataset) -> None:
    model = gs.Conv4(ways=3, filters=4, image=(1, 16, 16)).double()
    with default_dtype(torch.float64):
        batches = [dataset.sample("train", gs.Shape(3, 1, 3), 2, (number,)).to("cuda") for number in range(6)]
    graphed, eager = (algorithm(model, steps=2, sharing=gs.GradientSharing()).to("cuda") for _ in range(2))
    states = [learner.init().to("cuda") for learner in (graphed, eager)]
    optimisers = [gs.optimiser(state, 1e-3) for state in states]
    step = GraphedStep(graphed, states[0], optimisers[0])
    for episodes in batches:
        found, expected = step(episodes), gs.meta_step(eager, states[1], optimisers[1], episodes)
        torch.testing.assert_close(found.loss, expected.loss.detach(), rtol=1e-9, atol=0)
    for name, tensor in states[1].tensors().items():
        torch.testing.assert_close(states[0].tensors()[name], tensor, rtol=1e-6, atol=1e-9, msg=name)


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_training_on_the_gpu_follows_the_cpu(dataset: gs.Dataset, tmp_path: Path, engine: Any) -> None:
    on_cpu = gs.train(learner(), dataset, tmp_path / "cpu", **TINY)
    on_gpu = gs.train(learner(), dataset.to("cuda"), tmp_path / "gpu", device="cuda", engine=engine, **TINY)
    for here, there in zip(on_cpu.metrics, on_gpu.metrics, strict=True):
        assert there["train_loss"] == pytest.approx(here["train_loss"], rel=0.05)  # float32, and small nets on noise
    again = gs.train(learner(), dataset.to("cuda"), tmp_path / "gpu", device="cuda", engine=engine, resume=True, **TINY)
    assert again.summary == on_gpu.summary
