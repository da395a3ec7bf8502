"""Reports of many runs: experiments, seeds, the paper's figures, and runs that came to nothing."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from gradshare.reports.against import T_975, spread
from gradshare.reports.description import training_command
from gradshare.reports.experiments import group
from gradshare.reports.headline import headline, key_figures, pairs, unfinished, verdict_text
from gradshare.reports.hover import hover
from gradshare.reports.run_tables import threshold_table
from tests.reports.test_reports import HOSTILE, drawn, make_run, outcome

from gradshare.experiments.presets import PRESETS, preset
from gradshare.reports import compare_runs, curves, find_runs, findings, gates, write_report
from gradshare.reports.formats import csv_experiments, latex, latex_text, markdown
from gradshare.reports.paper import TABLE, departures, experiment_of, paper_cell
from gradshare.reports.tables import accuracy_tables, all_tables, paper_table, seeds_table, speed_table

PAPER = {"dataset": "cub", "shots": 5, "inner_lr": 0.1, "steps": 5}


@pytest.fixture
def seeds(tmp_path: Path) -> Path:
    """CUB at 5 shots, both arms with two seeds: sharing leads by 10 and by 20 points in each of four epochs."""
    for seed, lead in ((0, 0.1), (1, 0.2)):
        base = [0.30, 0.40, 0.50, 0.50]
        test = outcome(0.5, 0.80 + seed / 50)
        make_run(tmp_path / "original" / f"seed-{seed}", "original", base, seed=seed, test=test, **PAPER)
        led = [value + lead for value in base]
        make_run(tmp_path / "shared" / f"seed-{seed}", "shared", led, seed=seed, gate=[0.4], test=test, **PAPER)
    return tmp_path


def compared(folder: Path) -> dict[str, Any]:
    return compare_runs(find_runs(folder))


# Experiments


def test_experiments_are_told_apart_and_stand_in_the_papers_order(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [
        {"dataset": "mini"},
        {"dataset": "cub", "shots": 5},
        {"dataset": "cub", "tasks": 1},
        {"dataset": "cub"},
        {"dataset": "cub", "inner_lr": 1.0},
        {"dataset": "cub-resize", "method": "mamlpp"},
        {"dataset": "cub", "method": "metasgd"},
    ]
    for number, given in enumerate(options):
        for seed in (0, 1):
            chosen = {"inner_lr": 0.1, **given, "seed": seed}
            make_run(tmp_path / f"{number}" / f"seed-{seed}", "original", [0.5], **chosen)
    assert [one.setting.title for one in group(find_runs(tmp_path))] == [
        "MAML/5 on cub, 5-way 1-shot, inner rate 0.1",
        "MAML/1 on cub, 5-way 1-shot, inner rate 0.1",
        "Meta-SGD/5 on cub, 5-way 1-shot, inner rate 0.1",
        "MAML++/5 on cub-resize, 5-way 1-shot, inner rate 0.1",
        "MAML/5 on cub, 5-way 5-shot, inner rate 0.1",
        "MAML/5 on cub, 5-way 1-shot, inner rate 1.0",
        "MAML/5 on mini, 5-way 1-shot, inner rate 0.1",
    ]


def test_the_half_rate_control_belongs_to_the_whole_rate(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "seed-0", "original", [0.4], inner_lr=0.1)
    make_run(tmp_path / "b" / "seed-0", "original", [0.3], inner_lr=0.05)
    make_run(tmp_path / "c" / "seed-0", "half-rate", [0.5], inner_lr=0.05)
    arms = compared(tmp_path)["arms"]
    assert arms["c/seed-0"]["against_original"]["reference"] == "a/seed-0"


def test_one_arm_in_two_configurations_is_two_rows(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.4])
    for norm in ("global", "tensor"):
        make_run(tmp_path / norm, "shared", [0.5 if norm == "global" else 0.6], norm=norm)
    comparison = compared(tmp_path)
    (experiment,) = comparison["experiments"]
    assert [one["name"] for one in experiment["repeats"]] == ["original", "global", "tensor"]
    assert comparison["arms"]["tensor"]["against_original"]["reference"] == "original"


def test_one_arm_with_longer_and_shorter_runs_is_named_by_its_epochs(tmp_path: Path) -> None:
    make_run(tmp_path / "original" / "seed-0", "original", [0.4])
    make_run(tmp_path / "shared" / "seed-0", "shared", [0.4])
    for seed in (1, 2):
        folder = make_run(tmp_path / "shared" / f"seed-{seed}", "shared", [0.4], seed=seed)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "epochs": 1}))
    (experiment,) = compared(tmp_path)["experiments"]
    assert [one["name"] for one in experiment["repeats"]] == ["original", "shared, 6 epochs", "shared, 1 epoch"]
    assert [len(one["runs"]) for one in experiment["repeats"]] == [1, 1, 2]


def test_where_there_is_room_for_one_the_configuration_with_the_most_seeds_is_told(tmp_path: Path) -> None:
    make_run(tmp_path / "original" / "seed-0", "original", [0.4], test=outcome(0.4, 0.4))
    make_run(tmp_path / "first" / "seed-0", "shared", [0.9], test=outcome(0.9, 0.9), norm="tensor")
    for seed in (0, 1):
        folder = tmp_path / "global" / f"seed-{seed}"
        make_run(folder, "shared", [0.5], test=outcome(0.5, 0.5), seed=seed, norm="global")
    comparison = compared(tmp_path)
    (table,) = accuracy_tables(comparison)
    assert [cell.value for cell in table.rows[0][1:3]] == [0.4, 0.5]
    assert "the one with the most seeds: MAML/5 on glyphs, global/seed-0." in table.note
    assert [pair.shared["name"] for pair in pairs(comparison)] == ["global/seed-0"]


def test_runs_that_differ_in_machine_and_seed_are_repeats(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "shared", [0.4], seed=0, threads=1, device="cpu")
    make_run(tmp_path / "b", "shared", [0.4], seed=1, threads=2, device="cuda")
    (experiment,) = compared(tmp_path)["experiments"]
    assert [one["runs"] for one in experiment["repeats"]] == [["a", "b"]]


# Seeds


def test_the_interval_over_seeds_is_students() -> None:
    assert spread([1.0, 3.0]) == {"mean": 2.0, "interval": pytest.approx(12.706), "seeds": 2}
    assert spread([5.0]) == {"mean": 5.0, "interval": None, "seeds": 1}
    assert spread([None, 4.0, None]) == {"mean": 4.0, "interval": None, "seeds": 1}
    assert spread([None]) is None
    many = spread([float(number % 2) for number in range(40)])
    assert many is not None and many["interval"] == pytest.approx(2.0227 * math.sqrt(0.25 / 39), rel=1e-4)
    assert list(T_975) == sorted(T_975, reverse=True)


def test_means_over_seeds(seeds: Path) -> None:
    original, shared = compared(seeds)["experiments"][0]["repeats"]
    assert shared["mean_difference"] == {"mean": 15.0, "interval": pytest.approx(12.706 * 5), "seeds": 2}
    assert shared["area"]["mean"] == pytest.approx(60)  # 4 epochs of 10 and of 20 points
    assert shared["speed_up"]["mean"] == 0
    assert original["speed_up"] is None
    assert shared["test"] == {
        "value": pytest.approx(0.81), "interval": pytest.approx(12.706 * 0.01), "over": "seeds", "seeds": 2,
    }  # fmt: skip


def test_the_time_to_reach_is_a_mean_over_seeds(seeds: Path) -> None:
    experiment = compared(seeds)["experiments"][0]
    assert [each["value"] for each in experiment["thresholds"]] == [0.4, 0.5, 0.6, 0.7]
    original, shared = experiment["repeats"]
    assert original["reached"][1]["epoch"] == {"mean": 3.0, "interval": 0.0, "seeds": 2}
    assert shared["reached"][1]["epoch"]["mean"] == 1.5 and shared["reached"][1]["seconds"]["mean"] == 15.0
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in threshold_table(experiment, "accuracy").rows}
    assert rows["original"] == ["epoch 2 ± 0 (20.0 s)", "epoch 3 ± 0 (30.0 s)", "–", "–"]
    assert rows["shared"][3] == "epoch 3 (30.0 s) (1 of 2)"


def test_several_seeds_are_told_in_one_finding(seeds: Path) -> None:
    told = {finding.about: finding.text for finding in findings(compared(seeds))}
    assert list(told) == ["original", "shared"]
    assert "its curve is ahead in 2 of 2, behind in 0" in told["shared"]
    assert "the mean difference is +15.0 ± 63.5 points" in told["shared"]
    assert "It reached 50 % at epoch 1.5 (15.0 s) on average, the original at epoch 3 (30.0 s)." in told["shared"]


def test_an_unfinished_seed_does_not_spoil_the_mean(seeds: Path) -> None:
    make_run(seeds / "shared" / "seed-2", "shared", [0.1], finished=False, seed=2, **PAPER)
    shared = compared(seeds)["experiments"][0]["repeats"][1]
    assert len(shared["runs"]) == 3 and len(shared["counted"]) == 2
    assert shared["best_val"]["seeds"] == 2
    row = next(row for row in seeds_table(compared(seeds)).rows if row[1].text == "shared")
    assert row[2].text == "2 of 3 done"


def test_a_control_over_seeds_accounts_for_the_gain(seeds: Path) -> None:
    for seed in (0, 1):
        options = {**PAPER, "inner_lr": 0.05, "seed": seed}
        make_run(seeds / "half" / f"seed-{seed}", "half-rate", [0.42, 0.52, 0.62, 0.62], **options)
    text = next(finding.text for finding in findings(compared(seeds)) if finding.about == "half-rate")
    assert "gains 12.0 points on the original, where sharing gains 15.0 points" in text
    assert text.endswith("most of the gain is there with the smaller step alone.")
    assert "on average over 2 seeds, which the interval over seeds cannot tell from none." in headline(compared(seeds))
    assert "Most of that gain is there with the smaller step alone (half-rate)." in headline(compared(seeds))


def test_conditioned_sharing_over_seeds_is_held_against_sharing(seeds: Path) -> None:
    before = headline(compared(seeds))
    for seed in (0, 1):
        make_run(seeds / "own" / f"seed-{seed}", "conditioned", [0.9, 0.9, 0.9, 0.9], **{**PAPER, "seed": seed})
    comparison = compared(seeds)
    text = next(finding.text for finding in findings(comparison) if finding.about == "conditioned")
    leads = [comparison["arms"][f"own/seed-{seed}"]["against_shared"]["mean_difference"] for seed in (0, 1)]
    assert "Against sharing of the same seed it is ahead in 2 of 2, behind in 0" in text
    assert f"the mean difference is +{sum(leads) / 2:.1f} ±" in text and "alone." not in text
    assert headline(comparison) == before  # it accounts for no gain


# The paper


def test_the_papers_table_is_in_the_papers_source() -> None:
    """Every number of ours as the paper prints it, where the shared copy of the paper is at hand."""
    source = Path(__file__).parents[3] / "shared" / "paper.tex"
    if not source.exists():
        pytest.skip("paper.tex is not beside this checkout")
    text = source.read_text().replace("\n", " ")
    names = {"maml": "MAML", "metasgd": "Meta-SGD", "mamlpp": r"MAML\+\+"}
    for method, tasks in {(method, tasks) for _, method, tasks in TABLE}:
        line = re.search(rf" {names[method]}/{tasks} & (.*?)\\\\", text)
        assert line is not None
        printed = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line.group(1))]
        assert printed == [*TABLE["cub", method, tasks], *TABLE["mini", method, tasks]]


def test_every_preset_finds_its_experiment_and_departs_in_nothing() -> None:
    for name, one in PRESETS.items():
        config = asdict(preset(name))
        assert experiment_of(config) == one
        assert departures(config) == []
        assert (paper_cell(config) is not None) == (one.shots == 5 and not one.tenfold)
    half = asdict(preset("cub-5shot-5task-maml~half-rate"))
    found = experiment_of(half)
    assert found is not None and found.arm == "half-rate" and departures(half) == []


@pytest.mark.parametrize(
    "odd", [{"dataset": ["cub"]}, {"dataset": "glyphs"}, {"inner_lr": "x"}, {"arm": ["a"]}, {"inner_lr": 0.2}, {}]
)
def test_what_is_not_the_papers_has_no_cell(odd: dict[str, Any]) -> None:
    config = {**asdict(preset("cub-5shot-5task-maml")), **odd} if odd else {}
    assert experiment_of(config) is None and paper_cell(config) is None and departures(config) == []


def test_ours_beside_the_papers(seeds: Path) -> None:
    rows = [[cell.text for cell in row] for row in paper_table(compared(seeds)).rows]
    assert rows[0][1:6] == ["original", "81.0 ± 12.7 % (seeds)", "83.2 ± 1.4 %", "−2.2", "overlap"]
    assert rows[1][1:5] == ["shared", "81.0 ± 12.7 % (seeds)", "83.4 ± 1.4 %", "−2.4"]
    assert rows[1][6:8] == ["0 ± 0 %", "+66 %"]
    assert "epochs 6 (paper: 150)" in rows[0][8] and "iterations 40 (paper: 1000)" in rows[0][8]


def test_intervals_that_part_from_the_papers_are_said_to(tmp_path: Path) -> None:
    make_run(tmp_path / "shared", "shared", [0.5], test=outcome(0.6, 0.7), **PAPER)
    (row,) = paper_table(compared(tmp_path)).rows
    assert [cell.text for cell in row[2:6]] == ["70.0 ± 1.0 % (tasks)", "83.4 ± 1.4 %", "−13.4", "apart"]


def test_the_accuracy_table_has_the_papers_form(seeds: Path) -> None:
    make_run(seeds / "m" / "seed-0", "original", [0.5], test=outcome(0.5, 0.6), **{**PAPER, "dataset": "mini"})
    make_run(seeds / "one" / "seed-0", "original", [0.5], test=outcome(0.5, 0.6), **{**PAPER, "shots": 1})
    make_run(seeds / "two" / "seed-0", "original", [0.5], **{**PAPER, "shots": 2})  # without a test: no table
    first, second = accuracy_tables(compared(seeds))
    assert first.title.endswith("5-way 1-shot, inner rate 0.1") and second.title.endswith("5-shot, inner rate 0.1")
    parts = ("original", "with sharing", "speed-up")
    assert second.columns == ["Method/tasks", *(f"{data}: {part}" for data in ("cub", "mini") for part in parts)]
    (row,) = second.rows
    assert [cell.text for cell in row] == ["MAML/5", "81.0 ± 12.7 %", "81.0 ± 12.7 %", "0 %", "60.0 ± 1.0 %", "–", "–"]
    assert row[1].beside == "paper 83.2 ± 1.4 %" and row[3].beside == "paper +66 %"
    assert first.rows[0][1].beside == ""  # the paper's table has no 1-shot
    assert "(paper 83.2 ± 1.4 %)" in markdown(second) and r"(paper 83.2 $\pm$ 1.4 \%)" in latex(second)


def test_one_plain_comparison_has_one_table(tmp_path: Path) -> None:
    for arm in ("original", "shared"):
        make_run(tmp_path / arm, arm, [0.5])
    assert [table.title for table in all_tables(compared(tmp_path))] == ["Every run", "Speed-up"]


def test_robust_speed_ups_stand_beside_the_papers(seeds: Path) -> None:
    (row,) = speed_table(compared(seeds)).rows
    assert [cell.text for cell in row[1:]] == [
        "shared", "0 ± 0 %", "50 %", "1.5 ± 6.4", "+125 ± 953 %", "+125 ± 953 %", "+60.0 ± 254.1",
    ]  # fmt: skip
    # 50 %: the originals at epoch 3, sharing at epochs 2 and 1: 50 % and 200 % sooner


def test_a_speed_up_is_not_told_of_a_run_that_is_still_short(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.3, 0.4, 0.5])
    make_run(tmp_path / "shared", "shared", [0.2], finished=False)
    shared = compared(tmp_path)["experiments"][0]["repeats"][1]
    assert shared["speed_up"] is None and shared["mean_difference"]["mean"] == -10
    assert headline(compared(tmp_path)).startswith("So far, with sharing, MAML is behind the original")


# Runs that came to nothing


def test_failed_diverged_and_planned_runs_are_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "cub-1shot-5task-maml" / "seed-0", "original", [0.3], finished=False)
    make_run(tmp_path / "cub-1shot-5task-maml" / "seed-1", "original", [0.3, math.nan], seed=1)
    make_run(tmp_path / "cub-1shot-5task-maml" / "seed-2", "original", [0.3], finished=False, seed=2)
    notes = tmp_path / ".grid" / "cub-1shot-5task-maml"
    notes.mkdir(parents=True)
    (notes / "seed-0.failure.txt").write_text(f"out of memory {HOSTILE}\ntraceback\n")
    (notes / "seed-2.failure.txt").write_text("the loss became nan in epoch 2, iteration 1: training stopped\n")
    (notes / "seed-3.plan.json").write_text(json.dumps(asdict(preset("cub-1shot-5task-maml", seed=3))))
    comparison = write_report(tmp_path)
    states = {arm["seed"]: arm["state"] for arm in comparison["arms"].values()}
    assert states == {0: "failed", 1: "diverged", 2: "diverged", 3: "waiting"}
    page = (tmp_path / "report.html").read_text()
    assert "out of memory &lt;script&gt;" in page and HOSTILE not in page
    assert all(f"({state})" in page for state in ("failed", "diverged", "waiting"))
    assert unfinished(comparison) == "Not done: 1 failed, 2 diverged and 1 waiting, of 4 runs."
    rows = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert len(rows) == 4 and {row["state"] for row in rows} == {"failed", "diverged", "waiting"}


# First screen


def test_one_comparison_in_a_sentence(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.3, 0.4], test=outcome(0.4, 0.4))
    make_run(tmp_path / "shared", "shared", [0.4, 0.5], test=outcome(0.5, 0.5))
    comparison = compared(tmp_path)
    assert headline(comparison) == (
        "With sharing, MAML is ahead of the original: +10.0 points of validation accuracy on average."
        " No control was trained beside it, so what the gain comes from is open."
    )
    assert [figure.value for figure in key_figures(comparison)] == ["50.0 ± 1.0 %", "+10.0 points", "0 %", "epoch 1"]


def test_a_lead_that_turns_is_told_as_one(tmp_path: Path) -> None:
    for data in ("cub", "mini"):
        make_run(tmp_path / data / "original", "original", [0.4, 0.5], dataset=data)
        make_run(tmp_path / data / "shared", "shared", [0.6, 0.3], dataset=data)
    make_run(tmp_path / "cub" / "half-rate", "half-rate", [0.5, 0.5], dataset="cub", inner_lr=0.2)
    comparison = compared(tmp_path)
    assert headline(comparison) == (
        "With sharing, the validation curve is ahead in some epochs and behind in others in all 2 experiments. Controls"
        " were trained in 1 of 2 experiments: see there what a gain comes from."
    )
    told = verdict_text(comparison["experiments"][0], comparison)
    assert told.startswith("ahead in some epochs, behind in others, ")


def test_one_speed_up_is_no_median(tmp_path: Path) -> None:
    for data, epochs in (("cub", 3), ("mini", 2)):
        make_run(tmp_path / data / "original", "original", [0.4, 0.5, 0.6], dataset=data)
        make_run(tmp_path / data / "shared", "shared", [0.4, 0.6, 0.5][:epochs], dataset=data)
    told = key_figures(compared(tmp_path))[2]
    assert (told.value, told.label) == ("+50 %", "speed-up, in 1 of 2 experiments")


def test_a_store_that_is_not_the_data_sets_own_is_named(tmp_path: Path) -> None:
    for data, method in (("cub", "maml"), ("cub-resize", "mamlpp")):
        for arm in ("original", "shared"):
            options = {**PAPER, "dataset": data, "method": method}
            make_run(tmp_path / method / arm, arm, [0.4, 0.5], test=outcome(0.5, 0.5), **options)
    runs = find_runs(tmp_path)
    titles = [axes.get_title(loc="left") for axes in drawn(curves(runs)).figure.axes]
    assert titles == ["MAML/5, 5-way 5-shot", "MAML++/5, 5-way 5-shot, cub-resize"]
    (table,) = accuracy_tables(compare_runs(runs))
    assert "MAML++/5 from the store cub-resize." in table.note and "MAML/5 from" not in table.note


def test_many_experiments_in_a_sentence(tmp_path: Path) -> None:
    for data, lead in (("cub", 0.1), ("mini", 0.0), ("glyphs", -0.1)):
        make_run(tmp_path / data / "original", "original", [0.4, 0.5], dataset=data, test=outcome(0.5, 0.5))
        values = [0.4 + lead, 0.5 + lead]
        make_run(tmp_path / data / "shared", "shared", values, dataset=data, test=outcome(0.5, 0.5 + lead))
    comparison = compared(tmp_path)
    assert headline(comparison) == (
        "With sharing, the validation curve is ahead of the original's in 1 of 3 experiments, behind the original's in"
        " 1 and neither ahead nor behind in 1. At test it is better with intervals apart in 1 of 3 experiments, worse"
        " with intervals apart in 1 and not apart in 1. No controls were trained, so what a gain comes from is open."
    )
    assert key_figures(comparison)[0].value == "1 of 3"


# Figures


def test_panels_by_data_set_and_rate(tmp_path: Path) -> None:
    for data in ("cub", "mini"):
        for rate in (0.1, 1.0):
            for arm in ("original", "shared"):
                options = {**PAPER, "dataset": data, "inner_lr": rate}
                make_run(
                    tmp_path / f"{data}{rate}" / arm,
                    arm,
                    [0.4, 0.5],
                    gate=[0.4] if arm == "shared" else None,
                    **options,
                )
    make_run(tmp_path / "evil" / "x", "original", [0.4], dataset="../../<b>", inner_lr=0.1)
    write_report(tmp_path)
    written = {path.name for path in tmp_path.iterdir() if path.suffix == ".svg"}
    expected = {
        f"{kind}-{data}-{rate}.svg" for kind in ("curves", "gates") for data in ("cub", "mini") for rate in (0.1, 1.0)
    }
    assert written == expected | {"curves-..-..-b-0.1.svg"}


def test_the_panels_stand_as_in_the_paper(tmp_path: Path) -> None:
    for method in ("maml", "metasgd", "mamlpp"):
        for shots, tasks in ((1, 5), (5, 1), (5, 5), (1, 1)):
            place = tmp_path / f"{method}{shots}{tasks}" / "seed-0"
            make_run(place, "original", [0.4, 0.5], method=method, shots=shots, tasks=tasks)
    titles = [axes.get_title(loc="left") for axes in drawn(curves(find_runs(tmp_path))).figure.axes]
    assert titles[:4] == [
        "MAML/5, 5-way 1-shot", "Meta-SGD/5, 5-way 1-shot", "MAML++/5, 5-way 1-shot", "MAML/1, 5-way 1-shot",
    ]  # fmt: skip


def test_a_panel_names_its_arms_whatever_the_folders_are_called(tmp_path: Path) -> None:
    for tasks in (1, 5):
        for arm in ("original", "shared") if tasks == 1 else ("original", "shared", "half-rate"):
            make_run(tmp_path / f"cub-{tasks}task-{arm}" / "seed-0", arm, [0.4, 0.5], **{**PAPER, "tasks": tasks})
    runs = find_runs(tmp_path)
    assert {run.name for run in runs if run.arm == "half-rate"} == {"cub-5task-half-rate/seed-0"}
    labels = [text.get_text() for axes in drawn(curves(runs)).figure.axes for text in axes.get_legend().get_texts()]
    assert sorted({label.split(":")[0].split(" (")[0] for label in labels}) == ["half-rate", "original", "shared"]


def test_the_legend_of_several_seeds(seeds: Path) -> None:
    drawing = drawn(curves(find_runs(seeds)))
    labels = [text.get_text() for text in drawing.figure.axes[0].get_legend().get_texts()]
    assert labels[1] == "shared, 2 seeds: MaxVal 65.0% Ep 3 Test 81.0±12.7%"
    names = [line.label for line in drawing.panels[0].curves]
    assert names[3:] == ["shared, mean", "shared, seed 0", "shared, seed 1"]
    assert drawing.panels[0].curves[3].values == pytest.approx([0.45, 0.55, 0.65, 0.65])


def test_hover_scales_are_the_axes(seeds: Path) -> None:
    drawing = drawn(gates(find_runs(seeds)))
    (panel,) = hover(drawing)
    axes, figure = drawing.figure.axes[0], drawing.figure
    x, y = figure.transFigure.inverted().transform(axes.transData.transform((3, 0.4)))
    width, height = 72 * figure.get_size_inches()
    assert panel["x"][0] * 3 + panel["x"][1] == pytest.approx(x * width, abs=0.05)
    assert panel["y"][0] * 0.4 + panel["y"][1] == pytest.approx((1 - y) * height, abs=0.05)


# Files and commands


def test_latex_escapes_everything() -> None:
    assert latex_text("50 % & a_b\\{x}\n±−–") == r"50 \% \& a\_b\textbackslash{}\{x\} $\pm$$-$--"
    assert latex_text("^~#$<b>") == r"\textasciicircum{}\textasciitilde{}\#\$\textless{}b\textgreater{}"


def test_the_latex_file_has_every_table(seeds: Path) -> None:
    write_report(seeds)
    text = (seeds / "table.tex").read_text()
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 5
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    shapes = re.findall(r"\\begin\{tabular\}\{(l?r*)\}", text)
    assert {row.replace(r"\&", "").count("&") + 1 for row in rows} == {len(shape) for shape in shapes}


def test_the_csv_of_experiments_has_the_papers_figures(seeds: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_experiments(compared(seeds)))))
    assert [row["arm"] for row in rows] == ["original", "shared"]
    assert (rows[1]["dataset"], rows[1]["runs"], rows[1]["test_over"]) == ("cub", "2", "seeds")
    assert float(rows[1]["area"]) == pytest.approx(60) and float(rows[1]["paper_speed_up"]) == 0.66
    assert float(rows[0]["paper_test"]) == 0.832 and rows[0]["paper_speed_up"] == ""


@pytest.mark.parametrize(
    "name", ["cub-5shot-5task-maml+gs", "mini-1shot-1task-mamlpp-10x", "cub-1shot-5task-maml~half-rate"]
)
def test_the_training_command_gives_the_same_configuration(tmp_path: Path, name: str) -> None:
    from gradshare.cli.options import Given

    config = preset(name, epochs=3, seed=7, adapt_norm=True)
    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"version": 1, **asdict(config)}))
    (run,) = find_runs(folder)
    command = training_command(run)
    assert command == shlex.join(
        ["gradshare", "train", "--preset", name, "--epochs", "3", "--seed", "7", "--adapt-norm", "--out", str(folder)]
    )
    assert Given(epochs=3, seed=7, adapt_norm=True).over(name) == config


def test_a_run_from_python_has_no_command(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "shared", [0.4], model="my own")
    assert training_command(find_runs(tmp_path)[0]) is None
