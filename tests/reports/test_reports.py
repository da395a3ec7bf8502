"""Reports from run folders with curves made by hand, so that every expected number can be checked on paper."""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from gradshare.reports.against import choose_thresholds
from gradshare.reports.hover import Drawing
from gradshare.reports.legends import legend_label
from gradshare.runs.finished import finish

import gradshare as gs
import gradshare.reports
from gradshare.reports import (
    compare_runs,
    csv_table,
    curves,
    find_runs,
    findings,
    gates,
    markdown_table,
    read_run,
    rich_table,
    table,
    write_report,
)

Curve = list[float | None]
ORIGINAL: Curve = [0.20, 0.30, 0.40, 0.50, 0.60, 0.60]
SHARED: Curve = [0.22, 0.45, 0.60, 0.65, 0.65, 0.62]
HALF_RATE: Curve = [0.20, 0.38, 0.57, 0.64, 0.66, 0.63]
HOSTILE = "<script>alert(1)</script>"
SETTINGS = {
    **{
        "version": 1,
        "method": "maml",
        "dataset": "glyphs",
        "ways": 5,
        "shots": 1,
        "queries": 15,
        "tasks": 5,
        "steps": 2,
    },
    **{"inner_lr": 0.4, "outer_lr": 0.001, "epochs": 6, "iterations": 40, "seed": 0},
}


def make_run(
    folder: Path,
    arm: str,
    accuracies: Curve,
    *,
    losses: Curve | None = None,
    epochs: list[int] | None = None,
    interval: float | None = 0.02,
    gate: list[float] | None = None,
    finished: bool = True,
    test: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A run folder; every epoch takes 10 s of training, and the half-rate control has half the inner rate."""
    rate = {"inner_lr": 0.2} if arm == "half-rate" else {}
    folder.mkdir(parents=True)
    epochs = epochs or list(range(1, len(accuracies) + 1))
    losses = losses or [1.0] * len(accuracies)
    (folder / "config.json").write_text(json.dumps({"arm": arm, **SETTINGS, **rate, **config}))
    values = {"train_loss": 1.0, "val_interval": interval, "m": gate, "lam": gate}
    lines = [
        {"epoch": epoch, "val_accuracy": accuracy, "val_loss": loss, **values}
        for epoch, accuracy, loss in zip(epochs, accuracies, losses, strict=True)
    ]
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "timings.jsonl", [{"epoch": e, "train_seconds": 10.0, "val_seconds": 3.0} for e in epochs])
    if finished:
        finish(folder, {"best_epoch": 1, "test": test})
    return folder


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def outcome(best: float, ensemble: float, interval: float = 0.01) -> dict[str, Any]:
    return {
        "tasks": 600,
        "best": {"epoch": 4, "accuracy": best, "interval": interval, "loss": 0.9},
        "ensemble": {"epochs": [4, 5], "accuracy": ensemble, "interval": interval, "loss": 0.8},
    }


@pytest.fixture
def trio(tmp_path: Path) -> Path:
    folder = tmp_path / "comparison"
    make_run(folder / "half-rate", "half-rate", HALF_RATE)
    make_run(folder / "shared", "shared", SHARED, gate=[0.4, 0.2], test=outcome(0.64, 0.66))
    make_run(folder / "original", "original", ORIGINAL, test=outcome(0.58, 0.59))
    return folder


def compared(folder: Path) -> dict[str, Any]:
    return compare_runs(find_runs(folder))


def thresholds_of(comparison: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of the only experiment."""
    (experiment,) = comparison["experiments"]
    return experiment["thresholds"]


def said(folder: Path, arm: str) -> str:
    return next(finding.text for finding in findings(compared(folder)) if finding.about == arm)


# Reading


def test_a_run_is_read(trio: Path) -> None:
    run = read_run(trio / "shared")
    assert (run.name, run.arm, run.measure, run.finished) == ("shared", "shared", "accuracy", True)
    assert run.epochs.tolist() == [1, 2, 3, 4, 5, 6]
    assert run.val.tolist() == SHARED
    assert run.interval.tolist() == [0.02] * 6
    assert run.m is not None and run.m.shape == (6, 2)
    assert run.test_ensemble is not None and run.test_ensemble.epochs == (4, 5)
    assert run.config["inner_lr"] == 0.4


def test_runs_come_original_first_then_sharing_then_controls(tmp_path: Path) -> None:
    for arm in ("memory-only", "zeta", "conditioned", "batch-only", "shared", "gate-only", "half-rate", "original"):
        make_run(tmp_path / "deeper" / arm, arm, [0.5])
    order = ["original", "shared", "half-rate", "gate-only", "batch-only", "memory-only", "conditioned", "zeta"]
    assert [run.name for run in find_runs(tmp_path)] == order


def test_runs_three_levels_down_are_not_searched(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "b" / "c", "original", [0.5])
    with pytest.raises(ValueError, match=r"no run in .*: neither it nor the two levels"):
        find_runs(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run in .*nowhere: there is no such folder"):
        find_runs(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"it holds no config\.json"):
        read_run(tmp_path)


def test_the_same_arm_twice_is_named_by_its_path_and_compared_with_its_neighbour(tmp_path: Path) -> None:
    for seed, lead in ((0, 0.1), (1, 0.2)):
        make_run(tmp_path / f"seed{seed}" / "original", "original", [0.3], seed=seed)
        make_run(tmp_path / f"seed{seed}" / "shared", "shared", [0.3 + lead], seed=seed)
    arms = compared(tmp_path)["arms"]
    assert list(arms) == ["seed0/original", "seed1/original", "seed0/shared", "seed1/shared"]
    assert arms["seed1/shared"]["against_original"]["reference"] == "seed1/original"
    assert arms["seed0/shared"]["against_original"]["mean_difference"] == pytest.approx(10)
    assert arms["seed1/shared"]["against_original"]["mean_difference"] == pytest.approx(20)


def test_an_original_on_other_data_is_not_a_reference(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.3], dataset="cub")
    make_run(tmp_path / "shared", "shared", [0.4])
    assert compared(tmp_path)["arms"]["shared"]["against_original"] is None
    assert "no original to compare it with" in said(tmp_path, "shared")


DAMAGE = {
    "bad json": ("config.json", "{", r"config\.json: not complete JSON"),
    "a list": ("config.json", "[]", r"config\.json: a JSON object is needed, not list"),
    "cut line": (
        "metrics.jsonl",
        '{"epoch": 1, "val_accuracy": 0.5}\n{"epoch": 2, "val',
        r"metrics\.jsonl, line 2: not",
    ),
    "no epoch": ("metrics.jsonl", '{"val_accuracy": 0.5}\n', r"metrics\.jsonl, line 1: epoch is None"),
    "epoch twice": ("metrics.jsonl", '{"epoch": 3}\n{"epoch": 3}\n', r"line 2: epoch 3 comes after epoch 3"),
    "percent": ("metrics.jsonl", '{"epoch": 1, "val_accuracy": 50}\n', r"line 1: val_accuracy is 50.* between 0 and 1"),
    "words": ("metrics.jsonl", '{"epoch": 1, "val_interval": "big"}\n', r"line 1: val_interval is 'big'"),
    "steps": ("metrics.jsonl", '{"epoch": 1, "m": [1, 1]}\n{"epoch": 2, "m": [1]}\n', r"line 2: m has 1 inner steps"),
    "not a list": ("metrics.jsonl", '{"epoch": 1, "lam": 3}\n', r"line 1: lam is 3, and a list"),
    "timings": ("timings.jsonl", '\n\n{"epoch": 1', r"timings\.jsonl, line 3: not complete JSON"),
    "summary": ("summary.json", '{"test": 5}', r"summary\.json: test is 5, and an object or null"),
}


@pytest.mark.parametrize(("file", "text", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_refused_with_its_place(tmp_path: Path, file: str, text: str, message: str) -> None:
    run = make_run(tmp_path / "original", "original", [0.5])
    (run / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        find_runs(tmp_path)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "original", "original", [0.5])
    (run / "metrics.jsonl").write_bytes(b'{"epoch": \xff}')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: not UTF-8 text at byte 10"):
        read_run(run)


# Numbers


def test_each_arm_by_itself(trio: Path) -> None:
    arms = compared(trio)["arms"]
    assert (arms["original"]["best_epoch"], arms["original"]["best_val"]) == (5, 0.60)  # the earlier of two
    assert (arms["shared"]["best_epoch"], arms["shared"]["best_val"]) == (4, 0.65)
    assert arms["shared"]["best_val_interval"] == 0.02
    assert (arms["shared"]["train_seconds"], arms["shared"]["seconds_per_epoch"]) == (60.0, 10.0)
    assert arms["shared"]["test"]["best"] == {"value": 0.64, "interval": 0.01, "epochs": [4]}
    assert arms["shared"]["test"]["ensemble"] == {"value": 0.66, "interval": 0.01, "epochs": [4, 5]}
    assert arms["shared"]["test"]["tasks"] == 600
    assert arms["half-rate"]["test"] is None
    assert arms["shared"]["final_mean_m"] == pytest.approx(0.3)


def test_sharing_against_the_original(trio: Path) -> None:
    versus = compared(trio)["arms"]["shared"]["against_original"]
    assert versus["speed_up"] == pytest.approx((5 - 4) / 4)
    assert versus["mean_difference"] == pytest.approx((2 + 15 + 20 + 15 + 5 + 2) / 6)
    assert versus["area"] == pytest.approx(2 + 15 + 20 + 15 + 5 + 2)  # accuracy points x epochs
    assert (versus["final_epoch"], versus["final_difference"]) == (6, pytest.approx(2))
    assert versus["final_bands"] == "overlap"
    assert versus["first_epoch_apart"] == 2
    assert (versus["epochs_apart_better"], versus["epochs_apart_worse"], versus["common_epochs"]) == (4, 0, 6)


def test_a_control_against_sharing(trio: Path) -> None:
    half = compared(trio)["arms"]["half-rate"]
    assert half["against_original"]["mean_difference"] == pytest.approx((0 + 8 + 17 + 14 + 6 + 3) / 6)
    assert half["against_original"]["speed_up"] == 0
    assert half["against_shared"]["epochs_apart_worse"] == 1  # epoch 2: 7 points behind, bands of 2 and 2
    assert half["against_shared"]["level_from_epoch"] == 3
    assert half["gains"] == {"common_epochs": 6, "gain": pytest.approx(8), "gain_of_sharing": pytest.approx(59 / 6)}


def test_thresholds_are_round_and_timed(trio: Path) -> None:
    thresholds = thresholds_of(compared(trio))
    assert [each["value"] for each in thresholds] == [0.3, 0.4, 0.5, 0.6]
    reached = {each["value"]: each["reached"] for each in thresholds}
    assert reached[0.6]["original"] == {"epoch": 5, "seconds": 50.0}
    assert reached[0.6]["shared"] == {"epoch": 3, "seconds": 30.0}
    assert reached[0.4]["half-rate"] == {"epoch": 3, "seconds": 30.0}
    assert reached[0.3]["original"] == {"epoch": 2, "seconds": 20.0}


def test_a_threshold_that_is_never_reached_is_null(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.21, 0.24])
    make_run(tmp_path / "shared", "shared", [0.30, 0.36])
    thresholds = thresholds_of(compared(tmp_path))
    assert [each["value"] for each in thresholds] == [0.25, 0.3, 0.35]
    assert "Of the two, only shared reached 35 %." in said(tmp_path, "shared")
    assert thresholds[-1]["reached"] == {"original": None, "shared": {"epoch": 2, "seconds": 20.0}}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.20, 0.95], [0.4, 0.6, 0.8]),
        ([0.401, 0.482], [0.42, 0.44, 0.46, 0.48]),
        ([0.40, 0.52], [0.44, 0.46, 0.48, 0.5, 0.52]),  # six multiples of 2 %: the hardest five
        ([0.5, 0.5005], []),
        ([0.5, 0.4], []),  # it only got worse
        ([0.5], []),
        ([math.nan], []),
    ],
)
def test_the_choice_of_thresholds(tmp_path: Path, values: Curve, expected: list[float]) -> None:
    assert choose_thresholds([read_run(make_run(tmp_path / "run", "original", values))]) == expected


def test_a_curve_behind_the_original(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.4, 0.5])
    make_run(tmp_path / "shared", "shared", [0.3, 0.4])
    versus = compared(tmp_path)["arms"]["shared"]["against_original"]
    assert (versus["epochs_apart_better"], versus["epochs_apart_worse"]) == (0, 2)
    assert versus["first_epoch_apart"] is None and versus["level_from_epoch"] is None
    assert said(tmp_path, "shared").startswith(
        "Behind original: over the 2 common epochs the mean difference is \u221210.0"
    )


def test_missing_epochs_leave_the_common_ones(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.2, 0.3, 0.4], epochs=[1, 2, 4])
    make_run(tmp_path / "shared", "shared", [0.5, 0.6, 0.7], epochs=[2, 3, 4])
    comparison = compared(tmp_path)
    versus = comparison["arms"]["shared"]["against_original"]
    assert (versus["common_epochs"], versus["final_epoch"], versus["mean_difference"]) == (2, 4, pytest.approx(25))
    assert comparison["arms"]["original"]["train_seconds"] is None  # epoch 3 was not timed
    assert comparison["arms"]["original"]["seconds_per_epoch"] == 10
    hits = {each["value"]: each["reached"]["original"] for each in thresholds_of(comparison)}
    assert hits[0.4] == {"epoch": 4, "seconds": None}


def test_no_epoch_in_common(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.2], epochs=[1])
    make_run(tmp_path / "shared", "shared", [0.5], epochs=[2])
    assert compared(tmp_path)["arms"]["shared"]["against_original"]["mean_difference"] is None
    assert "no epoch in common with original" in said(tmp_path, "shared")
    write_report(tmp_path)


def test_an_unfinished_run_is_reported_and_marked(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", ORIGINAL)
    make_run(tmp_path / "shared", "shared", SHARED[:2], finished=False)
    comparison = write_report(tmp_path)
    assert comparison["arms"]["shared"]["finished"] is False
    assert comparison["arms"]["shared"]["against_original"]["common_epochs"] == 2
    assert table(comparison)[2][0] == "shared (unfinished)"
    assert table(comparison)[2][5] == "(+150 %)"  # parentheses: not equally long
    assert said(tmp_path, "shared").startswith("This run is unfinished: 2 of 6 epochs so far.")
    assert "did not train equally long" in said(tmp_path, "shared")
    assert "shared (unfinished)" in (tmp_path / "report.html").read_text()


def test_a_run_that_was_changed_after_its_end_is_marked(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "original", "original", ORIGINAL)
    assert read_run(folder).damage == "" and "files changed" not in markdown_table(compared(tmp_path))
    metrics = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(metrics.replace('"val_accuracy": 0.', '"val_accuracy": 0.9', 1))
    assert "original (files changed)" in markdown_table(compared(tmp_path))
    told = "It is not as it was when it was finished: its files do not match the checksums in DONE."
    assert told in said(tmp_path, "original")
    write_report(tmp_path)
    assert "<span class=state>(files changed)</span>" in (tmp_path / "report.html").read_text()


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [], finished=False)
    make_run(tmp_path / "shared", "shared", [None], losses=[2.0])
    (tmp_path / "original" / "metrics.jsonl").unlink()
    comparison = write_report(tmp_path)
    assert comparison["measure"] == "loss"  # the run without epochs goes along
    assert comparison["arms"]["original"]["best_epoch"] is None
    assert comparison["arms"]["shared"]["against_original"]["speed_up"] is None


def test_nan_values_become_null_and_lose_no_other_number(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.2, math.nan, 0.4])
    make_run(tmp_path / "shared", "shared", [0.3, 0.9, 0.5], interval=math.nan, gate=[math.nan, 0.5])
    comparison = write_report(tmp_path)
    assert "NaN" not in (tmp_path / "summary.json").read_text()
    original, versus = comparison["arms"]["original"], comparison["arms"]["shared"]["against_original"]
    assert (original["best_epoch"], original["epochs_without_value"]) == (3, 1)
    assert (versus["common_epochs"], versus["epochs_with_bands"]) == (2, 0)
    assert versus["mean_difference"] == pytest.approx(10)
    assert comparison["arms"]["shared"]["best_val_interval"] is None
    assert "In 1 epoch it has no finite validation value." in said(tmp_path, "original")
    assert "no intervals were recorded" in said(tmp_path, "shared")
    assert "nan" not in (tmp_path / "table.md").read_text().lower()


def test_regression_compares_losses_and_lower_is_better(tmp_path: Path) -> None:
    nothing: Curve = [None] * 3
    make_run(tmp_path / "original", "original", nothing, losses=[4.0, 3.0, 2.0], interval=0.1, ways=None)
    test = {"tasks": 600, "best": {"epoch": 2, "accuracy": None, "interval": 0.1, "loss": 1.1}}
    test["ensemble"] = test["best"]
    make_run(tmp_path / "shared", "shared", nothing, losses=[3.0, 1.0, 1.5], interval=0.1, ways=None, test=test)
    comparison = write_report(tmp_path)
    shared = comparison["arms"]["shared"]
    assert (comparison["measure"], comparison["higher_is_better"]) == ("loss", False)
    assert (shared["best_epoch"], shared["best_val"]) == (2, 1.0)
    assert shared["against_original"]["mean_difference"] == pytest.approx((-1 - 2 - 0.5) / 3)
    assert shared["against_original"]["epochs_apart_better"] == 3
    assert shared["against_original"]["speed_up"] == pytest.approx((3 - 2) / 2)
    assert [each["value"] for each in thresholds_of(comparison)] == [3.0, 2.0, 1.0]
    assert thresholds_of(comparison)[0]["reached"]["original"] == {"epoch": 2, "seconds": 20.0}
    assert thresholds_of(comparison)[2]["reached"]["original"] is None
    assert legend_label(read_run(tmp_path / "shared"), "shared") == "shared: MinVal 1 Ep 2 Test 1.1±0.1"
    assert said(tmp_path, "shared").startswith("Ahead of original")
    assert "ahead by 0.500 in the loss" in said(tmp_path, "shared")


def test_accuracies_and_losses_are_not_mixed(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.5])
    make_run(tmp_path / "shared", "shared", [None])
    with pytest.raises(ValueError, match="'original' has accuracies and 'shared' has losses alone"):
        compared(tmp_path)


def test_two_runs_of_one_name_are_refused(trio: Path) -> None:
    run = read_run(trio / "shared")
    with pytest.raises(ValueError, match="two runs have the same name"):
        compare_runs([run, run])


# Sentences


def test_sharing_is_told_in_full(trio: Path) -> None:
    text = said(trio, "shared")
    assert "Ahead of original: over the 6 common epochs the mean difference is +9.8 points" in text
    assert "entirely on the better side in 4 epochs (first in epoch 2)" in text
    assert "At epoch 6, the last in common, it is ahead by 2.0 points, with overlapping bands." in text
    assert "speed-up is +25 %: best validation accuracy at epoch 4 against epoch 5." in text
    assert "It reached 60 % at epoch 3 (30.0 s), original at epoch 5 (50.0 s)." in text
    assert "the ensemble has 66.0 ± 1.0 % against 59.0 ± 1.0 %: the intervals do not overlap." in text
    assert "the mean \u03c3(m) is 0.30 and the mean \u03c3(\u03bb) is 0.30" in text


def test_a_control_that_does_as_well_is_said_to(trio: Path) -> None:
    text = said(trio, "half-rate")
    assert "From epoch 3 on it does as well as shared" in text
    assert "On average it gains 8.0 points on the original, where shared gains 9.8 points" in text
    assert text.endswith("on this data most of the gain is there with the smaller step alone.")


def test_conditioned_sharing_is_no_control_and_is_held_against_sharing(trio: Path) -> None:
    make_run(trio / "conditioned", "conditioned", [value + 0.05 for value in SHARED], gate=[0.3, 0.3])
    arm, text = compared(trio)["arms"]["conditioned"], said(trio, "conditioned")
    assert arm["gains"] is None and arm["against_shared"]["mean_difference"] == pytest.approx(5)
    assert "Ahead of original: over the 6 common epochs the mean difference is +14.8 points" in text
    assert "Ahead of shared: over the 6 common epochs the mean difference is +5.0 points" in text
    assert "conditioned: \u03c3(\u03bb)" in legends(gates(find_runs(trio)))
    for control in ("original", "shared", "half-rate"):
        assert "head of shared" not in said(trio, control)


@pytest.mark.parametrize(
    ("control", "expected"),
    [
        ([0.20, 0.30, 0.40], "none of the gain is there with the smaller step alone."),
        ([0.22, 0.33, 0.44], "less than half of the gain is there with the smaller step alone."),
        ([0.32, 0.42, 0.52], "all of the gain is there with the smaller step alone."),
        ([0.32, 0.42, 0.52], "It does as well as shared: in no epoch does its band lie entirely on the worse side"),
        ([0.40, 0.50, 0.60], "It is ahead of shared: in 3 epochs with bands apart, and behind in none that way."),
        ([0.20, 0.30, 0.40], "It ends behind shared, with bands apart."),
    ],
)
def test_what_a_control_accounts_for_is_computed(tmp_path: Path, control: Curve, expected: str) -> None:
    make_run(tmp_path / "original", "original", [0.2, 0.3, 0.4])
    make_run(tmp_path / "shared", "shared", [0.3, 0.4, 0.5])
    make_run(tmp_path / "half-rate", "half-rate", control)
    assert expected in said(tmp_path, "half-rate")


def test_no_gain_no_account(tmp_path: Path) -> None:
    for arm in ("original", "shared", "half-rate"):
        make_run(tmp_path / arm, arm, [0.31, 0.32] if arm == "shared" else [0.30, 0.31])
    assert "Not apart from original: the 95 % bands overlap in every common epoch" in said(tmp_path, "shared")
    assert "shared has no clear gain over the original for it to account for." in said(tmp_path, "half-rate")


def test_chance_is_called_chance(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.20, 0.21])
    make_run(tmp_path / "shared", "shared", [0.20, 0.41])
    assert "cannot be told from chance (20.0 %)" in said(tmp_path, "original")
    assert "chance" not in said(tmp_path, "shared")


def test_a_best_last_epoch_puts_the_speed_up_in_doubt(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.2, 0.3, 0.4])
    make_run(tmp_path / "shared", "shared", [0.2, 0.5, 0.4])
    assert "+50 %" in said(tmp_path, "shared")
    assert "longer training may change this" in said(tmp_path, "shared")


def test_an_early_but_worse_best_epoch_is_no_plain_speed_up(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.2, 0.3, 0.5, 0.4])
    make_run(tmp_path / "shared", "shared", [0.2, 0.4, 0.3, 0.3])
    assert "+50 %" in said(tmp_path, "shared")
    assert "but that best is the worse of the two (40.0 % against 50.0 %)" in said(tmp_path, "shared")


def test_a_single_run_is_not_compared(tmp_path: Path) -> None:
    run = make_run(tmp_path / "shared", "shared", SHARED, gate=[0.4, 0.2])
    assert said(run, "shared").endswith("There is nothing beside it to compare it with.")


# Tables


def test_the_table_for_people(trio: Path) -> None:
    rows = table(compared(trio))
    assert [row[0] for row in rows] == ["Run", "original", "shared", "half-rate"]
    assert rows[1][1:] == ["60.0 ± 2.0 %", "5", "58.0 ± 1.0 %", "59.0 ± 1.0 %", *["\u2013"] * 4, "10.0 s", "1m 00s"]
    assert rows[2][1:9] == [
        "65.0 ± 2.0 %", "4", "64.0 ± 1.0 %", "66.0 ± 1.0 %", "+25 %", "+9.8", "+2.0", "4 / 0, from 2",
    ]  # fmt: skip
    assert len({len(row) for row in rows}) == 1


def test_the_markdown_table_is_aligned_and_escaped(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.5])
    make_run(tmp_path / "other", f"a|b {HOSTILE}", [0.5])  # no known arm, and still compared
    lines = markdown_table(compared(tmp_path)).splitlines()
    assert lines[1].startswith("| :--- | ---: |")
    assert r"a\|b &lt;script&gt;" in lines[3]
    assert all(line.replace(r"\|", "").count("|") == 12 for line in lines)


def test_the_csv_table_is_for_programs(trio: Path) -> None:
    rows = {row["name"]: row for row in csv.DictReader(io.StringIO(csv_table(compared(trio))))}
    assert float(rows["shared"]["best_val"]) == 0.65
    assert float(rows["shared"]["mean_difference"]) == pytest.approx(59 / 6)
    assert float(rows["shared"]["test_ensemble"]) == 0.66
    assert rows["original"]["speed_up"] == ""


def in_terminal(folder: Path) -> str:
    from rich.console import Console

    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(rich_table(compared(folder)))
    return console.export_text()


def test_the_terminal_table_fits_eighty_columns(tmp_path: Path) -> None:
    for arm in gradshare.reports.ARMS:
        make_run(tmp_path / arm, arm, SHARED * 25, finished=arm != "memory-only", test=outcome(0.64, 0.66))
    lines = in_terminal(tmp_path).splitlines()
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    assert "shared 65.0 ± 2.0 % 4 66.0 ± 1.0 % 25m 00s 0 % 0.0 0/0" in [" ".join(line.split()) for line in lines]
    assert any(line.startswith("memory-only*") for line in lines) and "* unfinished" in "".join(lines)


def test_the_terminal_table_shows_names_as_they_are(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "[red]original[/red]", [0.5])
    assert "[red]original[/red]" in in_terminal(tmp_path)


# Figures


def drawn(drawing: Drawing | None) -> Drawing:
    assert drawing is not None
    return drawing


def legends(drawing: Drawing | None) -> list[str]:
    return [text.get_text() for axes in drawn(drawing).figure.axes for text in axes.get_legend().get_texts()]


def test_the_legend_is_the_papers(trio: Path) -> None:
    labels = legends(curves(find_runs(trio)))
    assert labels[:2] == [
        "original: MaxVal 60.0% Ep 5 Test 59.0±1.0%",
        "shared: MaxVal 65.0% Ep 4 Test 66.0±1.0%",
    ]
    assert labels[2] == "half-rate: MaxVal 66.0% Ep 5"


def test_gates_are_drawn_for_the_arms_that_have_them(trio: Path) -> None:
    drawing = gates(find_runs(trio))
    assert drawing is not None and len(drawing.panels) == 1
    assert legends(drawing) == ["shared: \u03c3(m)", "shared: \u03c3(\u03bb)"]
    assert gates([read_run(trio / "original")]) is None


def test_every_arm_has_its_own_colour_and_line(tmp_path: Path) -> None:
    from gradshare.reports.figures import OTHER, STROKES

    assert set(STROKES) == set(gradshare.reports.ARMS)
    strokes = [*STROKES.values(), OTHER]
    assert len({stroke.color for stroke in strokes}) == len(strokes)
    assert len({str(stroke.dashes) for stroke in strokes}) == len(strokes) - 1  # original and shared are both solid


# Files and page


def test_the_files_of_a_comparison(trio: Path) -> None:
    comparison = write_report(trio, command="gradshare compare glyphs --out 'a & b'")
    written = {path.name for path in trio.iterdir() if path.is_file()}
    images = {"curves.png", "curves.svg", "gates.png", "gates.svg"}
    tables = {"table.md", "table.tex", "table.csv", "experiments.csv"}
    assert written == {"summary.json", "report.html"} | tables | images
    assert json.loads((trio / "summary.json").read_text()) == comparison
    assert "gradshare compare glyphs --out &#x27;a &amp; b&#x27;" in (trio / "report.html").read_text()


def test_a_single_run_keeps_its_own_summary(trio: Path) -> None:
    before = (trio / "shared" / "summary.json").read_bytes()
    comparison = write_report(trio / "shared")
    assert list(comparison["arms"]) == ["shared"]
    assert "Speed-up" not in table(comparison)[0] and len(table(comparison)[1]) == len(table(comparison)[0]) == 7
    assert (trio / "shared" / "summary.json").read_bytes() == before
    assert (trio / "shared" / "report.html").exists() and (trio / "shared" / "curves.svg").exists()


def test_writing_twice_gives_the_same_bytes(trio: Path) -> None:
    def written() -> dict[str, bytes]:
        write_report(trio, command="gradshare report")
        return {path.name: path.read_bytes() for path in trio.iterdir() if path.is_file()}

    first = written()
    assert first == written()
    assert b"dc:date" not in first["curves.svg"] and b"Software" not in first["curves.png"][:400]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(trio: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_report(trio)
    before = {path.name: path.read_bytes() for path in trio.iterdir() if path.is_file()}

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("gradshare.reports.write.os.replace", fail)
    with pytest.raises(gs.UserError, match=r"cannot write .*/curves\.png: disk full"):
        write_report(trio, command="another")
    assert before == {path.name: path.read_bytes() for path in trio.iterdir() if path.is_file()}


def test_the_page_says_what_was_compared(trio: Path) -> None:
    write_report(trio)
    page = (trio / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    for part in (
        "<h1>Gradient sharing: MAML on glyphs, 5-way 1-shot</h1>",
        "3 arms of MAML on glyphs (5-way 1-shot, with 15 query examples a class).",
        "T = 5 tasks a meta-iteration, K = 2 inner steps, inner rate 0.2 or 0.4, outer rate 0.001 (Adam)",
        "40 iterations an epoch, 6 epochs, seed 0",
        "(transductive)",
        "over 600 tasks",
        "95 % intervals over tasks, for one training run of each arm",
        "<td>half-rate</td><td>0.2</td>",
        "What this shows",
        "epoch 3 (30.0 s)",
    ):
        assert part in page, part
    assert "<td>inner_lr</td>" not in page and "<td>outer_lr</td>" in page  # differing in the table, the rest folded


def test_the_page_loads_nothing(trio: Path) -> None:
    write_report(trio)
    page = (trio / "report.html").read_text()
    assert not re.search(r"https?://|url\((?!#)|@import|<link|<img|<iframe|\bsrc=", page)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', page))
    assert "default-src 'none'" in page


def test_the_figures_in_the_page_have_names_of_their_own(trio: Path) -> None:
    write_report(trio)
    page = (trio / "report.html").read_text()
    names = re.findall(r'\bid="([^"]*)"', page)
    used = re.findall(r'(?:url\(|href=")#([^")]*)', page)
    assert len(names) == len(set(names)) and set(used) <= set(names) and used
    assert "currentColor" in page and "#1b1f24;" not in page.split("</style>")[1]


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", ORIGINAL, dataset=HOSTILE, method=HOSTILE, extra={HOSTILE: 1})
    higher: Curve = [*SHARED[:5], 0.75]
    make_run(tmp_path / "shared", HOSTILE, higher, dataset=HOSTILE, method=HOSTILE, gate=[0.5], extra=HOSTILE)
    write_report(tmp_path, command=HOSTILE)
    assert f"only {HOSTILE} reached" in said(tmp_path, HOSTILE)  # so that a finding has the name in it
    for name in ("report.html", "curves.svg", "gates.svg", "table.md"):
        text = (tmp_path / name).read_text()
        assert HOSTILE not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text, name


@pytest.mark.parametrize("name", ["_hidden", "a$b$c", "実験", "x" * 200, "line\nbreak\x1b", "\ud800"])
def test_odd_names_are_drawn_without_complaint(tmp_path: Path, name: str) -> None:
    make_run(tmp_path / "original", "original", [0.5, 0.6])
    make_run(tmp_path / "other", name, [0.5, 0.6], gate=[0.5])
    comparison = write_report(tmp_path)
    assert name in comparison["arms"]
    assert len(legends(curves(find_runs(tmp_path)))) == 2


def test_reports_import_no_torch() -> None:
    folder = Path(gradshare.reports.__file__).parent
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in ("torch", "pyplot")], path
            assert "matplotlib.pyplot" not in names, path
