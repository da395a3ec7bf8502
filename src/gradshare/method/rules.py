"""Inner rules: how the gradients of a task batch become the step that each task takes.

A rule is any value with `name`, `init(weights, steps)` and `update(at)`. An algorithm is a chain of rules, as in optax,
and the learning rate is the last link. Weights, gradients and directions are `{name: [tasks, *shape]}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from gradshare.errors import UserError

Weights = Mapping[str, Tensor]
Tree = dict[str, Any]  # nested dicts of tensors
Total = Callable[[Weights], Weights]  # {name: [tasks, *shape]} -> {name: [*shape]}
NOTHING: Any = MappingProxyType({})  # an empty tree that nobody can change


class InnerStep(NamedTuple):
    """What a rule sees: one inner step of all tasks that this process has."""

    gradients: Weights
    """Gradient of every task's support loss; in a later link of a chain, the direction so far."""
    weights: Weights
    """Weights of every task before the step."""
    learned: Tree = NOTHING
    """The rule's own values that the outer loop learns."""
    memory: Tree = NOTHING
    """The rule's own constants from earlier meta-iterations."""
    carry: Tree = NOTHING
    """What the rule passed on at the previous inner step, for every task; empty at step 0."""
    k: int = 0
    """Number of the inner step, from 0."""
    total: Total | None = None
    """Sum over all tasks of the batch, also those in other processes. None at test: no task sees another there."""

    def now(self, values: Tensor) -> Tensor:
        """The row of this step of a value per step, `[steps, ...]`; after the last step, the last row."""
        return values[min(self.k, len(values) - 1)]


class Moved(NamedTuple):
    """What a rule returns: the direction of the step, and what later steps and meta-iterations see."""

    direction: Weights
    """What each task moves against, `{name: [tasks, *shape]}`, with the names and shapes of the gradients."""
    carry: Tree = NOTHING
    """For this rule at the next inner step."""
    remember: Tree = NOTHING
    """A row for the memory: `stack_memory` puts the rows of all steps together."""


class OldRuleError(UserError, AttributeError):
    """Use of a field that rules had before version 0.2."""


OLD_FIELDS = ("together", "alone", "spread", "fused", "by_element")
NEW_FORM = (
    "a rule is now one function: update(at: gs.InnerStep) -> gs.Moved(direction, carry, remember);"
    " at.total sums over all tasks and is None at test; see docs/rules.md"
)


class Rule:
    """Base class of our rules. A rule of your own may use it, but needs only `name`, `init` and `update`."""

    name: str  # where its learned values and its memory are in a MetaState
    any_layout: bool = False  # whether it also accepts all weights as one flat vector, under one name
    second_order: bool = True  # a hint: False lets the inner loop skip the graph of the gradients

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        """Learned values and memory before training, for adapted weights `{name: [*shape]}`."""
        return {}, {}

    def update(self, at: InnerStep) -> Moved:
        raise NotImplementedError

    def rule(self) -> Rule:
        """Itself: what `sharing=` asks for."""
        return self

    def __getattr__(self, field: str) -> NoReturn:
        if field in OLD_FIELDS:
            raise OldRuleError(f"rules have no field '{field}' any more: {NEW_FORM}")
        raise AttributeError(f"{type(self).__name__} has no attribute '{field}'")


@dataclass(frozen=True, init=False)
class InnerRule(Rule):
    """A rule from two functions.

    Args:
        name: where its learned values and its memory are in a MetaState.
        init: `(weights, steps) -> (learned, memory)`, for adapted weights `{name: [*shape]}`.
        update: `(at) -> Moved`.
        any_layout: whether `update` also accepts all weights as one flat vector, under one name.

    Example:
        >>> half = InnerRule("half", lambda weights, steps: ({}, {}),
        ...                  lambda at: Moved({name: g / 2 for name, g in at.gradients.items()}))
        >>> step = InnerStep({"w": torch.ones(5, 3)}, {"w": torch.zeros(5, 3)})
        >>> chain(half, scale(0.1)).update(step).direction["w"][0]
        tensor([0.0500, 0.0500, 0.0500])
    """

    name: str
    init: Callable[[Weights, int], tuple[Tree, Tree]] = field(repr=False)  # type: ignore[assignment]
    update: Callable[[InnerStep], Moved] = field(repr=False)  # type: ignore[assignment]
    any_layout: bool = False

    def __init__(self, name: str, init: Any, update: Any = None, any_layout: Any = False, *old: Any, **more: Any):
        if old or more or update is None or not isinstance(any_layout, bool):
            raise OldRuleError(f"InnerRule takes name, init, update and any_layout: {NEW_FORM}")
        for attribute, value in {"name": name, "init": init, "update": update, "any_layout": any_layout}.items():
            object.__setattr__(self, attribute, value)


@dataclass(frozen=True)
class Chain(Rule):
    """Rules one after the other. Each keeps its learned values, memory and carry under its own name."""

    links: tuple[Rule, ...]
    name = "chain"

    def __post_init__(self) -> None:
        names = [link.name for link in self.links]
        if len(set(names)) < len(names):
            raise UserError(f"each rule of a chain needs a name of its own, not {names}")

    @property
    def any_layout(self) -> bool:  # type: ignore[override]
        return all(getattr(link, "any_layout", False) for link in self.links)

    @property
    def second_order(self) -> bool:  # type: ignore[override]
        return getattr(self.links[0], "second_order", True)

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        started = {link.name: link.init(weights, steps) for link in self.links}
        learned = {name: values for name, (values, _) in started.items() if values}
        memory = {name: values for name, (_, values) in started.items() if values}
        return learned, memory

    def update(self, at: InnerStep) -> Moved:
        direction, carry, remember = at.gradients, {}, {}
        for link in self.links:
            own = {part: getattr(at, part).get(link.name, NOTHING) for part in ("learned", "memory", "carry")}
            direction, carry[link.name], remembered = link.update(at._replace(gradients=direction, **own))
            if remembered:
                remember[link.name] = remembered
        return Moved(direction, carry, remember)


def chain(*rules: Rule) -> Chain:
    """Apply rules one after the other; the links of a chain among them become links of this one."""
    return Chain(tuple(link for rule in rules for link in (rule.links if isinstance(rule, Chain) else (rule,))))


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


def checked(rule: Rule) -> Rule:
    """The same rule, whose first inner step raises an error where a link does not move every weight."""
    return Chain(tuple(map(checked, rule.links))) if isinstance(rule, Chain) else Checked(rule)


@dataclass(frozen=True)
class Checked(Wrapper):
    """A rule whose results are looked at in the first inner step."""

    def update(self, at: InnerStep) -> Moved:
        moved = self.plain.update(at)
        if at.k == 0:
            _check_moved(self.name, moved, at.gradients)
        return moved


def _check_moved(rule: str, moved: Any, gradients: Weights) -> None:
    """Raise an error unless a rule gives a direction of the right shape for each weight."""
    if not isinstance(moved, Moved) or not isinstance(moved.direction, Mapping):
        found = type(moved.direction if isinstance(moved, Moved) else moved).__name__
        raise UserError(
            f"the rule '{rule}' returns gs.Moved(direction, carry, remember), with a dict first, not {found}"
        )
    for name, own in gradients.items():
        direction = moved.direction.get(name)
        if not isinstance(direction, Tensor):
            found = "nothing" if direction is None else type(direction).__name__
            raise UserError(f"the rule '{rule}' gives no direction to the weight '{name}': found {found}")
        if direction.shape != own.shape:
            shapes = f"{list(direction.shape)}, and its gradients have {list(own.shape)}"
            raise UserError(f"the rule '{rule}' gives the weight '{name}' a direction of shape {shapes}")


def stack_memory(memory: Tree, rows: list[Tree]) -> Tree:
    """The memory after a meta-iteration: what the rule remembered at each step, as constants.

    A value with an axis of steps, `[steps, *shape]`, is the stack of the rows; any other is that of the last step. What
    the rule did not remember stays.
    """
    kept: Tree = {}
    for name, before in memory.items():
        if not rows or name not in rows[-1]:
            kept[name] = before
        elif isinstance(before, dict):
            kept[name] = stack_memory(before, [row[name] for row in rows])
        elif before.dim() > rows[-1][name].dim():
            kept[name] = torch.stack([row[name].detach() for row in rows])
        else:
            kept[name] = rows[-1][name].detach()
    return kept


def sum_of_tasks(gradients: Weights) -> Weights:
    """`InnerStep.total` where all tasks of the batch are in this process."""
    return {name: gradient.sum(0) for name, gradient in gradients.items()}


@dataclass(frozen=True)
class StopGradient(Rule):
    """First order: treat the gradients as constants (Finn et al., 2017, section 5.2). The first link of a chain."""

    name = "stop_gradient"
    any_layout = True
    second_order = False

    def update(self, at: InnerStep) -> Moved:
        return Moved({name: gradient.detach() for name, gradient in at.gradients.items()})


@dataclass(frozen=True)
class Scale(Rule):
    """One fixed rate for everything: MAML."""

    rate: float
    name = "scale"
    any_layout = True

    def update(self, at: InnerStep) -> Moved:
        return Moved({name: gradient * self.rate for name, gradient in at.gradients.items()})


@dataclass(frozen=True)
class RatePerElement(Rule):
    """A learned rate for every element of every weight, all starting at `rate`: Meta-SGD."""

    rate: float
    name = "rates"
    any_layout = True

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        return {name: torch.full_like(weight, self.rate) for name, weight in weights.items()}, {}

    def update(self, at: InnerStep) -> Moved:
        return Moved({name: gradient * at.learned[name] for name, gradient in at.gradients.items()})


@dataclass(frozen=True)
class RatePerTensorAndStep(Rule):
    """A learned rate for every weight tensor and inner step, all starting at `rate`: MAML++."""

    rate: float
    name = "rates"
    any_layout = True

    def init(self, weights: Weights, steps: int) -> tuple[Tree, Tree]:
        return {name: weight.new_full((steps,), self.rate) for name, weight in weights.items()}, {}

    def update(self, at: InnerStep) -> Moved:
        return Moved({name: gradient * at.now(at.learned[name]) for name, gradient in at.gradients.items()})


stop_gradient, scale = StopGradient, Scale
rate_per_element, rate_per_tensor_and_step = RatePerElement, RatePerTensorAndStep
