"""The options of a run on the command line: which ones were given there, and a preset behind them."""

from __future__ import annotations

from typing import Annotated, Any, Self

from cyclopts import Parameter

from gradshare.experiments.presets import preset
from gradshare.runs.config import Arm, RunConfig


class Given(RunConfig):
    """A RunConfig that remembers which options it was made with: one that is given wins over a preset's, always.

    Example:
        >>> Given(epochs=20).given
        {'epochs': 20}
    """

    def __new__(cls, **given: Any) -> Self:
        self = super().__new__(cls)
        self.__dict__["given"] = given  # a frozen dataclass refuses an attribute
        return self

    @property
    def given(self) -> dict[str, Any]:
        return self.__dict__["given"]

    def over(self, name: str | None) -> RunConfig:
        """These options over those of a preset, or over the defaults."""
        return RunConfig(**self.given) if name is None else preset(name, **self.given)


Options = Annotated[Given, Parameter(name="*")]
Arms = Annotated[tuple[Arm, ...], Parameter(consume_multiple=True, negative=())]
