"""Runs that belong together: an experiment is one setting; its arms differ in their first link, repeats in the seed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradshare.reports.paper import DATA
from gradshare.reports.records import LARGEST
from gradshare.reports.runs import Run
from gradshare.reports.wording import METHODS, count

# and the seed: what repeats may differ in
OF_THE_MACHINE = ("version", "device", "engine", "threads", "eval_batch", "deterministic")


class Setting(NamedTuple):
    """What tells experiments apart; each value as config.json has it, None where it has none."""

    dataset: Any
    inner_lr: Any
    ways: Any
    shots: Any
    method: Any
    tasks: Any

    @property
    def title(self) -> str:
        """MAML/5 on cub, 5-way 5-shot, inner rate 0.1."""
        parts = [self.subject, self.shape, "" if self.inner_lr is None else f"inner rate {value_text(self.inner_lr)}"]
        return ", ".join(part for part in parts if part)

    @property
    def subject(self) -> str:
        where = "" if self.dataset is None else f" on {value_text(self.dataset)}"
        return f"{self.row}{where}"

    @property
    def row(self) -> str:
        """As the rows of the paper's table are called: MAML/5 is MAML with 5 tasks a batch."""
        name = "a run" if self.method is None else METHODS.get(value_text(self.method), value_text(self.method))
        return name if self.tasks is None else f"{name}/{value_text(self.tasks)}"

    @property
    def shape(self) -> str:
        sizes = ((self.ways, "way"), (self.shots, "shot"))
        return " ".join(f"{value_text(value)}-{unit}" for value, unit in sizes if value is not None)


@dataclass(frozen=True, eq=False)
class Repeats:
    """The runs of one arm that differ in their seed alone."""

    name: str
    """The arm; where it has several configurations in this experiment, with its epochs, or the first run's name."""
    runs: list[Run]

    @property
    def arm(self) -> str:
        return self.runs[0].arm

    @property
    def done(self) -> list[Run]:
        """The runs to take means over: those that are done, or all while none is."""
        return [run for run in self.runs if run.state == "done"] or self.runs


@dataclass(frozen=True, eq=False)
class Experiment:
    setting: Setting
    runs: list[Run]

    @property
    def repeats(self) -> list[Repeats]:
        """The arms, in the order of the runs."""
        found: dict[str, list[Run]] = {}
        for run in self.runs:
            found.setdefault(_configuration(run), []).append(run)
        firsts = [runs[0] for runs in found.values()]
        return [Repeats(_name(runs[0], firsts), runs) for runs in found.values()]

    def partner(self, run: Run, arm: str) -> Run | None:
        """The run of that arm to compare with: of the same seed, beside it, or the only one there is."""
        found = [other for other in self.runs if other.arm == arm]
        seeded = [other for other in found if other.config.get("seed") == run.config.get("seed")] or found
        beside = [other for other in seeded if other.folder.parent == run.folder.parent] or seeded
        return beside[0] if len(beside) == 1 else None


def group(runs: list[Run]) -> list[Experiment]:
    """The experiments of these runs, in the paper's order: data set, rate, shots, method, tasks."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(value_text(setting(run)), []).append(run)
    experiments = [Experiment(setting(members[0]), members) for members in found.values()]
    return sorted(experiments, key=lambda one: _order(one.setting))


def setting(run: Run) -> Setting:
    return Setting(**{key: _whole_rate(run) if key == "inner_lr" else run.config.get(key) for key in Setting._fields})


def value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def _whole_rate(run: Run) -> Any:
    """The rate of the experiment: the half-rate control has half of it."""
    rate = run.config.get("inner_lr")
    return round(2 * rate, 12) if run.arm == "half-rate" and isinstance(rate, float) else rate


def _name(run: Run, others: list[Run]) -> str:
    """The arm, as briefly as tells it from the same arm in other configurations: shared; shared, 20 epochs; its run."""
    epochs = [other.config.get("epochs") for other in others if other.arm == run.arm]
    own = run.config.get("epochs")
    if len(epochs) == 1:
        return run.arm
    return f"{run.arm}, {count(own, 'epoch')}" if isinstance(own, int) and epochs.count(own) == 1 else run.name


def _configuration(run: Run) -> str:
    kept = {key: value for key, value in run.config.items() if key not in (*OF_THE_MACHINE, "seed")}
    return value_text({**kept, "arm": run.arm})


def _order(one: Setting) -> list[tuple[float, str]]:
    methods = list(METHODS)
    method = value_text(one.method)
    ranked = (methods.index(method) if method in methods else len(methods), method)
    name = value_text(one.dataset)
    data = (0.0, DATA.get(name, name))
    rate, ways, shots, tasks = map(_rank, (one.inner_lr, one.ways, one.shots, one.tasks))
    return [data, rate, ways, shots, ranked, (-tasks[0], tasks[1])]


def rank(value: Any) -> float:
    """A number to sort by; 0 for what is none, and for a number that is too long to be one."""
    return float(value) if isinstance(value, int | float) and abs(value) <= LARGEST else 0.0


def _rank(value: Any) -> tuple[float, str]:
    return (rank(value), "") if isinstance(value, int | float) else (0.0, value_text(value))
