"""Options that several commands share: those of a run, and the arms of a comparison or a grid."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from cyclopts import Parameter, Token, convert, default_name_transform

from gradshare.experiments.presets import preset
from gradshare.method.variants import CONTROLS, OWN, VARIANTS, variant
from gradshare.runs.config import RunConfig, check_backbone

SEVERAL = Parameter(consume_multiple=True, negative=())
_NAMES = f"Arms to train: {', '.join(VARIANTS)}, or package.module:Class for a rule of your own."
Arms = Annotated[tuple[str, ...], SEVERAL, Parameter(help=_NAMES)]
Controls = Annotated[bool, Parameter(help=f"Also the controls: {', '.join(CONTROLS)}.")]


def unrounded(kind: Any, tokens: Sequence[Token]) -> Any:
    """Convert as cyclopts does, which rounds 1.5 where a whole number is wanted: here that is an error."""
    value = convert(kind, tokens)
    for one, token in zip(value if isinstance(value, tuple) else [value], tokens, strict=False):
        if type(one) is int and "." in token.value:
            raise ValueError(f'unable to convert "{token.value}" into int.')
    return value


class Given(RunConfig):
    """A RunConfig that remembers which options it was made with: a given option wins over a preset's.

    Example:
        >>> Given(epochs=20).given
        {'epochs': 20}
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.__dict__["given"] = given  # the dataclass is frozen

    @property
    def given(self) -> dict[str, Any]:
        return self.__dict__["given"]

    def over(self, name: str | None) -> RunConfig:
        """These options over those of a preset, or over the defaults."""
        return RunConfig(**self.given) if name is None else preset(name, **self.given)


def _in_a_grid(field: str) -> str:
    """The name of a run's option in a grid, where --engine says what trains the runs."""
    return "run-engine" if field == "engine" else default_name_transform(field)


Options = Annotated[Given, Parameter(name="*")]
GridOptions = Annotated[Given, Parameter(name="*", show_default=False, name_transform=_in_a_grid)]


def with_controls(arms: Iterable[str], controls: bool) -> list[str]:
    """Arms by name, each once, and the controls if they are wanted; a UserError for a name that is none."""
    return list(dict.fromkeys(variant(name).name for name in (*arms, *(CONTROLS if controls else ()))))


def own_code(arms: Iterable[str], backbone: str | None = None) -> tuple[str, ...]:
    """The user's own code among the arms and the backbone of a command line: only these names may be imported.

    The working directory then has to be importable. It is with `python -m gradshare`, but not with `gradshare`.
    """
    names = [*(variant(arm).name for arm in arms), *([check_backbone(backbone)] if backbone else [])]
    own = tuple(name for name in names if OWN.fullmatch(name))
    if own and not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())
    return own
