"""report.html: one self-contained page. The picture, one table with the verdicts, then details, folded.

The page loads nothing, and all of it can be read without its script. Its markup, style and script are in `templates/`.
Every name that others chose is escaped by the templates and stays text.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from gradshare.errors import UserError, printable
from gradshare.experiments.presets import described
from gradshare.method.variants import VARIANTS, Variant
from gradshare.reports import words
from gradshare.reports.comparison import ArmResult, Comparison, ExperimentResult, Lead
from gradshare.reports.model import MACHINE, Floats, Measure, Run, count, method_name, sign, text_of
from gradshare.reports.panels import (
    FIRST,
    INK,
    MANY,
    STARTS,
    Line,
    Panel,
    curves,
    gates,
    limits,
    overview,
    tick_text,
    ticks,
)
from gradshare.reports.paper import experiment_of
from gradshare.reports.statistics import Verdict
from gradshare.reports.tables import all_tables
from gradshare.runs.config import RunConfig, flat

LOADER = PackageLoader("gradshare.reports")
OPEN_PANELS = 12  # more are folded
MOST_POINTS = 300  # of a line: more cannot be seen
SIDE = 1000  # units of a panel's box, both ways; the page stretches it
DIGITS = {"accuracy": 1, "gate": 3}  # decimals of a value under the pointer; of others, four digits


def report_page(comparison: Comparison, command: str) -> str:
    """The whole page."""
    runs = [one.run for one in comparison.runs.values()]
    tables = all_tables(comparison)
    templates, many = _templates(), len(comparison.experiments) > OPEN_PANELS
    style, script = (Markup(LOADER.get_source(templates, name)[0]) for name in ("page.css", "page.js"))
    text = templates.get_template("page.html").render(
        title=title(comparison),
        headline=headline(comparison),
        not_done=not_done(runs),
        overview=panel_views([found]) if many and (found := overview(comparison)) else [],
        curves=panel_views(curves(comparison)),
        gates=panel_views(gates(comparison)),
        open_panels=OPEN_PANELS,
        in_files=FIRST if len(comparison.experiments) > MANY else None,
        arms=list(dict.fromkeys(run.variant for run in runs)),
        verdicts=tables[0],
        details=tables[1:],
        reasons={run.name: "; ".join(filter(None, run.marks.values())) for run in runs if any(run.marks.values())},
        settings=settings(runs),
        norm_note=comparison.norm_note,
        test_tasks=sorted({run.test.tasks for run in runs if run.test}),
        command=command,
        training=[line for line in map(training_command, runs) if line],
        gate_m=words.GATE_M,
        gate_lam=words.GATE_LAM,
        style=style,
        script=script,
        policy=_policy(script),
    )
    return text + "\n"


def _templates() -> Environment:
    made = Environment(
        loader=LOADER,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    made.filters |= {"colour": themed, "dashes": _dashes, "nobreak": _no_break}
    return made


def _shown(value: Any) -> Any:
    """Control characters as \\x1b; the result is still escaped."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _no_break(text: str) -> Markup:
    """Escaped text with numbers on one line with their signs and units."""
    return Markup(re.sub(r"(?<=\d) (?=%)| (?=± )|(?<=±) ", "\N{NO-BREAK SPACE}", escape(printable(text))))


def _policy(script: str) -> str:
    """Nothing is loaded, and no script runs but ours."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def themed(row: Variant) -> str:
    """A variant's colour; black becomes the page's ink, which is light in the dark."""
    return "var(--ink)" if row.colour == INK else row.colour


def _dashes(lengths: Iterable[float]) -> str:
    """In widths of a line, as SVG has them in pixels."""
    return " ".join(f"{2 * length:g}" for length in lengths)


# Panels


class Path(NamedTuple):
    kind: str  # line, thin, band, dot, level
    arm: str
    colour: str
    dashes: str
    points: str


def panel_views(panels: list[Panel]) -> list[dict[str, Any]]:
    """Panels as the template draws them: in a box of 1000 x 1000 units that is stretched, with labels in percent."""
    return [_panel_view(panel, most_ticks=8 if len(panels) == 1 else 5) for panel in panels]


def _panel_view(panel: Panel, most_ticks: int) -> dict[str, Any]:
    (left, right), (low, high) = limits(panel)

    def across(values: Any) -> Any:
        return SIDE * (values - left) / (right - left)

    def down(values: Any) -> Any:
        return SIDE * (high - values) / (high - low)

    lines = [_thinned(line) for line in panel.lines]
    ticks_up = [(down(value), tick_text(value, panel.scale)) for value in ticks(low, high, most_ticks)]
    start = STARTS.get(panel.scale)
    return {
        "title": panel.title,
        "label": panel.label,
        "grid": "".join(f"M0 {place:.0f}H{SIDE}" for place, _ in ticks_up),
        "start": None if start is None else round(down(start)),
        "levels": [(down(mark.value) / 10, tick_text(mark.value, panel.scale)) for mark in panel.marks],
        "paths": [
            *(path for line in sorted(lines, key=lambda line: not line.thin) for path in _paths(line, across, down)),
            *(
                Path("level", arm.name, themed(arm), "", f"M{across(epoch):.0f} {down(mark.value) - 20:.0f}v40")
                for mark in panel.marks
                for arm, epoch in mark.reached
            ),
        ],
        "x_labels": [(across(value) / 10, f"{value:.0f}") for value in ticks(left, right, 8, whole=True)],
        "y_labels": [(place / 10, text) for place, text in ticks_up],
        "data": _data(panel, lines, (left, right, low, high)),
    }


def _thinned(line: Line) -> Line:
    """A line with no more points than can be seen; its best epoch stays."""
    if len(line.epochs) <= MOST_POINTS:
        return line
    kept = np.unique(np.linspace(0, len(line.epochs) - 1, MOST_POINTS).round().astype(int))
    kept = kept if line.best is None else np.union1d(kept, [line.best])
    best = None if line.best is None else int(np.searchsorted(kept, line.best))
    interval = None if line.interval is None else line.interval[kept]
    return replace(line, epochs=line.epochs[kept], values=line.values[kept], interval=interval, best=best)


def _paths(line: Line, across: Any, down: Any) -> Iterator[Path]:
    arm, colour, kind = line.variant.name, themed(line.variant), "thin" if line.thin else "line"
    dashes = _dashes(line.dashes)
    x, y = across(line.epochs), down(line.values)
    if line.interval is not None:
        top, bottom = down(line.values + line.interval), down(line.values - line.interval)
        band = "".join(
            f"M{_points(x[part], top[part])}L{_points(x[part][::-1], bottom[part][::-1])}Z"
            for part in _finite_parts(top)
            if part.stop - part.start > 1
        )
        yield Path(f"band {kind}", arm, colour, "", band)
    yield Path(kind, arm, colour, dashes, "".join(f"M{_points(x[part], y[part])}" for part in _finite_parts(y)))
    if line.best is not None or len(line.epochs) == 1:
        at = line.best or 0
        yield Path(f"dot {kind}", arm, colour, "", f"M{_points(x[at : at + 1], y[at : at + 1])}h0")


def _points(x: Floats, y: Floats) -> str:
    return " ".join(f"{a:.0f} {b:.0f}" for a, b in zip(x.tolist(), y.tolist(), strict=True))


def _finite_parts(values: Floats) -> list[slice]:
    """The stretches without a gap."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.isfinite(values).astype(int), [0]])))
    return [slice(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def _data(panel: Panel, lines: list[Line], box: tuple[float, float, float, float]) -> dict[str, Any]:
    """For the script: the box's limits, the epochs, and name, colour, values, intervals and arm of every line."""
    epochs = np.unique(np.concatenate([line.epochs for line in lines]))
    percent = 100 if panel.scale == "accuracy" else 1
    digits = DIGITS.get(panel.scale)

    def numbers(line: Line, values: Floats | None) -> list[float | None] | None:
        if values is None or not np.isfinite(values).any():
            return None
        row: list[float | None] = [None] * len(epochs)
        places = np.searchsorted(epochs, line.epochs)
        for place, value in zip(places.tolist(), (percent * values).tolist(), strict=True):
            if np.isfinite(value):
                row[place] = float(f"{value:.4g}") if digits is None else round(value, digits)
        return row

    left, right, low, high = box
    return {
        "box": [float(f"{edge:.6g}") for edge in (left, right, percent * low, percent * high)],
        "digits": digits,
        "unit": " %" if percent == 100 else "",
        "epochs": epochs.tolist(),
        "names": [printable(panel.names[place - 1]) for place in epochs.tolist()] if panel.names else None,
        "lines": [
            [
                printable(line.name),
                themed(line.variant),
                numbers(line, line.values),
                numbers(line, line.interval),
                printable(line.variant.name),
            ]
            for line in lines
        ],
    }


# Words


def title(comparison: Comparison) -> str:
    """Gradient sharing: MAML on glyphs, 5-way 1-shot."""
    found = [one.setting for one in comparison.experiments]
    methods = [method_name(one.method) for one in found if one.method is not None]
    data = [text_of(one.dataset) for one in found if one.dataset is not None]
    parts = [_several(methods, "methods") or "a run", _several([one.shape for one in found if one.shape], "shapes")]
    where = f" on {_several(data, 'data sets')}" if data else ""
    return f"Gradient sharing: {parts[0]}{where}" + (f", {parts[1]}" if parts[1] else "")


def _several(values: list[str], noun: str) -> str:
    distinct = list(dict.fromkeys(values))
    return words.listed(distinct) if len(distinct) <= 4 else f"{len(distinct)} {noun}"


def not_done(runs: list[Run]) -> str:
    """How many runs are not done, by their status; "" if all are."""
    states = Counter(run.status for run in runs if run.status != "done")
    kinds = [f"{number} {status}" for status, number in states.items()]
    return f"Not done: {words.listed(kinds)}, of {count(len(runs), 'run')}." if kinds else ""


def headline(comparison: Comparison) -> str:
    """The result in one or two sentences."""
    found = [(one, arm) for one in comparison.experiments if (arm := _subject(one)) and arm.against_original]
    if not found:
        return _best_run(comparison)
    return _one_pair(*found[0], comparison) if len(found) == 1 else _many_pairs([arm for _, arm in found])


def _subject(one: ExperimentResult) -> ArmResult | None:
    """Sharing, or else the first arm that has an original."""
    return one.main("shared") or next((arm for arm in one.arms if arm.against_original), None)


VERDICTS: dict[Verdict, str] = {
    "ahead": "is ahead of the original",
    "behind": "is behind the original",
    "mixed": "is ahead of the original in some epochs and behind in others",
    "unclear": "is neither clearly ahead of the original nor clearly behind",
}


def _one_pair(experiment: ExperimentResult, arm: ArmResult, comparison: Comparison) -> str:
    lead, measure = arm.against_original, comparison.measure
    assert lead is not None
    original = experiment.main("original")
    name = "sharing" if arm.variant.name == "shared" else arm.name
    start = f"With {name}" if arm.done and original and original.done else f"So far, with {name}"
    alone = len(comparison.experiments) == 1
    subject = experiment.setting.row.partition("/")[0] if alone else experiment.setting.title
    unit = "points of validation accuracy" if measure == "accuracy" else "in the validation loss"
    mean = f"{words.signed_spread(lead.difference, measure)} {unit} on average"
    over = f" over {count(lead.difference.seeds, 'seed')}" if lead.difference.seeds > 1 else ""
    control = _control_sentence(arm.against_best_control, measure) if lead.verdict == "ahead" else ""
    return f"{start}, {subject} {VERDICTS[lead.verdict]}: {mean}{over}. {control}".strip()


def _control_sentence(control: Lead | None, measure: Measure) -> str:
    if control is None:
        return "No control was trained beside it, so it is open what the gain comes from."
    by = f"{control.reference} ({words.signed(control.difference.mean, measure)})"
    if control.verdict == "ahead":
        return f"It is ahead of the best control too, {by}."
    start = "It is behind" if control.verdict == "behind" else "It is not clearly ahead of"
    return f"{start} the best control, {by}: the gain is not shown to come from sharing."


def _many_pairs(arms: list[ArmResult]) -> str:
    started = "Sharing is" if any(arm.variant.name == "shared" for arm in arms) else "The arms are"
    original = _counted([arm.against_original.verdict for arm in arms if arm.against_original], "of the original")
    controls = [arm.against_best_control.verdict for arm in arms if arm.against_best_control]
    second = f"Against the best control it is {_counted(controls, '')}." if controls else "No controls were trained."
    return f"{started} {original}. {second}"


def _counted(verdicts: list[Verdict], of: str) -> str:
    """ahead of the original in 2 of 4 experiments, behind in 1 and unclear in 1."""
    first, *others = [kind for kind in VERDICTS if kind in verdicts]
    of_all = f"of {count(len(verdicts), 'experiment')}"
    parts = [f"{first} {of}".strip() + f" in {verdicts.count(first)} {of_all}"]
    return words.listed(parts + [f"{kind} in {verdicts.count(kind)}" for kind in others])


def _best_run(comparison: Comparison) -> str:
    """The best of runs that cannot be compared."""
    measure = comparison.measure
    found = [(value, one.run) for one in comparison.runs.values() if (value := one.run.best_val) is not None]
    if not found:
        return "There is no validation value yet."
    value, run = max(found, key=lambda pair: sign(measure) * pair[0])
    who = f"The best of {len(found)} runs is {run.name}, with a" if len(found) > 1 else "It reached a"
    return f"{who} validation {measure} of {words.level(value, measure)} at epoch {run.best_epoch} of {run.last_epoch}."


# Settings and commands


class Settings(NamedTuple):
    common: list[tuple[str, str]]
    differing: list[str]
    rows: list[tuple[str, list[str]]]  # a run and its values


def settings(runs: list[Run]) -> Settings:
    """The options that all runs have in common, and those in which they differ."""
    options = [flat(run.options) for run in runs]
    keys = list(dict.fromkeys(key for one in options for key in one))
    values = {key: [text_of(one[key]) if key in one else words.ABSENT for one in options] for key in keys}
    differing = [key for key in keys if len(set(values[key])) > 1]
    common = [(key, values[key][0]) for key in keys if key not in differing]
    return Settings(
        common, differing, [(run.name, [values[key][place] for key in differing]) for place, run in enumerate(runs)]
    )


def training_command(run: Run) -> str | None:
    """`gradshare train ...` with every option that is not a default; None if a Python program trained the run.

    Device, engine, threads and the batch of an evaluation are left to the machine.
    """
    known = {field.name: field.default for field in fields(RunConfig)}
    try:
        config = RunConfig(**run.options)
    except (TypeError, UserError):
        return None
    one = experiment_of(run.options)
    if one and one.arm not in VARIANTS:
        one = one._replace(arm="original")  # an arm of your own is an option beside the preset
    preset = {key: value for key, (value, _) in described(one).items()} if one else {}
    if one:
        preset["inner_lr"] *= run.variant.rate
    defaults = {**known, **preset, "precision": preset.get("precision", "float32")}
    chosen = {key: getattr(config, key) for key in known if key not in MACHINE}
    if run.variant.rate != 1 and not one:
        chosen["arm"] = "original"  # its own rate is given, and `train` has no such arm
    given = {key: value for key, value in chosen.items() if value not in (defaults[key], "auto")}
    options = ["--preset", one.name] if one else []
    options += [word for key, value in given.items() for word in _option(key, value)]
    return shlex.join(["gradshare", "train", *options, "--out", str(run.folder)])


def _option(key: str, value: Any) -> list[str]:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [] if value is None else [f"--{name}", str(value)]
