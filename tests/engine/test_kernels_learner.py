"""Learners on the kernels: whole meta-gradients, memories and predictions; and what the kernels cannot run.

tests/stress/test_kernels.py has the combinations that are left out here. On a GPU: pytest tests/engine
tests/stress/test_kernels.py
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradshare as gs
from gradshare.engine import backends
from gradshare.engine.conv4.triton import device, packed
from gradshare.engine.conv4.triton.packed import TritonConv4
from gradshare.engine.traced import Traced
from gradshare.method.preconditioners import Curvature
from tests.support.kernel_learners import (
    SMALL,
    SOME,
    Plain,
    changed,
    check_batch,
    check_meta_gradients_and_memory,
    conv4,
    pair_of,
    start_of,
)
from tests.support.kernel_tools import DEVICE, assert_near, in_few_programs, needs_interpreter, tasks_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    in_few_programs(monkeypatch)


@needs_interpreter
def test_meta_gradients_and_memory_with_sharing() -> None:
    check_meta_gradients_and_memory(*SOME["maml, global, odd sizes"])


def elementwise(model: Any, **more: Any) -> gs.Learner:
    return gs.sparse_maml(model, inner=[gs.momentum(0.9), gs.adam(eps=0.1), gs.head_rate(4)], **more)


def by_name(model: Any, **more: Any) -> gs.Learner:
    return gs.alfa(model, inner=Curvature(), **more)


@needs_interpreter
def test_elementwise_rules_see_one_vector() -> None:
    learner, _ = pair_of(elementwise, gs.GateOnly())
    assert learner.rule.any_layout
    assert [tuple(tree) for tree in learner.network.pack(learner.init(0).learned).values()][-1] == ("weights",)
    check_meta_gradients_and_memory(elementwise, gs.GateOnly(), SMALL)


@needs_interpreter
def test_rules_that_need_names_see_weights_by_name() -> None:
    check_meta_gradients_and_memory(by_name, gs.GateOnly(), SMALL, steps=1)


@needs_interpreter
def test_anil_runs_the_body_once_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, features = [], packed.features
    monkeypatch.setattr(packed, "features", lambda *given: runs.append(1) or features(*given))
    check_meta_gradients_and_memory(gs.anil, gs.GradientSharing(), SMALL, steps=2)
    assert len(runs) == 2 * 2  # support and query sets of two batches


@needs_interpreter
def test_features_are_in_the_order_of_the_head() -> None:
    """Here the last block returns images of 2 x 3."""
    learner, exact = pair_of(image=(2, 33, 50))
    state, x = start_of(learner), tasks_of(2, 1, 1, 1, (2, 33, 50)).support_x
    with torch.no_grad():
        fast = {name: weight.unsqueeze(0) for name, weight in state.params.items()}
        there = {name: weight.double().cpu() for name, weight in fast.items()}
        assert_near(learner.predict(fast, x), exact.predict(there, x.double().cpu()), 1e-5)


@needs_interpreter
def test_what_changes_with_the_epoch_stays_on_the_kernels() -> None:
    model = gs.Conv4(ways=2, filters=4, image=SMALL).to(DEVICE)
    learner = gs.maml_plus_plus(model, steps=1, recipe="paper").to(DEVICE, "tf32")
    for epoch in (0, 20, 60):
        assert isinstance(learner.at(epoch).network, TritonConv4)
    assert not learner.at(0).rule.second_order and learner.at(60).rule.second_order


REFUSED = {
    "another module": (lambda: gs.maml(nn.Sequential(nn.Flatten(), nn.Linear(9, 2))), "not Sequential"),
    "a subclass": (lambda: gs.maml(Plain(ways=2, filters=4, image=SMALL)), "not Plain"),
    "float64": (lambda: gs.maml(conv4().double()), "float32"),
    "half": (lambda: gs.maml(conv4().half()), "float32"),
    "batch norm adapted": (lambda: gs.maml(conv4(), adapt_norm=True), "do not adapt batch norm"),
    "15 channels": (lambda: gs.maml(conv4((15, 16, 16))), "at most 7 channels, not 15"),
}


@pytest.mark.parametrize("build, reason", REFUSED.values(), ids=REFUSED)
def test_what_the_kernels_do_not_know_is_compiled(build: Any, reason: str) -> None:
    learner = build()
    assert reason in (backends.lacking(learner.module, learner.adapted) or "")
    on_cpu = DEVICE.type == "cpu"  # where Conv4 has code of its own, unless it is to be compiled
    assert isinstance(learner.to(DEVICE, "bf16", compiled=on_cpu).network, Traced)
    assert learner.to(DEVICE).precision == "float32"


CHANGED = {
    "a hook": lambda model: model.convs[1].register_forward_hook(lambda module, args, out: out * 0),
    "another padding": lambda model: setattr(model.convs[1], "padding_mode", "circular"),
    "no gain and bias": lambda model: model.norms.__setitem__(1, nn.BatchNorm2d(4, affine=False)),
    "no head bias": lambda model: setattr(model, "head", nn.Linear(4, 2, bias=False)),
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_a_changed_conv4_is_compiled(change: Any) -> None:
    assert isinstance(gs.maml(changed(change)).to(DEVICE, "bf16").network, Traced)


def test_without_triton_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "Triton" in (backends.lacking(conv4(), gs.maml(conv4()).adapted) or "")


def test_on_a_cpu_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "INTERPRETED", False)
    assert "NVIDIA GPU" in (backends.lacking(conv4(), gs.maml(conv4()).adapted) or "")
    with pytest.raises(gs.UserError, match="tf32 is arithmetic of NVIDIA GPUs"):
        gs.maml(conv4()).to("cpu", "tf32")


@needs_interpreter
def test_a_third_derivative_and_a_second_pass_are_refused() -> None:
    learner, _ = pair_of()
    state, episodes = start_of(learner), tasks_of(2, 1, 1, 1, SMALL)
    leaves = list(state.trainable().values())
    loss = learner.outer_loss(state, episodes).loss
    with pytest.raises(gs.UserError, match="two derivatives"):
        torch.autograd.grad(loss, leaves, create_graph=True)
    torch.autograd.grad(loss, leaves, retain_graph=True)
    with pytest.raises(gs.UserError, match="one backward pass"):
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
    learner, _ = pair_of(image=image)
    with pytest.raises(gs.UserError, match="image"):
        learner.outer_loss(learner.init(0), tasks_of(2, 1, 1, 1, given))


@needs_interpreter
def test_a_gradient_by_the_images_is_refused() -> None:
    learner, _ = pair_of()
    drawn = tasks_of(2, 1, 1, 1, SMALL)
    with pytest.raises(gs.UserError, match="no gradient"):
        learner.adapt(learner.init(0), drawn.support_x.requires_grad_(), drawn.support_y)


@needs_interpreter
def test_masks_and_several_inputs_are_refused() -> None:
    learner, _ = pair_of()
    drawn = tasks_of(2, 1, 1, 1, SMALL)
    real = torch.ones_like(drawn.support_y, dtype=torch.bool)
    for x, mask, what in ((drawn.support_x, real, "masks"), ((drawn.support_x,), None, "inputs of several tensors")):
        with pytest.raises(gs.UserError, match=f"the fast kernels have no {what}; use precision='float32'"):
            learner.adapt(learner.init(0), x, drawn.support_y, mask)


@needs_interpreter
def test_a_linear_loss_has_a_second_derivative_too() -> None:
    def linear(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * torch.tensor([1.0, -2.0]).to(outputs)).sum() / 10

    check_batch(*pair_of(loss=linear), tasks=1)
