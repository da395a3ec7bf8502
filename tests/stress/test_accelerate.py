"""benchmarks/accelerate.py: which cells it trains, how it goes on after a kill, and its report.

And the same at full size, by results/train_queue.py: stopped on one machine, and gone on with on another.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.grids import TINY

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import accelerate

    return accelerate


def run(out: Path, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / "accelerate.py"), "--tiny", "--out", str(out)]
    return subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout


def test_a_torn_file_is_gone_on_with_and_nothing_is_trained_twice(tmp_path: Path) -> None:
    what = ("--regime", "sinusoid", "pose", "--rules", "original", "additive/gates10/zero-init")
    what += ("--rates", "1", "--seeds", "10", "11")
    assert run(tmp_path, *what).count(" seed ") == 8
    whole = (tmp_path / "runs.csv").read_bytes()
    assert whole.startswith(b"regime,rule,rate,seed,measure,value\n") and whole.count(b",seconds,") == 8
    assert " seed " not in run(tmp_path, *what) and (tmp_path / "runs.csv").read_bytes() == whole
    (tmp_path / "runs.csv").write_bytes(whole[:-3])  # a kill in the middle of the last row of the last cell
    again = run(tmp_path, *what)
    assert again.count(" seed ") == 1 and "additive/gates10/zero-init  rate x1  seed 11" in again
    text = (tmp_path / "report.md").read_text()
    assert "## sinusoid" in text and "## pose" in text and (tmp_path / "report.svg").exists()


def measures(last: float) -> dict[str, float]:
    return {"val@10": last, "val@20": last, "test": last, "seconds": 1.0}


def test_the_rate_is_chosen_by_the_seeds_of_the_sweep_and_then_confirmed(accelerate: ModuleType) -> None:
    given = Namespace(rates=[0.5, 1.0], seeds=[10, 11])
    better = accelerate.report.best_rate
    results = {accelerate.Cell("sinusoid", "shared", 0.5, seed): measures(2.0) for seed in (0, 1)}
    left = accelerate.to_do(results, "sinusoid", ["shared"], given)
    assert left == [accelerate.Cell("sinusoid", "shared", 1.0, seed) for seed in (0, 1)]
    results |= {cell: measures(last) for cell, last in zip(left, (1.0, float("nan")), strict=True)}
    chosen = accelerate.to_do(results, "sinusoid", ["shared"], given)
    assert [(cell.rate, cell.seed) for cell in chosen] == [(0.5, 10), (0.5, 11)]  # one that is not finite is worst
    results[left[1]] = measures(1.0)
    assert better(results, "sinusoid", "shared", given.rates) == 1.0  # of two errors the smaller one
    accuracies = {cell._replace(regime="writers"): value for cell, value in results.items()}
    assert better(accuracies, "writers", "shared", given.rates) == 0.5


def test_half_rate_is_the_original_at_half_the_rate(accelerate: ModuleType) -> None:
    cell = accelerate.Cell("sinusoid", "half-rate/zero", 2.0, 3)
    assert accelerate.same_training(cell) == accelerate.Cell("sinusoid", "original/zero", 1.0, 3)
    assert accelerate.same_training(cell._replace(rule="shared")) == cell._replace(rule="shared")


def test_what_two_rules_have_in_common_is_trained_once(
    accelerate: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trained: list[Any] = []
    monkeypatch.setattr(accelerate, "ProcessPoolExecutor", lambda jobs, mp_context: ThreadPoolExecutor(jobs))
    monkeypatch.setattr(
        accelerate, "train", lambda cells, small: trained.extend(cells) or [measures(cell.rate) for cell in cells]
    )
    options = {"regime": ["sinusoid"], "rules": ["original", "half-rate"], "rates": [1.0, 2.0], "seeds": [10]}
    assert accelerate.advance(Namespace(out=tmp_path, tiny=True, jobs=1, budget_minutes=1.0, **options))
    assert {(cell.rule, cell.rate) for cell in trained} == {("original", 1.0), ("original", 2.0), ("half-rate", 1.0)}
    results = accelerate.read(tmp_path / "runs.csv")
    for seed in (0, 1):
        half, whole = (accelerate.Cell("sinusoid", *at, seed) for at in (("half-rate", 2.0), ("original", 1.0)))
        assert results[half] == results[whole]


def test_a_way_of_sharing_is_ahead_if_every_arm_without_sharing_is_behind(accelerate: ModuleType) -> None:
    def seeds(test: float) -> dict[int, dict[str, float]]:
        return {seed: measures(test + 0.1 * seed) for seed in (10, 11, 12)}

    arms = {"original": 1.0, "shared/head4": 3.0, "batch-only": 2.0, "gate-only": 2.5}
    table = {(rule, 1.0): seeds(test) for rule, test in arms.items()}
    found = accelerate.report.ahead({"writers": table, "pose": table})  # of an error, less is better
    assert ": shared/head4 on writers, of 4 pairs" in found
    assert ": none, of 2 pairs" in accelerate.report.ahead({"writers": table | {("tensor-gates", 2.0): seeds(3.0)}})


def test_a_cell_that_fails_does_not_lose_the_others(
    accelerate: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(cells: list[Any], small: bool) -> list[dict[str, float]]:
        if cells[0].rule == "shared":
            raise MemoryError("too large")
        return [measures(1.0) for _ in cells]

    monkeypatch.setattr(accelerate, "ProcessPoolExecutor", lambda jobs, mp_context: ThreadPoolExecutor(jobs))
    monkeypatch.setattr(accelerate, "train", train)
    rules = ["original", "shared", "gate-only"]
    options = {"regime": ["sinusoid"], "rules": rules, "rates": [1.0], "seeds": [10], "jobs": 2, "budget_minutes": 1.0}
    assert not accelerate.advance(Namespace(out=tmp_path, tiny=True, **options))
    assert {cell.rule for cell in accelerate.read(tmp_path / "runs.csv")} == {"original", "gate-only"}
    assert "FAILED: sinusoid  shared  rate x1  seed 10: MemoryError('too large')" in capsys.readouterr().out


@pytest.mark.parametrize(
    "rule", ["shared/gates10", "memory-only", "equivariant/zero/head4", "retrieval", "additive/body"]
)
def test_cells_trained_together_are_those_trained_one_by_one(accelerate: ModuleType, rule: str) -> None:
    regimes, arm = accelerate.regimes, accelerate.regimes.Arm(rule)
    regime = regimes.tiny(regimes.KNOWN["sinusoid"])
    cells = [(0.5, 0), (2.0, 1), (1e9, 1)]  # the last one diverges: its steps are not taken
    for cell, found in zip(cells, accelerate.together.train(regime, [(arm, *cell) for cell in cells]), strict=True):
        alone = dict(regimes.train_small(regime, arm, *cell))
        assert found.keys() == alone.keys()
        for name in alone.keys() - {"seconds"}:
            assert found[name] == pytest.approx(alone[name], rel=1e-4, nan_ok=True), (cell, name)


def test_arms_of_one_program_are_trained_together(accelerate: ModuleType) -> None:
    regimes, regime = accelerate.regimes, accelerate.regimes.tiny(accelerate.regimes.KNOWN["sinusoid"])
    arms = [regimes.Arm(f"gate-only{more}") for more in ("", "/head4", "/zero-init/first", "/anil", "/boil/head0.5")]
    assert len({arm.program for arm in arms}) == 1
    assert arms[0].program not in {regimes.Arm(rule).program for rule in ("shared", "gate-only/zero", "original")}
    cells = [(arm, rate, seed) for seed, (arm, rate) in enumerate(zip(arms, (1.0, 2.0, 1.0, 4.0, 1.0), strict=True))]
    for cell, found in zip(cells, accelerate.together.train(regime, cells), strict=True):
        alone = dict(regimes.train_small(regime, *cell))
        assert {name: alone[name] for name in found if name != "seconds"} == pytest.approx(
            {name: value for name, value in found.items() if name != "seconds"}, rel=1e-4
        ), cell


def test_a_cell_whose_first_step_is_not_taken_is_trained_from_the_second_on(accelerate: ModuleType) -> None:
    regimes = accelerate.regimes
    regime, arm, source = regimes.KNOWN["sinusoid"], regimes.Arm("original"), regimes.KNOWN["sinusoid"].source()
    learner = arm.learner(regime, regime.model(), 1.0)
    state = learner.init()
    joint = accelerate.together.Joint(regime, arm, [learner] * 2, [state] * 2)
    good, other = (source.sample("train", regime.shape, 5, (0, 0, i)) for i in (1, 2))
    bad = dataclasses.replace(good, query_y=good.query_y * float("inf"))
    joint.step([bad, good])
    first, second = joint.states()
    for name, start in state.params.items():
        assert torch.equal(first.params[name], start) and not torch.equal(second.params[name], start)
    joint.step([other, other])
    assert all(not torch.equal(next(joint.states()).params[name], start) for name, start in state.params.items())
    assert all(value.isfinite().all() for value in joint.state.trainable().values())


QUEUE = """
[rule]
patience = 25
passed = 0.3
from_epoch = 75
[options]
{options}
[[choose]]
called = "maml-zero-init-head4"
experiments = ["cub-1shot-5task-maml"]
arms = ["gate-only"]
seeds = [0, 1]
options = {{ head_start = "zero-init", inner = "head:4" }}
[[choose]]
experiments = ["cub-1shot-5task-maml"]
arms = ["original", "gate-only"]
seeds = [0, 1]
[[choose]]
called = "maml-gates10"
experiments = ["cub-1shot-5task-maml"]
arms = ["gate-only"]
seeds = [0]
options = {{ gates = 10 }}
[[confirm]]
experiments = ["mini-1shot-5task-maml"]
arms = ["original", "gate-only"]
seeds = [10]
"""


def test_full_size_stops_on_one_machine_and_goes_on_on_another(tmp_path: Path, blobs: Path) -> None:
    options = TINY | {"dataset": str(blobs), "epochs": 3, "iterations": 60}
    (tmp_path / "results").mkdir()
    for name in ("train_queue.py", "changed_data.py"):
        shutil.copy(BENCHMARKS.parent / "results" / name, tmp_path / "results")
    shutil.copytree(BENCHMARKS, tmp_path / "benchmarks")
    (tmp_path / "docs").mkdir()
    page = shutil.copy(BENCHMARKS.parent / "docs" / "when-to-share.md", tmp_path / "docs")
    text = QUEUE.format(options="\n".join(f"{name} = {json.dumps(value)}" for name, value in options.items()))
    (tmp_path / "results" / "queue.toml").write_text(text)

    def call(machine: str, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "results/train_queue.py", "--minutes", "3", "--workers", "2", "--parts", "choose"]
        places = [f"--{name}={machine}/{name}" for name in ("runs", "archives", "out")]
        return subprocess.Popen([*command, *places, *more], cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    first = call("first", "--only", "cub-1shot-5task-maml-zero-init-head4~gate-only")
    while not any(line.count(b"\n") for line in map(Path.read_bytes, tmp_path.glob("first/runs/*/*/metrics.jsonl"))):
        time.sleep(0.05)
    first.terminate()
    said = first.communicate(timeout=60)[0]
    assert "not finished before epoch 3" in said and first.returncode == 0
    second = call("second", "--state", "first/out")
    said = second.communicate(timeout=240)[0]
    assert "continues from first/out" in said and second.returncode == 0
    assert all(path.stat().st_size <= 16 * 2**20 for path in (tmp_path / "second" / "out").iterdir())
    subprocess.run([sys.executable, "results/train_queue.py", "--collect", "second/out"], cwd=tmp_path, check=True)
    subprocess.run([sys.executable, "benchmarks/accelerate.py", "--report"], cwd=tmp_path, check=True)
    rows = (tmp_path / "results" / "accelerate" / "runs.csv").read_text()
    assert rows.count(",test,") == 7 and "cub-1shot,gate-only/gates10,1.0,0,val@3," in rows
    assert "cub-1shot,gate-only/zero-init/head4,1.0,1,val@3," in rows
    report = (tmp_path / "results" / "accelerate" / "report.md").read_text()
    assert "## cub-1shot, the seeds of the choice" in report and "| gate-only/zero-init/head4 |" in report
    assert Path(page).read_text().count("| `cub-1shot` |") == 2


def test_an_unknown_rule_or_option_is_an_error(tmp_path: Path) -> None:
    for rule in ("shard", "shared/zeros"):
        with pytest.raises(subprocess.CalledProcessError) as caught:
            run(tmp_path, "--rules", rule)
        assert rule in caught.value.stderr


def test_what_the_shared_vector_explains_of_its_own_gradient_is_all(accelerate: ModuleType) -> None:
    import explained

    regime = accelerate.regimes.KNOWN["sinusoid"]
    learner = accelerate.regimes.Arm("shared").learner(regime, regime.model(), 1.0)
    state, task = learner.init(), regime.source().sample("train", regime.shape, 1, (0,))
    state.memory = learner.outer_loss(state, task).memory  # of the first step: the direction of this task's gradient
    first = {row[2:4]: row[4] for row in explained.explained("one", learner, state, task) if row[1] == 1}
    for part in ("body", "head"):
        assert first[part, "explained"] == pytest.approx(1, abs=1e-5)
    assert first["body", "length"] == pytest.approx(first["head", "length"], rel=1e-4)  # one vector over both


def test_a_head_at_zero_gives_the_body_no_gradient_at_first(accelerate: ModuleType) -> None:
    import zero_head

    regime = accelerate.regimes.tiny(accelerate.regimes.KNOWN["glyphs-mlp"])
    for rule, zero in (("gate-only/zero/head4", True), ("gate-only", False)):
        *_, last = accelerate.regimes.looks(regime, accelerate.regimes.Arm(rule), 1.0, 0)
        found = dict(zero_head.looked_at(last, regime.shape))
        assert (found["|G body|/|G head|, step 1"] == 0) == zero and found["|G body|/|G head|, step 2"] > 0
        assert found["body moves"] > 0 and 0 <= found["head alone"] <= 100


def test_differences_are_paired_and_signed_so_that_more_is_better(accelerate: ModuleType) -> None:
    report = accelerate.report
    one = {seed: measures(value) for seed, value in ((10, 1.0), (11, 3.0))}
    other = {seed: measures(value) for seed, value in ((10, 2.0), (11, 4.0), (12, 9.0))}
    for higher, sign in ((True, -1), (False, 1)):
        found = report.paired(one, other, report.final, higher)
        assert (found.mean, found.interval, found.seeds) == (sign, 0, 2)
    assert report.reaching(one, 1.0, higher=False) == "10 (1 of 2)"
