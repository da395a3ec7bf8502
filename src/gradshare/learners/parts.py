"""The meta-gradient in less memory: one inner step and one part of the tasks at a time.

`Learner.outer_loss` keeps the activations of all tasks and all inner steps for the way back. Here the way forward keeps
only the weights, the gradients and the carry of every step, without a graph. The way back goes step by step: the rule
once more for all tasks together, since they meet there, and the support gradients once more, part by part. The result
is that of `outer_loss`, to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradshare.engine.traced import Batch, Traced
from gradshare.errors import UserError
from gradshare.learners.learner import Learner, Outcome
from gradshare.method.episodes import Episodes
from gradshare.method.losses import accuracy
from gradshare.method.rules import NOTHING, InnerStep, Moved, Total, Tree, Weights, stack_memory, sum_of_tasks
from gradshare.method.state import MetaState, flatten


def gradients_in_parts(
    learner: Learner, state: MetaState, episodes: Episodes, size: int
) -> tuple[Outcome, list[Tensor | None]]:
    """The outcome of a batch, and the gradient of each of `state.trainable()`; None where the loss does not use it.

    Args:
        size: tasks of a part.
    """
    learner._check(state)
    batch = episodes.tasks
    own = episodes if learner.group.size == 1 else episodes[learner.group.share(batch)]
    sources = _Sources()
    outcome = _Parts(learner, state, own, size, sources).run(batch)
    return outcome, sources.gradients(state.trainable().values())


class _Step(NamedTuple):
    """What the way forward keeps of an inner step, without a graph."""

    before: Weights  # the fast weights
    gradients: Weights
    carry: Tree
    after: Weights


class _Part(NamedTuple):
    """Some of the tasks."""

    tasks: slice
    support: Batch


class _Parts:
    """One batch. Derivatives gather in the `grad` of tensors of its own; those of the state are not touched."""

    def __init__(self, learner: Learner, state: MetaState, episodes: Episodes, size: int, sources: _Sources) -> None:
        self.learner, self.network, self.tasks = learner, learner.network, episodes.tasks
        self.parts = [
            _Part(tasks, _nothing_kept(learner._support(episodes[tasks]))) for tasks in _slices(episodes.tasks, size)
        ]
        # Compiled programs keep nothing of an inner step: there the query sets need the most memory.
        self.queries = _slices(episodes.tasks, 1 if isinstance(self.network, Traced) else size)
        self.episodes = episodes
        self.start = sources.cut(self.network.start(learner._start(state)))
        self.shared = [sources.cut(shared) for shared in learner._shared_of_steps(state)]
        self.learned = sources.cut(self.network.pack(state.learned))
        self.memory = self.network.pack(state.memory)
        self.rule = learner._rule()
        self.total: Total = sum_of_tasks if learner.group.size == 1 else learner.group.sum_tasks

    def run(self, batch: int) -> Outcome:
        with _repeatable(self.learner, self.episodes.support_y.is_cuda):
            first = self._first()
            steps, memory = self._forward(first)
        if self.learner.outer == "reptile":
            return self._reptile(first, steps[-1].after, batch, memory)
        weights, last = self.learner._weights_of_steps, max(len(steps) - 1, 0)
        scores: list[tuple[float, Tensor, Tensor | None]] = []
        adjoint: dict[str, Tensor] = {}  # derivative of the outer loss with respect to the fast weights; missing: zero
        carried: dict[str, Tensor] = {}  # the same for the carry
        for k in reversed(range(len(weights))):
            step = steps.pop() if steps else None  # none: a prototypical network
            after = step.after if step else first
            if weights[k] or k == last:
                scores.append((weights[k] * (self.tasks / batch), *self._query(after, k, weights[k] / batch, adjoint)))
            if step:
                adjoint, carried = self._back(step, k, adjoint, carried)
        self._back_to_start(adjoint)
        _, losses, right = scores[0]  # those after the last step
        loss = torch.stack([weight * losses.mean() for weight, losses, _ in reversed(scores)]).sum()
        return Outcome(loss, losses, right, self.network.unpack(memory))

    def _reptile(self, first: Weights, after: Weights, batch: int, memory: Tree) -> Outcome:
        losses, right = self._query(after, self.learner.steps - 1, None, {})
        self._back_to_start({name: (weight - after[name]) / batch for name, weight in first.items()})
        return Outcome((self.tasks / batch) * losses.mean(), losses, right, self.network.unpack(memory))

    def _first(self) -> Weights:
        """The weights of each task before the first step."""
        fast = {name: w.detach().expand(self.tasks, *w.shape) for name, w in self.start.items()}
        if self.learner.head_start == "prototypes":
            with torch.no_grad():
                found = [self._fast(part) for part in self.parts]
            fast |= {name: _joined([own[name] for own in found]) for name in self.learner.head}
        return fast

    def _fast(self, part: _Part) -> Weights:
        return self.learner._fast(self.start, self.shared[0], part.support, training=True)

    def _back_to_start(self, adjoint: Weights) -> None:
        """From derivatives with respect to the weights before the first step to those of all tasks together."""
        own = [name for name in adjoint if name not in self.start]  # what each task computes for itself
        for name in adjoint.keys() - own:
            self.start[name].grad = adjoint[name].sum(0)
        for part in self.parts if own else ():
            fast, derivatives = self._fast(part), [adjoint[name][part.tasks] for name in own]
            _backward([fast[name] for name in own], derivatives, self.start, self.shared[0])

    def _forward(self, fast: Weights) -> tuple[list[_Step], Tree]:
        """The inner loop, and the memory after it."""
        carry: Tree = NOTHING
        steps: list[_Step] = []
        rows: list[Tree] = []
        for k in range(self.learner.steps):
            found = [self._support_gradients(_leaves(fast, part.tasks), k, part, False) for part in self.parts]
            gradients = {name: _joined([one[name] for one in found]) for name in fast}
            with torch.no_grad():
                moved = self._update(gradients, fast, carry, k)
                after = {name: weight - moved.direction[name] for name, weight in fast.items()}
            steps.append(_Step(fast, gradients, carry, after))
            rows.append(moved.remember)
            fast, carry = after, moved.carry
        vars(self.learner)["_rule_seen"] = True
        return steps, stack_memory(self.memory, rows)

    def _query(
        self, after: Weights, k: int, weight: float | None, adjoint: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Query losses and accuracies after a step. Derivatives are added to `adjoint` and in `shared`, if weighted."""
        losses, right = [], []
        for tasks in self.queries:
            fast, query = _leaves(after, tasks), self.learner._query(self.episodes[tasks])
            scores = self.learner._scores(fast, self.shared[k], query)
            if weight is not None:
                _backward([scores.mean], [torch.full_like(scores.mean, weight * len(query.y))], fast, self.shared[k])
            losses.append(scores.losses)
            if (share := accuracy(scores.outputs, query.y, query.mask)) is not None:
                right.append(share)
            _add(adjoint, after, tasks, fast)
        return _joined(losses), _joined(right) if right else None

    def _back(
        self, step: _Step, k: int, adjoint: dict[str, Tensor], carried: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """From derivatives with respect to what a step left, to those with respect to what it found."""
        fast = _leaves(step.before)
        gradients = _leaves(step.gradients) if self.rule.second_order else step.gradients
        carry = _leaf_tree(step.carry)
        moved = self._update(gradients, fast, carry, k)
        after = [fast[name] - moved.direction[name] for name in adjoint]
        left = {name: value for name, value in _tensors(moved.carry).items() if name in carried and value.requires_grad}
        derivatives = [*adjoint.values(), *(carried[name] for name in left)]
        entering = _tensors(carry)
        learned = flatten(self.learned, "learned")
        _backward([*after, *left.values()], derivatives, fast, gradients, entering, learned)
        adjoint = _gathered(fast)
        along = _gathered(gradients)
        for part in self.parts if along else ():
            own = _leaves(step.before, part.tasks)
            self._second_order(own, k, part, {name: one[part.tasks] for name, one in along.items()})
            _add(adjoint, step.before, part.tasks, own)
        return adjoint, _gathered(entering)

    def _second_order(self, own: Weights, k: int, part: _Part, along: Weights) -> None:
        """Add the derivatives of the support gradients along `along` to the `grad` of the weights of a part."""
        if isinstance(self.network, Traced):
            back = {name: along.get(name, torch.zeros_like(weight)) for name, weight in own.items()}
            self.network.add_product(own, self.shared[k], part.support, back)
            return
        again = self._support_gradients(own, k, part, True)
        names = [name for name in along if again[name].requires_grad]
        _backward([again[name] for name in names], [along[name] for name in names], own, self.shared[k])

    def _support_gradients(self, own: Weights, k: int, part: _Part, create_graph: bool) -> Weights:
        return self.learner._support_gradients(own, self.shared[k], part.support, create_graph)

    def _update(self, gradients: Weights, fast: Weights, carry: Tree, k: int) -> Moved:
        return self.rule.update(InnerStep(gradients, fast, self.learned, self.memory, carry, k, self.total))


class _Sources:
    """Tensors that are computed from the state, each with a leaf that stands for it and gathers its derivative."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def cut(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """The same tree, of leaves. A tensor that comes twice has one leaf."""
        return {
            name: self._leaf(value) if isinstance(value, Tensor) else self.cut(value) for name, value in tree.items()
        }

    def _leaf(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        return self._pairs.setdefault(id(tensor), (tensor, tensor.detach().requires_grad_()))[1]

    def gradients(self, leaves: Iterable[Tensor]) -> list[Tensor | None]:
        """What the leaves gathered, carried on to those of the state."""
        used = [(tensor, leaf.grad) for tensor, leaf in self._pairs.values() if leaf.grad is not None]
        tensors, derivatives = zip(*used, strict=True)
        return list(torch.autograd.grad(tensors, list(leaves), derivatives, allow_unused=True))


def _nothing_kept(batch: Batch) -> Batch:
    """The same batch, of which each inner step computes all: the way back is one step at a time."""
    return batch._replace(x=batch.x.afresh()) if hasattr(batch.x, "afresh") else batch


@contextmanager
def _repeatable(learner: Learner, on_gpu: bool) -> Iterator[None]:
    """Raise an error where the way forward draws random numbers: the way back would draw others. Checked once."""
    if "_repeatable" in vars(learner):
        yield
        return
    before = _generators(on_gpu)
    yield
    if not all(map(torch.equal, before, _generators(on_gpu))):
        raise UserError("the inner rule draws random numbers, so it cannot run with micro_batch or checkpoint")
    vars(learner)["_repeatable"] = True


def _generators(on_gpu: bool) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]


def _slices(tasks: int, size: int) -> list[slice]:
    return [slice(first, first + size) for first in range(0, tasks, size)]


def _leaves(weights: Weights, part: slice = slice(None)) -> dict[str, Tensor]:
    return {name: weight[part].detach().requires_grad_() for name, weight in weights.items()}


def _leaf_tree(tree: Tree) -> Tree:
    """A carry of leaves; what has no derivative stays as it is."""
    return {name: _leaf_tree(value) if isinstance(value, dict) else _leaf(value) for name, value in tree.items()}


def _leaf(value: Any) -> Any:
    differentiable = isinstance(value, Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if differentiable else value


def _tensors(tree: Tree) -> dict[str, Tensor]:
    return {name: value for name, value in flatten(tree, "carry").items() if isinstance(value, Tensor)}


def _backward(outputs: Sequence[Tensor], derivatives: Sequence[Tensor], *leaves: Weights) -> None:
    """Add vector-Jacobian products to the `grad` of the leaves."""
    inputs = [leaf for some in leaves for leaf in some.values() if leaf.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, derivatives, inputs=inputs)


def _gathered(leaves: Weights) -> dict[str, Tensor]:
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _add(total: dict[str, Tensor], weights: Weights, tasks: slice, leaves: Weights) -> None:
    """Add what the leaves of some tasks gathered to the derivatives with respect to the weights of all tasks."""
    for name, derivative in _gathered(leaves).items():
        if name not in total:
            total[name] = torch.zeros_like(weights[name])
        total[name][tasks] += derivative
