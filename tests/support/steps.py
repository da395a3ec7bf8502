"""One inner step of a rule, for tests that give it gradients by hand."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gradshare.method.rules import InnerStep, Moved, Rule, Weights, sum_of_tasks


def together(
    rule: Rule, gradients: Weights, learned: Any, memory: Any, k: int = 0, update: Any = None
) -> tuple[Weights, dict[str, Tensor]]:
    """A step in training: the direction, and the running mean that the rule remembers."""
    moved: Moved = (update or rule.update)(InnerStep(gradients, gradients, learned, memory, {}, k, sum_of_tasks))
    return moved.direction, moved.remember.get("ghat", {})


def alone(rule: Rule, gradients: Weights, learned: Any, memory: Any, k: int = 0) -> Weights:
    """A step at test: the direction."""
    return rule.update(InnerStep(gradients, gradients, learned, memory, {}, k, None)).direction
