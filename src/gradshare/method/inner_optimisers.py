"""What `inner=` of every algorithm takes: momentum and Adam in the inner loop, and another rate for the head.

They act on the direction D of the links before them (the gradient, or the shared direction), element by element, and
the learning rate follows them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradshare.errors import check_number
from gradshare.method.rules import InnerStep, Moved, Rule, Tree, Weights

BELOW_ONE = 1 - 1e-9


@dataclass(frozen=True)
class Momentum(Rule):
    """Heavy-ball momentum as in torch's SGD: v <- beta v + D, and v is the direction.

    Args:
        beta: how much of the last step's v is kept; 0 is plain gradient descent.

    Example:
        >>> import gradshare as gs
        >>> gs.maml(gs.Conv4(), inner=gs.momentum(0.9)).rule
        Chain(links=(Momentum(beta=0.9), Scale(rate=0.1)))
    """

    beta: float = 0.9
    name = "momentum"
    any_layout = True

    def __post_init__(self) -> None:
        check_number("beta", self.beta, 0, BELOW_ONE)

    def update(self, at: InnerStep) -> Moved:
        if not at.carry:
            return Moved(at.gradients, carry=dict(at.gradients))
        v = {name: torch.add(own, at.carry[name], alpha=self.beta) for name, own in at.gradients.items()}
        return Moved(v, carry=v)


@dataclass(frozen=True)
class Adam(Rule):
    """Adam (Kingma and Ba, 2015) as in torch, from zero moments at the first inner step of each task:

        m <- b1 m + (1 - b1) D,  v <- b2 v + (1 - b2) D^2
        direction = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)    at inner step t = 1, 2, ...

    An element with v = 0 moves by 0, with derivative 0: the square root has none there. The first step moves each other
    element by about the inner rate, whatever its gradient, so `inner_lr` is smaller than without Adam: 0.01, say.

    Example:
        >>> import gradshare as gs
        >>> gs.maml(gs.Conv4(), inner_lr=0.01, inner=gs.adam()).rule.links[0]
        Adam(b1=0.9, b2=0.999, eps=1e-08)
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    name = "adam"
    any_layout = True

    def __post_init__(self) -> None:
        check_number("b1", self.b1, 0, BELOW_ONE)
        check_number("b2", self.b2, 0, BELOW_ONE)
        check_number("eps", self.eps, 0)

    def update(self, at: InnerStep) -> Moved:
        zero = {} if at.carry else {name: torch.zeros_like(own) for name, own in at.gradients.items()}
        before = at.carry or {"m": zero, "v": zero}
        m = {name: torch.lerp(before["m"][name], own, 1 - self.b1) for name, own in at.gradients.items()}
        v = {name: torch.lerp(before["v"][name], own.square(), 1 - self.b2) for name, own in at.gradients.items()}
        first, root = 1 - self.b1 ** (at.k + 1), (1 - self.b2 ** (at.k + 1)) ** 0.5
        direction = {}
        for name in at.gradients:
            still = v[name] == 0
            length = torch.where(still, 1.0, v[name]).sqrt() * (first / root) + first * self.eps
            direction[name] = torch.where(still, 0.0, m[name] / length)
        return Moved(direction, carry={"m": m, "v": v})


@dataclass(frozen=True)
class HeadRate(Rule):
    """The head moves at a factor times the inner rate: docs/when-to-share.md has what it was good for.

    The factor of each element is a constant in the memory, so that all weights may come as one vector.

    Args:
        factor: of the head's rate; the body's stays as it is.
        head: names of the head's weights; an algorithm puts in those of its model.

    Example:
        >>> import gradshare as gs
        >>> gs.maml(gs.Conv4(), sharing="gate-only", inner=gs.head_rate(4)).rule.links[1]
        HeadRate(factor=4, head=('head.weight', 'head.bias'))
    """

    factor: float
    head: tuple[str, ...] = ()
    name = "head_rate"
    any_layout = True

    def __post_init__(self) -> None:
        check_number("factor", self.factor, 0)

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        return {}, {name: torch.full_like(w, self.factor if name in self.head else 1.0) for name, w in weights.items()}

    def update(self, at: InnerStep) -> Moved:
        return Moved({name: own * at.memory[name] for name, own in at.gradients.items()})


momentum, adam, head_rate = Momentum, Adam, HeadRate
