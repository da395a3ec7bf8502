"""The numbers of a comparison, checked on paper and against those of the first version of the reports."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gradshare.experiments.presets import PRESETS, preset
from gradshare.reports import Comparison, compare_runs, read_run, read_runs
from gradshare.reports.comparison import ArmResult
from gradshare.reports.formats import summary
from gradshare.reports.paper import TABLE, departures, experiment_of, paper_cell
from gradshare.reports.statistics import T_975, Gains, Hit, Spread, Versus, choose_levels, spread
from gradshare.runs.folder import RunFolder
from tests.support.reports import PAPER, SHARED, Curve, make_grid, make_run, make_trio, outcome


def compared(folder: Path) -> Comparison:
    return compare_runs(read_runs(folder))


def against_original(folder: Path, name: str = "shared") -> Versus:
    found = compared(folder).runs[name].against_original
    assert found is not None
    return found


def arm(folder: Path, name: str) -> ArmResult:
    (experiment,) = compared(folder).experiments
    return next(one for one in experiment.arms if one.name == name)


def same(old: Any, new: Any, where: str) -> None:
    """Every value of the old summary is in the new one, equal to rounding."""
    if isinstance(old, dict):
        for key, value in old.items():
            same(value, new[key], f"{where}/{key}")
    elif isinstance(old, list):
        assert len(old) == len(new), where
        for place, (one, other) in enumerate(zip(old, new, strict=True)):
            same(one, other, f"{where}/{place}")
    elif isinstance(old, float):
        assert new == pytest.approx(old, rel=1e-6, abs=1e-8), where
    else:
        assert new == old, where


@pytest.mark.parametrize(("name", "make"), [("trio", make_trio), ("grid", make_grid)])
def test_all_numbers_are_those_of_the_first_version(tmp_path: Path, name: str, make: Any) -> None:
    golden = json.loads((Path(__file__).parent / "golden" / "summary.json").read_text())
    same(golden[name], summary(compared(make(tmp_path / name))), name)


# A run, and a run against another


def test_sharing_against_the_original(trio: Path) -> None:
    versus = against_original(trio)
    assert versus.speed_up == pytest.approx((5 - 4) / 4)
    assert versus.mean_difference == pytest.approx((2 + 15 + 20 + 15 + 5 + 2) / 6)
    assert versus.area == pytest.approx(2 + 15 + 20 + 15 + 5 + 2)  # accuracy points x epochs
    assert (versus.final_epoch, versus.final_difference) == (6, pytest.approx(2))
    assert (versus.final_bands, versus.first_epoch_apart, versus.verdict) == ("overlap", 2, "ahead")
    assert (versus.epochs_apart_better, versus.epochs_apart_worse, versus.common_epochs) == (4, 0, 6)


def test_a_control_against_sharing(trio: Path) -> None:
    half = compared(trio).runs["half-rate"]
    assert half.against_shared is not None
    assert (half.against_shared.epochs_apart_worse, half.against_shared.level_from_epoch) == (1, 3)
    assert half.gains == Gains(6, pytest.approx(8), pytest.approx(59 / 6))
    assert arm(trio, "half-rate").share_of_gain == pytest.approx(8 / (59 / 6))


@pytest.mark.parametrize(
    ("curve", "verdict"),
    [([0.5, 0.6], "ahead"), ([0.3, 0.4], "behind"), ([0.6, 0.3], "mixed"), ([0.41, 0.51], "unclear")],
)
def test_verdicts(tmp_path: Path, curve: Curve, verdict: str) -> None:
    make_run(tmp_path / "original", "original", [0.4, 0.5])
    make_run(tmp_path / "shared", "shared", curve)
    lead = arm(tmp_path, "shared").against_original
    assert against_original(tmp_path).verdict == verdict and lead is not None and lead.verdict == verdict


def test_the_best_control_is_the_one_that_is_led_least(trio: Path) -> None:
    make_run(trio / "gate-only", "gate-only", [0.9] * 6)
    lead = arm(trio, "shared").against_best_control
    assert lead is not None and (lead.reference, lead.verdict) == ("gate-only", "behind")
    assert lead.difference.mean == pytest.approx(100 * (sum(filter(None, SHARED)) / 6 - 0.9))
    control = arm(trio, "gate-only").against_best_control  # a control is compared with the others
    assert control is not None and (control.reference, control.verdict) == ("half-rate", "ahead")
    assert arm(trio, "original").against_best_control is None


def test_conditioned_sharing_is_no_control(trio: Path) -> None:
    make_run(trio / "conditioned", "conditioned", [value + 0.05 for value in SHARED if value], gate=[0.3, 0.3])
    one = compared(trio).runs["conditioned"]
    assert one.gains is None and one.against_shared is not None
    assert one.against_shared.mean_difference == pytest.approx(5)
    lead = arm(trio, "shared").against_best_control
    assert lead is not None and lead.reference == "half-rate"


def test_no_share_without_a_clear_gain(tmp_path: Path) -> None:
    for name in ("original", "shared", "half-rate"):
        make_run(tmp_path / name, name, [0.31, 0.32] if name == "shared" else [0.30, 0.31])
    assert arm(tmp_path, "half-rate").share_of_gain is None


def test_missing_epochs_leave_the_common_ones(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.2, 0.3, 0.4], epochs=[1, 2, 4])
    make_run(tmp_path / "shared", "shared", [0.5, 0.6, 0.7], epochs=[2, 3, 4])
    versus = against_original(tmp_path)
    assert (versus.common_epochs, versus.final_epoch, versus.mean_difference) == (2, 4, pytest.approx(25))
    found = summary(compared(tmp_path))["arms"]["original"]
    assert found["train_seconds"] is None and found["seconds_per_epoch"] == 10  # epoch 3 was not timed
    hits = {level.value: level.reached["original"] for level in compared(tmp_path).experiments[0].levels}
    assert hits[0.4] == Hit(4, None)


def test_no_epoch_in_common(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.2], epochs=[1])
    make_run(tmp_path / "shared", "shared", [0.5], epochs=[2])
    versus = against_original(tmp_path)
    assert (versus.common_epochs, versus.mean_difference, versus.verdict) == (0, None, "unclear")
    assert arm(tmp_path, "shared").against_original is None


def test_absent_values_lose_no_other_number(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.2, None, 0.4])
    make_run(tmp_path / "shared", "shared", [0.3, 0.9, 0.5], interval=None)
    versus, original = against_original(tmp_path), compared(tmp_path).runs["original"].run
    assert original.best_epoch == 3 and summary(compared(tmp_path))["arms"]["original"]["epochs_without_value"] == 1
    assert (versus.common_epochs, versus.epochs_with_bands, versus.verdict) == (2, 0, "unclear")
    assert versus.mean_difference == pytest.approx(10)


def test_regression_compares_losses_and_lower_is_better(tmp_path: Path) -> None:
    nothing: Curve = [None] * 3
    make_run(tmp_path / "original", "original", nothing, losses=[4.0, 3.0, 2.0], interval=0.1)
    make_run(tmp_path / "shared", "shared", nothing, losses=[3.0, 1.0, 1.5], interval=0.1, test=outcome(None, None))
    comparison, versus = compared(tmp_path), against_original(tmp_path)
    shared = arm(tmp_path, "shared")
    assert comparison.measure == "loss" and shared.best_val == Spread(1.0, None, 1)
    assert versus.mean_difference == pytest.approx((-1 - 2 - 0.5) / 3) and versus.verdict == "ahead"
    assert (versus.speed_up, versus.epochs_apart_better) == (pytest.approx(0.5), 3)
    levels = comparison.experiments[0].levels
    assert [level.value for level in levels] == [3.0, 2.0, 1.0]
    assert [level.reached["original"] for level in levels] == [Hit(2, 20.0), Hit(3, 30.0), None]
    assert shared.test is not None and shared.test.value == 0.8


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.20, 0.95], [0.4, 0.6, 0.8]),
        ([0.401, 0.482], [0.42, 0.44, 0.46, 0.48]),
        ([0.40, 0.52], [0.44, 0.46, 0.48, 0.5, 0.52]),  # six multiples of 2 %: the hardest five
        ([0.5, 0.5005], []),
        ([0.5, 0.4], []),  # it only got worse
        ([None], []),
    ],
)
def test_the_choice_of_levels(tmp_path: Path, values: Curve, expected: list[float]) -> None:
    assert choose_levels([read_run(RunFolder(make_run(tmp_path / "run", "original", values)))]) == expected


# Seeds


def test_the_interval_over_seeds_is_students() -> None:
    assert spread([1.0, 3.0]) == Spread(2.0, pytest.approx(12.706), 2)
    assert spread([None, 4.0, None]) == Spread(4.0, None, 1) and spread([None]) is None
    many = spread([float(number % 2) for number in range(40)])
    assert many is not None and many.interval == pytest.approx(2.0227 * math.sqrt(0.25 / 39), rel=1e-4)
    assert list(T_975) == sorted(T_975, reverse=True)


def test_means_over_seeds(seeds: Path) -> None:
    shared = arm(seeds, "shared")
    assert shared.mean_difference == Spread(pytest.approx(15), pytest.approx(12.706 * 5), 2)
    assert shared.area is not None and shared.area.mean == pytest.approx(60)  # 4 epochs of 10 and of 20 points
    assert shared.speed_up is not None and shared.speed_up.mean == 0
    assert shared.test is not None and (shared.test.over, shared.test.seeds) == ("seeds", 2)
    assert (shared.test.value, shared.test.interval) == (pytest.approx(0.81), pytest.approx(12.706 * 0.01))
    half = shared.reached[1]  # 50 %: the originals at epoch 3, sharing at epochs 2 and 1
    assert half.epoch is not None and half.seconds is not None and half.speed_up is not None
    assert (half.epoch.mean, half.seconds.mean, half.speed_up.mean) == (1.5, 15.0, pytest.approx((0.5 + 2) / 2))


def test_an_unfinished_seed_does_not_spoil_the_mean(seeds: Path) -> None:
    make_run(seeds / "shared" / "seed-2", "shared", [0.1], finished=False, seed=2, **PAPER)
    shared = arm(seeds, "shared")
    assert len(shared.runs) == 3 and shared.done == len(shared.counted) == 2
    assert shared.best_val is not None and shared.best_val.seeds == 2


def test_seeds_that_disagree_are_unclear(tmp_path: Path) -> None:
    for seed, curve in ((0, [0.6, 0.7]), (1, [0.4, 0.5])):
        make_run(tmp_path / "original" / f"seed-{seed}", "original", [0.4, 0.5], seed=seed)
        make_run(tmp_path / "shared" / f"seed-{seed}", "shared", list(curve), seed=seed)
    lead = arm(tmp_path, "shared").against_original
    assert lead is not None and lead.verdict == "unclear" and lead.difference.mean == pytest.approx(10)


# The paper


def test_the_papers_table_is_in_the_papers_source() -> None:
    """Every number of ours as the paper prints it, if the shared copy of the paper is there."""
    import re

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
        options = asdict(preset(name))
        assert experiment_of(options) == one and departures(options) == []
        assert (paper_cell(options) is not None) == (one.shots == 5 and not one.tenfold)
    half = asdict(preset("cub-5shot-5task-maml~half-rate"))
    found = experiment_of(half)
    assert found is not None and found.arm == "half-rate" and departures(half) == []


@pytest.mark.parametrize(
    "odd", [{"dataset": ["cub"]}, {"dataset": "glyphs"}, {"inner_lr": "x"}, {"arm": ["a"]}, {"inner_lr": 0.2}, {}]
)
def test_what_is_not_the_papers_has_no_cell(odd: dict[str, Any]) -> None:
    options = {**asdict(preset("cub-5shot-5task-maml")), **odd} if odd else {}
    assert experiment_of(options) is None and paper_cell(options) is None and departures(options) == []


def test_seeds_of_different_length_are_one_arm_and_two_lengths_of_a_seed_are_two(tmp_path: Path) -> None:
    def arms(folder: Path) -> dict[str, int]:
        (experiment,) = compared(folder).experiments
        return {one.name: len(one.runs) for one in experiment.arms}

    for seed, epochs in enumerate((3, 4)):
        make_run(tmp_path / f"{seed}", "original", [0.3] * epochs, epochs=None, seed=seed)
        config = json.loads((tmp_path / f"{seed}" / "config.json").read_text())
        (tmp_path / f"{seed}" / "config.json").write_text(json.dumps({**config, "epochs": epochs}))
    assert arms(tmp_path) == {"original": 2}
    shutil.copytree(tmp_path / "0", tmp_path / "longer")
    config = json.loads((tmp_path / "longer" / "config.json").read_text())
    (tmp_path / "longer" / "config.json").write_text(json.dumps({**config, "epochs": 9}))
    assert arms(tmp_path) == {"original, 3 epochs": 1, "original, 4 epochs": 1, "original, 9 epochs": 1}


def test_a_speed_up_needs_trainings_that_are_equally_long_or_settled(tmp_path: Path) -> None:
    def compare(folder: Path, *lengths: int) -> ArmResult:
        for name, best, length in zip(("original", "shared"), (6, 3), lengths, strict=True):
            make_run(folder / name, name, [0.5 if epoch == best else 0.3 for epoch in range(1, length + 1)])
        return arm(folder, "shared")

    unequal = compare(tmp_path / "unequal", 10, 9)
    assert unequal.speed_up is None and unequal.mean_difference == Spread(pytest.approx(0), None, 1)
    for lengths in ((10, 10), (31, 28)):
        assert compare(tmp_path / str(lengths), *lengths).speed_up == Spread(1.0, None, 1)
