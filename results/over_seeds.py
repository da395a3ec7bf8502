"""The tables and figures of docs/results.md, and the short table of README.md, from the runs here.

    python results/over_seeds.py

A table is written between `<!-- table NAME -->` and `<!-- end -->`. ± is a 95 % interval: over tasks for one seed, by
Student's t over seeds for several.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from train_queue import EARLIER, PAPER, RESULTS, Queue

from gradshare.reports import Comparison, Run, compare_runs, read_run, read_runs, words
from gradshare.reports.comparison import ArmResult, ExperimentResult
from gradshare.reports.figures import INK, STYLE, image, image_files
from gradshare.reports.model import METHODS
from gradshare.reports.panels import curves, gates
from gradshare.reports.paper import TABLE
from gradshare.reports.statistics import Spread, reached, spread
from gradshare.runs.folder import RunFolder

ROOT = RESULTS.parent
PAGES = tuple(ROOT / name for name in ("docs/results.md", "README.md"))
NAMES = {"shared": "sharing"}
DATA = {"cub": "CUB", "mini": "MiniImagenet"}
ARMS = ("original", "shared", "gate-only")
CONTROLS = ("half-rate", "gate-only", "batch-only", "memory-only", "conditioned")
MARKERS = {"shared": "o", "gate-only": "s", "batch-only": "v", "memory-only": "^", "conditioned": "D"}
EARLY, AT = 20, 50  # epochs of every run of the controls, and the validation level of their table, %
UNBROKEN = "\u00a0±\u00a0"


class Kept:
    """The runs of results/paper, compared, and which of them are finished by the queue's rule."""

    def __init__(self) -> None:
        self.comparison: Comparison = compare_runs(read_runs(PAPER))
        queue = Queue(RESULTS / "queue.toml")
        self.finished = {cell.label for cell in queue.cells if queue.ended(cell, cell.home)}
        first = [cell.label for cell in queue.cells if cell.part == "first"]
        self.first, self.first_finished = len(first), len(self.finished.intersection(first))

    def experiment(self, data: str, shots: int, method: str, tasks: int, rate: float = 0.1) -> ExperimentResult | None:
        wanted = (data, shots, method, tasks, rate)
        return next((one for one in self.comparison.experiments if _key(one) == wanted), None)

    def title(self, one: ExperimentResult) -> str:
        """CUB 1-shot, MAML; with a star if not all its runs are finished."""
        data, shots, method, tasks, rate = _key(one)
        more = ", T = 1" * (tasks == 1) + f", rate {rate:g}" * (rate != 0.1)
        runs = [run for arm in ARMS if (found := one.main(arm)) for run in found.runs]
        star = "" if all(self.label(run) in self.finished for run in runs) else r" \*"
        return f"{DATA[data]} {shots}-shot, {METHODS[method]}{more}{star}"

    @staticmethod
    def label(run: Run) -> str:
        return run.folder.relative_to(PAPER).as_posix()


class Training(NamedTuple):
    """An arm, the gate of the last inner step after EARLY epochs, and the test."""

    arm: str
    gate: float
    test: float


def _key(one: ExperimentResult) -> tuple[str, int, str, int, float]:
    chosen = one.setting
    return chosen.data, chosen.shots, chosen.method, chosen.tasks, chosen.inner_lr


# Tables


def tables(kept: Kept) -> dict[str, str]:
    """All tables by their names on the pages."""
    makers: tuple[Callable[[Kept], str], ...]
    makers = (state, paper, tests, levels, gate_values, last_gates, controls, again, short)
    return {maker.__name__.replace("_", "-"): maker(kept) for maker in makers}


def paper(kept: Kept) -> str:
    """The paper's table, 5-way 5-shot, with ours in bold."""
    rows = []
    for method, tasks in dict.fromkeys((method, tasks) for _, method, tasks in TABLE):
        cells = [f"{METHODS[method]}/{tasks}"]
        for data in DATA:
            printed, ours = TABLE[data, method, tasks], kept.experiment(data, 5, method, tasks)
            star = "" if ours is None or not kept.title(ours).endswith("*") else r" \*"
            shared = ours and ours.main("shared")
            cells += [
                f"{printed.original:.1f} ± {printed.original_interval:.1f}{_bold(_test(ours, 'original'), star)}",
                f"{printed.shared:.1f} ± {printed.shared_interval:.1f}{_bold(_test(ours, 'shared'), star)}",
                f"+{printed.speed_up:.0f}{_bold(_percent(shared.speed_up if shared else None), star)}",
            ]
        rows.append(cells)
    names = ["original", "sharing", "speed-up, %"]
    return _table(["paper, **ours**", *(f"{data}: {name}" for data in DATA.values() for name in names)], rows)


def tests(kept: Kept) -> str:
    """The test of every experiment with the epochs of the best validations, which the paper's speed-up compares."""
    rows = []
    for one in kept.comparison.experiments:
        found = [one.main(arm) for arm in ARMS]
        lengths = sorted({len(run.epochs) for arm in found if arm for run in arm.runs})
        epochs = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
        best = [f" ({_by_seed(run.best_epoch for run in arm.runs)})" if arm else words.ABSENT for arm in found]
        tested = [_test(one, arm) + epoch for arm, epoch in zip(ARMS, best, strict=True)]
        speed = [_percent(arm.speed_up if arm else None) or words.ABSENT for arm in found[1:]]
        rows.append([kept.title(one), epochs, *tested, *speed])
    names = ["original: test, % (best epoch)", "sharing", "gate-only", "speed-up, %: sharing", "gate-only"]
    return _table(["experiment", "epochs", *names], rows)


def levels(kept: Kept) -> str:
    """When arms reach the hardest round level that sharing and the original both reach, and how far sharing leads."""
    rows = []
    for one in _at_the_normal_rate(kept):
        at, found = _common_level(one), [one.main(arm) for arm in ARMS]
        reached = [_reached(one, arm, at) for arm in found]
        sooner = [_percent(arm.reached[at].speed_up if arm else None) or words.ABSENT for arm in found[1:]]
        original, shared = (arm.runs for arm in found[:2] if arm)
        leads = [_by_seed(_leads(shared, original, part), "+.1f") for part in (slice(5), slice(-5, None))]
        rows.append([kept.title(one), f"{100 * one.levels[at].value:g} %", *reached, *sooner, *leads])
    names = ["reached at epoch: original", "sharing", "gate-only", "sooner by, %: sharing", "gate-only"]
    return _table(["experiment", "level", *names, "lead of sharing, first 5 epochs", "last 5"], rows)


def gate_values(kept: Kept) -> str:
    """The gates of sharing in the last epoch of each run, by seed; all begin at 0.5."""
    rows = []
    for one in kept.comparison.experiments:
        runs = [run for run in _arm(one, "shared").runs if run.m is not None and run.lam is not None]
        last = [(run.m[-1].mean(), run.lam[-1].mean(), run.lam[-1, 0], run.lam[-1, -1]) for run in runs]
        epochs = ", ".join(str(run.last_epoch) for run in runs)
        rows.append([kept.title(one), epochs, *(_by_seed(values, ".2f") for values in zip(*last, strict=True))])
    return _table(["sharing", "epoch", "mean σ(m)", "mean σ(λ)", "σ(λ) of step 1", "of step 5"], rows)


def controls(kept: Kept) -> str:
    """All arms of the experiment with three seeds."""
    one = _first(kept)
    rows = []
    for name in ("original", "shared", *CONTROLS):
        runs = _arm(one, name).runs
        star = "" if all(kept.label(run) in kept.finished for run in runs) else r" \*"
        over = [
            spread(a - b for a, b in zip(_test_values(runs), _test_values(_arm(one, other).runs), strict=False))
            for other in ("original", "gate-only")
            if other != name
        ]
        more = [words.signed_spread(found, "accuracy") for found in over]
        rows.append(
            [
                f"{NAMES.get(name, name)}{star}",
                f"{100 * float(np.mean([run.val[:10].mean() for run in runs])):.1f}",
                _by_seed(_first_at(run, AT / 100) for run in runs),
                ", ".join(map(_best, runs)),
                _by_seed(_test_values(runs), ".1f"),
                _test(one, name),
                *{"original": [words.ABSENT, *more], "gate-only": [*more, words.ABSENT]}.get(name, more),
            ]
        )
    names = ["mean of epochs 1 to 10", f"first epoch at {AT} %", "best validation (epoch)", "test by seed", "test"]
    return _table(["arm", *names, "test above the original's", "above gate-only's"], rows)


def again(kept: Kept) -> str:
    """What cells test that were trained twice with one seed and the same tasks, and how far the trainings are apart."""
    tested, differ, same = list[str](), list[float](), 0
    for folder in sorted(EARLIER.glob("*/seed-*"), key=lambda path: path.as_posix()):
        label = folder.relative_to(EARLIER).as_posix()
        before, after = read_run(RunFolder(folder)), read_run(RunFolder(PAPER / label))
        both = min(len(before.val), len(after.val))
        apart = 100 * float(np.abs(before.val[:both] - after.val[:both]).max())
        same += apart == 0
        differ += [apart] if apart else []
        if apart and before.test:
            one = kept.comparison.experiments[kept.comparison.runs[label].experiment]
            first, second = _test_values([before, after])
            tested.append(f"- {kept.title(one)}, {NAMES.get(after.arm, after.arm)}: {first:.1f} %, then {second:.1f} %")
    return "\n".join(tested) + (
        f"\n\nThese and {len(differ) - len(tested)} cells whose first training was not tested are {min(differ):.1f} to"
        f" {max(differ):.1f} points apart in some epoch. {same} others, of\nseeds 1 and 2, have the same validations in"
        " every common epoch: where the rounding is the same, the run is."
    )


def last_gates(kept: Kept) -> str:
    """Trainings of the experiment with three seeds in two groups by the gate of the last step."""
    low = [one for one in _trainings(kept) if one.gate < 0.1]
    high = [one for one in _trainings(kept) if one.gate >= 0.1]
    tests = [f"{min(one.test for one in group):.1f} to {max(one.test for one in group):.1f} %" for group in (low, high)]
    arms = [", ".join(dict.fromkeys(NAMES.get(one.arm, one.arm) for one in group)) for group in (low, high)]
    return (
        f"{len(low)} trainings of CUB 1-shot MAML have σ(λ) below 0.1 in the last step at epoch {EARLY} ({arms[0]}):\n"
        f"they test {tests[0]}. {len(high)} have {min(one.gate for one in high):.2f} or more ({arms[1]}): {tests[1]}."
    )


def state(kept: Kept) -> str:
    """What is finished, how far we are from the paper's table, and how wide intervals over tasks are."""
    tested = [run.test.ensemble.interval or 0 for one in kept.comparison.runs.values() if (run := one.run).test]
    missing = [
        value - 100 * found.test.value
        for (data, method, tasks), row in TABLE.items()
        for name, value in (("original", row.original), ("shared", row.shared))
        if (one := kept.experiment(data, 5, method, tasks)) and (found := one.main(name)) and found.test
    ]
    return (
        f"{kept.first_finished} of the first {kept.first} cells of the queue are finished; rows with \\* are not. Our"
        f" 5-shot tests are {min(missing):.1f} to {max(missing):.1f} points\nbelow the paper's. Over 600 test tasks the"
        f" interval of one training is ± {100 * min(tested):.1f} to {100 * max(tested):.1f} points."
    )


def short(kept: Kept) -> str:
    """The table of the first page."""
    rows = []
    for one in _at_the_normal_rate(kept, tasks=(5,)):
        at = _common_level(one)
        reached = [_reached(one, one.main(arm), at) for arm in ARMS]
        tested = [_test(one, arm) or words.ABSENT for arm in ARMS]
        rows.append([kept.title(one), f"{100 * one.levels[at].value:g} %", *reached, *tested])
    names = ["level", "epoch: original", "sharing", "gate-only", "test, %: original", "sharing", "gate-only"]
    return f"{_table(['', *names], rows)}\n\n{_sentences(kept)}"


def _sentences(kept: Kept) -> str:
    parts: dict[str, list[float]] = {"shared": [], "gate-only": []}
    for one in _at_the_normal_rate(kept, tasks=(5,)):
        at, original = _common_level(one), _arm(one, "original").runs
        for name, values in parts.items():
            found = one.main(name)
            for run, other in zip(found.runs if found else (), original, strict=False):
                own, its = _first_at(run, one.levels[at].value), _first_at(other, one.levels[at].value)
                values += [100 * own / its] if own and its else []
    shared, gate = (f"{min(values):.0f} to {max(values):.0f} %" for values in parts.values())
    return (
        f"Sharing reaches a level in {shared} of the original's epochs, and ends about level with it. `gate-only`, a\n"
        f"control that shares nothing and learns a step size for each inner step, needs {gate}. ± is over three seeds\n"
        "in the first row, else over 600 test tasks. Rows with \\* are not trained to their end yet:"
        f" {kept.first_finished} of the first\n{kept.first} cells are."
    )


# What tables are made of


def _first(kept: Kept) -> ExperimentResult:
    found = kept.experiment("cub", 1, "maml", 5)
    assert found
    return found


def _at_the_normal_rate(kept: Kept, tasks: tuple[int, ...] = (5, 1)) -> list[ExperimentResult]:
    return [one for one in kept.comparison.experiments if _key(one)[3] in tasks and _key(one)[4] == 0.1]


def _arm(one: ExperimentResult, name: str) -> ArmResult:
    found = one.main(name)
    assert found, name
    return found


def _trainings(kept: Kept) -> list[Training]:
    """The trainings of the first experiment that learn gates."""
    return [
        Training(name, float(run.lam[EARLY - 1, -1]), _test_values([run])[0])
        for name in MARKERS
        for run in _arm(_first(kept), name).runs
        if run.lam is not None
    ]


def _test_values(runs: list[Run]) -> list[float]:
    return [100 * (run.test.ensemble.accuracy or 0) for run in runs if run.test]


def _best(run: Run) -> str:
    return f"{100 * (run.best_val or 0):.1f} ({run.best_epoch})"


def _test(one: ExperimentResult | None, name: str) -> str:
    """62.9 ± 2.1; nothing where the arm was not trained."""
    found = one.main(name) if one else None
    if found is None or found.test is None:
        return ""
    return words.tested(found.test, "accuracy").removesuffix(" %")


def _common_level(one: ExperimentResult) -> int:
    """The place of the hardest level that sharing and the original both reach."""
    return max(at for at, reached in enumerate(_arm(one, "shared").reached) if reached.speed_up)


def _reached(one: ExperimentResult, arm: ArmResult | None, at: int) -> str:
    return _by_seed(_first_at(run, one.levels[at].value) for run in arm.runs) if arm else words.ABSENT


def _first_at(run: Run, level: float) -> int | None:
    hit = reached(run, level)
    return hit.epoch if hit else None


def _leads(runs: list[Run], others: list[Run], part: slice) -> list[float]:
    """The mean lead over some of the common epochs, in points, by seed."""
    pairs = zip(runs, others, strict=True)
    both = [
        (run.val[:common], other.val[:common]) for run, other in pairs if (common := min(len(run.val), len(other.val)))
    ]
    return [100 * float((own - its)[part].mean()) for own, its in both]


def _by_seed(values: Iterable[float | None], form: str = "d") -> str:
    return ", ".join(words.ABSENT if value is None else f"{value:{form}}" for value in values).replace("-", "−")


def _percent(found: Spread | None) -> str:
    """+49 ± 39, of a fraction."""
    if found is None:
        return ""
    text = words.percent_spread(found) if found.interval else words.percent(found.mean)
    return text.removesuffix(" %")


def _bold(text: str, star: str) -> str:
    return f", **{text}**{star}" if text else ""


def _table(names: list[str], rows: list[list[str]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    return text.replace(" ± ", UNBROKEN)


# Pages and figures


def pages(kept: Kept) -> dict[Path, str]:
    """What each page should read."""
    made = tables(kept)

    def filled(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n{made[match[1]]}\n<!-- end -->"

    pattern = re.compile(r"<!-- table ([\w-]+) -->\n.*?<!-- end -->", re.DOTALL)
    return {page: pattern.sub(filled, page.read_text(encoding="utf-8")) for page in PAGES}


def figures(kept: Kept) -> dict[str, bytes]:
    """SVG files by name: curves and gates of the paper's arms and the gate alone, and the gate of the last step."""
    runs = [run for one in kept.comparison.runs.values() if (run := one.run).arm in ARMS]
    chosen = compare_runs(runs)
    found = {**image_files("curves", curves(chosen)), **image_files("gates", gates(chosen))}
    kinds = {name: content for name, content in found.items() if name.endswith("-0.1.svg")}
    return {**{name.replace("-0.1", ""): content for name, content in kinds.items()}, "last-gate.svg": last_gate(kept)}


def last_gate(kept: Kept) -> bytes:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.5, 3.6), layout="constrained")
        axes = figure.add_subplot()
        for name, marker in MARKERS.items():
            dots = [(one.gate, one.test) for one in _trainings(kept) if one.arm == name]
            colour = _arm(_first(kept), name).variant.colour
            axes.plot(*zip(*dots, strict=True), marker, ms=8, alpha=0.75, color=colour, label=NAMES.get(name, name))
        axes.set_xlabel(f"σ(λ) of the last inner step after {EARLY} epochs", color=INK)
        axes.set_ylabel("test accuracy, %", color=INK)
        axes.set_title("CUB, 5-way 1-shot, MAML/5: a dot a training", fontsize=10, loc="left")
        axes.legend(fontsize=8)
        return image(figure, "svg")


if __name__ == "__main__":
    kept = Kept()
    for page, text in pages(kept).items():
        page.write_text(text, encoding="utf-8")
    for name, content in figures(kept).items():
        (ROOT / "docs" / name).write_bytes(content)
    for name, table in tables(kept).items():
        print(f"{name}:\n\n{table}\n")
