"""Recurrent layers and cells with many tasks: equal to PyTorch's own, one task at a time; and what raises an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import gradshare as gs
from tests.support.cases import assert_adapts_alone, assert_equal_to_reference, build
from tests.support.models import WAYS, Model

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

FEATURES, HIDDEN, LENGTH = 2, 3, 3
LAYERS: dict[str, Callable[..., nn.RNNBase]] = {
    "tanh": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "gru": nn.GRU,
    "lstm": nn.LSTM,
    "projected lstm": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=2, **options),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers, both ways, batch first": {"num_layers": 2, "bidirectional": True, "batch_first": True},
    "two layers, both ways, no bias": {"num_layers": 2, "bidirectional": True, "bias": False},
}
CELLS: dict[str, Callable[..., nn.RNNCellBase]] = {
    "tanh": nn.RNNCell,
    "relu": lambda *sizes, **options: nn.RNNCell(*sizes, nonlinearity="relu", **options),
    "gru": nn.GRUCell,
    "lstm": nn.LSTMCell,
}


class Run(NamedTuple):
    output: Tensor
    states: tuple[Tensor, ...]


class Sequences(nn.Module):
    """All outputs and states of a layer, and a head with a weight for each."""

    def __init__(self, layer: nn.RNNBase, starts: bool = False, unbatched: bool = False) -> None:
        super().__init__()
        self.layer, self.starts, self.unbatched, x = layer, None, unbatched, torch.zeros(1, LENGTH, FEATURES)
        if starts:
            self.starts = nn.ParameterList(0.3 * torch.randn_like(state) for state in self.run(x).states)
        self.head = nn.Linear(self.features(x).shape[1], WAYS)

    def run(self, x: Tensor) -> Run:
        hx = self.starts and tuple(start.expand(-1, len(x), -1).contiguous() for start in self.starts)
        x = x if self.layer.batch_first else x.transpose(0, 1)
        output, states = self.layer(x, hx if hx is None or isinstance(self.layer, nn.LSTM) else hx[0])
        output = output if self.layer.batch_first else output.transpose(0, 1)
        return Run(output, states if isinstance(states, tuple) else (states,))

    def features(self, x: Tensor) -> Tensor:
        if self.unbatched:
            output, states = self.layer(x.mean(0))
            return (x.sum((1, 2))[:, None] + output.flatten() + states[-1].sum()).tanh()
        run = self.run(x)
        return torch.cat([run.output.flatten(1), *(state.transpose(0, 1).flatten(1) for state in run.states)], 1)

    def forward(self, x: Tensor) -> Tensor:  # [n, length, features]
        return self.head(self.features(x))


class Cells(nn.Module):
    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(HIDDEN, WAYS)

    def forward(self, x: Tensor) -> Tensor:  # [n, length, features]
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(sum(state) if isinstance(state, tuple) else state)


def entry(kind: str, starts: bool = False, unbatched: bool = False, **options: Any) -> Model:
    return Model(
        lambda: Sequences(LAYERS[kind](FEATURES, HIDDEN, **options), starts, unbatched), shape=(LENGTH, FEATURES)
    )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", LAYERS)
def test_layer_equals_a_loop_over_tasks(kind: str, options: str) -> None:
    model = entry(kind, starts=options != "plain", **OPTIONS[options])
    assert_equal_to_reference(build(model), model, tasks=2)


@pytest.mark.parametrize("kind", LAYERS)
def test_layer_of_one_sequence_equals_a_loop_over_tasks(kind: str) -> None:
    model = entry(kind, unbatched=True, bidirectional=True)
    assert_equal_to_reference(build(model), model, tasks=2, iterations=1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", CELLS)
def test_cell_equals_a_loop_over_tasks(kind: str, bias: bool) -> None:
    model = Model(lambda: Cells(CELLS[kind](FEATURES, HIDDEN, bias=bias)), shape=(LENGTH, FEATURES))
    assert_equal_to_reference(build(model), model, tasks=2)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_that_is_not_adapted_equals_a_loop_over_tasks(kind: str) -> None:
    model = entry(kind, bidirectional=True)
    assert_equal_to_reference(build(model, "anil"), model, tasks=2, iterations=1)
    assert_adapts_alone(build(model), model, seen=True)


@pytest.mark.parametrize("kind", LAYERS)
def test_the_layers_of_the_loop_have_both_derivatives(kind: str) -> None:
    """The other tests compare with PyTorch's layers on a CPU, so their second derivatives must be right."""
    torch.manual_seed(0)
    layer = LAYERS[kind](1, 2 if kind != "projected lstm" else 3, bidirectional=True).double()
    weights = [weight.detach().clone().requires_grad_() for weight in layer.parameters()]
    names = [name for name, _ in layer.named_parameters()]
    x = torch.randn(2, 1, 1, dtype=torch.float64)

    def run(*weights: Tensor) -> Tensor:
        output, states = torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))
        return torch.cat([output.flatten(), *(state.flatten() for state in states)])

    assert gradcheck(run, weights, fast_mode=True)
    assert gradgradcheck(run, weights, fast_mode=True)


@pytest.mark.parametrize("kind", LAYERS)
def test_predictions_are_those_of_the_module_itself(kind: str) -> None:
    model = entry(kind, starts=True, **OPTIONS["two layers, both ways, batch first"])
    module, tasks = model.make(), model.tasks(2)
    learner = gs.maml(module, steps=1)
    fast = {name: torch.stack([weight, weight]) for name, weight in learner.init().params.items()}
    with torch.no_grad():
        ours = learner.predict(fast, tasks.query_x)
        theirs = torch.stack([module(x) for x in tasks.query_x])
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_users_layer_is_not_changed_and_the_learners_keeps_its_own_weights(kind: str) -> None:
    model = entry(kind, num_layers=2)
    module, tasks = model.make(), model.tasks(2)
    module.layer.flatten_parameters()
    before, attributes = module(tasks.query_x[0]), set(vars(module.layer))
    learner = gs.maml(module, steps=2)
    loss = learner.outer_loss(learner.init(), tasks).loss
    assert torch.equal(module(tasks.query_x[0]), before) and set(vars(module.layer)) == attributes
    own = learner.module.layer
    assert set(vars(own)) == attributes
    assert all(a is b for a, b in zip(own._flat_weights, own.parameters(), strict=True))
    assert torch.equal(learner.module(tasks.query_x[0]), before)
    again = learner.to("cpu")  # copies the module
    assert torch.equal(again.outer_loss(again.init(), tasks).loss, loss)


def test_weights_of_tasks_are_not_moved_in_memory() -> None:
    """PyTorch does so on a GPU, by their addresses, but weights of many tasks have no addresses."""

    class Flattening(nn.LSTM):
        def forward(self, *args: Any) -> Any:
            self.flatten_parameters()
            return super().forward(*args)

    module = Sequences(Flattening(FEATURES, HIDDEN)).double()
    learner = gs.maml(module, steps=1)
    with mock.patch.object(nn.RNNBase, "flatten_parameters", side_effect=AssertionError("moved")):
        assert learner.outer_loss(learner.init(), entry("lstm").tasks(2)).loss.isfinite()
        with pytest.raises(AssertionError, match="moved"):
            learner.module.layer.flatten_parameters()


def test_weights_are_restored_after_an_error() -> None:
    learner = gs.maml(Sequences(nn.GRU(FEATURES, HIDDEN)).double(), steps=1)
    tasks = entry("gru").tasks(2)
    support, query = (x.repeat(1, 1, 2, 1) for x in (tasks.support_x, tasks.query_x))
    with pytest.raises(gs.UserError, match="cannot take the inputs"):  # the head has other sizes
        learner.outer_loss(learner.init(), gs.Episodes(support, tasks.support_y, query, tasks.query_y))
    assert "flatten_parameters" not in vars(learner.module.layer)
    copy.deepcopy(learner.module)


@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_between_layers_is_an_error_where_it_drops(kind: str) -> None:
    dropping, plain = (entry(kind, num_layers=2, dropout=p).make() for p in (0.4, 0.0))
    plain.load_state_dict(dropping.state_dict())
    with pytest.raises(gs.UserError, match=r"'layer'.*p=0.4"):
        gs.maml(dropping)
    tasks, learners = entry(kind).tasks(2), [gs.maml(dropping.eval(), steps=1), gs.maml(plain, steps=1)]
    a, b = (learner.outer_loss(learner.init(), tasks).loss for learner in learners)
    assert torch.equal(a, b)
    learners[0].module.train()
    with pytest.raises(gs.UserError, match=r"torch\.\w+ .*p=0.4"):
        learners[0].outer_loss(learners[0].init(), tasks)


@pytest.mark.filterwarnings("ignore:dropout option adds dropout after all but last")
def test_one_layer_has_nothing_to_drop() -> None:
    model = entry("gru", dropout=0.4)
    assert_equal_to_reference(build(model), model, tasks=2, iterations=1)


class Packed(nn.Module):
    def __init__(self, layer: nn.RNNBase, by_hand: bool) -> None:
        super().__init__()
        self.layer, self.by_hand = layer, by_hand

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hand:
            packed = PackedSequence(x.transpose(0, 1).flatten(0, 1), torch.tensor([len(x)] * LENGTH))
        else:
            packed = pack_padded_sequence(x, torch.tensor([LENGTH] * len(x)), batch_first=True)
        return self.layer(packed)[0].data[-len(x) :]


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_packed_sequences_are_an_error(kind: str, by_hand: bool) -> None:
    learner = gs.maml(Packed(LAYERS[kind](FEATURES, HIDDEN).double(), by_hand), steps=1)
    with pytest.raises(gs.UserError, match="PackedSequence"):
        learner.outer_loss(learner.init(), entry(kind).tasks(2))


@pytest.mark.parametrize("kind", CELLS)
def test_states_of_a_wrong_shape_are_an_error(kind: str) -> None:
    class OneState(Cells):
        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(1, HIDDEN)
            return self.head(self.cell(x[:, 0], (state, state) if kind == "lstm" else state)[0])

    learner = gs.maml(OneState(CELLS[kind](FEATURES, HIDDEN)).double(), steps=1)
    with pytest.raises(gs.UserError, match=r"\[1, 3\].*\[6, 3\]"):
        learner.outer_loss(learner.init(), entry(kind).tasks(2))


@pytest.mark.parametrize("kind", LAYERS)
def test_sequences_of_no_steps_are_an_error(kind: str) -> None:
    tasks = entry(kind).tasks(2)
    none = gs.Episodes(tasks.support_x[:, :, :0], tasks.support_y, tasks.query_x[:, :, :0], tasks.query_y)
    learner = gs.maml(entry(kind).make(), steps=1)
    with pytest.raises(gs.UserError, match="0 steps"):
        learner.outer_loss(learner.init(), none)
