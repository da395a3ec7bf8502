"""Numbers that are not finite: what tasks share stays finite, and a meta-step that is not finite is not taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradshare as gs
from gradshare.learners.optimisers import optimiser_tensors
from gradshare.method.rules import InnerRule
from tests.support.runs import Poisoned, learner
from tests.support.steps import together

RULES: dict[str, Callable[[], InnerRule]] = {
    "global": lambda: gs.share_gradients("global"),
    "tensor": lambda: gs.share_gradients("tensor"),
    "batch only": lambda: gs.BatchOnly().rule(),
    "memory only": lambda: gs.MemoryOnly().rule(),
    "conditioned": lambda: gs.GradientSharing(conditioned=True).rule(),
}
every_rule = pytest.mark.parametrize("rule", [make() for make in RULES.values()], ids=RULES)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# One task


@every_rule
@pytest.mark.parametrize("seen", [False, True])
def test_a_diverging_task_leaves_what_all_share_finite(rule: InnerRule, seen: bool) -> None:
    clean = {"w": drawn(5, 6), "b": drawn(5, 2, seed=1)}
    for broken in (torch.nan, torch.inf, -torch.inf):
        own = {name: gradient.clone() for name, gradient in clean.items()}
        own["w"][3, 1:3] = broken
        own["b"][3] = broken
        dropped = {name: torch.where(gradient.isfinite(), gradient, 0.0) for name, gradient in own.items()}
        learned, memory = rule.init({"w": drawn(6), "b": drawn(2)}, 2)
        memory["ghat"] = {"w": drawn(2, 6, seed=2), "b": drawn(2, 2, seed=3)}
        memory["seen"] = torch.tensor(seen)
        leaves = {name: gradient.requires_grad_() for name, gradient in own.items()}
        direction, running = together(rule, leaves, learned, memory, 1)
        expected, without = together(rule, dropped, learned, memory, 1)
        others = [0, 1, 2, 4]
        for name in own:
            assert torch.equal(running[name], without[name])
            assert torch.equal(direction[name][others], expected[name][others])
            assert torch.equal(direction[name].isfinite(), own[name].isfinite()), "the task itself stays honest"
        gradients = torch.autograd.grad(sum(running[name].square().sum() for name in own), list(leaves.values()))
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert all((gradient[~own[name].isfinite()] == 0).all() for name, gradient in zip(own, gradients, strict=True))


@every_rule
def test_a_sum_too_large_for_a_number_is_still_a_direction(rule: InnerRule) -> None:
    large = torch.tensor([[3e38, -3e38, 1e38, 0.0]]).repeat(5, 1)
    large[3:, 2] = -1e38
    learned, memory = rule.init({"w": drawn(4)}, 1)
    _, running = together(rule, {"w": large}, learned, memory, 0)
    assert running["w"].norm().item() == pytest.approx(1)
    assert running["w"][0] > 0.5 and running["w"][1] < -0.5 and running["w"][3] == 0
    mixed = torch.cat([large[:2], -large[:2]])  # partial sums of both signs
    assert together(rule, {"w": mixed}, learned, memory, 0)[1]["w"].isfinite().all()


# One meta-step


def adams(state: gs.MetaState) -> dict[str, torch.optim.Adam]:
    """As on a CPU, and as on a GPU: fused."""
    leaves = list(state.trainable().values())
    return {"plain": gs.optimiser(state, 1e-2), "fused": torch.optim.Adam(leaves, lr=torch.tensor(1e-2), fused=True)}


def everything(state: gs.MetaState, adam: torch.optim.Adam) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in {**state.tensors(), **optimiser_tensors(state, adam)}.items()}


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("sharing", [None, gs.GradientSharing(), gs.MemoryOnly()], ids=["alone", "shared", "memory"])
def test_a_step_that_is_not_finite_is_not_taken(dataset: gs.Dataset, kind: str, sharing: Any) -> None:
    one = learner(sharing=sharing)
    state, other = one.init(0), one.init(0)
    adam, straight = adams(state)[kind], adams(other)[kind]
    poisoned = Poisoned(dataset, "train", lambda batch: batch in (1, 2))
    for batch in range(5):
        before = everything(state, adam)
        episodes = poisoned.sample("train", gs.Shape(3, 1, 3), 3, (0, 0, batch))
        outcome = gs.meta_step(one, state, adam, episodes, clamp=10.0)
        assert outcome.fault is not None and outcome.taken.item() is (batch not in (1, 2))
        assert outcome.losses.isfinite().tolist() == [True, True, batch not in (1, 2)]
        after = everything(state, adam)
        assert after.keys() >= before.keys()
        same = [name for name in before if torch.equal(before[name], after[name])]
        if batch in (1, 2):
            assert outcome.fault == 1, "the loss comes first"
            assert same == list(before)
        else:
            assert len(same) < len(before)
            gs.meta_step(one, other, straight, episodes, clamp=10.0)
    left_out, never_drawn = everything(state, adam), everything(other, straight)
    assert all(torch.equal(left_out[name], tensor) for name, tensor in never_drawn.items())


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_a_gradient_too_large_for_adam_is_not_taken(kind: str) -> None:
    def steep(outputs: Tensor, targets: Tensor) -> Tensor:
        return 1e25 * (outputs - targets).square().mean()

    one = gs.maml(nn.Linear(2, 1), inner_lr=1e-30, steps=1, loss=steep)
    state = one.init()
    x, y = drawn(3, 4, 2), drawn(3, 4, 1, seed=1)
    adam = adams(state)[kind]
    outcome = gs.meta_step(one, state, adam, gs.Episodes(x, y, x, y))
    assert outcome.loss.isfinite() and outcome.fault == 2  # the first leaf: its squares would be infinite
    assert all(value.isfinite().all() for value in everything(state, adam).values())
