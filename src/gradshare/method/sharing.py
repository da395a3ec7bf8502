"""Gradient sharing: equations 1-4 of Chang & Lipson, as the first link of any inner loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from gradshare.errors import UserError
from gradshare.method.rules import InnerRule, SumTasks, Tree, Update, Weights, sum_of_tasks

NormScope = Literal["global", "tensor"]


@dataclass(frozen=True)
class GradientSharing:
    """The paper's method, as an argument to any algorithm.

    Args:
        norm: what the normalised mean gradient has length one over: `"global"`, all adapted weights together (the
            literal reading of equation 1), or `"tensor"`, each weight tensor for itself.
        conditioned: one step past the paper: how much a task takes of the running mean also depends on how well its own
            gradient agrees with it (`conditioned.py`).

    Example:
        >>> import gradshare as gs
        >>> learner = gs.maml(gs.Conv4(filters=8, image=(1, 28, 28)), sharing=gs.GradientSharing(norm="tensor"))
        >>> learner.init(seed=0).learned["sharing"]["m"].shape
        torch.Size([5])
    """

    norm: NormScope = "global"
    conditioned: bool = False

    def __post_init__(self) -> None:
        check_norm(self.norm)
        if not isinstance(self.conditioned, bool):
            raise UserError(f"conditioned is True or False, not {self.conditioned!r}")

    def rule(self) -> InnerRule:
        from gradshare.method.conditioned import share_by_agreement

        return share_by_agreement(self.norm) if self.conditioned else share_gradients(self.norm)


def check_norm(norm: NormScope) -> None:
    if norm not in get_args(NormScope):
        raise UserError(f"norm is 'global' or 'tensor', not {norm!r}")


def share_gradients(norm: NormScope = "global") -> InnerRule:
    r"""Mix the running mean of the normalised task gradients into every task's step.

    With G[t] task t's gradient at inner step k and sig the sigmoid,

        g    = sum_t G[t] / || sum_t G[t] ||                  (1)
        ghat = g                at the first meta-iteration    (2)
        ghat = sig(m_k) g + (1 - sig(m_k)) ghat_prev           (3)
        D[t] = sig(lam_k) ghat + (1 - sig(lam_k)) G[t]         (4)

    m and lam (shape [steps], zeros at the start) are meta-learned; ghat_prev is a constant. At test, tasks see the
    ghat stored in training and not each other; before any training there is none, and D[t] = G[t].
    """

    def meeting(sum_tasks: SumTasks) -> Update:
        def together(gradients: Weights, learned: Tree, memory: Tree, step: int) -> tuple[Weights, Weights]:
            running = running_mean(sum_tasks(finite_part(gradients)), learned, memory, step, norm)
            return mix(gradients, running, torch.sigmoid(learned["lam"][step])), running

        return together

    def fused(gradients: Weights, learned: Tree, memory: Tree, step: int) -> tuple[Weights, Weights]:
        from gradshare.engine.conv4.triton.fused import share

        ((name, all_tasks),) = gradients.items()
        stored = memory["ghat"][name][step]
        direction, running = share(all_tasks, learned["m"], learned["lam"], stored, memory["seen"], step)
        return {name: direction}, {name: running}

    return sharing_rule(start_sharing, meeting, fused, norm)


def start_sharing(weights: Weights, steps: int) -> tuple[Tree, Tree]:
    """m and lam at zero, and an empty memory."""
    like = next(iter(weights.values()))
    learned = {"m": like.new_zeros(steps), "lam": like.new_zeros(steps)}
    ghat = {name: weight.new_zeros((steps, *weight.shape)) for name, weight in weights.items()}
    return learned, {"ghat": ghat, "seen": torch.zeros((), dtype=torch.bool, device=like.device)}


def running_mean(total: Weights, learned: Tree, memory: Tree, step: int, norm: NormScope) -> Weights:
    """Equations 1 to 3, from the sum over tasks."""
    keep_new = torch.sigmoid(learned["m"][step])
    return {
        name: torch.where(memory["seen"], keep_new * g + (1 - keep_new) * memory["ghat"][name][step], g)
        for name, g in normalised(total, norm).items()
    }


def recall_shared(gradients: Weights, learned: Tree, memory: Tree, step: int) -> tuple[Weights, None]:
    """Algorithm 2: equation 4 with the stored running mean; without one, the task's own gradient."""
    stored = {name: memory["ghat"][name][step] for name in gradients}
    mixed = mix(gradients, stored, torch.sigmoid(learned["lam"][step]))
    return {name: torch.where(memory["seen"], mixed[name], own) for name, own in gradients.items()}, None


def remember_shared(memory: Tree, notes: list[Weights]) -> Tree:
    """The running means of all inner steps, as constants for the next meta-iteration."""
    ghat = {name: torch.stack([note[name].detach() for note in notes]) for name in memory["ghat"]}
    return {"ghat": ghat, "seen": torch.ones_like(memory["seen"])}


def sharing_rule(
    start: Callable[[Weights, int], tuple[Tree, Tree]],
    meeting: Callable[[SumTasks], Update],
    fused: Update,
    norm: NormScope,
    alone: Update = recall_shared,
) -> InnerRule:
    """A way of sharing: how the tasks of a batch meet, given how to sum over them; the rest is as in the paper."""
    return InnerRule(
        "sharing",
        start,
        together=meeting(sum_of_tasks),
        alone=alone,
        remember=remember_shared,
        by_element=norm == "global",
        fused=fused,
        spread=meeting,
    )


def mix(gradients: Weights, shared: Weights, gate: Tensor) -> Weights:
    """Equation 4."""
    return {name: gate * shared[name] + (1 - gate) * gradient for name, gradient in gradients.items()}


def finite_part(gradients: Weights) -> Weights:
    """What counts in the sum over tasks: an element that is not finite does not, and has derivative zero.

    So a task that diverges does so alone: its own direction is not finite, that of all tasks and the memory are.
    """
    if all(
        own.is_cpu for own in gradients.values()
    ):  # where asking costs nothing: mostly there is nothing to leave out
        sums = torch.stack([own.detach().sum() for own in gradients.values()])
        if sums.sum().isfinite():
            return gradients
    return {name: torch.where(own.detach().abs() < torch.inf, own, 0.0) for name, own in gradients.items()}


def normalised(total: Weights, norm: NormScope) -> Weights:
    """Equation 1: the sum over tasks, scaled to length one; a zero sum stays zero, with zero derivative."""
    total = {name: value.nan_to_num() for name, value in total.items()}  # a sum too large: the largest number
    if norm == "tensor":
        return {name: _unit({name: value})[name] for name, value in total.items()}
    return _unit(total)


def _unit(vector: Weights) -> Weights:
    if not any(part.numel() for part in vector.values()):
        return vector
    # Dividing by the largest element first keeps the squares from over- and underflowing. The result does not depend
    # on it, so it is a constant for the derivative.
    largest = torch.stack([part.detach().abs().amax() for part in vector.values() if part.numel()]).amax()
    zero = largest == 0
    shrunk = {name: part / torch.where(zero, torch.ones_like(largest), largest) for name, part in vector.items()}
    square = torch.stack([part.square().sum() for part in shrunk.values()]).sum()
    length = torch.where(zero, torch.ones_like(square), square).sqrt()
    return {name: torch.where(zero, torch.zeros_like(part), part) / length for name, part in shrunk.items()}
