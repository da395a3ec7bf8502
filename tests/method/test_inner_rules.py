"""Inner optimisers and learned preconditioning: equal to a plain loop and to torch.optim, and where they start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradshare as gs
from gradshare.method.preconditioners import Alfa, Curvature, Mask
from tests.support.cases import (
    CONDITIONED,
    CONTROLS,
    FURTHER,
    SHARING,
    assert_adapts_alone,
    assert_equal_to_finite_differences,
    assert_equal_to_reference,
    assert_trees_equal,
    build,
    group_of,
    meta_gradients,
)
from tests.support.learners import gradients, net, randomised, tasks
from tests.support.models import CONV4, EXTRAS, QUARTIC, REGRESSION, RELU_NORM, TANH_NORM, Model

RULES = [gs.momentum(0.9), gs.momentum(0), gs.adam(), Mask(), Curvature(), Alfa(0.1), gs.head_rate(4)]
ELEMENTWISE = ["momentum", "adam", "sparse-maml"]
every_further = pytest.mark.parametrize("algorithm", FURTHER)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rules_are_sound(rule: Any) -> None:
    gs.testing.check_rule(rule)
    gs.testing.check_rule(gs.chain(gs.GradientSharing(), rule, gs.scale(0.1)))


@pytest.mark.parametrize("sharing", SHARING)
@every_further
def test_algorithm_equals_a_loop_over_tasks(algorithm: str, sharing: str) -> None:
    entry = RELU_NORM if sharing in ("alone", "global", *CONTROLS[:2], *CONDITIONED[:1]) else REGRESSION
    case = build(entry, algorithm, sharing, steps=2, adapt_norm=True)
    assert_equal_to_reference(case, entry, tasks=2)


@pytest.mark.parametrize("algorithm", ["first order", "meta-sgd", "maml++", "anil", "boil", "proto-maml"])
def test_momentum_in_another_algorithm_equals_a_loop_over_tasks(algorithm: str) -> None:
    case = build(RELU_NORM, algorithm, "global", steps=3, inner="momentum")
    assert_equal_to_reference(case._replace(method=case.method._replace(inner="momentum")), RELU_NORM, tasks=2)


@pytest.mark.parametrize("algorithm", ["momentum", "meta-curvature", "sparse-maml", "alfa"])
def test_a_head_that_starts_at_zero_equals_a_loop_over_tasks(algorithm: str) -> None:
    case = build(RELU_NORM, algorithm, "global", head_start="zero")
    method = case.method._replace(head=("head.weight", "head.bias"), start="zero")
    assert_equal_to_reference(case._replace(method=method), RELU_NORM, tasks=2)


NETS = {"conv4": CONV4, **{name: EXTRAS[name] for name in ("conv 1d, batch norm 1d", "conv 3d, batch norm 3d")}}


@pytest.mark.parametrize("entry", NETS.values(), ids=NETS)
@every_further
def test_weights_of_every_shape_equal_a_loop_over_tasks(algorithm: str, entry: Model) -> None:
    assert_equal_to_reference(build(entry, algorithm, "global"), entry, tasks=2)


@every_further
def test_tasks_adapt_alone(algorithm: str) -> None:
    assert_adapts_alone(build(RELU_NORM, algorithm, "global"), RELU_NORM, seen=True)
    assert_adapts_alone(build(REGRESSION, algorithm, "alone"), REGRESSION, seen=False)


@every_further
def test_meta_gradient_equals_finite_differences(algorithm: str) -> None:
    h = 1e-5 if algorithm == "adam" else 1e-3  # Adam bends where a gradient changes its sign
    entry = TANH_NORM if algorithm == "meta-curvature" else QUARTIC  # the first has filters
    assert_equal_to_finite_differences(build(entry, algorithm, "global"), entry, group_of, h)


STARTS = {"momentum 0": (gs.maml, {"inner": gs.momentum(0)})} | {
    make.__name__: (make, {}) for make in (gs.meta_curvature, gs.sparse_maml, gs.alfa)
}


@pytest.mark.parametrize("sharing", [None, gs.GradientSharing(), gs.GateOnly()], ids=repr)
@pytest.mark.parametrize("make, options", STARTS.values(), ids=STARTS)
def test_each_starts_as_maml(make: Any, options: Any, sharing: Any) -> None:
    """Bit for bit: loss, memory and every meta-gradient that MAML has; and its own values have gradients."""
    plain, other = gs.maml(net(), steps=3, sharing=sharing), make(net(), steps=3, sharing=sharing, **options)
    state, own = plain.init(), other.init()
    for seed in (1, 2):
        (out, expected), (out_own, found) = (
            gradients(plain, state, tasks(seed=seed)),
            gradients(other, own, tasks(seed=seed)),
        )
        assert torch.equal(out.loss, out_own.loss)
        assert_trees_equal(out.memory, out_own.memory)
        for name, gradient in expected.items():
            torch.testing.assert_close(found.pop(name), gradient, rtol=1e-11, atol=1e-15)
        still = {name for name, gradient in found.items() if (gradient == 0).all()}
        # W2 starts at 0, so that nothing behind it has a gradient at first; beta starts at 0, so that b has none
        assert all("/W1" in name or "/c1" in name or "alfa/b/" in name for name in still)
        state.memory, own.memory = out.memory, out_own.memory


def test_values_that_start_without_a_gradient_are_learned() -> None:
    """After one outer step W2 is not 0, so that W1, c1 and b get gradients."""
    learner = gs.alfa(net(), steps=2)
    state = learner.init()
    gs.meta_step(learner, state, gs.optimiser(state, 1e-3), tasks())
    _, found = gradients(learner, state, tasks(seed=2))
    assert all(gradient.abs().max() > 0 for name, gradient in found.items() if "alfa" in name)


OPTIMISERS = {
    "momentum": (gs.momentum(0.8), lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.8)),
    "adam": (gs.adam(0.8, 0.95, 1e-4), lambda weights: torch.optim.Adam(weights, 0.05, (0.8, 0.95), 1e-4)),
    "adam, as it is": (gs.adam(), lambda weights: torch.optim.Adam(weights, 0.05)),
}


@pytest.mark.parametrize("rule, make", OPTIMISERS.values(), ids=OPTIMISERS)
def test_inner_loop_is_that_of_torch(rule: Any, make: Any) -> None:
    model, episodes = nn.Linear(4, 3).double(), _plain_tasks()
    learner = gs.maml(model, inner_lr=0.05, steps=4, inner=rule)
    fast = learner.adapt(learner.init(), episodes.support_x, episodes.support_y)
    for task in range(2):
        own = nn.Linear(4, 3).double()
        own.load_state_dict(model.state_dict())
        optimiser = make(own.parameters())
        for _ in range(4):
            optimiser.zero_grad()
            nn.functional.cross_entropy(own(episodes.support_x[task]), episodes.support_y[task]).backward()
            optimiser.step()
        for name, weight in own.named_parameters():
            torch.testing.assert_close(fast[name][task], weight, rtol=1e-12, atol=1e-14)


def _plain_tasks() -> gs.Episodes:
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.arange(6).remainder(3).expand(2, -1)
    return gs.Episodes(x, y, x, y)


def test_adam_moves_nothing_that_has_no_gradient() -> None:
    """Inputs of zero: the weights' gradients are 0 and stay so, the bias moves, and all derivatives are finite."""
    model, episodes = nn.Linear(4, 3).double(), _plain_tasks().map(lambda t: t * 0 if t.is_floating_point() else t)
    learner = gs.maml(model, steps=3, inner=gs.adam())
    state = learner.init()
    fast = learner.adapt(state, episodes.support_x, episodes.support_y)
    assert torch.equal(fast["weight"], state.params["weight"].expand(2, -1, -1))
    assert (fast["bias"] != state.params["bias"]).any()
    grads = meta_gradients(learner.outer_loss(state, episodes).loss, state.trainable())
    assert all(gradient.isfinite().all() for gradient in grads.values()) and (grads["params/weight"] == 0).all()


def test_the_chain_is_sharing_inner_preconditioner_rate() -> None:
    inner = [gs.momentum(0.5), gs.adam()]
    kinds = [type(link).__name__ for link in gs.sparse_maml(net(), sharing="gate-only", inner=inner).rule.links]
    assert kinds == ["GateOnly", "Momentum", "Adam", "Mask", "Scale"]
    first = gs.first_order_maml(net(), sharing=gs.GradientSharing(), inner="momentum:0.5").rule.links
    assert [type(link).__name__ for link in first] == ["StopGradient", "GradientSharing", "Momentum", "Scale"]
    assert first[2] == gs.momentum(0.5) and gs.anil(net(), inner="adam").rule.links[0] == gs.adam()
    assert gs.maml(net(), inner=["momentum:0.5", gs.adam()]).rule.links[:2] == (gs.momentum(0.5), gs.adam())
    assert gs.maml_plus_plus(net(), inner=gs.chain(*inner)).at(0).rule.links[:2] == tuple(inner)
    assert type(gs.alfa(net(), inner="momentum").rule.links[-1]).__name__ == "Alfa"


@pytest.mark.parametrize("inner", ["head:4", gs.head_rate(4)], ids=str)
def test_head_rate_is_another_rate_for_the_head_alone(inner: Any) -> None:
    x, y = tasks().support_x, tasks().support_y
    plain, faster = (gs.maml(net(), steps=1, sharing="gate-only", inner=one) for one in (None, inner))
    start = faster.init().params
    usual, fast = (learner.adapt(learner.init(), x, y) for learner in (plain, faster))
    for name in faster.adapted:
        factor = 4 if name in ("5.weight", "5.bias") else 1
        torch.testing.assert_close(fast[name] - start[name], factor * (usual[name] - start[name]))


def test_head_rate_of_the_head_alone_is_another_inner_rate() -> None:
    learners = gs.anil(net(), inner_lr=0.4), gs.anil(net(), inner_lr=0.1, inner="head:4")
    torch.testing.assert_close(*(learner.outer_loss(learner.init(), tasks()).loss for learner in learners))


def test_mask_below_zero_stops_a_weight() -> None:
    learner, episodes = gs.sparse_maml(net(), steps=2), tasks()
    state = learner.init()
    with torch.no_grad():
        state.learned["mask"]["5.weight"][0] = -0.5
    fast = learner.adapt(state, episodes.support_x, episodes.support_y)
    moved = (fast["5.weight"] != state.params["5.weight"]).flatten(2).any(2)
    assert not moved[:, 0].any() and moved[:, 1:].all()


def test_order_of_names_in_a_state_does_not_matter() -> None:
    """A checkpoint gives tensors back in another order."""
    for make in (gs.alfa, gs.meta_curvature):
        learner = make(net(), steps=2, sharing=gs.GradientSharing())
        state = randomised(learner.init())
        turned = gs.MetaState.of({name: tensor.detach() for name, tensor in sorted(state.tensors().items())[::-1]})
        assert torch.equal(*(learner.outer_loss(one, tasks()).loss for one in (state, turned)))


def test_curvature_has_a_matrix_for_each_side_of_filters_and_matrices() -> None:
    learned = gs.meta_curvature(net(), adapt_norm=True).init().learned["curvature"]
    shapes = {name: {side: tuple(m.shape) for side, m in sides.items()} for name, sides in learned.items()}
    assert shapes == {
        "0.weight": {"out": (3, 3), "in": (1, 1), "filter": (9, 9)},
        "5.weight": {"out": (3, 3), "in": (12, 12)},
    }


WRONG = [
    (lambda: gs.momentum(1.0), "beta is 1.0; it must be at most"),
    (lambda: gs.momentum("0.9"), "beta is '0.9'; it must be a number"),  # type: ignore[arg-type]
    (lambda: gs.adam(b2=-0.1), "b2 is -0.1; it must be at least 0"),
    (lambda: gs.adam(eps=float("nan")), "eps is nan"),
    (lambda: gs.maml(net(), inner=gs.momentum), "inner is gs.momentum"),  # type: ignore[arg-type]
    (lambda: gs.maml(net(), inner=0.9), "inner is gs.momentum.*not 0.9"),  # type: ignore[arg-type]
    (lambda: gs.maml(net(), inner="sgd"), "an inner optimiser is .*not 'sgd'"),
    (lambda: gs.maml(net(), inner="momentum:2"), "not 'momentum:2'"),
    (lambda: gs.maml(net(), inner="head"), "head:4.*not 'head'"),
    (lambda: gs.head_rate(-1), "factor is -1; it must be at least 0"),
    (lambda: gs.maml(net(), inner=[gs.adam(), gs.adam(eps=1)]), "name of its own"),
]


@pytest.mark.parametrize("build, message", WRONG, ids=[message for _, message in WRONG])
def test_wrong_values_are_named(build: Any, message: str) -> None:
    with pytest.raises(gs.UserError, match=message):
        build()
