"""Tables as Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import html
import io
import re
from collections.abc import Iterable
from typing import Any

from gradshare.errors import printable
from gradshare.reports.compare import Comparison
from gradshare.reports.experiments import value_text
from gradshare.reports.run_tables import Cell, Table, runs_table

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"[": "{[}", "*": "{*}"},  # after the end of a row LaTeX would take them for an option of it
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''"},
    **{"±": r"$\pm$", "\u2212": "$-$", "\u2013": "--", "×": r"$\times$", "σ": r"$\sigma$", "λ": r"$\lambda$"},
}


def markdown_table(comparison: Comparison) -> str:
    """Every run."""
    return markdown(runs_table(comparison))


def markdown_page(tables: Iterable[Table]) -> str:
    """Every table with its heading and its note."""
    return "\n".join(f"## {_markdown_cell(table.title)}\n\n{markdown(table)}\n{table.note}\n" for table in tables)


def markdown(table: Table) -> str:
    rule = [":---"] + ["---:"] * (len(table.columns) - 1)
    rows = [[_markdown_cell(_beside(cell)) for cell in row] for row in table.rows]
    top = [_markdown_cell(name) for name in table.columns]
    return "".join(f"| {' | '.join(row)} |\n" for row in [top, rule, *rows])


def latex_page(tables: Iterable[Table]) -> str:
    """Every table as a tabular for booktabs; the paper's figures stand in parentheses."""
    preamble = "% needs \\usepackage{booktabs}\n"
    return preamble + "".join(f"\n% {_one_line(table.title)}\n{latex(table)}" for table in tables)


def latex(table: Table) -> str:
    rows = [[_beside(cell) for cell in row] for row in table.rows]
    top, *body = [f"{' & '.join(map(latex_text, row))} \\\\\n" for row in [table.columns, *rows]]
    shape = "l" + "r" * (len(table.columns) - 1)
    return f"\\begin{{tabular}}{{{shape}}}\n\\toprule\n{top}\\midrule\n{''.join(body)}\\bottomrule\n\\end{{tabular}}\n"


def latex_text(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in _one_line(text))


def csv_table(comparison: Comparison) -> str:
    """A row a run, a column a number, unrounded and without units; an absent number is an empty cell."""
    experiments = comparison["experiments"]
    return _csv([_run_row(name, arm, experiments) for name, arm in comparison["arms"].items()])


def csv_experiments(comparison: Comparison) -> str:
    """A row an arm of an experiment: means and 95 % intervals over its seeds, and the paper's figures."""
    rows = [_repeats_row(experiment, one) for experiment in comparison["experiments"] for one in experiment["repeats"]]
    return _csv(rows)


def _beside(cell: Cell) -> str:
    return f"{cell.text} ({cell.beside})" if cell.beside else cell.text


def _one_line(text: str) -> str:
    return printable(re.sub(r"[\x00-\x1f\x7f\s]+", " ", text))


def _markdown_cell(text: str) -> str:
    return re.sub(r"([\\|`*\[\]])", r"\\\1", html.escape(_one_line(text), quote=False))


def _harmless(value: Any) -> Any:
    """Text that a spreadsheet would compute, for it begins as a formula does, gets an apostrophe in front."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _csv(rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _harmless(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _setting(experiment: dict[str, Any]) -> dict[str, Any]:
    values = experiment["setting"].items()
    return {key: None if value is None else value_text(value) for key, value in values}


def _run_row(name: str, arm: dict[str, Any], experiments: list[dict[str, Any]]) -> dict[str, Any]:
    versus, test = arm["against_original"] or {}, arm["test"] or {}
    tests = {kind: test.get(kind) or {} for kind in ("best", "ensemble")}
    ends = (("value", ""), ("interval", "_interval"))
    own = ("finished", "epochs", "best_epoch", "best_val", "best_val_interval", "train_seconds", "seconds_per_epoch")
    compared = ("speed_up", "mean_difference", "area", "final_epoch", "final_difference", "first_epoch_apart")
    counts = ("common_epochs", "epochs_apart_better", "epochs_apart_worse")
    return {
        "name": name,
        **_setting(experiments[arm["experiment"]]),
        **{key: arm[key] for key in ("arm", "seed", "state", "reason", "skipped", "saturated", "damage")},
        **{key: arm[key] for key in own},
        **{f"test_{kind}{end}": tests[kind].get(key) for kind in tests for key, end in ends},
        **{key: versus.get(key) for key in compared + counts},
    }


def _repeats_row(experiment: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    spreads = ("best_val", "best_epoch", "speed_up", "mean_difference", "area", "final_difference")
    test, paper = one["test"] or {}, experiment["paper"] or {}
    told = paper.get(one["arm"]) or {}
    return {
        **_setting(experiment),
        "arm": one["arm"],
        "runs": len(one["runs"]),
        **{f"test{end}": test.get(key) for key, end in (("value", ""), ("interval", "_interval"), ("over", "_over"))},
        **{
            f"{key}{end}": (one[key] or {}).get(part)
            for key in spreads
            for part, end in (("mean", ""), ("interval", "_interval"))
        },
        **{f"paper_test{end}": told.get(key) for key, end in (("value", ""), ("interval", "_interval"))},
        "paper_speed_up": paper.get("speed_up") if one["arm"] == "shared" else None,
        "departures": "; ".join(experiment["departures"]),
    }
