"""What each algorithm is made of."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import gradshare as gs
from gradshare.learners.algorithms import multi_step_weights
from gradshare.learners.optimisers import cosine
from tests.support.models import RELU_NORM


def test_conv4_is_the_reference_backbone() -> None:
    model = gs.Conv4(ways=5, filters=48, image=(3, 84, 84))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert sum(size for name, size in sizes.items() if not name.startswith("norms")) == 69_701
    learner = gs.maml_plus_plus(model, steps=5)
    state = learner.init(seed=0)
    assert sum(w.numel() for w in state.learned["per_step"].values()) == 1_920
    # the reference keeps six rates a tensor, of which the last is never used
    assert sum(w.numel() for w in state.learned["rates"].values()) == 60 - 10
    assert model.head.in_features == 1200
    assert sum(state.params[name].numel() for name in learner.adapted) == 69_701


def test_conv4_computes_conv_norm_activation_pool() -> None:
    model = gs.Conv4(ways=5, filters=4, image=(1, 28, 28))
    x = expected = torch.rand(6, 1, 28, 28)
    for conv, norm in zip(model.convs, model.norms, strict=True):
        expected = nn.functional.batch_norm(conv(expected), None, None, norm.weight, norm.bias, True, eps=1e-5)
        expected = nn.functional.max_pool2d(nn.functional.leaky_relu(expected, 0.01), 2)
    torch.testing.assert_close(model(x), model.head(expected.flatten(1)))


def test_conv4_initialises_as_the_reference() -> None:
    state = gs.maml(gs.Conv4()).init(seed=3)
    weight = state.params["convs.1.weight"]
    bound = math.sqrt(6 / (48 * 9 + 48 * 9))
    assert weight.abs().max() <= bound and weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert all((value == 0).all() for name, value in state.params.items() if name.endswith("bias"))


def test_init_with_a_seed_initialises_ours_and_keeps_a_users_weights() -> None:
    ours = gs.maml(gs.Conv4(filters=4))
    first, same, other = (ours.init(seed).params["head.weight"] for seed in (0, 0, 1))
    assert torch.equal(first, same) and not torch.equal(first, other)
    model = gs.Conv4(filters=4)
    assert torch.equal(gs.maml(model).init(seed=None).params["head.weight"], model.head.weight)
    user = nn.Linear(3, 2)
    assert torch.equal(gs.maml(user).init(seed=0).params["weight"], user.weight)


def test_where_values_live_and_how_they_start() -> None:
    sharing = gs.GradientSharing()
    state = gs.meta_sgd(gs.Conv4(filters=4), inner_lr=0.3, steps=4, sharing=sharing).init(seed=0)
    assert state.learned["sharing"]["m"].tolist() == state.learned["sharing"]["lam"].tolist() == [0.0] * 4
    assert all((rate == torch.tensor(0.3)).all() for rate in state.learned["rates"].values())
    assert state.learned["rates"]["head.weight"].shape == state.params["head.weight"].shape
    assert state.memory["sharing"]["ghat"]["head.weight"].shape == (4, *state.params["head.weight"].shape)
    assert not state.memory["sharing"]["seen"]
    assert "norms.0.weight" in state.params and "norms.0.weight" not in state.learned["rates"]
    plus_plus = gs.maml_plus_plus(gs.Conv4(filters=4), inner_lr=0.3, steps=4).init(seed=0)
    assert plus_plus.learned["rates"]["head.weight"].tolist() == pytest.approx([0.3] * 4)
    assert plus_plus.learned["per_step"]["norms.0.weight"].shape == (4, 4)
    assert "norms.0.weight" not in plus_plus.params


def test_what_each_algorithm_adapts() -> None:
    model = gs.Conv4(filters=4)
    body = {f"convs.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")}
    norms = {f"norms.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")}
    head = {"head.weight", "head.bias"}
    assert set(gs.maml(model).adapted) == body | head
    assert set(gs.maml(model, adapt_norm=True).adapted) == body | head | norms
    assert set(gs.anil(model).adapted) == head
    assert set(gs.anil(model, head="convs.3").adapted) == {"convs.3.weight", "convs.3.bias"}
    with pytest.raises(ValueError, match="no weights under 'tail'"):
        gs.anil(model, head="tail")
    with pytest.raises(gs.UserError, match="no weights under 'tail'"):
        gs.maml(model, head="tail")  # also where nothing needs it
    state = gs.anil(model, sharing=gs.GradientSharing()).init(seed=0)
    assert set(state.memory["sharing"]["ghat"]) == head


BODY_NORM = ["body.1.weight", "body.1.bias", "body.5.weight", "body.5.bias"]


@pytest.mark.parametrize("adapt, expected", [
    (["body.4", "head"], ["body.4.weight", "body.4.bias", "head.weight", "head.bias"]),
    ("head", ["head.weight", "head.bias"]),
    (["body", "head.bias"], ["body.0.weight", "body.0.bias", "body.4.weight", "body.4.bias", "head.bias"]),
    (["body.1.bias"], ["body.1.bias"]),  # a weight of batch norm by its own name
    (lambda name: name.endswith("bias"), ["body.0.bias", "body.4.bias", "head.bias"]),
])  # fmt: skip
@pytest.mark.parametrize("algorithm", [gs.maml, gs.first_order_maml, gs.meta_sgd, gs.maml_plus_plus])
def test_chosen_weights_are_adapted_and_no_others(algorithm: Any, adapt: Any, expected: list[str]) -> None:
    learner, tasks = algorithm(RELU_NORM.make(), adapt=adapt, steps=2, sharing=gs.GradientSharing()), RELU_NORM.tasks(2)
    assert list(learner.adapted) == expected
    state = learner.init()
    outcome = gs.meta_step(learner, state, gs.optimiser(state, 1e-3), tasks)
    assert outcome.taken and set(outcome.memory["sharing"]["ghat"]) == set(expected)
    fast = learner.adapt(state, tasks.support_x, tasks.support_y)
    moved = {name for name, weight in state.params.items() if not torch.allclose(fast[name][0], weight, atol=1e-12)}
    assert moved <= set(expected) and moved
    if algorithm is gs.maml_plus_plus:
        assert set(learner.per_step) == set(BODY_NORM) - set(expected)


def test_weights_that_are_not_there_cannot_be_adapted() -> None:
    for adapt in ("tail", ["head", "hea"], lambda name: False, ["body.1"]):
        with pytest.raises(
            gs.UserError,
            match=r"adapt=.* (chooses no weight to adapt: the model has body\.0\.weight|is batch norm: name)",
        ):
            gs.maml(RELU_NORM.make(), adapt=adapt)


def test_multi_step_weights_are_the_references() -> None:
    expected = {
        0: [0.2] * 5,
        7: [0.1067] * 4 + [0.5733],
        14: [0.0133] * 4 + [0.9467],
        15: [0] * 4 + [1],
        99: [0] * 4 + [1],
    }
    for epoch, weights in expected.items():
        assert multi_step_weights(epoch, 5, 15) == pytest.approx(weights, abs=1e-4)
    assert multi_step_weights(99, 5, 100)[0] == pytest.approx(0.03 / 5)  # the floor


def test_maml_plus_plus_changes_over_training_as_its_recipe_says() -> None:
    model = gs.Conv4(filters=4)
    reference, paper = gs.maml_plus_plus(model), gs.maml_plus_plus(model, recipe="paper")
    assert reference.step_weights == pytest.approx((0.2,) * 5) and reference.at(20).step_weights[-1] == 1.0
    assert reference.at(0).rule.second_order and not paper.at(49).rule.second_order and paper.at(50).rule.second_order
    assert (reference.final_outer_rate, paper.final_outer_rate) == (1.0, 0.01)
    changed = gs.maml_plus_plus(model, recipe="paper", first_order_epochs=2)
    assert changed.at(2).rule.second_order and changed.final_outer_rate == 0.01
    with pytest.raises(ValueError, match="recipe 'foo' is not one of reference, paper"):
        gs.maml_plus_plus(model, recipe="foo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="either adapted"):
        gs.maml_plus_plus(model, adapt_norm=True, per_step_norm=True)


def test_the_outer_rate_follows_a_cosine() -> None:
    assert cosine(0.01, 0, 100) == pytest.approx(1)
    assert cosine(0.01, 50, 100) == pytest.approx(0.505)
    assert cosine(0.01, 100, 100) == pytest.approx(0.01)
    assert cosine(1.0, 37, 100) == 1


def test_a_loss_that_is_no_single_number_is_refused() -> None:
    learner = gs.maml(nn.Linear(2, 1), steps=1, loss=lambda outputs, targets: (outputs - targets).square())
    x, y = torch.rand(2, 4, 2), torch.rand(2, 4, 1)
    with pytest.raises(ValueError, match=r"single number, not of shape \[4, 1\]"):
        learner.outer_loss(learner.init(), gs.Episodes(x, y, x, y))
