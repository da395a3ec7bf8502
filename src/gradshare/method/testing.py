"""For authors of rules: whether a rule of your own is sound. Public as `gs.testing`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gradshare.errors import UserError
from gradshare.method.rules import NOTHING, InnerStep, Moved, Rule, Tree, Weights, sum_of_tasks

SHAPES = {"conv.weight": (3, 2, 3, 3), "conv.bias": (3,), "head.weight": (4, 5)}
STEPS, TASKS = 3, 4
ALL = "weights"  # the one name of a flat vector


class RuleError(UserError):
    """What is wrong with a rule, and how to mend it."""


def check_rule(rule: Any, seed: int = 0) -> None:
    """Raise an error that says what is wrong with a rule; return None where it is sound.

    Checks, on random gradients in float64 and over several inner steps, with the memory empty and filled:

    - `init` gives nested dicts of tensors, and `update` gives a `gs.Moved`;
    - the direction has the names and shapes of the gradients, `{name: [tasks, *shape]}`;
    - what it remembers fits its memory: a row for each step, or a value for all steps;
    - the same step gives the same result twice, and its arguments are not changed;
    - the order of the tasks does not matter;
    - the tasks meet through `at.total` alone: a process that holds half of a batch moves its tasks as one process would
      (else training in several processes would be silently wrong);
    - at test, where `at.total` is None, no task depends on another;
    - where `any_layout` is true, all weights as one flat vector give the same as weights by name.

    Example:
        >>> import gradshare as gs
        >>> gs.testing.check_rule(gs.GradientSharing())
    """
    _require(not isinstance(rule, type), f"it is a class: give an instance, {getattr(rule, '__name__', '')}()")
    rule = rule.rule() if callable(getattr(rule, "rule", None)) else rule
    for part in ("name", "init", "update"):
        _require(hasattr(rule, part), f"a rule has `name`, `init` and `update`: this one has no `{part}`")
    generator = torch.Generator().manual_seed(seed)
    for learned, memory in _states(rule, generator):
        _check_steps(rule, learned, memory, generator)


def _check_steps(rule: Rule, learned: Tree, memory: Tree, generator: torch.Generator) -> None:
    batch = [_random({name: (TASKS, *shape) for name, shape in SHAPES.items()}, generator) for _ in range(2 * STEPS)]
    steps = list(zip(batch[:STEPS], batch[STEPS:], strict=True))  # gradients and weights of every step
    half = [tuple(_tasks(part, [0, 1]) for part in step) for step in steps]
    reverse = list(range(TASKS))[::-1]

    totals: list[Weights] = []  # of the whole batch, in the order of the calls

    def recorded(gradients: Weights) -> Weights:
        totals.append(sum_of_tasks(gradients))
        return totals[-1]

    whole = _run(rule, learned, memory, steps, recorded)
    _same(whole, _run(rule, learned, memory, steps, sum_of_tasks), "two calls with the same arguments differ: a rule"
          " keeps nothing on itself, draws no random numbers and changes none of its arguments")  # fmt: skip
    turned = _run(rule, learned, memory, [tuple(_tasks(p, reverse) for p in step) for step in steps], sum_of_tasks)
    _same(_directions(whole, reverse), _directions(turned), "the order of the tasks changes their directions")

    # A process with half of the tasks gets the sums of the whole batch, and sees nothing else of the other half.
    replayed = iter(totals)
    apart = _run(rule, learned, memory, half, lambda gradients: next(replayed))
    advice = "with half of the batch in another process: combine tasks by `at.total` alone, not by `.mean(0)`"
    _same(_directions(whole, [0, 1]), _directions(apart), f"the directions differ {advice}")
    _same([m.remember for m in whole], [m.remember for m in apart], f"what it remembers differs {advice}")

    test = _run(rule, learned, memory, steps, None)
    for task in range(TASKS):
        alone = _run(rule, learned, memory, [tuple(_tasks(p, [task]) for p in step) for step in steps], None)
        _same(_directions(test, [task]), _directions(alone), "at test (`at.total` is None) a task depends on another")
    if getattr(rule, "any_layout", False):
        _check_flat(rule, learned, memory, steps, whole)


def _check_flat(rule: Rule, learned: Tree, memory: Tree, steps: list[Any], whole: list[Moved]) -> None:
    flat = [tuple(_flat(part) for part in step) for step in steps]
    moved = _run(rule, _pack(learned), _pack(memory), flat, sum_of_tasks)
    advice = "as one flat vector it moves otherwise than by name: set any_layout to False"
    _same([_flat(one.direction) for one in whole], [one.direction for one in moved], advice)
    _same([_pack(one.remember) for one in whole], [one.remember for one in moved], advice)


def _run(rule: Rule, learned: Tree, memory: Tree, steps: list[Any], total: Any) -> list[Moved]:
    """The inner steps with these gradients and weights, and their results, checked for shapes."""
    carry: Tree = NOTHING
    found = []
    for k, (gradients, weights) in enumerate(steps):
        before = [tensor.clone() for tensor in _leaves([gradients, weights, learned, memory, carry])]
        at = InnerStep(gradients, weights, learned, memory, carry, k, total)
        moved = rule.update(at)
        _require(isinstance(moved, Moved), f"update returns gs.Moved(direction, carry, remember), not {type(moved)}")
        _require(
            all(map(torch.equal, before, _leaves([gradients, weights, learned, memory, carry]))),
            "update changes one of its arguments in place: make a new tensor instead",
        )
        _check_direction(moved.direction, gradients)
        if total is not None:
            _check_memory(moved.remember, memory, len(steps))
        carry = moved.carry
        found.append(moved)
    return found


def _check_direction(direction: Weights, gradients: Weights) -> None:
    _require(
        isinstance(direction, Mapping) and set(direction) == set(gradients),
        f"the direction is a dict with the names of the gradients: {', '.join(gradients)}",
    )
    for name, own in gradients.items():
        _require(
            isinstance(direction[name], Tensor) and direction[name].dtype == own.dtype,
            f"the direction of {name} is not a tensor of the gradients' type, {own.dtype}",
        )
        _require(direction[name].isfinite().all().item() is True, f"the direction of {name} is not finite")
        _require(
            direction[name].shape == own.shape,
            f"the direction of {name} has shape {list(direction[name].shape)}, and its gradients have"
            f" {list(own.shape)}: [tasks, *shape]",
        )


def _check_memory(remembered: Tree, memory: Tree, steps: int, where: str = "") -> None:
    for name, row in remembered.items():
        _require(name in memory, f"it remembers {where}{name}, which `init` did not put into the memory")
        if isinstance(row, Mapping):
            _check_memory(dict(row), memory[name], steps, f"{where}{name}/")
        else:
            kept = list(memory[name].shape)
            _require(
                list(row.shape) in (kept, kept[1:]) and (list(row.shape) == kept or kept[0] == steps),
                f"it remembers {where}{name} of shape {list(row.shape)}; the memory has {kept}:"
                " a row of [steps, *shape], or the whole value",
            )


def _states(rule: Rule, generator: torch.Generator) -> Iterator[tuple[Tree, Tree]]:
    """Learned values and memory at the start, and with random values."""
    started = rule.init({name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}, STEPS)
    _require(
        isinstance(started, tuple) and len(started) == 2 and all(isinstance(tree, dict) for tree in started),
        "init returns two dicts, (learned, memory)",
    )
    _require(
        all(isinstance(leaf, Tensor) for leaf in _leaves(started)),
        "learned values and memory are nested dicts of tensors",
    )
    learned, memory = started
    yield learned, memory
    yield _randomised(learned, generator), _randomised(memory, generator)


def _randomised(tree: Tree, generator: torch.Generator) -> Tree:
    def value(old: Tensor) -> Tensor:
        if not old.is_floating_point():
            return torch.ones_like(old)
        return old + torch.randn(old.shape, generator=generator, dtype=old.dtype)

    return {name: _randomised(old, generator) if isinstance(old, dict) else value(old) for name, old in tree.items()}


def _random(shapes: dict[str, tuple[int, ...]], generator: torch.Generator) -> Weights:
    return {name: torch.randn(size, generator=generator, dtype=torch.float64) for name, size in shapes.items()}


def _tasks(weights: Weights, chosen: list[int]) -> Weights:
    return {name: weight[chosen] for name, weight in weights.items()}


def _directions(moved: list[Moved], chosen: list[int] | None = None) -> list[Weights]:
    return [one.direction if chosen is None else _tasks(one.direction, chosen) for one in moved]


def _flat(weights: Weights) -> Weights:  # {name: [..., *shape]} -> {ALL: [..., P]}
    return {ALL: torch.cat([weights[name].flatten(-len(shape)) for name, shape in SHAPES.items()], -1)}


def _pack(tree: Tree) -> Tree:
    """Values that belong to weights as one vector; a value for each tensor becomes one for each of its elements."""
    if set(tree) != set(SHAPES):
        return {name: _pack(dict(value)) if isinstance(value, Mapping) else value for name, value in tree.items()}
    if all(tree[name].shape[-len(shape) :] == shape for name, shape in SHAPES.items()):
        return dict(_flat(tree))
    sizes = {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}
    return {ALL: torch.cat([tree[name].unsqueeze(-1).expand(*tree[name].shape, sizes[name]) for name in SHAPES], -1)}


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, Mapping):
        return _leaves(tree.values())
    if isinstance(tree, Iterable) and not isinstance(tree, Tensor):
        return [leaf for part in tree for leaf in _leaves(part)]
    return [tree]


def _same(one: Any, other: Any, what: str) -> None:
    pairs = zip(_leaves(one), _leaves(other), strict=True)
    near = all(a.shape == b.shape and torch.allclose(a.double(), b.double(), 1e-9, 1e-12) for a, b in pairs)
    _require(near, what)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RuleError(f"this rule is not sound: {what}")
