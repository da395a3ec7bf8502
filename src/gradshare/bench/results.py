"""Results of a benchmark: what was measured on which machine and what failed; as JSON and as tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gradshare.bench.cases import RIVALS, Case
from gradshare.bench.roofline import Ceiling, ceiling_of
from gradshare.errors import UserError
from gradshare.files import read_json, record, write_whole

if TYPE_CHECKING:
    from rich.table import Table

VERSION = 1
WORDS = ("Setting", "What", "How")  # columns of text
ABSENT = "–"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the results depend on."""

    device: str  # name of the GPU or of the processor
    threads: int
    torch: str
    cuda: str | None
    python: str
    gradshare: str
    rivals: dict[str, str]  # version of each
    date: str


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The result of timing a case."""

    case: Case
    milliseconds: float  # of one meta-iteration; median over blocks
    quartiles: tuple[float, float]
    iterations: int  # number of timed meta-iterations
    operations: int | None  # as `roofline` counts them, for conv4
    bytes_moved: int | None
    first_step_seconds: float  # create the learner, compile, record, and run the first meta-iteration
    peak_allocated: int | None = None  # bytes on a GPU, without the data set
    peak_reserved: int | None = None  # the same, with the memory that PyTorch keeps for later
    eval_tasks: int = 0
    eval_seconds: float | None = None


@dataclass(frozen=True)
class Failure:
    """A case that could not be timed."""

    case: Case
    reason: str


@dataclass
class Results:
    """One run of the benchmark."""

    machine: Machine
    ceilings: dict[str, Ceiling]  # by precision
    measurements: list[Measurement] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    sweep: str | None = None  # the size that was varied, if any

    def add(self, outcome: Measurement | Failure) -> None:
        if isinstance(outcome, Failure):
            self.failures.append(outcome)
        else:
            self.measurements.append(outcome)

    def fastest_rival(self, case: Case) -> Measurement | None:
        """Return the fastest other library at the setting of a case."""
        found = [m for m in self.measurements if m.case.library in RIVALS and m.case.setting == case.setting]
        return min(found, key=lambda m: m.milliseconds, default=None)

    def ratio(self, measurement: Measurement) -> float | None:
        """Return how many times faster the case is than the fastest other library in the same run."""
        rival = self.fastest_rival(measurement.case)
        return None if rival is None else rival.milliseconds / measurement.milliseconds

    def share_of_ceiling(self, measurement: Measurement) -> float | None:
        """Return the least possible time as a share of the measured time."""
        ceiling = ceiling_of(measurement.case, self.ceilings)
        if ceiling is None or measurement.operations is None:
            return None
        return 1000 * ceiling.floor(measurement.case) / measurement.milliseconds

    def save(self, path: Path) -> None:
        """Write all results; if that fails, an older file is kept."""
        content = {"version": VERSION, **asdict(self)}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=1) + "\n")


def read_results(path: Path) -> Results:
    """Read what `save` wrote."""
    content = read_json(path)
    try:
        if content.pop("version") != VERSION:
            raise ValueError("another version of gradshare wrote it")
        content["machine"] = Machine(**content["machine"])
        for name, kind in (("measurements", Measurement), ("failures", Failure)):
            content[name] = [record(kind, entry, str(path)) for entry in content[name]]
        content["ceilings"] = {precision: Ceiling(*pair) for precision, pair in content["ceilings"].items()}
        return Results(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} does not hold the results of a benchmark: {error}") from error


def markdown_table(results: Results) -> str:
    """Return all measurements as one table in Markdown."""
    rows = [row(results, measurement) for measurement in results.measurements]
    names = _filled(rows)
    rule = ["---" if name in WORDS else "---:" for name in names]
    lines = [names, rule, *([line[name] for name in names] for line in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rich_tables(results: Results) -> Iterator[Table]:
    """Return a table for each setting, which is its heading, or one table for all settings of a sweep."""
    from rich.table import Table
    from rich.text import Text

    settings = dict.fromkeys(measurement.case.shape for measurement in results.measurements)
    for setting in [None] if results.sweep else settings:
        rows = [row(results, one) for one in results.measurements if setting in (None, one.case.shape)]
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        names = [name for name in _filled(rows) if name != "Setting" or setting is None]
        for name in names:
            heading = setting if setting is not None and name == "What" else name
            table.add_column(heading, justify="left" if name in WORDS else "right", overflow="fold")
        for line in rows:
            table.add_row(*(Text(line[name]) for name in names))
        yield table


def row(results: Results, measurement: Measurement) -> dict[str, str]:
    """Return the text of a measurement by column."""
    case, ratio, share = measurement.case, results.ratio(measurement), results.share_of_ceiling(measurement)
    low, high = measurement.quartiles
    return {
        "Setting": case.shape,
        "What": case.what,
        "How": how(case),
        "ms": short(measurement.milliseconds),
        "Quartiles": f"{short(low)}–{short(high)}",
        "Ratio": ABSENT if ratio is None or case.library in RIVALS else f"{ratio:.2f}",
        "TFLOP": ABSENT if measurement.operations is None else short(measurement.operations / 1e12),
        "GB": ABSENT if measurement.bytes_moved is None else short(measurement.bytes_moved / 1e9),
        "Of ceiling": ABSENT if share is None else f"{100 * share:.3g} %",
        "GiB": _memory(measurement),
        "First step": f"{measurement.first_step_seconds:.1f} s",
        "Evaluation": ABSENT if measurement.eval_seconds is None else f"{short(measurement.eval_seconds)} s",
    }


def _memory(measurement: Measurement) -> str:
    allocated, reserved = measurement.peak_allocated, measurement.peak_reserved
    return ABSENT if allocated is None or reserved is None else f"{short(allocated / 2**30)}/{short(reserved / 2**30)}"


def how(case: Case) -> str:
    """Return engine and precision; other libraries get TF32 and bf16 from PyTorch."""
    return f"{case.engine} {case.precision}"


def short(value: float) -> str:
    """Format with three significant digits, and all digits before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def notes(results: Results) -> list[str]:
    """Return what a reader of the table needs to know: machine, ceilings, and what could not be timed."""
    where, measured = results.machine, results.measurements
    lines = [f"{where.device}, PyTorch {where.torch}, CPU threads: {where.threads}. ms: median of a meta-iteration."]
    for precision, ceiling in results.ceilings.items():
        rate, bandwidth = f"{ceiling.rate / 1e12:.3g} TFLOP/s", f"{ceiling.bandwidth / 1e9:.3g} GB/s"
        lines.append(f"Ceiling, {precision}: {rate} in a large matrix product, {bandwidth} in a large copy.")
    if any(measurement.case.library in RIVALS for measurement in measured):
        libraries = ", ".join(f"{name} {version}" for name, version in where.rivals.items())
        lines.append(f"Ratio: to the faster of {libraries}. They share no gradients: theirs is the original MAML.")
    if any(measurement.peak_allocated is not None for measurement in measured):
        lines.append("GiB: allocated/reserved on the GPU at the peak, without the data set.")
    if any(m.case.precision == "float32" and m.case.device != "cpu" for m in measured):
        lines.append("float32 on the GPU: PyTorch's own operations, which convolve on the TF32 units by default.")
    if any(measurement.case.method == "mamlpp" for measurement in measured):
        lines.append("mamlpp is timed as in its first epochs, with a query loss after every inner step.")
    tasks = sorted({measurement.eval_tasks for measurement in measured if measurement.eval_seconds is not None})
    if tasks:
        lines.append(f"Evaluation: of {' and '.join(map(str, tasks))} tasks.")
    return lines + [line_of(failure) for failure in results.failures]


def line_of(outcome: Measurement | Failure) -> str:
    """Return one outcome as one line."""
    what = f"{outcome.case.shape}  {outcome.case.what}  {how(outcome.case)}"
    if isinstance(outcome, Failure):
        return f"{what}: not timed: {outcome.reason}"
    return f"{what}: {short(outcome.milliseconds)} ms"


def _filled(rows: list[dict[str, str]]) -> list[str]:
    """Return the columns that are not empty in all rows."""
    return [name for name in (rows[0] if rows else ()) if any(line[name] != ABSENT for line in rows)]
