"""Whole learners on the kernels: the slower cases; tests/engine/test_kernels_learner.py has the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradshare as gs
from gradshare.engine.conv4.triton import device
from tests.support.kernel_learners import (
    EVERY,
    SMALL,
    InDouble,
    another_eps_and_slope_and_frozen_norms,
    changed,
    check_batch,
    check_hard_inputs,
    check_meta_gradients_and_memory,
    dead_units,
    exactly,
    far_from_zero,
    frozen,
    in_float64,
    pair_of,
    start_of,
    unchanged,
)
from tests.support.kernel_tools import DEVICE, assert_near, in_few_programs, needs_interpreter, tasks_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    in_few_programs(monkeypatch)


@needs_interpreter
@pytest.mark.parametrize("name", ["maml++, conditioned", "meta-sgd, tensor", "zero head, global"])
def test_meta_gradients_and_memory_of_one_inner_step(name: str) -> None:
    check_meta_gradients_and_memory(*EVERY[name], steps=1)


def with_a_frozen_layer(model: gs.Conv4, **more: Any) -> gs.Learner:
    weight = frozen(model, "convs.1").convs[1].weight
    weight.data.copy_(torch.cos(torch.arange(weight.numel())).view(weight.shape) / 3)  # the same in both learners
    return gs.maml(model, **more)


SOME_ADAPTED: dict[str, Any] = {
    "boil": (gs.boil, gs.GradientSharing()),
    "by name": (lambda model, **more: gs.maml(model, adapt=["convs.2", "head"], **more), gs.GradientSharing("tensor")),
    "weights seen by name": (lambda model, **more: gs.alfa(model, adapt=["convs.3", "head"], **more), None),
    "a value for each step": (lambda model, **more: gs.maml_plus_plus(model, adapt="head", **more), gs.GateOnly()),
    "frozen": (with_a_frozen_layer, gs.GradientSharing()),
}


@needs_interpreter
@pytest.mark.parametrize("make, sharing", SOME_ADAPTED.values(), ids=SOME_ADAPTED)
def test_some_weights_are_not_adapted(make: Any, sharing: Any) -> None:
    assert pair_of(make, sharing)[0].network.fixed
    check_meta_gradients_and_memory(make, sharing, SMALL)


@needs_interpreter
def test_images_far_from_zero() -> None:
    check_hard_inputs(far_from_zero, lambda weights: None)


@needs_interpreter
def test_dead_units() -> None:
    check_hard_inputs(unchanged, dead_units)


@needs_interpreter
def test_another_loss() -> None:
    def squares(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - nn.functional.one_hot(targets, 2)).square().mean()

    check_batch(*pair_of(loss=squares))


@needs_interpreter
def test_adapted_weights_are_the_same_by_name_and_serve_either_path() -> None:
    learner, exact = pair_of(gs.maml_plus_plus, gs.GradientSharing())
    state, episodes = start_of(learner), tasks_of(2, 2, 2, 2, SMALL)
    with torch.no_grad():
        state.memory = learner.outer_loss(state, tasks_of(2, 2, 2, 2, SMALL, seed=1)).memory
        fast = learner.adapt(state, episodes.support_x, episodes.support_y)
        there = in_float64(episodes)
        expected = exact.adapt(exactly(state), there.support_x, there.support_y)
        assert fast.keys() == expected.keys()
        for name, weights in fast.items():
            assert not weights.requires_grad
            assert_near(weights, expected[name], 1e-5, scale=0.1, what=name)
        logits = learner.predict(fast, episodes.query_x)
        assert_near(logits, exact.predict(expected, there.query_x), 1e-5)
        exchanged = {name: weights.double().cpu() for name, weights in fast.items()}
        assert_near(logits, exact.predict(exchanged, there.query_x), 1e-5)
        support = learner.predict(fast, episodes.query_x, norm_statistics="support")
        assert_near(support, exact.predict(expected, there.query_x, norm_statistics="support"), 1e-5)
        assert_near(support[1], exact.module_for(expected, 1)(there.query_x[1]), 1e-5)
        assert_near(learner.logits(state, episodes, steps=3), exact.logits(exactly(state), there, steps=3), 1e-5)
    with torch.inference_mode():
        again = learner.adapt(state, episodes.support_x * 1, episodes.support_y)
        assert torch.equal(learner.predict(again, episodes.query_x * 1), logits)


@needs_interpreter
def test_evaluation(dataset: gs.Dataset) -> None:
    learner, exact = pair_of(sharing=gs.GradientSharing())
    state = start_of(learner)
    options = {"split": "val", "shape": gs.Shape(2, 1, 2), "tasks": 3, "batch": 2}
    found = gs.evaluate(learner, state, dataset, **options)
    expected = gs.evaluate(exact, exactly(state), InDouble(dataset), **options)
    assert_near(found.losses, expected.losses, 1e-5)
    assert found.accuracies is not None and torch.equal(found.accuracies.double().cpu(), expected.accuracies)


@needs_interpreter
def test_changes_that_the_kernels_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device.DOT, "tf32", "ieee")  # exact products: in such a small net rounding can change windows
    change = another_eps_and_slope_and_frozen_norms
    learner = gs.maml(changed(change), steps=1).to(DEVICE, "tf32")
    check_batch(learner, gs.maml(changed(change).double(), steps=1))
