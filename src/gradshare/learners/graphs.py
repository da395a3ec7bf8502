"""A meta-step, and the adaptation of an evaluation, as CUDA graphs.

What is recorded reads and writes the same memory each time: the state, Adam's moments and one batch of tasks live in
fixed buffers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradshare.engine.cuda_graph import record
from gradshare.learners.learner import Learner, Outcome
from gradshare.learners.outer import meta_step
from gradshare.method.episodes import Episodes
from gradshare.method.network import NormStatistics
from gradshare.method.rules import Tree
from gradshare.method.state import MetaState


class GraphedStep:
    """`meta_step` for one learner, state and optimiser, recorded on the first batch and replayed on every later one."""

    def __init__(self, learner: Learner, state: MetaState, adam: torch.optim.Adam, clamp: float = 0.0) -> None:
        self._learner, self._state, self._adam, self._clamp = learner, state, adam, clamp
        self._graph: torch.cuda.CUDAGraph | None = None
        self._episodes: Episodes
        self._outcome: Outcome

    def __call__(self, episodes: Episodes) -> Outcome:
        """Take one step. The outcome's tensors are overwritten by the next call."""
        if self._graph is None:
            self._record(episodes)
        assert self._graph is not None
        for place, value in zip(self._episodes.tensors(), episodes.tensors(), strict=True):
            place.copy_(value)
        self._graph.replay()
        return self._outcome

    def _record(self, episodes: Episodes) -> None:
        self._episodes = episodes.map(torch.clone)
        before = self._snapshot()
        self._graph, self._outcome = record(self._step)
        self._restore(before)

    def _step(self) -> Outcome:
        memory = self._state.tensors()
        kept = self._state.memory
        outcome = meta_step(self._learner, self._state, self._adam, self._episodes, self._clamp)
        new = {name: value for name, value in self._state.tensors().items() if name.startswith("memory/")}
        if new:
            torch._foreach_copy_([memory[name] for name in new], list(new.values()))
        self._state.memory = kept  # the same tensors as before, with the new values
        return outcome

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._state.tensors().items()} | {
            f"{number}/{name}": value.clone()
            for number, moments in enumerate(self._adam.state.values())
            for name, value in moments.items()
        }

    @torch.no_grad()
    def _restore(self, before: dict[str, Tensor]) -> None:
        """Undo the warm-up; moments that did not exist before it start at zero, as Adam would have made them."""
        for name, tensor in self._state.tensors().items():
            tensor.copy_(before[name])
        for number, moments in enumerate(self._adam.state.values()):
            for name, value in moments.items():
                value.copy_(before.get(f"{number}/{name}", torch.zeros_like(value)))


class GraphedPrediction:
    """`learner.logits` for any state, recorded for every size of batch that comes."""

    def __init__(self, learner: Learner, norm_statistics: NormStatistics = "batch") -> None:
        self._learner, self._norm_statistics = learner, norm_statistics
        self._state: MetaState | None = None
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Episodes, Tensor]] = {}  # by the batch's shapes and types

    @torch.no_grad()
    def __call__(self, state: MetaState, episodes: Episodes) -> Tensor:  # [tasks, n, ways]
        if self._state is None:
            self._state = MetaState(*map(_copied, (state.params, state.learned, state.memory)))
        own, given = self._state.tensors(), state.tensors()
        torch._foreach_copy_(list(own.values()), [given[name] for name in own])
        size = tuple((part.shape, part.dtype) for part in episodes.tensors())
        if size not in self._graphs:
            self._graphs[size] = self._record(self._state, episodes.map(torch.clone))
        graph, places, logits = self._graphs[size]
        for place, value in zip(places.tensors(), episodes.tensors(), strict=True):
            place.copy_(value)
        graph.replay()
        return logits.clone()

    def _record(self, state: MetaState, episodes: Episodes) -> tuple[torch.cuda.CUDAGraph, Episodes, Tensor]:
        graph, logits = record(lambda: self._learner.logits(state, episodes, norm_statistics=self._norm_statistics))
        return graph, episodes, logits


def _copied(tree: Tree) -> Tree:
    return {name: _copied(value) if isinstance(value, dict) else value.detach().clone() for name, value in tree.items()}
