"""Numbers that are not finite: tasks, meta-steps, runs, comparisons, grids and reports; and gates that saturate."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.test_cli import SMALL, gradshare
from tests.reports.test_reports import make_run
from tests.runs.test_training import TINY, StopAt, learner, same_run
from tests.support.steps import together
from torch import Tensor, nn

import gradshare as gs
from gradshare.experiments import comparison
from gradshare.learners.outer import adam_tensors
from gradshare.method.rules import InnerRule
from gradshare.reports import compare_runs, find_runs, findings, markdown_table, write_report
from gradshare.runs import checkpoints
from gradshare.runs.config import RunConfig, Training
from gradshare.runs.display import PlainScreen, RunDisplay
from gradshare.runs.divergence import LIMIT, Diverged, read_note, saturated
from gradshare.runs.finished import finish
from gradshare.runs.folder import best_epochs
from gradshare.runs.interruption import Interrupted

RULES: dict[str, Callable[[], InnerRule]] = {
    "global": lambda: gs.share_gradients("global"),
    "tensor": lambda: gs.share_gradients("tensor"),
    "batch only": lambda: gs.BatchOnly().rule(),
    "memory only": lambda: gs.MemoryOnly().rule(),
    "conditioned": lambda: gs.GradientSharing(conditioned=True).rule(),
}
every_rule = pytest.mark.parametrize("rule", [make() for make in RULES.values()], ids=RULES)
TOO_HIGH = 1e20  # an inner rate at which every loss is NaN; batch norm keeps them finite at 1e12
WILD = ["--inner-lr", 1e9, "--adapt-norm"]  # with its gains adapted, batch norm keeps nothing finite


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def strict(text: str) -> Any:
    """JSON as the standard has it, without NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Poisoned:
    """A data set of which some batches of a split have a task, the last, with inputs that are not numbers."""

    def __init__(
        self, dataset: gs.Dataset, split: str, which: Callable[[int, int], bool], all_tasks: bool = False
    ) -> None:
        self.dataset, self.split, self.which, self.all_tasks = dataset, split, which, all_tasks

    def sample(self, split: str, shape: gs.Shape, tasks: int, key: tuple[int, ...]) -> gs.Episodes:
        episodes = self.dataset.sample(split, shape, tasks, key)
        if split == self.split and self.which(*key[2:]):
            episodes.query_x[slice(None) if self.all_tasks else -1] = torch.nan
        return episodes


# One task


@every_rule
@pytest.mark.parametrize("seen", [False, True])
def test_a_diverging_task_leaves_what_all_share_finite(rule: InnerRule, seen: bool) -> None:
    clean = {"w": drawn(5, 6), "b": drawn(5, 2, seed=1)}
    for broken in (torch.nan, torch.inf, -torch.inf):
        own = {name: gradient.clone() for name, gradient in clean.items()}
        own["w"][3, 1:3] = broken
        own["b"][3] = broken
        dropped = {name: torch.where(gradient.isfinite(), gradient, 0.0) for name, gradient in own.items()}
        learned, memory = rule.init({"w": drawn(6), "b": drawn(2)}, 2)
        memory["ghat"] = {"w": drawn(2, 6, seed=2), "b": drawn(2, 2, seed=3)}
        memory["seen"] = torch.tensor(seen)
        leaves = {name: gradient.requires_grad_() for name, gradient in own.items()}
        direction, running = together(rule, leaves, learned, memory, 1)
        expected, without = together(rule, dropped, learned, memory, 1)
        others = [0, 1, 2, 4]
        for name in own:
            assert torch.equal(running[name], without[name])
            assert torch.equal(direction[name][others], expected[name][others])
            assert torch.equal(direction[name].isfinite(), own[name].isfinite()), "the task itself stays honest"
        gradients = torch.autograd.grad(sum(running[name].square().sum() for name in own), list(leaves.values()))
        assert all(gradient.isfinite().all() for gradient in gradients)
        assert all((gradient[~own[name].isfinite()] == 0).all() for name, gradient in zip(own, gradients, strict=True))


@every_rule
def test_a_sum_too_large_for_a_number_is_still_a_direction(rule: InnerRule) -> None:
    large = torch.tensor([[3e38, -3e38, 1e38, 0.0]]).repeat(5, 1)
    large[3:, 2] = -1e38
    learned, memory = rule.init({"w": drawn(4)}, 1)
    _, running = together(rule, {"w": large}, learned, memory, 0)
    assert running["w"].norm().item() == pytest.approx(1)
    assert running["w"][0] > 0.5 and running["w"][1] < -0.5 and running["w"][3] == 0
    mixed = torch.cat([large[:2], -large[:2]])  # partial sums of both signs
    assert together(rule, {"w": mixed}, learned, memory, 0)[1]["w"].isfinite().all()


# One meta-step


def adams(state: gs.MetaState) -> dict[str, torch.optim.Adam]:
    """As on a CPU, and as on a GPU: fused."""
    leaves = list(state.trainable().values())
    return {"plain": gs.optimiser(state, 1e-2), "fused": torch.optim.Adam(leaves, lr=torch.tensor(1e-2), fused=True)}


def everything(state: gs.MetaState, adam: torch.optim.Adam) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in {**state.tensors(), **adam_tensors(state, adam)}.items()}


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("sharing", [None, gs.GradientSharing(), gs.MemoryOnly()], ids=["alone", "shared", "memory"])
def test_a_step_that_is_not_finite_is_not_taken(dataset: gs.Dataset, kind: str, sharing: Any) -> None:
    one = learner(sharing=sharing)
    state, other = one.init(0), one.init(0)
    adam, straight = adams(state)[kind], adams(other)[kind]
    poisoned = Poisoned(dataset, "train", lambda batch: batch in (1, 2))
    for batch in range(5):
        before = everything(state, adam)
        episodes = poisoned.sample("train", gs.Shape(3, 1, 3), 3, (0, 0, batch))
        outcome = gs.meta_step(one, state, adam, episodes, clamp=10.0)
        assert outcome.fault is not None and outcome.taken.item() is (batch not in (1, 2))
        assert outcome.losses.isfinite().tolist() == [True, True, batch not in (1, 2)]
        after = everything(state, adam)
        assert after.keys() >= before.keys()
        same = [name for name in before if torch.equal(before[name], after[name])]
        if batch in (1, 2):
            assert outcome.fault == 1, "the loss comes first"
            assert same == list(before)
        else:
            assert len(same) < len(before)
            gs.meta_step(one, other, straight, episodes, clamp=10.0)
    left_out, never_drawn = everything(state, adam), everything(other, straight)
    assert all(torch.equal(left_out[name], tensor) for name, tensor in never_drawn.items())


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_a_gradient_too_large_for_adam_is_not_taken(kind: str) -> None:
    def steep(outputs: Tensor, targets: Tensor) -> Tensor:
        return 1e25 * (outputs - targets).square().mean()

    one = gs.maml(nn.Linear(2, 1), inner_lr=1e-30, steps=1, loss=steep)
    state = one.init()
    x, y = drawn(3, 4, 2), drawn(3, 4, 1, seed=1)
    adam = adams(state)[kind]
    outcome = gs.meta_step(one, state, adam, gs.Episodes(x, y, x, y))
    assert outcome.loss.isfinite() and outcome.fault == 2  # the first leaf: its squares would be infinite
    assert all(value.isfinite().all() for value in everything(state, adam).values())


# One run


def diverged(folder: Path) -> dict[str, Any]:
    return strict((folder / "diverged.json").read_text())


def test_a_run_that_diverges_is_stopped_with_its_last_good_state(dataset: gs.Dataset, tmp_path: Path) -> None:
    options = TINY | {"iterations": 30}
    with pytest.raises(Diverged, match=r"the outer loss was not finite in epoch 1, iteration 1, and 19 more.*0020"):
        gs.train(learner(inner_lr=TOO_HIGH), dataset, tmp_path, **options)
    assert diverged(tmp_path) == {
        "epoch": 1, "iteration": 1, "cause": "the outer loss", "steps": LIMIT,
        "checkpoint": "checkpoints/epoch-0000-iteration-0020",
    }  # fmt: skip
    _, saved = checkpoints.load(tmp_path / "checkpoints" / "epoch-0000-iteration-0020")
    first = learner(inner_lr=TOO_HIGH).init(0).tensors()
    assert all(torch.equal(saved[name], tensor) for name, tensor in first.items())
    assert not (tmp_path / "DONE").exists()
    with pytest.raises(
        Diverged, match=r"diverged: the outer loss.*lower rate in another folder.*delete .*diverged\.json"
    ):
        gs.train(learner(inner_lr=TOO_HIGH), dataset, tmp_path, resume=True, **options)


def test_who_deletes_the_note_goes_on_with_other_tasks(dataset: gs.Dataset, tmp_path: Path) -> None:
    breaks = Poisoned(dataset, "train", lambda epoch, iteration: 5 <= iteration < 26)
    options = TINY | {"iterations": 30, "epochs": 1}
    with pytest.raises(Diverged, match="epoch 1, iteration 6,"):
        gs.train(learner(), breaks, tmp_path, **options)
    (tmp_path / "diverged.json").unlink()
    gs.train(learner(), breaks, tmp_path, resume=True, **options)
    assert [line["skipped"] for line in lines(tmp_path)] == [21]
    assert (tmp_path / "DONE").exists() and read_note(tmp_path) is None


def test_a_row_of_19_over_several_epochs_stops_nobody(dataset: gs.Dataset, tmp_path: Path) -> None:
    def in_row(epoch: int, iteration: int) -> bool:  # 4 iterations an epoch
        return 2 <= 4 * epoch + iteration < 21 or 22 <= 4 * epoch + iteration < 24

    options = TINY | {"epochs": 7, "test_tasks": 0}
    run = gs.train(learner(), Poisoned(dataset, "train", in_row), tmp_path, **options)
    assert [line["skipped"] for line in lines(tmp_path)] == [2, 4, 4, 4, 4, 3, 0]
    assert [line["train_loss"] is None for line in lines(tmp_path)] == [False, True, True, True, True, False, False]
    assert all(math.isfinite(line["val_loss"]) for line in run.metrics)


def test_a_row_of_20_is_counted_over_epochs_and_interruptions(dataset: gs.Dataset, tmp_path: Path) -> None:
    breaks = Poisoned(dataset, "train", lambda epoch, iteration: 4 * epoch + iteration >= 2)
    options = TINY | {"epochs": 7}
    folders = tmp_path / "whole", tmp_path / "stopped"
    with pytest.raises(Diverged, match=r"epoch 1, iteration 3, and 19 more"):
        gs.train(learner(), breaks, folders[0], **options)
    for moment in ((1, 1), (3, 4)):
        with pytest.raises(Interrupted):
            gs.train(learner(), breaks, folders[1], resume=moment != (1, 1), display=StopAt(*moment), **options)
    with pytest.raises(Diverged):
        gs.train(learner(), breaks, folders[1], resume=True, **options)
    assert diverged(folders[0]) == diverged(folders[1])
    assert diverged(folders[0])["checkpoint"] == "checkpoints/epoch-0005-iteration-0002"
    ends = [checkpoints.load(folder / diverged(folder)["checkpoint"])[1] for folder in folders]
    assert all(torch.equal(ends[0][name].nan_to_num(-1), tensor.nan_to_num(-1)) for name, tensor in ends[1].items())


def test_the_cause_names_what_was_not_finite_first(dataset: gs.Dataset, tmp_path: Path) -> None:
    class Bent(nn.Module):
        """Its loss is finite, and its gradient by `bend`, which is not adapted, is not."""

        def __init__(self) -> None:
            super().__init__()
            self.bend = nn.Parameter(torch.zeros(()))
            self.head = nn.Linear(256, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x.flatten(1) + self.bend.sqrt())

    options = TINY | {"iterations": 20, "epochs": 1}
    with pytest.raises(Diverged, match="the gradient of the weights bend was not finite"):
        gs.train(gs.anil(Bent(), head="head"), dataset, tmp_path, **options)


def test_skipped_steps_leave_the_run_the_same_when_interrupted(dataset: gs.Dataset, tmp_path: Path) -> None:
    breaks = Poisoned(dataset, "train", lambda epoch, iteration: iteration in (0, 2))
    gs.train(learner(), breaks, tmp_path / "whole", **TINY)
    with pytest.raises(Interrupted):
        gs.train(learner(), breaks, tmp_path / "stopped", display=StopAt(1, 3), **TINY)
    gs.train(learner(), breaks, tmp_path / "stopped", resume=True, **TINY)
    same_run(tmp_path / "whole", tmp_path / "stopped")
    assert [line["skipped"] for line in lines(tmp_path / "stopped")] == [2, 2, 2]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"epoch": "1"}', '{"epoch": "x", "iteration": 1, "cause": "", "steps": 2}']
)
def test_a_damaged_note_is_named(dataset: gs.Dataset, tmp_path: Path, text: str) -> None:
    make_run(tmp_path / "run", "original", [0.3], finished=False)
    (tmp_path / "run" / "diverged.json").write_text(text)
    for read in (lambda: read_note(tmp_path / "run"), lambda: find_runs(tmp_path)):
        with pytest.raises(gs.UserError, match=r"diverged\.json is damaged"):
            read()


# Validation and test


@pytest.mark.parametrize("split", ["val", "test"])
def test_tasks_that_diverge_in_evaluation_are_counted(dataset: gs.Dataset, tmp_path: Path, split: str) -> None:
    clean = gs.train(learner(), dataset, tmp_path / "clean", **TINY)
    run = gs.train(learner(), Poisoned(dataset, split, lambda *batch: True), tmp_path / "run", **TINY)
    tests = strict((tmp_path / "run" / "summary.json").read_text())["test"]
    lost = {"val": 0, "test": 0} | {split: 2}  # the last of each batch of 4 and 2
    assert [line["val_diverged"] for line in lines(tmp_path / "run")] == [lost["val"]] * 3
    assert [tests[kind]["diverged"] for kind in ("best", "ensemble")] == [lost["test"]] * 2
    assert all(math.isfinite(line["val_loss"]) for line in run.metrics)
    assert math.isfinite(tests["best"]["loss"]) and math.isfinite(tests["best"]["interval"])
    assert [line["train_loss"] for line in run.metrics] == [line["train_loss"] for line in clean.metrics]


def test_no_finite_loss_at_all_is_null(dataset: gs.Dataset, tmp_path: Path) -> None:
    class Regression:
        def sample(self, *where: Any) -> gs.Episodes:
            x = drawn(where[2], 4, 2, seed=sum(where[3]))
            return gs.Episodes(x, x[..., :1], x * (math.nan if where[0] == "val" else 1.0), x[..., :1])

    one = gs.maml(nn.Linear(2, 1), steps=1, loss="mse")
    gs.train(one, Regression(), tmp_path, **TINY, display=RunDisplay(PlainScreen(Training(**TINY)), "it"))
    assert [line["val_loss"] for line in lines(tmp_path)] == [None] * 3
    assert [line["val_interval"] for line in lines(tmp_path)] == [None] * 3
    summary = strict((tmp_path / "summary.json").read_text())
    assert summary["best_val_loss"] is None and summary["test"]["best"]["diverged"] == 0
    assert "diverged" in markdown_table(write_report(tmp_path))


def test_epochs_in_which_fewer_tasks_diverged_come_first() -> None:
    found = [(0.3, 2), (None, 6), (0.9, 0), (0.5, 0), (0.2, 1)]
    epochs = [
        {"epoch": n, "val_accuracy": None, "val_loss": loss, "val_diverged": lost}
        for n, (loss, lost) in enumerate(found)
    ]
    assert best_epochs(epochs) == [4 - 1, 3 - 1, 5 - 1, 0, 1]


# Gates


def test_a_saturated_gate_is_told_once_and_marked(
    dataset: gs.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = TINY | {"outer_lr": 3.0, "epochs": 3}  # Adam's first step is the rate: sig(3) = 0.95
    run = gs.train(
        learner(), dataset, tmp_path / "shared", display=RunDisplay(PlainScreen(Training(**options)), "shared"),
        about={"arm": "shared"}, **options,
    )  # fmt: skip
    told = [line for line in capsys.readouterr().out.splitlines() if "saturated" in line]
    first = next(line for line in run.metrics if saturated(line))
    assert len(told) == 1 and told[0].startswith(f"shared: saturated after epoch {first['epoch']}: σ(")
    assert f"of inner step {saturated(first)[0].step} is {saturated(first)[0].value:.3f}" in told[0]
    comparison = write_report(tmp_path)
    assert "shared (gate saturated)" in markdown_table(comparison)
    assert f"A gate is saturated: since epoch {first['epoch']}, σ(" in findings(comparison)[0].text


@pytest.mark.parametrize("gate, value, meaning", [
    ("m", 0.99, "overwrites the memory"), ("m", 0.01, "nothing new"),
    ("lam", 0.995, "own gradient is left"), ("lam", 0.0, "own gradient as it is"),
])  # fmt: skip
def test_what_a_saturated_gate_means(gate: str, value: float, meaning: str) -> None:
    other = "lam" if gate == "m" else "m"
    (found,) = saturated({gate: [0.5, value], other: [0.011, 0.989]})
    assert (found.gate, found.step) == (gate, 2) and meaning in str(found)
    assert saturated({gate: None, other: None}) == saturated({}) == saturated({gate: [math.nan]}) == []


# Comparisons, grids, reports


def test_an_arm_that_diverges_stops_no_other(
    blobs: Path, dataset: gs.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {field: TINY[field] for field in ("ways", "queries", "tasks", "val_tasks", "test_tasks")}
    config = RunConfig(
        dataset=str(blobs), filters=3, steps=2, epochs=2, iterations=20, threads=1, device="cpu", **names
    )
    whole, trained = comparison.run, []

    class Breaks(Poisoned):
        image, to = dataset.image, lambda self, device: self

    def run(config: RunConfig, *more: Any, **named: Any) -> Any:
        trained.append(config.arm)
        source = Breaks(dataset, "train", lambda epoch, _: epoch == 1) if config.arm == "original" else dataset
        return whole(config, *more, dataset=source, **named)

    monkeypatch.setattr(comparison, "run", run)
    for _ in range(2):
        found = comparison.compare(config, ["original", "shared"], tmp_path, 1, PlainScreen(config))
        assert list(found) == ["original"] and found["original"].epoch == 2
    assert trained == ["original", "shared"] * 2
    assert (tmp_path / "shared" / "DONE").exists() and not (tmp_path / "original" / "DONE").exists()
    report = write_report(tmp_path)
    assert report["arms"]["original"]["state"] == "diverged" and report["arms"]["shared"]["state"] == "done"
    assert "original (diverged)" in markdown_table(report)
    told = {finding.about: finding.text for finding in findings(report)}
    assert "It diverged: the outer loss was not finite in epoch 2, iteration 1" in told["original"]
    page = (tmp_path / "report.html").read_text()
    assert "original <span class=state>(diverged)</span>" in page and "Not done: 1 diverged, of 2 runs." in page


def test_compare_says_which_arms_diverged(blobs: Path, tmp_path: Path) -> None:
    words = ["compare", "--dataset", blobs, *SMALL, "--epochs", 2, "--iterations", 25, *WILD]
    output = gradshare(*words, "--jobs", 2, "--out", tmp_path).stdout
    for arm in ("original", "shared"):
        assert re.search(rf"^{arm} diverged and was stopped: the .* in epoch 1, iteration 1, and 19 more", output, re.M)
    assert "(diverged)" in (tmp_path / "table.md").read_text() and (tmp_path / "report.html").exists()
    text = gradshare("train", "--resume", tmp_path / "shared", code=2).stderr
    assert "diverged: the " in text and "delete" in text


def test_a_cell_that_diverges_is_a_result(blobs: Path, tmp_path: Path) -> None:
    sound, wild = "cub-5shot-5task-maml", "cub-5shot-5task-maml+gs"
    words = ["--dataset", blobs, *SMALL, "--shots", 1, "--epochs", 1, "--iterations", 20, "--device", "cpu"]
    gradshare("grid", "run", sound, *words, "--out", tmp_path)
    output = gradshare("grid", "run", wild, *words, *WILD, "--out", tmp_path).stdout
    assert f"{wild}/seed-0: diverged and was stopped: the " in output
    assert "1 cell: 1 diverged" in output
    again = gradshare("grid", "run", wild, *words, *WILD, "--out", tmp_path).stdout
    assert "0 of 1 cells to train" in again
    status = gradshare("grid", "status", tmp_path, COLUMNS="200").stdout
    row = next(line for line in status.splitlines() if line.startswith(f"{wild}/seed-0")).split()
    assert row[1:3] == ["diverged", "0/1"] and row[-1] == "–"
    assert "2 cells: 1 done, 1 diverged" in status and "iteration 1, and 19 more" in status
    states = {arm["arm"]: arm["state"] for arm in compare_runs(find_runs(tmp_path))["arms"].values()}
    assert states == {"original": "done", "shared": "diverged"}


def test_reports_mark_steps_and_tasks_that_were_not_finite(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "original", "original", [0.3, 0.4, 0.5])
    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = copy.deepcopy(written)
    told[0]["skipped"], told[2]["skipped"], told[2]["val_diverged"] = 3, 4, 2
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    finish(folder, {"best_epoch": 1, "test": None})
    comparison = write_report(tmp_path)
    assert "original (steps skipped, tasks diverged)" in markdown_table(comparison)
    text = findings(comparison)[0].text
    assert "It left out 7 meta-steps whose loss or gradient was not finite." in text
    assert "Up to 2 validation tasks an epoch had no finite loss." in text
    assert "<span class=state>(steps skipped, tasks diverged)</span>" in (tmp_path / "report.html").read_text()
