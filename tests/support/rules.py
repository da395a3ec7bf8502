"""Rules that a user might write: one with a carry, for tests in one process and in several."""

from __future__ import annotations

from dataclasses import dataclass, field

import gradshare as gs
from gradshare.method.rules import Rule


@dataclass(frozen=True)
class Momentum(Rule):
    """v = beta v + G, and the step is v: torch.optim.SGD(momentum=beta), for every task."""

    beta: float = 0.9
    name: str = field(default="own_momentum", init=False)
    any_layout = True

    def update(self, at: gs.InnerStep) -> gs.Moved:
        before = at.carry or dict.fromkeys(at.gradients, 0.0)
        velocity = {name: self.beta * before[name] + own for name, own in at.gradients.items()}
        return gs.Moved(velocity, carry=velocity)


def with_momentum(beta: float = 0.9) -> Rule:
    """Sharing, then momentum."""
    return gs.chain(gs.GradientSharing(), Momentum(beta))
