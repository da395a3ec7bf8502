"""Run folders that were damaged: repaired from what is sound, or an error, and nothing else changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import torch as safetensors

import gradshare as gs
from gradshare.errors import DamageWarning
from gradshare.files import add_checksum, verify_checksum
from gradshare.runs import checkpoints, train
from gradshare.runs.checkpoints import Damaged
from gradshare.runs.folder import RunFolder
from gradshare.runs.records import Progress
from gradshare.runs.workers import Interrupted
from tests.support.runs import TINY, StopAt, flip, learner, rewrite, rewrite_tensors, same_run

LAST = Progress(3).name


@pytest.fixture(scope="module")
def finished(dataset: gs.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    gs.train(learner(), dataset, folder, **TINY)
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def resume(dataset: gs.Dataset, folder: Path, **options: Any) -> None:
    gs.train(learner(), dataset, folder, resume=True, display=False, **TINY | options)


def test_a_finished_run_can_be_checked_with_sha256sum(finished: Path) -> None:
    sums = [line.split("  ") for line in (finished / "DONE").read_text().splitlines()]
    assert [name for _, name in sums] == ["config.json", "metrics.jsonl", "summary.json"]
    assert all(hashlib.sha256((finished / name).read_bytes()).hexdigest() == sum_ for sum_, name in sums)


@pytest.mark.parametrize("summary", ["{", None, "changed", '{"best_epoch": "\\u001b", "test": null}'])
def test_a_finished_run_with_a_damaged_summary_is_tested_again(
    finished: Path, copy: Path, dataset: gs.Dataset, summary: str | None
) -> None:
    path = copy / "summary.json"
    if summary is None:
        path.unlink()
    else:
        path.write_text(path.read_text().replace("0.", "1.", 1) if summary == "changed" else summary)
    assert RunFolder(copy).damage() != ""
    with pytest.warns(DamageWarning, match="tested again"):
        resume(dataset, copy)
    same_run(finished, copy)
    assert (copy / "DONE").read_bytes() == (finished / "DONE").read_bytes()


def test_what_a_killed_process_left_is_removed_and_metrics_are_written_again(
    finished: Path, copy: Path, dataset: gs.Dataset
) -> None:
    os.truncate(copy / "metrics.jsonl", 300)
    (copy / ".metrics.jsonl.new").write_text("half a li")
    place = copy / "checkpoints"
    (place / ".epoch-0003-iteration-0000").mkdir()  # half removed
    os.mkfifo(place / ".epoch-0001-iteration-0000")
    (place / ".epoch-0001-iteration-0001").symlink_to(finished)
    resume(dataset, copy)
    assert not list(copy.rglob(".*"))
    same_run(finished, copy)


def test_a_damaged_last_checkpoint_trains_that_epoch_again(finished: Path, copy: Path, dataset: gs.Dataset) -> None:
    flip(copy / "checkpoints" / LAST / "tensors.safetensors", -1)
    with pytest.warns(DamageWarning, match=r"epoch-0002-\S+ is used"):
        run = gs.load_run(copy)
    assert len(run.metrics) == 2 and (copy / "DONE").exists()  # looking at a run changes nothing
    with pytest.warns(DamageWarning):
        resume(dataset, copy)
    assert (copy / "checkpoints" / f"{LAST}.damaged").is_dir()
    same_run(finished, copy)
    resume(dataset, copy)  # without a warning


def test_a_damaged_checkpoint_in_the_middle_of_an_epoch(finished: Path, dataset: gs.Dataset, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        gs.train(learner(), dataset, tmp_path, display=StopAt(2, 1), **TINY)  # noticed after the second iteration
    flip(checkpoints.listing(tmp_path / "checkpoints")[-1] / "tensors.safetensors", -5)
    with pytest.warns(DamageWarning, match=r"epoch-0002-iteration-0002 is damaged: .*epoch-0002-iteration-0000"):
        resume(dataset, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_a_damaged_best_epoch_stops_the_test(copy: Path, dataset: gs.Dataset) -> None:
    flip(copy / "checkpoints" / "epoch-0001-iteration-0000" / "tensors.safetensors", -1)
    (copy / "DONE").unlink()
    (copy / "summary.json").unlink()
    damaged = r"epoch-0001-\S+ is damaged"
    with pytest.raises(Damaged, match=damaged):
        resume(dataset, copy)
    assert not (copy / "DONE").exists() and not (copy / "summary.json").exists()
    with pytest.raises(Damaged, match=damaged):
        gs.load_run(copy).state(1)
    gs.load_run(copy).state(2)


def test_a_lost_best_epoch_is_named_as_soon_as_the_run_is_resumed(
    copy: Path, dataset: gs.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(copy / "checkpoints" / Progress(1).name)
    with pytest.warns(DamageWarning, match="no checkpoint of epoch 1; .* the result of the run stands"):
        resume(dataset, copy)
    monkeypatch.setattr(train._Run, "finish", lambda self: None)  # before any more training
    with pytest.warns(DamageWarning, match=r"no checkpoint of epoch 1; .* the test needs it"):
        resume(dataset, copy, epochs=4)
    with pytest.raises(gs.UserError, match="no checkpoint of epoch 1"):
        gs.load_run(copy).state(1)


def test_a_finished_run_names_a_damaged_checkpoint_of_its_best_epoch(copy: Path, dataset: gs.Dataset) -> None:
    """D11: it said nothing, and who used the run later found out."""
    before, best = (copy / "summary.json").read_bytes(), gs.load_run(copy).best_epochs
    others = [copy / "checkpoints" / Progress(epoch).name / "tensors.safetensors" for epoch in best]
    if best[1] != 3:  # the newest one is read in any case
        flip(others[1], 100)
        resume(dataset, copy)  # only the best one is for use
    flip(others[0], 100)
    with pytest.warns(DamageWarning, match=f"epoch-000{best[0]}-\\S+ is damaged: .* the result of the run stands"):
        resume(dataset, copy)
    assert (copy / "summary.json").read_bytes() == before


def test_a_checkpoint_of_another_run_is_not_taken_for_ours(copy: Path, dataset: gs.Dataset, tmp_path: Path) -> None:
    gs.train(learner(), dataset, tmp_path / "other", **TINY | {"seed": 1})
    for name in (LAST, Progress(1).name):
        shutil.rmtree(copy / "checkpoints" / name)
        shutil.copytree(tmp_path / "other" / "checkpoints" / name, copy / "checkpoints" / name)
    with pytest.warns(DamageWarning, match=r"epoch-0003-\S+ is damaged: .* other options"):
        run = gs.load_run(copy)
    assert len(run.metrics) == 2
    with pytest.raises(Damaged, match="other options than config"):
        run.state(1)


def test_a_run_without_its_checkpoints_is_not_started_again(copy: Path, dataset: gs.Dataset) -> None:
    shutil.rmtree(copy / "checkpoints")
    before = {path: path.read_bytes() for path in copy.iterdir()}
    with pytest.raises(gs.UserError, match="checkpoints are gone"):
        resume(dataset, copy)
    assert {path: path.read_bytes() for path in copy.iterdir()} == before


def test_a_run_whose_checkpoints_are_all_damaged_is_left_alone(copy: Path, dataset: gs.Dataset) -> None:
    for path in checkpoints.listing(copy / "checkpoints"):
        flip(path / "checkpoint.json", 30)
    before = sorted(path.name for path in copy.rglob("*"))
    with pytest.raises(Damaged, match="all 3 in"):
        resume(dataset, copy)
    assert sorted(path.name for path in copy.rglob("*")) == before


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.pop(name)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], object]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


MOMENT = "adam/exp_avg/params/head.weight"
UNFIT: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no log": (without("log"), "log is nothing"),
    "faults of another shape": (changed("faults", lambda faults: faults[None]), "faults is"),
    "weights of another type": (changed("params/head.weight", lambda w: w.double()), "params/head.weight is float64"),
    "a moment of another shape": (changed(MOMENT, lambda moment: moment.flatten()), "exp_avg is float32"),
    "a moment without its step": (without(MOMENT.replace("exp_avg", "step")), "step is nothing"),
    "a moment that is not finite": (changed(MOMENT, lambda moment: moment * torch.nan), "is not finite"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_tensors_that_do_not_fit_raise_an_error_before_any_is_used(copy: Path, dataset: gs.Dataset, kind: str) -> None:
    """In a checkpoint whose checksums are right: somebody else wrote it."""
    change, message = UNFIT[kind]
    tensors = safetensors.load_file(copy / "checkpoints" / LAST / "tensors.safetensors")
    change(tensors)
    rewrite_tensors(copy / "checkpoints" / LAST, safetensors.save(tensors))
    with pytest.raises(gs.UserError, match=message):
        resume(dataset, copy, epochs=4)


@pytest.mark.parametrize("plant", ["link", "pipe"])
def test_links_and_pipes_where_we_write_are_not_followed(dataset: gs.Dataset, tmp_path: Path, plant: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "thesis").write_text("years of work")
    if plant == "link":
        (tmp_path / "run" / ".config.json.new").symlink_to(tmp_path / "thesis")
    else:
        os.mkfifo(tmp_path / "run" / ".config.json.new")
    options = TINY | {"epochs": 1, "iterations": 1, "test_tasks": 0}
    gs.train(learner(), dataset, tmp_path / "run", **options)  # as after a start that was killed
    assert (tmp_path / "thesis").read_text() == "years of work"
    assert not (tmp_path / "run" / "config.json").is_symlink() and not list((tmp_path / "run").rglob(".*"))


def test_no_flipped_bit_of_the_configuration_goes_unnoticed(copy: Path) -> None:
    run = RunFolder(copy)
    whole, right = (copy / "config.json").read_bytes(), run.options()
    unnoticed = []
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << (at * 5 % 7)
        (copy / "config.json").write_bytes(flipped)
        try:
            content = run.options()
        except gs.UserError:
            continue
        if content != right and set(content) == set(right):  # an option with another name raises an error later
            unnoticed.append(at)
    assert not unnoticed, unnoticed


def as_command_line(path: Path, **different: Any) -> None:
    """Let the configuration of a run from Python look like one of the command line."""
    content = verify_checksum(json.loads(path.read_text()))
    del content["fingerprint"]
    path.write_text(json.dumps(add_checksum({**content, **different})))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: rewrite(path, version=7), "version 7, this one reads 1"),
        (lambda path: path.write_text('{"model_type": "bert"}'), "has no version"),
        (lambda path: path.write_text('{"version": 1, "epochs": "many"}'), "epochs is 'many'"),
        (lambda path: path.write_text("[" * 100_000), "nested"),
        (lambda path: as_command_line(path, method="maml", colour="red"), "colour"),
        (lambda path: as_command_line(path, method="os.system"), "method is 'os.system', not one of maml"),
        (lambda path: as_command_line(path, method="maml", arm="nobody"), "one of original"),
    ],
)
def test_configurations_of_something_else(copy: Path, change: Callable[[Path], object], message: str) -> None:
    change(copy / "config.json")
    with pytest.raises(gs.UserError, match=message):
        gs.load_run(copy)
