"""Numbers as people read them (67.1 ± 1.1 %, +5.2 points, 1m 03s), and what methods and arms are called."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Measure = Literal["accuracy", "loss"]

ABSENT, MINUS = "\u2013", "\u2212"
CLOCK = "Seconds are clock times: where several runs shared a machine, they also say how busy it was."
GATE_M, GATE_LAM = "\u03c3(m)", "\u03c3(\u03bb)"  # sigma(m), sigma(lambda), as in the paper
METHODS = {
    "maml": "MAML",
    "metasgd": "Meta-SGD",
    "meta_sgd": "Meta-SGD",
    "mamlpp": "MAML++",
    "maml_plus_plus": "MAML++",
    "fomaml": "first-order MAML",
    "first_order_maml": "first-order MAML",
    "anil": "ANIL",
}


class Arm(NamedTuple):
    meaning: str
    """What the arm is, after "it is"."""
    source: str = ""
    """For a control: the part of the method that it keeps, after "the gain is there with"."""


ARMS = {
    "original": Arm("the method without sharing"),
    "shared": Arm("the method with gradient sharing"),
    "half-rate": Arm("the original at half the inner rate", "the smaller step"),
    "gate-only": Arm("the original with a learned factor on each inner step, nothing shared", "a learned step size"),
    "batch-only": Arm("sharing between concurrent tasks, without memory", "the concurrent tasks"),
    "memory-only": Arm("sharing through the memory of earlier tasks alone", "the memory of earlier tasks"),
    "conditioned": Arm("sharing with a gate for each task, by how well its gradient agrees with the running mean"),
}


def marks(arm: dict[str, Any]) -> list[str]:
    """What a reader has to know of a run before its numbers, in a word or two each."""
    found = {
        arm["state"]: arm["state"] != "done",
        "steps skipped": arm["skipped"],
        "tasks diverged": arm["diverged_tasks"],
        "gate saturated": arm["saturated"],
        "files changed": arm["damage"],
    }
    return [mark for mark, holds in found.items() if holds]


def arm_rank(arm: str) -> int:
    """The original first, then sharing, then the controls, then what goes past the paper, then arms unknown to us."""
    return list(ARMS).index(arm) if arm in ARMS else len(ARMS)


def is_control(arm: str) -> bool:
    """Whether an arm may account for sharing's gain; one unknown to us may."""
    return arm not in ARMS or bool(ARMS[arm].source)


def level(value: float | None, measure: Measure, interval: float | None = None) -> str:
    """An accuracy in percent, or a loss, with its interval."""
    if value is None:
        return ABSENT
    if measure == "accuracy":
        spread = "" if interval is None else f" ± {100 * interval:.1f}"
        return f"{100 * value:.1f}{spread} %"
    return loss(value) if interval is None else f"{loss(value)} ± {loss(interval)}"


def loss(value: float) -> str:
    """Three decimals, or three digits where those would say too little or too much."""
    return f"{value:.3f}" if 0.01 <= abs(value) < 100 else f"{value:.3g}"


def round_level(value: float, measure: Measure) -> str:
    """A threshold, without digits that say nothing."""
    return f"{100 * value:.5g} %" if measure == "accuracy" else f"loss {value:.6g}"


def signed(value: float | None, measure: Measure) -> str:
    """A difference in points, or of losses, with its sign."""
    if value is None:
        return ABSENT
    digits = f"{abs(value):.1f}" if measure == "accuracy" else loss(abs(value))
    return digits if float(digits) == 0 else f"{'+' if value > 0 else MINUS}{digits}"


def gap(value: float, measure: Measure) -> str:
    """The size of a difference, with its unit."""
    return f"{abs(value):.1f} points" if measure == "accuracy" else f"{loss(abs(value))} in the loss"


def percent(value: float | None) -> str:
    """A speed-up."""
    return ABSENT if value is None else f"{100 * value:+.0f} %".replace("-", MINUS).replace("+0 %", "0 %")


def seconds(value: float | None) -> str:
    if value is None:
        return ABSENT
    if value < 60:
        return f"{value:.1f} s" if value >= 1 else f"{value:.2g} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {rest:02d}s"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(words: list[str], last: str = "and") -> str:
    """a, b and c."""
    return f" {last} ".join(part for part in (", ".join(words[:-1]), words[-1]) if part) if words else ""


def number(value: float) -> str:
    """A mean of whole numbers: 4, 4.5."""
    return f"{value:.1f}".removesuffix(".0")


def with_spread(text: str, interval: str | None) -> str:
    return text if interval is None else f"{text} ± {interval}"


def verdict(versus: dict[str, Any], measure: Measure) -> Literal["ahead", "behind", "level"]:
    """Whether a curve is ahead of its reference: on average, with bands apart there and nowhere on the other side."""
    better, worse = versus["epochs_apart_better"], versus["epochs_apart_worse"]
    lead = (versus["mean_difference"] or 0) * (1 if measure == "accuracy" else -1)
    if better and not worse and lead > 0:
        return "ahead"
    return "behind" if worse and not better and lead < 0 else "level"


def signed_spread(found: dict[str, Any] | None, measure: Measure) -> str:
    """A difference with its interval over seeds."""
    if found is None:
        return ABSENT
    interval = found["interval"]
    told = None if interval is None else f"{interval:.1f}" if measure == "accuracy" else loss(interval)
    return with_spread(signed(found["mean"], measure), told)


def percent_spread(found: dict[str, Any] | None) -> str:
    """A speed-up with its interval over seeds."""
    if found is None:
        return ABSENT
    told = percent(found["mean"])
    return told if found["interval"] is None else f"{told.removesuffix(' %')} ± {100 * found['interval']:.0f} %"


def number_spread(found: dict[str, Any] | None) -> str:
    """A mean of whole numbers with its interval over seeds."""
    if found is None:
        return ABSENT
    interval = found["interval"]
    return with_spread(number(found["mean"]), None if interval is None else number(interval))
