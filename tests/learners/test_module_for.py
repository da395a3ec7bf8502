"""A task's adapted network as an ordinary module, and predictions with the support set's batch norm statistics."""

from __future__ import annotations

import copy
import dataclasses
import io
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradshare as gs
from tests.support.cases import ALGORITHMS, build, randomised
from tests.support.models import CONV4, EXTRAS, RELU_NORM, WAYS, Model

RESIDUAL, TWICE = EXTRAS["residual block, in place"], EXTRAS["layers used twice"]
NETS = {
    "conv4": CONV4,
    "batch norm net": RELU_NORM,
    "residual": RESIDUAL,
    "layers used twice": TWICE,
    "batch norm 1d": EXTRAS["mlp with batch norm 1d"],
    "series": EXTRAS["conv 1d, batch norm 1d"],
    "subclass of batch norm": EXTRAS["subclass of batch norm"],
    "batch norm without gain": EXTRAS["batch norm without gain"],
    "batch norm, other settings": EXTRAS["batch norm, other settings"],
    "frozen weights": EXTRAS["frozen weights"],
    "tied weights, no batch norm": EXTRAS["tied weights"],
    "weight norm": EXTRAS["weight norm"],
    "buffers": EXTRAS["buffers"],
}


def assert_leaves_whole(learner: gs.Learner, state: gs.MetaState, tasks: gs.Episodes) -> None:
    """A task's module gives what `predict` gives, for all examples and for one, and owns what it has."""
    fast = learner.adapt(state, tasks.support_x, tasks.support_y)
    expected = learner.predict(fast, tasks.query_x, norm_statistics="support")
    for task in range(tasks.tasks):
        module = learner.module_for(fast, task)
        assert not any(layer.training for layer in module.modules())
        torch.testing.assert_close(module(tasks.query_x[task]), expected[task], rtol=1e-12, atol=1e-12)
        alone = torch.cat([module(tasks.query_x[task, i : i + 1]) for i in range(tasks.query_y.shape[1])])
        torch.testing.assert_close(alone, expected[task], rtol=1e-11, atol=1e-12)
        own = [*module.parameters(), *module.buffers()]
        places = {tensor.untyped_storage().data_ptr() for tensor in own if tensor.numel()}
        assert not places & {tensor.untyped_storage().data_ptr() for tensor in fast.values()}
        assert all(weight.is_leaf for weight in module.parameters())
        wanted = {name: weight.requires_grad for name, weight in learner.module.named_parameters()}
        assert {name: weight.requires_grad for name, weight in module.named_parameters()} == wanted


@pytest.mark.parametrize("net", NETS)
def test_any_network_leaves_whole(net: str) -> None:
    case = build(NETS[net], "maml", "global")
    assert_leaves_whole(case.learner, randomised(case.learner.init()), NETS[net].tasks(2))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_leaves_whole(algorithm: str) -> None:
    case = build(RELU_NORM, algorithm, "global", steps=3)
    state = randomised(case.learner.init())
    state = dataclasses.replace(state, memory=case.learner.outer_loss(state, RELU_NORM.tasks(3, seed=5)).memory)
    assert_leaves_whole(case.learner, state, RELU_NORM.tasks(2))


@pytest.mark.parametrize("algorithm", ["maml", "maml++"])
def test_statistics_are_those_of_the_support_set_at_the_final_weights(algorithm: str) -> None:
    case = build(RELU_NORM, algorithm, "alone")
    learner, tasks = case.learner, RELU_NORM.tasks(2)
    fast = learner.adapt(randomised(learner.init()), tasks.support_x, tasks.support_y)
    for task in range(2):
        model = copy.deepcopy(case.model).train()  # the user's own: its momentum of None averages, here one batch
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.momentum = None
        model.load_state_dict({name: w[task] for name, w in fast.items() if "running" not in name}, strict=False)
        model(tasks.support_x[task])
        for layer, places in (("body.1", 6 * 64), ("body.5", 6 * 16)):
            mean, unbiased = model.get_buffer(f"{layer}.running_mean"), model.get_buffer(f"{layer}.running_var")
            torch.testing.assert_close(fast[f"{layer}.running_mean"][task], mean, rtol=1e-10, atol=1e-12)
            biased = unbiased * (places - 1) / places
            torch.testing.assert_close(fast[f"{layer}.running_var"][task], biased, rtol=1e-10, atol=1e-12)


def test_a_layer_that_runs_twice_has_the_statistics_of_both_runs() -> None:
    learner, tasks = gs.maml(TWICE.make(), steps=1), TWICE.tasks(2)
    fast = learner.adapt(learner.init(), tasks.support_x, tasks.support_y)
    module, seen = copy.deepcopy(learner.module), []
    module.load_state_dict({name: w[1] for name, w in fast.items() if "running" not in name})
    module.get_submodule("norm").register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    module(tasks.support_x[1])
    both = torch.cat(seen)
    assert len(seen) == 2
    torch.testing.assert_close(fast["norm.running_mean"][1], both.mean((0, 2, 3)))
    torch.testing.assert_close(fast["norm.running_var"][1], both.var((0, 2, 3), correction=0))


def test_the_batch_at_hand_is_the_default_and_differs() -> None:
    learner, tasks = gs.maml(RELU_NORM.make()), RELU_NORM.tasks(2)
    state = learner.init()
    fast = learner.adapt(state, tasks.support_x, tasks.support_y)
    batch = learner.predict(fast, tasks.query_x)
    assert torch.equal(batch, learner.predict(fast, tasks.query_x, norm_statistics="batch"))
    assert torch.equal(batch, learner.logits(state, tasks))
    support = learner.predict(fast, tasks.query_x, norm_statistics="support")
    assert torch.equal(support, learner.logits(state, tasks, norm_statistics="support"))
    assert not torch.allclose(batch, support)
    with pytest.raises(gs.UserError, match="norm_statistics is 'batch' or 'support', not 'train'"):
        learner.predict(fast, tasks.query_x, norm_statistics="train")  # type: ignore[arg-type]


@pytest.mark.parametrize("norm_statistics", ["batch", "support"])
def test_inference_mode_gives_the_same(norm_statistics: Any) -> None:
    learner, tasks = gs.maml(RELU_NORM.make(), sharing=gs.GradientSharing()), RELU_NORM.tasks(2)
    state = learner.init()
    expected = learner.logits(state, tasks, norm_statistics=norm_statistics)
    with torch.inference_mode():
        again = RELU_NORM.tasks(2)
        torch.testing.assert_close(learner.logits(state, again, norm_statistics=norm_statistics), expected)


def test_evaluating_with_the_batch_runs_the_model_no_more_than_before() -> None:
    model, runs = RELU_NORM.make(), []
    model.register_forward_hook(lambda *_: runs.append(None))
    learner, tasks = gs.maml(model, steps=2), RELU_NORM.tasks(2)
    learner.logits(learner.init(), tasks)
    assert len(runs) == 3  # two inner steps and the query sets


def test_support_statistics_can_be_learned_through() -> None:
    """By finite differences: the statistics of the support set are part of what the prediction depends on."""
    entry = EXTRAS["mlp with batch norm 1d"]
    learner, tasks = gs.maml(entry.make(), steps=1), entry.tasks(2)
    state = learner.init()
    (weight,) = (w for name, w in state.params.items() if name == "0.weight")

    def loss() -> Tensor:
        return learner.logits(state, tasks, norm_statistics="support").square().mean()

    (found,) = torch.autograd.grad(loss(), [weight])
    h, direction = 1e-5, torch.cos(torch.arange(weight.numel())).view_as(weight).double()
    with torch.no_grad():
        weight += h * direction
        ahead = loss()
        weight -= 2 * h * direction
        behind = loss()
    torch.testing.assert_close((found * direction).sum(), (ahead - behind) / (2 * h), rtol=1e-6, atol=1e-10)


# Where it goes


def adapted(entry: Model) -> tuple[nn.Module, nn.Module, Tensor]:
    """A user's model, a task's module, and inputs."""
    model = entry.make()
    learner, tasks = gs.maml(model, steps=2, sharing=gs.GradientSharing()), entry.tasks(2)
    fast = learner.adapt(learner.init(), tasks.support_x, tasks.support_y)
    return model, learner.module_for(fast, 1), tasks.query_x[1]


def test_a_users_own_class_loads_it_strictly() -> None:
    model, module, x = adapted(RESIDUAL)
    assert type(module) is type(model)
    fresh = RESIDUAL.make(seed=5)
    fresh.load_state_dict(module.state_dict())
    assert torch.equal(fresh.eval()(x), module(x))
    assert model.get_buffer("norms.0.num_batches_tracked") == 0  # the user's model is not touched


def test_conv4_loads_it_strictly_and_takes_its_statistics() -> None:
    plain, module, x = adapted(CONV4)
    names = {
        f"norms.{layer}.{part}" for layer in range(4) for part in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert set(module.state_dict()) - set(plain.state_dict()) == names
    for fresh in (CONV4.make(seed=5), copy.deepcopy(module)):
        fresh.load_state_dict(module.state_dict())
        assert torch.equal(fresh.eval()(x), module(x))
    wrapped = nn.Sequential(CONV4.make(seed=6))
    wrapped.load_state_dict({f"0.{name}": value for name, value in module.state_dict().items()})
    assert torch.equal(wrapped.eval()(x), module(x))
    plain.load_state_dict(CONV4.make(seed=7).state_dict())  # without statistics it stays without
    assert plain.norms[0].running_mean is None  # type: ignore[union-attr,index]


@pytest.mark.parametrize("entry", [CONV4, RESIDUAL], ids=["conv4", "residual"])
def test_it_is_saved_and_read_as_a_whole(entry: Model) -> None:
    _, module, x = adapted(entry)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert torch.equal(read(x), module(x)) and not read.training


@pytest.mark.parametrize("entry", [CONV4, RESIDUAL, RELU_NORM], ids=["conv4", "residual", "batch norm net"])
def test_it_is_exported(entry: Model) -> None:
    _, module, x = adapted(entry)
    examples = torch.export.Dim("examples", min=1, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's own
        program = torch.export.export(module, (x,), dynamic_shapes=({0: examples},))
    for n in (len(x), 1):
        torch.testing.assert_close(program.module()(x[:n]), module(x[:n]), rtol=1e-12, atol=1e-12)


def test_onnxruntime_computes_the_same() -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    _, module, x = adapted(CONV4)
    module, x = module.float(), x.float()
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        examples = torch.export.Dim("examples", min=1, max=64)
        program = torch.onnx.export(module, (x,), dynamo=True, dynamic_shapes=({0: examples},), verbose=False)
    assert program is not None
    program.save(file)
    session = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    for n in (len(x), 1):
        (found,) = session.run(None, {session.get_inputs()[0].name: x[:n].numpy()})
        np.testing.assert_allclose(found, module(x[:n]).detach().numpy(), rtol=1e-4, atol=1e-5)


def test_it_can_be_trained_on() -> None:
    _, module, x = adapted(RELU_NORM)
    labels = torch.arange(len(x)) % WAYS
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    before = F.cross_entropy(module(x), labels)
    before.backward()
    optimiser.step()
    assert F.cross_entropy(module(x), labels) < before


# What cannot be


def test_weights_without_statistics_and_tasks_that_there_are_not() -> None:
    learner, tasks = gs.maml(RELU_NORM.make(), steps=1), RELU_NORM.tasks(2)
    fast = learner.adapt(learner.init(), tasks.support_x, tasks.support_y)
    weights = {name: weight for name, weight in fast.items() if "running" not in name}
    learner.predict(weights, tasks.query_x)
    for use in (
        lambda: learner.module_for(weights, 0),
        lambda: learner.predict(weights, tasks.query_x, norm_statistics="support"),
    ):
        with pytest.raises(gs.UserError, match=r"lack body\.1\.running_mean: use everything"):
            use()
    for task in (2, -1, 1.0, True):
        with pytest.raises(gs.UserError, match="i is"):
            learner.module_for(fast, task)  # type: ignore[arg-type]


def test_a_batch_norm_that_is_not_a_layer_has_no_statistics() -> None:
    entry = EXTRAS["functional batch norm"]
    learner, tasks = gs.maml(entry.make(), steps=1), entry.tasks(2)
    fast = learner.adapt(learner.init(), tasks.support_x, tasks.support_y)
    with pytest.raises(gs.UserError, match=r"the model calls F\.batch_norm itself"):
        learner.predict(fast, tasks.query_x, norm_statistics="support")


class Spare(nn.Module):
    """Has a batch norm that does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.spare, self.head = nn.BatchNorm1d(4), nn.BatchNorm1d(7), nn.Linear(4, WAYS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


def test_a_batch_norm_that_does_not_run_stays_as_it_starts() -> None:
    entry = Model(Spare, (4,))
    learner, tasks = gs.maml(entry.make(), steps=1), entry.tasks(2)
    fast = learner.adapt(learner.init(), tasks.support_x, tasks.support_y)
    assert torch.equal(fast["spare.running_mean"], torch.zeros(2, 7)) and bool((fast["spare.running_var"] == 1).all())
    assert_leaves_whole(learner, learner.init(), tasks)


def test_batch_norm_alone_leaves_too() -> None:
    entry = Model(lambda: nn.BatchNorm1d(WAYS), (WAYS,))
    learner = gs.maml(entry.make(), steps=1, adapt_norm=True)
    assert_leaves_whole(learner, learner.init(), entry.tasks(2))


def test_eval_before_the_learner_warns() -> None:
    with pytest.warns(UserWarning, match="has no effect on batch norm.*norm_statistics='support'"):
        learner = gs.maml(RELU_NORM.make().eval())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.to("cpu")
        gs.maml(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).eval())  # nothing for it to have no effect on
        learner.outer_loss(learner.init(), RELU_NORM.tasks(2))
