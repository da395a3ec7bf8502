"""Data, states and losses that do not fit a learner: told in a sentence, never taken for something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradshare as gs

TASKS, EXAMPLES = 3, 4
CLASSES = (torch.arange(EXAMPLES) % 2).expand(TASKS, -1)


def linear(outputs: int = 2, **options: Any) -> gs.Learner:
    torch.manual_seed(0)
    return gs.maml(nn.Linear(5, outputs), **options)


def batch(targets: Tensor = CLASSES, kind: torch.dtype = torch.float32) -> gs.Episodes:
    generator = torch.Generator().manual_seed(1)
    support, query = torch.rand(2, TASKS, EXAMPLES, 5, generator=generator).to(kind)
    return gs.Episodes(support, targets, query, targets)


def refusal(call: Callable[[], Any]) -> str:
    with pytest.raises(gs.UserError) as refused:
        call()
    return str(refused.value)


def test_regression_takes_targets_with_and_without_a_last_axis() -> None:
    learner, y = linear(1, loss="mse", inner_lr=0.0, steps=1), torch.rand(TASKS, EXAMPLES)
    state, episodes = learner.init(0), batch(y)
    outputs = learner.module(episodes.query_x).squeeze(-1)
    expected = (outputs - y).square().mean()
    for targets in (y, y.unsqueeze(-1)):
        torch.testing.assert_close(learner.outer_loss(state, batch(targets)).loss, expected)


@pytest.mark.parametrize("outputs, targets", [(2, (TASKS, EXAMPLES)), (1, (TASKS, EXAMPLES, 3))])
def test_regression_with_targets_of_another_shape(outputs: int, targets: tuple[int, ...]) -> None:
    learner = linear(outputs, loss="mse")
    message = refusal(lambda: learner.outer_loss(learner.init(0), batch(torch.rand(targets))))
    assert f"the outputs are [4, {outputs}] a task, and the targets {list(targets[1:])}" in message


def test_classes_are_whole_numbers_and_probabilities_have_an_axis_of_classes() -> None:
    learner = linear()
    message = refusal(lambda: learner.outer_loss(learner.init(0), batch(CLASSES.float())))
    assert "cross_entropy takes classes as whole numbers, not float32" in message
    sure = nn.functional.one_hot(CLASSES).float()
    found, expected = (learner.outer_loss(learner.init(0), batch(y)).loss for y in (sure, CLASSES))
    torch.testing.assert_close(found, expected)


def test_classes_of_the_parts_of_an_example() -> None:
    y = torch.randint(2, (TASKS, EXAMPLES, 3))
    message = refusal(lambda: linear().outer_loss(linear().init(0), batch(y)))  # one class an example expected
    assert "but the outputs are [4, 2] a task, and the targets [4, 3]" in message


@pytest.mark.parametrize("kind", [torch.float64, torch.int64])
def test_inputs_of_another_type_than_the_weights(kind: torch.dtype) -> None:
    learner = linear()
    message = refusal(lambda: learner.outer_loss(learner.init(0), batch(kind=kind)))
    assert f"inputs of type {str(kind).removeprefix('torch.')} with weights of type float32" in message


@pytest.mark.parametrize("kinds", [("float32", "float64"), ("float64", "float32")])
def test_inputs_of_another_type_than_a_convolution(kinds: tuple[str, str]) -> None:
    weights, inputs = (getattr(torch, kind) for kind in kinds)
    learner = gs.maml(nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(6, 2)).to(weights))
    x = batch(kind=inputs).support_x.unsqueeze(2)
    message = refusal(lambda: learner.adapt(learner.init(0), x, CLASSES))
    assert f"inputs of type {kinds[1]} with weights of type {kinds[0]}" in message


def test_adapting_checks_its_examples_and_predicting_its_weights() -> None:
    learner, episodes = linear(), batch()
    state, (x, y) = learner.init(0), (episodes.support_x, episodes.support_y)
    assert "start with [tasks, examples]" in refusal(lambda: learner.adapt(state, x, y[:, :2]))
    assert "of tensors, not ndarray" in refusal(lambda: learner.adapt(state, x.numpy(), y))  # type: ignore[arg-type]
    fast = learner.adapt(state, x, y)
    assert "adapted to 3 tasks, and query_x has 2" in refusal(lambda: learner.predict(fast, episodes.query_x[:2]))
    del fast["bias"]
    assert "lack bias" in refusal(lambda: learner.predict(fast, episodes.query_x))


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients(off: Any) -> None:
    learner = linear()
    state = learner.init(0)
    adam = gs.optimiser(state, 1e-3)
    with off():
        assert "a meta-step needs gradients" in refusal(lambda: gs.meta_step(learner, state, adam, batch()))


@pytest.mark.parametrize("seed", ["a", 1.5, 2**70, -1])
def test_seeds_that_are_none(seed: Any) -> None:
    assert "seed" in refusal(lambda: gs.maml(gs.Conv4(filters=4, image=(1, 16, 16))).init(seed))


SHARED = gs.GradientSharing()
OTHERS = {
    "fewer steps": linear(sharing=SHARED, steps=1),
    "more steps": linear(sharing=SHARED, steps=3),
    "nothing shared": linear(steps=2),
    "another model": linear(3, sharing=SHARED, steps=2),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_state_of_another_learner(other: gs.Learner) -> None:
    learner, episodes = linear(sharing=SHARED, steps=2), batch()
    state = other.init(0)
    for use in (
        lambda: learner.outer_loss(state, episodes),
        lambda: learner.adapt(state, episodes.support_x, episodes.support_y),
    ):
        assert "the state does not fit the learner" in refusal(use)


def a_float(outputs: Tensor, targets: Tensor) -> Any:
    return 1.0


def detached(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.detach().square().mean()


@pytest.mark.parametrize(
    "loss, words", [(a_float, "the loss must return one tensor"), (detached, "does not depend on the adapted weights")]
)
def test_losses_that_cannot_be_learned_from(loss: Any, words: str) -> None:
    learner = linear(loss=loss)
    assert words in refusal(lambda: learner.outer_loss(learner.init(0), batch()))
