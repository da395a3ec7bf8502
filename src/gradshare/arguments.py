"""What users hand to training and evaluation: each of the right kind, or refused in a sentence."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import PurePath
from typing import Any

from gradshare.config import RunConfig, Training
from gradshare.episodes import Episodes, Shape, TaskSource
from gradshare.errors import UserError
from gradshare.learner import Learner
from gradshare.limits import check_whole, shown
from gradshare.state import MetaState

OF_TRAINING = frozenset(field.name for field in fields(Training))
OF_RUNS = frozenset(field.name for field in fields(RunConfig)) - OF_TRAINING


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
            raise UserError("there is no state to judge")
    else:
        ensemble = [states]
    for state in ensemble:
        check_state(state)
    return ensemble


def whole_shape(shape: Any) -> Shape:
    """Ways, shots and queries, as a `Shape` or a plain tuple has them."""
    if not isinstance(shape, tuple | list) or len(shape) != len(Shape._fields):
        raise UserError(f"a shape is (ways, shots, queries), such as gs.Shape(5, 1, 15), not {shown(shape)}")
    for name, value in zip(Shape._fields, shape, strict=True):
        check_whole(name, value, 1)
    return Shape(*shape)


def draw(dataset: TaskSource, split: str, shape: Shape, tasks: int, key: tuple[int, ...]) -> Episodes:
    """Tasks of a source, as many as asked for."""
    episodes = dataset.sample(split, shape, tasks, key)
    if not isinstance(episodes, Episodes):
        raise UserError(f"the data set's sample returns gs.Episodes, not {_named(episodes)}")
    if episodes.tasks != tasks:
        found = f"{episodes.tasks}, not {tasks}"
        raise UserError(f"the data set's sample returned another number of {split} tasks than asked for: {found}")
    return episodes


def training_of(options: dict[str, Any]) -> Training:
    unknown = set(options) - OF_TRAINING
    if unknown:
        raise UserError(f"training has no option {', '.join(sorted(unknown))}")
    return Training(**options)


def further_entries(about: Any) -> dict[str, Any]:
    """What a user adds to a run's `config.json`: nothing that it says itself, or that would be read otherwise.

    `method` makes it a run that can be built again from its `config.json` alone; that one has all its options there.
    """
    if about is None:
        return {}
    if not isinstance(about, Mapping) or not all(isinstance(name, str) for name in about):
        raise UserError(f"about is a dict with names for its keys, not {shown(about)}")
    taken = set(about) & {*OF_TRAINING, "version", "sha256"}
    if taken:
        raise UserError(f"about has {', '.join(sorted(taken))}, which config.json has already: choose other names")
    if "method" in about and {*about, "deterministic"} != OF_RUNS:
        raise UserError("about has method, which config.json has for models of the command line: choose another name")
    for name, value in about.items():
        try:
            json.dumps(value, allow_nan=False, default=_path_text)
        except (TypeError, ValueError, RecursionError):
            raise UserError(f"about has {name} = {shown(value)}, which config.json cannot hold") from None
    return dict(about)


def _path_text(value: Any) -> str:
    if not isinstance(value, PurePath):
        raise TypeError(type(value).__name__)
    return str(value)


def _named(value: Any) -> str:
    """A value of the wrong kind: itself where that is short, else its kind."""
    return (
        shown(value)
        if value is None or isinstance(value, str | int | float)
        else f"an instance of {type(value).__name__}"
    )
