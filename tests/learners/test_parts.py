"""`micro_batch` and `checkpoint`: the same meta-step, with the activations of fewer tasks and steps in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradshare as gs
from gradshare.learners.parts import gradients_in_parts
from gradshare.method.rules import NOTHING
from gradshare.method.variants import VARIANTS, first_link
from tests.support.learners import ALGORITHMS, randomised, tasks


def net() -> nn.Module:
    """A convolution without bias: before batch norm its gradient is rounding error."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.SiLU(), nn.AvgPool2d(4), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(12, 3)).double()


def assert_same_as_whole(learner: gs.Learner, episodes: gs.Episodes, *sizes: int) -> gs.MetaState:
    """Loss, scores, meta-gradients and memory, in two meta-iterations."""
    state = randomised(learner.init())
    for _ in range(2):
        leaves = state.trainable()
        whole = learner.outer_loss(state, episodes)
        expected = torch.autograd.grad(whole.loss, list(leaves.values()), allow_unused=True)
        for size in sizes:
            out, found = gradients_in_parts(learner, state, episodes, size)
            torch.testing.assert_close(out.loss, whole.loss.detach(), rtol=1e-13, atol=0)
            torch.testing.assert_close(out.losses, whole.losses, rtol=1e-13, atol=0)
            assert (out.accuracy is None) == (whole.accuracy is None)
            assert whole.accuracy is None or torch.equal(out.accuracy, whole.accuracy)
            for name, one, other in zip(leaves, found, expected, strict=True):
                assert (one is None) == (other is None), name
                if one is not None:
                    apart, largest = (one - other).abs().max(), other.abs().max()
                    assert apart <= 1e-12 * largest, f"{name}, {size} tasks a part: {apart / largest:.1e}"
            memory = replace(state, memory=out.memory).tensors()
            for name, tensor in replace(state, memory=whole.memory).tensors().items():
                torch.testing.assert_close(memory[name], tensor, rtol=1e-12, atol=1e-13, msg=name)
        state.memory = whole.memory
        randomised(state)  # so that the next mean is not that in the memory
    return state


ARMS = [name for name, row in VARIANTS.items() if row.rule or row.rate == 1]
EVERY_ARM = ("maml", "first_order_maml", "meta_sgd", "maml_plus_plus", "anil")
OF_THE_PAPER = ("original", "shared", "gate-only", "batch-only", "memory-only", "conditioned")


@pytest.mark.parametrize(
    ("algorithm", "arm"),
    [
        (name, arm)
        for name in ALGORITHMS
        for arm in ARMS
        if name == "maml" or arm in ("original", "shared") or (name in EVERY_ARM and arm in OF_THE_PAPER)
    ],
)
def test_every_algorithm_and_arm(algorithm: str, arm: str) -> None:
    for norm in ("global", "tensor") if VARIANTS[arm].rule else ("global",):
        learner = ALGORITHMS[algorithm](net(), steps=2, sharing=first_link(arm, norm))
        assert_same_as_whole(learner, tasks(3), 2)


OTHERS = {
    "a head that starts at zero": lambda: gs.maml(net(), steps=2, sharing=gs.GradientSharing(), head_start="zero"),
    "a prototypical network": lambda: gs.proto_maml(net(), steps=0),
    "reptile": lambda: gs.reptile(net(), steps=2),
    "reptile, not all adapted": lambda: gs.reptile(net(), steps=2, adapt="0"),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_other_starts_and_outer_gradients(make: Any) -> None:
    assert_same_as_whole(make(), tasks(3), 1, 2)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
def test_any_number_of_steps_and_any_part(steps: int) -> None:
    """With a carry, a query loss after each step, values for each step, and learned rates."""
    learner = gs.maml_plus_plus(net(), steps=steps, sharing=gs.GradientSharing(), inner=gs.momentum(0.9))
    assert_same_as_whole(learner, tasks(5), *((1, 2, 3, 4, 5, 7) if steps == 3 else (2,)))


def test_a_carry_of_numbers_and_of_what_has_no_derivative() -> None:
    def update(at: gs.InnerStep) -> gs.Moved:
        """The mean of the gradients so far, with a count that is a tensor of integers and one that is a number."""
        before, count = at.carry.get("sum", {}), at.carry.get("count", torch.tensor(0)) + 1
        total = {name: g + before.get(name, 0) for name, g in at.gradients.items()}
        assert int(count) == at.carry.get("number", 0) + 1
        return gs.Moved(
            {name: g / count for name, g in total.items()}, {"sum": total, "count": count, "number": at.k + 1}
        )

    rule = gs.InnerRule("mean", lambda weights, steps: ({}, {}), update)
    assert_same_as_whole(gs.maml(net(), steps=3, sharing=rule), tasks(3), 2)


def test_a_rule_that_uses_the_weights() -> None:
    """Weight decay: the derivative with respect to the weights does not come through the gradients alone."""
    decay = gs.InnerRule(
        "decay",
        lambda weights, steps: ({"rate": {name: torch.full_like(w, 0.1) for name, w in weights.items()}}, {}),
        lambda at: gs.Moved({n: g + at.learned["rate"][n] * at.weights[n] ** 2 for n, g in at.gradients.items()}),
    )
    assert_same_as_whole(gs.maml(net(), steps=3, sharing=decay), tasks(3), 2)
    assert_same_as_whole(gs.first_order_maml(net(), steps=3, sharing=decay), tasks(3), 2)


def test_a_rule_that_leaves_some_weights_as_they_are() -> None:
    def update(at: gs.InnerStep) -> gs.Moved:
        return gs.Moved({n: g if n.startswith("5") else torch.zeros_like(g) for n, g in at.gradients.items()})

    rule = gs.InnerRule("some", lambda weights, steps: ({}, {}), update)
    assert_same_as_whole(gs.maml(net(), steps=3, sharing=rule), tasks(3), 2)


def test_a_rule_that_says_that_it_is_of_first_order() -> None:
    """Its gradients are constants, though it does not detach them."""
    halved = gs.InnerRule(
        "halved", lambda w, steps: ({}, {}), lambda at: gs.Moved({n: g / 2 for n, g in at.gradients.items()})
    )
    object.__setattr__(halved, "second_order", False)
    assert_same_as_whole(gs.maml(net(), steps=2, sharing=halved), tasks(3), 2)


def test_conv4_by_its_own_code() -> None:
    small = tasks(3)
    grow = (1, 1, 1, 2, 2)
    episodes = gs.Episodes(small.support_x.repeat(grow), small.support_y, small.query_x.repeat(grow), small.query_y)
    for adapt_norm in (False, True):
        model = gs.Conv4(ways=3, filters=4, image=(1, 16, 16)).double()
        learner = gs.meta_sgd(model, steps=2, sharing=gs.GradientSharing(), adapt_norm=adapt_norm)
        leaves = randomised(learner.init())
        whole = learner.outer_loss(leaves, episodes)
        expected = torch.autograd.grad(whole.loss, list(leaves.trainable().values()), allow_unused=True)
        _, found = gradients_in_parts(learner, leaves, episodes, 2)
        scale = max(g.abs().max().item() for g in expected if g is not None)
        for one, other in zip(found, expected, strict=True):  # biases before batch norm have zero or rounding
            assert one is not None and other is not None
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12 * max(other.abs().max().item(), 0.1 * scale))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.unused = nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(2, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.norm(self.one(a)).tanh() @ b.mean(0)


def pairs(kind: type) -> gs.Episodes:
    draw = torch.Generator().manual_seed(2)

    def part(n: int) -> tuple[Any, Tensor]:
        a, b, y = (torch.randn(3, *shape, generator=draw).double() for shape in ((n, 4), (6, 5, 2), (n, 2)))
        return (a, b) if kind is tuple else {"b": b, "a": a}, y

    return gs.Episodes(*part(6), *part(4))


@pytest.mark.parametrize("kind", [tuple, dict])
def test_several_inputs_an_inner_loss_and_a_weight_that_nothing_uses(kind: type) -> None:
    torch.manual_seed(0)

    def huber(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.huber_loss(outputs, targets)

    learner = gs.maml(Pair().double(), steps=3, sharing=gs.GradientSharing(), loss="mse", inner_loss=huber)
    assert_same_as_whole(learner, pairs(kind), 1, 2)
    after = []
    for parts in (None, 2):
        other = learner.init()
        decaying = torch.optim.AdamW(other.trainable().values(), lr=0.1, weight_decay=0.5)
        gs.meta_step(learner, other, decaying, pairs(kind), micro_batch=parts)
        after.append(other.params["unused.weight"])
    torch.testing.assert_close(*after)


def test_masks() -> None:
    episodes = tasks(3)
    support, query = torch.ones(3, 6, dtype=torch.bool), torch.ones(3, 12, dtype=torch.bool)
    support[0, 4:], query[1, :5], query[2, 9:] = False, False, False
    masked = replace(episodes, support_mask=support, query_mask=query)
    assert_same_as_whole(gs.maml_plus_plus(net(), steps=2, sharing=gs.GradientSharing()), masked, 1, 2)


# The whole step


@pytest.mark.parametrize("options", [{"micro_batch": 2}, {"checkpoint": True}, {"micro_batch": 1, "checkpoint": True}])
def test_training_is_the_same(options: dict[str, Any]) -> None:
    """With a clamp that limits gradients, and a step that is not taken."""
    learner = gs.maml_plus_plus(net(), steps=2, sharing=gs.GradientSharing())
    states = [randomised(learner.init()) for _ in range(2)]
    adams = [gs.optimiser(state, 1e-2) for state in states]
    for number in range(4):
        episodes = tasks(3, seed=number)
        if number == 2:
            episodes.query_x[1] = torch.nan
        one = gs.meta_step(learner, states[0], adams[0], episodes, 1e-2)
        other = gs.meta_step(learner, states[1], adams[1], episodes, 1e-2, **options)
        assert one.fault is not None and one.fault == other.fault and bool(one.taken) is (number != 2)
        assert not other.loss.requires_grad
    for name, tensor in states[0].tensors().items():
        torch.testing.assert_close(states[1].tensors()[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


def test_no_more_tasks_at_once_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = gs.maml(net(), steps=2, sharing=gs.GradientSharing())
    state, at_once = learner.init(), []
    run = learner.network.forward

    def counted(fast: Any, *more: Any, **options: Any) -> Tensor:
        at_once.append(len(next(iter(fast.values()))))
        return run(fast, *more, **options)

    monkeypatch.setattr(learner.network, "forward", counted)
    gs.meta_step(learner, state, gs.optimiser(state, 1e-3), tasks(5), micro_batch=2)
    each = [2, 2, 1]
    assert at_once == each * 2 + each + each * 2  # support, query, and support once more on the way back


def test_first_order_runs_no_support_set_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = gs.first_order_maml(net(), steps=3)
    state, calls = learner.init(), []
    run = learner.network.forward
    monkeypatch.setattr(
        learner.network, "forward", lambda *values, **options: (calls.append(1), run(*values, **options))[1]
    )
    gs.meta_step(learner, state, gs.optimiser(state, 1e-3), tasks(3), checkpoint=True)
    assert len(calls) == 3 + 1


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "2"])
def test_a_part_is_a_whole_number_of_tasks(wrong: Any) -> None:
    learner = gs.maml(net(), steps=1)
    state = learner.init()
    with pytest.raises(gs.UserError, match="micro_batch is"):
        gs.meta_step(learner, state, gs.optimiser(state, 1e-3), tasks(2), micro_batch=wrong)


def test_a_rule_that_draws_random_numbers_is_an_error() -> None:
    def noisy(at: gs.InnerStep) -> gs.Moved:
        return gs.Moved({name: g + torch.randn_like(g) for name, g in at.gradients.items()}, NOTHING)

    learner = gs.maml(net(), sharing=gs.InnerRule("noise", lambda weights, steps: ({}, {}), noisy))
    state = learner.init()
    adam = gs.optimiser(state, 1e-3)
    for _ in range(2):
        with pytest.raises(gs.UserError, match="draws random numbers"):
            gs.meta_step(learner, state, adam, tasks(2), micro_batch=1)
    assert gs.meta_step(learner, state, adam, tasks(2)).taken
