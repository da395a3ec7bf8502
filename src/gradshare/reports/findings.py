"""What the numbers of a comparison show, in sentences. Every sentence is computed; none is presumed."""

from __future__ import annotations

from typing import Any, NamedTuple

from gradshare.reports.accounting import account_for_gain
from gradshare.reports.compare import Comparison
from gradshare.reports.runs import Measure
from gradshare.reports.wording import GATE_LAM, GATE_M, count, gap, level, percent, round_level, seconds, signed


class Finding(NamedTuple):
    about: str
    text: str


def findings(comparison: Comparison) -> list[Finding]:
    """A finding an arm against the original, a finding a control against sharing, and what limits them."""
    arms, measure = comparison["arms"], comparison["measure"]
    alone = [Finding(name, _alone(name, arms, measure)) for name, arm in arms.items() if not arm["against_original"]]
    compared = [
        Finding(f"{name} against {arm['against_original']['reference']}", _compared(name, comparison))
        for name, arm in arms.items()
        if arm["against_original"]
    ]
    controls = [
        Finding(f"{name} against {arm['against_shared']['reference']}", account_for_gain(name, arms, measure))
        for name, arm in arms.items()
        if arm["gains"]
    ]
    return alone + compared + controls


def _alone(name: str, arms: dict[str, Any], measure: Measure) -> str:
    arm = arms[name]
    partnerless = arm["arm"] != "original" or len(arms) == 1
    nobody = (
        "There is nothing beside it to compare it with." if len(arms) == 1 else "It has no original to compare with."
    )
    return _join(_state(arm), _best(arm, measure), _near_chance(arm), nobody if partnerless else "")


def _compared(name: str, comparison: Comparison) -> str:
    arm, measure = comparison["arms"][name], comparison["measure"]
    versus = arm["against_original"]
    reference = comparison["arms"][versus["reference"]]
    if not versus["common_epochs"]:
        return _join(_state(arm), f"It has no epoch in common with {versus['reference']}.")
    return _join(
        _state(arm),
        _curves(versus, measure),
        _last_epoch(versus, measure),
        _speed(arm, reference, measure),
        _thresholds(name, versus["reference"], comparison),
        _test(arm, reference, measure),
        _near_chance(arm),
        _gates(arm),
    )


def _state(arm: dict[str, Any]) -> str:
    planned = f" of {arm['planned_epochs']}" if arm["planned_epochs"] else ""
    unfinished = "" if arm["finished"] else f"This run is unfinished: {arm['epochs']}{planned} epochs so far."
    lost = arm["epochs_without_value"]
    return _join(unfinished, f"In {count(lost, 'epoch')} it has no finite validation value." if lost else "")


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
    better, worse, epochs = versus["epochs_apart_better"], versus["epochs_apart_worse"], versus["common_epochs"]
    mean = f"{signed(versus['area'], measure)} {'points' if measure == 'accuracy' else 'in the loss'}"
    average = f"over the {count(epochs, 'common epoch')} the mean difference is {mean}"
    if not versus["epochs_with_bands"]:
        return f"No intervals were recorded; {average}."
    if not better and not worse:
        return f"The two cannot be told apart: their 95 % bands overlap in every common epoch, and {average}."
    lead = versus["area"] if measure == "accuracy" else -versus["area"]
    verdict = (
        "Ahead" if better and not worse and lead > 0 else "Behind" if worse and not better and lead < 0 else "Mixed"
    )
    parts = [
        f"entirely on the better side in {count(better, 'epoch')} (first in epoch {versus['first_epoch_apart']})"
        if better
        else "",
        f"entirely on the worse side in {count(worse, 'epoch')}" if worse else "",
    ]
    return f"{verdict}: {average}, and its 95 % band lies {' and '.join(part for part in parts if part)}."


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
    still_rising = [one["best_epoch"] == one["last_epoch"] for one in (arm, reference)]
    doubt = " At least one of them was best at its last epoch, so longer training may change this." * any(still_rising)
    return (
        f"The paper's speed-up is {percent(speed_up)}: best validation {measure} at epoch {arm['best_epoch']}"
        f" against epoch {reference['best_epoch']}.{doubt}"
    )


def _thresholds(name: str, reference: str, comparison: Comparison) -> str:
    """The hardest value that both reached, and whether one of them went further."""
    measure, hits = comparison["measure"], comparison["thresholds"]
    both = [hit for hit in hits if hit["reached"][name] and hit["reached"][reference]]
    further = [hit for hit in hits if bool(hit["reached"][name]) != bool(hit["reached"][reference])]
    told = ""
    if both:
        own, other = _when(both[-1]["reached"][name]), _when(both[-1]["reached"][reference])
        told = f"It reached {round_level(both[-1]['value'], measure)} at {own}, {reference} at {other}."
    if not further:
        return told
    winner, loser = (name, reference) if further[-1]["reached"][name] else (reference, name)
    return _join(told, f"{round_level(further[-1]['value'], measure)} was reached by {winner} and not by {loser}.")


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
