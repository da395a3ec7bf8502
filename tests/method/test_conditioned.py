"""Sharing conditioned on the task: what is its own; the rest is in the tables of the other tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gradshare as gs
from gradshare.method.sharing import agreement
from tests.support.learners import every_algorithm, gradients, net, randomised, tasks
from tests.support.steps import alone, together

every_norm = pytest.mark.parametrize("norm", ["global", "tensor"])
every_batch = pytest.mark.parametrize("count", [1, 4])


def float64(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def seen(learner: gs.Learner, state: gs.MetaState, **ours: float) -> gs.MetaState:
    """The state with a memory, and with these learned values at every step."""
    state.memory = learner.outer_loss(state, tasks(seed=7)).memory
    with torch.no_grad():
        for name, value in ours.items():
            state.learned["sharing"][name].fill_(value)
    return state


@every_algorithm
@every_norm
@every_batch
def test_without_agreement_it_is_plain_sharing_to_the_last_bit(algorithm: Any, norm: Any, count: int) -> None:
    learners = [algorithm(net(), steps=2, sharing=gs.GradientSharing(norm, conditioned=c)) for c in (False, True)]
    states = [randomised(learner.init()) for learner in learners]
    for name in states[0].trainable():
        states[1].trainable()[name].data.copy_(states[0].trainable()[name])
    states[1].learned["sharing"]["agreement"].data.zero_()
    for seed in (1, 2):
        episodes = tasks(count, seed)
        (plain, expected), (out, found) = (gradients(*pair, episodes) for pair in zip(learners, states, strict=True))
        assert torch.equal(out.loss, plain.loss) and torch.equal(out.losses, plain.losses)
        for name, ghat in plain.memory["sharing"]["ghat"].items():
            assert torch.equal(out.memory["sharing"]["ghat"][name], ghat)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-13)
        alone = [
            learner.adapt(state, episodes.support_x, episodes.support_y)
            for learner, state in zip(learners, states, strict=True)
        ]
        assert all(torch.equal(alone[1][name], weights) for name, weights in alone[0].items())
        states[0].memory, states[1].memory = plain.memory, out.memory


def test_float32_too_is_plain_sharing_to_the_last_bit() -> None:
    plain, ours = (
        gs.maml(gs.Conv4(ways=3, filters=4, image=(1, 16, 16)), sharing=gs.GradientSharing(conditioned=c))
        for c in (False, True)
    )
    drawn = torch.rand(5, 6, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(3).repeat(2).expand(5, -1)
    episodes, first, second = gs.Episodes(drawn, labels, 1 - drawn, labels), plain.init(0), ours.init(0)
    for _ in range(2):
        expected, out = plain.outer_loss(first, episodes), ours.outer_loss(second, episodes)
        assert torch.equal(out.losses, expected.losses)
        first.memory, second.memory = expected.memory, out.memory


def test_one_step_by_hand() -> None:
    """Two tasks in two weights: G = (3, 0) and (0, 4), ghat_prev = (0.6, 0.8), m = 0, lam = 0.5, c = 0.1."""
    rule = gs.share_by_agreement()
    learned, memory = rule.init({"a": float64(0), "b": float64(0)}, 1)
    learned = {"m": float64(0), "lam": float64(0.5), "agreement": float64(0.1)}
    memory["ghat"] = {"a": float64(0.6).view(1, 1), "b": float64(0.8).view(1, 1)}
    memory["seen"] = torch.tensor(True)
    given = {"a": float64(3, 0).view(2, 1), "b": float64(0, 4).view(2, 1)}
    gates = torch.sigmoid(float64(0.5 + 0.1 * 10 * 0.6, 0.5 + 0.1 * 10 * 0.8))
    mean = (float64(3, 4) / 5 + float64(0.6, 0.8)) / 2  # both are (0.6, 0.8)
    direction, note = together(rule, given, learned, memory, 0)
    torch.testing.assert_close(torch.cat([note["a"], note["b"]]), mean)
    torch.testing.assert_close(direction["a"].flatten(), gates * mean[0] + (1 - gates) * float64(3, 0))
    torch.testing.assert_close(direction["b"].flatten(), gates * mean[1] + (1 - gates) * float64(0, 4))
    at_test = alone(rule, {name: value[1:] for name, value in given.items()}, learned, memory)
    assert at_test["a"].item() == pytest.approx(gates[1].item() * 0.6)
    assert at_test["b"].item() == pytest.approx(gates[1].item() * 0.8 + (1 - gates[1].item()) * 4)


def test_one_task_does_not_agree_with_itself() -> None:
    """Its fresh mean is its own gradient, whose cosine is 1; with the memory, here at a right angle, it is 0."""
    rule = gs.share_by_agreement()
    learned, memory = rule.init({"w": float64(0, 0)}, 1)
    learned["agreement"] += 5.0
    memory = {"ghat": {"w": float64(0, 1).view(1, 2)}, "seen": torch.tensor(True)}
    direction, _ = together(rule, {"w": float64(2, 0).view(1, 2)}, learned, memory, 0)
    plain, _ = together(gs.share_gradients(), {"w": float64(2, 0).view(1, 2)}, learned, memory, 0)
    assert torch.equal(direction["w"], plain["w"])


@every_norm
def test_it_can_keep_what_disagrees_to_itself(norm: Any) -> None:
    """With a large c, a task against the memory takes its own gradient, one along it the running mean."""
    rule = gs.share_by_agreement(norm)
    learned, memory = rule.init({"w": float64(0, 0)}, 1)
    learned["agreement"] += 200.0
    memory = {"ghat": {"w": float64(1, 0).view(1, 2)}, "seen": torch.tensor(True)}
    against_and_along = {"w": torch.stack([float64(-3, 1), float64(5, 1)])}
    direction, note = together(rule, against_and_along, learned, memory, 0)
    torch.testing.assert_close(direction["w"], torch.stack([float64(-3, 1), note["w"]]))
    at_test = alone(rule, against_and_along, learned, memory)
    torch.testing.assert_close(at_test["w"], torch.stack([float64(-3, 1), float64(1, 0)]))


@every_algorithm
@every_norm
def test_agreement_is_learned_once_there_is_a_memory(algorithm: Any, norm: Any) -> None:
    learner = algorithm(net(), steps=2, sharing=gs.GradientSharing(norm, conditioned=True))
    state = learner.init()
    assert state.learned["sharing"].keys() == {"m", "lam", "agreement"}
    assert torch.equal(state.learned["sharing"]["agreement"], torch.zeros(2, dtype=torch.float64))
    assert (gradients(learner, state, tasks(1))[1]["learned/sharing/agreement"] == 0).all()
    found = gradients(learner, seen(learner, state), tasks(1, seed=2))[1]
    assert found["learned/sharing/agreement"].abs().min() > 0


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
@every_norm
def test_the_agreement_is_a_cosine_at_every_size(norm: Any, size: float) -> None:
    own = {"a": size * torch.stack([float64(3, 0), float64(-4, 0), float64(0, 2), float64(0, 0)])}
    for direction, expected in (
        (float64(2, 0), float64(1, -1, 0, 0)),
        (float64(1e-200, 1e-200), float64(1, -1, 1, 0) / 2**0.5),
        (float64(0, 0), float64(0, 0, 0, 0)),
    ):
        torch.testing.assert_close(agreement(own, {"a": direction}, norm)["a"], expected)


def test_the_scope_of_the_agreement_is_that_of_the_norm() -> None:
    own, direction = {"a": float64(3).view(1, 1), "b": float64(-4).view(1, 1)}, {"a": float64(4), "b": float64(3)}
    both, each = agreement(own, direction, "global"), agreement(own, direction, "tensor")
    assert both["a"] == both["b"] == pytest.approx(0, abs=1e-15)
    assert each["a"] == pytest.approx(1) and each["b"] == pytest.approx(-1)


@every_norm
def test_the_agreement_has_two_derivatives_and_none_at_zero(norm: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    direction = {name: torch.randn(3, generator=draw, dtype=torch.float64) for name in "ab"}

    def cosines(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack(list(agreement({"a": a, "b": b}, direction, norm).values()))

    a, b = (torch.randn(2, 3, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(cosines, (a, b)) and torch.autograd.gradgradcheck(cosines, (a, b))
    zero = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(cosines(zero, zero).sum(), zero, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), zero)
    assert (first == 0).all() and (second == 0).all()


@every_norm
def test_a_task_that_diverges_does_so_alone(norm: Any) -> None:
    rule, draw = gs.share_by_agreement(norm), torch.Generator().manual_seed(0)
    learned, memory = rule.init({"w": torch.zeros(4)}, 1)
    learned["agreement"] += 0.3
    memory = {"ghat": {"w": torch.randn(1, 4, generator=draw)}, "seen": torch.tensor(True)}
    given = torch.randn(3, 4, generator=draw)
    given[1, 2] = torch.nan
    given[1, 3] = torch.inf
    direction, note = together(rule, {"w": given}, learned, memory, 0)
    plain = together(gs.share_gradients(norm), {"w": given}, learned, memory, 0)[1]
    assert note["w"].isfinite().all() and torch.equal(note["w"], plain["w"]) and direction["w"][::2].isfinite().all()
    assert not direction["w"][1, 2:].isfinite().any()


@every_algorithm
@every_norm
def test_a_task_without_gradient_among_others_gives_no_nan(algorithm: Any, norm: Any) -> None:
    def flat_for_some(outputs: Tensor, targets: Tensor) -> Tensor:
        return (targets[0] == 0) * torch.nn.functional.cross_entropy(outputs, targets)

    episodes = tasks()
    labels = episodes.support_y.clone()
    labels[0, 0] = 1  # whoever has another first label has no gradient
    episodes = gs.Episodes(episodes.support_x, labels, episodes.query_x, episodes.query_y)
    learner = algorithm(net(), steps=2, sharing=gs.GradientSharing(norm, conditioned=True), loss=flat_for_some)
    state = seen(learner, learner.init(), agreement=0.5)
    out, found = gradients(learner, state, episodes)
    assert out.losses.isfinite().all() and all(value.isfinite().all() for value in found.values())


def test_what_is_neither_true_nor_false_is_refused() -> None:
    with pytest.raises(gs.UserError, match="conditioned is True or False, not 'lam'"):
        gs.GradientSharing(conditioned="lam")  # type: ignore[arg-type]
