"""The head of a task: where it starts, what adapts beside it, and Reptile's outer rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradshare as gs
from gradshare.learners.fingerprint import fingerprint
from gradshare.method.mixing import BodyOnly, LeftOut
from tests.support import reference
from tests.support.cases import Case, assert_equal_to_reference, build, head_names, randomised
from tests.support.learners import net, tasks
from tests.support.models import CONV4, RELU_NORM, TANH_NORM, Model

HEAD = ("head.weight", "head.bias")


# adapt=


def deep() -> nn.Module:
    """Its layers 3 and 31 have weights, and 5, between them."""
    layers: list[nn.Module] = [nn.Identity() for _ in range(32)]
    layers[3], layers[4], layers[5], layers[6], layers[31] = (
        nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3),
    )  # fmt: skip
    return nn.Sequential(*layers)


DEEP = Model(deep, (4,))


def test_a_path_is_a_prefix_of_whole_names() -> None:
    assert gs.maml(deep(), adapt="3").adapted == ("3.weight", "3.bias")
    assert gs.maml(deep(), adapt=["3", "31.bias"]).adapted == ("3.weight", "3.bias", "31.bias")


def test_batch_norm_is_adapted_if_named_or_asked_for() -> None:
    model = gs.Conv4(filters=4)
    assert gs.maml(model, adapt=["norms.0.weight"]).adapted == ("norms.0.weight",)
    assert gs.maml(model, adapt=["norms"], adapt_norm=True).adapted[0] == "norms.0.weight"
    assert not any("norms" in name for name in gs.maml(model, adapt=lambda name: True).adapted)
    assert any("norms" in name for name in gs.maml(model, adapt=lambda name: True, adapt_norm=True).adapted)


@pytest.mark.parametrize("sharing", ["alone", "global", "gate only", "memory only, tensor"])
def test_layers_between_adapted_ones_are_learned_by_the_outer_loop_alone(sharing: str) -> None:
    """As in T-Nets and WarpGrad: the gradient of an adapted layer goes through one that no task moves."""
    case = build(DEEP, "maml", sharing, adapt=["3", "31"])
    case = case._replace(method=case.method._replace(adapted=("3.weight", "3.bias", "31.weight", "31.bias")))
    assert_equal_to_reference(case, DEEP, tasks=3)
    state, batch = randomised(case.learner.init()), DEEP.tasks(3)
    fast = case.learner.adapt(state, batch.support_x, batch.support_y)
    assert torch.equal(fast["5.weight"][0], fast["5.weight"][2]) and not torch.equal(*fast["3.weight"][:2])
    (gradient,) = torch.autograd.grad(case.learner.outer_loss(state, batch).loss, state.params["5.weight"])
    assert gradient.abs().min() > 0


def test_boil_adapts_all_but_the_head() -> None:
    assert gs.boil(gs.Conv4(filters=4)).adapted == tuple(
        f"convs.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")
    )
    assert "norms.0.bias" in gs.boil(gs.Conv4(filters=4), adapt_norm=True).adapted
    assert "convs.3.weight" not in gs.boil(gs.Conv4(filters=4), head="convs.3").adapted
    with pytest.raises(gs.UserError, match="boil adapts all but the head, and the model has only weight, bias"):
        gs.boil(nn.Linear(3, 2))


# head_start=


@pytest.mark.parametrize("sharing", ["alone", "global", "gate only", "batch only, tensor", "conditioned, global"])
@pytest.mark.parametrize("algorithm", ["maml", "first order", "meta-sgd", "maml++", "anil"])
def test_a_zero_head_equals_a_loop_over_tasks(algorithm: str, sharing: str) -> None:
    """Whatever the state has in its place, which gets no gradient."""
    case = build(TANH_NORM, algorithm, sharing, head_start="zero")
    case = case._replace(method=case.method._replace(start="zero", head=HEAD))
    assert_equal_to_reference(case, TANH_NORM, tasks=2)


@pytest.mark.parametrize("model", [RELU_NORM, CONV4], ids=["any module", "conv4"])
def test_a_zero_head_stays_zero_and_a_head_from_zero_does_not(model: Model) -> None:
    moves = {}
    for head_start in ("zero", "zero-init"):
        learner = gs.maml(model.make(), steps=2, sharing=gs.GradientSharing(), head_start=head_start)  # type: ignore[arg-type]
        state = learner.init(seed=0)
        assert all((state.params[name] == 0).all() for name in HEAD)
        adam, body = gs.optimiser(state, 1e-2), state.params[learner.adapted[0]].detach().clone()
        for seed in range(3):
            assert gs.meta_step(learner, state, adam, model.tasks(2, seed), micro_batch=1 + seed % 2).taken
        assert not torch.equal(state.params[learner.adapted[0]], body)
        moves[head_start] = max(state.params[name].abs().max().item() for name in HEAD)
    assert moves["zero"] == 0 < moves["zero-init"]


def test_a_head_from_zero_is_otherwise_a_learned_one() -> None:
    """Once it has moved, nothing tells the two apart."""
    plain, from_zero = (gs.maml(net(), steps=2, head_start=start) for start in ("learned", "zero-init"))  # type: ignore[arg-type]
    state = randomised(plain.init())
    assert torch.equal(plain.outer_loss(state, tasks()).loss, from_zero.outer_loss(state, tasks()).loss)


def test_head_starts_that_cannot_be() -> None:
    with pytest.raises(gs.UserError, match="head_start 'none' is not one of learned, zero-init, zero"):
        gs.maml(net(), head_start="none")  # type: ignore[arg-type]
    for learner in (lambda: gs.boil(net(), head_start="zero"), lambda: gs.maml(net(), adapt="0", head_start="zero")):
        with pytest.raises(gs.UserError, match=r"all of the head: it does not adapt 5.weight, 5.bias"):
            learner()


# Proto-MAML


def proto(model: Model = TANH_NORM, sharing: str = "alone", steps: int = 2, **more: Any) -> Case:
    return build(model, "proto-maml", sharing, steps, **more)


@pytest.mark.parametrize("sharing", ["gate only", "batch only, global", "memory only, tensor"])
def test_prototypes_with_each_control_equal_a_loop_over_tasks(sharing: str) -> None:
    assert_equal_to_reference(proto(sharing=sharing), TANH_NORM, tasks=3, iterations=3)


def test_no_steps_are_a_prototypical_network() -> None:
    """Classes by the squared distance to the mean of their features; the same loss, and the same gradient."""
    case = proto(steps=0)
    assert_equal_to_reference(case, TANH_NORM, tasks=3)
    state, batch = randomised(case.learner.init()), TANH_NORM.tasks(3)
    assert set(state.trainable()) == {
        f"params/{name}" for name, _ in case.model.named_parameters() if "head" not in name
    }
    logits = case.learner.logits(state, batch)
    body = nn.Sequential(case.model.body, nn.Flatten()).train()  # type: ignore[arg-type]
    weights = {f"0.{name.removeprefix('body.')}": weight for name, weight in state.params.items()}
    for t in range(3):
        support, query = (torch.func.functional_call(body, weights, (x[t],)) for x in (batch.support_x, batch.query_x))
        means = torch.stack([support[batch.support_y[t] == c].mean(0) for c in range(3)])
        expected = -(torch.cdist(query, means) ** 2)
        torch.testing.assert_close(logits[t].log_softmax(-1), expected.log_softmax(-1), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("model", [TANH_NORM, CONV4], ids=["any module", "conv4"])
def test_the_head_follows_the_ways_of_a_task(model: Model, steps: int) -> None:
    case = proto(model, steps=steps)
    learner, state = case.learner, randomised(case.learner.init())
    x, query_x = torch.randn(2, 10, *model.shape).double(), torch.randn(2, 4, *model.shape).double()
    y = torch.arange(5).repeat(2).expand(2, 10)
    fast = learner.adapt(state, x, y)
    assert fast["head.weight"].shape[:2] == (2, 5)
    for norm_statistics in ("batch", "support"):
        logits = learner.predict(fast, query_x, norm_statistics=norm_statistics)  # type: ignore[arg-type]
        assert logits.shape == (2, 4, 5)
    for t in range(2):
        module = learner.module_for(fast, t)
        assert module.head.out_features == 5  # type: ignore[union-attr]
        torch.testing.assert_close(module(query_x[t]), logits[t], rtol=1e-10, atol=1e-10)
        theta, expected = reference.adapt(case.model, state, x[t], y[t], query_x[t], case.method) if steps else (
            reference.start(case.model, state, x[t], y[t], case.method), None
        )  # fmt: skip
        for name in HEAD:
            torch.testing.assert_close(fast[name][t], theta[name], rtol=1e-10, atol=1e-10)
        if expected is not None:
            torch.testing.assert_close(learner.predict(fast, query_x)[t], expected, rtol=1e-10, atol=1e-10)


def test_from_the_same_head_it_is_maml() -> None:
    """A task whose prototypes MAML has as its head."""
    case, plain = proto(steps=3), gs.maml(TANH_NORM.make(), steps=3)
    state, batch = randomised(case.learner.init()), TANH_NORM.tasks(1)
    head = case.learner.adapt(state, batch.support_x, batch.support_y, steps=0)
    same = gs.MetaState({**state.params, **{name: head[name][0].detach() for name in HEAD}})
    expected = plain.adapt(same, batch.support_x, batch.support_y)
    for name, weight in case.learner.adapt(state, batch.support_x, batch.support_y).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-14)


def test_more_steps_at_test_than_in_training_and_none() -> None:
    case = proto(sharing="global")
    state, batch = randomised(case.learner.init()), TANH_NORM.tasks(2)
    starts = case.learner.adapt(state, batch.support_x, batch.support_y, steps=0)
    assert torch.equal(starts["body.0.weight"][1], state.params["body.0.weight"])
    assert case.learner.logits(state, batch, steps=4).isfinite().all()
    plain = gs.maml(TANH_NORM.make())
    with pytest.raises(gs.UserError, match="steps is 0"):
        plain.adapt(plain.init(), batch.support_x, batch.support_y, steps=0)


def test_padding_has_no_part_in_the_prototypes() -> None:
    case = proto(sharing="global")
    state, batch = randomised(case.learner.init()), TANH_NORM.tasks(2)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[:, 6:] = False
    padded_x = torch.cat([batch.support_x, torch.full((2, 2, *TANH_NORM.shape), torch.nan, dtype=torch.float64)], 1)
    padded_y = torch.cat([batch.support_y, torch.tensor([77, 1]).expand(2, 2)], 1)  # a class of padding, a real one
    padded = gs.Episodes(padded_x, padded_y, batch.query_x, batch.query_y, mask)
    plain, masked = (case.learner.outer_loss(state, one) for one in (batch, padded))
    torch.testing.assert_close(masked.loss, plain.loss, rtol=1e-12, atol=0)
    logits = [case.learner.logits(state, one) for one in (batch, padded)]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-10, atol=1e-10)


def test_a_class_without_examples_is_never_predicted() -> None:
    """Loss and gradients stay finite, and those of the classes that there are do not change."""
    case = proto()
    state, batch = randomised(case.learner.init()), TANH_NORM.tasks(2)
    wide = TANH_NORM.make()
    wide.head = nn.Linear(16, 5).double()
    learner = gs.proto_maml(wide, steps=2)
    one, other = learner.outer_loss(state, batch), case.learner.outer_loss(state, batch)
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-12, atol=0)
    leaves = list(state.trainable().values())
    for a, b in zip(*(torch.autograd.grad(out.loss, leaves) for out in (one, other)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_sharing_is_of_the_body_alone() -> None:
    learner = gs.proto_maml(net(), steps=2, sharing=gs.GradientSharing())
    state = learner.init()
    assert set(state.memory["sharing"]["ghat"]) == {"0.weight", "0.bias"}
    assert "5.weight" not in state.params


def test_what_prototypes_need() -> None:
    for model in (
        nn.Sequential(nn.Linear(3, 2, bias=False)),
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2), nn.PReLU()),
        nn.Sequential(nn.Conv2d(1, 2, 3)),
    ):
        with pytest.raises(gs.UserError, match=r"needs a head that is an nn.Linear with a trained weight and bias"):
            gs.proto_maml(model)
    x, y = torch.randn(2, 4, 3), torch.arange(2).repeat(2).expand(2, 4)
    learner = gs.proto_maml(nn.Sequential(nn.Linear(3, 2), nn.LogSoftmax(-1)))
    with pytest.raises(gs.UserError, match="something follows it"):
        learner.outer_loss(learner.init(), gs.Episodes(x, y, x, y))
    learner = gs.proto_maml(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)))
    with pytest.raises(gs.UserError, match="classes as targets"):
        learner.outer_loss(learner.init(), gs.Episodes(x, x[..., 0], x, x[..., 0]))
    with pytest.raises(gs.UserError, match="one vector per example"):
        x, y = torch.randn(2, 4, 5, 3), torch.arange(2).repeat(2).expand(2, 4)
        learner.outer_loss(learner.init(), gs.Episodes(x, y, x, y))
    for options in ({"steps": 0}, {"adapt": "5"}):
        with pytest.raises(gs.UserError, match="no gradient of the body is there to share"):
            gs.proto_maml(net(), sharing=gs.GradientSharing(), **options)  # type: ignore[arg-type]
    with pytest.raises(gs.UserError, match="arithmetic of NVIDIA GPUs"):
        gs.proto_maml(gs.Conv4(filters=4)).to("cpu", "tf32")


def test_a_head_alone_may_be_adapted_from_prototypes() -> None:
    learner = gs.proto_maml(net(), steps=2, adapt="5")
    fast = learner.adapt(learner.init(), tasks().support_x, tasks().support_y)
    assert learner.adapted == ("5.weight", "5.bias") and torch.equal(*fast["0.weight"][:2])
    assert learner.outer_loss(learner.init(), tasks()).loss.requires_grad


# Reptile


def test_reptile_equals_a_loop_over_tasks() -> None:
    for adapt_norm in (True, False):
        case = build(RELU_NORM, "maml", "alone", 2, adapt_norm)
        learner = gs.reptile(case.model, steps=2, adapt_norm=adapt_norm)
        case = case._replace(learner=learner, method=case.method._replace(outer="reptile"))
        assert_equal_to_reference(case, RELU_NORM, tasks=3)


@pytest.mark.parametrize("micro_batch", [None, 1, 2])
def test_with_plain_descent_reptile_moves_towards_the_adapted_weights(micro_batch: int | None) -> None:
    learner = gs.reptile(net(), steps=3)
    state, batch = learner.init(), tasks(3)
    before = {name: weight.detach().clone() for name, weight in state.params.items()}
    with torch.no_grad():
        fast = learner.adapt(state, batch.support_x, batch.support_y)
    sgd = torch.optim.SGD(state.trainable().values(), lr=0.5)
    outcome = gs.meta_step(learner, state, sgd, batch, micro_batch=micro_batch)
    for name, weight in before.items():
        expected = weight + 0.5 * (fast[name].mean(0) - weight)
        torch.testing.assert_close(state.params[name].detach(), expected, rtol=1e-12, atol=1e-14)
    logits = learner.predict(fast, batch.query_x)
    expected_loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.query_y.flatten())
    torch.testing.assert_close(outcome.loss, expected_loss, rtol=1e-12, atol=0)


def test_one_step_of_reptile_is_joint_training() -> None:
    """Its outer gradient is the inner rate times the gradient of the mean support loss."""
    learner, model = gs.reptile(net(), inner_lr=0.3, steps=1), net()
    state, batch = learner.init(), tasks(3)
    assert isinstance(batch.support_x, Tensor)
    found = torch.autograd.grad(learner.outer_loss(state, batch).loss, list(state.params.values()))
    rows = zip(batch.support_x, batch.support_y, strict=True)
    loss = torch.stack([nn.functional.cross_entropy(model(x), y) for x, y in rows]).mean()
    for one, other in zip(found, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        torch.testing.assert_close(one, 0.3 * other, rtol=1e-10, atol=1e-14)


def test_what_reptile_does_not_adapt_does_not_move() -> None:
    learner = gs.reptile(net(), steps=2, adapt_norm=False)
    for micro_batch in (None, 2):
        state = learner.init()
        before = state.params["1.weight"].detach().clone()
        gs.meta_step(learner, state, gs.optimiser(state, 1e-2), tasks(), micro_batch=micro_batch)
        assert torch.equal(state.params["1.weight"], before) and state.params["1.weight"].grad is None


def test_reptile_refuses_what_it_would_not_learn() -> None:
    with pytest.raises(gs.UserError, match="nothing would learn learned/sharing/m, learned/sharing/lam"):
        gs.reptile(net(), sharing=gs.GradientSharing())
    with pytest.raises(gs.UserError, match="learned/sharing/lam"):
        gs.reptile(net(), sharing=gs.GateOnly())


def test_reptile_keeps_the_memory_of_a_rule_that_learns_nothing() -> None:
    def update(at: gs.InnerStep) -> gs.Moved:
        total = at.memory["sum"] if at.total is None else at.total(at.gradients)
        return gs.Moved(at.gradients, remember={} if at.total is None else {"sum": total})

    def init(weights: Any, steps: int) -> Any:
        return {}, {"sum": {name: weight.new_zeros((steps, *weight.shape)) for name, weight in weights.items()}}

    learner = gs.reptile(net(), steps=2, sharing=gs.InnerRule("sums", init, update))
    state = learner.init()
    sums: list[dict[str, Tensor]] = []
    for micro_batch in (None, 3):
        outcome = gs.meta_step(learner, state, gs.optimiser(state, 1e-30), tasks(), micro_batch=micro_batch)
        sums.append(outcome.memory["sums"]["sum"])
    assert sums[0]["5.weight"].abs().max() > 0
    torch.testing.assert_close(sums[0], sums[1])


def test_the_head_of_a_model_is_the_owner_of_its_last_parameter() -> None:
    assert head_names(net()) == ("5.weight", "5.bias") == gs.anil(net()).adapted


class HeadFirst(nn.Module):
    """Its head comes before its body among the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(4, 3), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def test_a_head_that_is_named_starts_at_zero() -> None:
    assert gs.maml(HeadFirst(), head_start="zero", head="head").head == ("head.weight", "head.bias")
    assert gs.alfa(HeadFirst(), head_start="zero-init", head="head").head == ("head.weight", "head.bias")


def test_another_head_is_another_learner() -> None:
    """Else a run could be resumed with it."""
    kinds: list[dict[str, Any]] = [{"head_start": "zero"}, {"head_start": "zero-init"}]
    for kind in kinds:
        head, body, last = (fingerprint(gs.maml(HeadFirst(), head=head, **kind)) for head in ("head", "body", None))
        assert head != body == last
        assert head["algorithm"] == f"maml, head_start {kind['head_start']} (head)"


def test_a_zero_head_is_adapted_whole() -> None:
    """Else a part of it would be zero for ever, or learned after all."""
    with pytest.raises(gs.UserError, match=r"all of the head: it does not adapt 5\.weight$"):
        gs.maml(net(), adapt=["0", "5.bias"], head_start="zero")
    with pytest.raises(gs.UserError, match="reptile learns what it adapts"):
        gs.reptile(net(), adapt="5", head_start="zero")
    assert gs.maml(net(), adapt="5", head_start="zero").adapted == ("5.weight", "5.bias")


def test_a_head_that_is_partly_fixed_cannot_start_at_zero() -> None:
    model = HeadFirst()
    model.head.weight.requires_grad_(False)
    with pytest.raises(gs.UserError, match=r"sets the whole head, and head\.weight requires no gradient"):
        gs.maml(model, head_start="zero", head="head")


@pytest.mark.parametrize("algorithm", [gs.maml, gs.boil, gs.proto_maml, gs.alfa], ids=lambda make: make.__name__)
def test_a_wrong_name_of_the_head_is_an_error(algorithm: Any) -> None:
    """Also where the head has no part of its own, so that a slip does not wait for another option."""
    with pytest.raises(gs.UserError, match="no weights under 'tail'"):
        algorithm(net(), head="tail")


def test_a_head_with_the_weight_of_another_layer_cannot_start_at_zero() -> None:
    """Only its bias would be zero: the weight belongs to the other layer too."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    with pytest.raises(gs.UserError, match=r"sets the whole head, and 2\.weight .* of another layer too"):
        gs.maml(model, head_start="zero")
    with pytest.raises(gs.UserError, match="weight and bias of its own"):
        gs.proto_maml(model)


@pytest.mark.parametrize(
    "adapt, message",
    [
        ([], "adapt is empty"),
        (3, "not 3"),
    ],
)
def test_a_choice_that_chooses_nothing(adapt: Any, message: str) -> None:
    with pytest.raises(gs.UserError, match=message):
        gs.maml(gs.Conv4(filters=4, image=(1, 16, 16)), adapt=adapt)


def test_sharing_of_the_body_leaves_the_named_head_alone_wherever_the_rule_is() -> None:
    inside = gs.chain(LeftOut(BodyOnly(gs.GradientSharing()), "last"), gs.momentum(0.9))
    for sharing in (BodyOnly(gs.GradientSharing()), inside):
        for head, left in ((None, ("31.weight", "31.bias")), ("5", ("5.weight", "5.bias"))):
            memory = gs.maml(deep(), sharing=sharing, head=head).init().memory["sharing"]["ghat"]
            assert set(memory) == {name for name, _ in deep().named_parameters()} - set(left)
    with pytest.raises(gs.UserError, match="no gradient of the body"):
        gs.maml(deep(), adapt="31", sharing="equivariant").init()
