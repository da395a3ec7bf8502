"""What users hand to training: options and further entries of config.json, or an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import PurePath
from typing import Any

from gradshare.errors import UserError, shown
from gradshare.runs.config import RunConfig, Training

OF_TRAINING = frozenset(field.name for field in fields(Training))
OF_RUNS = frozenset(field.name for field in fields(RunConfig)) - OF_TRAINING


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
