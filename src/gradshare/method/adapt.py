"""The inner loop. Everything else in this package prepares its arguments or uses its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradshare.errors import UserError
from gradshare.method.rules import Tree, Update, Weights

Losses = Callable[[Weights, int], Tensor]  # (fast weights, inner step) -> the support loss of every task, [tasks]


def adapt(
    start: Weights,  # {name: [*shape]}: the adapted weights, the same for all tasks
    support_losses: Losses,
    update: Update,  # a rule's `together` in meta-training, its `alone` in validation and test
    learned: Tree,
    memory: Tree,
    tasks: int,
    steps: int,
    second_order: bool = True,
) -> tuple[list[Weights], list[Any]]:
    """Adapt to all tasks at once.

    Returns the fast weights `{name: [tasks, *shape]}` after each step, and the rule's notes for its memory.
    """
    differentiable = torch.is_grad_enabled()
    fast: Weights = {name: weight.expand(tasks, *weight.shape) for name, weight in start.items()}
    ones: Tensor | None = None  # [tasks]
    trajectory: list[Weights] = []
    notes: list[Any] = []
    for step in range(steps):
        with torch.enable_grad():
            fast = {
                name: w if differentiable and w.requires_grad else w.detach().requires_grad_()
                for name, w in fast.items()
            }
            losses = support_losses(fast, step)
            if not losses.requires_grad:
                raise UserError("the support loss does not depend on the adapted weights: is something detached?")
            ones = torch.ones_like(losses) if ones is None else ones
            # Tasks do not touch each other here, so the gradient of the sum is every task's own gradient.
            gradients = torch.autograd.grad(
                losses,
                list(fast.values()),
                ones,
                create_graph=differentiable and second_order,
                materialize_grads=True,  # a weight that the loss does not use gets a zero gradient
            )
        direction, note = update(dict(zip(fast, gradients, strict=True)), learned, memory, step)
        fast = {name: weight - direction[name] for name, weight in fast.items()}
        trajectory.append(fast)
        notes.append(note)
    return trajectory, notes
