"""The controls that a claim about sharing has to beat: other first links of the same chain.

Sharing starts with sig(lam) = 1/2, so it also halves the weight of a task's own gradient, and lam is a learned step.
Each control keeps one part of the method and leaves the rest out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradshare.method.rules import InnerStep, Moved, Rule, Tree, Weights
from gradshare.method.sharing import SharingRule, recall_shared, remember_shared, stored_mean, tensor_gates


@dataclass(frozen=True)
class GateOnly(Rule):
    """D[t] = (1 - sig(lam_k)) G[t]: a learned step for each inner step, nothing shared."""

    name = "sharing"
    any_layout = True

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        return {"lam": next(iter(weights.values())).new_zeros(steps)}, {}

    def update(self, at: InnerStep) -> Moved:
        own = 1 - torch.sigmoid(at.now(at.learned["lam"]))
        return Moved({name: own * gradient for name, gradient in at.gradients.items()})


@dataclass(frozen=True)
class TensorGates(Rule):
    """D[t] = (1 - sig(gates_{k,n})) G[t] for weight tensor n: a learned step for each tensor and inner step."""

    name = "sharing"
    any_layout = True

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        return {"gates": {name: weight.new_zeros(steps) for name, weight in weights.items()}}, {}

    def update(self, at: InnerStep) -> Moved:
        gates = tensor_gates(at)
        return Moved({name: (1 - gates[name]) * own for name, own in at.gradients.items()})


@dataclass(frozen=True)
class BatchOnly(SharingRule):
    """Sharing with sig(m) = 1: the concurrent tasks alone. At test, ghat is the last training batch's."""

    learns = ("lam",)

    def running(self, at: InnerStep) -> Weights:
        return self.fresh(at)


@dataclass(frozen=True)
class MemoryOnly(SharingRule):
    """Sharing with ghat_prev alone: earlier tasks, not the concurrent ones.

    The memory still takes in each batch afterwards, with sig(m) = 1/2: m gets no gradient, so it is not learned.
    """

    learns = ("lam",)

    def update(self, at: InnerStep) -> Moved:
        direction = recall_shared(at, self.mixed(at, stored_mean(at)))
        if at.total is None:
            return Moved(direction)
        fresh, before = self.fresh(at), stored_mean(at)
        half = {name: torch.where(at.memory["seen"], (g + before[name]) / 2, g) for name, g in fresh.items()}
        return Moved(direction, remember=remember_shared(at, half))
