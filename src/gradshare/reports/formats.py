"""A comparison as Markdown, LaTeX, CSV and JSON. Names that others chose stay text in each of them."""

from __future__ import annotations

import csv
import html
import io
import json
import math
import re
from collections.abc import Iterable
from dataclasses import is_dataclass
from typing import Any

import numpy as np

from gradshare.errors import printable
from gradshare.reports.comparison import ArmResult, Comparison, ExperimentResult, RunResult
from gradshare.reports.model import Run, sign, text_of
from gradshare.reports.statistics import Spread
from gradshare.reports.tables import Cell, Table, interval_notes
from gradshare.runs.folder import Score

Row = dict[str, Any]
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"[": "{[}", "*": "{*}"},  # after the end of a row LaTeX would read them as its option
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''"},
    **{"±": r"$\pm$", "\u2212": "$-$", "\u2013": "--", "×": r"$\times$", "σ": r"$\sigma$", "λ": r"$\lambda$"},
}
SPREADS = ("best_val", "best_epoch", "speed_up", "mean_difference", "area", "final_difference")


# Text


def markdown_page(tables: Iterable[Table]) -> str:
    """Every table with its heading and its note."""
    return "\n".join(f"## {_markdown_text(table.title)}\n\n{markdown(table)}\n{table.note}\n" for table in tables)


def markdown(table: Table) -> str:
    rule = [":---"] + ["---:"] * (len(table.columns) - 1)
    rows = [[_markdown_text(plain_text(cell)) for cell in row] for row in table.rows]
    top = [_markdown_text(name) for name in table.columns]
    return "".join(f"| {' | '.join(row)} |\n" for row in [top, rule, *rows])


def latex_page(tables: Iterable[Table]) -> str:
    """Every table as a tabular for booktabs."""
    preamble = "% needs \\usepackage{booktabs}\n"
    return preamble + "".join(f"\n% {_one_line(f'{one.title}. {one.note}')}\n{latex(one)}" for one in tables)


def latex(table: Table) -> str:
    rows = [[plain_text(cell) for cell in row] for row in table.rows]
    top, *body = [f"{' & '.join(map(latex_text, row))} \\\\\n" for row in [table.columns, *rows]]
    shape = "l" + "r" * (len(table.columns) - 1)
    return f"\\begin{{tabular}}{{{shape}}}\n\\toprule\n{top}\\midrule\n{''.join(body)}\\bottomrule\n\\end{{tabular}}\n"


def latex_text(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in _one_line(text))


def plain_text(cell: Cell) -> str:
    """A cell in one line: what is beside it, and its marks, in parentheses."""
    added = ", ".join(filter(None, (cell.beside, *cell.marks)))
    return f"{cell.text} ({added})" if added else cell.text


def _one_line(text: str) -> str:
    return printable(re.sub(r"[\x00-\x1f\x7f\s]+", " ", text))


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\|`*\[\]])", r"\\\1", html.escape(_one_line(text), quote=False))


# CSV: numbers without units; an absent number is an empty cell


def csv_runs(comparison: Comparison) -> str:
    """A row for each run."""
    return _csv([_run_row(one, comparison.experiments[one.experiment]) for one in comparison.runs.values()])


def csv_experiments(comparison: Comparison) -> str:
    """A row for each arm of an experiment: means and 95 % intervals over its seeds, and the paper's figures."""
    return _csv([_arm_row(one, arm) for one in comparison.experiments for arm in one.arms])


def _run_row(one: RunResult, experiment: ExperimentResult) -> Row:
    values = _run_json(one)
    test = values["test"] or {"best": {}, "ensemble": {}}
    own = ("finished", "epochs", "best_epoch", "best_val", "best_val_interval", "train_seconds", "seconds_per_epoch")
    compared = ("speed_up", "mean_difference", "area", "final_epoch", "final_difference", "first_epoch_apart")
    counts = ("common_epochs", "epochs_apart_better", "epochs_apart_worse", "verdict")
    return {
        "name": one.run.name,
        **_setting(experiment),
        **{key: values[key] for key in ("arm", "seed", "state", "reason", "skipped", "saturated", "damage", *own)},
        "norm_statistics": one.run.norm_statistics,
        **{
            f"test_{kind}{end}": test[kind].get(key)
            for kind in ("best", "ensemble")
            for key, end in (("value", ""), ("interval", "_interval"))
        },
        **{key: getattr(one.against_original, key, None) for key in compared + counts},
    }


def _arm_row(experiment: ExperimentResult, one: ArmResult) -> Row:
    test, paper = one.test, experiment.paper
    printed = paper.of(one.variant.name) if paper else None
    spreads: dict[str, Spread | None] = {key: getattr(one, key) for key in SPREADS}
    original, control = one.against_original, one.against_best_control
    return {
        **_setting(experiment),
        "arm": one.variant.name,
        "runs": len(one.runs),
        "test": test and test.value,
        "test_interval": test and test.interval,
        "test_over": test and test.over,
        **{
            f"{key}{end}": found and getattr(found, part)
            for key, found in spreads.items()
            for part, end in (("mean", ""), ("interval", "_interval"))
        },
        "paper_test": printed and printed.value,
        "paper_test_interval": printed and printed.interval,
        "paper_speed_up": paper.speed_up if paper and one.variant.name == "shared" else None,
        "departures": "; ".join(experiment.departures),
        "verdict": original and original.verdict,
        "best_control": control and control.reference,
        "best_control_difference": control and control.difference.mean,
        "best_control_verdict": control and control.verdict,
        "share_of_gain": one.share_of_gain,
    }


def _setting(experiment: ExperimentResult) -> Row:
    return {key: None if value is None else text_of(value) for key, value in experiment.setting._asdict().items()}


def _csv(rows: list[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _harmless(_json(value)) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _harmless(value: Any) -> Any:
    """Text that a spreadsheet would compute, because it begins as a formula, gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


# JSON


def summary(comparison: Comparison) -> Row:
    """What summary.json holds: `arms` has every run by its name, `repeats` of an experiment every arm over its seeds.

    Accuracies are from 0 to 1, differences in accuracy points (or units of the loss), speed-ups are fractions.
    """
    return _json(
        {
            "version": 3,
            "measure": comparison.measure,
            "higher_is_better": sign(comparison.measure) > 0,
            "difference_unit": "accuracy points" if comparison.measure == "accuracy" else "loss",
            "note": " ".join(interval_notes(comparison)),
            "arms": {name: _run_json(one) for name, one in comparison.runs.items()},
            "experiments": [_experiment_json(one) for one in comparison.experiments],
        }
    )


def summary_text(comparison: Comparison) -> str:
    return json.dumps(summary(comparison), indent=2, allow_nan=False) + "\n"


RUN = (
    *("arm", "reason", "skipped", "diverged_tasks", "saturated", "damage", "last_epoch", "best_epoch", "best_val"),
    *("norm_statistics", "best_val_interval", "train_seconds", "seconds_per_epoch", "final_mean_m", "final_mean_lam"),
)


def _run_json(one: RunResult) -> Row:
    run = one.run
    epochs, ways = run.options.get("epochs"), run.options.get("ways")
    return {
        "experiment": one.experiment,
        "seed": run.options.get("seed"),
        "finished": run.status == "done",
        "state": run.status,
        **{key: getattr(run, key) for key in RUN},
        "epochs": len(run.epochs),
        "epochs_without_value": int((~np.isfinite(run.val)).sum()),
        "planned_epochs": epochs if type(epochs) is int else None,
        "chance": 1 / ways if run.measure == "accuracy" and type(ways) is int and ways > 0 else None,
        "test": _test_json(run),
        **{key: getattr(one, key) for key in ("against_original", "against_shared", "gains")},
    }


def _experiment_json(one: ExperimentResult) -> Row:
    return {
        "title": one.setting.title,
        "row": one.setting.row,
        "setting": one.setting._asdict(),
        "thresholds": one.levels,
        "paper": one.paper,
        "departures": one.departures,
        "repeats": [_arm_json(arm) for arm in one.arms],
    }


def _arm_json(one: ArmResult) -> Row:
    keys = (*SPREADS, "test", "against_original", "against_best_control")
    return {
        "name": one.name,
        "arm": one.variant.name,
        "runs": [run.name for run in one.runs],
        "counted": [run.name for run in one.counted],
        "done": one.done,
        **{key: getattr(one, key) for key in keys},
        "reached": one.reached,
        "share_of_gain": one.share_of_gain,
    }


def _test_json(run: Run) -> Row | None:
    if run.test is None:
        return None
    return {"tasks": run.test.tasks, "best": _score(run, run.test.best), "ensemble": _score(run, run.test.ensemble)}


def _score(run: Run, score: Score) -> Row:
    return {"value": run.measured(score), "interval": score.interval, "epochs": score.epochs}


def _json(value: Any) -> Any:
    """Plain values, without NaN and infinity, which become null, and without the noise of the last bits."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {key: _json(item) for key, item in value.items()}
    return [_json(item) for item in value] if isinstance(value, list | tuple) else value
