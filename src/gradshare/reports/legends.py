"""The legends of the figures, in the paper's words."""

from __future__ import annotations

import math

from gradshare.reports.against import best_index, spread
from gradshare.reports.experiments import Repeats
from gradshare.reports.runs import Run, TestResult
from gradshare.reports.wording import number

LONGEST_NAME = 32


def legend_label(run: Run, name: str) -> str:
    """As in the paper's legends: shared: MaxVal 67.1% Ep 8 Test 66.2±1.1%."""
    best, name = best_index(run), shortened(name) + ("" if run.state == "done" else f" ({run.state})")
    if best is None:
        return f"{name}: no value yet"
    return f"{name}: {_extreme(run)} {_short(run, run.val[best])} Ep {run.epochs[best]}{_test_label(run)}"


def seeds_label(repeats: Repeats) -> str:
    """The same for several seeds: means, and the test's interval over seeds."""
    runs = repeats.done
    best = [(run, best_index(run)) for run in runs]
    known = [(run.val[at], run.epochs[at]) for run, at in best if at is not None]
    undone = sum(run.state != "done" for run in repeats.runs)
    name = f"{shortened(repeats.name)}, {len(repeats.runs)} seeds" + (f" ({undone} not done)" if undone else "")
    if not known:
        return f"{name}: no value yet"
    value, epoch = (float(sum(column)) / len(known) for column in zip(*known, strict=True))
    tests = spread([_tested(run) for run in runs])
    told = ""
    if tests:
        told = f" Test {_short(runs[0], tests['mean'])}"
        if tests["interval"] is not None and runs[0].measure == "accuracy":
            told = f" Test {100 * tests['mean']:.1f}±{100 * tests['interval']:.1f}%"
    return f"{name}: {_extreme(runs[0])} {_short(runs[0], value)} Ep {number(epoch)}{told}"


def _extreme(run: Run) -> str:
    return "MaxVal" if run.measure == "accuracy" else "MinVal"


def _tested(run: Run) -> float | None:
    result = run.test_ensemble or run.test_best
    value = math.nan if result is None else result.accuracy if run.measure == "accuracy" else result.loss
    return value if math.isfinite(value) else None


def _test_label(run: Run) -> str:
    result: TestResult | None = run.test_ensemble or run.test_best
    value = _tested(run)
    if result is None or value is None:
        return ""
    if not math.isfinite(result.interval):
        return f" Test {_short(run, value)}"
    if run.measure == "loss":
        return f" Test {value:.3g}±{result.interval:.2g}"
    return f" Test {100 * value:.1f}±{100 * result.interval:.1f}%"


def _short(run: Run, value: float) -> str:
    return f"{100 * value:.1f}%" if run.measure == "accuracy" else f"{value:.3g}"


def shortened(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME // 2]}…{name[-LONGEST_NAME // 2 :]}"


def visible(label: str) -> str:
    """A label for a legend: matplotlib leaves out those that begin with an underscore, and SVG allows no controls."""
    text = "".join(character if character.isprintable() else " " for character in label)
    return f" {text}" if text.startswith("_") else text
