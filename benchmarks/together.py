"""Trainings that differ in inner rates, start of the head and seed, as one program: two to five times as fast on a CPU.

A small network spends its time in calls, not in arithmetic. So the weights of all cells get an axis of cells in front,
[cells, ...], in the inner loop the tasks of all cells are one batch, and the rule runs under `vmap` over cells. The
rules, the losses and the optimiser are the library's. A test compares the result with `regimes.train_small`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import regimes
import torch
from torch import Tensor
from torch.func import functional_call, vmap

import gradshare as gs
from gradshare.method import mixing, sharing
from gradshare.method.losses import task_losses
from gradshare.method.rules import InnerStep, Rule, chain, stack_memory, sum_of_tasks

Tree = dict[str, Any]


def train(regime: regimes.Regime, cells: list[tuple[regimes.Arm, float, int]]) -> list[dict[str, float]]:
    """The measures of each cell, (arm, factor, seed), as `regimes.train_small` gives them. All have one program."""
    began = time.monotonic()
    source, learners, states = regime.source(), [], []
    for arm, factor, seed in cells:
        torch.manual_seed(seed)
        learners.append(arm.learner(regime, regime.model(), factor))
        states.append(learners[-1].init(seed=seed))
    joint = Joint(regime, cells[0][0], learners, states)
    every = max(1, regime.iterations // regime.looks)
    validation = source.sample("val", regime.shape, 100, (1, 0))
    found: list[dict[str, float]] = [{} for _ in cells]
    for i in range(1, regime.iterations + 1):
        drawn = {seed: source.sample("train", regime.shape, regime.tasks, (0, seed, i)) for *_, seed in cells}
        joint.step([drawn[seed] for *_, seed in cells])
        if i % every == 0:
            for measures, learner, state in zip(found, learners, joint.states(), strict=True):
                measures[f"val@{i}"] = regimes.measure(learner, state, validation)
    test = source.sample("test", regime.shape, 400, (2, 0))
    for measures, learner, state in zip(found, learners, joint.states(), strict=True):
        measures["test"] = regimes.measure(learner, state, test)
        measures.update(regimes.gates_of(state))
    seconds = (time.monotonic() - began) / len(cells)
    return [measures | {"seconds": seconds} for measures in found]


class Joint:
    """The states of all cells, stacked, and their outer optimiser."""

    def __init__(
        self, regime: regimes.Regime, arm: regimes.Arm, learners: list[gs.Learner], states: list[gs.MetaState]
    ) -> None:
        self.learner, self.model = learners[0], learners[0].module
        first = 0 if arm.rule() is None else 1
        self.rule: Rule = chain(*self.learner.rule.links[:first])
        self.rates = [
            {name: torch.stack(of_cells) for name, *of_cells in zip(self.learner.adapted, *at_step, strict=True)}
            for at_step in zip(*(factors(learner, first) for learner in learners), strict=True)
        ]
        tensors = [{name: value.detach() for name, value in state.tensors().items()} for state in states]
        apart = {link.name for learner in learners for link in learner.rule.links[first:]}  # what a learner has alone
        self.own = [{name: value for name, value in one.items() if apart & set(name.split("/"))} for one in tensors]
        common = [name for name in tensors[0] if name not in self.own[0]]
        self.state = gs.MetaState.of({name: torch.stack([one[name] for one in tensors]) for name in common})
        self.optimiser = gs.optimiser(self.state, regime.outer, gates=arm.gates)

    def states(self) -> Iterator[gs.MetaState]:
        """The state of each cell by itself."""
        tensors = self.state.tensors()
        for cell, own in enumerate(self.own):
            yield gs.MetaState.of({name: value[cell].detach().clone() for name, value in tensors.items()} | own)

    def step(self, episodes: list[gs.Episodes]) -> None:
        """One outer step of each cell; of a cell whose loss or gradient is not finite, nothing changes."""
        leaves = list(self.state.trainable().values())
        losses, memory = self.outer_losses(episodes)
        gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        taken = losses.detach().isfinite()
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
            if gradient is not None:
                taken = taken & gradient.flatten(1).norm(dim=1).isfinite()
        with torch.no_grad():
            kept = {tensor: tensor.clone() for tensor in self.moving(leaves)}
            self.optimiser.step()
            if not taken.all():
                for tensor in self.moving(leaves):  # the moments are there from the first step on, and were 0 before
                    tensor.copy_(torch.where(along(taken, tensor), tensor, kept.get(tensor, torch.zeros_like(tensor))))
        self.state.memory = where(taken, memory, self.state.memory)

    def moving(self, leaves: list[Tensor]) -> list[Tensor]:
        """What a step changes, but for Adam's count of steps, which the cells have in common."""
        states = [value for leaf in leaves for value in self.optimiser.state.get(leaf, {}).values()]
        return leaves + [value for value in states if value.dim()]

    def outer_losses(self, episodes: list[gs.Episodes]) -> tuple[Tensor, Tree]:  # [cells]
        """The query loss of each cell after its inner loop, and its next memory."""
        cells, tasks = len(episodes), episodes[0].tasks
        start = {name: self.state.params[name] for name in self.learner.adapted}
        if self.learner.head_start == "zero":
            start |= {name: torch.zeros_like(start[name]) for name in self.learner.head}
        fast = {name: w.unsqueeze(1).expand(cells, tasks, *w.shape[1:]).flatten(0, 1) for name, w in start.items()}
        support, query = (
            tuple(torch.cat([getattr(one, f"{part}_{which}") for one in episodes]) for which in "xy")
            for part in ("support", "query")
        )
        carry: Tree = {}
        rows = []
        for k in range(self.learner.steps):
            fast = {name: w if w.requires_grad else w.requires_grad_() for name, w in fast.items()}
            gradients = torch.autograd.grad(self.losses(fast, *support).sum(), list(fast.values()), create_graph=True)
            of_cells = [
                {name: value.unflatten(0, (cells, tasks)) for name, value in zip(fast, some, strict=True)}
                for some in (gradients, fast.values())
            ]
            one_step = partial(self.update, k=k)
            # `finite_part` asks for a value, which vmap has not; where something is not finite, no step is taken anyway
            with patch.object(sharing, "finite_part", dict), patch.object(mixing, "finite_part", dict):
                direction, carry, row = vmap(one_step)(*of_cells, self.state.learned, self.state.memory, carry)
            rows.append(row)
            fast = {
                name: w - (along(self.rates[k][name], d := direction[name]) * d).flatten(0, 1)
                for name, w in fast.items()
            }
        losses = self.losses(fast, *query).unflatten(0, (cells, tasks)).mean(1)
        return losses, vmap(stack_memory)(self.state.memory, rows) if self.state.memory else {}

    def update(
        self, gradients: Tree, weights: Tree, learned: Tree, memory: Tree, carry: Tree, k: int
    ) -> tuple[Tree, Tree, Tree]:
        moved = self.rule.update(InnerStep(gradients, weights, learned, memory, carry, k, sum_of_tasks))
        return plain(moved.direction), plain(moved.carry), plain(moved.remember)

    def losses(self, fast: Tree, x: Tensor, y: Tensor) -> Tensor:  # [cells * tasks]
        return task_losses(self.learner.loss, vmap(partial(functional_call, self.model))(fast, (x,)), y)


def factors(learner: gs.Learner, first: int) -> list[list[Tensor]]:  # [steps][weights]
    """What the links from `first` on multiply the direction of each weight with: all of them are fixed rates."""
    rates, one = chain(*learner.rule.links[first:]), {name: torch.ones(1) for name in learner.adapted}
    learned, memory = rates.init(one, learner.steps)
    at = [InnerStep(one, one, learned, memory, {}, k, sum_of_tasks) for k in range(learner.steps)]
    return [[rates.update(step).direction[name].squeeze() for name in one] for step in at]


def along(values: Tensor, like: Tensor) -> Tensor:
    """A value for each cell, in a shape that fits [cells, ...]."""
    return values.view(-1, *(1 for _ in like.shape[1:]))


def where(taken: Tensor, new: Tree, before: Tree) -> Tree:
    if taken.all():
        return new
    return {
        name: where(taken, value, before[name])
        if isinstance(value, dict)
        else torch.where(along(taken, value), value, before[name])
        for name, value in new.items()
    }


def plain(tree: Mapping[str, Any]) -> Tree:
    return {name: plain(value) if isinstance(value, Mapping) else value for name, value in tree.items()}
