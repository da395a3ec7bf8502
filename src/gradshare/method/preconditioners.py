"""Learned preconditioning: rules that change the direction D of the links before them by values of the outer loop.

Each starts as the identity, so the algorithm starts as plain MAML.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gradshare.method.rules import InnerStep, Moved, Rule, Tree, Weights

SIDES = ("out", "in", "filter")  # axes of a weight: outputs, inputs, and all positions of a filter as one


@dataclass(frozen=True)
class Mask(Rule):
    """A learned factor for each element, none below 0: relu(M) * D, with M starting at 1 (sparse-MAML)."""

    name = "mask"
    any_layout = True

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        return {name: torch.ones_like(weight) for name, weight in weights.items()}, {}

    def update(self, at: InnerStep) -> Moved:
        return Moved({name: own * at.learned[name].relu() for name, own in at.gradients.items()})


@dataclass(frozen=True)
class Curvature(Rule):
    """A learned matrix for each axis of each weight: D x1 M_o x2 M_i x3 M_f, all starting at the identity.

    The third axis of a filter is all of its positions. A matrix has two axes. Weights of one axis (biases, gains) are
    left as they are.
    """

    name = "curvature"

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        matrices = {name: _identities(weight) for name, weight in weights.items()}
        return {name: sides for name, sides in matrices.items() if sides}, {}

    def update(self, at: InnerStep) -> Moved:
        learned = at.learned
        return Moved({name: _products(own, learned.get(name, {})) for name, own in at.gradients.items()})


def _identities(weight: Tensor) -> dict[str, Tensor]:
    shape = weight.shape
    sizes = (*shape[:2], math.prod(shape[2:])) if len(shape) > 2 else shape if len(shape) == 2 else ()
    return {side: _identity(size, weight) for side, size in zip(SIDES, sizes, strict=False)}


def _identity(size: int, like: Tensor) -> Tensor:
    return torch.eye(size, dtype=like.dtype, device=like.device)


def _products(own: Tensor, sides: Mapping[str, Tensor]) -> Tensor:  # [tasks, *shape]
    """Multiply each axis by its matrix: sum over j of M[i, j] own[..., j, ...]."""
    product = own.flatten(3) if own.dim() > 3 else own
    for axis, side in enumerate(SIDES, start=1):
        if side in sides:
            product = torch.tensordot(product, sides[side], ([axis], [1])).movedim(-1, axis)
    return product.reshape(own.shape)


@dataclass(frozen=True)
class Alfa(Rule):
    """A rate alpha and a decay beta for each task, weight tensor and inner step: w <- (1 - beta) w - alpha D.

    A network of two layers computes them from the means of w and of D over each of the N weight tensors, and a learned
    factor for each tensor and step multiplies its outputs, as in the authors' code:

        alpha[n] = a[k, n] u[n],  beta[n] = b[k, n] v[n],  (u, v) = W2 relu(W1 (mean w, mean D) + c1) + c2

    a and b start at `rate`, W2 at 0 and c2 at u = 1, v = 0. So alpha = rate and beta = 0 at the start. W1 starts with a
    row for each mean and one for its negative; the authors draw it at random.
    """

    rate: float
    name = "alfa"

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        like, count = next(iter(weights.values())), len(weights)
        one = _identity(2 * count, like)
        network = {
            "W1": torch.cat([one, -one]),
            "c1": like.new_zeros(4 * count),
            "W2": like.new_zeros(2 * count, 4 * count),
            "c2": torch.cat([like.new_ones(count), like.new_zeros(count)]),
        }
        a, b = ({name: like.new_full((steps,), self.rate) for name in weights} for _ in range(2))
        return {"network": network, "a": a, "b": b}, {}

    def update(self, at: InnerStep) -> Moved:
        names, net = sorted(at.gradients), at.learned["network"]  # a state from a file may have another order
        means = torch.stack([_means(values[name]) for values in (at.weights, at.gradients) for name in names], 1)
        hidden = F.linear(means, net["W1"], net["c1"]).relu()  # [tasks, 4N]
        u, v = F.linear(hidden, net["W2"], net["c2"]).chunk(2, 1)  # [tasks, N]
        direction = {}
        for i, name in enumerate(names):
            own, weight, each = at.gradients[name], at.weights[name], (-1, *(1 for _ in at.gradients[name].shape[1:]))
            alpha, beta = u[:, i] * at.now(at.learned["a"][name]), v[:, i] * at.now(at.learned["b"][name])
            direction[name] = alpha.view(each) * own + beta.view(each) * weight
        return Moved({name: direction[name] for name in at.gradients})


def _means(values: Tensor) -> Tensor:  # [tasks, *shape] -> [tasks]
    count = values[0].numel()
    return values.reshape(len(values), count).sum(1) / max(1, count)
