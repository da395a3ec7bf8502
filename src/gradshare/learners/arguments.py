"""Checks of what users pass to training and evaluation: a learner, states, a task source, a shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradshare.errors import UserError, check_whole, short_repr
from gradshare.learners.learner import Learner
from gradshare.method.episodes import Episodes, Shape, TaskSource
from gradshare.method.state import MetaState


def check_learner(learner: Any) -> None:
    if not isinstance(learner, Learner):
        raise UserError(f"a learner is what gs.maml(model) and its siblings make, not {_named(learner)}")


def check_state(state: Any) -> None:
    if not isinstance(state, MetaState):
        raise UserError(f"a state is what learner.init() gives, not {_named(state)}")


def check_learner_and_source(learner: Any, dataset: Any) -> None:
    check_learner(learner)
    if not callable(getattr(dataset, "sample", None)):
        raise UserError(
            f"a data set is what gs.load_dataset(name) opens, or anything with a method sample, not {_named(dataset)}"
        )


def all_states(states: MetaState | Iterable[MetaState]) -> list[MetaState]:
    """One state, or an ensemble of them, as a list."""
    if isinstance(states, Iterable):
        ensemble = list(states)
        if not ensemble:
            raise UserError("there is no state to evaluate: the list is empty")
    else:
        ensemble = [states]
    for state in ensemble:
        check_state(state)
    return ensemble


def whole_shape(shape: Any) -> Shape:
    """Ways, shots and queries, as a `Shape` or a plain tuple has them."""
    if not isinstance(shape, tuple | list) or len(shape) != len(Shape._fields):
        raise UserError(f"a shape is (ways, shots, queries), such as gs.Shape(5, 1, 15), not {short_repr(shape)}")
    for name, value in zip(Shape._fields, shape, strict=True):
        check_whole(name, value, 1)
    return Shape(*shape)


def draw(dataset: TaskSource, split: str, shape: Shape, tasks: int, key: tuple[int, ...]) -> Episodes:
    """Draw tasks from a source, and check what it returns."""
    episodes = dataset.sample(split, shape, tasks, key)
    if not isinstance(episodes, Episodes):
        raise UserError(f"the data set's sample returns gs.Episodes, not {_named(episodes)}")
    if episodes.tasks != tasks:
        found = f"{episodes.tasks}, not {tasks}"
        raise UserError(f"the data set's sample returned another number of {split} tasks than asked for: {found}")
    return episodes


def _named(value: Any) -> str:
    """A value of the wrong type for a message: itself where that is short, else its type."""
    return (
        short_repr(value)
        if value is None or isinstance(value, str | int | float)
        else f"an instance of {type(value).__name__}"
    )
