"""How much of sharing's gain a control has: the question that keeps a claim about sharing honest."""

from __future__ import annotations

from typing import Any

from gradshare.reports.arms import ARMS
from gradshare.reports.runs import Measure
from gradshare.reports.wording import count, gap


def account_for_gain(name: str, arms: dict[str, Any], measure: Measure) -> str:
    """Two or three sentences on a control against sharing."""
    arm = arms[name]
    versus = arm["against_shared"]
    what = f"{name} is {ARMS[arm['arm']].meaning}." if arm["arm"] in ARMS else ""
    if not versus["common_epochs"] or not arm["gains"]["common_epochs"]:
        return f"{what} It has no epoch in common with {versus['reference']}.".strip()
    return " ".join(part for part in (what, _level(versus), _share(arm, arms[versus["reference"]], measure)) if part)


def _level(versus: dict[str, Any]) -> str:
    """From which epoch on the control keeps up with sharing."""
    sharing = versus["reference"]
    if not versus["epochs_with_bands"]:
        return ""
    above = versus["epochs_apart_better"]
    beyond = f", and in {count(above, 'epoch')} it lies entirely on the better side" if above else ""
    since = versus["level_from_epoch"]
    if since is None and versus["final_bands"] is None:
        return ""
    if since is None:
        return f"At the last common epoch its band lies entirely on the worse side of that of {sharing}{beyond}."
    if not versus["epochs_apart_worse"]:
        return f"Its band never lies entirely on the worse side of that of {sharing}{beyond}."
    return f"From epoch {since} on its band overlaps that of {sharing} or is better{beyond}."


def _share(arm: dict[str, Any], sharing: dict[str, Any], measure: Measure) -> str:
    """Which part of sharing's mean gain over the original the control has too."""
    gain, of_sharing = arm["gains"]["gain"], arm["gains"]["gain_of_sharing"]
    name = arm["against_shared"]["reference"]
    if of_sharing <= 0 or not sharing["against_original"]["epochs_apart_better"]:
        return f"{name} has no clear gain over the original for it to account for."
    source = ARMS[arm["arm"]].source if arm["arm"] in ARMS else f"what {arm['arm']} keeps"
    own = f"gains {gap(gain, measure)}" if gain > 0 else "gains nothing"
    has = f"Over the common epochs it {own} on the original on average, {name} {gap(of_sharing, measure)}"
    if gain >= of_sharing:
        return f"{has}: on this data {source} alone does as well as sharing."
    if gain >= of_sharing / 2:
        return f"{has}: on this data {source} alone gives most of the gain."
    if gain > 0:
        return f"{has}: {source} alone gives less than half of the gain."
    return f"{has}: {source} alone does not give the gain."
