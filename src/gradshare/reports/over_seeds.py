"""What the runs of one arm with several seeds show together, in sentences."""

from __future__ import annotations

from typing import Any

from gradshare.reports.accounting import share_of_gain
from gradshare.reports.against import spread
from gradshare.reports.compare import Comparison
from gradshare.reports.wording import (
    Measure,
    count,
    is_control,
    level,
    marks,
    number,
    percent_spread,
    round_level,
    seconds,
    signed_spread,
    verdict,
)


def seeds_finding(repeats: dict[str, Any], experiment: dict[str, Any], comparison: Comparison) -> str:
    """One paragraph for an arm; ± is over seeds."""
    arms, measure = comparison["arms"], comparison["measure"]
    told = [arms[name] for name in repeats["counted"]]
    return " ".join(
        sentence
        for sentence in (
            _state([arms[name] for name in repeats["runs"]]),
            _best(repeats, measure),
            _lead(repeats, told, measure),
            _beyond(repeats, told, measure),
            _speed(repeats),
            _thresholds(repeats, experiment, measure),
            _test(repeats, experiment, measure),
            _gain(repeats, told, arms, measure),
        )
        if sentence
    )


def _state(told: list[dict[str, Any]]) -> str:
    states = [arm["state"] for arm in told if arm["state"] != "done"]
    kinds = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    marked = [mark for arm in told for mark in marks(arm) if mark != arm["state"]]
    kinds += [f"{mark} in {marked.count(mark)}" for mark in dict.fromkeys(marked)]
    return f"Of {count(len(told), 'seed')}: {', '.join(kinds)}." if kinds else f"{count(len(told), 'seed')}."


def _best(repeats: dict[str, Any], measure: Measure) -> str:
    best, epoch = repeats["best_val"], repeats["best_epoch"]
    if best is None:
        return "There is no validation value yet."
    return (
        f"The best validation {measure} is {level(best['mean'], measure, best['interval'])} on average, first reached"
        f" at epoch {number(epoch['mean'])}."
    )


def _lead(repeats: dict[str, Any], told: list[dict[str, Any]], measure: Measure) -> str:
    versus = [arm["against_original"] for arm in told if arm["against_original"]]
    versus = [one for one in versus if one["common_epochs"]]
    if not versus:
        return ""
    verdicts = [verdict(one, measure) for one in versus]
    unit = "points" if measure == "accuracy" else "in the loss"
    mean, area = (signed_spread(repeats[key], measure) for key in ("mean_difference", "area"))
    return (
        f"Against the original of the same seed its curve is ahead in {verdicts.count('ahead')} of {len(versus)},"
        f" behind in {verdicts.count('behind')}; the mean difference is {mean} {unit}, the area between"
        f" the curves {area} {unit} × epochs."
    )


def _beyond(repeats: dict[str, Any], told: list[dict[str, Any]], measure: Measure) -> str:
    """What goes past the paper, against plain sharing."""
    versus = [arm["against_shared"] for arm in told if arm["against_shared"] and not is_control(arm["arm"])]
    versus = [one for one in versus if one["common_epochs"]]
    found = spread([one["mean_difference"] for one in versus])
    if found is None:
        return ""
    verdicts = [verdict(one, measure) for one in versus]
    unit = "points" if measure == "accuracy" else "in the loss"
    return (
        f"Against sharing of the same seed it is ahead in {verdicts.count('ahead')} of {len(versus)}, behind in"
        f" {verdicts.count('behind')}; the mean difference is {signed_spread(found, measure)} {unit}."
    )


def _speed(repeats: dict[str, Any]) -> str:
    found = repeats["speed_up"]
    return f"The paper's speed-up is {percent_spread(found)} on average." if found else ""


def _thresholds(repeats: dict[str, Any], experiment: dict[str, Any], measure: Measure) -> str:
    """The hardest value that every seed of both reached."""
    original = next((one for one in experiment["repeats"] if one["arm"] == "original"), None)
    if original is None or repeats["arm"] == "original":
        return ""
    for place in reversed(range(len(experiment["thresholds"]))):
        hits = [one["reached"][place]["epoch"] for one in (repeats, original)]
        if all(hit and hit["seeds"] == len(one["counted"]) for hit, one in zip(hits, (repeats, original), strict=True)):
            value = round_level(experiment["thresholds"][place]["value"], measure)
            own, other = (_when(one["reached"][place]) for one in (repeats, original))
            return f"It reached {value} at {own} on average, the original at {other}."
    return ""


def _when(hit: dict[str, Any]) -> str:
    time = hit["seconds"]
    return f"epoch {number(hit['epoch']['mean'])}" + (f" ({seconds(time['mean'])})" if time else "")


def _test(repeats: dict[str, Any], experiment: dict[str, Any], measure: Measure) -> str:
    own = repeats["test"]
    original = next((one["test"] for one in experiment["repeats"] if one["arm"] == "original"), None)
    if own is None:
        return ""
    value = level(own["value"], measure, own["interval"])
    against = ""
    if original is not None and repeats["arm"] != "original":
        against = f" against {level(original['value'], measure, original['interval'])}"
    return f"At test it has {value}{against}."


def _gain(repeats: dict[str, Any], told: list[dict[str, Any]], arms: dict[str, Any], measure: Measure) -> str:
    """Which part of sharing's gain a control has too."""
    known = [arm for arm in told if arm["gains"] and arm["gains"]["common_epochs"]]
    if not known:
        return ""
    sharing = [arms[arm["against_shared"]["reference"]]["against_original"] for arm in known]
    gain, of_sharing = (sum(arm["gains"][key] for arm in known) / len(known) for key in ("gain", "gain_of_sharing"))
    if of_sharing <= 0 or not any(one["epochs_apart_better"] for one in sharing):
        return "Sharing has no clear gain over the original for it to account for."
    return share_of_gain(repeats["arm"], "sharing", gain, of_sharing, measure)
