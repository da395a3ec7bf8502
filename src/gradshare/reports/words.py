"""Numbers as people read them: 67.1 ± 1.1 %, +5.2, 1m 03s."""

from __future__ import annotations

from collections.abc import Sequence

from gradshare.reports.comparison import Tested
from gradshare.reports.model import Measure
from gradshare.reports.statistics import Spread
from gradshare.runs.display import duration

ABSENT, MINUS = "\u2013", "\u2212"
GATE_M, GATE_LAM = "\u03c3(m)", "\u03c3(\u03bb)"  # sigma(m), sigma(lambda), as in the paper


def level(value: float | None, measure: Measure, interval: float | None = None) -> str:
    """An accuracy in percent, or a loss, with its interval."""
    if value is None:
        return ABSENT
    if measure == "accuracy":
        return _with(f"{100 * value:.1f}", None if interval is None else f"{100 * interval:.1f}") + " %"
    return _with(loss(value), None if interval is None else loss(interval))


def tested(found: Tested | None, measure: Measure) -> str:
    return ABSENT if found is None else level(found.value, measure, found.interval)


def round_level(value: float, measure: Measure) -> str:
    """A level to reach, without trailing zeros."""
    return f"{100 * value:.5g} %" if measure == "accuracy" else f"loss {value:.6g}"


def loss(value: float) -> str:
    """Three decimals, or three digits if decimals would say too little or too much."""
    return f"{value:.3f}" if 0.01 <= abs(value) < 100 else f"{value:.3g}"


def signed(value: float | None, measure: Measure) -> str:
    """A difference in points, or of losses, with its sign."""
    if value is None:
        return ABSENT
    digits = _size(value, measure)
    return digits if float(digits) == 0 else f"{'+' if value > 0 else MINUS}{digits}"


def signed_spread(found: Spread | None, measure: Measure) -> str:
    if found is None:
        return ABSENT
    return _with(signed(found.mean, measure), None if found.interval is None else _size(found.interval, measure))


def unit(measure: Measure) -> str:
    """The unit of a difference."""
    return "points" if measure == "accuracy" else "loss"


def long_unit(measure: Measure) -> str:
    return "accuracy points" if measure == "accuracy" else "units of the loss"


def percent(value: float | None) -> str:
    """A speed-up."""
    if value is None:
        return ABSENT
    rounded = round(100 * value)
    return f"{rounded:+d} %".replace("-", MINUS) if rounded else "0 %"


def percent_spread(found: Spread | None) -> str:
    if found is None:
        return ABSENT
    if found.interval is None:
        return percent(found.mean)
    return f"{percent(found.mean).removesuffix(' %')} ± {100 * found.interval:.0f} %"


def number(value: float) -> str:
    """A mean of whole numbers: 4, 4.5."""
    return f"{value:.1f}".removesuffix(".0")


def number_spread(found: Spread | None) -> str:
    if found is None:
        return ABSENT
    return _with(number(found.mean), None if found.interval is None else number(found.interval))


def seconds(value: float | None) -> str:
    """A time: 0.25 s, 12.0 s, 1m 03s, 2h 05m."""
    return ABSENT if value is None else duration(value)


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def _size(value: float, measure: Measure) -> str:
    return f"{abs(value):.1f}" if measure == "accuracy" else loss(abs(value))


def _with(text: str, interval: str | None) -> str:
    return text if interval is None else f"{text} ± {interval}"
