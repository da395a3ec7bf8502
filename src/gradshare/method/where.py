"""Where a rule acts: on the body alone, or not at the first or the last inner step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gradshare.errors import UserError
from gradshare.method.rules import InnerStep, Moved, Rule, Tree, Weights
from gradshare.method.sharing import GradientSharing, NormScope


@dataclass(frozen=True)
class Wrapper(Rule):
    """A rule around another one, whose name, learned values and memory it has."""

    plain: Rule

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.plain.name

    @property
    def second_order(self) -> bool:  # type: ignore[override]
        return getattr(self.plain, "second_order", True)

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        return self.plain.init(weights, steps)


@dataclass(frozen=True)
class BodyOnly(Wrapper):
    """A rule for all weights but the head's, whose gradients pass as they are: D[head] = G[head].

    Args:
        head: names of the head's weights; an algorithm puts in those of its model.
    """

    head: tuple[str, ...] = ()

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        body = self._body(weights)
        if not body:
            raise UserError("no gradient of the body is there to share: adapt the body too, or give another rule")
        return self.plain.init(body, steps)

    def update(self, at: InnerStep) -> Moved:
        moved = self.plain.update(at._replace(gradients=self._body(at.gradients), weights=self._body(at.weights)))
        return moved._replace(direction={**at.gradients, **moved.direction})

    def _body(self, weights: Weights) -> Weights:
        return {name: weight for name, weight in weights.items() if name not in self.head}


@dataclass(frozen=True)
class LeftOut(Wrapper):
    """A rule that leaves one inner step to the task's own gradient: D[t] = G[t] there. Its memory is kept all the same.

    Args:
        step: `"first"` or `"last"` of training; at test, every step past the last one counts as the last.
    """

    step: Literal["first", "last"] = "first"

    @property
    def any_layout(self) -> bool:  # type: ignore[override]
        return getattr(self.plain, "any_layout", False)

    def update(self, at: InnerStep) -> Moved:
        moved = self.plain.update(at)
        out = at.k == 0 if self.step == "first" else at.k >= len(at.learned["lam"]) - 1
        return moved._replace(direction=at.gradients) if out else moved


def with_head(rule: Rule, head: tuple[str, ...]) -> Rule:
    """The same rule, which knows the head of the model."""
    return replace(rule, head=head) if isinstance(rule, BodyOnly) else rule


def body_sharing(norm: NormScope = "global") -> BodyOnly:
    """Gradient sharing of the body; the head takes its own gradient, since its rows belong to the task."""
    return BodyOnly(GradientSharing(norm))


def sharing_but(step: Literal["first", "last"], norm: NormScope = "global") -> LeftOut:
    """Gradient sharing at all inner steps but one."""
    return LeftOut(GradientSharing(norm), step)


def equivariant_sharing(norm: NormScope = "global") -> BodyOnly:
    """Gradient sharing of the body from the second step on, for a head that starts at zero.

    Then the shared vector does not depend on the order in which each task numbers its classes.
    """
    return BodyOnly(sharing_but("first", norm))
