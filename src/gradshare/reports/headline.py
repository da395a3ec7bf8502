"""The result on the first screen: a sentence or two, and a few numbers. All computed, none presumed."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

from gradshare.method.variants import CONTROLS
from gradshare.reports.accounting import part
from gradshare.reports.compare import Comparison, main_arms, result_of
from gradshare.reports.wording import (
    ARMS,
    Measure,
    count,
    level,
    listed,
    percent,
    round_level,
    signed,
    signed_spread,
    verdict,
)


class KeyFigure(NamedTuple):
    value: str
    label: str
    detail: str = ""


class Pair(NamedTuple):
    """Sharing and the original in one experiment, over the seeds that both have."""

    experiment: dict[str, Any]
    original: dict[str, Any]
    shared: dict[str, Any]
    verdict: str

    @property
    def done(self) -> bool:
        return bool(self.original["done"] and self.shared["done"])


def pairs(comparison: Comparison) -> list[Pair]:
    """The experiments in which sharing can be compared with the original."""
    found = []
    for experiment in comparison["experiments"]:
        arms = main_arms(experiment)
        if "original" in arms and "shared" in arms and arms["shared"]["mean_difference"]:
            verdicts = _verdicts(arms["shared"], comparison)
            told = verdicts[0] if len(set(verdicts)) == 1 else "level"
            found.append(Pair(experiment, arms["original"], arms["shared"], told))
    return found


def headline(comparison: Comparison) -> str:
    """What came out, in a sentence or two."""
    found = pairs(comparison)
    if len(found) > 1:
        return _several(found, comparison)
    return _one(found[0], comparison) if found else _unpaired(comparison)


def verdict_text(experiment: dict[str, Any], comparison: Comparison) -> str:
    """ahead, +8.1 points; "" where sharing has nothing to be compared with."""
    for pair in pairs(comparison):
        if pair.experiment is experiment:
            unit = " points" if comparison["measure"] == "accuracy" else ""
            lead = signed(pair.shared["mean_difference"]["mean"], comparison["measure"])
            return f"{_both_ways(pair, comparison) or pair.verdict}, {lead}{unit}"
    return ""


def unfinished(comparison: Comparison) -> str:
    """How many runs are not done, and why; "" where all are."""
    states = [arm["state"] for arm in comparison["arms"].values() if arm["state"] != "done"]
    kinds = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    return f"Not done: {listed(kinds)}, of {count(len(comparison['arms']), 'run')}." if kinds else ""


def key_figures(comparison: Comparison) -> list[KeyFigure]:
    found, measure = pairs(comparison), comparison["measure"]
    if not found:
        return _own_figures(comparison)
    if len(found) == 1:
        return [figure for figure in _pair_figures(found[0], measure) if figure]
    ahead = [pair for pair in found if pair.verdict == "ahead"]
    speeds = [pair.shared["speed_up"]["mean"] for pair in found if pair.shared["speed_up"]]
    leads = [pair.shared["mean_difference"]["mean"] for pair in found]
    unit = " points" if measure == "accuracy" else ""
    return [
        KeyFigure(f"{len(ahead)} of {len(found)}", "experiments with sharing ahead", "validation curves, bands apart"),
        KeyFigure(signed(median(leads), measure) + unit, "mean lead, the median experiment", _range(leads, measure)),
        _speed_figure(speeds, len(found)),
    ]


def _speed_figure(speeds: list[float], pairs: int) -> KeyFigure:
    """By the paper's formula, which says something where both arms trained equally long."""
    if len(speeds) == 1:
        return KeyFigure(
            percent(speeds[0]), f"speed-up, in 1 of {pairs} experiments", "the one equally long; by the paper's formula"
        )
    ends = f"by the paper's formula; {percent(min(speeds))} to {percent(max(speeds))}" if speeds else ""
    return KeyFigure(percent(median(speeds)) if speeds else "–", "speed-up, the median experiment", ends)


def _both_ways(pair: Pair, comparison: Comparison) -> str:
    """For a pair that is ahead in some epochs and behind in others, bands apart; "" otherwise."""
    versus = [comparison["arms"][name]["against_original"] for name in pair.shared["counted"]]
    crossed = all(one and one["epochs_apart_better"] and one["epochs_apart_worse"] for one in versus)
    return "ahead in some epochs, behind in others" if versus and crossed else ""


def _verdicts(repeats: dict[str, Any], comparison: Comparison) -> list[str]:
    versus = [comparison["arms"][name]["against_original"] for name in repeats["counted"]]
    return [verdict(one, comparison["measure"]) for one in versus if one and one["common_epochs"]]


def _one(pair: Pair, comparison: Comparison) -> str:
    measure, alone = comparison["measure"], len(comparison["experiments"]) == 1
    row = pair.experiment["row"].partition("/")[0] if alone else pair.experiment["title"]
    words = {
        "ahead": f"{row} is ahead of the original",
        "behind": f"{row} is behind the original",
        "level": f"{row} is neither clearly ahead of the original nor clearly behind it",
    }
    start = "With sharing" if pair.done else "So far, with sharing"
    lead = signed_spread(pair.shared["mean_difference"], measure)
    unit = "points of validation accuracy" if measure == "accuracy" else "in the validation loss"
    seeds = len(pair.shared["counted"])
    over = f" over {count(seeds, 'seed')}{_open(pair.shared['mean_difference'])}" if seeds > 1 else ""
    return f"{start}, {words[pair.verdict]}: {lead} {unit} on average{over}. {_controls(pair, comparison)}".strip()


def _open(lead: dict[str, Any]) -> str:
    """Whether the interval over seeds leaves it open which of the two is ahead."""
    return (
        ", which the interval over seeds cannot tell from none" if abs(lead["mean"]) <= (lead["interval"] or 0) else ""
    )


def _controls(pair: Pair, comparison: Comparison) -> str:
    """The control that has the largest part of the gain."""
    if pair.verdict != "ahead":
        return ""
    best: tuple[float, str] | None = None
    for repeats in pair.experiment["repeats"]:
        gains = [comparison["arms"][name]["gains"] for name in repeats["counted"]]
        known = [one for one in gains if one and one["common_epochs"] and one["gain_of_sharing"] > 0]
        if known:
            share = sum(one["gain"] for one in known) / sum(one["gain_of_sharing"] for one in known)
            best = max(best or (share, repeats["arm"]), (share, repeats["arm"]))
    if best is None:
        return "No control was trained beside it, so what the gain comes from is open."
    source = ARMS[best[1]].source if best[1] in ARMS else f"what {best[1]} keeps"
    told = part(best[0])
    return f"{told[0].upper()}{told[1:]} of that gain is there with {source} alone ({best[1]})."


def _several(found: list[Pair], comparison: Comparison) -> str:
    measure = comparison["measure"]
    curves = {
        "ahead": "ahead of the original's",
        "behind": "behind the original's",
        "both": "ahead in some epochs and behind in others",
        "level": "neither ahead nor behind",
    }
    told = _counted(["both" if _both_ways(pair, comparison) else pair.verdict for pair in found], curves)
    tests = [_apart(pair, measure) for pair in found if pair.original["test"] and pair.shared["test"]]
    tested = _counted(tests, {1: "better with intervals apart", -1: "worse with intervals apart", 0: "not apart"})
    at_test = f" At test it is {tested}." if tests else ""
    start = "With sharing" if all(pair.done for pair in found) else "So far, with sharing"
    return f"{start}, the validation curve is {told}.{at_test} {_controlled(found)}"


def _controlled(found: list[Pair]) -> str:
    """In how many experiments there are controls, without which it is open what a gain comes from."""
    with_controls = sum(any(one["arm"] in CONTROLS for one in pair.experiment["repeats"]) for pair in found)
    if not with_controls:
        return "No controls were trained, so what a gain comes from is open."
    return f"Controls were trained in {with_controls} of {len(found)} experiments: see there what a gain comes from."


def _counted(kinds: list[Any], words: dict[Any, str]) -> str:
    """ahead in 2 of 4 experiments, behind in 1 and neither in 1."""
    present = [kind for kind in words if kind in kinds]
    numbers = [str(kinds.count(kind)) for kind in present]
    if present:
        first = f"all {len(kinds)}" if len(present) == 1 else f"{numbers[0]} of {len(kinds)}"
        numbers[0] = f"{first} experiments"
    return listed([f"{words[kind]} in {number}" for kind, number in zip(present, numbers, strict=True)])


def _apart(pair: Pair, measure: Measure) -> int:
    """1 where the test with sharing is better and the intervals do not overlap, -1 where it is worse, 0 otherwise."""
    own, other = pair.shared["test"], pair.original["test"]
    reach = (own["interval"] or 0) + (other["interval"] or 0)
    difference = own["value"] - other["value"]
    return 0 if abs(difference) <= reach else 1 if (difference > 0) == (measure == "accuracy") else -1


def _unpaired(comparison: Comparison) -> str:
    """Runs without a pair to compare: the best of them."""
    names = [name for name, arm in comparison["arms"].items() if arm["best_val"] is not None]
    if not names:
        return "There is no validation value yet."
    sign = 1 if comparison["higher_is_better"] else -1
    best = max(names, key=lambda name: sign * comparison["arms"][name]["best_val"])
    arm, measure = comparison["arms"][best], comparison["measure"]
    test = result_of(arm)
    value = level(arm["best_val"], measure, arm["best_val_interval"])
    tested = f"; at test {level(test['value'], measure, test['interval'])}" if test.get("value") is not None else ""
    who = f"The best of {len(names)} runs is {best}, with a" if len(names) > 1 else "It reached a"
    return f"{who} validation {measure} of {value} at epoch {arm['best_epoch']} of {arm['last_epoch']}{tested}."


def _pair_figures(pair: Pair, measure: Measure) -> list[KeyFigure | None]:
    own, other = pair.shared["test"], pair.original["test"]
    tested = own and KeyFigure(
        level(own["value"], measure, own["interval"]),
        "test, with sharing",
        f"original: {level(other['value'], measure, other['interval'])}" if other else "",
    )
    unit, speed = " points" if measure == "accuracy" else "", pair.shared["speed_up"]
    lead = "mean lead over the original" if measure == "accuracy" else "mean difference from the original"
    return [
        tested,
        KeyFigure(signed(pair.shared["mean_difference"]["mean"], measure) + unit, lead),
        KeyFigure(percent(speed["mean"]), "speed-up", "by the paper's formula") if speed else None,
        _hardest(pair, measure),
    ]


def _hardest(pair: Pair, measure: Measure) -> KeyFigure | None:
    """The hardest value that both reached."""
    for place in reversed(range(len(pair.experiment["thresholds"]))):
        own, other = (one["reached"][place]["epoch"] for one in (pair.shared, pair.original))
        if own and other:
            value = round_level(pair.experiment["thresholds"][place]["value"], measure)
            return KeyFigure(f"epoch {own['mean']:.3g}", f"to reach {value}", f"original: epoch {other['mean']:.3g}")
    return None


def _own_figures(comparison: Comparison) -> list[KeyFigure]:
    if len(comparison["arms"]) > 1:
        return []
    arm, measure = next(iter(comparison["arms"].values())), comparison["measure"]
    test = result_of(arm)
    planned = f"of {arm['planned_epochs']} epochs" if arm["planned_epochs"] else ""
    figures = [KeyFigure(level(arm["best_val"], measure, arm["best_val_interval"]), f"best validation {measure}")]
    if test.get("value") is not None:
        figures.append(KeyFigure(level(test["value"], measure, test["interval"]), f"test {measure}"))
    return [*figures, KeyFigure(f"epoch {arm['best_epoch'] or '–'}", "best epoch", planned)]


def _range(values: list[float], measure: Measure) -> str:
    return f"{signed(min(values), measure)} to {signed(max(values), measure)}"
