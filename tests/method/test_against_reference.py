"""Every algorithm equals a plain loop over tasks: outer loss, every meta-gradient, and the memory."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import gradshare as gs
from tests.support import models, reference
from tests.support.cases import (
    ALGORITHMS,
    BODY,
    CONDITIONED,
    CONTROLS,
    FURTHER,
    MATRIX,
    OTHER_WAYS,
    SHARING,
    assert_adapts_alone,
    assert_equal_to_finite_differences,
    assert_equal_to_reference,
    assert_trees_equal,
    build,
    classifiers,
    directions,
    five_points,
    group_of,
    meta_gradients,
    norm_names,
    randomised,
)
from tests.support.models import CONV4, EXTRAS, QUARTIC, REGRESSION, RELU_NORM, SILU_NORM, TANH_NORM, Model

# vmap's slow way for an operator without a batching rule is still right, which is all that these tests ask.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("tasks", [1, 5])
@pytest.mark.parametrize("sharing", ["alone", "global", "tensor"])
@pytest.mark.parametrize(("algorithm", "net"), classifiers(ALGORITHMS, MATRIX))
def test_algorithm_equals_a_loop_over_tasks(algorithm: str, sharing: str, net: str, tasks: int, steps: int) -> None:
    entry, adapt_norm = MATRIX[net]
    case = build(entry, algorithm, sharing, steps, adapt_norm)
    assert_equal_to_reference(case, entry, tasks)


@pytest.mark.parametrize("net", MATRIX)
@pytest.mark.parametrize("sharing", CONTROLS)
def test_control_equals_a_loop_over_tasks(sharing: str, net: str) -> None:
    entry, adapt_norm = MATRIX[net]
    case = build(entry, "maml", sharing, 3, adapt_norm)
    assert_equal_to_reference(case, entry, tasks=3, iterations=3)


@pytest.mark.parametrize("tasks", [1, 4])
@pytest.mark.parametrize("sharing", CONDITIONED)
@pytest.mark.parametrize(("algorithm", "net"), classifiers([name for name in ALGORITHMS if name != "boil"], MATRIX))
def test_conditioned_sharing_equals_a_loop_over_tasks(algorithm: str, sharing: str, net: str, tasks: int) -> None:
    entry, adapt_norm = MATRIX[net]
    assert_equal_to_reference(build(entry, algorithm, sharing, 2, adapt_norm), entry, tasks, iterations=3)


@pytest.mark.parametrize("sharing", [*OTHER_WAYS, *BODY])
@pytest.mark.parametrize("net", MATRIX)
def test_other_ways_of_sharing_equal_a_loop_over_tasks(sharing: str, net: str) -> None:
    entry, adapt_norm = MATRIX[net]
    assert_equal_to_reference(build(entry, "maml", sharing, 3, adapt_norm), entry, tasks=3, iterations=3)


@pytest.mark.parametrize("sharing", [*OTHER_WAYS, *BODY])
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name not in ("maml", "boil")])
def test_other_ways_of_sharing_in_every_algorithm_equal_a_loop_over_tasks(algorithm: str, sharing: str) -> None:
    if algorithm == "anil" and sharing in BODY:
        with pytest.raises(gs.UserError, match="no gradient of the body"):
            build(CONV4, algorithm, sharing).learner.init()
        return
    assert_equal_to_reference(build(CONV4, algorithm, sharing, 2), CONV4, tasks=2, iterations=3)


@pytest.mark.parametrize("sharing", ["global", "tensor"])
@pytest.mark.parametrize("net", EXTRAS)
def test_any_module_equals_a_loop_over_tasks(net: str, sharing: str) -> None:
    case = build(EXTRAS[net], "maml", sharing, steps=2)
    assert_equal_to_reference(case, EXTRAS[net], tasks=3)


@pytest.mark.parametrize("net", ["ResNet12", "ViT"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_algorithms_on_our_other_networks_equal_a_loop_over_tasks(algorithm: str, net: str) -> None:
    assert_equal_to_reference(build(EXTRAS[net], algorithm, "global", steps=2), EXTRAS[net], tasks=2)


ADAPTED_NORMS = [
    "ResNet12",
    "silu batch norm net",
    "mlp with batch norm 1d",
    "conv 1d, batch norm 1d",
    "conv 3d, batch norm 3d",
]
ADAPTED_NORMS += ["layers used twice", "frozen weights", "subclass of batch norm", "batch norm, other settings"]


@pytest.mark.parametrize("net", ADAPTED_NORMS)
def test_adapted_batch_norm_equals_a_loop_over_tasks(net: str) -> None:
    case = build(EXTRAS[net], "maml", "global", steps=2, adapt_norm=True)
    assert_equal_to_reference(case, EXTRAS[net], tasks=3)


@pytest.mark.parametrize("net", ADAPTED_NORMS)
def test_batch_norm_per_step_equals_a_loop_over_tasks(net: str) -> None:
    case = build(EXTRAS[net], "maml++", "global", steps=2)
    state = case.learner.init(seed=None)
    assert set(state.learned["per_step"]) == norm_names(case.model)
    assert not set(state.learned["per_step"]) & set(state.params)
    assert_equal_to_reference(case, EXTRAS[net], tasks=3)


@pytest.mark.parametrize(
    "net", ["transformer", "constant input", "in-place activation", "layers used twice", "unused weight"]
)
def test_head_of_any_module_equals_a_loop_over_tasks(net: str) -> None:
    """ANIL: weights that all tasks share take another way through the layers than weights of their own."""
    assert_equal_to_reference(build(EXTRAS[net], "anil", "global"), EXTRAS[net], tasks=3)


def test_named_head_is_what_anil_adapts() -> None:
    case = build(RELU_NORM, "anil", "global", head="body.4")
    case = case._replace(method=case.method._replace(adapted=("body.4.weight", "body.4.bias")))
    assert_equal_to_reference(case, RELU_NORM, tasks=2)


CALLABLE_LOSSES = {
    "label smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
    "class weights": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "negative log-likelihood": lambda logits, y: F.nll_loss(logits.log_softmax(-1), y),
    "binary cross-entropy": lambda logits, y: F.binary_cross_entropy_with_logits(
        logits, F.one_hot(y, models.WAYS).double()
    ),
}


@pytest.mark.parametrize("loss", CALLABLE_LOSSES)
def test_any_loss_equals_a_loop_over_tasks(loss: str) -> None:
    case = build(TANH_NORM, "maml", "global")
    learner = dataclasses.replace(case.learner, loss=CALLABLE_LOSSES[loss])
    case = case._replace(learner=learner, method=case.method._replace(loss=CALLABLE_LOSSES[loss]))
    assert_equal_to_reference(case, TANH_NORM, tasks=3)


EPOCHS = {0: (0.2,) * 5, 7: (8 / 75,) * 4 + (43 / 75,), 14: (1 / 75,) * 4 + (71 / 75,), 20: (0.0,) * 4 + (1.0,)}


@pytest.mark.parametrize("sharing", ["alone", "global"])
@pytest.mark.parametrize("epoch", EPOCHS)
def test_multi_step_loss_over_epochs(epoch: int, sharing: str) -> None:
    case = build(RELU_NORM, "maml++", sharing, steps=5).at(epoch, step_weights=EPOCHS[epoch])
    assert_equal_to_reference(case, RELU_NORM, tasks=2)


@pytest.mark.parametrize("sharing", ["alone", "global", "tensor"])
@pytest.mark.parametrize(("epoch", "first_order"), [(0, True), (49, True), (50, False), (60, False)])
def test_paper_recipe_is_first_order_for_fifty_epochs(epoch: int, first_order: bool, sharing: str) -> None:
    weights = (1 / 3,) * 3 if epoch == 0 else (0.0, 0.0, 1.0)
    case = build(RELU_NORM, "maml++", sharing, steps=3, recipe="paper")
    case = case.at(epoch, first_order=first_order, step_weights=weights)
    assert_equal_to_reference(case, RELU_NORM, tasks=2)


def test_maml_plus_plus_without_values_per_step() -> None:
    case = build(RELU_NORM, "maml++", "global", steps=2, per_step_norm=False)
    assert "per_step" not in case.learner.init(seed=None).learned
    assert_equal_to_reference(case, RELU_NORM, tasks=2)


def test_multi_step_epochs_and_first_order_epochs_are_options() -> None:
    case = build(RELU_NORM, "maml++", "global", steps=2, multi_step_epochs=4, first_order_epochs=2)
    assert_equal_to_reference(case.at(1, step_weights=(0.375, 0.625), first_order=True), RELU_NORM, tasks=2)
    assert_equal_to_reference(case.at(2, step_weights=(0.25, 0.75)), RELU_NORM, tasks=2)


def test_early_steps_keep_a_small_weight_until_they_lose_it() -> None:
    case = build(RELU_NORM, "maml++", "global", steps=2, multi_step_epochs=100)
    assert_equal_to_reference(case.at(99, step_weights=(0.015, 0.985)), RELU_NORM, tasks=2)
    assert_equal_to_reference(case.at(100, step_weights=(0.0, 1.0)), RELU_NORM, tasks=2)


# Algorithm 2


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("net", MATRIX)
def test_tasks_adapt_alone(net: str, sharing: str, seen: bool) -> None:
    entry, adapt_norm = MATRIX[net]
    assert_adapts_alone(build(entry, "maml", sharing, 2, adapt_norm), entry, seen)


ALONE = {name: MATRIX[name] for name in ("conv4", "regression")}


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("sharing", ["alone", "tensor", "conditioned, global"])
@pytest.mark.parametrize(("algorithm", "net"), classifiers([name for name in ALGORITHMS if name != "maml"], ALONE))
def test_tasks_adapt_alone_in_every_algorithm(algorithm: str, net: str, sharing: str, seen: bool) -> None:
    entry, adapt_norm = MATRIX[net]
    assert_adapts_alone(build(entry, algorithm, sharing, 2, adapt_norm), entry, seen)


@pytest.mark.parametrize("net", EXTRAS)
def test_tasks_of_any_module_adapt_alone(net: str) -> None:
    assert_adapts_alone(build(EXTRAS[net], "maml", "global"), EXTRAS[net], seen=True)


SMOOTH = {
    "batch norm net": (TANH_NORM, False),
    "batch norm net, adapted": (SILU_NORM, True),
    "quartic": (QUARTIC, False),
}
EXACT = ["maml", "meta-sgd", "maml++", "anil", "proto-maml"]  # that of first order is not the derivative of its loss


@pytest.mark.parametrize("sharing", ["alone", "global", "tensor"])
@pytest.mark.parametrize(("algorithm", "net"), classifiers(EXACT, SMOOTH))
def test_meta_gradient_equals_finite_differences(algorithm: str, net: str, sharing: str) -> None:
    entry, adapt_norm = SMOOTH[net]
    case = build(entry, algorithm, sharing, steps=2, adapt_norm=adapt_norm)
    assert_equal_to_finite_differences(case, entry, group_of)


SMOOTH_EXTRAS = ["mlp with batch norm 1d", "transformer", "group norm", "instance norm", "conv 1d, batch norm 1d"]
SMOOTH_EXTRAS += ["strided grouped conv, uneven", "embedding", "tied weights", "functional batch norm", "weight norm"]
SMOOTH_EXTRAS += ["ViT"]


@pytest.mark.parametrize("net", SMOOTH_EXTRAS)
def test_meta_gradient_of_any_module_equals_finite_differences(net: str) -> None:
    assert_equal_to_finite_differences(build(EXTRAS[net], "maml", "global"), EXTRAS[net], group_of)


ONE_STEP = ["global", "tensor", "gate only", "batch only, tensor", "memory only, global", *CONDITIONED]


@pytest.mark.parametrize("sharing", ONE_STEP)
def test_first_order_gates_of_one_step_equal_finite_differences(sharing: str) -> None:
    """With one inner step the task gradient does not depend on the gates, so first order is exact for them."""
    case = build(TANH_NORM, "first order", sharing, steps=1)
    assert_equal_to_finite_differences(case, TANH_NORM, lambda path: group_of(path) if "sharing" in path else None)


def test_first_order_rates_of_one_step_equal_finite_differences() -> None:
    case = build(TANH_NORM, "maml++", "global", steps=1, recipe="paper")
    assert_equal_to_finite_differences(
        case, TANH_NORM, lambda path: group_of(path) if "learned/" in path and "per_step" not in path else None
    )


@pytest.mark.parametrize("sharing", [*CONTROLS, *OTHER_WAYS, *BODY])
def test_meta_gradient_of_a_control_equals_finite_differences(sharing: str) -> None:
    assert_equal_to_finite_differences(build(TANH_NORM, "maml", sharing), TANH_NORM, group_of)


@pytest.mark.parametrize("sharing", CONDITIONED)
@pytest.mark.parametrize("algorithm", ["maml", "meta-sgd", "maml++", "anil"])
def test_meta_gradient_of_conditioned_sharing_equals_finite_differences(algorithm: str, sharing: str) -> None:
    assert_equal_to_finite_differences(build(TANH_NORM, algorithm, sharing), TANH_NORM, group_of)


# What is not touched, and what must not break


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *FURTHER])
def test_users_module_state_and_episodes_are_not_written(algorithm: str) -> None:
    case = build(RELU_NORM, algorithm, "global")
    state = randomised(case.learner.init(seed=None))
    memory = case.learner.outer_loss(state, RELU_NORM.tasks(2, seed=5)).memory
    state, tasks = dataclasses.replace(state, memory=memory), RELU_NORM.tasks(2)
    before = copy.deepcopy(
        [case.model.state_dict(), state.params, state.learned, state.memory, dict(enumerate(tasks.tensors()))]
    )
    case.learner.outer_loss(state, tasks).loss.backward()
    case.learner.predict(case.learner.adapt(state, tasks.support_x, tasks.support_y), tasks.query_x)
    for a, b in zip(
        before,
        [case.model.state_dict(), state.params, state.learned, state.memory, dict(enumerate(tasks.tensors()))],
        strict=True,
    ):
        assert_trees_equal(dict(a), dict(b))
    assert all(weight.grad is None for weight in case.model.parameters())


def test_outer_loss_is_a_pure_function() -> None:
    """A module that writes its buffers in its forward pass, as spectral norm does in training mode, is refused."""
    entry, tasks = Model(models.spectral_normed, (1, 6, 6)), RELU_NORM._replace(shape=(1, 6, 6)).tasks(2)
    writing = gs.anil(entry.make())
    with pytest.raises(ValueError, match="writes to its buffer"):
        writing.outer_loss(writing.init(), tasks)
    still = gs.anil(entry.make().eval())
    first, second = (still.outer_loss(still.init(), tasks).loss.item() for _ in range(2))
    assert first == second


def test_batch_norm_of_a_single_value_is_refused() -> None:
    """As F.batch_norm does: the normalised value would be zero whatever the input."""
    case = build(EXTRAS["mlp with batch norm 1d"])
    tasks = EXTRAS["mlp with batch norm 1d"].tasks(2)
    one = gs.Episodes(tasks.support_x[:, :1], tasks.support_y[:, :1], tasks.query_x, tasks.query_y)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        case.learner.outer_loss(case.learner.init(seed=None), one)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *FURTHER])
def test_adapting_without_a_graph_gives_the_same(algorithm: str) -> None:
    case = build(CONV4, algorithm, "global")
    state, tasks = randomised(case.learner.init(seed=None)), CONV4.tasks(2)
    state = dataclasses.replace(state, memory=case.learner.outer_loss(state, CONV4.tasks(2, seed=5)).memory)
    fast = case.learner.adapt(state, tasks.support_x, tasks.support_y)
    with torch.no_grad():
        plain = case.learner.adapt(state, tasks.support_x, tasks.support_y)
        assert not any(weight.requires_grad for weight in plain.values())
    assert_trees_equal({name: weight.detach() for name, weight in fast.items()}, plain)


@pytest.mark.filterwarnings("ignore:model.eval:UserWarning")
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_batch_norm_uses_the_batch_whatever_the_mode_and_running_statistics(mode: str) -> None:
    entry = SILU_NORM
    case = build(entry)
    other = copy.deepcopy(case.model)
    for layer in other.modules():
        if isinstance(layer, _BatchNorm):
            layer.running_mean.fill_(7.0)
            layer.running_var.fill_(0.01)
    learner = gs.maml(other.train(mode == "train"), inner_lr=0.1, steps=2, sharing=SHARING["global"][0])
    losses = [one.outer_loss(randomised(one.init(seed=None)), entry.tasks(3)).loss for one in (case.learner, learner)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "proto-maml"])
@pytest.mark.parametrize("sharing", [name for name in SHARING if name not in ("alone", *BODY)])
def test_zero_gradients_share_nothing_and_stay_finite(algorithm: str, sharing: str) -> None:
    entry = REGRESSION._replace(loss=flat)
    case = build(entry, algorithm, sharing, steps=3)
    state = randomised(case.learner.init(seed=None))
    for seed in range(2):
        out = case.learner.outer_loss(state, entry.tasks(2, seed))
        grads = meta_gradients(out.loss, state.trainable())
        assert out.loss == 1 and all((grad == 0).all() for grad in grads.values())
        state = dataclasses.replace(state, memory=out.memory)
    memory = state.memory.get("sharing", {})
    for ghat in memory.get("ghat", memory.get("bank", {})).values():
        assert (ghat == 0).all()


def flat(outputs: Tensor, targets: Tensor) -> Tensor:
    return 1 + 0 * outputs.sum()


def test_reference_itself_equals_finite_differences() -> None:
    """The arbiter on the reference, so that both are judged alike."""
    case = build(TANH_NORM, "maml++", "tensor", steps=2)
    state = randomised(case.learner.init(seed=None))
    ghat = reference.outer_loss(case.model, state, TANH_NORM.tasks(2, seed=20), case.method).ghat
    state, episodes = dataclasses.replace(state, memory={"sharing": {"ghat": ghat, "seen": True}}), TANH_NORM.tasks(2)
    leaves = state.trainable()

    def loss() -> Tensor:
        return reference.outer_loss(case.model, state, episodes, case.method).loss

    grads = meta_gradients(loss(), leaves)
    way = directions(list(leaves.values()), 0)
    exact = sum((v * grads[path]).sum().item() for v, path in zip(way, leaves, strict=True))
    assert five_points(lambda: loss().item(), list(leaves.values()), way) == pytest.approx(exact, rel=1e-6)


def test_models_cover_labels_of_every_way() -> None:
    labels = CONV4.tasks(4).support_y
    assert all(set(row.tolist()) == set(range(models.WAYS)) for row in labels)
