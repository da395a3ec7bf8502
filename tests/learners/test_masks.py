"""Tasks with unequal numbers of examples: padded and masked, they give what each gives without its padding."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradshare as gs
from tests.support import reference
from tests.support.cases import ALGORITHMS, build, disagreements, randomised
from tests.support.models import CONV4, EXTRAS, REGRESSION, RELU_NORM, TANH_NORM, WAYS, Model

SUPPORT, QUERY = (6, 3, 5), (4, 7, 2)  # real examples of each of three tasks, of 6 and 7


def masked(entry: Model, seed: int = 1) -> tuple[gs.Episodes, Any]:
    """Tasks with padding that would spoil everything it touches, and the same tasks without it."""
    whole = entry.tasks(3, seed)
    support = (torch.arange(6) < torch.tensor(SUPPORT).unsqueeze(1))[:, [3, 0, 5, 2, 1, 4]]  # not at the end alone
    query = torch.arange(7) < torch.tensor(QUERY).unsqueeze(1)
    masks = {"support_x": support, "support_y": support, "query_x": query, "query_y": query}

    def spoiled(name: str) -> Tensor:
        part, mask = getattr(whole, name), masks[name]
        content = torch.nan if part.is_floating_point() else -100 if name.endswith("y") else 0
        return part.masked_fill(~mask.view(*mask.shape, *(1 for _ in part.shape[2:])), content)

    real = {name: [getattr(whole, name)[t][mask[t]] for t in range(3)] for name, mask in masks.items()}
    return gs.Episodes(*map(spoiled, masks), support, query), SimpleNamespace(**real)


def assert_equal_to_tasks_without_padding(case: Any, entry: Model) -> None:
    state = theirs = randomised(case.learner.init(seed=None))
    for seed in (10, 11):
        episodes, real = masked(entry, seed)
        out = case.learner.outer_loss(state, episodes)
        expected = reference.outer_loss(case.model, theirs, real, case.method)
        wrong = [line for line in disagreements(case, state, out, expected) if line]
        assert not wrong, "\n".join(wrong)
        state = dataclasses.replace(state, memory=out.memory)
        theirs = dataclasses.replace(state, memory={"sharing": {"ghat": expected.ghat, "seen": True}})


NETS = {
    "conv4": CONV4,
    "batch norm net": RELU_NORM,
    "regression": REGRESSION,
    "batch norm 1d": EXTRAS["mlp with batch norm 1d"],
    "layers used twice": EXTRAS["layers used twice"],
    "functional batch norm": EXTRAS["functional batch norm"],
    "group norm": EXTRAS["group norm"],
    "instance norm": EXTRAS["instance norm"],
    "transformer within an example": EXTRAS["transformer"],
    "tokens": EXTRAS["embedding"],
}


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "proto-maml"])  # it needs every class
@pytest.mark.parametrize("sharing", ["alone", "global"])
def test_each_algorithm_equals_a_loop_without_padding(algorithm: str, sharing: str) -> None:
    assert_equal_to_tasks_without_padding(build(TANH_NORM, algorithm, sharing), TANH_NORM)


@pytest.mark.parametrize("net", NETS)
def test_each_kind_of_net_equals_a_loop_without_padding(net: str) -> None:
    assert_equal_to_tasks_without_padding(build(NETS[net], "maml", "global"), NETS[net])


def test_adapting_and_predicting_with_masks() -> None:
    learner = gs.maml(TANH_NORM.make(), steps=2)
    state, (episodes, real) = learner.init(), masked(TANH_NORM)
    fast = learner.adapt(state, episodes.support_x, episodes.support_y, episodes.support_mask)
    for norm_statistics in ("batch", "support"):
        logits = learner.predict(fast, episodes.query_x, episodes.query_mask, norm_statistics=norm_statistics)  # type: ignore[arg-type]
        together = learner.logits(state, episodes, norm_statistics=norm_statistics)  # type: ignore[arg-type]
        assert torch.equal(logits[episodes.query_mask], together[episodes.query_mask])
        for t in range(3):
            alone = learner.adapt(state, real.support_x[t][None], real.support_y[t][None])
            expected = learner.predict(alone, real.query_x[t][None], norm_statistics=norm_statistics)[0]  # type: ignore[arg-type]
            torch.testing.assert_close(logits[t][: QUERY[t]], expected, rtol=1e-12, atol=1e-12)
            for name, value in alone.items():
                torch.testing.assert_close(fast[name][t], value[0], rtol=1e-11, atol=1e-12)


def test_a_mask_of_real_examples_alone_changes_nothing() -> None:
    learner, episodes = gs.maml(TANH_NORM.make(), steps=2, sharing="shared"), TANH_NORM.tasks(3)
    state, all_real = (
        learner.init(),
        [torch.ones(y.shape, dtype=torch.bool) for y in (episodes.support_y, episodes.query_y)],
    )
    expected = learner.outer_loss(state, episodes)
    found = learner.outer_loss(state, gs.Episodes(*episodes.tensors(), *all_real))
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)
    assert torch.equal(found.accuracy, expected.accuracy)


def test_a_step_with_masks_moves_the_state(dataset: gs.Dataset) -> None:
    learner = gs.maml(gs.Conv4(filters=4, image=(1, 28, 28)), steps=2, sharing=gs.GradientSharing())
    state = learner.init(seed=0)
    drawn = dataset.sample("train", gs.Shape(5, 1, 2), tasks=2, key=(0,))
    query = torch.arange(10) < torch.tensor([[10], [6]])
    episodes = dataclasses.replace(drawn, query_mask=query)
    outcome = gs.meta_step(learner, state, gs.optimiser(state, 1e-3), episodes)
    assert outcome.taken and outcome.accuracy is not None
    assert episodes[1:].query_mask.tolist() == query[1:].tolist() and episodes.to(torch.float64).query_mask is not None


class MixesByAttention(nn.Module):
    """Attention between the examples of a task, which is more than batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, WAYS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.head(x + (x @ x.T).softmax(-1) @ x)


class MixesForward(nn.Module):
    """Each example sees those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, WAYS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + x.cumsum(0))


class MixesBackward(MixesForward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flip(0)).flip(0)


class Centred(nn.Module):
    """A normalisation over the examples that is not batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, WAYS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x - x.mean(0))


class Counts(Centred):
    """Mixes nothing, but its outputs depend on how many examples there are."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * len(x)


class OverPlaces(nn.Module):
    """Batch norm over [examples * places, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(4, WAYS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x.view(-1, 2)).view(-1, 4))


VECTORS = Model(lambda: nn.Linear(4, WAYS), (4,))


@pytest.mark.parametrize("net", [MixesByAttention, MixesForward, MixesBackward, Centred, Counts])
def test_a_model_that_mixes_examples_is_an_error(net: Any) -> None:
    learner, (episodes, _) = gs.maml(net().double()), masked(VECTORS)
    with pytest.raises(gs.UserError, match="the model mixes the examples of a task"):
        learner.outer_loss(learner.init(), episodes)
    learner.outer_loss(learner.init(), VECTORS.tasks(3))  # without masks it may


def test_a_head_of_zeros_hides_nothing() -> None:
    net = MixesByAttention().double()
    nn.init.zeros_(net.head.weight)
    nn.init.zeros_(net.head.bias)
    learner, (episodes, _) = gs.maml(net), masked(VECTORS)
    with pytest.raises(gs.UserError, match="the model mixes the examples of a task"):
        learner.outer_loss(learner.init(), episodes)


@pytest.mark.parametrize("n", [2, 5])
def test_one_real_example_hides_nothing(n: int) -> None:
    """All of the first task's examples are then the same one."""
    x, y = torch.randn(2, n, 4, dtype=torch.float64), torch.zeros(2, n, dtype=torch.long)
    learner, first = gs.maml(MixesByAttention().double()), torch.arange(n) < torch.tensor([[1], [n]])
    with pytest.raises(gs.UserError, match="the model mixes the examples of a task"):
        learner.outer_loss(learner.init(), gs.Episodes(x, y, x, y, first, first))


def test_batch_norm_over_something_else_is_an_error() -> None:
    learner, (episodes, _) = gs.maml(OverPlaces().double()), masked(VECTORS)
    with pytest.raises(gs.UserError, match=r"batch norm sees a tensor \[12, 2\] where a task has 6 examples"):
        learner.outer_loss(learner.init(), episodes)


def test_a_loss_of_ones_own_takes_no_mask() -> None:
    episodes, _ = masked(VECTORS)
    for options in ({"loss": nn.functional.cross_entropy}, {"inner_loss": nn.functional.cross_entropy}):
        learner = gs.maml(VECTORS.make(), **options)  # type: ignore[arg-type]
        with pytest.raises(gs.UserError, match="masks need the loss cross_entropy or mse"):
            learner.outer_loss(learner.init(), episodes)


@pytest.mark.parametrize("change, reason", [
    ({"support_mask": torch.zeros(3, 6, dtype=torch.bool)}, "task 0 of the batch has no real support example"),
    ({"query_mask": torch.arange(7) < torch.tensor([[2], [0], [3]])}, "task 1 of the batch has no real query example"),
    ({"query_mask": torch.ones(3, 6, dtype=torch.bool)}, r"query_mask is a bool tensor \[3, 7\]"),
    ({"query_mask": torch.ones(3, 7)}, "not torch.float32"),
    ({"query_mask": [[True]]}, "not list"),
    ({"support_y": torch.tensor([[0, 1, 2, 0, 1, -100]] * 3)}, "a label of -100.*support_mask"),
    ({"query_y": torch.full((3, 7), -100, dtype=torch.int8)}, "a label of -100.*query_mask"),
])  # fmt: skip
def test_masks_and_labels_that_cannot_be(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(gs.UserError, match=reason):
        dataclasses.replace(VECTORS.tasks(3), **change)


def test_masks_that_cannot_be_of_a_prediction() -> None:
    learner, tasks = gs.maml(VECTORS.make(), steps=1), VECTORS.tasks(3)
    fast = learner.adapt(learner.init(), tasks.support_x, tasks.support_y)
    for mask in (torch.ones(3, 7), torch.ones(3, 6, dtype=torch.bool), torch.zeros(3, 7, dtype=torch.bool), True):
        with pytest.raises(gs.UserError, match="query"):
            learner.predict(fast, tasks.query_x, mask)  # type: ignore[arg-type]


def test_the_label_that_pytorch_ignores_is_not_ignored() -> None:
    learner = gs.maml(VECTORS.make())
    labels = torch.tensor([[0, 1, -100]])
    with pytest.raises(gs.UserError, match="labels go from -100 to 1, but the model has 3 outputs"):
        learner.losses(torch.zeros(1, 3, WAYS, dtype=torch.float64), labels)


def test_one_real_value_per_channel_is_an_error() -> None:
    entry = EXTRAS["mlp with batch norm 1d"]
    episodes = dataclasses.replace(entry.tasks(2), support_mask=torch.arange(6) < torch.tensor([[6], [1]]))
    learner = gs.maml(entry.make())
    with pytest.raises(gs.UserError, match="more than 1 value per channel"):
        learner.outer_loss(learner.init(), episodes)
