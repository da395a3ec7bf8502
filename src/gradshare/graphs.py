"""A meta-iteration, and the adaptation of an evaluation, as CUDA graphs: recorded once, replayed without Python.

A step is thousands of small kernels, and a GPU finishes them faster than a CPU can launch them. What is recorded reads
and writes the same memory each time: the state, Adam's moments and one batch of tasks live in fixed buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from gradshare.episodes import Episodes
from gradshare.errors import UserError
from gradshare.inner import Tree
from gradshare.kernels import check_current
from gradshare.learner import Learner, Outcome
from gradshare.outer import meta_step
from gradshare.state import MetaState

Result = TypeVar("Result")
Engine = Literal["auto", "eager", "graph"]


def chosen_engine(engine: Engine, device: str, processes: int) -> Engine:
    """What "auto" means here; refuses what cannot be."""
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise UserError(f"a device is cpu or cuda, not {device!r}") from None
    on_gpu = place.type == "cuda"
    if engine not in get_args(Engine):
        raise UserError(f"an engine is one of {', '.join(get_args(Engine))}, not {engine!r}")
    if engine == "graph" and not on_gpu:
        raise UserError("a CUDA graph needs a GPU: on a CPU the engine is eager")
    if engine == "graph" and processes > 1:
        raise UserError(f"a CUDA graph is recorded by one process, not {processes}: use the engine eager")
    if on_gpu and not torch.cuda.is_available():
        raise UserError(f"device {device!r} is not there: PyTorch sees no GPU; use 'cpu'")
    chosen: Engine = engine if engine != "auto" else "graph" if on_gpu and processes == 1 else "eager"
    if chosen == "graph":
        check_current(place)
    return chosen


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
        for place, value in zip(_parts(self._episodes), _parts(episodes), strict=True):
            place.copy_(value)
        self._graph.replay()
        return self._outcome

    def _record(self, episodes: Episodes) -> None:
        self._episodes = Episodes(*(part.clone() for part in _parts(episodes)))
        before = self._snapshot()
        self._graph, self._outcome = _recorded(self._step)
        self._restore(before)

    def _step(self) -> Outcome:
        memory = self._state.tensors()
        kept = self._state.memory
        outcome = meta_step(self._learner, self._state, self._adam, self._episodes, self._clamp)
        new = {name: value for name, value in self._state.tensors().items() if name.startswith("memory/")}
        if new:
            torch._foreach_copy_([memory[name] for name in new], list(new.values()))
        self._state.memory = kept  # the same tensors as before, with the new values
        return outcome._replace(loss=outcome.loss.detach())

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

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._state: MetaState | None = None
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Episodes, Tensor]] = {}  # by the batch's shapes and types

    @torch.no_grad()
    def __call__(self, state: MetaState, episodes: Episodes) -> Tensor:  # [tasks, n, ways]
        if self._state is None:
            self._state = MetaState(*map(_copied, (state.params, state.learned, state.memory)))
        own, given = self._state.tensors(), state.tensors()
        torch._foreach_copy_(list(own.values()), [given[name] for name in own])
        size = tuple((part.shape, part.dtype) for part in _parts(episodes))
        if size not in self._graphs:
            self._graphs[size] = self._record(self._state, Episodes(*(part.clone() for part in _parts(episodes))))
        graph, places, logits = self._graphs[size]
        for place, value in zip(_parts(places), _parts(episodes), strict=True):
            place.copy_(value)
        graph.replay()
        return logits.clone()

    def _record(self, state: MetaState, episodes: Episodes) -> tuple[torch.cuda.CUDAGraph, Episodes, Tensor]:
        graph, logits = _recorded(lambda: self._learner.logits(state, episodes))
        return graph, episodes, logits


def _recorded(run: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
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
        raise UserError(f"this cannot be recorded as a CUDA graph ({reason}): use engine='eager'") from error
    return graph, result


def _copied(tree: Tree) -> Tree:
    return {name: _copied(value) if isinstance(value, dict) else value.detach().clone() for name, value in tree.items()}


def _parts(episodes: Episodes) -> tuple[Tensor, ...]:
    return episodes.support_x, episodes.support_y, episodes.query_x, episodes.query_y
