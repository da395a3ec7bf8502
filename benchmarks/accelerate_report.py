"""The report of benchmarks/accelerate.py: a table for each regime, and a picture of all, from runs.csv."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import regimes

from gradshare.reports.statistics import spread

matplotlib.use("Agg")
from matplotlib import pyplot

SWEEP, CONFIRM = (0, 1), 10  # seeds of the sweep of rates; seeds from CONFIRM on are fresh
BESIDE = ("original", "gate-only", "tensor-gates")  # what each rule is compared with
CONTROLS = (*BESIDE, "half-rate")  # nothing is shared; all other variants share
SHORT = {  # tables of docs/when-to-share.md, a row for each regime: rule -> header
    "regimes": {
        **{"shared": "sharing", "batch-only": "batch-only", "memory-only": "memory-only"},
        **{"gate-only": "gate-only", "tensor-gates": "tensor-gates"},
    },
    "heads": {
        "original/head4": "head rate x4",
        "gate-only/head4": "gate-only, head rate x4",
        "gate-only/zero-init": "gate-only, head at zero",
        "gate-only/zero-init/head4": "gate-only, both",
    },
    "still": {
        "gate-only/zero-init": "head at zero",
        "gate-only/head4": "head rate x4",
        "gate-only/zero-init/head4": "both",
        "gate-only/anil": "body still",
        "gate-only/zero-init/anil": "head at zero, body still",
    },
}
REFERENCE = {"still": "gate-only"}  # what a table's rules are compared with; the others': the original
OTHERS = (  # the table of docs/when-to-share.md with a row for each rule
    *("additive", "mean-length", "length-keeping", "retrieval", "body-only", "not-first", "not-last"),
    *("equivariant/zero", "shared-tensor-gates", "shared/gates10", "additive/gates10"),
    *("gate-only/gates10", "tensor-gates/gates10", "original/zero-init", "gate-only/zero-init"),
    "tensor-gates/zero-init",
)
Seeds = dict[int, dict[str, float]]  # seed -> measures of one rule at its rate


INTRODUCTION = """\
# When does sharing help? The regimes of `python benchmarks/accelerate.py`

Each rule is trained at the rates 1/4, 1/2, 1, 2 and 4 times the regime's inner rate with seeds 0 and 1, in some
regimes at 8 and 16 times too; in `omniglot-20way` 1/2 to 16, with T = 25 1/2, 1 and 2. Its rate is the one with the
best last validation (*border*: the smallest or the largest one; *other*: not the best one, trained too). The table
has fresh seeds. A difference is paired by seed, with its 95 % interval over seeds; positive is better, also for
errors. Bold: the interval is above zero. *Start* is the mean over all validations of a training (the area under its
curve). *Level*: iterations until validation is as good as the original's last one, mean over the seeds that reach it;
on CUB and MiniImagenet at full size, epochs until it is 50 and 40 %.

![Differences to the original, early and at the end](report.svg)"""


def write(results: Mapping[Any, dict[str, float]], out: Path, page: Path | None = None) -> Path:
    """Write report.md and report.svg, and the tables of a page; returns the path of the first."""
    tables = {name: confirmed(results, name) for name in regimes.KNOWN}
    tables = {name: table for name, table in tables.items() if len(table) > 1}
    lines = [INTRODUCTION]
    lines += ["", ahead(tables)]
    for name, table in tables.items():
        lines += ["", *section(name, table, chosen_rates(results, name, table))]
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    picture(tables, out / "report.svg")
    if page is not None:
        text = page.read_text(encoding="utf-8")
        blocks = {name: short(tables, name) for name in SHORT}
        for name, block in {**blocks, "others": others(tables), "ahead": [ahead(tables)]}.items():
            start, end = f"<!-- table {name} -->\n", "<!-- end -->"
            before, _, rest = text.partition(start)
            text = before + start + "\n".join(block) + "\n" + end + rest.partition(end)[2]
        page.write_text(text, encoding="utf-8")
    return out / "report.md"


def last_validation(measures: Mapping[str, float], higher: bool) -> float:
    """The mean of the last two validations, such that more is better; -inf where they are not finite."""
    values = [value for _, value in curve(measures)[-2:]]
    mean = sum(values) / len(values)
    return (mean if higher else -mean) if math.isfinite(mean) else -math.inf


def best_rate(results: Mapping[Any, dict[str, float]], regime: str, rule: str, rates: Iterable[float]) -> float | None:
    """The rate whose last validation is best over the seeds of the sweep; None until all are there."""
    scores = {}
    for rate in rates:
        found = [results.get((regime, rule, rate, seed)) for seed in SWEEP]
        scores[rate] = sum(last_validation(one, regimes.KNOWN[regime].higher) if one else math.nan for one in found)
    return None if any(map(math.isnan, scores.values())) else max(scores, key=scores.__getitem__)


def confirmed(results: Mapping[Any, dict[str, float]], regime: str) -> dict[tuple[str, float], Seeds]:
    """(rule, rate) -> the fresh seeds, if at least two; of a preset without any, the seeds of the choice."""
    for first in (CONFIRM, 0) if regimes.KNOWN[regime].epochs else (CONFIRM,):
        found: dict[tuple[str, float], Seeds] = {}
        for cell, measures in results.items():
            if cell.regime == regime and cell.seed >= first:
                found.setdefault((cell.rule, cell.rate), {})[cell.seed] = measures
        found = {key: seeds for key, seeds in found.items() if len(seeds) > 1}
        if found:
            break
    chosen = chosen_rates(results, regime, found)
    return dict(sorted(found.items(), key=lambda row: chosen[row[0][0]] not in (None, row[0][1])))


def chosen_rates(
    results: Mapping[Any, dict[str, float]], regime: str, table: Iterable[tuple[str, float]]
) -> dict[str, float | None]:
    """The best rate of each rule; None for a rule that was trained without a sweep."""
    return {rule: best_rate(results, regime, rule, regimes.KNOWN[regime].rates) for rule, _ in table}


def section(name: str, table: Mapping[tuple[str, float], Seeds], chosen: Mapping[str, float | None]) -> list[str]:
    regime, by_rule = regimes.KNOWN[name], first_rates(table)
    unit = "accuracy in %" if regime.higher else "mean squared error"
    level = regime.level
    if math.isnan(level) and "original" in by_rule:
        level = last(by_rule["original"].values())
    beside = [rule for rule in BESIDE if rule in by_rule]
    header = ["rule", "rate", "seeds", f"test, {unit}", *(f"test − {rule}" for rule in beside)]
    header += [f"start − {rule}" for rule in beside] + ["level"]
    fresh = all(seed >= CONFIRM for seeds in table.values() for seed in seeds)
    title = name if fresh else f"{name}, the seeds of the choice"
    lines = [f"## {title}", "", f"{regime.about}. {length(regime)}", "", row(header), row(["---"] * len(header))]
    for (rule, rate), seeds in table.items():
        border = chosen[rule] is not None and rate in (min(regime.rates), max(regime.rates))
        note = " (other)" if chosen[rule] not in (None, rate) else " (border)" if border else ""
        cells = [rule, f"x{rate:g}{note}", str(len(seeds)), plain(measure["test"] for measure in seeds.values())]
        for of in (final, start):
            cells += [difference(seeds, by_rule[other], of, regime.higher, seeds is by_rule[other]) for other in beside]
        lines.append(row([*cells, reaching(seeds, level, regime.higher)]))
    return lines


def short(tables: Mapping[str, Mapping[tuple[str, float], Seeds]], called: str) -> Iterable[str]:
    """A row for each regime that has a rule which no table before has: test, and start, beside the reference's."""
    reference = REFERENCE.get(called, "original")
    rules, earlier = SHORT[called], list(SHORT)[: list(SHORT).index(called)]
    new = rules.keys() - {rule for other in earlier for rule in SHORT[other]}
    yield row(["regime", "", reference, *rules.values()])
    yield row(["---"] * (len(rules) + 3))
    for name, table in tables.items():
        regime, by_rule = regimes.KNOWN[name], first_rates(table)
        if reference in by_rule and by_rule.keys() & new:
            beside = by_rule[reference]
            mean = sum(map(final, beside.values())) / len(beside)
            cells = [both(by_rule.get(rule), beside, regime.higher) for rule in rules]
            what = f"{regime.about.partition(':')[0]}, {'accuracy' if regime.higher else 'lower error'}"
            yield row([f"`{name}`", what, f"{mean:.1f} %" if regime.higher else f"{mean:.3f}", *cells])


def both(seeds: Seeds | None, other: Seeds, higher: bool) -> str:
    """The difference to another rule in the test and at the start."""
    of_both = (difference(seeds, other, of, higher, False) for of in (final, start)) if seeds else ()
    return "<br>start ".join(of_both)


def others(tables: Mapping[str, Mapping[tuple[str, float], Seeds]]) -> Iterable[str]:
    """A row for each rule of OTHERS, a column for each regime that has at least three of them."""
    shown = {name: first_rates(table) for name, table in tables.items()}
    shown = {name: by_rule for name, by_rule in shown.items() if len(by_rule.keys() & set(OTHERS)) > 2}
    yield row(["rule", *(f"`{name}`" for name in shown)])
    yield row(["---"] * (len(shown) + 1))
    for rule in OTHERS:
        cells = [
            both(by_rule.get(rule), by_rule["original"], regimes.KNOWN[name].higher) for name, by_rule in shown.items()
        ]
        if any(cells):
            yield row([f"`{rule}`", *cells])


def ahead(tables: Mapping[str, Mapping[tuple[str, float], Seeds]]) -> str:
    """The ways of sharing whose test is ahead of every row without sharing, each interval above zero."""
    found, compared = [], 0
    for name, table in tables.items():
        by_rule, higher = first_rates(table), regimes.KNOWN[name].higher
        alone = [seeds for rule, seeds in by_rule.items() if rule.partition("/")[0] in CONTROLS]
        sharing = {rule: seeds for rule, seeds in by_rule.items() if rule.partition("/")[0] not in CONTROLS}
        for rule, seeds in sharing.items():
            differences = [paired(seeds, other, final, higher) for other in alone]
            found += [f"{rule} on {name}"] if all(one.mean > (one.interval or math.inf) for one in differences) else []
        compared += len(sharing)
    return (
        f"Ways of sharing that are ahead of every arm without sharing in the test: {', '.join(found) or 'none'},"
        f" of {compared} pairs of a way and a regime."
    )


def first_rates(table: Mapping[tuple[str, float], Seeds]) -> dict[str, Seeds]:
    """The seeds of each rule at its chosen rate: other rates that were trained too come after it."""
    found: dict[str, Seeds] = {}
    for (rule, _), seeds in table.items():
        found.setdefault(rule, seeds)
    return found


def length(regime: regimes.Regime) -> str:
    steps = f"T = {regime.tasks}, {regime.steps} inner steps, inner rate {regime.rate:g} times the factor"
    if regime.epochs:
        return f"{regime.epochs} epochs of 1,000 iterations, {steps}."
    return f"{regime.iterations} iterations, {steps}, outer rate {regime.outer:g}."


def row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def curve(measures: Mapping[str, float]) -> list[tuple[int, float]]:
    """The validations, (iteration or epoch, measure), in order."""
    return sorted((int(name[4:]), value) for name, value in measures.items() if name.startswith("val@"))


def final(measures: Mapping[str, float]) -> float:
    return measures["test"]


def start(measures: Mapping[str, float]) -> float:
    values = [value for _, value in curve(measures)]
    return sum(values) / len(values)


def last(seeds: Iterable[Mapping[str, float]]) -> float:
    """The mean last validation."""
    values = [curve(measures)[-1][1] for measures in seeds]
    return sum(values) / len(values)


def plain(values: Iterable[float]) -> str:
    found = spread(values)
    assert found is not None
    return f"{found.mean:.3g} ± {found.interval or 0:.2g}"


Of = Callable[[Mapping[str, float]], float]


def paired(seeds: Seeds, other: Seeds, of: Of, higher: bool) -> Any:
    """The mean of the paired differences and its interval; positive is better."""
    sign = 1 if higher else -1
    return spread(sign * (of(seeds[seed]) - of(other[seed])) for seed in sorted(seeds.keys() & other.keys()))


def difference(seeds: Seeds, other: Seeds, of: Of, higher: bool, same: bool) -> str:
    found = paired(seeds, other, of, higher)
    if same or found is None or found.interval is None:
        return "–"
    places = 1 if higher else 3
    text = f"{found.mean:+.{places}f} ± {found.interval:.{places}f}".replace("-", "−")
    return f"**{text}**" if found.mean - found.interval > 0 else text


def reaching(seeds: Seeds, level: float, higher: bool) -> str:
    """Mean of the first iterations at the level, and how many seeds reach it."""
    hits = [
        next((at for at, value in curve(measures) if (value >= level if higher else value <= level)), None)
        for measures in seeds.values()
    ]
    there = [hit for hit in hits if hit is not None]
    return f"{sum(there) / len(there):.0f} ({len(there)} of {len(hits)})" if there else f"– (0 of {len(hits)})"


def picture(tables: Mapping[str, Mapping[tuple[str, float], Seeds]], path: Path) -> None:
    """A panel for each regime: the difference of each rule to the original, at the start and at the end."""
    shown = {name: first_rates(table) for name, table in tables.items()}
    shown = {name: by_rule for name, by_rule in shown.items() if "original" in by_rule}
    if not shown:
        return
    pyplot.rcParams["svg.hashsalt"] = "accelerate"
    longest, rows = max(map(len, shown.values())), (len(shown) + 1) // 2
    figure, grid = pyplot.subplots(rows, 2, figsize=(9.5, (0.3 * longest + 0.9) * rows + 0.5), squeeze=False)
    axes = list(grid.flat)
    for axis in axes[len(shown) :]:
        axis.remove()
    for axis, (name, by_rule) in zip(axes, shown.items(), strict=False):
        rules = [rule for rule in by_rule if rule != "original"]
        for of, label, colour, shift in ((start, "start", "#e69f00", -0.15), (final, "test", "#0072b2", 0.15)):
            found = [paired(by_rule[rule], by_rule["original"], of, regimes.KNOWN[name].higher) for rule in rules]
            axis.errorbar(
                [one.mean for one in found],
                [place + shift for place in range(len(rules))],
                xerr=[one.interval or 0 for one in found],
                fmt="o", markersize=3.5, color=colour, label=label, linewidth=1.2,
            )  # fmt: skip
        axis.axvline(0, color="#1b1f24", linewidth=0.8)
        axis.set_yticks(range(len(rules)), rules, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("points better" if regimes.KNOWN[name].higher else "lower error", fontsize=8)
        axis.tick_params(axis="x", labelsize=8)
    axes[0].legend(fontsize=8, loc="best")
    figure.suptitle("Difference to the original, each rule at its own best rate (95 % over paired seeds)", fontsize=10)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
