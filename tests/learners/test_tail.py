"""Where the inner loop adapts the end of a module alone, as ANIL does, what comes before it runs once for a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradshare as gs
from gradshare.engine import vmapped
from gradshare.engine.conv4.cpu.first_block import Images

IMAGE = (1, 16, 16)


class Counting(nn.Module):
    """Counts how often the body runs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(256, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh())
        self.head = nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 5))
        self.runs = 0

    def into(self, x: Tensor) -> Tensor:
        self.runs += 1
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.into(x))


class Layers(nn.Sequential):
    """A module that is not quite an nn.Sequential."""


def layers(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    tanh = nn.Tanh()
    return kind(nn.Flatten(), nn.Linear(256, 6), tanh, tanh, nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5))


class Scaled(Counting):
    """Its outputs are not those of the head."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Twice(Counting):
    """Its head runs twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.head(torch.zeros_like(self.body(x)))


class Mixing(Counting):
    """What comes into its head depends on a weight of the head."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.into(x) @ self.head[0].weight)


def batch(seed: int, tasks: int = 3) -> gs.Episodes:
    draw = torch.Generator().manual_seed(seed)
    support, query = (torch.rand(tasks, n, *IMAGE, generator=draw, dtype=torch.float64) for n in (5, 10))
    return gs.Episodes(support, torch.arange(5).expand(tasks, -1), query, torch.arange(5).repeat(tasks, 2))


def masked(seed: int) -> gs.Episodes:
    one = batch(seed)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1, 4] = mask[2, 3] = False
    return gs.Episodes(one.support_x, one.support_y, one.query_x, one.query_y, support_mask=mask)


def results(learner: gs.Learner, batches: list[gs.Episodes], checkpoint: bool = False) -> list[Tensor]:
    """What two meta-iterations and a test give."""
    state, found = learner.init(), []
    optimiser = gs.optimiser(state, 1e-2)
    for episodes in batches:
        outcome = gs.meta_step(learner, state, optimiser, episodes, checkpoint=checkpoint)
        found += [outcome.losses, *(leaf.grad for leaf in state.trainable().values() if leaf.grad is not None)]
        found += [value for name, value in state.tensors().items() if name.startswith("memory")]
    with torch.no_grad():
        return [*found, learner.logits(state, batches[0], steps=7)]


def everything_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(vmapped.VmapBackend, "into_tail", lambda *_: None)
    patch.setattr(Images, "__init__", lambda self, x: vars(self).update(x=x, kept=None))


NETS: dict[str, Callable[[], nn.Module]] = {
    "Conv4": lambda: gs.Conv4(filters=3, image=IMAGE),
    "ResNet12": lambda: gs.ResNet12(5, (3, 3, 3, 3), IMAGE),
    "Sequential": layers,
    "Layers": partial(layers, Layers),
    **{kind.__name__: kind for kind in (Counting, Scaled, Twice, Mixing)},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": {"sharing": gs.GradientSharing()},
    "adam": {"sharing": gs.GradientSharing("tensor"), "inner": "adam"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("net", NETS)
def test_the_result_is_that_of_computing_all_in_every_step(
    net: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = NETS[net]().double()
    batches = [batch(0), batch(1)] if net == "Conv4" else [batch(0), masked(1)]
    last = ["4", "6"] if isinstance(model, nn.Sequential) else ["head"]
    ways = [
        (gs.anil, {"head": last[-1]}),
        (gs.maml_plus_plus, {"adapt": last, "multi_step_epochs": 1}),  # batch norm has a gain for each step
    ]
    for make, more in ways:
        learner = make(model, steps=3, **OPTIONS[options], **more)  # type: ignore[operator]
        found = [results(learner, batches, checkpoint) for checkpoint in (False, True)]
        with monkeypatch.context() as patch:
            everything_again(patch)
            expected = results(make(model, steps=3, **OPTIONS[options], **more), batches)  # type: ignore[operator]
        for one in found:
            torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("kind", "runs"), [(Counting, 2), (Scaled, 6), (Twice, 6), (Mixing, 6)])
def test_how_often_the_body_runs(kind: type[Counting], runs: int) -> None:
    learner = gs.anil(kind().double(), head="head", steps=5)
    state = learner.init()
    learner.outer_loss(state, batch(0))  # looks whether the module ends with the head
    learner.module.runs = 0  # type: ignore[assignment]
    learner.outer_loss(state, batch(1))
    assert learner.module.runs == runs


@pytest.mark.parametrize(("kind", "runs"), [(nn.Sequential, 2), (Layers, 6)])
def test_how_often_the_first_layers_run(kind: type[nn.Sequential], runs: int) -> None:
    learner = gs.maml(layers(kind).double(), adapt=["4", "6"], steps=5)
    state, seen = learner.init(), []
    learner.outer_loss(state, batch(0))
    learner.module[1].register_forward_hook(lambda *_: seen.append(1))  # type: ignore[index, operator]
    learner.outer_loss(state, batch(1))
    assert len(seen) == runs


def test_maml_computes_all_in_every_step() -> None:
    learner = gs.maml(Counting().double(), steps=5)
    learner.outer_loss(learner.init(), batch(0))
    assert learner.module.runs == 6


def test_compiled_programs_are_not_made_for_a_head_alone() -> None:
    learner = gs.anil(Counting(), head="head").to("cpu", "bf16")
    share = learner.programs_share(torch.rand(1, 5, *IMAGE), torch.arange(5)[None])
    assert share == "none: an inner step runs head alone"
