"""How much of sharing's gain a control has: the question that keeps a claim about sharing honest."""

from __future__ import annotations

from typing import Any

from gradshare.reports.wording import ARMS, Measure, count, gap


def account_for_gain(name: str, arms: dict[str, Any], measure: Measure) -> str:
    """A sentence or two on a control against sharing."""
    arm = arms[name]
    versus = arm["against_shared"]
    if not versus["common_epochs"] or not arm["gains"]["common_epochs"]:
        return f"It has no epoch in common with {versus['reference']}."
    return " ".join(part for part in (_level(versus), _share(arm, arms[versus["reference"]], measure)) if part)


def _level(versus: dict[str, Any]) -> str:
    """From which epoch on the control keeps up with sharing."""
    sharing = versus["reference"]
    if not versus["epochs_with_bands"]:
        return ""
    since, above = versus["level_from_epoch"], versus["epochs_apart_better"]
    beyond = f" (in {count(above, 'epoch')} its own lies entirely on the better side)" if above else ""
    if since is None:
        return f"It ends behind {sharing}, with bands apart{beyond}." if versus["final_bands"] else ""
    if versus["epochs_apart_worse"]:
        return f"From epoch {since} on it does as well as {sharing}: the bands overlap, or its own is better{beyond}."
    if above:
        return f"It is ahead of {sharing}: in {count(above, 'epoch')} with bands apart, and behind in none that way."
    return f"It does as well as {sharing}: in no epoch does its band lie entirely on the worse side."


def _share(arm: dict[str, Any], sharing: dict[str, Any], measure: Measure) -> str:
    """Which part of sharing's mean gain over the original the control has too."""
    gain, of_sharing = arm["gains"]["gain"], arm["gains"]["gain_of_sharing"]
    name = arm["against_shared"]["reference"]
    if of_sharing <= 0 or not sharing["against_original"]["epochs_apart_better"]:
        return f"{name} has no clear gain over the original for it to account for."
    return share_of_gain(arm["arm"], name, gain, of_sharing, measure)


def share_of_gain(arm: str, sharing: str, gain: float, of_sharing: float, measure: Measure) -> str:
    """On average it gains 8.0 points on the original, where shared gains 9.8 points: ..."""
    source = ARMS[arm].source if arm in ARMS else f"what {arm} keeps"
    own = gap(gain, measure) if gain > 0 else "nothing"
    mean = f"On average it gains {own} on the original, where {sharing} gains {gap(of_sharing, measure)}"
    return f"{mean}: on this data {part(gain / of_sharing)} of the gain is there with {source} alone."


def part(fraction: float) -> str:
    if fraction <= 0:
        return "none"
    return "all" if fraction >= 1 else "most" if fraction > 0.5 else "less than half" if fraction < 0.5 else "half"
