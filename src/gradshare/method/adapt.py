"""The inner loop. Everything else in this package prepares its arguments or uses its results."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradshare.errors import UserError
from gradshare.method.rules import NOTHING, InnerStep, Rule, Total, Tree, Weights, stack_memory

# (fast weights, inner step, whether to keep a graph) -> gradient of every task's support loss, {name: [tasks, *shape]}
Gradients = Callable[[Weights, int, bool], Weights]


def adapt(
    fast: Weights,  # {name: [tasks, *shape]}: the adapted weights of each task before the first step
    support_gradients: Gradients,
    rule: Rule,
    learned: Tree,
    memory: Tree,
    steps: int,
    total: Total | None,  # see InnerStep; None in validation and test
) -> tuple[list[Weights], Tree]:
    """Adapt to all tasks at once.

    Returns the fast weights `{name: [tasks, *shape]}` after each step, in validation and test after the last one alone,
    and the memory for the next meta-iteration. Without a step, the weights are those of the start.
    """
    differentiable = torch.is_grad_enabled()
    create_graph = differentiable and rule.second_order
    carry: Tree = NOTHING
    trajectory: list[Weights] = []
    rows: list[Tree] = []
    for k in range(steps):
        with torch.enable_grad():
            fast = {
                name: w if differentiable and w.requires_grad else w.detach().requires_grad_()
                for name, w in fast.items()
            }
            gradients = support_gradients(fast, k, create_graph)
        at = InnerStep(gradients, fast, learned, memory, carry, k, total)
        direction, carry, remembered = rule.update(at)
        fast = {name: weight - direction[name] for name, weight in fast.items()}
        if total is None:
            trajectory = [fast]  # not those of every step: at test there may be hundreds
        else:
            trajectory.append(fast)
            rows.append(remembered)
    return trajectory or [fast], memory if total is None else stack_memory(memory, rows)


def gradients_of(
    losses: Tensor,  # [tasks]
    fast: Weights,
    create_graph: bool,
) -> Weights:
    """The gradient of every task's loss with respect to its own weights."""
    if not losses.requires_grad:
        raise UserError("the support loss does not depend on the adapted weights: is something detached?")
    # Tasks do not touch each other here, so the gradient of the sum is every task's own gradient.
    gradients = torch.autograd.grad(
        losses,
        list(fast.values()),
        torch.ones_like(losses),
        create_graph=create_graph,
        materialize_grads=True,  # a weight that the loss does not use gets a zero gradient
    )
    return dict(zip(fast, gradients, strict=True))
