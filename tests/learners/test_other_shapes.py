"""Tasks at test that are not as in training: more or fewer inner steps, shots and ways; and a loss for each loop."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import gradshare as gs
from gradshare.method.adapt import adapt
from gradshare.method.rules import chain, scale, sum_of_tasks
from tests.support import reference
from tests.support.cases import ALGORITHMS, Case, build, randomised, same
from tests.support.models import RELU_NORM, TANH_NORM


def with_rows(state: Any, steps: int) -> Any:
    """The state that has this many rows of each value per step: the last one again past the last."""

    def rows(value: Tensor) -> Tensor:
        return torch.stack([value[min(k, len(value) - 1)] for k in range(steps)])

    state = copy.deepcopy(state)
    learned = state.learned
    for part in ("sharing", "rates", "per_step"):
        if part in learned and part != "rates":
            learned[part] = {name: rows(value) for name, value in learned[part].items()}
    if "rates" in learned and all(value.dim() == 1 and len(value) == 2 for value in learned["rates"].values()):
        learned["rates"] = {name: rows(value) for name, value in learned["rates"].items()}
    if "sharing" in state.memory:
        ghat = {name: rows(value) for name, value in state.memory["sharing"]["ghat"].items()}
        state.memory = {"sharing": {**state.memory["sharing"], "ghat": ghat}}
    return state


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("sharing", ["alone", "global", "conditioned, tensor", "gate only"])
@pytest.mark.parametrize("algorithm", ["maml", "maml++"])
def test_other_numbers_of_steps_use_the_last_row(algorithm: str, sharing: str, steps: int) -> None:
    case = build(TANH_NORM, algorithm, sharing, steps=2)
    state, tasks = randomised(case.learner.init()), TANH_NORM.tasks(2)
    state = dataclasses.replace(state, memory=case.learner.outer_loss(state, TANH_NORM.tasks(3, seed=5)).memory)
    fast = case.learner.adapt(state, tasks.support_x, tasks.support_y, steps=steps)
    logits = case.learner.logits(state, tasks, steps=steps)
    other, method = with_rows(state, steps), case.method._replace(steps=steps)
    for task in range(2):
        x, y, query = tasks.support_x[task], tasks.support_y[task], tasks.query_x[task]
        theta, expected = reference.adapt(case.model, other, x, y, query, method)
        wrong = [same(name, fast[name][task].detach(), theta[name].detach(), 1.0) for name in theta]
        wrong += [same("logits", logits[task].detach(), expected.detach(), 1.0)]
        wrong = [line for line in wrong if line and "bias" not in line]  # biases before batch norm are rounding alone
        assert not wrong, wrong


def test_steps_that_cannot_be() -> None:
    learner, tasks = gs.maml(TANH_NORM.make()), TANH_NORM.tasks(2)
    for steps in (0, -1, 2.0, True, 10**9):
        with pytest.raises(gs.UserError, match="steps is"):
            learner.logits(learner.init(), tasks, steps=steps)  # type: ignore[arg-type]


def test_many_steps_keep_the_weights_of_the_last_one() -> None:
    rule, start = chain(scale(0.25)), {"w": torch.ones(2, 3)}
    found = {
        total: adapt(start, lambda fast, k, graph: {"w": 2 * fast["w"]}, rule, {}, {}, steps=4, total=total)[0]
        for total in (None, sum_of_tasks)
    }
    assert [len(trajectory) for trajectory in found.values()] == [1, 4]
    assert torch.equal(found[None][-1]["w"], found[sum_of_tasks][-1]["w"])
    torch.testing.assert_close(found[None][-1]["w"], torch.full((2, 3), 0.5**4))


class Nearest(nn.Module):
    """A head that has as many outputs as it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))


def drawn(ways: int, shots: int) -> gs.Episodes:
    generator = torch.Generator().manual_seed(ways)
    x = torch.randn(2, 2, ways * shots, 4, generator=generator)
    y = torch.arange(ways).repeat(shots).expand(2, -1)
    return gs.Episodes(x[0], y, x[1], y)


def test_more_shots_fewer_ways_and_more_where_the_head_allows() -> None:
    learner = gs.maml(nn.Linear(4, 5), steps=2, sharing=gs.GradientSharing())
    state = learner.init()
    state.memory = learner.outer_loss(state, drawn(5, 1)).memory
    assert learner.logits(state, drawn(5, 7)).shape == (2, 35, 5)
    assert learner.logits(state, drawn(3, 2)).shape == (2, 6, 5)
    with pytest.raises(gs.UserError, match="labels go from 0 to 6, but the model has 5 outputs"):
        learner.logits(state, drawn(7, 1))
    wide = gs.maml(Nearest(), steps=1)
    assert wide.logits(wide.init(), drawn(8, 1)).shape == (2, 8, 8)


# A loss for each loop


def smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, label_smoothing=0.2)


def by_hand(case: Case, state: Any, tasks: gs.Episodes, inner: Any, outer: Any, rate: Any) -> Tensor:
    """MAML's outer loss for one inner step, task by task."""
    losses = []
    for t in range(tasks.tasks):
        theta = reference.start(case.model, state, tasks.support_x[t], tasks.support_y[t], case.method)

        def run(weights: Any, x: Tensor) -> Tensor:
            per_step = {name: value[0] for name, value in state.learned.get("per_step", {}).items()}
            return functional_call(copy.deepcopy(case.model).train(), {**state.params, **per_step, **weights}, (x,))

        loss = inner(run(theta, tasks.support_x[t]), tasks.support_y[t])
        gradients = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
        if case.method.first_order:
            gradients = tuple(gradient.detach() for gradient in gradients)
        moved = {name: w - rate(name) * g for (name, w), g in zip(theta.items(), gradients, strict=True)}
        losses.append(outer(run(moved, tasks.query_x[t]), tasks.query_y[t]))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("losses", [("cross_entropy", smooth), (smooth, "cross_entropy"), ("cross_entropy", None)])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_inner_loss_apart_from_the_outer_one(algorithm: str, losses: tuple[Any, Any]) -> None:
    loss, inner_loss = losses
    case = build(RELU_NORM._replace(loss=loss), algorithm, "alone", steps=1, inner_loss=inner_loss)
    state, tasks = randomised(case.learner.init()), RELU_NORM.tasks(2)
    outer, inner = (smooth if one is smooth else F.cross_entropy for one in (loss, inner_loss))
    rates = state.learned.get("rates", {})

    def rate(name: str) -> Any:
        return (rates[name][0] if algorithm == "maml++" else rates[name]) if rates else 0.1

    leaves = list(state.trainable().values())
    expected, found = by_hand(case, state, tasks, inner, outer, rate), case.learner.outer_loss(state, tasks).loss
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    ours, theirs = (torch.autograd.grad(one, leaves, materialize_grads=True) for one in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_an_inner_loss_on_other_targets() -> None:
    """An auxiliary target in the inner loop: support and query targets of different kinds."""
    x, y = torch.randn(2, 4, 3).double(), torch.randn(2, 4, 2).double()
    episodes = gs.Episodes(x, y, x, torch.randint(2, (2, 4)))
    learner = gs.maml(nn.Linear(3, 2).double(), inner_loss="mse")
    outcome = learner.outer_loss(learner.init(), episodes)
    assert outcome.accuracy is not None and outcome.loss.isfinite()
