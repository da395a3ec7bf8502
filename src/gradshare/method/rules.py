"""Inner rules: how the gradients of a task batch become the step that each task takes.

An algorithm is a chain of rules, as in optax; the learning rate is the last link. Gradients and directions are
`{name: [tasks, *shape]}`; learned values and memory are what `init` returns, kept in the MetaState under `name`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradshare.errors import UserError

Weights = Mapping[str, Tensor]
Tree = dict[str, Any]  # nested dicts of tensors

Update = Callable[[Weights, Tree, Tree, int], tuple[Weights, Any]]
SumTasks = Callable[[Weights], Weights]  # {name: [tasks, *shape]} -> {name: [*shape]}, over all tasks of the batch


class InnerRule(NamedTuple):
    """One link of an inner loop.

    Args:
        name: where the rule's learned values and memory live in a MetaState.
        init: `(weights, steps) -> (learned, memory)`, for adapted weights `{name: [*shape]}`.
        together: `(gradients, learned, memory, step) -> (direction, note)`: meta-training, all tasks of the batch meet.
        alone: the same for validation and test, where no task sees another.
        remember: `(memory, notes) -> memory`: the memory after a meta-iteration, from the notes of its steps.
        second_order: whether the outer gradient flows through the gradients that the rule receives.
        by_element: whether it does the same to every element, so that all weights may come as one vector, by one name.
        fused: `together` for one vector on a GPU, where there are kernels for it.
        spread: `together` for a batch spread over processes, from a function that sums over all tasks; it is given the
            gradients of some of them, and may mix tasks by these sums alone. None: such a batch is refused.

    Example:
        >>> rule = chain(stop_gradient(), scale(0.1))
        >>> direction, _ = rule.together({"w": torch.ones(5, 3)}, {}, {}, 0)
        >>> direction["w"][0]
        tensor([0.1000, 0.1000, 0.1000])
    """

    name: str
    init: Callable[[Weights, int], tuple[Tree, Tree]]
    together: Update
    alone: Update
    remember: Callable[[Tree, list[Any]], Tree]
    second_order: bool = True
    by_element: bool = False
    fused: Update | None = None
    spread: Callable[[SumTasks], Update] | None = None


def without_memory(
    name: str,
    init: Callable[[Weights, int], Tree],
    apply: Callable[[Weights, Tree, int], Weights],
    second_order: bool = True,
    by_element: bool = False,
) -> InnerRule:
    """A rule that treats every task for itself and remembers nothing."""

    def update(gradients: Weights, learned: Tree, memory: Tree, step: int) -> tuple[Weights, None]:
        return apply(gradients, learned, step), None

    return InnerRule(
        name,
        init=lambda weights, steps: (init(weights, steps), {}),
        together=update,
        alone=update,
        remember=lambda memory, notes: memory,
        second_order=second_order,
        by_element=by_element,
        spread=lambda sum_tasks: update,
    )


def spread_over(rule: InnerRule, sum_tasks: SumTasks) -> InnerRule:
    """The rule for a batch of which this process has some of the tasks."""
    if rule.spread is None:
        raise UserError(
            f"the inner rule '{rule.name}' does not say how it sums over tasks in several processes:"
            " give it InnerRule.spread, or train in one process"
        )
    return rule._replace(together=rule.spread(sum_tasks), fused=None)


def sum_of_tasks(gradients: Weights) -> Weights:
    """The sum over tasks where all of them are here."""
    return {name: gradient.sum(0) for name, gradient in gradients.items()}


def chain(*rules: InnerRule) -> InnerRule:
    """Apply rules one after the other; each keeps its learned values and memory under its own name."""
    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        raise UserError(f"each rule of a chain needs a name of its own, not {names}")

    def init(weights: Weights, steps: int) -> tuple[Tree, Tree]:
        started = {rule.name: rule.init(weights, steps) for rule in rules}
        learned = {name: values for name, (values, _) in started.items() if values}
        memory = {name: values for name, (_, values) in started.items() if values}
        return learned, memory

    def in_turn(updates: list[Update]) -> Update:
        def update(direction: Weights, learned: Tree, memory: Tree, step: int) -> tuple[Weights, Any]:
            notes = []
            for name, link in zip(names, updates, strict=True):
                direction, note = link(direction, learned.get(name, {}), memory.get(name, {}), step)
                notes.append(note)
            return direction, notes

        return update

    def remember(memory: Tree, notes: list[Any]) -> Tree:
        return {
            rule.name: rule.remember(memory[rule.name], [note[link] for note in notes])
            for link, rule in enumerate(rules)
            if rule.name in memory
        }

    return InnerRule(
        "chain",
        init,
        together=in_turn([rule.together for rule in rules]),
        alone=in_turn([rule.alone for rule in rules]),
        remember=remember,
        second_order=rules[0].second_order,
        by_element=all(rule.by_element for rule in rules),
        fused=in_turn([rule.fused or rule.together for rule in rules]),
        spread=lambda sum_tasks: in_turn([spread_over(rule, sum_tasks).together for rule in rules]),
    )


def stop_gradient() -> InnerRule:
    """First order: treat the gradients as constants (Finn et al., 2017, section 5.2). The first link of a chain."""

    def apply(gradients: Weights, learned: Tree, step: int) -> Weights:
        return {name: gradient.detach() for name, gradient in gradients.items()}

    return without_memory("stop_gradient", lambda weights, steps: {}, apply, second_order=False, by_element=True)


def scale(rate: float) -> InnerRule:
    """One fixed rate for everything: MAML."""

    def apply(gradients: Weights, learned: Tree, step: int) -> Weights:
        return {name: gradient * rate for name, gradient in gradients.items()}

    return without_memory("scale", lambda weights, steps: {}, apply, by_element=True)


def rate_per_element(rate: float) -> InnerRule:
    """A learned rate for every element of every weight, all starting at `rate`: Meta-SGD."""

    def init(weights: Weights, steps: int) -> Tree:
        return {name: torch.full_like(weight, rate) for name, weight in weights.items()}

    def apply(gradients: Weights, learned: Tree, step: int) -> Weights:
        return {name: gradient * learned[name] for name, gradient in gradients.items()}

    return without_memory("rates", init, apply, by_element=True)


def rate_per_tensor_and_step(rate: float) -> InnerRule:
    """A learned rate for every weight tensor and inner step, all starting at `rate`: MAML++."""

    def init(weights: Weights, steps: int) -> Tree:
        return {name: weight.new_full((steps,), rate) for name, weight in weights.items()}

    def apply(gradients: Weights, learned: Tree, step: int) -> Weights:
        return {name: gradient * learned[name][step] for name, gradient in gradients.items()}

    return without_memory("rates", init, apply, by_element=True)
