"""Any module as traced programs: the slower cases; tests/engine/test_traced.py has the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradshare as gs
from gradshare.engine import traced
from tests.engine import test_traced as quick
from tests.support.cases import assert_equal_to_reference, build
from tests.support.models import EXTRAS

interpreted, pytestmark = quick.interpreted, quick.pytestmark


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("algorithm", ["anil", "boil", "maml++"])
@pytest.mark.parametrize("net", ["ResNet12", "ViT"])
def test_algorithms_on_our_other_networks(algorithm: str, net: str) -> None:
    assert_equal_to_reference(quick.on_programs(build(EXTRAS[net], algorithm, "global", 2)), EXTRAS[net], tasks=2)


def by_autocast(model: nn.Module, state: gs.MetaState, episodes: gs.Episodes, adapted: Any, steps: int) -> Tensor:
    """MAML's meta-gradient by a loop over tasks under torch.autocast, as a user of PyTorch has it."""
    losses = []
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), sdpa_kernel(SDPBackend.MATH):
        for t in range(episodes.tasks):
            fast = {name: state.params[name] for name in adapted}
            for _ in range(steps):
                logits = functional_call(model, {**state.params, **fast}, (episodes.support_x[t],))
                loss = F.cross_entropy(logits.float(), episodes.support_y[t])
                gradients = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {name: w - 0.05 * g for (name, w), g in zip(fast.items(), gradients, strict=True)}
            logits = functional_call(model, {**state.params, **fast}, (episodes.query_x[t],))
            losses.append(F.cross_entropy(logits.float(), episodes.query_y[t]))
    gradients = torch.autograd.grad(
        torch.stack(losses).mean(), list(state.trainable().values()), materialize_grads=True
    )
    return torch.cat([gradient.flatten().double() for gradient in gradients])


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("make", [quick.deep, lambda: gs.ViT(5, (1, 16, 16), patch=4, width=16, depth=2, heads=2)])
def test_bf16_is_as_exact_as_autocast(make: Any) -> None:
    """Its rounding, relative to the meta-gradient in float64, beside that of torch.autocast: the mean of five seeds."""
    ours, theirs = [], []
    for seed in range(5):
        torch.manual_seed(seed)
        model, episodes = make(), quick.images(seed)
        learner = gs.maml(model, inner_lr=0.05, steps=2)
        state = learner.init(seed)
        wide = gs.maml(make().double(), inner_lr=0.05, steps=2)
        exact_state = wide.init()
        for name, tensor in exact_state.trainable().items():
            tensor.data.copy_(state.trainable()[name].data)
        exact = quick.flat(wide, exact_state, episodes.to("cpu", torch.float64))
        found = quick.flat(learner.to("cpu", "bf16"), state, episodes)
        other = by_autocast(learner.module, state, episodes, learner.adapted, 2)
        ours.append(((found - exact).norm() / exact.norm()).item())
        theirs.append(((other - exact).norm() / exact.norm()).item())
    assert 1e-5 < sum(ours) < 1.3 * sum(theirs), (ours, theirs)


def test_compiled_programs_give_the_same() -> None:
    """By the compiler itself, in float32 and bf16, and said before it starts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    usual, episodes, lines = gs.maml(model, steps=2), quick.images(0), list[str]()
    state = usual.init()
    expected = quick.flat(usual, state, episodes)
    with traced.announced(lines.append):
        found = quick.flat(usual.to("cpu", compiled=True), state, episodes)
        rounded = quick.flat(usual.to("cpu", "bf16"), state, episodes)
    assert (found - expected).norm() < 1e-5 * expected.norm()
    assert 1e-4 < (rounded - expected).norm() / expected.norm() < 0.1
    assert len(lines) == 6 and lines[0].startswith("compiling an inner step (")
