"""The outer loop's step: one batch of tasks moves the initial weights, m, lambda and the learned rates."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradshare.episodes import Episodes
from gradshare.learner import Learner, MetaState, Outcome


def optimiser(state: MetaState, rate: float) -> torch.optim.Adam:
    """Adam with default hyperparameters on everything that the outer loop learns."""
    leaves = list(state.trainable().values())
    if leaves[0].is_cuda:  # the rate in a tensor and the steps counted on the GPU, so that a step can be recorded
        return torch.optim.Adam(leaves, lr=torch.tensor(rate, device=leaves[0].device), capturable=True)
    return torch.optim.Adam(leaves, lr=rate)


def set_rate(adam: torch.optim.Adam, rate: float) -> None:
    """Change the outer rate, in place where it is a tensor."""
    group = adam.param_groups[0]
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def meta_step(
    learner: Learner, state: MetaState, adam: torch.optim.Adam, episodes: Episodes, clamp: float = 0.0
) -> Outcome:
    """Equation 5, with Adam for the plain gradient step; then the memory takes in the batch.

    Moves the state in place.
    """
    outcome = learner.outer_loss(state, episodes)
    leaves = adam.param_groups[0]["params"]
    gradients = torch.autograd.grad(outcome.loss, leaves, allow_unused=True)
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient.clamp(-clamp, clamp) if clamp and gradient is not None else gradient
    adam.step()
    state.memory = outcome.memory
    return outcome


def cosine(rate: float, final_share: float, epoch: int, epochs: int) -> float:
    """The outer rate in an epoch, falling along half a cosine to `final_share` of its start."""
    return rate * (final_share + (1 - final_share) * (1 + math.cos(math.pi * epoch / epochs)) / 2)


def adam_tensors(state: MetaState, adam: torch.optim.Adam) -> dict[str, Tensor]:
    """Adam's moments by the names of the leaves, for a checkpoint."""
    return {
        f"adam/{moment}/{name}": value
        for name, leaf in state.trainable().items()
        for moment, value in adam.state.get(leaf, {}).items()
    }


def restore_adam(state: MetaState, adam: torch.optim.Adam, tensors: dict[str, Tensor]) -> None:
    """Put back what `adam_tensors` gave."""
    for name, leaf in state.trainable().items():
        moments = {
            m: tensors[f"adam/{m}/{name}"] for m in ("step", "exp_avg", "exp_avg_sq") if f"adam/{m}/{name}" in tensors
        }
        if moments:
            on_gpu = leaf.device if leaf.is_cuda else torch.device("cpu")
            adam.state[leaf] = {moment: value.to(on_gpu) for moment, value in moments.items()}
