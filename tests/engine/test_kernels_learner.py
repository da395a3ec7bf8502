"""Whole meta-gradients, memories and predictions on the kernels, against the general path in float64.

Seeds are such that no two elements of a pooling window are so near that float32 takes another than float64 does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.support.kernel_tools import (
    DEVICE,
    GPU,
    Batch,
    assert_near,
    batch_of,
    cast,
    error,
    in_few_programs,
    needs_interpreter,
    on_kernels,
    poisoned,
    tasks_of,
    varied,
)
from torch import Tensor, nn

import gradshare as gs
from gradshare.engine.conv4.triton import device
from gradshare.engine.conv4.triton.packed import TritonConv4
from gradshare.method.controls import BatchOnly, GateOnly, MemoryOnly

SMALL = (1, 16, 16)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    in_few_programs(monkeypatch)


class Plain(gs.Conv4):
    """Conv4 that no fast path knows."""


def pair_of(
    make: Any = gs.maml, sharing: Any = None, image: Any = SMALL, steps: int = 2, backbone: Any = gs.Conv4, **more: Any
) -> tuple[gs.Learner, gs.Learner]:
    """One learner on the kernels, and one in float64 on the CPU."""
    learner = make(gs.Conv4(ways=2, filters=4, image=image), steps=steps, sharing=sharing, **more)
    exact = make(backbone(ways=2, filters=4, image=image).double(), steps=steps, sharing=sharing, **more)
    return on_kernels(learner), exact


def start_of(learner: gs.Learner, seed: int = 0) -> gs.MetaState:
    return varied(learner.init(seed), seed)


def exactly(state: gs.MetaState) -> gs.MetaState:
    return cast(state.to("cpu"), torch.float64)


def in_float64(episodes: gs.Episodes) -> gs.Episodes:
    return episodes.to("cpu", torch.float64)


ALGORITHMS = {
    "maml": gs.maml,
    "first order": gs.first_order_maml,
    "meta-sgd": gs.meta_sgd,
    "maml++": gs.maml_plus_plus,
}
SHARINGS = {
    "none": None,
    "global": gs.GradientSharing(),
    "tensor": gs.GradientSharing("tensor"),
    "gate only": GateOnly(),
    "batch only": BatchOnly(),
    "memory only": MemoryOnly(),
    "batch only by tensor": BatchOnly("tensor"),
    "memory only by tensor": MemoryOnly("tensor"),
    "conditioned": gs.GradientSharing(conditioned=True),
    "conditioned by tensor": gs.GradientSharing("tensor", conditioned=True),
}
SOME = {
    "maml": (gs.maml, None, SMALL),
    "maml, global": (gs.maml, gs.GradientSharing(), (3, 17, 18)),
    "maml, tensor": (gs.maml, gs.GradientSharing("tensor"), SMALL),
    "maml, gate only": (gs.maml, GateOnly(), SMALL),
    "maml, batch only": (gs.maml, BatchOnly(), SMALL),
    "maml, memory only": (gs.maml, MemoryOnly(), SMALL),
    "maml, conditioned": (gs.maml, gs.GradientSharing(conditioned=True), SMALL),
    "maml++, conditioned by tensor": (gs.maml_plus_plus, gs.GradientSharing("tensor", conditioned=True), SMALL),
    "first order, global": (gs.first_order_maml, gs.GradientSharing(), SMALL),
    "meta-sgd, global": (gs.meta_sgd, gs.GradientSharing(), SMALL),
    "maml++, global": (gs.maml_plus_plus, gs.GradientSharing(), SMALL),
    "maml++, tensor": (gs.maml_plus_plus, gs.GradientSharing("tensor"), SMALL),
}


EVERY = {f"{a}, {b}": (make, sharing, SMALL) for a, make in ALGORITHMS.items() for b, sharing in SHARINGS.items()}
COMBINATIONS = SOME | EVERY if GPU else SOME  # each takes the interpreter five seconds


@needs_interpreter
@pytest.mark.parametrize("make, sharing, image", COMBINATIONS.values(), ids=COMBINATIONS)
def test_meta_gradients_and_memory(make: Any, sharing: Any, image: Any) -> None:
    learner, exact = pair_of(make, sharing, image)
    state = start_of(learner)
    exact_state = exactly(state)
    for iteration in range(2 if state.memory else 1):
        episodes = tasks_of(2, 2, 2, 2, image, seed=iteration)
        with nullcontext() if GPU else poisoned():  # on a GPU, PyTorch's own operations do not all allow it
            found, out = batch_of(learner, state, episodes)
        expected, exact_out = batch_of(exact, exact_state, in_float64(episodes))
        assert error(found, expected) < 1e-5
        assert out.accuracy is not None and torch.equal(out.accuracy.double().cpu(), exact_out.accuracy)
        for name, tensor in out.memory.get("sharing", {}).get("ghat", {}).items():
            assert tensor.shape == state.memory["sharing"]["ghat"][name].shape and not tensor.requires_grad
        state.memory, exact_state.memory = out.memory, exact_out.memory


def black(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def of_one_colour(x: Tensor) -> Tensor:
    return torch.full_like(x, 0.7)


def of_a_colour_each(x: Tensor) -> Tensor:
    return x.mean((-1, -2, -3), keepdim=True).expand_as(x)


def all_the_same(x: Tensor) -> Tensor:
    return x[:, :1].expand_as(x)


def far_from_zero(x: Tensor) -> Tensor:
    return 1e4 * x + 1e5


def faint(x: Tensor) -> Tensor:
    return 1e-6 * x


def one_image(x: Tensor) -> Tensor:
    return x[:, :1]


def as_it_is(x: Tensor) -> Tensor:
    return x


def dead_units(weights: dict[str, Tensor]) -> None:
    for layer in range(4):
        weights[f"norms.{layer}.weight"][0] = 0
        weights[f"norms.{layer}.bias"][1] = -1e6
        weights[f"convs.{layer}.weight"][2] = 0


def no_live_unit(weights: dict[str, Tensor]) -> None:
    for layer in range(4):
        weights[f"norms.{layer}.weight"].zero_()


def zeros(weights: dict[str, Tensor]) -> None:
    for name, weight in weights.items():
        if not name.startswith("norms"):
            weight.zero_()


def certain(weights: dict[str, Tensor]) -> None:
    weights["head.weight"].mul_(1e3)


def small_gradients(weights: dict[str, Tensor]) -> None:
    weights["head.weight"].mul_(1e-30)


def nothing(weights: dict[str, Tensor]) -> None: ...


IMAGES = [black, of_one_colour, of_a_colour_each, all_the_same, far_from_zero, faint, one_image]
WEIGHTS = [dead_units, no_live_unit, zeros, certain, small_gradients]
HARD = [(images, nothing) for images in IMAGES] + [(as_it_is, weights) for weights in WEIGHTS]


@needs_interpreter
@pytest.mark.parametrize("images, weights", HARD, ids=[f"{x.__name__}-{w.__name__}" for x, w in HARD])
def test_hard_inputs_give_numbers_as_good_as_the_general_path(images: Any, weights: Any) -> None:
    learner, exact = pair_of(sharing=gs.GradientSharing(), steps=1, backbone=Plain)
    general = gs.maml(Plain(ways=2, filters=4, image=SMALL), steps=1, sharing=gs.GradientSharing()).to(DEVICE)
    state, drawn = start_of(learner), tasks_of(2, 2, 2, 2, SMALL)
    with torch.no_grad():
        weights(state.params)
    episodes = gs.Episodes(
        images(drawn.support_x),
        one_image(drawn.support_y) if images is one_image else drawn.support_y,
        images(drawn.query_x),
        one_image(drawn.query_y) if images is one_image else drawn.query_y,
    )
    found, _ = batch_of(learner, state, episodes)
    expected, _ = batch_of(exact, exactly(state), in_float64(episodes))
    assert_finite(found)
    assert error(found, expected) <= 1e-5 + 10 * error(batch_of(general, state, episodes)[0], expected)


def assert_finite(batch: Batch) -> None:
    for name, tensor in {"losses": batch.losses, **batch.gradients, **batch.memory}.items():
        assert tensor.isfinite().all(), name


@needs_interpreter
def test_one_task_alone() -> None:
    learner, exact = pair_of(sharing=gs.GradientSharing(), steps=1)
    state, episodes = start_of(learner), tasks_of(2, 2, 2, 1, SMALL)
    found, _ = batch_of(learner, state, episodes)
    expected, _ = batch_of(exact, exactly(state), in_float64(episodes))
    assert error(found, expected) < 1e-5


@needs_interpreter
def test_the_gradient_by_some_weights_is_that_part_of_the_whole() -> None:
    """The outer pass meets the first derivative before the network, whatever it is asked for."""
    learner, _ = pair_of(sharing=gs.GradientSharing())
    state, episodes = start_of(learner), tasks_of(2, 1, 1, 1, SMALL)
    everything, _ = batch_of(learner, state, episodes)
    name = "params/norms.1.weight"
    (value,) = torch.autograd.grad(learner.outer_loss(state, episodes).loss, state.trainable()[name])
    assert torch.equal(value, everything.gradients[name])


@needs_interpreter
def test_features_are_in_the_order_of_the_head() -> None:
    """Here the last block leaves images of 2 x 3."""
    learner, exact = pair_of(image=(2, 33, 50))
    state, x = start_of(learner), tasks_of(2, 1, 1, 1, (2, 33, 50)).support_x
    with torch.no_grad():
        fast = {name: weight.unsqueeze(0) for name, weight in state.params.items()}
        there = {name: weight.double().cpu() for name, weight in fast.items()}
        assert_near(learner.predict(fast, x), exact.predict(there, x.double().cpu()), 1e-5)


@needs_interpreter
def test_another_loss() -> None:
    def squares(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - nn.functional.one_hot(targets, 2)).square().mean()

    learner, exact = pair_of(steps=1, loss=squares)
    state, episodes = start_of(learner), tasks_of(2, 2, 2, 2, SMALL)
    found, _ = batch_of(learner, state, episodes)
    expected, _ = batch_of(exact, exactly(state), in_float64(episodes))
    assert error(found, expected) < 1e-5


@needs_interpreter
def test_adapted_weights_are_the_same_by_name_and_serve_either_path() -> None:
    learner, exact = pair_of(gs.maml_plus_plus, gs.GradientSharing())
    state, episodes = start_of(learner), tasks_of(2, 2, 2, 2, SMALL)
    with torch.no_grad():
        state.memory = learner.outer_loss(state, tasks_of(2, 2, 2, 2, SMALL, seed=1)).memory
        fast = learner.adapt(state, episodes.support_x, episodes.support_y)
        there = in_float64(episodes)
        expected = exact.adapt(exactly(state), there.support_x, there.support_y)
        assert fast.keys() == expected.keys()
        for name, weights in fast.items():
            assert not weights.requires_grad
            assert_near(weights, expected[name], 1e-5, scale=0.1, what=name)
        logits = learner.predict(fast, episodes.query_x)
        assert_near(logits, exact.predict(expected, there.query_x), 1e-5)
        exchanged = {name: weights.double().cpu() for name, weights in fast.items()}
        assert_near(logits, exact.predict(exchanged, there.query_x), 1e-5)
    with torch.inference_mode():
        again = learner.adapt(state, episodes.support_x * 1, episodes.support_y)
        assert torch.equal(learner.predict(again, episodes.query_x * 1), logits)


@needs_interpreter
def test_evaluation(dataset: gs.Dataset) -> None:
    learner, exact = pair_of(sharing=gs.GradientSharing(), steps=1)
    state = start_of(learner)
    options = {"split": "val", "shape": gs.Shape(2, 1, 2), "tasks": 3, "batch": 2}
    found = gs.evaluate(learner, state, dataset, **options)
    expected = gs.evaluate(exact, exactly(state), InDouble(dataset), **options)
    assert_near(found.losses, expected.losses, 1e-5)
    assert found.accuracies is not None and torch.equal(found.accuracies.double().cpu(), expected.accuracies)


class InDouble:
    def __init__(self, source: gs.Dataset) -> None:
        self.source = source

    def sample(self, *args: Any) -> gs.Episodes:
        return self.source.sample(*args).to(torch.float64)


@needs_interpreter
def test_what_changes_with_the_epoch_stays_on_the_kernels() -> None:
    model = gs.Conv4(ways=2, filters=4, image=SMALL).to(DEVICE)
    learner = gs.maml_plus_plus(model, steps=1, recipe="paper").to(DEVICE, "tf32")
    for epoch in (0, 20, 60):
        assert isinstance(learner.at(epoch).network, TritonConv4)
    assert not learner.at(0).rule.second_order and learner.at(60).rule.second_order


def conv4(image: Any = SMALL, **more: Any) -> gs.Conv4:
    return gs.Conv4(ways=2, filters=4, image=image, **more)


REFUSED = {
    "another module": (lambda: gs.maml(nn.Sequential(nn.Flatten(), nn.Linear(9, 2))), "not Sequential"),
    "a subclass": (lambda: gs.maml(Plain(ways=2, filters=4, image=SMALL)), "not Plain"),
    "float64": (lambda: gs.maml(conv4().double()), "float32"),
    "half": (lambda: gs.maml(conv4().half()), "float32"),
    "batch norm adapted": (lambda: gs.maml(conv4(), adapt_norm=True), "adapt filters and head"),
    "anil": (lambda: gs.anil(conv4()), "adapt filters and head"),
    "a frozen layer": (lambda: gs.maml(frozen(conv4(), "convs.1")), "adapt filters and head"),
    "15 channels": (lambda: gs.maml(conv4((15, 16, 16))), "at most 7 channels, not 15"),
}
every_precision = pytest.mark.parametrize("precision", ["tf32", "bf16"])


def frozen(model: gs.Conv4, layer: str) -> gs.Conv4:
    model.get_submodule(layer).requires_grad_(False)
    return model


@every_precision
@pytest.mark.parametrize("build, reason", REFUSED.values(), ids=REFUSED)
def test_what_the_kernels_do_not_know_is_refused(build: Any, reason: str, precision: Any) -> None:
    learner = build()
    with pytest.raises(gs.UserError, match=f"precision {precision} needs the GPU kernels: .*{reason}.*; use .*float32"):
        learner.to(DEVICE, precision)
    assert learner.to(DEVICE).precision == "float32"


def changed(change: Any) -> gs.Conv4:
    model = conv4()
    change(model)
    return model


CHANGED = {
    "a hook": lambda model: model.convs[1].register_forward_hook(lambda module, args, out: out * 0),
    "another padding": lambda model: setattr(model.convs[1], "padding_mode", "circular"),
    "no gain and bias": lambda model: model.norms.__setitem__(1, nn.BatchNorm2d(4, affine=False)),
    "no head bias": lambda model: setattr(model, "head", nn.Linear(4, 2, bias=False)),
}
KNOWN = {
    "another eps": lambda model: setattr(model.norms[2], "eps", 0.1),
    "another slope": lambda model: setattr(model, "SLOPE", 0.2),
    "batch norm frozen": lambda model: frozen(model, "norms"),
}


@needs_interpreter
@pytest.mark.parametrize("change", KNOWN.values(), ids=KNOWN)
def test_what_may_be_changed_is_heeded(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device.DOT, "tf32", "ieee")  # as exact as a GPU can: in so small a net rounding chooses windows
    learner = gs.maml(changed(change), steps=1).to(DEVICE, "tf32")
    exact = gs.maml(changed(change).double(), steps=1)
    state, episodes = start_of(learner), tasks_of(2, 2, 2, 2, SMALL)
    found, _ = batch_of(learner, state, episodes)
    expected, _ = batch_of(exact, exactly(state), in_float64(episodes))
    assert error(found, expected) < 1e-5


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_a_changed_conv4_is_refused(change: Any) -> None:
    with pytest.raises(gs.UserError, match="needs the GPU kernels"):
        gs.maml(changed(change)).to(DEVICE, "tf32")


def test_without_triton_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(gs.UserError, match="Triton does not import"):
        gs.maml(conv4()).to(DEVICE, "tf32")


def test_on_a_cpu_the_reason_is_given() -> None:
    code = "import gradshare as gs; gs.maml(gs.Conv4(filters=4, image=(1, 16, 16))).to('cpu', 'bf16')"
    outside = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", code], env=outside, capture_output=True, text=True, check=False)
    assert "UserError: precision bf16 needs the GPU kernels: they need an NVIDIA GPU" in result.stderr


@needs_interpreter
def test_a_third_derivative_and_a_second_pass_are_refused() -> None:
    learner, _ = pair_of(steps=1)
    state, episodes = start_of(learner), tasks_of(2, 1, 1, 1, SMALL)
    leaves = list(state.trainable().values())
    loss = learner.outer_loss(state, episodes).loss
    with pytest.raises(gs.UserError, match="two derivatives"):
        torch.autograd.grad(loss, leaves, create_graph=True)
    torch.autograd.grad(loss, leaves, retain_graph=True)
    with pytest.raises(gs.UserError, match="second pass"):
        torch.autograd.grad(loss, leaves)


WRONG = {
    "more channels than the net's": (SMALL, (3, 16, 16)),
    "fewer channels than the net's": ((3, 16, 16), SMALL),
    "images too large for the head": (SMALL, (1, 32, 32)),
    "images too small for the head": ((1, 32, 32), SMALL),
}


@needs_interpreter
@pytest.mark.parametrize("image, given", WRONG.values(), ids=WRONG)
def test_images_of_another_shape_are_refused(image: Any, given: Any) -> None:
    learner, _ = pair_of(image=image, steps=1)
    with pytest.raises(gs.UserError, match="image"):
        learner.outer_loss(learner.init(0), tasks_of(2, 1, 1, 1, given))


@needs_interpreter
def test_a_gradient_by_the_images_is_refused() -> None:
    learner, _ = pair_of(steps=1)
    drawn = tasks_of(2, 1, 1, 1, SMALL)
    with pytest.raises(gs.UserError, match="no gradient by the images"):
        learner.adapt(learner.init(0), drawn.support_x.requires_grad_(), drawn.support_y)


@needs_interpreter
def test_a_linear_loss_has_a_second_derivative_too() -> None:
    def linear(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * torch.tensor([1.0, -2.0]).to(outputs)).sum() / 10

    learner, exact = pair_of(steps=1, loss=linear)
    state, episodes = start_of(learner), tasks_of(2, 2, 2, 2, SMALL)
    found, _ = batch_of(learner, state, episodes)
    expected, _ = batch_of(exact, exactly(state), in_float64(episodes))
    assert error(found, expected) < 1e-5
