"""Sharing conditioned on the task: one step past the paper, whose future work asks for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from gradshare.method.rules import InnerRule, SumTasks, Tree, Update, Weights
from gradshare.method.sharing import NormScope, finite_part, mix, normalised, running_mean, sharing_rule, start_sharing

TYPICAL = 0.1  # cosine of a task's gradient with the running mean, and its deviation over tasks (docs/log.md)


def share_by_agreement(norm: NormScope = "global") -> InnerRule:
    r"""Gradient sharing with a gate for every task: how well its gradient agrees with the running mean counts too.

    In place of equation 4, with ghat_prev the running mean of earlier meta-iterations,

        a[t] = cos(G[t], ghat_prev) / 0.1
        D[t] = sig(lam_k + c_k a[t]) ghat + (1 - sig(lam_k + c_k a[t])) G[t]

    c ("agreement", shape [steps]) is meta-learned like m and lam, and starts at zero, which is plain sharing. The
    cosine is over all adapted weights, or over each tensor for itself, as the norm is; it is 0 where either vector is,
    so also before anything is stored. 0.1 is its usual size: a step of Adam on c moves a gate as far as one on lam.

    The agreement is with ghat_prev in training as at test: with one task a batch the fresh mean is that task's own
    gradient, which agrees with itself. m stays one for all tasks, as the memory is: a test does not use m, and what a
    task does to the memory is not in the outer loss that could learn it.
    """

    def gated(gradients: Weights, shared: Weights, learned: Tree, memory: Tree, step: int) -> Weights:
        lam, c = learned["lam"][step], learned["agreement"][step]
        agreed = agreement(gradients, _stored(gradients, memory, step), norm)
        gates = {name: torch.sigmoid(lam + c * (cosine / TYPICAL)) for name, cosine in agreed.items()}
        return {name: mix({name: own}, shared, _like(own, gates[name]))[name] for name, own in gradients.items()}

    def meeting(sum_tasks: SumTasks) -> Update:
        def together(gradients: Weights, learned: Tree, memory: Tree, step: int) -> tuple[Weights, Weights]:
            running = running_mean(sum_tasks(finite_part(gradients)), learned, memory, step, norm)
            return gated(gradients, running, learned, memory, step), running

        return together

    def alone(gradients: Weights, learned: Tree, memory: Tree, step: int) -> tuple[Weights, None]:
        mixed = gated(gradients, _stored(gradients, memory, step), learned, memory, step)
        return {name: torch.where(memory["seen"], mixed[name], own) for name, own in gradients.items()}, None

    def fused(gradients: Weights, learned: Tree, memory: Tree, step: int) -> tuple[Weights, Weights]:
        from gradshare.engine.conv4.triton.fused import cosines, share

        ((name, own),) = gradients.items()
        lam, c, stored = learned["lam"], learned["agreement"], memory["ghat"][name][step]
        all_shared = torch.full_like(lam, torch.inf)
        shared, running = share(own, learned["m"], all_shared, stored, memory["seen"], step)
        gates = torch.sigmoid(lam[step] + c[step] * (cosines(own, stored) / TYPICAL))
        return mix({name: own}, {name: shared}, _like(own, gates)), {name: running}

    def start(weights: Weights, steps: int) -> tuple[Tree, Tree]:
        learned, memory = start_sharing(weights, steps)
        return {**learned, "agreement": torch.zeros_like(learned["lam"])}, memory

    return sharing_rule(start, meeting, fused, norm, alone)


def agreement(gradients: Weights, direction: Weights, norm: NormScope) -> Weights:  # {name: [tasks]}
    """The cosine between every task's gradient and a direction; 0, with zero derivative, where either is zero."""
    unit = normalised(direction, norm)

    def of_one(own: Weights) -> Weights:
        parts = {name: (part * unit[name]).sum() for name, part in normalised(own, norm).items()}
        return parts if norm == "tensor" else dict.fromkeys(parts, torch.stack(list(parts.values())).sum())

    return vmap(of_one)(gradients)


def _stored(gradients: Weights, memory: Tree, step: int) -> Weights:
    return {name: memory["ghat"][name][step] for name in gradients}


def _like(gradient: Tensor, values: Tensor) -> Tensor:  # [tasks, *shape], [tasks] -> [tasks, 1, ...]
    return values.view(-1, *(1 for _ in gradient.shape[1:]))
