"""Run folders as reports read them, and how runs are grouped into experiments and arms."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import gradshare as gs
from gradshare.errors import UserError
from gradshare.experiments.presets import preset
from gradshare.learners.fingerprint import fingerprint
from gradshare.reports import compare_runs, read_run, read_runs
from gradshare.reports.model import group, variant_of
from gradshare.runs.config import TRAINING
from gradshare.runs.folder import RunFolder
from tests.support.reports import SHARED, make_run


def test_a_run_is_read(trio: Path) -> None:
    run = read_run(RunFolder(trio / "shared"))
    assert (run.name, run.arm, run.measure, run.status) == ("shared", "shared", "accuracy", "done")
    assert run.epochs.tolist() == [1, 2, 3, 4, 5, 6] and run.val.tolist() == SHARED
    assert run.interval.tolist() == [0.02] * 6 and run.seconds.tolist() == [10.0] * 6
    assert run.m is not None and run.m.shape == (6, 2)
    assert run.test is not None and run.test.ensemble.epochs == (4, 5)
    assert run.options["inner_lr"] == 0.4 and run.best_epoch == 4


def test_runs_are_in_the_order_of_the_registry(tmp_path: Path) -> None:
    order = [
        "original",
        "shared",
        "half-rate",
        "gate-only",
        "batch-only",
        "memory-only",
        "conditioned",
        "my_rules:Zeta",
    ]
    for arm in reversed(order):
        make_run(tmp_path / "deeper" / arm, arm, [0.5])
    assert [run.name for run in read_runs(tmp_path)] == order


@pytest.mark.parametrize("arm", ["my_rules:Additive", "zeta", "<b>", ["a"], 3])
def test_an_arm_that_nobody_knows_is_a_possible_control(arm: Any) -> None:
    assert variant_of(arm).control and variant_of(arm).name


def test_an_arm_of_ones_own_is_compared_and_never_imported(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.3, 0.4])
    make_run(tmp_path / "mine", "no_such_module:Additive", [0.4, 0.5])
    mine = compare_runs(read_runs(tmp_path)).runs["no_such_module:Additive"]
    assert mine.against_original is not None and mine.against_original.verdict == "ahead"


def test_the_same_arm_twice_is_named_by_its_path_and_compared_with_its_neighbour(tmp_path: Path) -> None:
    for seed, lead in ((0, 0.1), (1, 0.2)):
        make_run(tmp_path / f"seed{seed}" / "original", "original", [0.3], seed=seed)
        make_run(tmp_path / f"seed{seed}" / "shared", "shared", [0.3 + lead], seed=seed)
    runs = compare_runs(read_runs(tmp_path)).runs
    assert list(runs) == ["seed0/original", "seed1/original", "seed0/shared", "seed1/shared"]
    versus = [runs[f"seed{seed}/shared"].against_original for seed in (0, 1)]
    assert [one and one.reference for one in versus] == ["seed0/original", "seed1/original"]
    assert [one and one.mean_difference for one in versus] == [pytest.approx(10), pytest.approx(20)]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.json", "{"),
        ("metrics.jsonl", '{"epoch": 1, "val_accuracy": 0.5}\n{"epoch": 2, "val'),
        ("metrics.jsonl", '{"epoch": 1, "m": [1, 1]}\n{"epoch": 2, "m": [1]}\n'),
        ("timings.jsonl", '{"epoch": 1'),
        ("summary.json", '{"test": 5}'),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, file: str, text: str) -> None:
    run = make_run(tmp_path / "original", "original", [0.5])
    (run / file).write_text(text)
    with pytest.raises(UserError, match=file.replace(".", r"\.")):
        read_runs(tmp_path)


def test_no_run_and_no_folder(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match="no run in"):
            read_runs(folder)


def test_failed_diverged_and_planned_runs(tmp_path: Path) -> None:
    name = "cub-1shot-5task-maml"
    for seed in range(3):
        make_run(tmp_path / name / f"seed-{seed}", "original", [0.3], finished=False, seed=seed)
    found = {"epoch": 2, "iteration": 1, "cause": "the outer loss", "steps": 20}
    (tmp_path / name / "seed-1" / "diverged.json").write_text(json.dumps(found))
    notes = tmp_path / ".grid" / name
    notes.mkdir(parents=True)
    (notes / "seed-0.failure.txt").write_text("out of memory\ntraceback\n")
    (notes / "seed-3.plan.json").write_text(json.dumps(asdict(preset(name, seed=3))))
    runs = {run.options["seed"]: run for run in read_runs(tmp_path)}
    assert {seed: run.status for seed, run in runs.items()} == {0: "failed", 1: "diverged", 2: "stopped", 3: "waiting"}
    assert runs[0].reason == "out of memory" and "the outer loss" in runs[1].reason and runs[2].reason == ""
    assert len(runs[3].epochs) == 0 and compare_runs(list(runs.values())).experiments


def test_warnings_of_a_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "shared", [0.3, 0.4, 0.5], gate=[0.5, 0.995])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[0]["skipped"], lines[2]["skipped"], lines[2]["val_diverged"] = 3, 4, 2
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(RunFolder(folder))
    assert (run.skipped, run.diverged_tasks) == (7, 2) and run.saturated.startswith("since epoch 1")
    assert [*run.marks] == ["files changed", "gate saturated", "steps skipped", "tasks diverged"]


def test_accuracies_and_losses_are_not_mixed(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.5])
    make_run(tmp_path / "shared", "shared", [None])
    with pytest.raises(UserError, match="only losses"):
        compare_runs(read_runs(tmp_path))


def test_two_runs_of_one_name_are_an_error(trio: Path) -> None:
    run = read_run(RunFolder(trio / "shared"))
    with pytest.raises(UserError, match="same name"):
        compare_runs([run, run])


# Experiments and arms


def test_experiments_are_distinct_and_in_the_papers_order(tmp_path: Path) -> None:
    options: list[dict[str, Any]] = [
        {"dataset": "mini"},
        {"dataset": "cub", "shots": 5},
        {"dataset": "cub", "tasks": 1},
        {"dataset": "cub"},
        {"dataset": "cub", "inner_lr": 1.0},
        {"dataset": "cub-resize", "method": "mamlpp"},
        {"dataset": "cub", "method": "metasgd"},
        {"dataset": "cub", "inner": "momentum:0.9"},
        {"dataset": "cub", "head_start": "zero-init", "adapt": "convs.3,head"},
        {"dataset": "cub", "backbone": "vit", "start": "file.pt"},
        {"dataset": "cub", "gates": 10.0},
    ]
    for number, given in enumerate(options):
        make_run(tmp_path / f"{number}", "original", [0.5], **{"inner_lr": 0.1, **given})
    assert [one.setting.title for one in group(read_runs(tmp_path))] == [
        "MAML/5 on cub, 5-way 1-shot, inner rate 0.1",
        "MAML/5 with gates x10.0 on cub, 5-way 1-shot, inner rate 0.1",
        "MAML/5 with zero-init head and convs.3,head adapted on cub, 5-way 1-shot, inner rate 0.1",
        "MAML/5 with momentum:0.9 on cub, 5-way 1-shot, inner rate 0.1",
        "MAML/5 with vit and weights of file.pt on cub, 5-way 1-shot, inner rate 0.1",
        "MAML/1 on cub, 5-way 1-shot, inner rate 0.1",
        "Meta-SGD/5 on cub, 5-way 1-shot, inner rate 0.1",
        "MAML++/5 on cub-resize, 5-way 1-shot, inner rate 0.1",
        "MAML/5 on cub, 5-way 5-shot, inner rate 0.1",
        "MAML/5 on cub, 5-way 1-shot, inner rate 1.0",
        "MAML/5 on mini, 5-way 1-shot, inner rate 0.1",
    ]


def test_runs_from_python_are_told_apart_by_their_learners(tmp_path: Path) -> None:
    for name, learner in {
        "maml": gs.maml(gs.Conv4(filters=3)),
        "momentum": gs.maml(gs.Conv4(filters=3), inner=gs.momentum(0.5)),
        "zero": gs.boil(gs.Conv4(filters=3), inner_lr=0.2, head_start="zero-init"),
        "prototypes": gs.proto_maml(gs.Conv4(filters=3)),
    }.items():
        for arm in ("original", "shared"):
            make_run(tmp_path / name / arm, arm, [0.5])
            options = json.loads((tmp_path / name / arm / "config.json").read_text())
            kept = {key: value for key, value in options.items() if key in TRAINING or key in ("version", "arm")}
            content = json.dumps(kept | {"fingerprint": fingerprint(learner)})
            (tmp_path / name / arm / "config.json").write_text(content)
    found = group(read_runs(tmp_path))
    assert [(one.setting.title, [arm.name for arm in one.arms]) for one in found] == [
        ("MAML/5, 5-way 1-shot, inner rate 0.1", ["original", "shared"]),
        ("MAML/5 with Momentum(beta=0.5), 5-way 1-shot, inner rate 0.1", ["original", "shared"]),
        ("Proto-MAML/5, 5-way 1-shot, inner rate 0.1", ["original", "shared"]),
        ("BOIL/5 with zero-init head, 5-way 1-shot, inner rate 0.2", ["original", "shared"]),
    ]


def test_an_original_on_other_data_is_not_a_reference(tmp_path: Path) -> None:
    make_run(tmp_path / "original", "original", [0.3], dataset="cub")
    make_run(tmp_path / "shared", "shared", [0.4])
    assert compare_runs(read_runs(tmp_path)).runs["shared"].against_original is None


def test_the_half_rate_control_belongs_to_the_whole_rate(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "original", [0.4], inner_lr=0.1)
    make_run(tmp_path / "b", "original", [0.3], inner_lr=0.05)
    make_run(tmp_path / "c", "half-rate", [0.5], inner_lr=0.05)
    versus = compare_runs(read_runs(tmp_path)).runs["c"].against_original
    assert versus is not None and versus.reference == "a"


def test_configurations_of_one_arm_are_named_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "original" / "seed-0", "original", [0.4])
    make_run(tmp_path / "shared" / "seed-0", "shared", [0.4])
    for seed in (1, 2):
        make_run(tmp_path / "shared" / f"seed-{seed}", "shared", [0.4], seed=seed, norm="tensor")
    (experiment,) = group(read_runs(tmp_path))
    assert [(arm.name, len(arm.runs)) for arm in experiment.arms] == [
        ("original", 1),
        ("shared/seed-0", 1),
        ("shared/seed-1", 2),
    ]


def test_runs_that_differ_in_machine_and_seed_are_one_arm(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "shared", [0.4], seed=0, threads=1, device="cpu")
    make_run(tmp_path / "b", "shared", [0.4], seed=1, threads=2, device="cuda")
    (experiment,) = group(read_runs(tmp_path))
    assert [[run.name for run in arm.runs] for arm in experiment.arms] == [["a", "b"]]
