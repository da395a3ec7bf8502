"""The head of a prototypical network as the start of a task's own head."""

from __future__ import annotations

import torch
from torch import Tensor

from gradshare.errors import UserError


def prototype_head(
    features: Tensor,  # [tasks, n, F]
    labels: Tensor,  # [tasks, n]
    mask: Tensor | None,  # [tasks, n]: True for a real example
    ways: int,
) -> tuple[Tensor, Tensor]:  # [tasks, ways, F], [tasks, ways]
    """Weight and bias of a linear layer that classifies by the distance to the mean features of each class.

    With p_c the mean of class c, W_c = 2 p_c and b_c = -|p_c|^2, so that W_c h + b_c = |h|^2 - |h - p_c|^2 (Snell et
    al., 2017, section 2.4). A class without an example has b_c = -inf: nothing is classified as it.
    """
    if labels.is_floating_point() or labels.dim() != 2:
        raise UserError("proto_maml needs classes as targets: whole numbers of shape [tasks, examples]")
    if features.dim() != 3:
        raise UserError(f"proto_maml needs a head that takes one vector per example, not {list(features.shape[2:])}")
    belongs = labels.unsqueeze(-1) == torch.arange(ways, device=labels.device)  # [tasks, n, ways]
    if mask is not None:
        belongs = belongs & mask.unsqueeze(-1)
    count = belongs.sum(1)  # [tasks, ways]
    sums = torch.bmm(belongs.to(features.dtype).mT, features)
    means = sums / count.clamp(min=1).unsqueeze(-1)
    bias = torch.where(count > 0, -means.square().sum(-1), -torch.inf)
    return 2 * means, bias
