"""Run values -> one JSON-serialisable comparison: everything the tables, the findings and the page say."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradshare.errors import UserError
from gradshare.reports.against import (
    against,
    best_index,
    choose_thresholds,
    direction,
    gains,
    plain,
    reached,
    seconds_until,
    spread,
)
from gradshare.reports.experiments import Experiment, Repeats, group
from gradshare.reports.paper import departures, paper_cell
from gradshare.reports.runs import Floats, Run, TestResult, common_measure
from gradshare.reports.wording import is_control

Comparison = dict[str, Any]

NOTE = (
    "The interval of a run is a 95 % interval over tasks: it does not cover how much another training run, with"
    " another seed, would differ; and overlapping bands do not show that two arms are equal."
)
SEEDS_NOTE = (
    " Where several seeds were trained, ± beside their mean is a 95 % interval over seeds (Student's t), wide for few."
)


def compare_runs(runs: list[Run]) -> Comparison:
    """Group the runs into experiments; compare every arm with its original, and with sharing where it is a third.

    Accuracies and losses are as in the metrics (accuracies from 0 to 1). `mean_difference` and `final_difference` are
    arm minus reference, in accuracy points (or in units of the loss), `area` is their sum over the common epochs;
    `speed_up` is a fraction.
    """
    measure = common_measure(runs)
    if len({run.name for run in runs}) < len(runs):
        raise UserError(f"two runs have the same name: {', '.join(run.name for run in runs)}")
    experiments = group(runs)
    arms = {run.name: _run(run, one, place) for place, one in enumerate(experiments) for run in one.runs}
    return {
        "version": 2,
        "measure": measure,
        "higher_is_better": direction(measure) > 0,
        "difference_unit": "accuracy points" if measure == "accuracy" else "loss",
        "note": NOTE + (SEEDS_NOTE if any(len(arm.runs) > 1 for one in experiments for arm in one.repeats) else ""),
        "arms": {run.name: arms[run.name] for run in runs},
        "experiments": [_experiment(one, arms) for one in experiments],
    }


def _experiment(one: Experiment, arms: dict[str, Any]) -> dict[str, Any]:
    thresholds = [
        {"value": value, "reached": {run.name: reached(run, value) for run in one.runs}}
        for value in choose_thresholds(one.runs)
    ]
    papers = next((run for run in one.runs if run.arm in ("original", "shared")), one.runs[0])
    return {
        "title": one.setting.title,
        "row": one.setting.row,
        "setting": one.setting._asdict(),
        "thresholds": thresholds,
        "paper": paper_cell(papers.config),
        "departures": departures(papers.config),
        "repeats": [_repeats(repeats, arms, thresholds) for repeats in one.repeats],
    }


def main_arms(experiment: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Each arm in the configuration to tell of where there is room for one: that with the most seeds done."""
    found: dict[str, dict[str, Any]] = {}
    for one in experiment["repeats"]:
        if one["arm"] not in found or one["done"] > found[one["arm"]]["done"]:
            found[one["arm"]] = one
    return found


def _repeats(repeats: Repeats, arms: dict[str, Any], thresholds: list[dict[str, Any]]) -> dict[str, Any]:
    """An arm over its seeds: those that are done, and against originals that trained as long, where there are any.

    A speed-up is only told between runs that trained equally long.
    """
    names = [run.name for run in repeats.done]
    told = [arms[name] for name in names]
    versus = [arm["against_original"] or {} for arm in told]
    equal = [one for one in versus if one.get("equally_long")]
    compared = ("mean_difference", "area", "final_difference")
    return {
        "name": repeats.name,
        "arm": repeats.arm,
        "runs": [run.name for run in repeats.runs],
        "counted": names,
        "done": sum(run.state == "done" for run in repeats.runs),
        "best_val": spread([arm["best_val"] for arm in told]),
        "best_epoch": spread([arm["best_epoch"] for arm in told]),
        "test": _tested(told),
        "speed_up": spread([each["speed_up"] for each in equal]),
        **{key: spread([each.get(key) for each in equal or versus]) for key in compared},
        "reached": [_reached(threshold["reached"], names, arms) for threshold in thresholds],
    }


def _reached(hits: dict[str, Any], names: list[str], arms: dict[str, Any]) -> dict[str, Any]:
    """When a value was reached, over seeds, and how much sooner than by each run's original: (theirs - own) / own."""
    versus = {name: arms[name]["against_original"] for name in names}
    others = {name: hits[one["reference"]] for name, one in versus.items() if one}
    both = [(hits[name], others[name]) for name in names if hits[name] and others.get(name)]
    sooner = {
        key: spread([(other[key] - own[key]) / own[key] for own, other in both if own[key] and other[key]])
        for key in ("epoch", "seconds")
    }
    own = {key: spread([hits[name] and hits[name][key] for name in names]) for key in ("epoch", "seconds")}
    return {**own, "speed_up": sooner["epoch"], "speed_up_seconds": sooner["seconds"]}


def _tested(arms: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The test of one run with its interval over tasks, or the mean of several with theirs over seeds."""
    results = [result_of(arm) for arm in arms]
    values = spread([result.get("value") for result in results])
    if values is None:
        return None
    over_tasks = next(result["interval"] for result in results if result.get("value") is not None)
    one = values["seeds"] == 1
    return {
        "value": values["mean"],
        "interval": over_tasks if one else values["interval"],
        "over": "tasks" if one else "seeds",
        "seeds": values["seeds"],
    }


def result_of(arm: dict[str, Any]) -> dict[str, Any]:
    """The test of a run: of the ensemble where there is one, else of the best epoch; {} if it was not tested."""
    test = arm["test"] or {}
    return test.get("ensemble") or test.get("best") or {}


def _run(run: Run, experiment: Experiment, place: int) -> dict[str, Any]:
    at, planned = best_index(run), run.config.get("epochs")
    last = int(run.epochs[-1]) if len(run.epochs) else None
    return {
        "arm": run.arm,
        "experiment": place,
        "seed": run.config.get("seed"),
        "finished": run.finished,
        "state": run.state,
        "reason": run.reason,
        "skipped": run.skipped,
        "diverged_tasks": run.diverged_tasks,
        "saturated": run.saturated,
        "damage": run.damage,
        "epochs": len(run.epochs),
        "epochs_without_value": int((~np.isfinite(run.val)).sum()),
        "planned_epochs": planned if isinstance(planned, int) else None,
        "last_epoch": last,
        "best_epoch": None if at is None else int(run.epochs[at]),
        "best_val": None if at is None else plain(run.val[at]),
        "best_val_interval": None if at is None else plain(run.interval[at]),
        "chance": _chance(run),
        "test": _test(run),
        "train_seconds": None if last is None else plain(seconds_until(run, last)),
        "seconds_per_epoch": plain(run.train_seconds.mean()) if len(run.train_seconds) else None,
        "final_mean_m": _final_mean(run.m),
        "final_mean_lam": _final_mean(run.lam),
        **_references(run, experiment),
    }


def _references(run: Run, experiment: Experiment) -> dict[str, Any]:
    original = experiment.partner(run, "original") if run.arm != "original" else None
    sharing = experiment.partner(run, "shared") if run.arm not in ("original", "shared") else None
    return {
        "against_original": against(run, original) if original else None,
        "against_shared": against(run, sharing) if sharing else None,
        "gains": gains(run, sharing, original) if original and sharing and is_control(run.arm) else None,
    }


def _chance(run: Run) -> float | None:
    ways = run.config.get("ways")
    return plain(1 / ways) if run.measure == "accuracy" and isinstance(ways, int) and ways > 0 else None


def _test(run: Run) -> dict[str, Any] | None:
    if run.test_best is None and run.test_ensemble is None:
        return None
    best, ensemble = _test_result(run.test_best, run), _test_result(run.test_ensemble, run)
    return {"tasks": run.test_tasks, "best": best, "ensemble": ensemble}


def _test_result(result: TestResult | None, run: Run) -> dict[str, Any] | None:
    if result is None:
        return None
    value = result.accuracy if run.measure == "accuracy" else result.loss
    return {"value": plain(value), "interval": plain(result.interval), "epochs": list(result.epochs)}


def _final_mean(steps: Floats | None) -> float | None:
    return None if steps is None else plain(steps[-1].mean())
