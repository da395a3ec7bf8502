"""What the gradients of tasks have in common where labels are assigned at random: docs/when-to-share.md."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import gradshare as gs
from gradshare.method.mixing import equivariant_sharing

WAYS, SHOTS = 4, 2
ORDERS = torch.tensor(list(permutations(range(WAYS))))  # [24, ways]


def net(head: str = "learned") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.SiLU(), nn.Flatten(), nn.Linear(48, WAYS)).double()
    with torch.no_grad():
        if head == "zero":
            model[-1].weight.zero_(), model[-1].bias.zero_()
        if head == "tied":  # the same weights for each class
            model[-1].weight.copy_(model[-1].weight[:1].expand(WAYS, -1)), model[-1].bias.fill_(0.7)
    return model


def images() -> tuple[Tensor, Tensor]:
    """Support images of one task, and their classes."""
    x = torch.randn(WAYS * SHOTS, 1, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, torch.arange(WAYS).repeat_interleave(SHOTS)


def all_assignments() -> tuple[Tensor, Tensor]:
    """The same images 24 times, with every assignment of the labels to the classes."""
    x, y = images()
    return x.expand(len(ORDERS), *x.shape), ORDERS[:, y]


class Watch:
    """A rule that keeps the gradients that it sees: MAML, watched."""

    name = "watch"

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def init(self, weights: Any, steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {}, {}

    def update(self, at: gs.InnerStep) -> gs.Moved:
        self.seen.append({name: gradient.detach() for name, gradient in at.gradients.items()})
        return gs.Moved(at.gradients)


def gradients(model: nn.Module, steps: int) -> list[dict[str, Tensor]]:
    """The gradients of all 24 tasks at each inner step, {name: [24, *shape]}."""
    watch = Watch()
    learner = gs.maml(model, inner_lr=0.5, steps=steps, sharing=watch)
    learner.adapt(learner.init(), *all_assignments())
    return watch.seen


def towards_uniform(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of the cross-entropy with the target 1 / ways for each class: it knows no class."""
    weights = {name: w.detach().requires_grad_() for name, w in model.named_parameters()}
    logits = functional_call(model, weights, (images()[0],))
    loss = F.cross_entropy(logits, torch.full_like(logits, 1 / WAYS))
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_over_all_assignments_the_mean_gradient_of_step_one_is_that_towards_uniform_predictions() -> None:
    model = net()
    expected = towards_uniform(model)
    (first, second) = gradients(model, 2)
    for name, own in first.items():  # of the body and of the head
        if name == "0.bias":  # before batch norm: zero
            continue
        if name != "4.bias":  # which sees how often each class is there, and that is equally often
            assert own.mean(0).norm() < 0.9 * own.flatten(1).norm(dim=1).mean(), "the tasks should differ"
        assert relative(own.mean(0), expected[name]) < 1e-12
    assert relative(second["0.weight"].mean(0), expected["0.weight"]) > 0.1  # later the weights know the labels


def test_the_shared_vector_of_step_one_knows_no_class() -> None:
    x, y = all_assignments()
    learner = gs.maml(net(), steps=1, sharing=gs.GradientSharing("tensor"))
    ghat = learner.outer_loss(learner.init(), gs.Episodes(x, y, x, y)).memory["sharing"]["ghat"]
    expected = towards_uniform(net())
    for name in ("0.weight", "4.weight", "4.bias"):
        torch.testing.assert_close(ghat[name][0], expected[name] / expected[name].norm(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("head", ["learned", "zero", "tied"])
def test_from_step_two_on_the_body_of_a_zero_or_tied_head_does_not_depend_on_the_labels(head: str) -> None:
    first, *later = (step["0.weight"] for step in gradients(net(head), 4))
    if head == "learned":
        assert all(relative(own[1], own[0]) > 0.1 for own in (first, *later))
        return
    assert first.abs().max() < 1e-14  # no gradient reaches the body
    for own in later:
        assert own.norm() > 1e-3
        torch.testing.assert_close(own, own[:1].expand_as(own), rtol=1e-9, atol=1e-13)


def test_equivariant_sharing_gives_renamed_outputs_to_a_task_whose_classes_are_renamed() -> None:
    """The classes of one task of a batch get other numbers: it matters to nothing else. In plain sharing it does."""
    x, y = all_assignments()

    def logits(sharing: gs.GradientSharing, order: Tensor) -> Tensor:
        labels = torch.cat([order[y[:1]], y[1:3]])
        batch = gs.Episodes(x[:3], labels, x[:3], labels)
        learner = gs.maml(net(), steps=3, sharing=sharing, head_start="zero")
        state = learner.init()
        state.memory = learner.outer_loss(state, batch).memory
        found = learner.logits(state, batch).detach()
        return torch.cat([found[:1][..., order], found[1:]])  # back to the old numbers

    same, renamed = torch.arange(WAYS), torch.tensor([2, 0, 3, 1])
    for sharing, equal in ((equivariant_sharing(), True), (gs.GradientSharing(), False)):
        apart = relative(logits(sharing, renamed), logits(sharing, same))
        assert (apart < 1e-10) == equal, (sharing, apart)


def test_a_tied_head_is_a_head_at_zero() -> None:
    """Cross-entropy sees differences of logits alone."""
    x, y = all_assignments()
    found = []
    for head in ("zero", "tied"):
        learner = gs.maml(net(head), inner_lr=0.5, steps=3)
        out = gs.Episodes(x, y, x, y)
        found.append(learner.logits(learner.init(), out).log_softmax(-1))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
