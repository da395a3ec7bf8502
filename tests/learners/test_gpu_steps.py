"""Steps on a GPU: recorded, in parts, with other optimisers. Needs a GPU: pytest tests/learners/test_gpu_steps.py"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradshare as gs
from gradshare.learners.optimisers import optimiser_tensors, restore_optimiser, set_rate
from tests.support.learners import every_algorithm, every_sharing, randomised, tasks
from tests.support.models import EXTRAS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

Make = Callable[[gs.MetaState], Optimizer]


def with_leaves(kind: Callable[..., Optimizer], **options: Any) -> Make:
    return lambda state: kind(state.trainable().values(), **options)


RECORDED: dict[str, Make] = {
    "ours": lambda state: gs.optimiser(state, 1e-2),
    "Adam": with_leaves(torch.optim.Adam, lr=1e-2, capturable=True),
    "AdamW, fused": with_leaves(torch.optim.AdamW, lr=1e-2, capturable=True, fused=True),
    "SGD": with_leaves(torch.optim.SGD, lr=1e-2),
    "SGD with momentum": with_leaves(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "RMSprop": with_leaves(torch.optim.RMSprop, lr=1e-2, capturable=True),
    "NAdam": with_leaves(torch.optim.NAdam, lr=1e-2, capturable=True),
    "RAdam": with_leaves(torch.optim.RAdam, lr=1e-2, capturable=True),
}
EAGER: dict[str, Make] = {
    **RECORDED,
    "Adam that counts on the CPU": with_leaves(torch.optim.Adam, lr=1e-2),
    "Adagrad": with_leaves(torch.optim.Adagrad, lr=1e-2),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3), nn.SiLU(), nn.AvgPool2d(4), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(12, 3)).double()


def on_gpu(make: Any = gs.maml_plus_plus, **options: Any) -> gs.Learner:
    found: gs.Learner = make(net(), steps=2, **{"sharing": gs.GradientSharing(), **options}).to("cuda")
    return found


def batch(number: int, broken: bool = False, count: int = 4) -> gs.Episodes:
    episodes = tasks(count, seed=number).to("cuda")
    if broken:
        episodes.query_x[1] = torch.nan
    return episodes


def everything(state: gs.MetaState, optimiser: Optimizer) -> dict[str, Tensor]:
    tensors = {**state.tensors(), **optimiser_tensors(state, optimiser)}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor], rtol: float = 1e-9, atol: float = 1e-11) -> None:
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        torch.testing.assert_close(
            one[name], tensor, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("make", EAGER.values(), ids=EAGER)
def test_a_step_that_is_not_finite_is_not_taken(make: Make) -> None:
    learner = on_gpu()
    states = [learner.init(), learner.init()]
    optimiser, straight = (make(state) for state in states)
    for number in range(6):
        broken = number in (0, 2, 3)
        assert bool(gs.meta_step(learner, states[0], optimiser, batch(number, broken)).taken) is not broken
        if not broken:
            gs.meta_step(learner, states[1], straight, batch(number))
    assert_close(everything(states[0], optimiser), everything(states[1], straight), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [name for name in EAGER if name != "Adam that counts on the CPU"])
def test_the_cpu_does_not_wait_for_a_step(name: str) -> None:
    """Neither with our Adam nor with others, once they have made their state."""
    learner = on_gpu()
    state = learner.init()
    optimiser = EAGER[name](state)
    batches = [batch(number) for number in range(3)]
    gs.meta_step(learner, state, optimiser, batches[0])
    if any(not value.is_cuda for value in optimiser_tensors(state, optimiser).values()):
        pytest.skip("it counts on the CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode is a prototype of PyTorch's, and says so
        torch.cuda.set_sync_debug_mode("error")
    try:
        gs.meta_step(learner, state, optimiser, batches[1])
        gs.meta_step(learner, state, optimiser, batches[2], micro_batch=2)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("make", RECORDED.values(), ids=RECORDED)
@pytest.mark.parametrize("options", [{}, {"clamp": 1e-3, "micro_batch": 3}, {"checkpoint": True}], ids=str)
def test_a_recorded_step_is_the_step(make: Make, options: dict[str, Any]) -> None:
    """With two shapes of batch, steps that are not taken, a rate that changes, and outcomes kept for later."""
    learner = on_gpu()
    states = [learner.init(), learner.init()]
    optimiser, straight = (make(state) for state in states)
    step = gs.compiled_step(learner, states[0], optimiser, **options)
    kept = []
    for number in range(10):
        if number == 6:
            set_rate(optimiser, 0.5)
            set_rate(straight, 0.5)
        episodes = batch(number, broken=number in (0, 3, 7), count=4 if number % 3 else 5)
        kept.append((step(episodes), gs.meta_step(learner, states[1], straight, episodes, **options)))
        assert_close(everything(states[0], optimiser), everything(states[1], straight))
    for found, expected in kept:
        assert found.fault is not None and expected.fault is not None and found.fault.item() == expected.fault.item()
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-9, atol=0, equal_nan=True)
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-9, atol=0, equal_nan=True)


def test_a_recorded_step_with_masks_and_several_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.norm(self.one(a)).tanh() * b

    def drawn(seed: int) -> gs.Episodes:
        draw = torch.Generator().manual_seed(seed)
        a, b, y = (torch.randn(3, 6, width, generator=draw) for width in (4, 5, 5))
        mask = torch.arange(6).expand(3, -1) < torch.tensor([[6], [4], [5]])
        return gs.Episodes((a, b), y, (a, b), y, mask, mask).to("cuda")

    torch.manual_seed(0)
    learner = gs.maml(Two(), steps=2, loss="mse", sharing=gs.GradientSharing()).to("cuda")
    states = [learner.init(), learner.init()]
    optimiser, straight = (gs.optimiser(state, 1e-2) for state in states)
    step = gs.compiled_step(learner, states[0], optimiser, micro_batch=2)
    for number in range(4):
        torch.testing.assert_close(
            step(drawn(number)).loss, gs.meta_step(learner, states[1], straight, drawn(number)).loss, rtol=1e-4, atol=0
        )


def test_what_cannot_be_recorded_says_what_to_set() -> None:
    learner = on_gpu()
    state = learner.init()
    with pytest.raises(gs.UserError, match="capturable=True"):
        gs.compiled_step(learner, state, torch.optim.Adam(state.trainable().values()))


def test_a_checkpoint_goes_on_with_recorded_steps() -> None:
    learner = on_gpu()
    states = [learner.init(), learner.init()]
    make = RECORDED["SGD with momentum"]
    straight = make(states[1])
    for number in range(4):
        gs.meta_step(learner, states[1], straight, batch(number))
    optimiser = make(states[0])
    step = gs.compiled_step(learner, states[0], optimiser)
    for number in (0, 1):
        step(batch(number))
    saved = {name: tensor.cpu() for name, tensor in everything(states[0], optimiser).items()}
    resumed = gs.MetaState.of({n: t.cuda() for n, t in saved.items() if n.startswith(("params", "learned", "memory"))})
    fresh = make(resumed)
    restore_optimiser(resumed, fresh, saved)
    step = gs.compiled_step(learner, resumed, fresh)
    for number in (2, 3):
        step(batch(number))
    assert_close(everything(resumed, fresh), everything(states[1], straight))


# Parts


def gradients(learner: gs.Learner, state: gs.MetaState, episodes: gs.Episodes, **options: Any) -> dict[str, Tensor]:
    out = gs.meta_step(learner, state, torch.optim.SGD(state.trainable().values(), lr=0.0), episodes, **options)
    memory = {name: tensor for name, tensor in state.tensors().items() if name.startswith("memory/")}
    found = {name: leaf.grad for name, leaf in state.trainable().items() if leaf.grad is not None}
    return {"loss": out.loss, **memory, **found}


@every_algorithm
@every_sharing
def test_parts_give_the_same_meta_gradient(algorithm: Any, sharing: Any) -> None:
    learner = on_gpu(algorithm, sharing=sharing)
    expected = gradients(learner, randomised(learner.init().to("cpu")).to("cuda"), batch(1))
    for options in ({"micro_batch": 1}, {"micro_batch": 3}, {"checkpoint": True}):
        found = gradients(learner, randomised(learner.init().to("cpu")).to("cuda"), batch(1), **options)
        assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
@pytest.mark.parametrize("sharing", [None, gs.GradientSharing(), gs.GradientSharing("tensor")], ids=str)
def test_parts_on_the_kernels(precision: Any, sharing: Any) -> None:
    learner = gs.maml_plus_plus(gs.Conv4(ways=3, filters=8, image=(1, 16, 16)), steps=2, sharing=sharing)
    learner = learner.to("cuda", precision)
    small, grow = tasks(), (1, 1, 1, 2, 2)
    episodes = gs.Episodes(small.support_x.repeat(grow), small.support_y, small.query_x.repeat(grow), small.query_y)
    episodes = episodes.to("cuda", torch.float32)
    expected = gradients(learner, learner.init(seed=0).to("cuda"), episodes)
    for options in ({"micro_batch": 1}, {"micro_batch": 3}, {"checkpoint": True}):
        found = gradients(learner, learner.init(seed=0).to("cuda"), episodes, **options)
        scale = max(value.abs().max().item() for name, value in expected.items() if not name.startswith("memory"))
        assert_close(found, expected, rtol=1e-2, atol=(1e-5 if precision == "tf32" else 1e-3) * max(scale, 1.0))


def test_parts_need_less_memory() -> None:
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    )
    learner = gs.maml(model, steps=5, sharing=gs.GradientSharing()).to("cuda")
    x, y = torch.rand(16, 6, 1, 64, 64, device="cuda"), torch.arange(3, device="cuda").repeat(2).expand(16, -1)
    episodes = gs.Episodes(x, y, x, y)

    def peak(**options: Any) -> int:
        state = learner.init()
        adam = gs.optimiser(state, 1e-3)
        gs.meta_step(learner, state, adam, episodes, **options)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        gs.meta_step(learner, state, adam, episodes, **options)
        return torch.cuda.max_memory_allocated() - start

    plain, one_step, four, one = peak(), peak(checkpoint=True), peak(micro_batch=4), peak(micro_batch=1)
    assert one_step < plain / 2.5 and four < one_step / 2.5 and one < four / 2


@pytest.mark.parametrize("name", ["ResNet12", "ViT"])
def test_a_recorded_step_of_our_other_networks_is_the_eager_one(name: str) -> None:
    entry = EXTRAS[name]
    learner = gs.maml(entry.make(), steps=2, sharing=gs.GradientSharing()).to("cuda")
    states = [learner.init(), learner.init()]
    first, second = (gs.optimiser(state, 1e-3) for state in states)
    step = gs.compiled_step(learner, states[0], first)
    for number in range(4):
        episodes = entry.tasks(3, seed=number).to("cuda")
        step(episodes)
        gs.meta_step(learner, states[1], second, episodes)
    assert_close(everything(states[0], first), everything(states[1], second), rtol=1e-7, atol=1e-9)
