"""Compiled programs on a GPU, and how exact each precision is. Needs a GPU: pytest tests/engine/test_traced_gpu.py"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradshare as gs
from gradshare.engine import convolution
from gradshare.learners.graphs import GraphedStep

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROOT = Path(__file__).parents[2]


def batch(seed: int, image: tuple[int, int, int] = (3, 32, 32)) -> gs.Episodes:
    draw = torch.Generator().manual_seed(seed)
    x, query = (torch.rand(3, n, *image, generator=draw) for n in (10, 20))
    return gs.Episodes(x, torch.arange(5).repeat(3, 2), query, torch.arange(5).repeat(3, 4))


def user_net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs in (3, 16):
        layers += [nn.Conv2d(inputs, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=2), nn.GroupNorm(4, 16), nn.GELU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 5))


NETS: dict[str, Any] = {
    "user": user_net,
    "ViT": lambda: gs.ViT(5, (3, 32, 32), patch=8, width=32, depth=2, heads=4),
    "ResNet12": lambda: gs.ResNet12(5, (8, 16, 16, 32), (3, 32, 32)),
}


def flat(learner: gs.Learner, state: gs.MetaState, episodes: gs.Episodes) -> Tensor:
    loss = learner.outer_loss(state, episodes).loss
    gradients = torch.autograd.grad(loss, list(state.trainable().values()), materialize_grads=True)
    return torch.cat([gradient.flatten().double() for gradient in gradients]).cpu()


@pytest.mark.parametrize(("precision", "most"), [("tf32", 0.02), ("bf16", 0.2)])
@pytest.mark.parametrize("net", NETS)
def test_the_meta_gradient_is_that_of_float64(net: str, precision: Any, most: float) -> None:
    options: dict[str, Any] = {"inner_lr": 0.01, "steps": 2, "sharing": gs.GradientSharing()}
    learner, exact = (gs.maml(model, **options) for model in (NETS[net](), NETS[net]().double()))
    state, wide = learner.init(0), exact.init()
    for name, tensor in wide.trainable().items():
        tensor.data.copy_(state.trainable()[name].data)
    expected = flat(exact, wide, batch(0).to("cpu", torch.float64))
    found = flat(learner.to("cuda", precision), state.to("cuda"), batch(0).to("cuda"))
    assert (found - expected).norm() < most * expected.norm()


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("streams", [1, 2])
def test_a_recorded_step_is_the_step(checkpoint: bool, streams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "STREAMS", streams)
    learner = gs.maml(user_net(), steps=2, sharing=gs.GradientSharing()).to("cuda", "tf32")
    states = [learner.init().to("cuda") for _ in range(2)]
    optimisers = [gs.optimiser(state, 1e-3) for state in states]
    step = GraphedStep(learner, states[0], optimisers[0], checkpoint=checkpoint)
    for seed in range(4):
        episodes = batch(seed).to("cuda")
        found, expected = step(episodes), gs.meta_step(learner, states[1], optimisers[1], episodes)
        torch.testing.assert_close(found.loss, expected.loss, rtol=2e-2, atol=0)


def test_with_checkpoint_memory_is_that_of_one_inner_step() -> None:
    peaks = {}
    for steps in (1, 5):
        learner = gs.maml(gs.ResNet12(5, (16, 32, 32, 64)), steps=steps).to("cuda", "bf16")
        state, episodes = learner.init(0).to("cuda"), batch(0, (3, 84, 84)).to("cuda")
        optimiser = gs.optimiser(state, 1e-3)
        gs.meta_step(learner, state, optimiser, episodes, checkpoint=True)  # compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gs.meta_step(learner, state, optimiser, episodes, checkpoint=True)
        peaks[steps] = torch.cuda.max_memory_allocated() - before
    assert peaks[5] < 1.3 * peaks[1], peaks


@pytest.mark.parametrize("number", range(4))
def test_tf32_is_as_exact_as_pytorchs(number: int) -> None:
    """The table of shared figures: medians over 20 seeds, relative to float64; at most 1.1 times PyTorch's TF32."""
    spec = importlib.util.spec_from_file_location("general", ROOT / "benchmarks" / "general.py")
    assert spec is not None and spec.loader is not None
    general = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(general)
    found = [general.errors(general.ROWS[number], seed, "cuda", ours=True) for seed in range(20)]
    medians = {name: median(one[name] for one in found) for name in found[0]}
    assert medians["our tf32"] <= 1.1 * medians["PyTorch TF32"], medians
    assert medians["PyTorch float32"] < medians["our tf32"] < medians["our bf16"], medians
