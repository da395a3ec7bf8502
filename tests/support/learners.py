"""A small smooth network, tasks for it, every algorithm and sharing: for properties that hold whatever the numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import gradshare as gs
from gradshare.method.variants import first_link

# The gradient of a bias before batch norm is rounding error. Per-tensor sharing makes its length 1, and ALFA sees it.
ALGORITHMS: dict[str, Callable[..., gs.Learner]] = {
    "maml": gs.maml,
    "first_order_maml": gs.first_order_maml,
    "meta_sgd": gs.meta_sgd,
    "maml_plus_plus": gs.maml_plus_plus,
    "anil": gs.anil,
    "boil": gs.boil,
    "proto_maml": gs.proto_maml,
    "meta_curvature": gs.meta_curvature,
    "sparse_maml": gs.sparse_maml,
    "alfa": partial(gs.alfa, adapt=lambda name: name not in ("0.bias", "1.weight", "1.bias")),
    "momentum": partial(gs.maml, inner=gs.momentum(0.9)),
    "adam": partial(gs.maml, inner=gs.adam(eps=1e-3)),  # gradients that are rounding errors move nothing
}
SHARINGS = {
    "original": None,
    "global": gs.GradientSharing("global"),
    "tensor": gs.GradientSharing("tensor"),
    "conditioned": gs.GradientSharing(conditioned=True),
    **{name: first_link(name) for name in ("tensor-gates", "shared-tensor-gates", "additive", "mean-length")},
    **{name: first_link(name) for name in ("length-keeping", "retrieval", "not-first", "not-last")},
}
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
every_sharing = pytest.mark.parametrize("sharing", SHARINGS.values(), ids=SHARINGS)


def net() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(1, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.SiLU(),
        nn.AvgPool2d(4),
        nn.Flatten(),
        nn.Linear(12, 3),
    )
    return nn.Sequential(*layers).double()


def tasks(count: int = 4, seed: int = 1) -> gs.Episodes:
    generator = torch.Generator().manual_seed(seed)

    def part(each: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(count, 3 * each, 1, 8, 8, generator=generator, dtype=torch.float64)
        return x, torch.arange(3).repeat(each).expand(count, -1)

    return gs.Episodes(*part(2), *part(4))


def gradients(learner: gs.Learner, state: gs.MetaState, episodes: gs.Episodes) -> tuple[gs.Outcome, dict[str, Tensor]]:
    leaves = state.trainable()
    out = learner.outer_loss(state, episodes)
    values = torch.autograd.grad(out.loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return out, dict(zip(leaves, values, strict=True))


def randomised(state: gs.MetaState) -> gs.MetaState:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in state.trainable().values():
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    return state
