"""Fill in the tables of docs/performance.md and docs/memory.md and draw the figures, from benchmarks/results.

    python benchmarks/plot.py

`NAME.json` gives table NAME and figure roofline-NAME; all `NAME-sweep-*.json` give figure cost-NAME. Each is written
between `<!-- table NAME -->` or `<!-- figure NAME -->` and `<!-- end -->`. `<!-- counts -->` gets operations and bytes,
`<!-- table main -->` what readers ask first: MAML beside the faster of the other libraries.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from gradshare.bench.cases import RIVALS, SHAPES, SWEEPS, Case
from gradshare.bench.results import Measurement, Results, how, markdown_table, notes, read_results, short
from gradshare.bench.roofline import bytes_moved, ceiling_of, operations
from gradshare.reports.figures import INK, STYLE, image

ROOT = Path(__file__).parent.parent
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)  # by Okabe and Ito
MARKERS = ("o", "s", "^", "D", "v", "P")
ALTERNATIVES = {
    "roofline": "Operations a second against operations a byte, under the ceilings of the machine",
    "cost": "Time of a meta-iteration against tasks, inner steps, shots and image size",
}
AXES = {"tasks": "tasks in a batch", "steps": "inner steps", "shots": "shots", "size": "side of an image, pixels"}


def main(words: list[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    arguments.add_argument("--docs", type=Path, default=ROOT / "docs")
    given = arguments.parse_args(words)
    files = {path.stem: path for path in sorted(given.results.glob("*.json"))}
    found = {name: read_results(path) for name, path in files.items() if not name.startswith("memory-")}
    figures = dict(draw(found))
    for name, figure in figures.items():
        (given.docs / f"{name}.svg").write_bytes(image(figure, "svg"))
    blocks = {
        "counts": counts(),
        "table main": beside_the_libraries(one for one in found.values() if one.sweep is None),
    }
    blocks |= {
        f"table {name}": f"{markdown_table(results)}\n\n{_list(notes(results))}" for name, results in found.items()
    }
    blocks |= {f"figure {name}": f"![{ALTERNATIVES[name.partition('-')[0]]}]({name}.svg)" for name in figures}
    fill(given.docs / "performance.md", blocks)
    memory = {
        f"table {name}": json.loads(path.read_text())["table"] for name, path in files.items() if name not in found
    }
    if memory:
        fill(given.docs / "memory.md", memory)


def fill(page: Path, blocks: dict[str, str]) -> None:
    """Write each block to its place on the page, and print it."""

    def filled(match: re.Match[str]) -> str:
        block = blocks.get(match[1], "Not measured yet.")
        print(f"{match[1]}:\n\n{block}\n")
        return f"<!-- {match[1]} -->\n{block}\n<!-- end -->"

    text = page.read_text(encoding="utf-8")
    pattern = r"<!-- ((?:table|figure) [\w-]+|counts) -->\n.*?<!-- end -->"
    page.write_text(re.sub(pattern, filled, text, flags=re.DOTALL), encoding="utf-8")


def beside_the_libraries(found: Iterable[Results]) -> str:
    """Return milliseconds of MAML at each setting with the fastest of our engines, and those of the faster library."""
    lines = ["| setting | gradshare | gradshare, with sharing | faster library | Ratio |", "|---|---:|---:|---:|---:|"]
    for results in sorted(found, key=lambda results: results.machine.cuda is None):  # GPUs first
        for shape in dict.fromkeys(m.case.shape for m in results.measurements if m.case.library in RIVALS):
            here = [m for m in results.measurements if m.case.shape == shape]
            best = {m.case.what: m for m in sorted(here, key=lambda m: -m.milliseconds)}  # the fastest comes last
            rival = results.fastest_rival(here[0].case)
            if rival is not None and {"maml", "maml+gs"} <= best.keys():
                case, machine = rival.case, results.machine
                where = (
                    f"{machine.threads} CPU cores" if case.device == "cpu" else machine.device.removeprefix("NVIDIA ")
                )
                where += f": {case.tasks} task{'s' if case.tasks > 1 else ''}"
                times = [one.milliseconds for one in (best["maml"], best["maml+gs"], rival)]
                ratio = times[2] / times[0]
                cells = [f"{where}, {case.shots}-shot, {case.image[1]}x{case.image[2]}", *map(short, times)]
                cells += [f"{ratio:.0f}" if ratio > 10 else f"{ratio:.1f}"]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def counts() -> str:
    """Return operations and bytes of every shape as a table."""
    lines = [
        "| Setting | What | TFLOP | GB in bf16 | GB in float32 or TF32 | operations a byte in bf16 |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, fields in SHAPES.items():
        for method in ("maml", "mamlpp"):
            case = Case(method=method, device="cuda", **fields)
            small, large = bytes_moved(replace(case, precision="bf16")), bytes_moved(case)
            figures = (operations(case) / 1e12, small / 1e9, large / 1e9, operations(case) / small)
            lines.append(f"| {name} | {method} | {' | '.join(map(short, figures))} |")
    return "\n".join(lines)


def draw(found: dict[str, Results]) -> Iterator[tuple[str, Figure]]:
    """Return the figures with their names."""
    for name, results in found.items():
        if results.sweep is None and not name.endswith("evaluation"):
            yield f"roofline-{name}", roofline(results)
    for name in sorted({stem.partition("-sweep-")[0] for stem, results in found.items() if results.sweep}):
        yield f"cost-{name}", cost([results for stem, results in found.items() if stem.startswith(f"{name}-sweep-")])


def roofline(results: Results) -> Figure:
    """Draw operations a second against operations a byte, below the measured ceilings: MAML with the best engine."""
    shown = [measurement for measurement in results.measurements if _in_roofline(measurement.case)]
    series = list(dict.fromkeys(_series(m.case) for m in shown))
    settings = list(dict.fromkeys(m.case.shape for m in shown))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 5), layout="constrained")
        axes = figure.add_subplot()
        _draw_ceilings(axes, results, shown)
        for measurement in shown:
            axes.plot(
                measurement.operations / measurement.bytes_moved,
                measurement.operations / measurement.milliseconds / 1e9,
                marker=MARKERS[settings.index(measurement.case.shape) % len(MARKERS)],
                color=COLOURS[series.index(_series(measurement.case)) % len(COLOURS)],
                linestyle="none",
            )
        axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        for number, name in enumerate(series):
            axes.plot([], [], color=COLOURS[number % len(COLOURS)], linewidth=6, label=name)
        for number, name in enumerate(settings):
            axes.plot([], [], color=INK, marker=MARKERS[number % len(MARKERS)], linestyle="none", label=name)
        figure.legend(loc="outside right upper")
        return figure


def _draw_ceilings(axes: Axes, results: Results, shown: list[Measurement]) -> None:
    used = {ceiling_of(m.case, results.ceilings) for m in shown}
    limits = {precision: ceiling for precision, ceiling in results.ceilings.items() if ceiling in used}
    ridges = [ceiling.rate / ceiling.bandwidth for ceiling in limits.values()]
    reached = [*ridges, *(m.operations / m.bytes_moved for m in shown)]
    for (precision, ceiling), ridge in zip(limits.items(), ridges, strict=True):
        x = [min(reached) / 2, ridge, max(reached) * 2]
        y = [min(ceiling.rate, each * ceiling.bandwidth) / 1e12 for each in x]
        axes.plot(x, y, color=INK, linewidth=1)
        label = f"{precision}: {short(y[-1])} TFLOP/s"
        axes.annotate(label, (x[-1], y[-1]), xytext=(0, 3), textcoords="offset points", ha="right", fontsize=9)


def _in_roofline(case: Case) -> bool:
    if case.library in RIVALS:
        return case.precision != "bf16"
    return case.what == "maml+gs" and (case.engine == "graph" or case.device == "cpu")


def cost(sweeps: Iterable[Results]) -> Figure:
    """Draw the time against one size at a time, and the least time that the machine allows."""
    by_name = {str(results.sweep): results for results in sweeps}
    present = [name for name in SWEEPS if name in by_name]
    with matplotlib.rc_context(STYLE):
        rows = (len(present) + 1) // 2
        figure = Figure(figsize=(8.4, 3.2 * rows), layout="constrained")
        for place, name in enumerate(present, start=1):
            axes = figure.add_subplot(rows, min(2, len(present)), place)
            _draw_sweep(axes, by_name[name], name)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower left", ncols=2, handlelength=3)
        return figure


def _draw_sweep(axes: Axes, results: Results, name: str) -> None:
    for number, series in enumerate(dict.fromkeys(_series(m.case) for m in results.measurements)):
        own = sorted((m for m in results.measurements if _series(m.case) == series), key=lambda m: _size(m.case, name))
        x, colour = [_size(m.case, name) for m in own], COLOURS[number % len(COLOURS)]
        low, high = ([m.quartiles[side] for m in own] for side in (0, 1))
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(x, [m.milliseconds for m in own], marker="o", markersize=4, color=colour, label=series)
        limits = [ceiling_of(m.case, results.ceilings) for m in own]
        floors = [1000 * limit.floor(m.case) for limit, m in zip(limits, own, strict=True) if limit is not None]
        if len(floors) == len(own):
            axes.plot(x, floors, color=colour, linestyle=(0, (2, 2)), linewidth=1, label=f"{series}: least time")
    axes.set(xlabel=AXES[name], ylabel="ms a meta-iteration", xlim=(0, None), ylim=(0, None))


def _size(case: Case, name: str) -> int:
    return case.image[1] if name == "size" else int(getattr(case, name))


def _series(case: Case) -> str:
    return f"{case.what}, {how(case)}"


def _list(lines: list[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


if __name__ == "__main__":
    main()
