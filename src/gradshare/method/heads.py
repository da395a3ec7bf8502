"""The head of a prototypical network as the start of a task's own head, and rules that leave the head alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradshare.errors import UserError
from gradshare.method.rules import InnerStep, Moved, Rule, Tree, Weights


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


@dataclass(frozen=True)
class BodyOnly(Rule):
    """A rule for all weights but the head's, whose gradients pass as they are."""

    plain: Rule
    head: tuple[str, ...]

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.plain.name

    @property
    def second_order(self) -> bool:  # type: ignore[override]
        return getattr(self.plain, "second_order", True)

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        return self.plain.init(self._body(weights), steps)

    def update(self, at: InnerStep) -> Moved:
        moved = self.plain.update(at._replace(gradients=self._body(at.gradients), weights=self._body(at.weights)))
        return moved._replace(direction={**at.gradients, **moved.direction})

    def _body(self, weights: Weights) -> Weights:
        return {name: weight for name, weight in weights.items() if name not in self.head}
