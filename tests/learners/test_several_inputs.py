"""Inputs of several tensors: a tuple or a dict goes to the model as its arguments, or whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradshare as gs
from tests.support.cases import ALGORITHMS

TASKS, N, Q, WAYS = 3, 4, 5, 3


class Two(nn.Module):
    """The product of two inputs; `order` says how the model takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, WAYS)

    def compute(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.body(x))) * scale)


class AsArguments(Two):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.compute(x, scale)


class AsOne(Two):
    def forward(self, batch: Any) -> Tensor:
        return self.compute(*(batch.values() if isinstance(batch, dict) else batch))


class Joined(Two):
    """The same from one tensor: the last column is the scale."""

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x[:, :4], x[:, 4:])


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def joined() -> gs.Episodes:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TASKS, N + Q, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(WAYS, (TASKS, N + Q), generator=generator)
    return gs.Episodes(x[:, :N], y[:, :N], x[:, N:], y[:, N:])


def in_parts(make: Callable[[Tensor, Tensor], Any]) -> gs.Episodes:
    whole = joined()
    support, query = (make(x[..., :4], x[..., 4:]) for x in (whole.support_x, whole.query_x))  # type: ignore[index]
    return gs.Episodes(support, whole.support_y, query, whole.query_y)


def as_tuple(x: Tensor, scale: Tensor) -> Any:
    return x, scale


def as_dict(x: Tensor, scale: Tensor) -> Any:
    return {"x": x, "scale": scale}


@pytest.mark.parametrize("make", [as_tuple, as_dict])
@pytest.mark.parametrize("kind", [AsArguments, AsOne])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_several_inputs_give_what_one_gives(kind: type[nn.Module], make: Any, algorithm: str) -> None:
    options = {"steps": 2, "sharing": gs.GradientSharing()}
    one, several = (ALGORITHMS[algorithm](made(model), **options) for model in (Joined, kind))  # type: ignore[arg-type]
    state, episodes = one.init(), in_parts(make)
    leaves = list(state.trainable().values())
    expected, found = one.outer_loss(state, joined()), several.outer_loss(state, episodes)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)
    wanted = torch.autograd.grad(expected.loss, leaves, materialize_grads=True)
    for ours, theirs in zip(torch.autograd.grad(found.loss, leaves, materialize_grads=True), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    fast = several.adapt(state, episodes.support_x, episodes.support_y)
    for norm_statistics in ("batch", "support"):
        logits = one.logits(state, joined(), norm_statistics=norm_statistics)
        found = several.predict(fast, episodes.query_x, norm_statistics=norm_statistics)
        torch.testing.assert_close(found, logits, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", [as_tuple, as_dict])
def test_a_task_of_its_own_module(make: Any) -> None:
    learner, episodes = gs.maml(made(AsArguments), steps=1), in_parts(make)
    fast = learner.adapt(learner.init(), episodes.support_x, episodes.support_y)
    expected = learner.predict(fast, episodes.query_x, norm_statistics="support")[1]
    x, scale = joined().query_x[1].split([4, 1], dim=-1)  # type: ignore[index]
    torch.testing.assert_close(learner.module_for(fast, 1)(x, scale), expected)


@pytest.mark.parametrize("make", [as_tuple, as_dict])
def test_masks_and_several_inputs(make: Any) -> None:
    learner, masks = (
        gs.maml(made(AsArguments), steps=2),
        [torch.arange(n) < torch.tensor([[n], [2], [3]]) for n in (N, Q)],
    )
    state, episodes = learner.init(), in_parts(make)
    masked = gs.Episodes(episodes.support_x, episodes.support_y, episodes.query_x, episodes.query_y, *masks)
    losses = learner.outer_loss(state, masked).losses
    for task in range(TASKS):
        one, (n, q) = episodes[task : task + 1], (int(mask[task].sum()) for mask in masks)
        parts = [
            {name: value[:, :n] for name, value in x.items()} if isinstance(x, dict) else tuple(v[:, :n] for v in x)
            for x, n in ((one.support_x, n), (one.query_x, q))
        ]
        alone = gs.Episodes(parts[0], one.support_y[:, :n], parts[1], one.query_y[:, :q])
        torch.testing.assert_close(losses[task], learner.outer_loss(state, alone).losses[0], rtol=1e-12, atol=0)


class Edges(nn.Module):
    """A graph a task: features of nodes, and edges between them, whose number is another."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, WAYS)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:  # [n, 4], [edges, 2]
        x = torch.tanh(self.body(nodes))
        return self.head(x.index_add(0, edges[:, 1], x[edges[:, 0]]))


def test_inputs_with_other_axes_than_examples() -> None:
    torch.manual_seed(0)
    learner = gs.maml(Edges().double(), steps=2, sharing=gs.GradientSharing())
    x, edges = torch.randn(TASKS, 6, 4).double(), torch.randint(6, (TASKS, 9, 2))
    labels = torch.randint(WAYS, (TASKS, 6))
    episodes = gs.Episodes((x, edges), labels, (x, edges), labels)
    state = learner.init()
    outcome = gs.meta_step(learner, state, gs.optimiser(state, 1e-3), episodes)
    assert outcome.taken
    moved = episodes.to(torch.float32)
    assert [part.dtype for part in moved.support_x] == [torch.float32, torch.int64]  # type: ignore[union-attr]
    assert [part.shape[0] for part in episodes[:2].tensors()] == [2] * 6
    same = episodes.map(torch.clone)
    assert all(map(torch.equal, same.tensors(), episodes.tensors())) and type(same.support_x) is tuple
    masked = gs.Episodes((x, edges), labels, (edges,), labels, query_mask=torch.arange(6) < torch.full((TASKS, 1), 4))
    with pytest.raises(gs.UserError, match="at least one of the inputs starts with"):
        learner.outer_loss(state, masked)


@pytest.mark.parametrize("x, reason", [
    ((torch.zeros(3, 4), None), "a tuple or dict of tensors, not Tensor, NoneType"),
    ([torch.zeros(3, 4)], "not list"), ((), "not nothing"), ({}, "not nothing"),
    ((torch.zeros(3, 4), torch.zeros(2, 4)), r"the same number of tasks, not \[2, 4\]"),
    ((torch.zeros(2, 4),), "support_x has 2 tasks and support_y 3"),
    (torch.zeros(3, 4, 2).to_sparse(), "support_x has the layout sparse_coo"),
    (torch.zeros(3, 4, 2, dtype=torch.complex64), "support_x has complex numbers"),
])  # fmt: skip
def test_inputs_that_cannot_be(x: Any, reason: str) -> None:
    y = torch.zeros(3, 4, dtype=torch.long)
    with pytest.raises(gs.UserError, match=reason):
        gs.Episodes(x, y, torch.zeros(3, 4, 2), y)
    learner = gs.maml(nn.Linear(2, 2))
    with pytest.raises(gs.UserError, match=reason):
        learner.adapt(learner.init(), x, y)
