"""What was compared, in words, from the configurations alone."""

from __future__ import annotations

import json
from typing import Any

from gradshare.reports.runs import Run
from gradshare.reports.wording import count, listed

METHODS = {
    "maml": "MAML",
    "meta_sgd": "Meta-SGD",
    "metasgd": "Meta-SGD",
    "maml_plus_plus": "MAML++",
    "mamlpp": "MAML++",
    "first_order_maml": "first-order MAML",
    "fomaml": "first-order MAML",
    "anil": "ANIL",
}


def title(runs: list[Run]) -> str:
    """Gradient sharing: MAML on glyphs, 5-way 1-shot."""
    data = values(runs, "dataset")
    where = f" on {listed(data)}" if data else ""
    shape = _shape(runs)
    start = "Gradient sharing" if len(runs) > 1 else runs[0].name
    return f"{start}: {_methods(runs)}{where}{', ' + shape if shape else ''}"


def description(runs: list[Run]) -> str:
    """One plain paragraph: the method, the data, the sizes, the rates, and how to read the intervals."""
    return " ".join(sentence for sentence in (_subject(runs), _training(runs), _reading(runs)) if sentence)


def values(runs: list[Run], key: str) -> list[str]:
    """The distinct values of a configuration key, as text, in the order of the runs."""
    found = [run.config[key] for run in runs if run.config.get(key) is not None]
    return list(dict.fromkeys(value_text(value) for value in found))


def value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def differing_keys(runs: list[Run]) -> list[str]:
    """The configuration keys whose values are not the same in all runs."""
    return [key for key in all_keys(runs) if len({_cell(run, key) for run in runs}) > 1]


def all_keys(runs: list[Run]) -> list[str]:
    return list(dict.fromkeys(key for run in runs for key in run.config))


def _cell(run: Run, key: str) -> str | None:
    return json.dumps(run.config[key], sort_keys=True) if key in run.config else None


def _methods(runs: list[Run]) -> str:
    return listed([METHODS.get(method, method) for method in values(runs, "method")]) or "a run"


def _shape(runs: list[Run]) -> str:
    ways, shots = values(runs, "ways"), values(runs, "shots")
    return " ".join(
        part
        for part in (f"{listed(ways, 'or')}-way" if ways else "", f"{listed(shots, 'or')}-shot" if shots else "")
        if part
    )


def _subject(runs: list[Run]) -> str:
    data, shape, queries = values(runs, "dataset"), _shape(runs), values(runs, "queries")
    where = f" on {listed(data)}" if data else ""
    each = " a class" if values(runs, "ways") else ""
    asked = f", with {listed(queries, 'or')} query examples{each}" if queries else ""
    size = f" ({shape}{asked})" if shape else ""
    who = f"{count(len(runs), 'arm')} of " if len(runs) > 1 else f"One run ({runs[0].name}) of "
    return f"{who}{_methods(runs)}{where}{size}."


def _training(runs: list[Run]) -> str:
    """Each meta-iteration takes T = 5 tasks and K = 5 inner steps at rate 0.4; ..."""
    phrases = [
        ("tasks", "T = {} tasks a meta-iteration"),
        ("steps", "K = {} inner steps"),
        ("inner_lr", "inner rate {}"),
        ("outer_lr", "outer rate {} (Adam)"),
        ("iterations", "{} iterations an epoch"),
        ("epochs", "{} epochs"),
        ("seed", "seed {}"),
    ]
    told = [words.format(listed(values(runs, key), "or")) for key, words in phrases if values(runs, key)]
    return f"Training: {', '.join(told)}." if told else ""


def _reading(runs: list[Run]) -> str:
    tests = sorted({run.test_tasks for run in runs if run.test_tasks})
    tested = f" Test results are means over {listed([str(number) for number in tests], 'or')} tasks." if tests else ""
    return (
        "Batch norm, where the network has it, normalises with the statistics of the batch at hand (transductive), in"
        f" training, validation and test alike.{tested} The intervals are 95 % intervals over tasks, for one training"
        " run of each arm: they do not cover the variation between training runs."
    )
