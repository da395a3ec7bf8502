"""Numbers as people read them: 67.1 ± 1.1 %, +5.2 points, 1m 03s. An absent number is a dash."""

from __future__ import annotations

from gradshare.reports.runs import Measure

ABSENT, MINUS = "\u2013", "\u2212"
GATE_M, GATE_LAM = "\u03c3(m)", "\u03c3(\u03bb)"  # sigma(m), sigma(lambda), as in the paper


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
