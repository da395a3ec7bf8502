"""The loss and the accuracy of every task of a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from gradshare.errors import UserError

Loss = Literal["cross_entropy", "mse"] | Callable[[Tensor, Tensor], Tensor]
# No label has this number, so that none is left out of the cross entropy without a word.
_cross_entropy = partial(F.cross_entropy, ignore_index=torch.iinfo(torch.int64).min)
LOSSES: dict[str, Callable[..., Tensor]] = {"cross_entropy": _cross_entropy, "mse": F.mse_loss}


def task_losses(
    loss: Loss,
    outputs: Tensor,  # [tasks, n, ...]
    targets: Tensor,  # [tasks, n, ...]
    mask: Tensor | None = None,  # [tasks, n]: True for a real example
) -> Tensor:  # [tasks]
    """The loss of every task; with a mask, that of its real examples alone."""
    if callable(loss) and mask is not None:
        raise UserError("a loss of your own sees all examples of a task: masks need the loss cross_entropy or mse")
    losses = vmap(loss)(outputs, targets) if callable(loss) else _built_in(loss, outputs, targets, mask)
    if losses.shape != (len(outputs),):
        raise UserError(f"the loss of one task must be a single number, not of shape {list(losses.shape[1:])}")
    return losses


def accuracy(
    logits: Tensor,  # [tasks, n, ways]
    targets: Tensor,  # [tasks, n]
    mask: Tensor | None = None,  # [tasks, n]: True for a real example
) -> Tensor | None:  # [tasks]
    """Share of the examples that are classified correctly; None where the targets are not classes."""
    if targets.is_floating_point() or logits.dim() != 3 or targets.dim() != 2 or logits.shape[-1] < 2:
        return None
    correct = (logits.detach().argmax(-1) == targets).to(logits.dtype)
    return correct.mean(-1) if mask is None else (correct * mask).sum(-1) / mask.sum(-1)


def _built_in(loss: str, outputs: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
    if loss == "cross_entropy" and not targets.is_floating_point():
        targets = targets.long()
    if mask is not None:  # in the padding any target will do that is one
        targets = torch.where(mask.view(*mask.shape, *(1 for _ in targets.shape[2:])), targets, 0)
    try:
        targets_as_outputs = _reshaped(loss, outputs, targets)
        if mask is None:
            return vmap(LOSSES[loss])(outputs, targets_as_outputs)
        return _of_real_examples(vmap(partial(LOSSES[loss], reduction="none"))(outputs, targets_as_outputs), mask)
    except (RuntimeError, IndexError, ValueError, AssertionError) as error:
        if outputs.shape[1] != targets.shape[1]:
            found = f"{outputs.shape[1]} outputs for the {targets.shape[1]} examples of a task"
            raise UserError(f"the model returns {found}; it must return one for each") from None
        if loss == "cross_entropy" and not targets.is_floating_point():
            _check_classes(outputs, targets)
        raise error


def _of_real_examples(losses: Tensor, mask: Tensor) -> Tensor:  # [tasks, n, ...], [tasks, n] -> [tasks]
    """The mean over real examples, and over all that each of them has."""
    each = losses.flatten(2).mean(2) if losses.dim() > 2 else losses
    return torch.where(mask, each, 0).sum(1) / mask.sum(1)


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


def _check_classes(logits: Tensor, targets: Tensor) -> None:
    """Raise an error for shapes that do not fit, and for a label that has no output.

    On a GPU the latter comes later, from CUDA itself.
    """
    if logits.dim() < 3 or targets.shape != (*logits.shape[:2], *logits.shape[3:]):
        raise UserError(
            "the loss cross_entropy takes outputs [examples, classes, ...] for targets [examples, ...], but the outputs"
            f" are {list(logits.shape[1:])} a task, and the targets {list(targets.shape[1:])}"
        )
    if not targets.is_cpu:
        return
    lowest, highest = targets.min().item(), targets.max().item()
    if lowest < 0 or highest >= logits.shape[2]:
        raise UserError(f"labels go from {lowest} to {highest}, but the model has {logits.shape[2]} outputs, from 0 on")
