"""The kernels of cross-entropy and of gradient sharing against plain float64 formulas, on the same inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gradshare as gs
from gradshare.engine.conv4.triton import head, sharing
from gradshare.engine.conv4.triton.programs import with_programs
from tests.support.kernel_tools import DEVICE, assert_near, draw, poisoned, without_checks
from tests.support.steps import together


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    without_checks(monkeypatch)


@pytest.mark.parametrize("tasks, n, ways", [(1, 1, 2), (3, 7, 5), (2, 130, 20)])
@pytest.mark.parametrize("size", [1.0, 30.0], ids=["usual logits", "large logits"])
def test_cross_entropy(tasks: int, n: int, ways: int, size: float) -> None:
    logits, targets = size * draw(1, tasks, n, ways), torch.arange(tasks * n, device=DEVICE).view(tasks, n) % ways
    g, v = draw(2, tasks), draw(3, tasks, n, ways)

    def by_task(logits: Tensor, targets: Tensor) -> Tensor:
        return torch.stack([F.cross_entropy(*task) for task in zip(logits, targets, strict=True)])

    with poisoned():
        found = of_orders(head.cross_entropy, logits, targets, g, v)
    expected = of_orders(by_task, logits.double(), targets, g.double(), v.double())
    for order, value in found.items():
        assert_near(value, expected[order], 1e-5, scale=size if order == "losses" else 0.1 / n, what=order)


@pytest.mark.parametrize("label", [3, -1, -100])
def test_cross_entropy_knows_no_other_classes_and_ignores_none(label: int) -> None:
    logits, targets = draw(1, 2, 6, 3), torch.tensor([[0, 1, 2, 1, 0, 0], [label, 1, 1, 0, 2, 2]], device=DEVICE)
    first, second = head.cross_entropy(logits, targets)
    assert first.isfinite() and second.isnan()


def of_orders(loss: Any, logits: Tensor, targets: Tensor, g: Tensor, v: Tensor) -> dict[str, Tensor]:
    logits, g = logits.clone().requires_grad_(), g.clone().requires_grad_()
    losses = loss(logits, targets)
    (gradient,) = torch.autograd.grad(losses, logits, g, create_graph=True)
    by_logits, by_g = torch.autograd.grad(gradient, (logits, g), v)
    return {"losses": losses, "gradient": gradient, "second, by logits": by_logits, "second, by g": by_g}


def test_cross_entropy_of_an_expanded_gradient_and_any_layout() -> None:
    logits = draw(1, 5, 3, 4).permute(1, 2, 0)  # [3, 4, 5]
    targets = torch.arange(12, device=DEVICE).view(4, 3).mT % 5
    wanted = F.cross_entropy(logits.double().flatten(0, 1), targets.flatten())
    leaf = logits.clone().requires_grad_()
    loss = head.cross_entropy(leaf, targets).mean()  # its gradient comes as one number for all tasks
    assert_near(loss, wanted, 1e-6)
    (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
    exact = logits.double().clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.cross_entropy(exact.flatten(0, 1), targets.flatten()), exact, create_graph=True)
    assert_near(gradient, expected, 1e-5)
    assert_near(
        *(torch.autograd.grad(of.square().sum(), x)[0] for of, x in ((gradient, leaf), (expected, exact))), 1e-5
    )


SHARED = {
    "usual": (3, 50, 1.0),
    "one task": (1, 7, 1.0),
    "several programs": (2, 2 * sharing.ELEMENTS + 5, 1.0),
    "small": (2, 50, 1e-30),
    "large": (2, 50, 1e30),
}


@pytest.mark.parametrize("tasks, size, scale", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize("seen", [False, True], ids=["first iteration", "later iteration"])
def test_share(tasks: int, size: int, scale: float, seen: bool) -> None:
    given = draw(1, tasks, size), draw(2, 3), draw(3, 3), draw(4, size) / size**0.5, draw(5, tasks, size)
    known = torch.tensor(seen, device=DEVICE)
    expected = shared_by(in_plain_operations, known, scale, *(part.double() for part in given))
    with poisoned():
        found = shared_by(sharing.share, known, scale, *given)
    for (what, value), exact in zip(found.items(), expected.values(), strict=True):
        assert_near(value, exact, 1e-5, scale=1.0 if what in ("by m", "by lam") else None, what=what)


def in_plain_operations(gradients: Tensor, m: Tensor, lam: Tensor, stored: Tensor, seen: Tensor, step: int) -> Any:
    memory = {"ghat": {"w": stored.expand(len(m), -1)}, "seen": seen}
    direction, running = together(gs.share_gradients(), {"w": gradients}, {"m": m, "lam": lam}, memory, step)
    return direction["w"], running["w"]


def shared_by(
    share: Any, seen: Tensor, scale: float, gradients: Tensor, m: Tensor, lam: Tensor, stored: Tensor, v: Tensor
) -> dict[str, Tensor]:
    leaves = [(gradients * scale).requires_grad_(), m.clone().requires_grad_(), lam.clone().requires_grad_()]
    direction, running = share(*leaves, stored, seen, 1)
    to_gradients, to_m, to_lam = torch.autograd.grad(direction, leaves, v)
    # a small sum has a large derivative: as a share of it, so that one tolerance fits all
    least = min(scale, 1.0)
    return {
        "direction": direction / max(scale, 1.0),
        "running": running,
        "by gradients": to_gradients * least,
        "by m": to_m,
        "by lam": to_lam / max(scale, 1.0),
    }


@pytest.mark.parametrize("seen", [False, True], ids=["first iteration", "later iteration"])
def test_sharing_of_gradients_that_cancel(seen: bool) -> None:
    one, v, stored = draw(1, 40), draw(2, 2, 40), draw(3, 40)
    zeros = torch.zeros(3, device=DEVICE)
    inputs = torch.stack([one, -one]), zeros, zeros, stored, v
    found = shared_by(sharing.share, torch.tensor(seen, device=DEVICE), 1.0, *inputs)
    expected = shared_by(
        in_plain_operations, torch.tensor(seen, device=DEVICE), 1.0, *(part.double() for part in inputs)
    )
    for (what, value), exact in zip(found.items(), expected.values(), strict=True):
        assert_near(value, exact, 1e-5, what=what)
    if not seen:
        assert (found["running"] == 0).all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's sums
@pytest.mark.parametrize("seen", [False, True], ids=["first iteration", "later iteration"])
@pytest.mark.parametrize("large", [1.0, 2e38], ids=["usual", "sums too large for a number"])
def test_sharing_with_a_task_that_diverges(seen: bool, large: float) -> None:
    gradients, zeros, v = draw(1, 4, 40), torch.zeros(3, device=DEVICE), draw(2, 4, 40)
    gradients[1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    gradients[:, 7], gradients[:, 9] = large, -large
    inputs = gradients, zeros, zeros, draw(3, 40), v
    known = torch.tensor(seen, device=DEVICE)
    found, expected = (shared_by(share, known, 1.0, *inputs) for share in (sharing.share, in_plain_operations))
    assert found["running"].isfinite().all()
    assert torch.equal(found["direction"].isfinite(), gradients.isfinite())
    for what in ("running", "by gradients", "by m"):
        assert_near(found[what], expected[what].double(), 1e-5, what=what)
    finite = gradients.isfinite() & (gradients.abs() < 1e38)
    assert_near(found["direction"][finite], expected["direction"][finite].double(), 1e-5)


RULES = {
    "conditioned": gs.GradientSharing(conditioned=True),
    "batch only": gs.BatchOnly(),
    "memory only": gs.MemoryOnly(),
}


def usual(gradients: Tensor) -> None: ...


def with_a_task_of_zeros(gradients: Tensor) -> None:
    gradients[1] = 0


def with_a_task_that_diverges(gradients: Tensor) -> None:
    gradients[1, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
@pytest.mark.parametrize("sharing", RULES.values(), ids=RULES)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("change", [usual, with_a_task_of_zeros, with_a_task_that_diverges])
@pytest.mark.parametrize("seen", [False, True], ids=["first iteration", "later iteration"])
def test_other_ways_of_sharing(seen: bool, change: Any, scale: float, sharing: Any) -> None:
    rule, gradients = sharing.rule(), draw(1, 3, 50)
    change(gradients)
    learned, _ = rule.init({"w": gradients[0]}, 2)
    learned = {name: draw(seed, 2) for seed, name in enumerate(sorted(learned), start=2)}
    stored, v = seen * draw(6, 2, 50), draw(7, 3, 50)

    def by(update: Any, kind: torch.dtype) -> dict[str, Tensor]:
        own = (gradients * scale).to(kind).requires_grad_()
        values = {name: value.to(kind).requires_grad_() for name, value in learned.items()}
        memory = {"ghat": {"w": stored.to(kind)}, "seen": torch.tensor(seen, device=DEVICE)}
        direction, running = together(rule, {"w": own}, values, memory, 1, update)
        leaves = {"gradients": own, **values}
        by = torch.autograd.grad(direction["w"], list(leaves.values()), v.to(kind), allow_unused=True)
        by_leaf = {
            name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), by, strict=True)
        }
        return {"direction": direction["w"], "running": running["w"], **by_leaf}

    with poisoned():
        found = by(with_programs(rule).update, torch.float32)
    for what, exact in by(rule.update, torch.float64).items():
        value = found[what]
        usual_size = {"running": 1.0, "m": 1.0, "gradients": 1 / min(scale, 1.0)}.get(what, max(scale, 1.0))
        if what == "gradients":
            value, exact = value[[0, 2]], exact[[0, 2]]  # those of a task that diverges are of no use
        assert torch.equal(value.isfinite(), exact.isfinite()), what
        finite = exact.isfinite()
        assert_near(value[finite], exact[finite], 1e-5, scale=usual_size, what=what)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # the interpreter's exp(200)
def test_a_closed_gate_leaves_every_gradient_as_it_is() -> None:
    gradients, closed = draw(1, 3, 30), torch.full((2,), -200.0, device=DEVICE)
    seen = torch.tensor(True, device=DEVICE)
    direction, _ = sharing.share(gradients, torch.zeros_like(closed), closed, draw(2, 30), seen, 1)
    assert torch.equal(direction, gradients)
    direction, running = sharing.share(gradients, torch.zeros_like(closed), -closed, draw(2, 30), seen, 1)
    assert torch.equal(direction, running.expand(3, -1))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
def test_sharing_of_gradients_near_the_smallest_number_there_is() -> None:
    zeros, gradients = torch.zeros(3, device=DEVICE), draw(1, 2, 40) * 1e-40
    direction, running = sharing.share(gradients, zeros, zeros, draw(2, 40), torch.tensor(False, device=DEVICE), 1)
    assert direction.isfinite().all()
    assert running.norm().item() == pytest.approx(1, abs=1e-3)
