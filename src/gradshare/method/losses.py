"""The loss and the accuracy of every task of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from gradshare.errors import UserError

Loss = Literal["cross_entropy", "mse"] | Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"cross_entropy": F.cross_entropy, "mse": F.mse_loss}


def task_losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:  # [tasks, n, ...] twice -> [tasks]
    """The loss of every task."""
    losses = vmap(loss)(outputs, targets) if callable(loss) else _built_in(loss, outputs, targets)
    if losses.shape != (len(outputs),):
        raise UserError(f"the loss of one task must be a single number, not of shape {list(losses.shape[1:])}")
    return losses


def accuracy(logits: Tensor, targets: Tensor) -> Tensor | None:  # [tasks, n, ways], [tasks, n] -> [tasks]
    """Share of the examples that are classified correctly; None where the targets are not classes."""
    if targets.is_floating_point() or logits.dim() != 3 or targets.dim() != 2 or logits.shape[-1] < 2:
        return None
    return (logits.detach().argmax(-1) == targets).to(logits.dtype).mean(-1)


def _built_in(loss: str, outputs: Tensor, targets: Tensor) -> Tensor:
    if loss == "cross_entropy" and not targets.is_floating_point():
        targets = targets.long()
    try:
        return vmap(LOSSES[loss])(outputs, _reshaped(loss, outputs, targets))
    except (RuntimeError, IndexError) as error:
        _check_labels(outputs, targets)
        raise error


def _reshaped(loss: str, outputs: Tensor, targets: Tensor) -> Tensor:
    """Targets in the shape that the loss compares with the outputs."""
    if loss == "mse" and outputs.shape != targets.shape:  # PyTorch would broadcast one of them
        if outputs.shape != (*targets.shape, 1):
            per_task = f"{list(outputs.shape[1:])} a task, and the targets {list(targets.shape[1:])}"
            raise UserError(f"the loss mse compares outputs with targets one by one, but the outputs are {per_task}")
        return targets.unsqueeze(-1)
    if loss == "cross_entropy" and targets.is_floating_point() and targets.dim() < outputs.dim():
        kind = str(targets.dtype).removeprefix("torch.")
        raise UserError(f"the loss cross_entropy takes classes as whole numbers, not {kind}; mse is for regression")
    return targets


def _check_labels(logits: Tensor, targets: Tensor) -> None:
    """Raise an error for a label that has no output. On a GPU such an error comes later, from CUDA itself."""
    if not targets.is_cpu or targets.is_floating_point() or logits.dim() < 3:
        return
    lowest, highest = targets.min().item(), targets.max().item()
    if lowest < 0 or highest >= logits.shape[2]:
        raise UserError(f"labels go from {lowest} to {highest}, but the model has {logits.shape[2]} outputs, from 0 on")
