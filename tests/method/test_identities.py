"""Properties that hold for every algorithm, whatever the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradshare as gs
from tests.support.learners import (
    ALGORITHMS,
    SHARINGS,
    every_algorithm,
    every_sharing,
    gradients,
    net,
    randomised,
    tasks,
)
from tests.support.steps import together


@every_algorithm
def test_a_closed_gate_is_the_original(algorithm: Any) -> None:
    original, shared = algorithm(net(), steps=3), algorithm(net(), steps=3, sharing=gs.GradientSharing())
    state = shared.init()
    with torch.no_grad():
        state.learned["sharing"]["lam"].fill_(-800.0)  # sig(-800) = 0 exactly
    plain, plain_gradients = gradients(original, original.init(), tasks())
    closed, closed_gradients = gradients(shared, state, tasks())
    assert torch.equal(plain.loss, closed.loss)
    for name, gradient in plain_gradients.items():
        torch.testing.assert_close(closed_gradients[name], gradient, rtol=1e-12, atol=1e-14)


@every_sharing
def test_constant_rates_make_all_second_order_algorithms_equal(sharing: Any) -> None:
    maml, meta_sgd = (make(net(), steps=3, sharing=sharing) for make in (gs.maml, gs.meta_sgd))
    plus_plus = gs.maml_plus_plus(net(), steps=3, sharing=sharing, multi_step_epochs=0, per_step_norm=False)
    expected, expected_gradients = gradients(maml, maml.init(), tasks())
    for learner in (meta_sgd, plus_plus):
        out, found = gradients(learner, learner.init(), tasks())
        torch.testing.assert_close(out.loss, expected.loss, rtol=1e-13, atol=0)
        for name, gradient in expected_gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    ("algorithm", "sharing"),
    [*((one, SHARINGS["global"]) for one in ALGORITHMS.values()), *((gs.maml, one) for one in SHARINGS.values())],
)
def test_permuting_tasks_permutes_results(algorithm: Any, sharing: Any) -> None:
    learner, episodes, order = algorithm(net(), steps=2, sharing=sharing), tasks(), torch.tensor([2, 0, 3, 1])
    state = randomised(learner.init())
    state.memory = learner.outer_loss(state, tasks(seed=7)).memory
    out, found = gradients(learner, state, episodes)
    permuted, found_permuted = gradients(learner, state, episodes[order])  # type: ignore[index]
    torch.testing.assert_close(permuted.losses, out.losses[order], rtol=1e-11, atol=0)
    assert torch.equal(permuted.accuracy, out.accuracy[order])
    for name, gradient in found.items():
        torch.testing.assert_close(found_permuted[name], gradient, rtol=1e-8, atol=1e-12)
    fast = learner.adapt(state, episodes.support_x, episodes.support_y)
    moved = learner.adapt(state, episodes.support_x[order], episodes.support_y[order])
    for name, weights in fast.items():
        torch.testing.assert_close(moved[name], weights[order], rtol=1e-11, atol=1e-14)


def test_one_inner_step_by_hand() -> None:
    model = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(2.0)
    x = torch.tensor([[[1.0]], [[3.0]]], dtype=torch.float64)
    y = torch.tensor([[[1.0]], [[0.0]]], dtype=torch.float64)
    # loss (w x - y)^2, so G = 2 x (w x - y) = (2, 36); the sum is 38, g = 1, and D = (1/2)(1) + (1/2) G = (1.5, 18.5)
    learner = gs.maml(model, inner_lr=0.1, steps=1, sharing=gs.GradientSharing(), loss="mse")
    state, episodes = learner.init(), gs.Episodes(x, y, x, y)
    out = learner.outer_loss(state, episodes)
    adapted = torch.tensor([2 - 0.15, 2 - 1.85], dtype=torch.float64)
    torch.testing.assert_close(out.losses, (adapted * x.flatten() - y.flatten()).square())
    assert out.memory["sharing"]["ghat"]["weight"].item() == 1.0 and out.memory["sharing"]["seen"].item()
    assert out.accuracy is None


def test_memory_after_two_iterations_is_the_moving_average() -> None:
    learner = gs.maml(net(), steps=3, sharing=gs.GradientSharing())
    state = learner.init()
    with torch.no_grad():
        state.learned["sharing"]["m"].copy_(torch.tensor([-1.0, 0.0, 2.0]))
    first = learner.outer_loss(state, tasks(seed=1)).memory["sharing"]["ghat"]
    memory = learner.outer_loss(state, tasks(seed=1)).memory
    state.memory = memory
    second = learner.outer_loss(state, tasks(seed=2)).memory["sharing"]["ghat"]
    # The first step's gradients do not depend on the memory: there g_2 is what a run without memory sees.
    fresh = learner.outer_loss(learner.init(), tasks(seed=2)).memory["sharing"]["ghat"]
    keep = torch.sigmoid(torch.tensor(-1.0, dtype=torch.float64))
    for name, ghat in second.items():
        torch.testing.assert_close(ghat[0], keep * fresh[name][0] + (1 - keep) * first[name][0], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("norm", ["global", "tensor"])
def test_the_shared_gradient_has_length_one(norm: Any) -> None:
    learner = gs.maml(net(), steps=2, sharing=gs.GradientSharing(norm))
    ghat = learner.outer_loss(learner.init(), tasks()).memory["sharing"]["ghat"]
    squares = torch.stack([value.flatten(1).square().sum(1) for value in ghat.values()])
    lengths = squares.sum(0) if norm == "global" else squares
    torch.testing.assert_close(lengths, torch.ones_like(lengths))


@every_algorithm
def test_m_has_no_gradient_at_the_first_iteration_and_some_at_the_second(algorithm: Any) -> None:
    learner = algorithm(net(), steps=2, sharing=gs.GradientSharing())
    state = learner.init()
    out, found = gradients(learner, state, tasks())
    assert found["learned/sharing/m"].abs().max() == 0 and found["learned/sharing/lam"].abs().min() > 0
    state.memory = out.memory
    assert gradients(learner, state, tasks(seed=2))[1]["learned/sharing/m"].abs().min() > 0


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_tiny_and_huge_gradients_are_normalised(size: float) -> None:
    sizes = torch.tensor([3.0 * size, 4.0 * size], dtype=torch.float64)
    gradients = {"a": torch.stack([sizes[:1], 0 * sizes[:1]]), "b": torch.stack([0 * sizes[1:], sizes[1:]])}
    rule = gs.share_gradients()
    learned, memory = rule.init({name: value[0] for name, value in gradients.items()}, 1)
    _, ghat = together(rule, gradients, learned, memory, 0)
    torch.testing.assert_close(torch.cat([ghat["a"], ghat["b"]]), torch.tensor([0.6, 0.8], dtype=torch.float64))
