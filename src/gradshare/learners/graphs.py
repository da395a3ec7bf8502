"""A meta-step, and the adaptation of an evaluation, as CUDA graphs.

What is recorded reads and writes the same memory each time: the state, the optimiser's state and one batch of tasks
live in fixed buffers. A meta-iteration is thousands of small kernels, and a GPU finishes them faster than a CPU can
launch them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradshare.engine.backends import check_current
from gradshare.errors import UserError
from gradshare.learners.learner import Learner, Outcome, check_learner, check_state
from gradshare.learners.optimisers import capturable, check_optimiser, fused_adam, optimiser_tensors
from gradshare.learners.outer import meta_step
from gradshare.method.episodes import Episodes
from gradshare.method.network import NormStatistics
from gradshare.method.rules import Tree
from gradshare.method.state import MetaState

Result = TypeVar("Result")


def compiled_step(
    learner: Learner,
    state: MetaState,
    optimiser: Optimizer,
    clamp: float | None = 0.0,
    micro_batch: int | None = None,
    checkpoint: bool = False,
) -> Callable[[Episodes], Outcome]:
    """`meta_step` for a loop of your own: one CUDA graph on a GPU, the plain step on a CPU, with the same results.

    On a GPU the first batch of each shape is slow, since its step is recorded. Batches of few shapes are best.

    Args:
        learner: as it is now. MAML++ changes with the epoch: make a new step from `learner.at(epoch)` in each.
        state: moved in place. `outcome.memory` is the state's own; all other tensors of an outcome are yours.
        optimiser: on a GPU `gs.optimiser(state, rate)`, one of `torch.optim` made with `capturable=True`, or SGD. A
            rate that is a number is part of the recording: a change of it takes another recording, a change of
            `lr=torch.tensor(0.1)` in place does not.
        clamp, micro_batch, checkpoint: as in `gs.meta_step`.

    Example:
        >>> import gradshare as gs
        >>> learner = gs.maml(gs.Conv4(filters=8, image=(1, 28, 28)), steps=2, sharing=gs.GradientSharing())
        >>> state = learner.init(seed=0)
        >>> step = gs.compiled_step(learner, state, gs.optimiser(state, 1e-3))
        >>> for iteration in range(3):
        ...     x, y = torch.rand(4, 5, 1, 28, 28), torch.arange(5).expand(4, -1)
        ...     outcome = step(gs.Episodes(x, y, x, y))
        >>> bool(outcome.taken)
        True
    """
    check_learner(learner)
    check_state(state)
    check_optimiser(optimiser, state)
    if next(iter(state.params.values())).is_cuda:
        graphed = GraphedStep(learner, state, optimiser, clamp, micro_batch, checkpoint)
        return lambda episodes: _own(graphed(episodes))
    return lambda episodes: meta_step(learner, state, optimiser, episodes, clamp, micro_batch, checkpoint)


def _own(outcome: Outcome) -> Outcome:
    """The outcome in tensors that the next replay does not overwrite."""
    accuracy, fault = (None if value is None else value.clone() for value in (outcome.accuracy, outcome.fault))
    return outcome._replace(loss=outcome.loss.clone(), losses=outcome.losses.clone(), accuracy=accuracy, fault=fault)


def record(run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A function as a graph, and the tensors that it leaves each time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # libraries choose and load their kernels here, which recording does not allow
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            result = run()
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"this cannot be recorded as a CUDA graph ({reason}): use engine='eager', or gs.meta_step"
        ) from error
    return graph, result


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    places: list[Tensor]  # where a batch is put before a replay
    outcome: Outcome  # where a replay leaves its results


class GraphedStep:
    """`meta_step` for one learner, state and optimiser, recorded for each shape of batch and replayed after that."""

    def __init__(
        self,
        learner: Learner,
        state: MetaState,
        optimiser: Optimizer,
        clamp: float | None = 0.0,
        micro_batch: int | None = None,
        checkpoint: bool = False,
    ) -> None:
        if not capturable(optimiser):
            kind = type(optimiser).__name__
            raise UserError(f"a step of this {kind} cannot be recorded as a CUDA graph: make it with capturable=True")
        if learner.group.size > 1:
            raise UserError(f"a CUDA graph is recorded by one process, not {learner.group.size}: use gs.meta_step")
        check_current(next(iter(state.params.values())).device)
        self._learner, self._state, self._optimiser = learner, state, optimiser
        self._options = clamp, micro_batch, checkpoint
        self._warm = fused_adam(optimiser)  # others make their state in a first step, which is not recorded
        self._bound: list[Any] = []
        self._recorded: dict[Any, _Recorded] = {}  # by the batch's shapes and types

    def __call__(self, episodes: Episodes) -> Outcome:
        """Take one step. The outcome's tensors are overwritten by the next call."""
        if not self._warm:
            outcome = self._meta_step(episodes)
            self._warm = bool(outcome.taken)
            return outcome
        self._forget_if_changed()
        tensors = episodes.tensors()
        form = _form(episodes, tensors)
        if form not in self._recorded:
            self._recorded[form] = self._record(episodes)
        graph, places, outcome = self._recorded[form]
        for place, value in zip(places, tensors, strict=True):
            place.copy_(value)
        graph.replay()
        return outcome

    def _meta_step(self, episodes: Episodes) -> Outcome:
        return meta_step(self._learner, self._state, self._optimiser, episodes, *self._options)

    def _forget_if_changed(self) -> None:
        """Recordings hold the state's tensors and the optimiser's numbers: those of another state or rate are old."""
        state, groups = self._state, self._optimiser.param_groups
        bound = [state.params, state.learned, state.memory]
        bound += [value for group in groups for name, value in group.items() if name not in ("params", "initial_lr")]
        same = len(bound) == len(self._bound) and all(map(_is_same, bound, self._bound))
        if not same:
            self._recorded.clear()
        self._bound = bound

    def _record(self, episodes: Episodes) -> _Recorded:
        places = episodes.map(torch.clone)
        before = self._snapshot()
        graph, outcome = record(lambda: self._step(places))
        self._restore(before)
        return _Recorded(graph, places.tensors(), outcome)

    def _step(self, episodes: Episodes) -> Outcome:
        memory = self._state.tensors()
        kept = self._state.memory
        outcome = self._meta_step(episodes)
        new = {name: value for name, value in self._state.tensors().items() if name.startswith("memory/")}
        if new:
            torch._foreach_copy_([memory[name] for name in new], list(new.values()))
        self._state.memory = kept  # the same tensors as before, with the new values
        return outcome._replace(memory=kept)

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self._tensors().items()}

    @torch.no_grad()
    def _restore(self, before: dict[str, Tensor]) -> None:
        """Undo the warm-up; moments that did not exist before it start at zero, as Adam would have made them."""
        for name, tensor in self._tensors().items():
            tensor.copy_(before.get(name, torch.zeros_like(tensor)))

    def _tensors(self) -> dict[str, Tensor]:
        """All that a step changes."""
        return self._state.tensors() | optimiser_tensors(self._state, self._optimiser)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, int | float | tuple) and one == other)


def _form(episodes: Episodes, tensors: list[Tensor]) -> Any:
    """What a recording is bound to: shapes, types, the names of several inputs, and which masks there are."""
    inputs = (tuple(x) if isinstance(x, dict) else type(x) for x in (episodes.support_x, episodes.query_x))
    masks = episodes.support_mask is None, episodes.query_mask is None
    return *inputs, *masks, *((tensor.shape, tensor.dtype) for tensor in tensors)


class GraphedPrediction:
    """`learner.logits` for any state, recorded for every size of batch that comes."""

    def __init__(self, learner: Learner, norm_statistics: NormStatistics = "batch") -> None:
        self._learner, self._norm_statistics = learner, norm_statistics
        self._state: MetaState | None = None
        # by the batch's shapes and types
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]] = {}

    @torch.no_grad()
    def __call__(self, state: MetaState, episodes: Episodes) -> Tensor:  # [tasks, n, ways]
        if self._state is None:
            self._state = MetaState(*map(_copied, (state.params, state.learned, state.memory)))
        own, given = self._state.tensors(), state.tensors()
        torch._foreach_copy_(list(own.values()), [given[name] for name in own])
        tensors = episodes.tensors()
        learner = self._learner
        if learner.head_start == "prototypes":  # a recording cannot look at labels
            learner = replace(learner, ways=learner.ways_of(episodes.support_y, episodes.support_mask))
        form = learner.ways, *_form(episodes, tensors)
        if form not in self._graphs:
            self._graphs[form] = self._record(learner, self._state, episodes.map(torch.clone))
        graph, places, logits = self._graphs[form]
        for place, value in zip(places, tensors, strict=True):
            place.copy_(value)
        graph.replay()
        return logits.clone()

    def _record(
        self, learner: Learner, state: MetaState, episodes: Episodes
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], Tensor]:
        graph, logits = record(lambda: learner.logits(state, episodes, norm_statistics=self._norm_statistics))
        return graph, episodes.tensors(), logits


def _copied(tree: Tree) -> Tree:
    return {name: _copied(value) if isinstance(value, dict) else value.detach().clone() for name, value in tree.items()}
