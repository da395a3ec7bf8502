"""The outer optimiser: any of PyTorch, steps that are not taken, rates, and its state in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradshare as gs
from gradshare.learners import optimisers
from gradshare.learners.graphs import GraphedStep
from gradshare.learners.optimisers import capturable, optimiser_tensors, restore_optimiser, set_rate, step_if

Make = Callable[[Any], Optimizer]


class Counting(Optimizer):
    """Counts its steps in a number for each leaf, and keeps a number that changes in its groups."""

    def __init__(self, leaves: Any) -> None:
        super().__init__(leaves, {"lr": 0.1, "seen": 0, "mean": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["seen"] += 1
            group["mean"] *= 0.5
            for leaf in group["params"]:
                if leaf.grad is not None:
                    values = self.state[leaf]
                    values["count"] = values.get("count", 0) + 1
                    leaf -= group["lr"] * leaf.grad / values["count"] * group["mean"]


OPTIMISERS: dict[str, Make] = {
    "Adam": lambda leaves: torch.optim.Adam(leaves, lr=0.01),
    "Adam, amsgrad": lambda leaves: torch.optim.Adam(leaves, lr=0.01, amsgrad=True),
    "Adam, fused": lambda leaves: torch.optim.Adam(leaves, lr=0.01, fused=True),
    "AdamW": lambda leaves: torch.optim.AdamW(leaves, lr=0.01),
    "SGD": lambda leaves: torch.optim.SGD(leaves, lr=0.01),
    "SGD with momentum": lambda leaves: torch.optim.SGD(leaves, lr=0.01, momentum=0.9, nesterov=True),
    "RMSprop": lambda leaves: torch.optim.RMSprop(leaves, lr=0.01, momentum=0.5),
    "Adagrad": lambda leaves: torch.optim.Adagrad(leaves, lr=0.01),
    "Adadelta": lambda leaves: torch.optim.Adadelta(leaves),
    "Adamax": lambda leaves: torch.optim.Adamax(leaves, lr=0.01),
    "NAdam": lambda leaves: torch.optim.NAdam(leaves, lr=0.01),
    "RAdam": lambda leaves: torch.optim.RAdam(leaves, lr=0.01),
    "Rprop": lambda leaves: torch.optim.Rprop(leaves, lr=0.01),
    "ASGD": lambda leaves: torch.optim.ASGD(leaves, lr=0.01),
    "one of one's own": Counting,
}
every_optimiser = pytest.mark.parametrize("make", OPTIMISERS.values(), ids=OPTIMISERS)


def learner() -> gs.Learner:
    torch.manual_seed(0)
    return gs.meta_sgd(
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), steps=2, sharing=gs.GradientSharing()
    )


def batch(seed: int, broken: bool = False) -> gs.Episodes:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 4, 3, generator=draw), torch.randint(2, (2, 4), generator=draw)
    return gs.Episodes(x, y, x * torch.nan if broken else x, y)


def everything(state: gs.MetaState, optimiser: Optimizer) -> dict[str, Tensor]:
    tensors = {**state.tensors(), **optimiser_tensors(state, optimiser)}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@every_optimiser
def test_a_step_that_is_not_finite_leaves_all_as_it_is_and_a_checkpoint_goes_on(make: Make) -> None:
    """Also the very first step, before the optimiser has made its state."""
    one = learner()
    state, straight = one.init(), one.init()
    optimiser, theirs = make(state.trainable().values()), make(straight.trainable().values())
    before = everything(state, optimiser)
    for number in (0, 1, 2, 3):
        broken = number in (0, 2)
        taken = gs.meta_step(one, state, optimiser, batch(number, broken)).taken
        after = everything(state, optimiser)
        assert bool(taken) is not broken
        if broken:
            assert {
                name: value for name, value in after.items() if value.any() or name in before
            }.keys() == before.keys()
            assert_equal({name: after[name] for name in before}, before)
        else:
            gs.meta_step(one, straight, theirs, batch(number))
        before = after
        resumed = one.init()
        fresh = make(resumed.trainable().values())
        with torch.no_grad():
            for name, tensor in resumed.tensors().items():
                tensor.copy_(after[name])
        restore_optimiser(resumed, fresh, after)
        assert_equal(everything(resumed, fresh), after)
        state, optimiser = resumed, fresh
    assert_equal(everything(straight, theirs), before)


@every_optimiser
def test_a_step_is_undone_without_looking(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens on a GPU: first the step, then, where something was not finite, back."""
    leaves = [torch.linspace(1, 2, 3).requires_grad_(), torch.ones(2, 2).requires_grad_()]
    twins = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    optimiser, straight = make(leaves), make(twins)
    for number, taken in enumerate((False, True, False, True)):
        for leaf, twin in zip(leaves, twins, strict=True):
            leaf.grad = torch.full_like(leaf, 0.1 * (number + 1)) if taken else torch.full_like(leaf, torch.nan)
            twin.grad = leaf.grad
        optimisers._step_and_undo(optimiser, torch.tensor(taken))
        if taken:
            straight.step()
        assert all(torch.equal(leaf, twin) for leaf, twin in zip(leaves, twins, strict=True))
        found, expected = (
            [{name: float(torch.as_tensor(value).sum()) for name, value in one.state[leaf].items()} for leaf in own]
            for one, own in ((optimiser, leaves), (straight, twins))
        )
        assert found == expected
        assert [group.get("seen") for group in optimiser.param_groups] == [straight.param_groups[0].get("seen")]


def test_names_of_the_state_are_those_of_older_checkpoints() -> None:
    one = learner()
    state = one.init()
    adam = gs.optimiser(state, 1e-3)
    gs.meta_step(one, state, adam, batch(0))
    names = set(optimiser_tensors(state, adam))
    kinds = ("step", "exp_avg", "exp_avg_sq")
    assert names == {f"adam/{kind}/{leaf}" for kind in kinds for leaf in state.trainable()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("adam/step/params/0.weight"), "step is nothing"),
        (lambda t: t.update({"adam/exp_avg/params/0.weight": torch.zeros(3)}), "exp_avg is float32"),
        (lambda t: t["adam/exp_avg/params/0.weight"].fill_(torch.inf), "is not finite"),
        (
            lambda t: t.update({"adam/step/params/9.weight": torch.ones(())}),
            "9.weight, which the learner does not have",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_an_error(change: Callable[[Any], object], message: str) -> None:
    one = learner()
    state = one.init()
    adam = gs.optimiser(state, 1e-3)
    gs.meta_step(one, state, adam, batch(0))
    tensors = everything(state, adam)
    change(tensors)
    with pytest.raises(gs.UserError, match=message):
        restore_optimiser(state, gs.optimiser(state, 1e-3), tensors)


def test_what_a_checkpoint_cannot_hold_is_an_error() -> None:
    state = learner().init()
    sgd = torch.optim.SGD(state.trainable().values(), lr=0.1)
    sgd.state[next(iter(state.trainable().values()))]["history"] = [1, 2]
    with pytest.raises(gs.UserError, match="SGD keeps 'history' as list"):
        optimiser_tensors(state, sgd)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda leaves: torch.optim.LBFGS(leaves), "LBFGS needs a closure"),
        (lambda leaves: torch.optim.Adam(nn.Linear(2, 2).parameters()), r"make it of state.trainable\(\).values\(\)"),
        (lambda leaves: None, "an optimiser is gs.optimiser"),
        (lambda leaves: 0.1, "not 0.1"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_what_cannot_be_the_optimiser(make: Any, message: str, compiled: bool) -> None:
    one = learner()
    state = one.init()
    wrong = make(state.trainable().values())
    with pytest.raises(gs.UserError, match=message):
        gs.compiled_step(one, state, wrong) if compiled else gs.meta_step(one, state, wrong, batch(0))


def test_rates_are_relative_to_the_start_of_each_group() -> None:
    first, second = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    groups = [{"params": [first], "lr": 0.4}, {"params": [second], "lr": torch.tensor(0.2)}]
    adam = torch.optim.Adam(groups)
    place = adam.param_groups[1]["lr"]
    for factor in (0.5, 0.25, 1.0):
        set_rate(adam, factor)
        assert adam.param_groups[0]["lr"] == 0.4 * factor
        assert adam.param_groups[1]["lr"] is place and place.item() == pytest.approx(0.2 * factor)


def test_the_optimiser_of_another_state() -> None:
    one = learner()
    state = one.init()
    adam = gs.optimiser(state, 1e-3)
    gs.meta_step(one, state, adam, batch(0))
    with pytest.raises(gs.UserError, match="the optimiser has tensors that are not in the state"):
        gs.meta_step(one, one.init(), adam, batch(0))  # it would go on with the first state


# Recorded steps: on a CPU the plain step; the recording itself is tested on a GPU (test_gpu_steps.py)


def test_the_compiled_step_is_the_plain_step_on_a_cpu() -> None:
    one = learner()
    states = [one.init(), one.init()]
    sgds = [torch.optim.SGD(state.trainable().values(), lr=0.1, momentum=0.9) for state in states]
    step = gs.compiled_step(one, states[0], sgds[0], clamp=0.01, micro_batch=1)
    for number in range(3):
        found = step(batch(number))
        expected = gs.meta_step(one, states[1], sgds[1], batch(number), 0.01, 1)
        assert torch.equal(found.loss, expected.loss)
    assert_equal(everything(states[0], sgds[0]), everything(states[1], sgds[1]))


def test_what_can_be_recorded() -> None:
    leaves = [torch.ones(2, requires_grad=True)]
    found = {name: capturable(make(leaves)) for name, make in OPTIMISERS.items()}
    assert [name for name, possible in found.items() if possible] == ["SGD", "SGD with momentum"]
    assert capturable(torch.optim.Adam(leaves, capturable=True))
    one = learner()
    state = one.init()
    with pytest.raises(gs.UserError, match=r"this RMSprop cannot be recorded .* capturable=True"):
        GraphedStep(one, state, torch.optim.RMSprop(state.trainable().values()))


class Replayed:
    """A stand-in for a CUDA graph: a replay runs the step again, and leaves its results in the same tensors."""

    def __init__(self, run: Callable[[], gs.Outcome]) -> None:
        self.run = run
        for _ in range(2):
            run()
        self.result = run()

    def replay(self) -> None:
        new = self.run()
        for place, value in zip(self.result, new, strict=True):
            if isinstance(place, Tensor):
                place.copy_(value)


@every_optimiser
def test_around_a_recording_nothing_else_changes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up is undone, each shape has its recording, and so has each rate that is a number."""
    recordings: list[Replayed] = []

    def record(run: Callable[[], gs.Outcome]) -> tuple[Replayed, gs.Outcome]:
        recordings.append(Replayed(run))
        return recordings[-1], recordings[-1].result

    monkeypatch.setattr("gradshare.learners.graphs.record", record)
    monkeypatch.setattr("gradshare.learners.graphs.capturable", lambda optimiser: True)
    one = learner()
    states = [one.init(), one.init()]
    optimiser, straight = (make(state.trainable().values()) for state in states)
    if isinstance(optimiser, Counting):
        pytest.skip("its count is a number, which a recording would not change")
    step = GraphedStep(one, states[0], optimiser)
    for number in range(8):
        if number == 5:
            set_rate(optimiser, 0.5)
            set_rate(straight, 0.5)
        episodes = batch(number, broken=number in (0, 2, 6))
        episodes = episodes if number % 2 else episodes.map(lambda tensor: tensor[:, :3])
        found, expected = step(episodes), gs.meta_step(one, states[1], straight, episodes)
        assert torch.equal(found.loss.nan_to_num(), expected.loss.nan_to_num())
        assert_equal(everything(states[0], optimiser), everything(states[1], straight))
    assert len(recordings) == 4  # two shapes, two rates
    states[0].memory = one.init().memory
    states[1].memory = one.init().memory
    step(batch(9))
    gs.meta_step(one, states[1], straight, batch(9))
    assert_equal(everything(states[0], optimiser), everything(states[1], straight))


def test_step_if_on_a_cpu_takes_no_step_at_all() -> None:
    leaf = torch.ones(2, requires_grad=True)
    leaf.grad = torch.ones(2)
    sgd = torch.optim.SGD([leaf], lr=0.1, momentum=0.9)
    step_if(sgd, torch.tensor(False))
    assert not sgd.state and torch.equal(leaf, torch.ones(2))


def test_gates_have_a_rate_of_their_own() -> None:
    state = gs.maml_plus_plus(gs.Conv4(filters=2, image=(1, 16, 16)), sharing=gs.GradientSharing()).init(seed=0)
    leaves = state.trainable()
    before = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    adam = gs.optimiser(leaves, 1e-3, gates=10)  # of the leaves, as gs.train(optimiser=...) hands them over
    for leaf in leaves.values():
        leaf.grad = torch.ones_like(leaf)
    adam.step()  # Adam's first step is its rate
    for name, leaf in leaves.items():
        gate = name.startswith(("learned/sharing", "learned/rates"))
        torch.testing.assert_close(before[name] - leaf, torch.full_like(leaf, 1e-2 if gate else 1e-3))
    without = gs.maml(gs.Conv4(filters=2, image=(1, 16, 16))).init(seed=0)
    assert [group["lr"] for group in gs.optimiser(without, 1e-3, gates=10).param_groups] == [1e-3]
