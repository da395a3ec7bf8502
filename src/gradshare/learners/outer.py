"""The outer loop's step: one batch of tasks moves the initial weights, m, lambda and the learned rates."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradshare.engine.processes import Group
from gradshare.engine.vmapped import explaining
from gradshare.errors import UserError, check_number, check_whole
from gradshare.learners.learner import Learner, Outcome, check_learner, check_state, value_or_type
from gradshare.learners.optimisers import check_optimiser, step_if
from gradshare.learners.parts import gradients_in_parts
from gradshare.method.episodes import Episodes
from gradshare.method.rules import Tree
from gradshare.method.state import MetaState, flatten, unflatten


def meta_step(
    learner: Learner,
    state: MetaState,
    optimiser: Optimizer,
    episodes: Episodes,
    clamp: float | None = 0.0,
    micro_batch: int | None = None,
    checkpoint: bool = False,
) -> Outcome:
    """One step of the outer loop: equation 5, with Adam or another optimiser instead of plain gradient descent.

    Changes the state in place: params, learned values and memory. If the outer loss or a gradient is not finite,
    nothing changes, and `outcome.fault` says why: 1 is the loss, 2 and above are the tensors of `state.trainable()` in
    order. All tensors of the outcome are detached.

    Args:
        optimiser: `gs.optimiser(state, rate)`, or one of `torch.optim` that has `state.trainable().values()` and needs
            no closure.
        clamp: limit of each element of the gradient with respect to the network's own weights, as in the MAML++ code;
            gradients of learned rates, m and lambda are not limited. 0 and None switch it off.
        micro_batch: so many tasks at a time have their activations in memory. The same step, also with sharing, in less
            memory and more time: see docs/memory.md.
        checkpoint: keep the activations of one inner step at a time. `micro_batch` does this too.

    Example:
        >>> import gradshare as gs
        >>> learner = gs.maml(gs.Conv4(filters=8, image=(1, 28, 28)), steps=2, sharing=gs.GradientSharing())
        >>> state = learner.init(seed=0)
        >>> sgd = torch.optim.SGD(state.trainable().values(), lr=0.1, momentum=0.9)
        >>> x, y = torch.rand(4, 5, 1, 28, 28), torch.arange(5).expand(4, -1)
        >>> bool(gs.meta_step(learner, state, sgd, gs.Episodes(x, y, x, y), micro_batch=2).taken)
        True
    """
    check_learner(learner)
    check_state(state)
    if not isinstance(episodes, Episodes):
        raise UserError(f"a batch of tasks is gs.Episodes, not {value_or_type(episodes)}")
    bound = optimiser, state.params, state.learned
    if not all(map(is_, vars(learner).get("_bound", (None,) * 3), bound)):
        check_optimiser(optimiser, state)
        vars(learner)["_bound"] = bound  # what has been checked is not checked again
    if clamp:
        check_number("clamp", clamp, 0)
    if micro_batch is not None:
        check_whole("micro_batch", micro_batch, 1)
    if not torch.is_grad_enabled():
        raise UserError("a meta-step needs gradients: call it outside of torch.no_grad() and torch.inference_mode()")
    leaves = state.trainable()
    gradients: Sequence[Tensor | None]
    with explaining("model"):
        if micro_batch is not None or checkpoint:
            outcome, gradients = gradients_in_parts(learner, state, episodes, micro_batch or episodes.tasks)
        else:
            outcome = learner.outer_loss(state, episodes)
            gradients = torch.autograd.grad(outcome.loss, list(leaves.values()), allow_unused=True)
    if learner.group.size > 1:
        outcome, gradients = _of_all(learner.group, outcome, gradients, episodes.tasks)
    outcome = outcome._replace(fault=_fault(outcome.loss, gradients))
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        network = name.startswith(("params/", "learned/per_step/"))
        leaf.grad = gradient.clamp(-clamp, clamp) if clamp and network and gradient is not None else gradient
    step_if(optimiser, outcome.taken)
    state.memory = _next_memory(state.memory, outcome)
    learner.accept(state)
    return outcome._replace(loss=outcome.loss.detach(), memory=state.memory)


def _fault(loss: Tensor, gradients: Sequence[Tensor | None]) -> Tensor:  # []
    """0 if everything is finite, else 1 + the position of the first that is not. No value leaves the device.

    A gradient is tested by its norm, so one whose square overflows (Adam needs the square) counts as not finite.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    norms = iter(torch._foreach_norm(present))
    lengths = [loss.detach()] + [loss.new_zeros(()) if gradient is None else next(norms) for gradient in gradients]
    each = torch.stack(lengths)
    broken = (each - each).isnan()  # not finite, in fewer kernels
    return (broken.int().argmax() + 1) * broken.any()


def _next_memory(memory: Tree, outcome: Outcome) -> Tree:
    """The new memory, unless something is not finite. On a GPU the CPU does not wait to know."""
    if outcome.loss.is_cpu:
        return outcome.memory if outcome.taken else memory
    kept, new = flatten(memory, "memory"), flatten(outcome.memory, "memory")
    chosen = {name: torch.where(outcome.taken, value, kept[name]) for name, value in new.items()}
    return unflatten(chosen).get("memory", {})


def _of_all(
    group: Group, outcome: Outcome, gradients: Sequence[Tensor | None], tasks: int
) -> tuple[Outcome, Sequence[Tensor | None]]:
    """The outcome and the gradients of the whole batch, from those of each process's tasks: one reduction."""
    own = [outcome.losses] if outcome.accuracy is None else [outcome.losses, outcome.accuracy]
    used = [gradient for gradient in gradients if gradient is not None]  # the same ones in every process
    loss, *sums = group.sum([outcome.loss.detach(), *(group.placed(values, tasks) for values in own), *used])
    losses, accuracy = sums[0], sums[1] if len(own) == 2 else None
    left = iter(sums[len(own) :])
    outcome = outcome._replace(loss=loss, losses=losses, accuracy=accuracy)
    return outcome, [None if gradient is None else next(left) for gradient in gradients]
