"""Figures as values: what was measured on which machine, what failed and why; to JSON and back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradshare.bench.cases import RIVALS, Case
from gradshare.bench.costs import Ceiling, ceiling_of
from gradshare.errors import UserError
from gradshare.files import parse_json, read_text, write_whole

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What timing a case gave."""

    case: Case
    milliseconds: float  # of one meta-iteration: the median over blocks
    quartiles: tuple[float, float]
    iterations: int  # timed
    operations: int  # as `costs` counts them
    bytes_moved: int
    first_step_seconds: float  # building the learner, compiling and recording, until the first iteration is done
    peak_allocated: int | None = None  # bytes on a GPU, the data set not counted
    peak_reserved: int | None = None  # the same with what PyTorch keeps for later
    eval_tasks: int = 0
    eval_seconds: float | None = None


@dataclass(frozen=True)
class Failure:
    """A case that gave no figure."""

    case: Case
    reason: str


@dataclass
class Results:
    """One run of the benchmark."""

    machine: dict[str, Any]
    ceilings: dict[str, Ceiling]  # by precision
    measurements: list[Measurement] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    sweep: str | None = None  # which size was varied

    def fastest_rival(self, case: Case) -> Measurement | None:
        """The fastest other library at the setting of a case."""
        found = [m for m in self.measurements if m.case.library in RIVALS and m.case.setting == case.setting]
        return min(found, key=lambda m: m.milliseconds, default=None)

    def ratio(self, measurement: Measurement) -> float | None:
        """How many times faster than the fastest other library in the same run."""
        rival = self.fastest_rival(measurement.case)
        return None if rival is None else rival.milliseconds / measurement.milliseconds

    def share_of_ceiling(self, measurement: Measurement) -> float | None:
        """The time that the machine would need at best, as a share of the time that was measured."""
        ceiling = ceiling_of(measurement.case, self.ceilings)
        return None if ceiling is None else 1000 * ceiling.floor(measurement.case) / measurement.milliseconds

    def save(self, path: Path) -> None:
        """Write everything, or leave what was there."""
        content = {"version": VERSION, **asdict(self)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=1) + "\n")


def read_results(path: Path) -> Results:
    """The reverse of `save`."""
    try:
        content = parse_json(read_text(path))
        if content.pop("version") != VERSION:
            raise ValueError("it is of another version of gradshare")
        content["measurements"] = [Measurement(**_restored(entry)) for entry in content["measurements"]]
        content["failures"] = [Failure(**_restored(entry)) for entry in content["failures"]]
        content["ceilings"] = {precision: Ceiling(*pair) for precision, pair in content["ceilings"].items()}
        return Results(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} does not hold the results of a benchmark: {error}") from error


def _restored(entry: dict[str, Any]) -> dict[str, Any]:
    case = Case(**{**entry["case"], "image": tuple(entry["case"]["image"])})
    quartiles = {"quartiles": tuple(entry["quartiles"])} if "quartiles" in entry else {}
    return {**entry, **quartiles, "case": case}
