"""What the numbers of a comparison show, in sentences. Every sentence is computed; none is presumed."""

from __future__ import annotations

from typing import Any, NamedTuple

from gradshare.reports.accounting import account_for_gain
from gradshare.reports.compare import Comparison
from gradshare.reports.over_seeds import seeds_finding
from gradshare.reports.wording import (
    GATE_LAM,
    GATE_M,
    Measure,
    count,
    gap,
    is_control,
    level,
    percent,
    round_level,
    seconds,
    signed,
    verdict,
)

VERDICTS = {"ahead": "Ahead of", "behind": "Behind", "level": "Neither ahead of nor behind"}
STATES = {"running": "still running", "unfinished": "unfinished", "failed": "unfinished", "diverged": "stopped"}


class Finding(NamedTuple):
    about: str
    text: str
    experiment: int = 0


def findings(comparison: Comparison) -> list[Finding]:
    """A finding an arm: on its own, or against the original, and for a third kind against sharing too.

    An arm that was trained with several seeds has one finding for all of them.
    """
    found = []
    for place, experiment in enumerate(comparison["experiments"]):
        for repeats in experiment["repeats"]:
            several = len(repeats["runs"]) > 1
            name = repeats["runs"][0]
            told = seeds_finding(repeats, experiment, comparison) if several else _finding(name, comparison)
            found.append(Finding(repeats["name"] if several else name, told, place))
    return found


def _finding(name: str, comparison: Comparison) -> str:
    arm = comparison["arms"][name]
    if not arm["against_original"]:
        told = _alone(arm, comparison)
    elif not arm["against_original"]["common_epochs"]:
        told = f"It has no epoch in common with {arm['against_original']['reference']}."
    elif arm["gains"]:
        told = _control(name, comparison)
    else:
        told = _in_full(name, comparison)
    return _join(_state(arm), told, _beyond(arm, comparison["measure"]), _near_chance(arm))


def _alone(arm: dict[str, Any], comparison: Comparison) -> str:
    if len(comparison["arms"]) == 1:
        return _join(_best(arm, comparison["measure"]), _gates(arm), "There is nothing beside it to compare it with.")
    lonely = "" if arm["arm"] == "original" else "It has no original to compare it with."
    return _join(_best(arm, comparison["measure"]), lonely)


def _control(name: str, comparison: Comparison) -> str:
    """Short: the tables have the rest."""
    arm, measure = comparison["arms"][name], comparison["measure"]
    return _join(_bands(arm["against_original"]), account_for_gain(name, comparison["arms"], measure))


def _beyond(arm: dict[str, Any], measure: Measure) -> str:
    """What goes past the paper, against plain sharing."""
    versus = arm["against_shared"]
    return _curves(versus, measure) if versus and versus["common_epochs"] and not is_control(arm["arm"]) else ""


def _in_full(name: str, comparison: Comparison) -> str:
    arm, measure = comparison["arms"][name], comparison["measure"]
    versus = arm["against_original"]
    reference = comparison["arms"][versus["reference"]]
    return _join(
        _curves(versus, measure),
        _last_epoch(versus, measure),
        _speed(arm, reference, measure),
        _thresholds(name, versus["reference"], comparison),
        _test(arm, reference, measure),
        _gates(arm),
    )


def _state(arm: dict[str, Any]) -> str:
    planned = f" of {arm['planned_epochs']}" if arm["planned_epochs"] else ""
    kind = STATES.get(arm["state"], "not begun")
    far = f"{arm['epochs']}{planned} epochs so far"
    if arm["epochs"] and arm["epochs"] == arm["planned_epochs"]:
        far = "all its epochs are trained, and it has not been tested"
    unfinished = "" if arm["finished"] else f"This run is {kind}: {far}."
    how = "diverged" if arm["state"] == "diverged" else "failed"
    failed = f"It {how}: {arm['reason'].rstrip('.')}." if arm["reason"] and not arm["finished"] else ""
    lost = arm["epochs_without_value"]
    valueless = f"In {count(lost, 'epoch')} it has no finite validation value." if lost else ""
    changed = f"It is not as it was when it was finished: {arm['damage'].rstrip('.')}." if arm["damage"] else ""
    return _join(unfinished, failed, changed, valueless, _not_finite(arm))


def _not_finite(arm: dict[str, Any]) -> str:
    skipped, tasks, gate = arm["skipped"], arm["diverged_tasks"], arm["saturated"]
    return _join(
        f"It left out {count(skipped, 'meta-step')} whose loss or gradient was not finite." if skipped else "",
        f"Up to {count(tasks, 'validation task')} an epoch had no finite loss." if tasks else "",
        f"A gate is saturated: {gate}." if gate else "",
    )


def _best(arm: dict[str, Any], measure: Measure) -> str:
    if arm["best_epoch"] is None:
        return "It has no validation value yet."
    value = level(arm["best_val"], measure, arm["best_val_interval"])
    return (
        f"The best validation {measure} is {value}, first reached at epoch {arm['best_epoch']} of {arm['last_epoch']}."
    )


def _near_chance(arm: dict[str, Any]) -> str:
    if arm["chance"] is None or arm["best_val"] is None or arm["best_val_interval"] is None:
        return ""
    if arm["best_val"] - arm["best_val_interval"] > arm["chance"]:
        return ""
    return f"Even its best epoch cannot be told from chance ({level(arm['chance'], 'accuracy')})."


def _curves(versus: dict[str, Any], measure: Measure) -> str:
    better, worse, original = versus["epochs_apart_better"], versus["epochs_apart_worse"], versus["reference"]
    mean = f"{signed(versus['mean_difference'], measure)} {'points' if measure == 'accuracy' else 'in the loss'}"
    average = f"over the {count(versus['common_epochs'], 'common epoch')} the mean difference is {mean}"
    if not versus["epochs_with_bands"]:
        return f"Against {original}, {average}; no intervals were recorded."
    if not better and not worse:
        return f"Not apart from {original}: the 95 % bands overlap in every common epoch, and {average}."
    parts = [
        f"on the better side in {count(better, 'epoch')} (first in epoch {versus['first_epoch_apart']})" * bool(better),
        f"on the worse side in {count(worse, 'epoch')}" * bool(worse),
    ]
    apart = " and ".join(part for part in parts if part)
    return f"{VERDICTS[verdict(versus, measure)]} {original}: {average}, and its 95 % band lies entirely {apart}."


def _bands(versus: dict[str, Any]) -> str:
    if not versus["epochs_with_bands"]:
        return ""
    better, worse = versus["epochs_apart_better"], versus["epochs_apart_worse"]
    return (
        f"Its 95 % band lies entirely on the better side of that of {versus['reference']} in {better} of"
        f" {count(versus['common_epochs'], 'common epoch')}, and on the worse side in {worse}."
    )


def _last_epoch(versus: dict[str, Any], measure: Measure) -> str:
    difference = versus["final_difference"]
    lead = difference if measure == "accuracy" else -difference
    bands = {"overlap": ", with overlapping bands", "better": ", with bands apart", "worse": ", with bands apart"}
    place = "ahead by" if lead > 0 else "behind by"
    size = f"{place} {gap(difference, measure)}" if difference else "level"
    return f"At epoch {versus['final_epoch']}, the last in common, it is {size}{bands.get(versus['final_bands'], '')}."


def _speed(arm: dict[str, Any], reference: dict[str, Any], measure: Measure) -> str:
    speed_up = arm["against_original"]["speed_up"]
    if speed_up is None:
        return ""
    return (
        f"The paper's speed-up is {percent(speed_up)}: best validation {measure} at epoch {arm['best_epoch']}"
        f" against epoch {reference['best_epoch']}{_doubt(arm, reference, measure)}."
    )


def _doubt(arm: dict[str, Any], reference: dict[str, Any], measure: Measure) -> str:
    """What makes the speed-up say little."""
    if arm["last_epoch"] != reference["last_epoch"]:
        return "; but the two did not train equally long, so this says little"
    best, other = arm["best_val"], reference["best_val"]
    if (best < other) == (measure == "accuracy") and best != other:
        return f"; but that best is the worse of the two ({level(best, measure)} against {level(other, measure)})"
    if arm["last_epoch"] in (arm["best_epoch"], reference["best_epoch"]):
        return "; but one of them was best at its last epoch, so longer training may change this"
    return ""


def _thresholds(name: str, reference: str, comparison: Comparison) -> str:
    """The hardest value that both reached, and whether one of them went further."""
    measure = comparison["measure"]
    hits = comparison["experiments"][comparison["arms"][name]["experiment"]]["thresholds"]
    both = [hit for hit in hits if hit["reached"][name] and hit["reached"][reference]]
    further = [hit for hit in hits if bool(hit["reached"][name]) != bool(hit["reached"][reference])]
    told = ""
    if both:
        own, other = _when(both[-1]["reached"][name]), _when(both[-1]["reached"][reference])
        told = f"It reached {round_level(both[-1]['value'], measure)} at {own}, {reference} at {other}."
    if not further:
        return told
    winner = name if further[-1]["reached"][name] else reference
    return _join(told, f"Of the two, only {winner} reached {round_level(further[-1]['value'], measure)}.")


def _when(hit: dict[str, Any]) -> str:
    return f"epoch {hit['epoch']}" + ("" if hit["seconds"] is None else f" ({seconds(hit['seconds'])})")


def _test(arm: dict[str, Any], reference: dict[str, Any], measure: Measure) -> str:
    for kind, words in (("ensemble", "the ensemble"), ("best", "the best epoch")):
        own, other = ((one["test"] or {}).get(kind) or {} for one in (arm, reference))
        if own.get("value") is None or other.get("value") is None:
            continue
        values = [level(one["value"], measure, one["interval"]) for one in (own, other)]
        return f"At test, {words} has {values[0]} against {values[1]}{_overlap(own, other)}."
    return ""


def _overlap(own: dict[str, Any], other: dict[str, Any]) -> str:
    if own["interval"] is None or other["interval"] is None:
        return ""
    apart = abs(own["value"] - other["value"]) > own["interval"] + other["interval"]
    return ": the intervals do not overlap" if apart else ": the intervals overlap"


def _gates(arm: dict[str, Any]) -> str:
    known = [(GATE_M, arm["final_mean_m"]), (GATE_LAM, arm["final_mean_lam"])]
    told = [f"{symbol} is {value:.2f}" for symbol, value in known if value is not None]
    return f"At its last epoch the mean {' and the mean '.join(told)}, from 0.50 at the start." if told else ""


def _join(*sentences: str) -> str:
    return " ".join(sentence for sentence in sentences if sentence)
