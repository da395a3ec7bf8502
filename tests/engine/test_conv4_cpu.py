"""The CPU path of Conv4 equals the general path, through both derivatives, and is used for Conv4 alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradshare as gs
from gradshare.engine import backends
from gradshare.engine.conv4.cpu import network, pooled_norm
from gradshare.engine.conv4.cpu.network import fits
from gradshare.engine.operations import conv

METHODS: dict[str, Any] = {
    "maml": gs.maml,
    "adapted norms": lambda model, **more: gs.maml(model, adapt_norm=True, **more),
    "values per step": gs.maml_plus_plus,
    "head alone": gs.anil,
}


class SameUnderAnotherName(gs.Conv4):
    """Runs on the general path."""


def outcome(
    kind: type[gs.Conv4], method: str, image: tuple[int, int, int], tasks: int, gains: str
) -> dict[str, Tensor]:
    model = kind(ways=3, filters=4, image=image)
    model.initialise(torch.Generator().manual_seed(0))
    learner = METHODS[method](model.double(), inner_lr=0.1, steps=2, sharing=gs.GradientSharing())
    state, draw = learner.init(seed=None), torch.Generator().manual_seed(1)
    for name, leaf in state.trainable().items():
        leaf.data += 0.1 * torch.randn(leaf.shape, generator=draw, dtype=leaf.dtype)
        if "norms" in name and name.endswith("weight") and gains != "positive":
            leaf.data[..., ::2] *= -1 if gains == "some negative" else 0
    parts: list[Tensor] = []
    for n in (6, 9):
        parts.append(torch.rand(tasks, n, *image, generator=draw, dtype=torch.float64))
        parts.append((torch.arange(n) % 3).expand(tasks, n))
    out = learner.outer_loss(state, gs.Episodes(*parts))
    leaves = state.trainable()
    grads = torch.autograd.grad(out.loss, list(leaves.values()), retain_graph=True, materialize_grads=True)
    again = torch.autograd.grad(out.loss, list(leaves.values()), materialize_grads=True)
    assert all(torch.equal(one, other) for one, other in zip(grads, again, strict=True))
    return {"loss": out.loss.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_equal(ours: dict[str, Tensor], general: dict[str, Tensor]) -> None:
    scale = max(value.abs().max() for value in general.values())
    for name, value in general.items():
        assert (ours[name] - value).abs().max() <= 1e-10 * value.abs().max() + 1e-13 * scale, name


GAINS = ["positive", "some negative", "some zero"]
CASES = [(method, (1, 16, 16), "some negative") for method in METHODS] + [("maml", (3, 33, 21), g) for g in GAINS]


@pytest.mark.parametrize("method, image, gains", CASES)
def test_equals_the_general_path(method: str, image: tuple[int, int, int], gains: str) -> None:
    assert_equal(*(outcome(kind, method, image, 2, gains) for kind in (gs.Conv4, SameUnderAnotherName)))


@pytest.mark.parametrize("elements", [1, 5000])
def test_a_few_images_at_a_time_give_the_same(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    general = outcome(SameUnderAnotherName, "maml", (2, 20, 18), 3, "positive")
    monkeypatch.setattr(pooled_norm, "AT_A_TIME", elements)
    assert_equal(outcome(gs.Conv4, "maml", (2, 20, 18), 3, "positive"), general)


def test_of_equal_elements_the_first_counts_as_in_pytorch() -> None:
    z = torch.randint(0, 2, (3, 4, 6, 6), dtype=torch.float64, requires_grad=True)
    gain, bias = (torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in ([1.0, 0.5, 2, 3], [0.0] * 4))
    ours = pooled_norm.pooled_norm(z, gain, bias, 1e-5, 0.01)
    normal = nn.functional.batch_norm(z, None, None, gain, bias, training=True)
    theirs = nn.functional.leaky_relu(nn.functional.max_pool2d(normal, 2), 0.01)
    g = torch.rand(ours.shape, dtype=torch.float64)
    for one, other in zip(
        (ours, *torch.autograd.grad(ours, (z, gain, bias), g)),
        (theirs, *torch.autograd.grad(theirs, (z, gain, bias), g)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_changed_conv4_uses_the_general_path() -> None:
    x = torch.rand(2, 5, 1, 16, 16)

    def fits_after(change: Any = lambda model: None) -> bool:
        model = gs.Conv4(filters=4, image=(1, 16, 16))
        change(model)
        return fits(model, x)

    def set_forward(model: Any) -> None:
        model.head.forward = lambda features: features

    assert fits_after()
    assert not fits_after(lambda model: model.convs[0].register_forward_hook(lambda *_: None))
    assert not fits_after(lambda model: nn.utils.parametrizations.weight_norm(model.convs[1]))
    assert not fits_after(lambda model: model.norms.__setitem__(0, nn.GroupNorm(2, 4)))
    assert not fits_after(
        lambda model: model.convs.__setitem__(0, nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"))
    )
    assert not fits_after(lambda model: model.double())
    assert not fits_after(set_forward)
    assert not fits(SameUnderAnotherName(filters=4, image=(1, 16, 16)), x)


def test_every_weight_is_in_the_graph() -> None:
    """Also a bias before batch norm, which has no effect: its gradient is zero, not None."""
    learner = gs.maml(gs.Conv4(ways=3, filters=4, image=(1, 16, 16)), steps=2)
    state, x, y = learner.init(seed=0), torch.rand(2, 3, 1, 16, 16), torch.arange(3).expand(2, 3)
    loss = learner.outer_loss(state, gs.Episodes(x, y, x, y)).loss
    grads = dict(zip(state.params, torch.autograd.grad(loss, list(state.params.values())), strict=True))
    assert {name for name, grad in grads.items() if not grad.any()} == {f"convs.{layer}.bias" for layer in range(4)}


def test_images_may_be_differentiated() -> None:
    x, y = torch.rand(2, 3, 1, 16, 16, dtype=torch.float64, requires_grad=True), torch.arange(3).expand(2, 3)
    grads = []
    for kind in (gs.Conv4, SameUnderAnotherName):
        model = kind(ways=3, filters=4, image=(1, 16, 16)).double()
        model.initialise(torch.Generator().manual_seed(0))
        learner = gs.maml(model, steps=1)
        loss = learner.outer_loss(learner.init(), gs.Episodes(x, y, x, y)).loss
        grads.append(torch.autograd.grad(loss, x)[0])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-14)


def test_bf16_rounds_the_operands_of_convolutions_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "lacking", lambda module, adapted: "there is no GPU")
    convolved: list[tuple[torch.dtype, ...]] = []

    def recorded(*operands: Any) -> Tensor:
        convolved.append(tuple(operand.dtype for operand in operands[:2]))
        return conv(*operands)

    monkeypatch.setattr(network, "conv", recorded)
    draw = torch.Generator().manual_seed(0)
    x, query = (torch.rand(2, n, 1, 28, 28, generator=draw) for n in (5, 15))
    episodes = gs.Episodes(x, torch.arange(5).expand(2, 5), query, torch.arange(5).repeat(3).expand(2, 15))
    usual = gs.maml(gs.Conv4(5, 16, (1, 28, 28)), inner_lr=0.01, steps=1, sharing=gs.GradientSharing())
    state, gradients = usual.init(0), []
    for learner, kind in ((usual, torch.float32), (usual.to("cpu", "bf16"), torch.bfloat16)):
        convolved.clear()
        loss = learner.outer_loss(state, episodes).loss
        gradients.append(torch.cat([part.flatten() for part in torch.autograd.grad(loss, [*state.params.values()])]))
        assert set(convolved) == {(kind, kind)} and loss.dtype == gradients[-1].dtype == torch.float32
    away = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert 1e-3 < away < 0.5, away  # batch norm over the five pixels of the last block multiplies the rounding
