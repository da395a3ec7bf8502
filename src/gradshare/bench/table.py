"""Results as tables: in a terminal, and in Markdown for docs/performance.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gradshare.bench.cases import RIVALS, Case
from gradshare.bench.results import Failure, Measurement, Results

if TYPE_CHECKING:
    from rich.table import Table

WORDS = ("Setting", "What", "How")  # columns that are not figures
ABSENT = "–"


def markdown_table(results: Results) -> str:
    """All measurements in one table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in _markdown_lines(results))


def rich_tables(results: Results) -> Iterator[Table]:
    """A table for each setting; one for all settings of a sweep."""
    from rich.table import Table
    from rich.text import Text

    settings = list(dict.fromkeys(measurement.case.shape for measurement in results.measurements))
    for setting in ["Setting"] if results.sweep else settings:
        rows = [row(results, m) for m in results.measurements if results.sweep or m.case.shape == setting]
        drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for name in _filled(rows):
            alone = name == "Setting" and not results.sweep  # then it is the heading, and the rows need not repeat it
            if not alone:
                justify = "left" if name in WORDS else "right"
                heading = setting if name == "What" and not results.sweep else name
                drawn.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
        for line in rows:
            names = [name for name in _filled(rows) if name != "Setting" or results.sweep]
            drawn.add_row(*(Text(line[name]) for name in names))
        yield drawn


def row(results: Results, measurement: Measurement) -> dict[str, str]:
    """A measurement in words, by column."""
    case, ratio, share = measurement.case, results.ratio(measurement), results.share_of_ceiling(measurement)
    low, high = measurement.quartiles
    return {
        "Setting": case.shape,
        "What": case.what,
        "How": how(case),
        "ms": short(measurement.milliseconds),
        "Quartiles": f"{short(low)}–{short(high)}",
        "Ratio": ABSENT if ratio is None or case.library in RIVALS else f"{ratio:.2f}",
        "TFLOP": short(measurement.operations / 1e12),
        "GB": short(measurement.bytes_moved / 1e9),
        "Of ceiling": ABSENT if share is None else f"{100 * share:.3g} %",
        "GiB": _memory(measurement),
        "First step": f"{measurement.first_step_seconds:.1f} s",
        "Evaluation": ABSENT if measurement.eval_seconds is None else f"{short(measurement.eval_seconds)} s",
    }


def _memory(measurement: Measurement) -> str:
    allocated, reserved = measurement.peak_allocated, measurement.peak_reserved
    return ABSENT if allocated is None or reserved is None else f"{short(allocated / 2**30)}/{short(reserved / 2**30)}"


def how(case: Case) -> str:
    """Engine and precision; other libraries get TF32 and bf16 from PyTorch."""
    return f"{case.engine} {case.precision}"


def short(value: float) -> str:
    """Three significant figures, and all digits of whole numbers."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def notes(results: Results) -> list[str]:
    """What a reader must know beside the figures: the machine, its ceilings, and what could not be timed."""
    where, measured = results.machine, results.measurements
    said = [
        f"{where['device']}, PyTorch {where['torch']}, CPU threads: {where['threads']}. ms: median of a meta-iteration."
    ]
    for precision, ceiling in results.ceilings.items():
        rate, bandwidth = f"{ceiling.rate / 1e12:.3g} TFLOP/s", f"{ceiling.bandwidth / 1e9:.3g} GB/s"
        said.append(f"Ceiling, {precision}: {rate} in a large matrix product, {bandwidth} in a large copy.")
    if any(measurement.case.library in RIVALS for measurement in measured):
        libraries = ", ".join(f"{name} {version}" for name, version in where["rivals"].items())
        said.append(f"Ratio: to the faster of {libraries}. They share no gradients: theirs is the original MAML.")
    if any(measurement.peak_allocated is not None for measurement in measured):
        said.append("GiB: allocated/reserved on the GPU at the peak, without the data set.")
    if any(m.case.precision == "float32" and m.case.device != "cpu" for m in measured):
        said.append("float32 on the GPU: PyTorch's own operations, which convolve on the TF32 units by default.")
    if any(measurement.case.method == "mamlpp" for measurement in measured):
        said.append("mamlpp is timed as in its first epochs: a query loss after every inner step.")
    tasks = sorted({measurement.eval_tasks for measurement in measured if measurement.eval_seconds is not None})
    if tasks:
        said.append(f"Evaluation: of {' and '.join(map(str, tasks))} tasks.")
    return said + [line_of(failure) for failure in results.failures]


def line_of(outcome: Measurement | Failure) -> str:
    """One outcome in one line."""
    what = f"{outcome.case.shape}  {outcome.case.what}  {how(outcome.case)}"
    if isinstance(outcome, Failure):
        return f"{what}: not timed: {outcome.reason}"
    return f"{what}: {short(outcome.milliseconds)} ms"


def _markdown_lines(results: Results) -> Iterator[list[str]]:
    rows = [row(results, measurement) for measurement in results.measurements]
    names = _filled(rows)
    yield names
    yield ["---" if name in WORDS else "---:" for name in names]
    for line in rows:
        yield [line[name] for name in names]


def _filled(rows: list[dict[str, str]]) -> list[str]:
    """The columns in which at least one row has something."""
    return [name for name in (rows[0] if rows else ()) if any(line[name] != ABSENT for line in rows)]
