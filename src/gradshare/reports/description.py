"""What was compared, in words and as commands, from the configurations alone."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields
from typing import Any, get_args

from gradshare.experiments.presets import described
from gradshare.reports.experiments import OF_THE_MACHINE, group, value_text
from gradshare.reports.paper import experiment_of
from gradshare.reports.runs import Run
from gradshare.reports.wording import METHODS, count, listed
from gradshare.runs.config import Arm, Method, RunConfig


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


def training_command(run: Run) -> str | None:
    """`gradshare train ...` with every option that is not a default; None for a run that a Python program trained.

    Device, engine, threads and the batch of an evaluation are left to the machine.
    """
    known = {field.name: field.default for field in fields(RunConfig)}
    choices = [("method", get_args(Method)), ("arm", get_args(Arm))]
    if not set(run.config) <= {*known, "version"} or any(run.config.get(key) not in words for key, words in choices):
        return None
    one = experiment_of(run.config)
    preset = {key: value for key, (value, _) in described(one.name).items()} if one else {}
    if one and one.arm == "half-rate":
        preset["inner_lr"] = preset["inner_lr"] / 2
    behind = {**known, **preset}
    options = {key: value for key, value in run.config.items() if key in known and value not in (behind[key], "auto")}
    if run.arm == "half-rate" and not one:
        options["arm"] = "original"  # with its own rate: `train` has no half-rate
    words = ["gradshare", "train", *(["--preset", one.name] if one else [])]
    for key, value in options.items():
        if key not in OF_THE_MACHINE and not (key == "precision" and value == "float32"):
            words += _option(key, value)
    return shlex.join([*words, "--out", str(run.folder)])


def values(runs: list[Run], key: str) -> list[str]:
    """The distinct values of a configuration key, as text, in the order of the runs."""
    found = [run.config[key] for run in runs if run.config.get(key) is not None]
    return list(dict.fromkeys(value_text(value) for value in found))


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
    return f"{_who(runs)} of {_methods(runs)}{where}{size}."


def _who(runs: list[Run]) -> str:
    experiments = group(runs)
    if len(runs) == 1:
        return f"One run ({runs[0].name})"
    if len(experiments) == 1 and len(experiments[0].repeats) == len(runs):
        return count(len(runs), "arm")
    return f"{count(len(runs), 'run')} in {count(len(experiments), 'experiment')}"


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
    told = [
        words.format(listed(sorted(found, key=_number), "or")) for key, words in phrases if (found := values(runs, key))
    ]
    return f"Training: {', '.join(told)}." if told else ""


def _number(text: str) -> float:
    """What a text says as a number, to sort by; 0 for one that is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0


def _reading(runs: list[Run]) -> str:
    tests = sorted({run.test_tasks for run in runs if run.test_tasks})
    tested = f" Test results are means over {listed([str(number) for number in tests], 'or')} tasks." if tests else ""
    several = any(len(repeats.runs) > 1 for one in group(runs) for repeats in one.repeats)
    trained = "of one training run" if several else "for one training run of each arm"
    seeds = " Beside a mean of several seeds ± is a 95 % interval over seeds." if several else ""
    return (
        "Batch norm, where the network has it, normalises with the statistics of the batch at hand (transductive), in"
        f" training, validation and test alike.{tested} The intervals are 95 % intervals over tasks, {trained}:"
        f" they do not cover the variation between training runs.{seeds}"
    )


def _option(key: str, value: Any) -> list[str]:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [] if value is None else [f"--{name}", str(value)]
