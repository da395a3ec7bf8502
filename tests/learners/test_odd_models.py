"""Models and rules that would be silently wrong, or fail with a message of PyTorch's: one sentence instead."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradshare as gs
from gradshare.method.rules import NOTHING

TASKS, N = 3, 4


def batch(*shape: int) -> gs.Episodes:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, TASKS, N, *(shape or (4,)), generator=generator)
    y = torch.randint(3, (2, TASKS, N), generator=generator)
    return gs.Episodes(x[0], y[0], x[1], y[1])


class Net(nn.Module):
    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.head, self.change = nn.Linear(4, 3), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.head(x))


@pytest.mark.parametrize("change, reason", [
    (lambda y: None, "the model returns None; it must return one tensor"),
    (lambda y: [y], "the model returns a list; it must return one tensor"),
    (lambda y: {"logits": y, "more": y}, "the model returns a dict; it must return one tensor"),
    (lambda y: torch.from_numpy(y.detach().numpy()), "an operation that cannot run for many tasks at once"),
    (lambda y: y * random.random(), "random numbers with Python's module random"),
    (lambda y: y * np.random.rand(), r"random numbers with Python's module numpy\.random"),
])  # fmt: skip
def test_what_a_model_computes(change: Any, reason: str) -> None:
    learner = gs.maml(Net(change))
    for _ in range(2):  # and again, until the model is another
        with pytest.raises(gs.UserError, match=reason):
            learner.outer_loss(learner.init(), batch())


def test_random_numbers_elsewhere_are_no_matter() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        random.random()
        return nn.functional.cross_entropy(outputs, targets)

    learner = gs.maml(nn.Linear(4, 3), loss=loss)
    learner.outer_loss(learner.init(), batch())


def hooked() -> nn.Module:
    model = nn.Linear(4, 3)
    model.weight.register_hook(lambda gradient: gradient * 2)
    return model


def hooked_after() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].bias.register_post_accumulate_grad_hook(lambda weight: None)
    return model


def hooked_layer() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].register_full_backward_hook(lambda layer, gradients, _: gradients)
    return model


@pytest.mark.parametrize("make, reason", [
    (hooked_layer, "layer '0' has a backward hook, which would have no effect"),
    (hooked, "parameter 'weight' has a hook, which would have no effect"),
    (hooked_after, r"parameter '0\.bias' has a hook"),
    (lambda: nn.DataParallel(nn.Linear(4, 3)), "the model is wrapped in DataParallel: give the module inside"),
    (lambda: torch.compile(nn.Linear(4, 3), backend="eager"), r"is compiled by torch\.compile: give the original"),
])  # fmt: skip
def test_models_that_cannot_be(make: Any, reason: str) -> None:
    for algorithm in (gs.maml, gs.anil):
        with pytest.raises(gs.UserError, match=reason):
            algorithm(make())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_script() -> None:
    script = torch.jit.trace(nn.Linear(4, 3), torch.zeros(1, 4))
    with pytest.raises(gs.UserError, match=r"layer '0' is a torch\.jit module"):
        gs.maml(nn.Sequential(script, nn.Linear(3, 3)))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 40, 40), (3, 32), (3,)])
def test_images_of_another_size_than_the_networks(shape: tuple[int, ...]) -> None:
    learner = gs.maml(gs.Conv4(ways=3, filters=4, image=(3, 28, 28)))
    with pytest.raises(gs.UserError, match=r"the model takes images of \[3, 28, 28\], not \["):
        learner.outer_loss(learner.init(), batch(*shape))
    assert learner.logits(learner.init(), batch(3, 30, 31)).shape == (TASKS, N, 3)  # the head has the same size


@pytest.mark.parametrize("device", ["meta", "mps", "cpu:3", "cuda:99", "tpu", None])
def test_devices_that_cannot_be(device: Any) -> None:
    with pytest.raises(gs.UserError, match="device"):
        gs.maml(nn.Linear(4, 3)).to(device)


def test_precisions_that_cannot_be() -> None:
    learner: Any = gs.maml(nn.Linear(4, 3))
    with pytest.raises(gs.UserError, match="a precision is float32, tf32, bf16, not 'float16'"):
        learner.to("cpu", "float16")


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(lambda x: torch.tanh(self.body(x)), x, use_reentrant=False))


@pytest.mark.parametrize("algorithm", [gs.maml, gs.anil])
@pytest.mark.parametrize("options", [{}, {"micro_batch": 1}])
def test_a_checkpoint_in_the_model(algorithm: Any, options: dict[str, Any]) -> None:
    learner = algorithm(Checkpointed())
    state = learner.init()
    with pytest.raises(gs.UserError, match=r"as torch\.utils\.checkpoint does.*checkpoint=True or micro_batch="):
        gs.meta_step(learner, state, gs.optimiser(state, 1e-3), batch(), **options)
    if algorithm is gs.maml:
        with pytest.raises(gs.UserError, match=r"as torch\.utils\.checkpoint does"):
            learner.adapt(state, batch().support_x, batch().support_y)


class TwoNames(nn.Module):
    """One layer under two names, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.again, self.tied, self.head = self.body, nn.Linear(4, 4), nn.Linear(4, 3)
        self.tied.weight = self.body.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.tied(torch.tanh(self.again(torch.tanh(self.body(x))))))


def test_a_layer_with_two_names_and_a_tied_weight() -> None:
    model, tasks = TwoNames(), batch()
    learner = gs.maml(model, inner_lr=0.1, steps=2)
    fast = learner.adapt(learner.init(), tasks.support_x, tasks.support_y)
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in learner.init().params.items())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        sgd.zero_grad()
        nn.functional.cross_entropy(model(tasks.support_x[1]), tasks.support_y[1]).backward()
        sgd.step()
    adapted = learner.module_for(fast, 1)
    assert adapted.again is adapted.body and len(list(adapted.parameters())) == 5
    torch.testing.assert_close(adapted(tasks.query_x[1]), model(tasks.query_x[1]))


class Counting(nn.Module):
    """Puts another tensor in the place of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.head(x - self.mean)


def test_a_model_that_replaces_its_buffer() -> None:
    learner = gs.maml(Counting())
    with pytest.raises(gs.UserError, match="the model writes to its buffer 'mean' when it runs"):
        learner.outer_loss(learner.init(), batch())


# Rules


def rule_of(update: Callable[[Any], Any], **options: Any) -> Any:
    return gs.InnerRule("own", lambda weights, steps: ({}, {}), update, **options)


@pytest.mark.parametrize("update, reason", [
    (lambda at: at.gradients, r"the rule 'own' returns gs\.Moved\(.*\), with a dict first, not dict"),
    (lambda at: None, "not NoneType"),
    (lambda at: gs.Moved(at.gradients["weight"]), "not Tensor"),
    (lambda at: gs.Moved({"weight": at.gradients["weight"]}), "gives no direction to the weight 'bias': found nothing"),
    (lambda at: gs.Moved({**at.gradients, "bias": 0.1}), "gives no direction to the weight 'bias': found float"),
    (lambda at: gs.Moved({name: g.mean(0) for name, g in at.gradients.items()}),
     r"gives the weight 'weight' a direction of shape \[3, 4\], and its gradients have \[3, 3, 4\]"),
    (lambda at: gs.Moved({name: g.sum(0, keepdim=True) for name, g in at.gradients.items()}), r"shape \[1, 3, 4\]"),
])  # fmt: skip
@pytest.mark.parametrize("algorithm", [gs.maml, gs.first_order_maml, gs.meta_sgd])
def test_rules_that_move_wrongly(algorithm: Any, update: Any, reason: str) -> None:
    learner = algorithm(nn.Linear(4, 3), sharing=rule_of(update))
    state = learner.init()
    for use in (learner.outer_loss, learner.logits, learner.outer_loss):
        with pytest.raises(gs.UserError, match=reason):
            use(state, batch())


def test_a_rule_is_looked_at_once() -> None:
    seen: list[Any] = []

    class Watched(dict[str, Tensor]):
        def get(self, *args: Any) -> Any:  # adapt itself never calls it
            seen.append(args)
            return super().get(*args)

    learner = gs.maml(nn.Linear(4, 3), sharing=rule_of(lambda at: gs.Moved(Watched(at.gradients), NOTHING)))
    state = learner.init()
    learner.outer_loss(state, batch())
    looked = len(seen)
    learner.outer_loss(state, batch())
    assert looked == len(seen) > 0


# As text


def test_a_learner_prints_in_a_few_words() -> None:
    learner = gs.maml(gs.Conv4(), inner_lr=0.1, sharing=gs.GradientSharing())
    text = repr(learner)
    assert text == (
        "Learner(Conv4 of 70,085 weights, 10 of its tensors adapted; rule GradientSharing(norm='global',"
        " conditioned=False), Scale(rate=0.1); steps=5, loss='cross_entropy')"
    )
    shared = gs.maml(nn.Linear(4, 3), sharing=gs.GradientSharing(), steps=2).init()
    assert repr(shared) == (
        "MetaState(params: 2 tensors of 15 numbers; learned: 2 tensors of 4 numbers; memory: 3 tensors of 31 numbers)"
    )
    own = repr(gs.maml_plus_plus(nn.Linear(4, 3), inner_loss=nn.functional.cross_entropy))
    assert "inner_loss=cross_entropy" in own and "0x" not in own
