"""Whole learners on the kernels, compared with the general path in float64.

Seeds are such that no two elements of a pooling window are so close that float32 takes another one than float64.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

import gradshare as gs
from gradshare.method.variants import first_link
from tests.support.kernel_tools import (
    DEVICE,
    GPU,
    Batch,
    batch_of,
    cast,
    error,
    on_kernels,
    poisoned,
    tasks_of,
    varied,
)

SMALL = (1, 16, 16)


class Plain(gs.Conv4):
    """Conv4 as a subclass, which runs on the general path."""


def pair_of(
    make: Any = gs.maml, sharing: Any = None, image: Any = SMALL, steps: int = 1, backbone: Any = gs.Conv4, **more: Any
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


def check_batch(learner: gs.Learner, exact: gs.Learner, tasks: int = 2) -> None:
    """Loss, meta-gradient and memory of one batch."""
    state, episodes = start_of(learner), tasks_of(2, 2, 2, tasks, SMALL)
    found, _ = batch_of(learner, state, episodes)
    expected, _ = batch_of(exact, exactly(state), in_float64(episodes))
    assert error(found, expected) < 1e-5


def check_meta_gradients_and_memory(make: Any, sharing: Any, image: Any, steps: int = 2) -> None:
    """Two meta-iterations, where the second one reads the memory of the first."""
    learner, exact = pair_of(make, sharing, image, steps)
    state = start_of(learner)
    exact_state = exactly(state)
    for iteration in range(2 if state.memory else 1):
        episodes = tasks_of(2, 2, 2, 2, image, seed=iteration)
        with nullcontext() if GPU else poisoned():  # on a GPU some of PyTorch's own operations do not allow it
            found, out = batch_of(learner, state, episodes)
        expected, exact_out = batch_of(exact, exact_state, in_float64(episodes))
        assert error(found, expected) < 1e-5
        assert out.accuracy is not None and torch.equal(out.accuracy.double().cpu(), exact_out.accuracy)
        for name, tensor in out.memory.get("sharing", {}).get("ghat", {}).items():
            assert tensor.shape == state.memory["sharing"]["ghat"][name].shape and not tensor.requires_grad
        state.memory, exact_state.memory = out.memory, exact_out.memory


ALGORITHMS = {
    "maml": gs.maml,
    "first order": gs.first_order_maml,
    "meta-sgd": gs.meta_sgd,
    "maml++": gs.maml_plus_plus,
    "meta-curvature": gs.meta_curvature,
    "sparse-maml": gs.sparse_maml,
    "alfa": gs.alfa,
    "momentum": partial(gs.maml, inner=gs.momentum(0.9)),
    "adam": partial(gs.maml, inner=gs.adam(eps=0.1)),
    "zero head": partial(gs.maml, head_start="zero"),
}
SHARINGS = {
    "none": None,
    "global": gs.GradientSharing(),
    "tensor": gs.GradientSharing("tensor"),
    "gate only": gs.GateOnly(),
    "batch only": gs.BatchOnly(),
    "memory only": gs.MemoryOnly(),
    "batch only by tensor": gs.BatchOnly("tensor"),
    "memory only by tensor": gs.MemoryOnly("tensor"),
    "conditioned": gs.GradientSharing(conditioned=True),
    "conditioned by tensor": gs.GradientSharing("tensor", conditioned=True),
    **{arm: first_link(arm) for arm in ("tensor-gates", "shared-tensor-gates", "additive", "mean-length")},
    **{arm: first_link(arm) for arm in ("length-keeping", "retrieval", "not-first", "equivariant")},
}
EVERY = {f"{a}, {b}": (make, sharing, SMALL) for a, make in ALGORITHMS.items() for b, sharing in SHARINGS.items()}
SOME = {  # each takes the interpreter five seconds
    "maml, global, odd sizes": (gs.maml, gs.GradientSharing(), (3, 17, 18)),
    **{f"maml, {name}": EVERY[f"maml, {name}"] for name in SHARINGS if "by tensor" not in name},
    **{f"{name}, global": EVERY[f"{name}, global"] for name in ALGORITHMS if name != "maml"},
    **{name: EVERY[name] for name in ("maml++, tensor", "maml++, conditioned by tensor")},
}


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


def unchanged(x: Tensor) -> Tensor:
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


def as_they_are(weights: dict[str, Tensor]) -> None: ...


IMAGES = [black, of_one_colour, of_a_colour_each, all_the_same, far_from_zero, faint, one_image]
WEIGHTS = [dead_units, no_live_unit, zeros, certain, small_gradients]
HARD = [(images, as_they_are) for images in IMAGES] + [(unchanged, weights) for weights in WEIGHTS]


def check_hard_inputs(images: Any, weights: Any) -> None:
    """The kernels give finite values that are about as good as those of the general path in float32."""
    learner, exact = pair_of(sharing=gs.GradientSharing(), backbone=Plain)
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


class InDouble:
    def __init__(self, source: gs.Dataset) -> None:
        self.source = source

    def sample(self, *args: Any) -> gs.Episodes:
        return self.source.sample(*args).to(torch.float64)


def changed(change: Any) -> gs.Conv4:
    model = conv4()
    change(model)
    return model


def another_eps_and_slope_and_frozen_norms(model: gs.Conv4) -> None:
    model.norms[2].eps = 0.1
    model.SLOPE = 0.2
    frozen(model, "norms")


def conv4(image: Any = SMALL, **more: Any) -> gs.Conv4:
    return gs.Conv4(ways=2, filters=4, image=image, **more)


def frozen(model: gs.Conv4, layer: str) -> gs.Conv4:
    model.get_submodule(layer).requires_grad_(False)
    return model
