"""The controls that a claim about sharing has to beat: other first links of the same chain.

Sharing starts with sig(lam) = 1/2, so it also halves the weight of a task's own gradient, and lam is a learned step.
Each control keeps one part of the method and leaves the rest out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradshare.method.rules import InnerRule, SumTasks, Tree, Update, Weights, without_memory
from gradshare.method.sharing import (
    NormScope,
    check_norm,
    finite_part,
    mix,
    normalised,
    recall_shared,
    sharing_rule,
    start_sharing,
)


@dataclass(frozen=True)
class GateOnly:
    """D[t] = (1 - sig(lam_k)) G[t]: a learned step for each inner step, nothing shared."""

    def rule(self) -> InnerRule:
        def init(weights: Weights, steps: int) -> Tree:
            return {"lam": next(iter(weights.values())).new_zeros(steps)}

        def apply(gradients: Weights, learned: Tree, step: int) -> Weights:
            own = 1 - torch.sigmoid(learned["lam"][step])
            return {name: own * gradient for name, gradient in gradients.items()}

        return without_memory("sharing", init, apply, by_element=True)


def _without_m(meeting: Callable[[SumTasks], Update], fused: Update, norm: NormScope) -> InnerRule:
    """Sharing with another way in which the tasks meet, and no m to learn."""

    def start(weights: Weights, steps: int) -> tuple[Tree, Tree]:
        learned, memory = start_sharing(weights, steps)
        return {"lam": learned["lam"]}, memory

    return sharing_rule(start, meeting, fused, norm)


@dataclass(frozen=True)
class BatchOnly:
    """Sharing with sig(m) = 1: the concurrent tasks alone. At test, ghat is the last training batch's."""

    norm: NormScope = "global"

    def __post_init__(self) -> None:
        check_norm(self.norm)

    def rule(self) -> InnerRule:
        def meeting(sum_tasks: SumTasks) -> Update:
            def together(gradients: Weights, learned: Tree, memory: Tree, step: int) -> tuple[Weights, Weights]:
                fresh = normalised(sum_tasks(finite_part(gradients)), self.norm)
                return mix(gradients, fresh, torch.sigmoid(learned["lam"][step])), fresh

            return together

        def fused(gradients: Weights, learned: Tree, memory: Tree, step: int) -> tuple[Weights, Weights]:
            from gradshare.engine.conv4.triton.fused import share

            ((name, own),) = gradients.items()
            lam, nothing_seen = learned["lam"], torch.zeros_like(memory["seen"])
            direction, fresh = share(own, lam.detach(), lam, memory["ghat"][name][step], nothing_seen, step)
            return {name: direction}, {name: fresh}

        return _without_m(meeting, fused, self.norm)


@dataclass(frozen=True)
class MemoryOnly:
    """Sharing with ghat_prev alone: earlier tasks, not the concurrent ones.

    The memory still takes in each batch afterwards, with sig(m) = 1/2: m gets no gradient, so it is not learned.
    """

    norm: NormScope = "global"

    def __post_init__(self) -> None:
        check_norm(self.norm)

    def rule(self) -> InnerRule:
        def meeting(sum_tasks: SumTasks) -> Update:
            def together(gradients: Weights, learned: Tree, memory: Tree, step: int) -> tuple[Weights, Weights]:
                fresh = normalised(sum_tasks(finite_part(gradients)), self.norm)
                stored = {name: memory["ghat"][name][step] for name in fresh}
                running = {name: torch.where(memory["seen"], (g + stored[name]) / 2, g) for name, g in fresh.items()}
                return recall_shared(gradients, learned, memory, step)[0], running

            return together

        def fused(gradients: Weights, learned: Tree, memory: Tree, step: int) -> tuple[Weights, Weights]:
            from gradshare.engine.conv4.triton.fused import share

            ((name, own),) = gradients.items()
            half = torch.zeros_like(learned["lam"])
            _, running = share(own.detach(), half, half, memory["ghat"][name][step], memory["seen"], step)
            return recall_shared(gradients, learned, memory, step)[0], {name: running}

        return _without_m(meeting, fused, self.norm)
